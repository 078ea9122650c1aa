"""`prepare`: makes the plan and the operands of a call from the arguments of `flex_attention`.

The steps, in order: check the arrays, trace the mods, build or check the block mask, write the plan. `explain`, `autotune` and
`profile` prepare a call as `flex_attention` does, and do not run it.

Inputs (check_arguments.py) are the checked arrays of a call with their sizes.

A plan is everything static about one call; operands are its arrays (plan/kernel_plan.py).
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp

from flexjax import float8_scales
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import from_traced, in_range, trace_placed_mask
from flexjax.call_arguments import Arguments
from flexjax.check_arguments import Inputs, both_masks, check_block_mask, check_inputs, check_lengths, check_options
from flexjax.dropout import dropout_program
from flexjax.errors import bad_argument
from flexjax.ir.origin import OriginTable, agree, shift_heads, sizes_of, table_of
from flexjax.ir.single_precision import in_single_precision
from flexjax.plan.kernel_plan import FLOAT8, BlockLayout, BlockLists, KernelPlan, Lengths, Operands, Residues, Scales
from flexjax.plan.known_lists import MOST_BLOCKS, KnownLists
from flexjax.plan.lengths import NONE
from flexjax.plan.pages import whole_pages
from flexjax.plan.precision import precision_name
from flexjax.plan.problem import Problem
from flexjax.plan.residues import residues_of
from flexjax.trace.trace_mod import TracedMod, trace_score_mod
from flexjax.types import ArrayOrShape, AuxRequest, Layout, MaskMod, Origin, ScoreMod

Array = jax.Array

DEFAULT_BLOCK = 128
"""Block size, in queries and in keys, of a block mask that a call computes from its mask_mod."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of flex_attention, ready to be computed.

    plan       everything static about the call
    operands   its arrays: those that the user gave, captured arrays and block lists
    score      the traced score program, with its derivative where that can be traced: score_mod, and the factor `scale` where that is an
               array; None if it is the identity
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


class InPages(typing.NamedTuple):
    """Keys in pages, for `prepare`: what it needs to know beside their pools, key and value.

    inputs        the checked arrays of the call; kv_len is the number of pages of a batch entry times `page`
    pages         int32 [B, n]
    page          tokens of a page
    cache_dtype   dtype of quantised pools; None for others
    scales        of quantised pools; None for others
    """

    inputs: Inputs
    pages: Array
    page: int
    cache_dtype: str | None
    scales: Scales | None


def prepare(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape,
    *,
    return_aux: AuxRequest | None = None,
    in_pages: InPages | None = None,
    **arguments: typing.Unpack[Arguments[ArrayOrShape]],
) -> Call:
    """Checks the arguments of flex_attention, traces the mods, finds the block mask, and returns the Call: the plan and the operands.
    Nothing is computed but block lists.

    The arguments are those of flex_attention, of which return_aux decides `plan.max_scores`; its arrays may be traced (explain and
    autotune call it under jax.eval_shape or with random numbers for shapes). A score_mod that returns its score is left out; a scale that
    is a jax scalar becomes a captured array of the score program, and the plan's scale is then 1. With an origin, the programs are those
    of the whole problem, and the plan and the operands have the origin. With `in_pages`, key and value are not read: its `inputs` have
    the checked arrays, whose key and value are pools of pages. Raises ValueError for bad arguments.
    """
    get = arguments.get
    layout, sinks = get("layout", "BTNH"), get("sinks")
    options = check_options(return_aux, get("kernel_options"))
    if in_pages is None:
        inputs = check_inputs(query, key, value, sinks, layout, get("query_extra"), get("key_extra"))
    else:
        inputs = in_pages.inputs
    scale = _scale(get("scale"), inputs)
    score_dtype = "float64" if inputs.dtype == "float64" else "float32"
    scales = float8_scales.of_call(arguments, inputs, layout)
    lengths = check_lengths(get("query_seq_lengths"), get("key_value_seq_lengths"), inputs)
    origin = _origin(get("origin"), get("block_mask"), inputs, layout, lengths)
    own_sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    sizes = sizes_of(origin, own_sizes)
    score_mod = get("score_mod")
    if score_mod is None or callable(score_mod):  # trace_score_mod refuses anything else
        score_mod = scales.score_mod(score_mod)
        if isinstance(scale, Array):  # a captured array of the score function, because a plan holds no array
            score_mod = _scaled(score_mod, scale)
    scale = 1.0 if isinstance(scale, Array) else scale
    score = None if score_mod is None else trace_score_mod(score_mod, sizes, score_dtype)
    if score is not None and jnp.dtype(inputs.dtype).itemsize <= 2:
        score = _in_single_precision(score)
    if score is not None and score.program.results[0] == score.program.inputs[0]:
        score = None  # the identity
    block_mask = _block_mask(get("mask_mod"), get("block_mask"), inputs, origin, in_pages)
    dropout = dropout_program(
        get("dropout_rate", 0.0), get("dropout_key"), sizes, score_dtype, get("broadcast_dropout", False)
    )
    if inputs.dtype == FLOAT8 and dropout is not None:
        raise bad_argument(
            "dropout_rate",
            repr(get("dropout_rate")),
            f"0.0 for {FLOAT8} inputs, which have no gradients",
            "Train in bfloat16.",
        )
    dropout = scales.factor(sizes) if scales.value is not None else dropout
    score, dropout = (None if x is None else _at_origin(x, origin, own_sizes) for x in (score, dropout))
    dtype = "bfloat16" if inputs.dtype == FLOAT8 else inputs.dtype
    plan = KernelPlan(
        batch=inputs.batch,
        q_heads=inputs.q_heads,
        kv_heads=inputs.kv_heads,
        q_len=inputs.q_len,
        kv_len=inputs.kv_len,
        head_dim=inputs.head_dim,
        value_dim=inputs.value_dim,
        dtype=dtype,
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
        lengths=(False, False) if lengths is None else (lengths.query is not None, lengths.key is not None),
        page=0 if in_pages is None else in_pages.page,
        cache_dtype=None if in_pages is None else in_pages.cache_dtype,
        precision=precision_name(get("precision"), dtype),
        residues=None if origin or lengths or in_pages else _residues(block_mask, score),
        float8=inputs.dtype == FLOAT8,
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
        lengths=lengths,
        pages=None if in_pages is None else in_pages.pages,
        scales=None if in_pages is None else in_pages.scales,
    )
    return Call(plan, operands, score, origin)


def _origin(
    given: Origin | OriginTable | None,
    block_mask: BlockMask | None,
    inputs: Inputs,
    layout: Layout,
    lengths: Lengths | None,
) -> OriginTable | None:
    """The origin of the call: the argument origin (`given`), or that of the block mask; None if the arrays lie at 0.

    block_mask   the argument; None without one
    layout       that of the call, for messages
    lengths      the checked lengths of the call, by which query="end" is placed

    Raises ValueError for a block mask that does not fit the inputs, and if `given` is another origin than that of the block mask. A
    block mask of lists alone, without a program and an origin, fits an origin whose runs its blocks divide.
    """
    origin = table_of(given, inputs.batch, (inputs.q_len, inputs.kv_len), lengths or NONE)
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


def _in_single_precision(traced: TracedMod) -> TracedMod:
    """A score_mod of 16-bit queries in float32 where it computes in float64 (ir/single_precision.py), so that kernels can run it; `traced`
    itself if it computes nothing in float64. Its float64 arrays are cast to float32, and their gradients are float64, as jax makes them
    where it casts an array.
    """
    given = [p for p in (traced.program, traced.derivative) if p is not None]
    programs = in_single_precision(given)
    if programs is None:
        return traced
    arrays = tuple(x.astype(c.dtype) for x, c in zip(traced.arrays, programs[0].captures, strict=True))
    derivative = None if traced.derivative is None else programs[1]
    return dataclasses.replace(traced, program=programs[0], derivative=derivative, arrays=arrays)


def _at_origin(traced: TracedMod, origin: OriginTable | None, sizes: tuple[int, int, int, int]) -> TracedMod:
    """A mod that was traced for the whole problem, as one for a call: it adds origin.batch to b and origin.head to h of the call.

    traced   the mod with its derivative, both of which change; numbers of the origin that they read follow its captured arrays
    origin   None: the program and the arrays are those of `traced`
    sizes    (batch, heads, q_len, kv_len) of the call
    """
    given = [p for p in (traced.program, traced.derivative) if p is not None]
    programs, more = shift_heads(given, origin, *sizes[:2])
    derivative = None if traced.derivative is None else programs[1]
    return dataclasses.replace(traced, program=programs[0], derivative=derivative, arrays=(*traced.arrays, *more))


def _scale(scale: object, inputs: Inputs) -> float | Array:
    """The factor of the dot product, from the argument `scale`: a Python float, or the jax scalar that was given, as it is. None gives 1
    / sqrt(head dim of `inputs`).

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
    """The score function score_mod(score * scale, ...), or score * scale without score_mod, which captures the array `scale`.

    It has the signature of score_mod; scale is cast to the dtype of the score.
    """

    def scaled(score: Array, *at: Array) -> Array:
        """What score_mod makes of the score times `scale`, or that product without score_mod; `at` are b, h, q_idx and kv_idx."""
        score = score * scale.astype(score.dtype)
        return score if score_mod is None else score_mod(score, *at)

    return scaled if score_mod is None else functools.wraps(score_mod)(scaled)


def _block_mask(
    mask_mod: MaskMod | None,
    block_mask: BlockMask | None,
    inputs: Inputs,
    origin: OriginTable | None,
    in_pages: InPages | None,
) -> BlockMask | None:
    """The block mask of the call: the one given, or one computed from mask_mod; None if neither is given.

    A computed mask has blocks of DEFAULT_BLOCK tokens, and a batch (heads) dimension of size 1 if mask_mod does not
    read b (h). With keys in pages a key block is whole pages or a part of one, and the class of a block does not depend on how
    many other blocks there are. Raises ValueError if both are given, and for a BlockMask as mask_mod. Whether the given block mask fits
    the inputs is not checked here (`_origin` checks that).
    """
    if mask_mod is not None and block_mask is not None:
        raise both_masks()
    if block_mask is not None:
        return block_mask
    if mask_mod is None:
        return None
    if isinstance(mask_mod, BlockMask):
        raise bad_argument(
            "mask_mod", "a BlockMask", "a function mask_mod(b, h, q_idx, kv_idx)", "Pass a block mask as block_mask=."
        )
    sizes = (inputs.batch, inputs.q_heads, inputs.q_len, inputs.kv_len)
    traced = trace_placed_mask(mask_mod, sizes, origin)
    heads = (
        inputs.batch if traced.program.reads("b") else 1,
        inputs.q_heads if traced.program.reads("h") else 1,
    )
    block_kv = DEFAULT_BLOCK if in_pages is None else whole_pages(in_pages.page, DEFAULT_BLOCK)
    lengths = (inputs.q_len, inputs.kv_len, DEFAULT_BLOCK, block_kv)
    return BlockMask.of(from_traced(traced, heads, lengths, None if in_pages is None else False, origin))


def _layout(mask: BlockMask) -> BlockLayout:
    """The static shape of the block mask as a BlockLayout, for the plan, with its lists if they are known (`_known_lists`)."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    widths = (mask.kv_indices.shape[-1], mask.full_kv_indices.shape[-1], *mask.transposed_widths)
    return BlockLayout(
        batch, heads, *mask.block_size, *widths, from_user_lists=mask.lists_decide, known=_known_lists(mask)
    )


def _residues(mask: BlockMask | None, score: TracedMod | None) -> Residues | None:
    """How the call is split by residues of its tokens (plan/residues.py); None if it is not.

    mask    of the call; not split without one, and with lists of the user or traced lists, whose blocks are not counted
    score   the traced score_mod of the call; None without one
    """
    if mask is None or mask.program is None or mask.lists_decide or mask.on_host is None:
        return None
    num, _, full_num, _ = mask.on_host
    visited = (num.sum() + full_num.sum()) * math.prod(mask.block_size) / max(1, math.prod(num.shape[:2]))
    return residues_of(
        mask.program, None if score is None else score.program, (mask.q_len, mask.kv_len), float(visited)
    )


def _known_lists(mask: BlockMask) -> KnownLists | None:
    """The lists of the block mask as numpy arrays on the host, for BlockLayout.known; None if they are not known on the host, if the mask
    has several batch entries or heads, or if it has more than MOST_BLOCKS blocks.
    """
    if mask.on_host is None or not mask.as_made:
        return None
    if mask.kv_num_blocks.shape[:2] != (1, 1) or math.prod(mask.blocks) > MOST_BLOCKS:
        return None
    num, index, full_num, full_index = mask.on_host
    pairs = ((num, index), (full_num, full_index))
    arrays = tuple(x if pair[1].shape[-1] else None for pair in pairs for x in pair)
    return KnownLists(arrays, fixed=not mask.captures and mask.origin is None and not mask.from_user_lists)


_sorted = jax.jit(in_range, static_argnums=2)  # one dispatch in an eager call


def _lists(mask: BlockMask) -> BlockLists:
    """The block lists for the operands, by query block: partial, then full blocks, ascending; None for lists of width 0.

    Lists of a mask whose fields a user set are sorted in the program, because their order is the user's. Numbers that name no block are
    left out of them.
    """
    num, index, full_num, full_index = mask.lists
    pairs = ((num, index), (full_num, full_index))
    if not mask.as_made:
        pairs = tuple(_sorted(*pair, mask.blocks[1]) if pair[1].shape[-1] else pair for pair in pairs)
    return BlockLists(*(x if index.shape[-1] else None for num, index in pairs for x in (num, index)))
