"""`flex_attention`: checks and plans a call (call/prepare.py), and binds its primitives (passes/autodiff.py).

A backend is chosen when a primitive is lowered for a platform; the reference implementation alone runs here.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.reference.definition import reference_attention
from flexjax.call import expectations, float8_scales
from flexjax.call.arguments import Arguments, Keywords, describe_call, with_signature
from flexjax.call.documents import by_documents
from flexjax.call.dropout import dense_keep, key_words
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.call.tolerance import check_score_bound
from flexjax.context import call as context_call
from flexjax.context.context_parallel import ContextParallel
from flexjax.errors import add_note_once, bad_argument, kind_of, public
from flexjax.ir.origin import indices_of
from flexjax.mod_tools.settings import check_finite, own, users
from flexjax.passes import dispatch
from flexjax.passes.autodiff import attention
from flexjax.plan.kernel_plan import Results
from flexjax.plan.lengths import NONE
from flexjax.trace.callbacks import run_callbacks
from flexjax.trace.lift_numpy import lift_numpy
from flexjax.trace.trace_mod import call_on_arrays
from flexjax.types import ArrayArgument, AuxOutput, AuxRequest, Implementations, Operand, ScoreMod, Weights

Array = jax.Array


@typing.overload
def flex_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    *,
    return_aux: None = None,
    implementation: Implementations | None = None,
    context: ContextParallel | None = None,
    **keywords: typing.Unpack[Keywords[ArrayArgument]],
) -> Array: ...


@typing.overload
def flex_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    *,
    return_aux: AuxRequest,
    implementation: Implementations | None = None,
    context: ContextParallel | None = None,
    **keywords: typing.Unpack[Keywords[ArrayArgument]],
) -> tuple[Array, AuxOutput]: ...


@public
@own
@with_signature(Arguments, Keywords)
def flex_attention(
    query: Operand,
    key: Operand,
    value: Operand,
    *,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    context: ContextParallel | None = None,
    **keywords: typing.Unpack[Keywords[ArrayArgument]],
) -> Array | tuple[Array, AuxOutput]:
    """Attention with a score function and a mask function written in plain JAX.

        p = softmax(where(mask, score_mod(scale * query . key), -inf));  out = p . value

    query        [B, T, N, D] (layout "BTNH") or [B, N, T, D] ("BNTH"); float64, float32, bfloat16, float16 or
                 float8_e4m3fn. A Quantized stands for float8 numbers times scales
    key, value   [B or 1, S, M, D] and [B or 1, S, M, E], same dtype; M divides N, query head n reads head n // (N // M)
    score_mod    score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars; h is the query head
    weights      in place of softmax: weights(score, b, h, q_idx, kv_idx) -> weight of a value, of the score after
                 score_mod, or a Weights with a divisor of each row (docs/weights.md); 0 where the score is -inf
    mask_mod     mask_mod(b, h, q_idx, kv_idx) -> bool, on scalars, True where the query attends to the key
    block_mask   in place of mask_mod: a block mask that `create_block_mask` made, which several calls can share
    scale        multiplies the dot product; default 1 / sqrt(D). A Python or numpy number is compiled into the kernel.
                 A jax scalar may be traced and gets a gradient
    sinks        [N] logits: one more column of the softmax, without a value; lse includes it
    layout       "BTNH" or "BNTH", the order of the axes of query, key, value, the extra features and out
    return_aux   AuxRequest(lse=, max_scores=, total=, expectations=, lost=): also return an AuxOutput
    implementation  None (the first backend that accepts the call), "xla", "mosaic_gpu", "mosaic_tpu", "reference", or
                 several, which are asked in this order
    kernel_options  KernelOptions: tile sizes, split-KV, instruction, determinism, simulation
    dropout      Dropout(rate, key): each probability is set to 0 with that chance; lse is computed before dropout
    query_extra, key_extra  [B, T, N, R] and [B or 1, S, K, R], K divides N: query_extra . key_extra is added to the
                 dot product before `scale` multiplies it
    query_seq_lengths, key_value_seq_lengths  int32 [B], or an int for all: how many queries and keys of each batch
                 entry exist, clipped to 0 .. T and 0 .. S. They may be traced; blocks past a length are skipped
    origin       Origin: what is added to b, h, q_idx and kv_idx where the arrays are a slice of a larger attention: a
                 shard, a chunk of a prefill, a decode step. None: that of block_mask, or nothing
    tolerance    a Python number from 0 to below 0.5: blocks of keys that provably hold next to nothing of a row are
                 skipped, in both passes. The probabilities that a row loses sum to at most `tolerance`, whatever query
                 and key are: out moves by at most 2 * tolerance * max|value| / (1 - dropout rate), lse by at most
                 -log1p(-tolerance). Gradients are those of the attention over the blocks that stay: against the whole
                 they are off absolutely, not relatively, and an element of a captured array that every row leaves out
                 gets 0. What score_mod sets to -inf is skipped at 0 too. None: nothing is skipped (docs/tolerance.md).
                 Beside `weights` it is absolute: the sizes of the weights that a row loses sum to at most `tolerance`,
                 so the sum of weights * value moves by at most tolerance * max|value| / (1 - dropout rate), and total
                 by `tolerance`, before a divisor; gradients of what is lost have no bound
    score_bound  beside `tolerance`, a bound of |scale * query . key|, extra features included: a number, or an array of
                 up to four dims [B, N, query blocks, key blocks], each of them or 1. A wrong one gives a wrong result;
                 implementation="reference" checks it
    precision    how exactly float32 is multiplied, as in jax.lax.dot_general: None (jax.default_matmul_precision),
                 "default", "high", "highest", a jax.lax.Precision or DotAlgorithmPreset (docs/performance.md)
    context      ContextParallel: the tokens of query, key and value are split over mesh axes and permuted by a layout.
                 Lengths count in the order of the sequence; `origin` may give batch and head, but not query or key

    Returns out [B, T, N, E] in the layout and dtype of query (bfloat16 for float8), or (out, AuxOutput) with
    return_aux. Gradients reach query, key, value, scale, sinks, the extra features and every floating array that
    score_mod and weights capture. Scores are float32 (float64 for float64 inputs). Raises ValueError for arguments that
    do not fit, and NotImplementedError, with each backend's reason, if no backend accepts the call.

    Example, a learned bias for each head and distance:

        table = jnp.zeros((N, 2 * T - 1))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx - kv_idx + T - 1]

        out = flex_attention(query, key, value, score_mod=score_mod, mask_mod=flexjax.masks.causal)

    What retraces. Under jit, only what jit itself retraces for. Outside of jit, mods are read at each call, and what is
    new is compiled: shapes, operations, Python numbers in a mod. See docs/performance.md.

    What is fast. Calls inside jit, inputs of 16 bits on a GPU, and mask_mod, because the blocks that it hides are
    skipped. See docs/performance.md.

    How calls are sharded. Batch and heads that mesh axes split stay split, without a collective. Tokens stay split with
    context=; otherwise they are gathered, with a FallbackWarning. See docs/many_devices.md.

    float8. Mods see scores of the dequantised numbers, and there are no gradients. See docs/performance.md.

    Hidden positions. A row that sees no key gives 0, lse -inf (with sinks: the logit of its head) and zero gradients.
    NaN and infinity in key and value at a hidden position can reach the output and gradients, because 0 * NaN is NaN.
    Zero such entries before the call, jnp.where(valid[:, :, None, None], value, 0), or hide them by
    key_value_seq_lengths, past which nothing is read. See docs/semantics.md.
    """
    arguments = Arguments(query, key, value, return_aux=return_aux, **keywords)
    text = functools.partial(describe_call, "flex_attention", arguments)
    try:
        names = dispatch.candidates(implementation)
        if context is not None:
            given = context_call.Given(arguments, names, text())
            return with_aux(_checked(context_call.attention(context, given)), arguments)
        with run_callbacks(names == (dispatch.REFERENCE,)):
            call = prepare(arguments)
        if dispatch.runs_everywhere(call.plan, names) == dispatch.REFERENCE:
            results = _reference(call, arguments)
        else:
            results = attention(call.problem(names, text()), call.operands)
        _checked(results)
    except Exception as error:
        add_note_once(error, text())
        raise
    return with_aux(results, arguments, None if call.skipped is None else call.skipped.lost)


def _checked(results: Results) -> Results:
    check_finite("the result of flex_attention", results.out, results.lse, results.max_scores)
    return results


class Returning(typing.Protocol):
    """The arguments that say what a call returns."""

    @property
    def weights(self) -> ScoreMod | Weights | None: ...
    @property
    def return_aux(self) -> AuxRequest | None: ...


def with_aux(results: Results, arguments: Returning, lost: Array | None = None) -> Array | tuple[Array, AuxOutput]:
    """out, divided by the divisor of its weights, or with return_aux (out, AuxOutput)."""
    weights, return_aux = arguments.weights, arguments.return_aux
    out, statistic = results.out, results.lse
    if isinstance(weights, Weights) and weights.divisor is not None:
        zero = _divisor(weights, jax.lax.stop_gradient(statistic)) == 0
        out = _divided(out, zero, _divisor(weights, _without_slope(zero, statistic)), statistic.dtype)
    if return_aux is None:
        return out
    return out, AuxOutput(
        statistic if return_aux.lse else None,
        results.max_scores if return_aux.max_scores else None,
        statistic if return_aux.total else None,
        None if results.expectations is None else expectations.named(return_aux, results.expectations),
        None if lost is None or not return_aux.lost else jax.lax.stop_gradient(lost),
    )


# programs, because the eager backward passes of their operations would transfer zeros
@jax.jit
def _without_slope(zero: Array, totals: Array) -> Array:
    """The totals, constant where the divisor is 0: a root has an infinite slope there, and 0 times it none."""
    return jnp.where(zero, jax.lax.stop_gradient(totals), totals)


@functools.partial(jax.jit, static_argnums=3)
def _divided(out: Array, zero: Array, divisor: Array, dtype: jax.typing.DTypeLike) -> Array:
    safe = jnp.where(zero, jnp.ones_like(divisor), divisor)[..., None]
    return jnp.where(zero[..., None], 0, out.astype(dtype) / safe).astype(out.dtype)


def _divisor(weights: Weights, totals: Array) -> Array:
    """The divisor of each row, with as many axes as `totals`, of its lengths or 1."""
    assert weights.divisor is not None
    given = call_on_arrays("weights.divisor", weights.divisor, totals)
    a_number = isinstance(given, Array | np.ndarray | np.generic | int | float)
    shape, dtype = (np.shape(given), jnp.result_type(given)) if a_number else ((), None)  # type: ignore[arg-type]
    real = dtype is not None and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
    of_rows = zip(reversed(shape), reversed(totals.shape), strict=False)
    if not real or len(shape) > totals.ndim or any(n not in (1, rows) for n, rows in of_rows):
        got = f"shape {shape}" if real else f"{dtype}{list(shape)}" if a_number else kind_of(given)
        raise bad_argument(
            "weights.divisor",
            f"a function that returns {got}",
            f"a number for each total of shape {totals.shape}",
            "Keep the axes of a reduction (keepdims=True)." if real else "Return floats, one for each total.",
        )
    return jnp.expand_dims(jnp.asarray(given), tuple(range(totals.ndim - len(shape))))


def _reference(call: PreparedCall, arguments: Arguments) -> Results:
    """The results of `call` by the dense implementation of reference/definition.py."""
    # mods, block mask, dropout and a traced scale are read as the user gave them, not as the programs that they became
    plan, operands = call.plan, call.operands
    arguments, _ = by_documents(arguments, plan.batch, plan.q_len, plan.kv_len)
    score_mod, mask_mod, block_mask = arguments.score_mod, arguments.mask_mod, arguments.block_mask
    if call.skipped is not None and call.skipped.mask is not None:
        mask_mod, block_mask = None, call.skipped.mask
    scale, dropout, keep = arguments.scale, arguments.dropout, None
    origin = call.origin
    indices = None
    if origin is not None:
        indices = indices_of(origin, (plan.batch, plan.q_heads, plan.q_len, plan.kv_len))
    if dropout is not None and dropout.rate:
        shape = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        keep = dense_keep(key_words(dropout.key), dropout.rate, shape, dropout.broadcast, indices)
    query, key, value = operands.query, operands.key, operands.value
    if plan.float8:
        query, key, value = float8_scales.dequantised((query, key, value), arguments)
    dense = functools.partial(
        reference_attention,
        query,
        key,
        scale=scale if isinstance(scale, Array) else plan.scale,
        layout=plan.layout,
        query_extra=operands.query_extra,
        key_extra=operands.key_extra,
        lengths=operands.lengths or NONE,
    )
    if call.skipped is not None and call.skipped.bound is not None:
        whole = call.skipped.whole
        excess = dense(value=value, score_mod=call.skipped.excess, mask=None if whole is None else whole.to_mask())[2]
        value = check_score_bound(value, excess)
    out, lse, top, *found = dense(
        value=value,
        score_mod=None if score_mod is None else users(lift_numpy(score_mod)[0]),
        weights=None if call.weights is None else users(lift_numpy(call.weights.function)[0]),
        expectations=[users(lift_numpy(f)[0]) for f in expectations.functions_of(arguments.return_aux).values()],
        mask_mod=None if mask_mod is None else users(lift_numpy(mask_mod)[0]),
        indices=indices,
        mask=None if block_mask is None else block_mask.to_mask(),
        sinks=operands.sinks,
        dropout_rate=0.0 if dropout is None else dropout.rate,
        dropout_keep=keep,
    )
    dtype = plan.score_dtype
    top = top.astype(dtype) if plan.max_scores else None
    return Results(out.astype(plan.dtype), lse.astype(dtype), top, None, *(x.astype(dtype) for x in found))
