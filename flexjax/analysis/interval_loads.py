"""The smallest and the largest element that a block can read of a captured array."""

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
    """Most neighbours that one block can reach along a dimension of that index."""
    linear = atom.linear if isinstance(atom, Val) else None
    if linear is None:
        return limit
    return min(limit, abs(linear.q) * (grid.block_q - 1) + abs(linear.kv) * (grid.block_kv - 1) + 1)


def load_extremes(
    load: Load, index: list[Abstract], array: Array, grid: BlockGrid, points: Mapping[int, Array]
) -> Abstract:
    """Smallest and largest element that the block can read."""
    dtype = load.out.dtype
    if any(isinstance(i, Truth) for i in index) or array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return unknown(dtype)
    spans = typing.cast(list[Interval], index)
    # An index is at rest where it is one known number in every block; all others may move.
    moving = [d for d, a in enumerate(load.index) if isinstance(a, Val) and a.id not in points]
    if len(moving) > 1 or (
        array.shape[moving[0]] > RANGE_TABLE_LIMIT
        and _longest(load.index[moving[0]], grid, array.shape[moving[0]]) > 1 << 16
    ):
        return _extremes_of_rows(load, spans, array, moving)
    (dim,) = moving
    rows = jnp.moveaxis(array, dim, -1)
    where = [i.low for d, i in enumerate(spans) if d != dim]
    span = spans[dim]
    longest = _longest(load.index[dim], grid, rows.shape[-1])
    ends = _range_extremes((rows, rows), where, span, longest)
    return _of_ends(*ends, span.contiguous, dtype)


RANGE_TABLE_LIMIT = 1 << 22
"""Longest dimension for which tables of range minima are made (log2 of it as many copies)."""
TILE_TABLE_LIMIT = 1 << 26
"""Largest array, and largest intermediate, for which extremes of rectangles are computed."""


def _range_extremes(
    rows: tuple[Array, Array], where: Sequence[Array], span: Interval, longest: int
) -> tuple[Array, Array]:
    """(least of rows[0][where, low..high], greatest of rows[1][where, low..high]), of at most `longest` elements."""
    n = rows[0].shape[-1]
    low, high = jnp.clip(span.low, 0, n - 1), jnp.clip(span.high, 0, n - 1)
    pick = lambda level, place: level.at[(*where, place)].get(mode="clip")
    return _doubling(rows, low, high, pick, -1, longest)


def _doubling(
    rows: tuple[Array, Array],
    low: Array,
    high: Array,
    pick: Callable[[Array, Array], Array],
    axis: int,
    longest: int,
) -> tuple[Array, Array]:
    """(least, greatest) between low and high along an axis: round k holds the extremes of 2^k neighbours.

    pick(level, places) reads a level. A loop, so that what has to be compiled does not grow with `longest`.
    """
    found = tuple(pick(level, low) for level in rows)
    if longest <= 1:
        return found  # type: ignore[return-value]
    n = rows[0].shape[axis]
    length = jnp.maximum(high - low, 0) + 1
    rounds = longest.bit_length() - 1
    extremes = (jnp.minimum, jnp.maximum)

    def neighbours(level: Array, width: Array) -> Array:
        """The element `width` further, or the last."""
        edge = lax.slice_in_dim(level, n - 1, n, axis=axis)
        margin = [1 << (rounds - 1) if d == axis % level.ndim else m for d, m in enumerate(level.shape)]
        longer = jnp.concatenate([level, jnp.broadcast_to(edge, margin)], axis)
        return lax.dynamic_slice_in_dim(longer, width, n, axis)

    def double(k: Array, state: tuple) -> tuple:
        levels, best = state
        width = jnp.left_shift(jnp.int32(1), k)
        levels = tuple(f(x, neighbours(x, width)) for f, x in zip(extremes, levels, strict=True))
        last = jnp.maximum(high - 2 * width + 1, 0)
        here = (f(pick(x, low), pick(x, last)) for f, x in zip(extremes, levels, strict=True))
        reached = length >= 2 * width
        shaped = lambda new: reached.reshape(reached.shape + (1,) * (new.ndim - reached.ndim))
        return levels, tuple(jnp.where(shaped(new), new, old) for new, old in zip(here, best, strict=True))

    # the first round as it is: the state of the loop has the shapes that it keeps
    state = double(jnp.int32(0), (rows, found))
    return lax.fori_loop(jnp.int32(1), jnp.int32(rounds), double, state)[1]


def _extremes_of_rows(load: Load, index: list[Interval], array: Array, moving: list[int]) -> Abstract:
    """Several moving dimensions: block extremes where the load is a plain tile, else those of all that it may reach."""
    wide = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
    fixed = [d for d in range(array.ndim) if d not in moving]
    rows = wide.transpose(*fixed, *moving)
    where = [index[d].low for d in fixed]
    spans = [index[d] for d in moving]
    starts = max(s.low.size for s in spans)
    if len(moving) == 2 and array.size <= TILE_TABLE_LIMIT and starts * max(array.shape) <= TILE_TABLE_LIMIT:
        ends = _rectangle_extremes(rows, where, spans)
        exact = flag_and(*(s.contiguous for s in spans))
        exact = flag_and(exact, independent([axes_of(a) for a in load.index]))
        return _of_ends(*ends, exact, load.out.dtype)
    axes = tuple(range(len(fixed), array.ndim))
    ends = [
        r.at[tuple(where)].get(mode="clip") if where else r.reshape(1, 1, 1, 1)
        for r in (rows.min(axes), rows.max(axes))
    ]
    return _of_ends(ends[0], ends[1], False, load.out.dtype)


def _rectangle_extremes(rows: Array, where: Sequence[Array], spans: Sequence[Interval]) -> tuple[Array, Array]:
    """Extremes of a rectangle of the last two dims: along one, kept at each span of it, then along the other.

    The spans of a dimension depend on blocks of queries or keys alone, so the first step makes [..., spans, n] numbers.
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
    if dtype == "bool":
        can_true, can_false = high != 0, low == 0
        seen = jnp.zeros((1, 1, 1, 1), bool) if exact is False else exact
        return Truth(can_true, can_false, can_true & seen, can_false & seen)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        low, high = low.astype(wide_type(dtype)), high.astype(wide_type(dtype))
        nan = jnp.isnan(low) | jnp.isnan(high)
        low, high = jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high)
    return Interval(low, high, exact, False)
