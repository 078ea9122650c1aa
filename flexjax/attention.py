"""`flex_attention`: checks and plans a call (prepare.py), and binds the primitives of autodiff.py that compute it.

A backend is chosen later, when a primitive is lowered for a platform; the reference implementation alone runs here. Every error
that leaves here has the user's call as a note.
"""

import functools
import typing

import jax

from flexjax import context_call, dispatch, float8_scales
from flexjax.autodiff import attention
from flexjax.block_mask.block_mask import BlockMask
from flexjax.call_arguments import Arguments, describe_call
from flexjax.dropout import dense_keep, key_words
from flexjax.errors import add_note_once
from flexjax.ir.origin import OriginTable, indices_of
from flexjax.parallel.context_parallel import ContextParallel
from flexjax.plan.kernel_plan import Results
from flexjax.plan.lengths import NONE
from flexjax.prepare import Call, prepare
from flexjax.reference import reference_attention
from flexjax.trace.lift_numpy import lift_numpy
from flexjax.types import (
    ArrayArgument,
    AuxOutput,
    AuxRequest,
    Implementations,
    KernelOptions,
    Layout,
    MaskMod,
    Origin,
    Precision,
    ScoreMod,
)

Array = jax.Array


@typing.overload
def flex_attention(
    query: ArrayArgument,
    key: ArrayArgument,
    value: ArrayArgument,
    *,
    return_aux: None = None,
    implementation: Implementations | None = None,
    context: ContextParallel | None = None,
    **arguments: typing.Unpack[Arguments[ArrayArgument]],
) -> Array:
    """The type of a call without return_aux: out alone. The function itself is documented below."""
    ...


@typing.overload
def flex_attention(
    query: ArrayArgument,
    key: ArrayArgument,
    value: ArrayArgument,
    *,
    return_aux: AuxRequest,
    implementation: Implementations | None = None,
    context: ContextParallel | None = None,
    **arguments: typing.Unpack[Arguments[ArrayArgument]],
) -> tuple[Array, AuxOutput]:
    """The type of a call with return_aux: (out, extra results). The function itself is documented below."""
    ...


def flex_attention(
    query: ArrayArgument,
    key: ArrayArgument,
    value: ArrayArgument,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | ArrayArgument | None = None,
    sinks: ArrayArgument | None = None,
    layout: Layout = "BTNH",
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayArgument | None = None,
    broadcast_dropout: bool = False,
    query_extra: ArrayArgument | None = None,
    key_extra: ArrayArgument | None = None,
    query_seq_lengths: int | ArrayArgument | None = None,
    key_value_seq_lengths: int | ArrayArgument | None = None,
    origin: Origin | OriginTable | None = None,
    precision: Precision = None,
    query_scales: ArrayArgument | None = None,
    key_scales: ArrayArgument | None = None,
    value_scales: ArrayArgument | None = None,
    context: ContextParallel | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention with a score function and a mask function written in plain JAX.

        p = softmax(where(mask, score_mod(scale * query . key), -inf));  out = p . value

    query        [B, T, N, D] (layout "BTNH") or [B, N, T, D] ("BNTH"); float64, float32, bfloat16, float16 or float8_e4m3fn
    key, value   [B, S, M, D] and [B, S, M, E], same dtype; M divides N, query head n reads head n // (N // M). A batch of 1 serves
                 every batch entry
    score_mod    score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars; h is the query head
    mask_mod     mask_mod(b, h, q_idx, kv_idx) -> bool, on scalars, True where the query attends to the key. The call
                 computes its block mask
    block_mask   in place of mask_mod (a call has at most one of them): a block mask that `create_block_mask` made
    scale        multiplies the dot product; default 1 / sqrt(D). A Python or numpy number is compiled into the kernel. A jax
                 scalar may be traced and gets a gradient, and a new value compiles nothing
    sinks        [N] logits: one more column of the softmax, without a value; lse includes it
    layout       "BTNH" or "BNTH", the order of the axes of query, key, value, the extra features and out
    return_aux   AuxRequest(lse=, max_scores=): also return an AuxOutput
    implementation  None (the first backend that accepts the call), "xla", "mosaic_gpu", "mosaic_tpu", "reference", or several,
                 which are asked in this order
    kernel_options  KernelOptions: tile sizes, split-KV, the matrix-multiply instruction, bitwise reproducibility, simulation
    dropout_rate, dropout_key  the chance with which each probability is set to 0, and the jax random key that says which are. The others
                 are divided by 1 - dropout_rate. The backward pass drops the same ones; lse is computed before dropout
    broadcast_dropout  True: all batch entries and heads drop the same positions, which is flax's default
    query_extra, key_extra  [B, T, N, R] and [B, S, K, R], K divides N: query_extra . key_extra is added to the dot product before
                 `scale` multiplies it. As with key, a key_extra of batch 1 serves every batch entry
    query_seq_lengths, key_value_seq_lengths  int32 [B], or an int for all: how many queries and keys of each batch entry exist,
                 clipped to 0 .. T and 0 .. S. They may be traced, and new values compile nothing. Blocks past a length are skipped
    origin       Origin: what is added to b, h, q_idx and kv_idx before score_mod, mask_mod and dropout see them, where the arrays are a
                 slice of a larger attention: a shard, a chunk of a prefill, a decode step. None: that of block_mask, or nothing
    precision    how exactly float32 inputs are multiplied, as in jax.lax.dot_general: None (jax.default_matmul_precision), "default",
                 "high", "highest", a jax.lax.Precision or a jax.lax.DotAlgorithmPreset. See below
    query_scales, key_scales, value_scales  what float8 queries, keys and values are multiplied by: float32 [B, N], [B, M] and [B, M], or
                 with a scale for each of n blocks of tokens [B, n, N or M] (BNTH: [B, N or M, n]), positive numbers. See below
    context      ContextParallel: the tokens of query, key and value are split over mesh axes and permuted by a layout. Lengths
                 count in the order of the sequence. With it, `origin` may give batch and head, but not query or key

    Returns out [B, T, N, E] in the layout and dtype of query (bfloat16 for float8), or (out, AuxOutput) with return_aux. Gradients reach
    query, key, value, scale, sinks, the extra features and every floating array that score_mod captures. Scores are float32 (float64 for
    float64 inputs). Raises ValueError for arguments that do not fit, and NotImplementedError, with each backend's reason, if no
    backend accepts the call.

    Example, a learned bias for each head and distance:

        table = jnp.zeros((N, 2 * T - 1))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx - kv_idx + T - 1]

        out = flex_attention(query, key, value, score_mod=score_mod, mask_mod=flexjax.masks.causal)

    What retraces. Under jit, nothing but what jit itself retraces for: other shapes, dtypes and static arguments. Outside of
    jit, each call traces the mods again and compiles only what is new: other shapes, a function with other operations, another
    Python number in a function (capture jnp.asarray(number) if it changes from call to call). New values of captured arrays and
    a function that is defined again compile nothing.

    Precision. float32 inputs are multiplied at least as exactly as `precision` says, in both passes; sums and softmax are always
    float32, and so are mods that read no float64. None follows jax.default_matmul_precision where the call is traced. For
    "default", "high" and algorithms up to "BF16_BF16_F32_X3" and "TF32_TF32_F32", the Hopper kernels write each product as a sum
    of three products of bfloat16 parts. Its relative error is 2^-17; that of TF32, XLA's default on such a GPU, is 2^-11. The
    Hopper kernels refuse "highest", and the kernels for other GPUs all float32; xla runs both, and passes the precision to XLA.
    The TPU kernels always multiply float32 at "highest". With bfloat16 and float16 inputs `precision` has no effect: their products
    are exact and summed in float32.

    float8. query, key and value of float8_e4m3fn stand for themselves times their scales, positive numbers whose batch may be 1 and whose
    blocks all have the same length; mods see scores of the dequantised numbers. On Hopper both products are of float8, and the softmax
    weights are rounded to it: an error of about 2% of out and of up to 0.04 of lse, and a key whose score is 11 below the row's largest
    may count as 0. The call computes in bfloat16, in which float8 numbers are exact, at head dims up to 64, with few queries (decoding), with
    max_scores, with scales of values by block, and on every other kernel and backend. There are no gradients. Dropout and context= are
    refused; scales cannot be combined with an origin or extra features.

    What is fast. Calls inside jit; bfloat16 and float16 on a GPU; hiding positions with mask_mod, because blocks that it hides
    are skipped and blocks of -inf from score_mod are not; dilated masks written as `... & ((q_idx - kv_idx) % m == 0)`, which run as m
    shorter sequences (not with origin or lengths, nor where mask_mod reads b, h or a captured array, or score_mod reads an array at q_idx
    or kv_idx); one block_mask for all layers that share it; reading captured arrays
    at q_idx, kv_idx or q_idx - kv_idx + c, because those reads are slices and others are gathers. `flexjax.explain` says which
    backend runs a call, and `flexjax.autotune` finds its fastest tiles.

    How calls are sharded. A mesh axis of type Explicit that splits the batch or the heads of query stays split: each device
    computes its part, forward and backward, without a collective if key and value are split the same way, and mods see the
    indices of the whole problem. The same holds under jit for axes of type Auto, on CPUs and GPUs. A split of the tokens is kept if
    context= names its axes. Otherwise tokens that are split, and a head dim that is, are gathered, and a FallbackWarning says how
    many bytes, on any platform, once for each message. Inside jax.shard_map a call sees the arrays of one device; origin says where they
    lie in the whole problem.

    Hidden positions. A row that the mask hides as a whole, or whose scores are all -inf, gives 0, lse -inf (with sinks: the logit of its head) and zero gradients of
    query, key and value. A row whose scores score_mod sets to a finite number (-1e10) is not hidden: it averages the values. lse is one
    float32, so a number c that is added to all scores of a row makes its gradients wrong by up to |c| * 6e-8 of themselves, and from |c| of
    1e8 on by up to the number of its keys; hide with mask_mod or -inf instead. NaN and infinity in key and value at a hidden position can
    reach the output (from value) and gradients (from both), because 0 * NaN is NaN, as in jax.nn.dot_product_attention; only blocks that
    are skipped as a whole are never read. Zero such entries before the call:
    jnp.where(valid[:, :, None, None], value, 0), or hide them by key_value_seq_lengths.

    Lengths. Queries and keys at or past the length of their batch entry do not exist, whatever their slots hold, NaN and infinity
    included: out is 0 and lse -inf in such a row (also with sinks), gradients of such slots are 0, and cotangents of such rows are
    ignored. Tiles past a length are not computed. Lengths count from 0 in the arrays, also with an origin. `origin=Origin(query="end")` places the last query at
    the last key, as in decoding with a cache:

        out = flex_attention(query, keys, values, mask_mod=masks.causal, origin=Origin(query="end"), key_value_seq_lengths=lengths)
    """
    arguments: Arguments[ArrayArgument] = {
        "score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask, "scale": scale, "sinks": sinks,
        "layout": layout, "kernel_options": kernel_options, "dropout_rate": dropout_rate, "dropout_key": dropout_key,
        "broadcast_dropout": broadcast_dropout, "query_extra": query_extra, "key_extra": key_extra,
        "query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths, "origin": origin,
        "precision": precision, "query_scales": query_scales, "key_scales": key_scales, "value_scales": value_scales,
    }  # fmt: skip
    text = functools.partial(describe_call, "flex_attention", query, key, value, return_aux, arguments)
    try:
        names = dispatch.candidates(implementation)
        if context is not None:
            given = context_call.Given(query, key, value, return_aux, typing.cast(dict, arguments), names, text())
            return with_aux(context_call.attention(context, given), return_aux)
        call = prepare(query, key, value, return_aux=return_aux, **arguments)
        if dispatch.runs_everywhere(call.plan, names) == dispatch.REFERENCE:
            results = _reference(call, arguments)
        else:
            results = attention(call.problem(names, text()), call.operands)
    except Exception as error:
        add_note_once(error, text())
        raise
    return with_aux(results, return_aux)


def with_aux(results: Results, return_aux: AuxRequest | None) -> Array | tuple[Array, AuxOutput]:
    """What flex_attention and paged_attention return: out, or with return_aux (out, AuxOutput), whose fields that return_aux does not
    ask for are None.
    """
    if return_aux is None:
        return results.out
    return results.out, AuxOutput(
        results.lse if return_aux.lse else None, results.max_scores if return_aux.max_scores else None
    )


def _reference(call: Call, arguments: Arguments[ArrayArgument]) -> Results:
    """The Results of `call` by the dense implementation of reference.py (implementation="reference").

    call        the prepared call, of which plan, operands and origin are read
    arguments   the keywords of flex_attention. The mods, the block mask, dropout and a scale that is a jax scalar are read from here as
                the user gave them, not the programs and captured arrays that they became

    lse and max_scores are in the score dtype of the plan; max_scores is None if the plan does not ask for it, and rounding always is.
    """
    plan, operands, get = call.plan, call.operands, arguments.get
    score_mod, mask_mod, block_mask = get("score_mod"), get("mask_mod"), get("block_mask")
    scale, rate, keep = get("scale"), float(get("dropout_rate", 0.0)), None
    origin = call.origin
    indices = None
    if origin is not None:
        indices = indices_of(origin, (plan.batch, plan.q_heads, plan.q_len, plan.kv_len))
    if rate:
        shape = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        keep = dense_keep(key_words(get("dropout_key")), rate, shape, get("broadcast_dropout", False), indices)
    query, key, value = operands.query, operands.key, operands.value
    if plan.float8:
        query, key, value = float8_scales.dequantised((query, key, value), arguments, plan.layout)
    out, lse, top = reference_attention(
        query,
        key,
        value,
        score_mod=None if score_mod is None else lift_numpy(score_mod)[0],
        mask_mod=None if mask_mod is None else lift_numpy(mask_mod)[0],
        indices=indices,
        mask=None if block_mask is None else block_mask.to_mask(),
        scale=scale if isinstance(scale, Array) else plan.scale,
        sinks=operands.sinks,
        layout=plan.layout,
        query_extra=operands.query_extra,
        key_extra=operands.key_extra,
        dropout_rate=rate,
        dropout_keep=keep,
        lengths=operands.lengths or NONE,
    )
    dtype = plan.score_dtype
    return Results(out.astype(plan.dtype), lse.astype(dtype), top.astype(dtype) if plan.max_scores else None)
