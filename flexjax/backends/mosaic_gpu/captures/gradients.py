"""Gradients of the arrays that score_mod captured. That of one element is the sum of g = p * (dP - delta) * d mod / d
load over all positions of the attention matrix that read the element, "mod": score_mod, "load": its read of an array.

The kernel (kernel.py) goes through lists of tiles (lists.py). For most kinds of loads, entries at the same offset of
all tiles of a list read the same element or elements that are summed afterwards, so the kernel adds g tile by tile in
registers and writes one tile of sums for each list, or for scalars and rows its sums over keys:

    kind of load   tiles of one list                              the kernel writes   XLA sums
    scalar         a share of the tiles of a head                 sums over keys      queries
    row            one row of tiles                               sums over keys      nothing
    column         one column of tiles                            a tile of sums      queries
    diagonal       tiles with the same first query - first key    a tile of sums      each of its 2 n - 1 diagonals
    tile           the same tile of the heads that share it       a tile of sums      nothing

This leaves one number for each (b, h) and query, key, difference of both, or (query, key). scatter.py adds the numbers
to the elements that the load's index names.

Two kinds of loads are different, because one number for each (query, key) and head would be too many: a load by query
and key where several positions may read the same element, such as a table of 2-D relative positions, and a load by q -
kv if the origin of the call has several runs. There the kernel itself adds g to the elements, in fixed point
(fixed_point.py), so that the order of the additions does not matter. Before, it sums in registers the tiles of a
diagonal on which the index is the same (`_scattered`). Where there are none, and a head reads few elements, it sums g
by element in shared memory, in float32, and XLA adds the sums (private_sums.py).

The order of every float32 sum is fixed and follows from the problem alone. Memory grows with the lists of the block
mask and with the captured array, never with queries times keys unless the array has that size. p are the probabilities,
dP and delta as at the top of backward/common.py. The number of a load is that in `gradient_loads`.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.bounds import bounds
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu.backward.common import Captures, Tokens, captures_of
from flexjax.backends.mosaic_gpu.backward.pair_bias import (
    DenseBiasPlan,
    axis_aligned_dims,
    gradient_loads,
    padded_captures,
)
from flexjax.backends.mosaic_gpu.captures import private_sums
from flexjax.backends.mosaic_gpu.captures.kernel import CaptureFamily, CaptureKernel, Sink
from flexjax.backends.mosaic_gpu.captures.lists import (
    LARGEST_NUMBER,
    ListShape,
    TileLists,
    most_codes,
    most_visits,
    shape_for,
    tile_lists,
    whole_tiles,
)
from flexjax.backends.mosaic_gpu.captures.scatter import (
    LARGEST_ARRAY,
    add_at,
    axes,
    diagonal_sums,
    distinct,
    join_windows,
    positions_differ_by_entry,
)
from flexjax.backends.mosaic_gpu.captures.shift_invariance import invariant
from flexjax.backends.mosaic_gpu.captures.tiles import ROWS, fits_one_slot, warpgroups_for
from flexjax.backends.mosaic_gpu.machine.float_parts import join, parts_of
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.rewrites import extra_features

LISTS_AT_ONCE = 4096
"""The most lists in one run of the kernel: their tiles of sums, where it writes tiles, take 256 MiB. More lists are
split over several runs.
"""


def capture_gradients(
    plan: KernelPlan,
    operands: Operands,
    tokens: Tokens[jax.Array],
    wanted: tuple[bool, ...],
    derivative: ir.Program,
    bias: DenseBiasPlan,
    family: CaptureFamily,
) -> tuple[jax.Array | None, ...]:
    """The gradient of each wanted captured array of score_mod, in its shape and dtype; None for the others.

    plan     with extra features joined to the head dim
    tokens   the padded arrays over tokens, with the row statistics
    bias     which array is staged through shared memory

    The kernel runs for each load of a wanted array by which the score's derivative is not the constant 0; several loads
    of an array are added in float32.
    """
    totals: list[jax.Array | None] = [
        jnp.zeros(a.shape, jnp.float32) if want else None
        for a, want in zip(operands.score_captures, wanted, strict=True)
    ]
    captures = padded_captures(plan, bias, captures_of(operands))
    for load_number, load in enumerate(gradient_loads(derivative)):
        total, slopes = totals[load.capture], [group[2 + load_number] for group in derivative.groups]
        if total is None or all(isinstance(slope, ir.Lit) and slope.value == 0 for slope in slopes):
            continue
        one = _OneLoad(plan, operands, tokens, captures, derivative, load_number, bias, family)
        if _kernel_scatters(plan, load):
            totals[load.capture] = _scattered(one, total)
        else:
            totals[load.capture] = add_at(plan, operands, derivative, load, _load_sums(one), total)
    return tuple(None if t is None else t.astype(a.dtype) for t, a in zip(totals, operands.score_captures, strict=True))


class _OneLoad(typing.NamedTuple):
    """One load of a captured array that wants a gradient, in a call with extra features joined to the head dim."""

    plan: KernelPlan
    operands: Operands
    tokens: Tokens[jax.Array]
    captures: Captures[jax.Array]
    derivative: ir.Program
    load_number: int
    bias: DenseBiasPlan
    family: CaptureFamily

    @property
    def load(self) -> ir.Load:
        return gradient_loads(self.derivative)[self.load_number]

    def kernel(self, shape: ListShape, sink: Sink, dtype: jax.typing.DTypeLike = jnp.float32) -> CaptureKernel:
        return CaptureKernel(self.plan, self.derivative, self.load_number, shape, self.bias, sink, self.family, dtype)


def refuses(plan: KernelPlan, derivative: ir.Program, wanted: tuple[bool, ...]) -> str | None:
    """The first reason, as a sentence, why the kernels cannot compute the gradient of a wanted captured array; None if
    they can. `plan` has extra features apart.
    """
    joined = extra_features.joined_plan(plan)  # as the kernels compute them
    tile = warpgroups_for(joined) * ROWS
    for load in gradient_loads(derivative):
        if not wanted[load.capture]:
            continue
        if any("score" in ir.axes_of(a) for a in load.index):
            return f"captured array {load.capture} is read by an index that depends on the score."
        if any(ir.loops_of(ir.axes_of(a)) for a in load.index):
            return (
                f"captured array {load.capture} is read as a vector in a loop, and its gradient "
                "has a number for each element."
            )
        size = math.prod(derivative.captures[load.capture].shape)
        if not distinct(plan, load) and size > LARGEST_ARRAY:
            return (
                f"several positions may read the same element of captured array {load.capture}, which "
                f"has {size} elements; the "
                f"gradient of such an array takes up to {LARGEST_ARRAY}."
            )
        if most_visits(plan, tile) >= LARGEST_NUMBER or most_codes(plan, tile) >= LARGEST_NUMBER:
            return (
                f"the gradient of captured array {load.capture} adds up more tiles of {tile} x {tile} "
                "than int32 can number: "
                f"{plan.batch} x {plan.q_heads} heads of {plan.q_len} queries and {plan.kv_len} keys."
            )
        if not fits_one_slot(joined):
            return (
                f"the gradient of captured array {load.capture} needs more shared memory than there "
                "is for float32 head dims "
                f"{joined.head_dim} and {plan.value_dim}."
            )
    return None


def _kernel_scatters(plan: KernelPlan, load: ir.Load) -> bool:
    """Whether the kernel itself adds g to the elements of the array (Sink.SCATTER): where several positions may read
    one element by query and key, and by q - kv if the origin has several runs.
    """
    kind, origin = ir.classify_load(load).kind, plan.origin
    if kind == ir.DIAGONAL:
        return origin is not None and not origin.single
    known = axis_aligned_dims(load) is not None and origin is None
    return kind == ir.TILE and not known and not distinct(plan, load)


def _shared(plan: KernelPlan, load: ir.Load) -> tuple[bool, bool]:
    """(whether batch entries share the elements that the load reads, whether heads do)."""
    return "b" not in axes(load) and not positions_differ_by_entry(plan, load), "h" not in axes(load)


# ------------------------------------------------------------------- sums of tiles


def _load_sums(one: _OneLoad) -> jax.Array:
    """The sums of g for one load that is not scattered: [b, h, ...] float32, or the dtype of `_sum_type`.

    b and h are 1 where they are shared (`_shared`). "..." is nothing for a scalar load, T for a row, S for a column, T
    + S - 1 for a diagonal (q - kv from -(S - 1) on) and (T, S) for a tile load.
    """
    plan, tokens, captures, load = one.plan, one.tokens, one.captures, one.load
    kind, shared, tile = ir.classify_load(load).kind, _shared(plan, load), warpgroups_for(plan) * ROWS
    shape = shape_for(plan, kind, tile, shared)
    lists = tile_lists(plan, one.operands.lists, shape)
    if kind == ir.TILE:
        kernel = one.kernel(shape, Sink.MATRIX, _sum_type(plan, one.derivative, one.load_number))
        return kernel.run(tokens, lists, captures)[:, :, : plan.q_len, : plan.kv_len]
    sums = _summed(one.kernel(shape, Sink.SUMS), tokens, lists, captures)
    sums = sums.reshape(shape.batch, shape.heads, shape.keys, *sums.shape[1:])
    if kind == ir.SCALAR:
        out = sums.sum(2)
    elif kind == ir.DIAGONAL:
        out = join_windows(sums)
        skip = (shape.columns * tile - 1) - (plan.kv_len - 1)
        # The barrier gives the sums an XLA kernel of their own: fused into the scatter that follows, each would be
        # made alone.
        out = lax.optimization_barrier(out[..., skip : skip + plan.q_len + plan.kv_len - 1])
    else:
        length = plan.q_len if kind == ir.ROW else plan.kv_len
        out = sums.reshape(shape.batch, shape.heads, -1)[..., :length]
    left = tuple(n for n in (0, 1) if shared[n])
    return out.sum(left, keepdims=True) if left else out


def _summed(
    kernel: CaptureKernel, tokens: Tokens[jax.Array], lists: TileLists[jax.Array], captures: Captures[jax.Array]
) -> jax.Array:
    """[lists, ...] float32: the sums of each list, reduced over what the table at the top says: [lists] for a scalar,
    [lists, tile] for a row or column, [lists, 2 * tile - 1] for a diagonal. More than LISTS_AT_ONCE lists are split
    over equal runs of the kernel.
    """

    def reduced(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        head, begin, count = part
        sums = kernel.run(tokens, lists._replace(head=head, begin=begin, count=count), captures)
        if kernel.shape.kind == ir.DIAGONAL:
            return diagonal_sums(sums)
        return sums if kernel.shape.kind == ir.ROW else sums.sum(1)  # over queries

    count = lists.count.shape[0]
    runs = cdiv(count, LISTS_AT_ONCE)
    each = cdiv(count, runs)
    parts = (lists.head, lists.begin, lists.count)
    if runs == 1:
        return reduced(parts)
    split = tuple(jnp.pad(x, (0, runs * each - count)).reshape(runs, each) for x in parts)
    sums = lax.map(reduced, split)
    return sums.reshape(runs * each, *sums.shape[2:])[:count]


def _sum_type(plan: KernelPlan, derivative: ir.Program, load_number: int) -> jax.typing.DTypeLike:
    """The dtype of the sums of a tile load: the array's where they are its whole gradient, else float32."""
    loads = gradient_loads(derivative)
    alone = sum(other.capture == loads[load_number].capture for other in loads) == 1
    direct = alone and plan.origin is None and axis_aligned_dims(loads[load_number]) is not None
    return derivative.captures[loads[load_number].capture].dtype if direct else jnp.float32


# ------------------------------------------------------------------- sums by element


def _scattered(one: _OneLoad, total: jax.Array) -> jax.Array:
    """`total`, float32 in the shape of the captured array, with the gradient of one load that `_kernel_scatters`.

    Tiles of a diagonal on which the index is the same are summed in registers first. If there are none and a head reads
    few elements, these are summed in shared memory (`Sink.PRIVATE`). Otherwise sums are in fixed point, which needs a
    bound of the sum of all |g|; if `_largest_total` knows none, a first kernel sums |g|.
    """
    plan, tokens, captures, derivative = one.plan, one.tokens, one.captures, one.derivative
    load, tile = one.load, warpgroups_for(plan) * ROWS
    whole = whole_tiles(plan, tile) if ir.classify_load(load).kind == ir.DIAGONAL else None
    period = 1 if whole else _period(plan, derivative, load, tile)
    kind = ir.DIAGONAL if period else ir.SCALAR
    shape = shape_for(plan, kind, tile, _shared(plan, load), max(period, 1), whole)
    lists = tile_lists(plan, one.operands.lists, shape, one.operands.origin)
    elements = None if period else private_sums.elements_of_head(derivative, load)
    private = None if elements is None else one.family.private_sums(plan, elements)
    if private is not None:
        kernel = dataclasses.replace(one.kernel(shape, Sink.PRIVATE), private=private)
        sums = kernel.run(tokens, lists, captures).reshape(shape.batch, shape.heads, -1, private.shape[1])
        return private_sums.add_heads(plan, one.operands, derivative, load, sums.sum(2)[..., :elements], total)
    largest = _largest_total(plan, tokens, derivative, one.load_number)
    if largest is None:
        everything = shape_for(plan, ir.SCALAR, tile, (True, True))
        visits = tile_lists(plan, one.operands.lists, everything)
        largest = _summed(one.kernel(everything, Sink.MAGNITUDES), tokens, visits, captures).sum()
    return total + one.kernel(shape, Sink.SCATTER).run(tokens, lists, captures, largest).reshape(total.shape)


def _period(plan: KernelPlan, derivative: ir.Program, load: ir.Load, tile: int) -> int:
    """After how many tiles along a diagonal the load's index is proven to repeat (`invariant`), at least 1; 0 if not,
    and under an origin of several runs.
    """
    if plan.origin is not None and not plan.origin.single:
        return 0
    rows, columns = cdiv(plan.q_len, tile), cdiv(plan.kv_len, tile)
    # with more diagonals, sums in registers save too little
    most = rows * columns // (2 * (rows + columns - 1))
    return next((n for n in range(1, most + 1) if invariant(derivative, load.index, n * tile)), 0)


LARGEST_SLOPE = 4096.0
"""A bound of the mod's derivative above this is not used; a first kernel then sums |g|. The unit of the fixed-point
sums is proportional to the bound, so a bound much larger than the true derivative would round small gradients to 0.
The bound holds 2^61 units, so a bound 2^12 times too large leaves 49 bits below the true total.
"""


def _largest_total(
    plan: KernelPlan, tokens: Tokens[jax.Array], derivative: ir.Program, load_number: int
) -> jax.Array | None:
    """An upper bound of the sum of all |g| of one load, a float32 scalar; None where the slope times the largest
    dropout multiplier is not known to be at most LARGEST_SLOPE.

    g = p (dP - delta) * d mod / d load. The p of one query sum to 1, and |dP| is at most |dO| times the longest value
    of the head, times the largest dropout multiplier. Where scores may be too large to scale each p may be 1, as in a
    weighted plan, whose g have no p.
    """
    if len(derivative.groups) > 1:  # the cotangents of expectations have no bound
        return None
    (low, high), *_ = bounds(with_results(derivative, (derivative.results[2 + load_number],)))
    slope = max(abs(low), abs(high))
    keep = 1.0
    if plan.dropout is not None:
        ((low, high),) = bounds(plan.dropout)
        keep = max(abs(low), abs(high))
    if not slope * keep <= LARGEST_SLOPE:
        return None

    def length(x: jax.Array) -> jax.Array:
        """The Euclidean lengths along the last axis in float32, whose squares neither overflow nor underflow."""
        x = x.astype(jnp.float32)
        largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        parts = x / jnp.where(largest > 0, largest, 1.0)
        return largest[..., 0] * jnp.sqrt(jnp.sum(jnp.square(parts), axis=-1))

    time = 1 if plan.layout == "BTNH" else 2
    parts = parts_of(plan)
    d_out = length(join(tokens.d_out, parts)).sum(time)
    value = jnp.repeat(length(join(tokens.value, parts)).max(time), plan.group, axis=-1)
    total = keep * jnp.sum(d_out * value) + jnp.sum(jnp.abs(tokens.stats[:, :, 1]))
    return total * (slope * (plan.kv_len if plan.weighted or may_be_large(plan.score) else 1))
