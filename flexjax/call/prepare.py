"""`prepare`: makes the plan and the operands of a call from the arguments of `flex_attention`.

The steps: check the arrays, trace the mods, build or check the block mask, write the plan. `explain`, `autotune` and
`profile` prepare a call too, and do not run it. A plan is everything static about one call; operands are its arrays.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp

from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import from_traced, trace_placed_mask
from flexjax.call import float8_scales
from flexjax.call.arguments import Arguments
from flexjax.call.block_masks import layout_of, lists_of, remembered, residues_by_mask
from flexjax.call.checks import (
    CheckedArrays,
    both_masks,
    check_block_mask,
    check_inputs,
    check_lengths,
    check_options,
    check_scale,
    check_weights,
)
from flexjax.call.documents import by_documents
from flexjax.call.dropout import dropout_program
from flexjax.call.expectations import check_expectations, functions_by_argument, weighted, with_functions
from flexjax.call.tolerance import Skipped, check_call, check_claim, skipped
from flexjax.errors import bad_argument
from flexjax.ir.origin import OriginTable, agree, shift_heads, sizes_of, table_of
from flexjax.ir.reach import reach_of
from flexjax.ir.single_precision import in_single_precision, with_single_captures
from flexjax.mod_tools.made_for import Reach, check_sizes
from flexjax.parallel.explicit_axes import split_of
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan, Lengths, Operands, Scales
from flexjax.plan.lengths import NONE
from flexjax.plan.precision import precision_name
from flexjax.plan.problem import After, Problem
from flexjax.rewrites.pages import whole_pages
from flexjax.tolerance.norms import PagedKeys
from flexjax.trace.trace_mod import TracedMod, check_function, trace_score_mod
from flexjax.types import Layout, MaskMod, Origin, ScoreMod, Weights

Array = jax.Array

DEFAULT_BLOCK = 128
"""Block size, in queries and in keys, of a block mask that a call computes from its mask_mod."""


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """A checked call of flex_attention, ready to be computed.

    score    the traced score program: score_mod, and `scale` where that is an array; None for the identity
    weights  the argument, checked
    origin   where the arrays lie in the whole problem; None: at 0
    skipped  what `tolerance` leaves out; None without
    functions  which arguments are in the score program, as errors name them between backticks
    """

    plan: KernelPlan
    operands: Operands
    score: TracedMod | None
    origin: OriginTable | None = None
    weights: Weights | None = None
    skipped: Skipped | None = None
    functions: str = "score_mod"

    def problem(self, implementation: tuple[str, ...] | None, text: str = "") -> Problem:
        """The static parameter of the primitives; `implementation` are names of backends in order."""
        structure, score = jax.tree.structure(self.operands), self.score
        if score is None:
            return Problem(self.plan, None, "", implementation, structure, call=text)
        found = Problem(
            self.plan, score.derivative, score.why_not, implementation, structure, call=text, place=score.place,
            functions=self.functions,
        )  # fmt: skip
        then = score.after
        after = None if then is None else After(then.derivative, then.again, then.refused)
        return dataclasses.replace(found, again=score.again, after=after, refused=score.refused)


class InPages(typing.NamedTuple):
    """Keys in pages: inputs.key and inputs.value are the pools, pages is int32 [B, n], each of `page` tokens.

    cache_dtype and scales are those of quantised pools, else None. norms are the largest of the keys of each page.
    """

    inputs: CheckedArrays
    pages: Array
    page: int
    cache_dtype: str | None
    scales: Scales | None
    norms: Array | None = None

    @property
    def keys(self) -> PagedKeys:
        scales = None if self.scales is None else self.scales.key
        return PagedKeys(self.inputs.key, scales, self.pages, self.norms)


def prepare(arguments: Arguments, in_pages: InPages | None = None) -> PreparedCall:
    """Checks the arguments of flex_attention and returns its plan and operands. Raises ValueError.

    Arrays may be traced. With `in_pages`, key and value are not read. Nothing is computed but block lists.
    """
    layout = arguments.layout
    options = check_options(arguments.return_aux, arguments.kernel_options)
    inputs = check_inputs(arguments) if in_pages is None else in_pages.inputs
    sizes = inputs.sizes
    given_origin = arguments.origin
    arguments, documents = by_documents(arguments, sizes.batch, sizes.q_len, sizes.kv_len)
    return_aux = arguments.return_aux
    weights = check_weights(arguments.weights, arguments.sinks, return_aux, inputs.dtype)
    paged_keys = None if in_pages is None else in_pages.keys
    tolerance = check_call(arguments, inputs.sizes.of_indices, inputs.dtype, paged_keys)
    scale = _scale(arguments.scale, inputs)
    score_dtype = "float64" if inputs.dtype == "float64" else "float32"
    scales = float8_scales.of_call(arguments, inputs)
    lengths = check_lengths(arguments.query_seq_lengths, arguments.key_value_seq_lengths, inputs)
    origin = _origin(arguments.origin, arguments.block_mask, inputs, layout, lengths)
    own_sizes = inputs.sizes.of_indices
    sizes = sizes_of(origin, own_sizes)
    reach = reach_of(
        arguments.origin, origin, own_sizes, (arguments.query_seq_lengths, arguments.key_value_seq_lengths)
    )
    score_mod = arguments.score_mod
    if in_pages is None:
        check_sizes("score_mod", score_mod, reach)
        check_sizes("weights", None if weights is None else weights.function, reach)
        check_sizes("mask_mod", arguments.mask_mod, reach)
    else:  # paged_attention has compared the sizes of its mods; how long its requests are is not known
        reach = Reach((*own_sizes[:2], None, None), reach.exact)
    functions = check_expectations(return_aux, inputs.dtype, reach if in_pages is None else None)
    if score_mod is None or callable(score_mod):  # trace_score_mod refuses anything else
        score_mod = scales.score_mod(score_mod)
        if isinstance(scale, Array):  # a captured array of the score function, because a plan holds no array
            score_mod = _scaled(score_mod, scale)
        if weights is not None:
            check_function("weights", weights.function, score_dtype)
        if functions:
            score_mod = with_functions(score_mod, None if weights is None else weights.function, functions)
        elif weights is not None:
            score_mod = weighted(score_mod, weights.function)
    scale = 1.0 if isinstance(scale, Array) else scale
    given = {"score_mod": arguments.score_mod, "weights": weights, **functions_by_argument(return_aux)}
    names = "` or `".join(name for name, mod in given.items() if mod is not None) or "score_mod"
    score = None
    if score_mod is not None:
        traced_for = invariant.sizes_of_score(sizes) if options.invariant else sizes
        score = trace_score_mod(score_mod, traced_for, score_dtype, reach, 1 + len(functions), names)
    if score is not None and jnp.dtype(inputs.dtype).itemsize <= 2:
        score = _in_single_precision(score)
    if score is not None and score.is_identity and weights is None and not functions:
        score = None
    block_mask = _block_mask(arguments.mask_mod, arguments.block_mask, inputs, origin, in_pages, reach, layout)
    dropout = dropout_program(arguments.dropout, sizes, score_dtype)
    if inputs.dtype == FLOAT8 and dropout is not None:
        raise bad_argument(
            "dropout",
            repr(arguments.dropout),
            f"None for {FLOAT8} inputs, which have no gradients",
            "Train in bfloat16.",
        )
    dropout = scales.factor(sizes) if scales.value is not None else dropout
    score, dropout = (None if x is None else _at_origin(x, origin, own_sizes) for x in (score, dropout))
    dtype = "bfloat16" if inputs.dtype == FLOAT8 else inputs.dtype
    precision, left_out = precision_name(arguments.precision, dtype), None
    if block_mask is not None and block_mask.claim is not None:
        check_claim(block_mask.claim, arguments, inputs.sizes.head_dim, inputs.dtype)
    if tolerance is not None:
        products = scale, precision
        left_out = skipped(arguments, inputs, tolerance, score, block_mask, origin, lengths, products, paged_keys)
        block_mask = left_out.mask or block_mask
    plan = KernelPlan(
        **vars(inputs.sizes),
        dtype=dtype,
        layout=layout,
        scale=scale,
        score=None if score is None else score.program,
        mask=None if block_mask is None else block_mask.program,
        dropout=None if dropout is None else dropout.program,
        blocks=None
        if block_mask is None
        else layout_of(block_mask, left_out is not None and left_out.mask is not None),
        has_sinks=inputs.sinks is not None,
        max_scores=return_aux is not None and return_aux.max_scores,
        options=options,
        origin=None if origin is None else origin.layout,
        lengths=(False, False) if lengths is None else (lengths.query is not None, lengths.key is not None),
        page=0 if in_pages is None else in_pages.page,
        stored_pages=0 if in_pages is None else inputs.key.shape[0],
        cache_dtype=None if in_pages is None else in_pages.cache_dtype,
        precision=precision,
        residues=None if origin or lengths or in_pages else residues_by_mask(block_mask, score),
        float8=inputs.dtype == FLOAT8,
        weighted=weights is not None,
        total=weights is not None and (weights.divisor is not None or (return_aux is not None and return_aux.total)),
        expectations=len(functions),
        crowded=len(functions) > 0,
        documents=0 if documents is None or not options.invariant else documents.shape[1] - 1,
        keys_begin_elsewhere=in_pages is None and _begin_elsewhere(given_origin, origin),
    )
    if options.invariant and (why := invariant.refuses(plan)) is not None:
        raise NotImplementedError(why)
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
        lists=None if block_mask is None else lists_of(block_mask),
        origin=None if origin is None else origin.starts,
        lengths=lengths,
        pages=None if in_pages is None else in_pages.pages,
        scales=None if in_pages is None else in_pages.scales,
        documents=documents if options.invariant else None,
    )
    return PreparedCall(plan, operands, score, origin, weights, left_out, names)


def _origin(
    given: Origin | OriginTable | None,
    block_mask: BlockMask | None,
    inputs: CheckedArrays,
    layout: Layout,
    lengths: Lengths | None,
) -> OriginTable | None:
    """The argument origin, or that of the block mask; None at 0. Raises ValueError for an unfit block mask."""
    origin = table_of(given, inputs.sizes.batch, (inputs.sizes.q_len, inputs.sizes.kv_len), lengths or NONE)
    if block_mask is None:
        return origin
    check_block_mask(block_mask, inputs.sizes, layout)
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


def _begin_elsewhere(given: object, origin: OriginTable | None) -> bool:
    """Whether keys of a call may be numbered from elsewhere than the first."""
    if isinstance(given, Origin):
        return not (isinstance(given.key, int) and given.key == 0)
    return origin is not None and origin.starts is not None


def _in_single_precision(traced: TracedMod) -> TracedMod:
    """A score_mod of 16-bit queries in float32 where it computes in float64, so that kernels can run it."""
    given = [p for p in (traced.program, traced.derivative) if p is not None]
    programs = in_single_precision(given)
    if programs is None:
        return traced
    for program in traced.programs[len(given) :]:
        single = with_single_captures(program)
        if single is None:
            return traced
        programs = (*programs, single)
    # gradients of the arrays that are cast here are float64, as jax makes them
    arrays = tuple(x.astype(c.dtype) for x, c in zip(traced.arrays, programs[0].captures, strict=True))
    return traced.with_programs(programs, arrays)


def _at_origin(traced: TracedMod, origin: OriginTable | None, sizes: tuple[int, int, int, int]) -> TracedMod:
    """A mod of the whole problem for a call of `sizes`: it adds origin.batch to b and origin.head to h."""
    programs, more = shift_heads(traced.programs, origin, *sizes[:2])
    return traced.with_programs(programs, (*traced.arrays, *more))


def _scale(scale: object, inputs: CheckedArrays) -> float | Array:
    """The factor of the dot product: a float, or the jax scalar as given. Raises ValueError."""
    if scale is None:
        return 1.0 / math.sqrt(max(inputs.sizes.head_dim, 1))
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
    return check_scale(scale)


def _scaled(score_mod: ScoreMod | None, scale: Array) -> ScoreMod:
    """score_mod(score * scale, ...) with the signature of score_mod; it captures the array `scale`."""

    def scaled(score: Array, *at: Array) -> Array:
        score = score * scale.astype(score.dtype)
        return score if score_mod is None else score_mod(score, *at)

    return scaled if score_mod is None else functools.wraps(score_mod)(scaled)


def _block_mask(
    mask_mod: MaskMod | None,
    block_mask: BlockMask | None,
    inputs: CheckedArrays,
    origin: OriginTable | None,
    in_pages: InPages | None,
    reach: Reach,
    layout: Layout,
) -> BlockMask | None:
    """The block mask of the call, given or computed from mask_mod; None without either. Raises ValueError."""
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
    sizes = inputs.sizes.of_indices
    traced = trace_placed_mask(mask_mod, sizes, origin, reach)
    heads = (
        inputs.sizes.batch if traced.program.reads("b") else 1,
        inputs.sizes.q_heads if traced.program.reads("h") else 1,
    )
    # with keys in pages a key block is whole pages or a part of one
    block_kv = DEFAULT_BLOCK if in_pages is None else whole_pages(in_pages.page, DEFAULT_BLOCK)
    lengths = (inputs.sizes.q_len, inputs.sizes.kv_len, DEFAULT_BLOCK, block_kv)
    # with keys in pages the class of a block does not depend on how many other blocks there are
    exact = None if in_pages is None else False
    work = split_of(inputs.query, layout)
    make = lambda: BlockMask.of(from_traced(traced, heads, lengths, exact, origin, None if work is None else work.axes))
    if origin is not None or not jax.sharding.get_abstract_mesh().empty:
        return make()
    return remembered(make, traced, (heads, lengths, exact))
