"""The smallest and the largest element that each block of the attention matrix can read of a captured array.

An index of a load varies if it depends on the position within the block, and is fixed otherwise. Where one index
varies, the extremes of a range of elements are exact: all are read if they are few, otherwise precomputed minima and
maxima of 2^k neighbours (a sparse table). Where two indices vary, such tables give the extremes of rectangles.
Otherwise the extremes of all elements that the load may reach are taken.

Whether NaN is among the elements is computed apart, in integers, because XLA's reductions by min and max lose NaN: on a
CPU the minimum of 64 x 64 zeros with a NaN in each row is 0. Both extremes of elements with a NaN are NaN.

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
    """The most neighbouring elements of a dimension of length `limit` that one block can read."""
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return limit
    return min(limit, abs(linear.q) * (grid.block_q - 1) + abs(linear.kv) * (grid.block_kv - 1) + 1)


def load_extremes(
    load: Load,
    index: list[Abstract],
    array: Array,
    grid: BlockGrid,
    points: Mapping[int, Array],
    loops: frozenset[Val] = frozenset(),
) -> Abstract:
    """Bounds the element that a load reads in each block; at least one of its indices varies.

    `points` are the values that are one number in each block, by id.
    """
    dtype = load.out.dtype
    if any(isinstance(i, Truth) for i in index) or array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return unknown(dtype)
    spans = typing.cast(list[Interval], index)
    # An index that is a literal or one known number in every block is fixed; the others vary.
    whole = whole_dims(load, array.shape, loops)
    rows = _reduced((array, array), whole) if whole else (array, array)
    kept = [d for d in range(array.ndim) if d not in whole]
    atoms, spans, shape = [load.index[d] for d in kept], [spans[d] for d in kept], rows[0].shape
    varying = [d for d, a in enumerate(atoms) if isinstance(a, Val) and a.id not in points]
    if not varying:
        at = lambda x: x.at[tuple(s.low for s in spans)].get(mode="clip") if spans else x.reshape(1, 1, 1, 1)
        return _of_ends(at(rows[0]), at(rows[1]), True, dtype)
    if len(varying) > 1 or (
        shape[varying[0]] > RANGE_TABLE_LIMIT and _longest(atoms[varying[0]], grid, shape[varying[0]]) > 1 << 16
    ):
        return _extremes_of_rows(atoms, spans, rows, varying, dtype)
    (dim,) = varying
    where = [i.low for d, i in enumerate(spans) if d != dim]
    span = spans[dim]
    longest = _longest(atoms[dim], grid, shape[dim])
    moved = tuple(jnp.moveaxis(r, dim, -1) for r in rows)
    ends = _range_extremes(moved, where, span, longest)  # type: ignore[arg-type]
    return _of_ends(*ends, span.contiguous, dtype)


def whole_dims(load: Load, shape: tuple[int, ...], loops: frozenset[Val]) -> tuple[int, ...]:
    """The dimensions of which the load reads every element by a loop index, whatever the other indices are."""
    index = load.index
    alone = lambda d: not any(axes_of(a) & axes_of(index[d]) for n, a in enumerate(index) if n != d)
    return tuple(
        d
        for d, a in enumerate(index)
        if a in loops and a.high == shape[d] - 1 and alone(d)  # type: ignore[union-attr]
    )


RANGE_TABLE_LIMIT = 1 << 22
"""Longest dimension for which tables of range minima are made; they take log2(length) copies of the array."""
MOST_READ = 1 << 20
"""Elements over all blocks up to which every element of a range is read.

A table takes log2(length) rounds; on a GPU one round costs more than reading these elements.
"""
TILE_TABLE_LIMIT = 1 << 26
"""Largest array, and largest intermediate, for which extremes of rectangles are computed."""


def _range_extremes(
    rows: tuple[Array, Array], where: Sequence[Array], span: Interval, longest: int
) -> tuple[Array, Array]:
    """For each block (least of rows[0], greatest of rows[1]) over a range of the last dimension.

    `rows` have one shape and NaN in the same places; usually they are one array twice. `where` has the fixed indices of
    the other dimensions. No range has more than `longest` elements; indices are clipped to the array.
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
    """(the least element of rows[0], the greatest of rows[1]) along the axes, both NaN where an element is."""
    ends = rows[0].min(axes), rows[1].max(axes)
    return _with_nan(ends, *(x.max(axes) for x in _marks_of_nan(rows[0])))


def _marks_of_nan(array: Array) -> tuple[Array, ...]:
    """(int8 array with 1 at each NaN of `array`,) for floats, () for other dtypes."""
    # maxima of integers are exact everywhere; on a CPU, XLA takes that of int8 in half the time of `any` of bools
    return (jnp.isnan(array).astype(jnp.int8),) if jnp.issubdtype(array.dtype, jnp.floating) else ()


def _with_nan(ends: tuple[Array, Array], *marks: Array) -> tuple[Array, Array]:
    """The two arrays `ends`, with NaN where a mark is 1."""
    for mark in marks:
        low, high = (jnp.where(mark == 1, jnp.array(jnp.nan, e.dtype), e) for e in ends)
        ends = low, high
    return ends


def _doubling(
    rows: tuple[Array, Array], low: Array, high: Array, pick: Callable[[Array, Array], Array], axis: int, longest: int
) -> tuple[Array, Array]:
    """The least and the greatest element between `low` and `high` (both included) along an axis, by a sparse table.

    A level has at each position the extremes of the 2^k neighbours from there on; a range of 2^k to 2^(k+1) elements is
    two overlapping windows. The rounds are a loop, so that the compiled program does not grow.
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
        """The element `width` positions further along the axis, or the last one past the end."""
        edge = lax.slice_in_dim(level, n - 1, n, axis=axis)
        margin = [1 << (rounds - 1) if d == axis % level.ndim else m for d, m in enumerate(level.shape)]
        longer = jnp.concatenate([level, jnp.broadcast_to(edge, margin)], axis)
        return lax.dynamic_slice_in_dim(longer, width, n, axis)

    def double(k: Array, state: tuple) -> tuple:
        """Makes the levels of 2^(k+1) neighbours and takes from them the extremes of ranges at least that long."""
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


def _extremes_of_rows(
    atoms: Sequence[ir.Atom], index: list[Interval], arrays: tuple[Array, Array], varying: list[int], dtype: str
) -> Abstract:
    """Bounds the element of a load of which several indices vary, or one whose range is too long for a table.

    Two varying indices give the extremes of each block's rectangle, where tables fit; otherwise those over the whole of
    the varying dimensions are taken, and are not attained.
    """
    array = arrays[0]
    fixed = [d for d in range(array.ndim) if d not in varying]
    order = lambda x: (x.astype(jnp.int8) if x.dtype == jnp.bool_ else x).transpose(*fixed, *varying)
    rows = order(arrays[0]), order(arrays[1])
    where = [index[d].low for d in fixed]
    spans = [index[d] for d in varying]
    starts = max(s.low.size for s in spans)
    if len(varying) == 2 and array.size <= TILE_TABLE_LIMIT and starts * max(array.shape) <= TILE_TABLE_LIMIT:
        ends = _rectangle_extremes(rows, where, spans)
        exact = flag_and(*(s.contiguous for s in spans))
        exact = flag_and(exact, independent([axes_of(a) for a in atoms]))
        return _of_ends(*ends, exact, dtype)
    axes = tuple(range(len(fixed), array.ndim))
    ends = [r.at[tuple(where)].get(mode="clip") if where else r.reshape(1, 1, 1, 1) for r in _reduced(rows, axes)]
    return _of_ends(ends[0], ends[1], False, dtype)


def _rectangle_extremes(
    rows: tuple[Array, Array], where: Sequence[Array], spans: Sequence[Interval]
) -> tuple[Array, Array]:
    """For each block the least and the greatest element of a rectangle of the last two dimensions of an array.

    The extremes of each distinct range of the last dimension but one come first, [..., ranges, n]: few, because such a
    range depends on query blocks or key blocks alone.
    """
    first, second = spans
    shape = jnp.broadcast_shapes(first.low.shape, first.high.shape)
    n = rows[0].shape[-2]
    low, high = (jnp.clip(jnp.broadcast_to(e, shape).ravel(), 0, n - 1) for e in (first.low, first.high))
    moved = jnp.moveaxis(rows[0], -2, 0), jnp.moveaxis(rows[1], -2, 0)
    along = _doubling(moved, low, high, lambda level, place: level[place], 0, n)
    one = tuple(jnp.moveaxis(x, 0, -2) for x in along)
    flat = jnp.arange(one[0].shape[-2]).reshape(shape)
    return _range_extremes(one, [*where, flat], second, one[0].shape[-1])  # type: ignore[arg-type]


def _of_ends(low: Array, high: Array, exact: Flag, dtype: str) -> Abstract:
    """What is known of a loaded element from its least and greatest value in each block."""
    if dtype == "bool":
        can_true, can_false = high != 0, low == 0
        seen = jnp.zeros((1, 1, 1, 1), bool) if exact is False else exact
        return Truth(can_true, can_false, can_true & seen, can_false & seen)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        low, high = low.astype(wide_type(dtype)), high.astype(wide_type(dtype))
        nan = jnp.isnan(low) | jnp.isnan(high)
        low, high = jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high)
    return Interval(low, high, exact, False)
