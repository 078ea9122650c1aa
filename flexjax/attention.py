"""`flex_attention`: checks a call, plans it, and binds the primitives of autodiff.py that compute it.

The steps, in order: check the arrays, trace the mods, build or check the block mask, write the plan, bind the forward
primitive. A backend is chosen later, when the primitive is lowered for a platform. Every error that leaves here has the user's
call as a note.

Inputs (check_arguments.py) are the checked arrays of a call with their sizes.

A plan is everything static about one call; operands are its arrays (plan/kernel_plan.py).
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp

from flexjax import context_call, dispatch
from flexjax.autodiff import attention
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import from_traced, trace_placed_mask
from flexjax.check_arguments import Inputs, both_masks, check_block_mask, check_inputs, check_options
from flexjax.dropout import dense_keep, dropout_program, key_words
from flexjax.errors import add_note_once, bad_argument
from flexjax.ir.origin import OriginTable, agree, indices_of, shift_heads, sizes_of, table_of
from flexjax.parallel.context_parallel import ContextParallel
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands, Results
from flexjax.plan.problem import Problem
from flexjax.reference import reference_attention
from flexjax.trace.lift_numpy import lift_numpy
from flexjax.trace.trace_mod import TracedMod, trace_score_mod
from flexjax.types import (
    ArrayArgument,
    ArrayOrShape,
    AuxOutput,
    AuxRequest,
    Implementations,
    KernelOptions,
    Layout,
    MaskMod,
    Origin,
    ScoreMod,
)

Array = jax.Array
A = typing.TypeVar("A", bound=ArrayOrShape)

DEFAULT_BLOCK = 128
"""Block size, in queries and in keys, of a block mask that a call computes from its mask_mod."""


class Arguments(typing.TypedDict, typing.Generic[A], total=False):
    """The keywords of `flex_attention` that say what is computed. Arrays are of type A.

    Two keywords are not here: `return_aux` decides the type of the result, and `implementation` is no part of a plan.
    """

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | None
    scale: float | A | None
    sinks: A | None
    layout: Layout
    kernel_options: KernelOptions | None
    dropout_rate: float
    dropout_key: A | None
    broadcast_dropout: bool
    query_extra: A | None
    key_extra: A | None
    origin: Origin | OriginTable | None


DEFAULTS: Arguments[ArrayArgument] = {"layout": "BTNH", "dropout_rate": 0.0, "broadcast_dropout": False}
"""The keywords of `Arguments` whose default is not None, with their defaults."""


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
    origin: Origin | OriginTable | None = None,
    context: ContextParallel | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention with a score function and a mask function written in plain JAX.

        p = softmax(where(mask, score_mod(scale * query . key), -inf));  out = p . value

    query        [B, T, N, D] (layout "BTNH") or [B, N, T, D] ("BNTH"); float64, float32, bfloat16 or float16
    key, value   [B, S, M, D] and [B, S, M, E], same dtype; M divides N, query head n reads head n // (N // M)
    score_mod    score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars; h is the query head
    mask_mod     mask_mod(b, h, q_idx, kv_idx) -> bool, on scalars, True where the query attends to the key. The call
                 computes its block mask
    block_mask   in place of mask_mod: a block mask that `create_block_mask` made
    scale        multiplies the dot product; default 1 / sqrt(D). A Python or numpy number is compiled into the kernel. A jax
                 scalar may be traced and gets a gradient, and a new value compiles nothing
    sinks        [N] logits: one more column of the softmax, without a value; lse includes it
    layout       "BTNH" or "BNTH", the order of the axes of query, key, value, the extra features and out
    return_aux   AuxRequest(lse=, max_scores=): also return an AuxOutput
    implementation  None (the first backend that accepts the call), "xla", "mosaic_gpu", "mosaic_tpu", "reference", or several,
                 which are asked in this order
    kernel_options  KernelOptions: tile sizes, order of additions, simulation
    dropout_rate, dropout_key  sets each probability to 0 with this chance; the backward pass uses the same mask
    broadcast_dropout  True: all batch entries and heads drop the same positions, which is flax's default
    query_extra, key_extra  [B, T, N, R] and [B, S, K, R], K divides N: adds query_extra . key_extra to the dot product
    origin       Origin: where the arrays lie in the whole problem, whose indices score_mod, mask_mod and dropout see. A block_mask
                 made with an origin brings it along
    context      ContextParallel: the tokens of query, key and value are split over mesh axes and permuted by a layout

    Returns out [B, T, N, E] in the layout and dtype of query, or (out, AuxOutput) with return_aux. Gradients reach query, key,
    value, scale, sinks, the extra features and every floating array that score_mod captures. Scores are float32 (float64 for
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

    What is fast. Calls inside jit; bfloat16 and float16 on a GPU; hiding positions with mask_mod, because blocks that it hides
    are skipped and blocks of -inf from score_mod are not; one block_mask for all layers that share it; reading captured arrays
    at q_idx, kv_idx or q_idx - kv_idx + c, because those reads are slices and others are gathers. `flexjax.explain` says which
    backend runs a call, and `flexjax.autotune` finds its fastest tiles.

    How calls are sharded. A mesh axis of type Explicit that splits the batch or the heads of query stays split: each device
    computes its part, forward and backward, without a collective if key and value are split the same way, and mods see the
    indices of the whole problem. The same holds under jit for axes of type Auto, on CPUs and GPUs. A split of the tokens
    is kept if context= names its axes. Without that, and for a split of the head dim, the arrays are gathered, and a FallbackWarning
    says how many bytes.
    Inside jax.shard_map a call sees the arrays of one device; origin says where they lie in the whole problem.

    Hidden positions. A row that the mask hides as a whole gives 0, lse -inf and zero gradients. A row whose scores score_mod
    sets to a finite number (-1e10) is not hidden: it averages the values. lse cannot hold log(n) beside -1e10, so each entry's
    gradient uses p = 1; hide with mask_mod or -inf instead. NaN and infinity in key and value at a hidden position can reach the
    output (from value) and gradients (from both), because 0 * NaN is NaN, as in jax.nn.dot_product_attention; only blocks that
    are skipped as a whole are never read. Zero such entries before the call: jnp.where(valid[:, :, None, None], value, 0).
    """
    arguments: Arguments[ArrayArgument] = {
        "score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask, "scale": scale, "sinks": sinks,
        "layout": layout, "kernel_options": kernel_options, "dropout_rate": dropout_rate, "dropout_key": dropout_key,
        "broadcast_dropout": broadcast_dropout, "query_extra": query_extra, "key_extra": key_extra,
        "origin": origin,
    }  # fmt: skip
    text = functools.partial(describe_call, "flex_attention", query, key, value, return_aux, arguments)
    try:
        names = dispatch.candidates(implementation)
        if context is not None:
            given = context_call.Given(query, key, value, return_aux, typing.cast(dict, arguments))
            return _with_aux(context_call.attention(context, given, names, text(), prepare), return_aux)
        call = prepare(query, key, value, return_aux=return_aux, **arguments)
        if dispatch.runs_everywhere(call.plan, names) == dispatch.REFERENCE:
            results = _reference(call, arguments)
        else:
            results = attention(call.problem(names, text()), call.operands)
    except Exception as error:
        add_note_once(error, text())
        raise
    return _with_aux(results, return_aux)


def _with_aux(results: Results, return_aux: AuxRequest | None) -> Array | tuple[Array, AuxOutput]:
    """What flex_attention returns."""
    if return_aux is None:
        return results.out
    return results.out, AuxOutput(
        results.lse if return_aux.lse else None, results.max_scores if return_aux.max_scores else None
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of flex_attention, ready to be computed.

    plan       everything static about the call
    operands   its arrays: those that the user gave, captured arrays and block lists
    score      the traced score_mod with its derivative; None if there is none or it is the identity
    origin     where the arrays lie in the whole problem; None: at 0
    """

    plan: KernelPlan
    operands: Operands
    score: TracedMod | None
    origin: OriginTable | None = None

    def problem(self, implementation: tuple[str, ...] | None, text: str = "") -> Problem:
        """The static parameter of the primitives of autodiff.py for this call.

        implementation   names of the backends to ask, in order; None: the default order
        text             the user's call in a line (`describe_call`), for errors and warnings
        """
        derivative, why_not = (None, "") if self.score is None else (self.score.derivative, self.score.why_not)
        return Problem(self.plan, derivative, why_not, implementation, jax.tree.structure(self.operands), text)


def describe_call(
    function: str,
    query: object,
    key: object,
    value: object,
    return_aux: AuxRequest | None,
    arguments: Arguments[A],
) -> str:
    """The user's call in a line, for the notes of errors: "in flex_attention(query=float32[1, 8, 2, 64], ..., mask_mod=causal)".

    function    the name of the function that the user called
    arguments   its other keywords; those with their default are left out. Arrays are shown as dtype and shape, mods by name
    """
    is_default = lambda name, x: x is None or (isinstance(x, str | int | float) and x == DEFAULTS.get(name))
    given = {name: x for name, x in arguments.items() if not is_default(name, x)}
    if return_aux is not None:
        given["return_aux"] = return_aux
    arrays = {"query": query, "key": key, "value": value}
    return f"in {function}({', '.join(f'{name}={_describe(x)}' for name, x in (arrays | given).items())})"


def _describe(x: object) -> str:
    """The value of an argument in at most 80 characters: dtype and shape of an array, name of a function, lengths of a block
    mask, else its repr, or only its type if that is longer.
    """
    if isinstance(x, BlockMask):
        b, h, q_len, kv_len = x.shape
        return f"BlockMask({b}, {h}, {q_len}, {kv_len})"
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is not None and shape is not None:
        return f"{dtype}{list(shape)}"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    text = repr(x)
    return text if len(text) <= 80 else f"{type(x).__name__}"


def prepare(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape,
    *,
    return_aux: AuxRequest | None = None,
    **arguments: typing.Unpack[Arguments[ArrayOrShape]],
) -> Call:
    """Checks the arguments of flex_attention, traces the mods, finds the block mask, and returns the plan and the
    operands.

    The arguments are those of flex_attention; its arrays may be traced (explain and autotune call it under
    jax.eval_shape or with random numbers for shapes). A score_mod that returns its score is left out; a scale that is a
    jax scalar becomes a captured array of the score program, and the plan's scale is then 1. With an origin, the
    programs are those of the whole problem, and the plan and the operands have the origin. Raises ValueError for bad
    arguments.
    """
    get = arguments.get
    layout, sinks = get("layout", "BTNH"), get("sinks")
    options = check_options(return_aux, get("kernel_options"))
    inputs = check_inputs(query, key, value, sinks, layout, get("query_extra"), get("key_extra"))
    scale = _scale(get("scale"), inputs)
    score_dtype = "float64" if inputs.dtype == "float64" else "float32"
    origin = _origin(get("origin"), get("block_mask"), inputs, layout)
    own_sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    sizes = sizes_of(origin, own_sizes)
    score_mod = get("score_mod")
    if isinstance(scale, Array):
        # a jax scalar becomes a captured array of the score function, because a plan holds no array
        if score_mod is None or callable(score_mod):  # trace_score_mod refuses anything else
            score_mod = _scaled(score_mod, scale)
        scale = 1.0
    score = None if score_mod is None else trace_score_mod(score_mod, sizes, score_dtype)
    if score is not None and score.program.results[0] == score.program.inputs[0]:
        score = None  # the identity
    block_mask = _block_mask(get("mask_mod"), get("block_mask"), inputs, origin)
    dropout = dropout_program(
        get("dropout_rate", 0.0), get("dropout_key"), sizes, score_dtype, get("broadcast_dropout", False)
    )
    score, dropout = (None if x is None else _at_origin(x, origin, own_sizes) for x in (score, dropout))
    plan = KernelPlan(
        batch=inputs.batch,
        q_heads=inputs.q_heads,
        kv_heads=inputs.kv_heads,
        q_len=inputs.q_len,
        kv_len=inputs.kv_len,
        head_dim=inputs.head_dim,
        value_dim=inputs.value_dim,
        dtype=inputs.dtype,
        layout=layout,
        scale=scale,
        score=None if score is None else score.program,
        mask=None if block_mask is None else block_mask.program,
        dropout=None if dropout is None else dropout.program,
        blocks=None if block_mask is None else _layout(block_mask),
        has_sinks=sinks is not None,
        extra_dim=inputs.extra_dim,
        extra_heads=inputs.extra_heads,
        max_scores=return_aux is not None and return_aux.max_scores,
        options=options,
        origin=None if origin is None else origin.layout,
    )
    operands = Operands(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        query_extra=inputs.query_extra,
        key_extra=inputs.key_extra,
        sinks=inputs.sinks,
        score_captures=() if score is None else score.arrays,
        mask_captures=() if block_mask is None else block_mask.captures,
        dropout_captures=() if dropout is None else dropout.arrays,
        lists=None if block_mask is None else _lists(block_mask),
        origin=None if origin is None else origin.starts,
    )
    return Call(plan, operands, score, origin)


def _origin(
    given: Origin | OriginTable | None, block_mask: BlockMask | None, inputs: Inputs, layout: Layout
) -> OriginTable | None:
    """The origin of the call: the one given or that of the block mask. Raises ValueError where they differ."""
    origin = table_of(given, inputs.batch, (inputs.q_len, inputs.kv_len))
    if block_mask is None:
        return origin
    check_block_mask(block_mask, inputs, layout)
    if origin is None:
        return block_mask.origin
    if block_mask.origin is None:
        if block_mask.program is None:
            sizes = block_mask.block_size
            if origin.layout is not None and not origin.layout.tile_fits(*sizes):
                raise bad_argument(
                    "block_mask", f"made of blocks of {sizes}", "blocks that divide the runs of the origin",
                    "Use smaller blocks.",
                )  # fmt: skip
            return origin  # lists alone, which count from 0 in the arrays of the call
        raise bad_argument(
            "block_mask", "made without an origin beside `origin`", "one made with the same origin",
            "Pass origin= to create_block_mask too.",
        )  # fmt: skip
    if not agree(origin, block_mask.origin):
        raise bad_argument(
            "origin", "another than that of block_mask", "the same, or None", "None takes that of the block mask."
        )
    return origin


def _at_origin(traced: TracedMod, origin: OriginTable | None, sizes: tuple[int, int, int, int]) -> TracedMod:
    """The traced mod of a call of these sizes (batch, heads, q_len, kv_len), which reads b and h of the whole problem."""
    given = [p for p in (traced.program, traced.derivative) if p is not None]
    programs, more = shift_heads(given, origin, *sizes[:2])
    derivative = None if traced.derivative is None else programs[1]
    return dataclasses.replace(traced, program=programs[0], derivative=derivative, arrays=(*traced.arrays, *more))


def _scale(scale: object, inputs: Inputs) -> float | Array:
    """The factor of the dot product, from the argument scale: a float, which the plan holds, or a jax scalar, which becomes a
    captured array. None gives 1 / sqrt(head dim).

    Raises ValueError for a number that is not finite and for an array that is no real scalar.
    """
    if scale is None:
        return 1.0 / math.sqrt(max(inputs.head_dim, 1))
    if isinstance(scale, Array):
        real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
        if scale.shape != () or not real:
            raise bad_argument(
                "scale",
                f"{scale.dtype}{list(scale.shape)}",
                "a real scalar",
                "A factor for each head or position goes into score_mod.",
            )
        return scale
    try:
        value = float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise bad_argument("scale", repr(scale), "a finite float", "None means 1 / sqrt(head dim).")
    return value


def _scaled(score_mod: ScoreMod | None, scale: Array) -> ScoreMod:
    """The score function `score_mod(score * scale, ...)`, with the signature of score_mod; scale is cast to the score's dtype.

    Without score_mod it is `score * scale`.
    """

    def scaled(score: Array, *at: Array) -> Array:
        """The scaled score after score_mod; `at` are b, h, q_idx and kv_idx."""
        score = score * scale.astype(score.dtype)
        return score if score_mod is None else score_mod(score, *at)

    return scaled if score_mod is None else functools.wraps(score_mod)(scaled)


def _block_mask(
    mask_mod: MaskMod | None,
    block_mask: BlockMask | None,
    inputs: Inputs,
    origin: OriginTable | None,
) -> BlockMask | None:
    """The block mask of the call: the one given, or one computed from mask_mod; None if neither is given.

    A computed mask has blocks of DEFAULT_BLOCK tokens, and a batch (heads) dimension of size 1 if mask_mod does not
    read b (h). Raises ValueError if both are given; that the given one fits is checked elsewhere.
    """
    if mask_mod is not None and block_mask is not None:
        raise both_masks()
    if block_mask is not None:
        return block_mask
    if mask_mod is None:
        return None
    sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    traced = trace_placed_mask(mask_mod, sizes, origin)
    heads = (
        inputs.batch if traced.program.reads("b") else 1,
        inputs.q_heads if traced.program.reads("h") else 1,
    )
    lengths = (inputs.q_len, inputs.kv_len, DEFAULT_BLOCK, DEFAULT_BLOCK)
    return BlockMask.of(from_traced(traced, heads, lengths, origin=origin))


def _layout(mask: BlockMask) -> BlockLayout:
    """The static shape of the block mask, for the plan."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    widths = (mask.kv_indices.shape[-1], mask.full_kv_indices.shape[-1], *mask.q_widths)
    return BlockLayout(batch, heads, *mask.block_size, *widths, from_user_lists=mask.from_user_lists)


def _lists(mask: BlockMask) -> BlockLists:
    """The block lists for the operands, by query block: partial, then full blocks; None for lists of width 0."""
    pairs = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    return BlockLists(*(x if index.shape[-1] else None for num, index in pairs for x in (num, index)))


def _reference(call: Call, arguments: Arguments[ArrayArgument]) -> Results:
    """The Results of `call` by the dense implementation of reference.py (implementation="reference").

    It evaluates the mods as the user gave them in `arguments`, not the programs that they were traced to.
    """
    plan, operands, get = call.plan, call.operands, arguments.get
    score_mod, mask_mod, block_mask = get("score_mod"), get("mask_mod"), get("block_mask")
    scale, rate, keep = get("scale"), float(get("dropout_rate", 0.0)), None
    origin = call.origin
    indices = None
    if origin is not None:
        indices = indices_of(origin, (plan.batch, plan.q_heads, plan.q_len, plan.kv_len))
    if plan.dropout is not None:
        shape = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        keep = dense_keep(key_words(get("dropout_key")), rate, shape, get("broadcast_dropout", False), indices)
    out, lse, top = reference_attention(
        operands.query,
        operands.key,
        operands.value,
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
    )
    dtype = plan.score_dtype
    return Results(out, lse.astype(dtype), top.astype(dtype) if plan.max_scores else None)
