"""The smallest and the largest element that each block of the attention matrix can read of a captured array.

The element that a load reads depends on the position within the block; these extremes bound it. An index varies if it depends
on the position, and is fixed if it is a literal or one number in each block. Where one index varies within a block, the extremes
of a range of elements are exact: all of them are read if they are few, otherwise precomputed minima and maxima of 2^k neighbours
(a sparse table). Where two indices vary, such tables give the extremes of rectangles. Otherwise the extremes of all elements that
the load may reach are taken.

Whether NaN is among the elements is computed apart from the extremes, in integers, because XLA's reductions by min and max lose
NaN: on a CPU the minimum of 64 x 64 zeros with a NaN in each row is 0. Both extremes of elements with a NaN are NaN.

Arrays of four dims have one element for each block, or broadcast to that.
"""

import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.block_grid import BlockGrid
from flexjax.analysis.interval_values import Abstract, Flag, Interval, Truth, flag_and, independent, unknown, wide_type
from flexjax.ir import program as ir
from flexjax.ir.program import Load, Val, axes_of

Array = jax.Array


def _longest(atom: ir.Atom, grid: BlockGrid, limit: int) -> int:
    """The largest number of neighbouring elements of a dimension that the positions of one block can read, at most
    `limit`.

    atom    the index of the load along the dimension; its coefficients of q and kv count, b and h are fixed in a block.
            Without a linear form (also a literal) it may take every value
    grid    the blocks
    limit   length of the dimension
    """
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return limit
    return min(limit, abs(linear.q) * (grid.block_q - 1) + abs(linear.kv) * (grid.block_kv - 1) + 1)


def load_extremes(
    load: Load, index: list[Abstract], array: Array, grid: BlockGrid, points: Mapping[int, Array]
) -> Abstract:
    """Bounds the element that a load reads in each block, by the smallest and the largest element that it can read
    there.

    load     the load; at least one of its indices varies
    index    what is known of each index of the load; indices out of range are clipped
    array    the captured array that it reads
    grid     the blocks
    points   the values that are one number in each block (those of b and h alone), by id

    Returns an Interval, for bool arrays a Truth. One varying index gives the exact extremes of its range; several, or
    one that can reach more than 2^16 elements of a dimension longer than RANGE_TABLE_LIMIT, give what
    `_extremes_of_rows` finds. Complex and empty arrays, and bools as indices, give `unknown`.
    """
    dtype = load.out.dtype
    if any(isinstance(i, Truth) for i in index) or array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return unknown(dtype)
    spans = typing.cast(list[Interval], index)
    # An index that is a literal or one known number in every block is fixed; the others vary.
    varying = [d for d, a in enumerate(load.index) if isinstance(a, Val) and a.id not in points]
    if len(varying) > 1 or (
        array.shape[varying[0]] > RANGE_TABLE_LIMIT
        and _longest(load.index[varying[0]], grid, array.shape[varying[0]]) > 1 << 16
    ):
        return _extremes_of_rows(load, spans, array, varying)
    (dim,) = varying
    rows = jnp.moveaxis(array, dim, -1)
    where = [i.low for d, i in enumerate(spans) if d != dim]
    span = spans[dim]
    longest = _longest(load.index[dim], grid, rows.shape[-1])
    ends = _range_extremes((rows, rows), where, span, longest)
    return _of_ends(*ends, span.contiguous, dtype)


RANGE_TABLE_LIMIT = 1 << 22
"""Longest dimension for which tables of range minima are made; they take log2(length) copies of the array."""
MOST_READ = 1 << 20
"""Up to so many elements over all blocks, every element of a range is read, which takes two XLA kernels. A table takes a loop of
log2 of the range's length, and on a GPU each round of it costs more than reading these elements."""
TILE_TABLE_LIMIT = 1 << 26
"""Largest array, and largest intermediate, for which extremes of rectangles are computed."""


def _range_extremes(
    rows: tuple[Array, Array], where: Sequence[Array], span: Interval, longest: int
) -> tuple[Array, Array]:
    """For each block the least and the greatest element of a range of the last dimension.

    rows      (the array for the minimum, the array for the maximum), of one shape, with NaN in the same places; usually the same array
              twice
    where     the fixed indices of all dimensions but the last, one integer array for each; clipped to the array
    span      the range of the last index in each block; clipped to the array
    longest   no range has more elements than this

    Returns (least of rows[0][where, low..high], greatest of rows[1][where, low..high]) with one element for each block; both are NaN
    where one of these is.
    """
    n = rows[0].shape[-1]
    low, high = jnp.clip(span.low, 0, n - 1), jnp.clip(span.high, 0, n - 1)
    if max(low.size, high.size) * longest <= MOST_READ:
        at = jnp.minimum(low[..., None] + jnp.arange(longest, dtype=low.dtype), high[..., None])
        read = lambda array: array.at[(*(i[..., None] for i in where), at)].get(mode="clip")
        return _reduced((read(rows[0]), read(rows[1])), (-1,))
    pick = lambda level, place: level.at[(*where, place)].get(mode="clip")
    return _doubling(rows, low, high, pick, -1, longest)


def _reduced(rows: tuple[Array, Array], axes: tuple[int, ...]) -> tuple[Array, Array]:
    """(the least element of rows[0], the greatest element of rows[1]) along the axes, both NaN where one of these elements is.

    rows   two arrays of one shape, with NaN in the same places; often the same array twice
    """
    ends = rows[0].min(axes), rows[1].max(axes)
    return _with_nan(ends, *(x.max(axes) for x in _marks_of_nan(rows[0])))


def _marks_of_nan(array: Array) -> tuple[Array, ...]:
    """(int8 array with 1 at each NaN of `array` and 0 elsewhere,) for floats, and () for other dtypes, which then cost nothing more.

    The maximum of integers is exact on every platform. On a CPU, XLA takes that of int8 in half the time of `any` of bools.
    """
    return (jnp.isnan(array).astype(jnp.int8),) if jnp.issubdtype(array.dtype, jnp.floating) else ()


def _with_nan(ends: tuple[Array, Array], *marks: Array) -> tuple[Array, Array]:
    """The two arrays `ends`, with NaN at both where the array `marks` is 1; as they are without `marks`."""
    for mark in marks:
        low, high = (jnp.where(mark == 1, jnp.array(jnp.nan, e.dtype), e) for e in ends)
        ends = low, high
    return ends


def _doubling(
    rows: tuple[Array, Array],
    low: Array,
    high: Array,
    pick: Callable[[Array, Array], Array],
    axis: int,
    longest: int,
) -> tuple[Array, Array]:
    """The least and the greatest element between two positions along an axis, by a sparse table of doubling widths.

    rows        (the array for the minimum, the array for the maximum), of one shape, with NaN in the same places
    low, high   first and last position of each range, both included, integer arrays within the axis
    pick        reads a level of the table, an array of the shape of `rows`, at positions of the shape of `low`
    axis        the axis along which positions count
    longest     no range has more elements than this; up to 1, the elements at `low` are returned

    A level has at each position the extremes of the 2^k neighbours from there on. The least (greatest) element of a
    range of 2^k to 2^(k+1) elements is that of two overlapping windows of the level. The rounds are a loop, so that the
    compiled program does not grow with `longest`. Returns (least, greatest), of the shape that `pick` gives; both are NaN
    where an element of the range is.
    """
    levels = (*rows, *_marks_of_nan(rows[0]))
    found = tuple(pick(level, low) for level in levels)
    if longest <= 1:
        return found[0], found[1]
    n = rows[0].shape[axis]
    length = jnp.maximum(high - low, 0) + 1
    rounds = longest.bit_length() - 1
    extremes = (jnp.minimum, jnp.maximum, jnp.maximum)[: len(levels)]

    def neighbours(level: Array, width: Array) -> Array:
        """For each position of a level the element `width` positions further along the axis, or the last element past the end; an array
        of the shape of `level`.

        width   an int32 scalar, at most 2^(rounds - 1)
        """
        edge = lax.slice_in_dim(level, n - 1, n, axis=axis)
        margin = [1 << (rounds - 1) if d == axis % level.ndim else m for d, m in enumerate(level.shape)]
        longer = jnp.concatenate([level, jnp.broadcast_to(edge, margin)], axis)
        return lax.dynamic_slice_in_dim(longer, width, n, axis)

    def double(k: Array, state: tuple) -> tuple:
        """Round k: makes the levels of 2^(k+1) neighbours, and takes from them the extremes of ranges at least that
        long; shorter ranges keep theirs.

        state   ((levels for minimum, maximum and marks of NaN), (least and greatest elements and marks so far)); returned in the
                same form
        """
        levels, best = state
        width = jnp.left_shift(jnp.int32(1), k)
        levels = tuple(f(x, neighbours(x, width)) for f, x in zip(extremes, levels, strict=True))
        last = jnp.maximum(high - 2 * width + 1, 0)
        here = (f(pick(x, low), pick(x, last)) for f, x in zip(extremes, levels, strict=True))
        reached = length >= 2 * width
        shaped = lambda new: reached.reshape(reached.shape + (1,) * (new.ndim - reached.ndim))
        return levels, tuple(jnp.where(shaped(new), new, old) for new, old in zip(here, best, strict=True))

    # the first round is outside of the loop, because it broadcasts the state to the shapes that the loop keeps
    state = double(jnp.int32(0), (levels, found))
    least, greatest, *marks = lax.fori_loop(jnp.int32(1), jnp.int32(rounds), double, state)[1]
    return _with_nan((least, greatest), *marks)


def _extremes_of_rows(load: Load, index: list[Interval], array: Array, varying: list[int]) -> Abstract:
    """Bounds the element of a load of which several indices vary within a block, or one index whose range is too long
    for a table.

    load      the load
    index     the interval of each of its indices
    array     the captured array
    varying   numbers of the dimensions whose index varies

    Two varying indices over an array of at most TILE_TABLE_LIMIT elements, whose table has no more either, give the
    extremes of each block's rectangle; these are attained where both ranges are contiguous and the indices are
    independent. Otherwise the extremes over the whole of the varying dimensions are taken, and are not attained. Fixed
    indices are clipped to the array.
    """
    wide = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
    fixed = [d for d in range(array.ndim) if d not in varying]
    rows = wide.transpose(*fixed, *varying)
    where = [index[d].low for d in fixed]
    spans = [index[d] for d in varying]
    starts = max(s.low.size for s in spans)
    if len(varying) == 2 and array.size <= TILE_TABLE_LIMIT and starts * max(array.shape) <= TILE_TABLE_LIMIT:
        ends = _rectangle_extremes(rows, where, spans)
        exact = flag_and(*(s.contiguous for s in spans))
        exact = flag_and(exact, independent([axes_of(a) for a in load.index]))
        return _of_ends(*ends, exact, load.out.dtype)
    axes = tuple(range(len(fixed), array.ndim))
    ends = [
        r.at[tuple(where)].get(mode="clip") if where else r.reshape(1, 1, 1, 1) for r in _reduced((rows, rows), axes)
    ]
    return _of_ends(ends[0], ends[1], False, load.out.dtype)


def _rectangle_extremes(rows: Array, where: Sequence[Array], spans: Sequence[Interval]) -> tuple[Array, Array]:
    """For each block the least and the greatest element of a rectangle of the last two dimensions of an array.

    rows    the array
    where   the fixed indices of its other dimensions
    spans   the ranges of the last two indices in each block, both clipped to the array

    First the extremes of each distinct range of the last dimension but one are computed, along all of the last
    dimension: [..., ranges, n] numbers, few because such a range depends on query blocks or key blocks alone. Then each
    block's range of the last dimension is taken of these.
    """
    first, second = spans
    shape = jnp.broadcast_shapes(first.low.shape, first.high.shape)
    n = rows.shape[-2]
    low, high = (jnp.clip(jnp.broadcast_to(e, shape).ravel(), 0, n - 1) for e in (first.low, first.high))
    moved = jnp.moveaxis(rows, -2, 0)
    along = _doubling((moved, moved), low, high, lambda level, place: level[place], 0, n)
    one = tuple(jnp.moveaxis(x, 0, -2) for x in along)
    flat = jnp.arange(one[0].shape[-2]).reshape(shape)
    return _range_extremes(one, [*where, flat], second, one[0].shape[-1])  # type: ignore[arg-type]


def _of_ends(low: Array, high: Array, exact: Flag, dtype: str) -> Abstract:
    """Makes what is known of a loaded element from its least and greatest value in each block: an Interval, for bools a Truth.

    low, high   the extremes; for bools as bools or 0 and 1. A float that is NaN at one end gets NaN at both
    exact       whether some entry of the block reads the least and some entry the greatest value (`attained`)
    dtype       dtype name of the element; ends of narrow floats are stored as float32

    The result is not `contiguous`.
    """
    if dtype == "bool":
        can_true, can_false = high != 0, low == 0
        seen = jnp.zeros((1, 1, 1, 1), bool) if exact is False else exact
        return Truth(can_true, can_false, can_true & seen, can_false & seen)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        low, high = low.astype(wide_type(dtype)), high.astype(wide_type(dtype))
        nan = jnp.isnan(low) | jnp.isnan(high)
        low, high = jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high)
    return Interval(low, high, exact, False)
