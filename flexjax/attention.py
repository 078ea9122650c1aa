"""The door: checks a call, makes its plan and operands, runs it, and puts the user's call in front of any error.

The order of the work: check the arrays, trace the mods, build or check the block mask, write the plan, bind the primitives of
autodiff.py, which choose a backend when they are lowered.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flexjax import dispatch
from flexjax.autodiff import attention
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import from_traced
from flexjax.check_arguments import Inputs, check_block_mask, check_inputs, check_options
from flexjax.dropout import dense_keep, dropout_program, key_words
from flexjax.errors import add_note_once, bad_argument
from flexjax.plan.kernel_plan import BlockLayout, BlockLists, KernelPlan, Operands, Results
from flexjax.plan.problem import Problem
from flexjax.reference import reference_attention
from flexjax.trace.lift_numpy import lift_numpy
from flexjax.trace.trace_mod import TracedMod, trace_mask_mod, trace_score_mod
from flexjax.types import AuxOutput, AuxRequest, KernelOptions

Array = jax.Array

DEFAULT_BLOCK = 128


def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    block_mask: BlockMask | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    layout: str = "BTNH",
    return_aux: AuxRequest | None = None,
    implementation: str | Sequence[str] | None = None,
    kernel_options: KernelOptions | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    query_extra: Array | None = None,
    key_extra: Array | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention with a score function and a mask written in plain JAX.

        p = softmax(where(mask, score_mod(scale * query . key), -inf));  out = p . value

    query        [B, T, N, D] (layout "BTNH") or [B, N, T, D] ("BNTH"); float64, float32, bfloat16 or float16
    key, value   [B, S, M, D] and [B, S, M, E], same dtype; M divides N, query head n reads head n // (N // M)
    score_mod    score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars; h is the query head
    mask_mod     mask_mod(b, h, q_idx, kv_idx) -> bool, on scalars; its block mask is built on the way
    block_mask   instead of mask_mod: a block mask made before (create_block_mask)
    scale        multiplies the dot product; default 1 / sqrt(D). A Python or numpy number is compiled into the kernel; a jax
                 scalar may be traced, has a gradient, and a new value recompiles nothing
    sinks        [N] logits: one more column of the softmax, without a value behind it; lse includes it
    return_aux   AuxRequest(lse=, max_scores=): also returns AuxOutput
    implementation  None, "xla", "mosaic_gpu", "mosaic_tpu", "reference", or several, tried in order
    kernel_options  KernelOptions: tiles and the like
    dropout_rate, dropout_key  drops each probability with that chance; the same mask in the backward pass
    broadcast_dropout  True drops the same positions in all batch entries and heads, as flax does by default
    query_extra, key_extra  [B, T, N, R] and [B, S, K, R], K divides N: adds query_extra . key_extra to the dot product

    Returns out [B, T, N, E] in the layout and dtype of query, or (out, AuxOutput).

    Rows in which nothing is on give 0, lse -inf and zero gradients. A row that score_mod hides with a finite number
    (-1e10) is none of them: its scores are equal, and it is the average of the values. Beside such a number lse has no
    room for how many they are, so that gradients count each of them as a whole: mask_mod or -inf hides without that.
    Gradients reach query, key, value, sinks, the extra features and every floating array that score_mod captured.
    Scores are float32 (float64 for float64 inputs).

    NaN and infinities in keys and values at positions that the mask hides may spread, since zero times NaN is NaN, as in
    jax.nn.dot_product_attention: into the output from values, into gradients from both. Only blocks that are skipped whole are
    never read. Where such numbers may occur, zero them before the call: jnp.where(valid[:, :, None, None], value, 0), and key.

    Raises ValueError for arguments that do not fit; NotImplementedError, with every backend's reason, if none accepts.

    Example, a bias that is learned for each head and distance:

        table = jnp.zeros((N, 2 * T - 1))

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx - kv_idx + T - 1]

        out = flex_attention(query, key, value, score_mod=score_mod, mask_mod=flexjax.masks.causal)

    New values of captured arrays compile nothing, nor does a function that is built again. Other shapes, another function and
    another Python number in a function do: capture jnp.asarray(number) where it changes from call to call.

    Fast are calls inside jit (outside of it the functions are traced at each call), bfloat16 and float16 on a GPU, mask_mod
    rather than -inf from score_mod (which skips no block), one block_mask for all layers that share it, and captured arrays
    that are read at q_idx, kv_idx or q_idx - kv_idx + c, which are slices where other indices gather.
    """
    arguments = Arguments(
        score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask, scale=scale, sinks=sinks, layout=layout,
        return_aux=return_aux, kernel_options=kernel_options, dropout_rate=dropout_rate, dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout, query_extra=query_extra, key_extra=key_extra,
    )  # fmt: skip
    try:
        call = prepare(query, key, value, **arguments)
        names = dispatch.candidates(implementation)
        if dispatch.settled(call.plan, names) == dispatch.REFERENCE:
            results = _reference(call, arguments)
        else:
            text = describe_call("flex_attention", query, key, value, arguments)
            results = attention(call.problem(names, text), call.operands)
    except Exception as error:
        add_note_once(error, describe_call("flex_attention", query, key, value, arguments))
        raise
    if return_aux is None:
        return results.out
    return results.out, AuxOutput(
        results.lse if return_aux.lse else None, results.max_scores if return_aux.max_scores else None
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: its plan, its operands and the traced score_mod."""

    plan: KernelPlan
    operands: Operands
    score: TracedMod | None

    def problem(self, implementation: tuple[str, ...] | None, text: str = "") -> Problem:
        """`text`: the user's call in a line."""
        derivative, why_not = (None, "") if self.score is None else (self.score.derivative, self.score.why_not)
        return Problem(self.plan, derivative, why_not, implementation, jax.tree.structure(self.operands), text)


class Arguments(typing.TypedDict):
    """What `prepare` takes of flex_attention's keywords."""

    score_mod: Callable | None
    mask_mod: Callable | None
    block_mask: BlockMask | None
    scale: float | Array | None
    sinks: Array | None
    layout: str
    return_aux: AuxRequest | None
    kernel_options: KernelOptions | None
    dropout_rate: float
    dropout_key: Array | None
    broadcast_dropout: bool
    query_extra: Array | None
    key_extra: Array | None


DEFAULTS: Arguments = {
    "score_mod": None,
    "mask_mod": None,
    "block_mask": None,
    "scale": None,
    "sinks": None,
    "layout": "BTNH",
    "return_aux": None,
    "kernel_options": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
    "broadcast_dropout": False,
    "query_extra": None,
    "key_extra": None,
}


def describe_call(function: str, query: object, key: object, value: object, arguments: Arguments) -> str:
    """The user's call in a line, for the notes of errors: arrays as dtype and shape, mods by name, defaults left out."""
    parts = [f"{n}={_describe(x)}" for n, x in (("query", query), ("key", key), ("value", value))]
    for name, x in arguments.items():
        default = DEFAULTS[name]
        if x is not default and not (isinstance(x, str | int | float) and x == default):
            parts.append(f"{name}={_describe(x)}")
    return f"in {function}({', '.join(parts)})"


def _describe(x: typing.Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, BlockMask):
        b, h, q_len, kv_len = x.shape
        return f"BlockMask({b}, {h}, {q_len}, {kv_len})"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    text = repr(x)
    return text if len(text) <= 80 else f"{type(x).__name__}"


def prepare(query: Array, key: Array, value: Array, **arguments: typing.Unpack[Arguments]) -> Call:
    """Checks the arguments of flex_attention and writes the plan and the operands."""
    a = arguments
    options = check_options(a["return_aux"], a["kernel_options"])
    inputs = check_inputs(query, key, value, a["sinks"], a["layout"], a["query_extra"], a["key_extra"])
    scale = _scale(a["scale"], inputs)
    sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    score_dtype = "float64" if inputs.dtype == "float64" else "float32"
    score_mod = a["score_mod"]
    if isinstance(scale, Array):
        # one more capture: it has a gradient, and no plan holds its value
        scaled = score_mod is None or callable(score_mod)  # the trace refuses what is neither
        score_mod, scale = _scaled(score_mod, scale) if scaled else score_mod, 1.0
    score = None if score_mod is None else trace_score_mod(score_mod, sizes, score_dtype)
    block_mask = _block_mask(a["mask_mod"], a["block_mask"], inputs, a["layout"])
    dropout = dropout_program(a["dropout_rate"], a["dropout_key"], sizes, score_dtype, a["broadcast_dropout"])
    plan = KernelPlan(
        batch=inputs.batch,
        q_heads=inputs.q_heads,
        kv_heads=inputs.kv_heads,
        q_len=inputs.q_len,
        kv_len=inputs.kv_len,
        head_dim=inputs.head_dim,
        value_dim=inputs.value_dim,
        dtype=inputs.dtype,
        layout=a["layout"],
        scale=scale,
        score=None if score is None or _is_identity(score) else score.program,
        mask=None if block_mask is None else block_mask.program,
        dropout=None if dropout is None else dropout.program,
        blocks=None if block_mask is None else _layout(block_mask),
        has_sinks=a["sinks"] is not None,
        extra_dim=inputs.extra_dim,
        extra_heads=inputs.extra_heads,
        max_scores=a["return_aux"] is not None and a["return_aux"].max_scores,
        options=options,
    )
    score = None if plan.score is None else score
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
    )
    return Call(plan, operands, score)


def _is_identity(score: TracedMod) -> bool:
    program = score.program
    return program.results[0] == program.inputs[0]


def _scale(scale: object, inputs: Inputs) -> float | Array:
    """The factor of the dot product: a float that the plan holds, or a jax scalar that is an operand."""
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


def _scaled(score_mod: Callable | None, scale: Array) -> Callable:
    """score_mod on the dot product times `scale`, multiplied in the dtype of the score; its signature is score_mod's."""

    def scaled(score: Array, *at: Array) -> Array:
        score = score * scale.astype(score.dtype)
        return score if score_mod is None else score_mod(score, *at)

    return scaled if score_mod is None else functools.wraps(score_mod)(scaled)


def _block_mask(
    mask_mod: Callable | None, block_mask: BlockMask | None, inputs: Inputs, layout: str
) -> BlockMask | None:
    if mask_mod is not None and block_mask is not None:
        raise ValueError(
            "`mask_mod` and `block_mask` are both given; expected one of them. A block mask contains its mask_mod: to "
            "restrict it further, build one of and_masks(block_mask.mask_mod, mask_mod)."
        )
    if block_mask is not None:
        check_block_mask(block_mask, inputs, layout)
        return block_mask
    if mask_mod is None:
        return None
    sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    traced = trace_mask_mod(mask_mod, sizes)
    heads = (
        inputs.batch if traced.program.reads("b") else 1,
        inputs.q_heads if traced.program.reads("h") else 1,
    )
    return BlockMask.of(from_traced(traced, heads, (inputs.q_len, inputs.kv_len, DEFAULT_BLOCK, DEFAULT_BLOCK)))


def _layout(mask: BlockMask) -> BlockLayout:
    batch, heads = mask.kv_num_blocks.shape[:2]
    widths = (mask.kv_indices.shape[-1], mask.full_kv_indices.shape[-1], *mask.q_widths)
    return BlockLayout(batch, heads, *mask.block_size, *widths, from_user_lists=mask.listed)


def _lists(mask: BlockMask) -> BlockLists:
    pairs = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    return BlockLists(*(x if index.shape[-1] else None for num, index in pairs for x in (num, index)))


def _reference(call: Call, arguments: Arguments) -> Results:
    """The dense implementation on the mods as they were given."""
    plan, operands, block_mask = call.plan, call.operands, arguments["block_mask"]
    keep = None
    if plan.dropout is not None:
        shape = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
        words = key_words(arguments["dropout_key"])
        keep = dense_keep(words, arguments["dropout_rate"], shape, arguments["broadcast_dropout"])
    out, lse, top = reference_attention(
        operands.query,
        operands.key,
        operands.value,
        score_mod=None if arguments["score_mod"] is None else lift_numpy(arguments["score_mod"])[0],
        mask_mod=None if arguments["mask_mod"] is None else lift_numpy(arguments["mask_mod"])[0],
        mask=None if block_mask is None else block_mask.to_mask(),
        scale=arguments["scale"],
        sinks=operands.sinks,
        layout=plan.layout,
        query_extra=operands.query_extra,
        key_extra=operands.key_extra,
        dropout_rate=float(arguments["dropout_rate"]),
        dropout_keep=keep,
    )
    dtype = plan.score_dtype
    return Results(out, lse.astype(dtype), top.astype(dtype) if plan.max_scores else None)
