"""Between the class of every block and the lists that kernels walk.

Lists are int32. `num` [batch, heads, rows] says how many entries of `index` [batch, heads, rows, width] count; they ascend,
the rest are 0.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array

EMPTY, PARTIAL, FULL = 0, 1, 2


def rounded(widths: Sequence[int], most: int) -> tuple[int, ...]:
    """Widths of a pair of lists whose values may change: both 16, or the power of two that fits both, but never above `most`.

    The width is part of an array's shape, so each new one compiles again.
    """
    return (min(most, max(16, 1 << (max(widths) - 1).bit_length())),) * len(widths)


def lists_of(flags: Array) -> tuple[Array, Array]:
    """(num, index) of the True columns of each row of bool [..., rows, columns]; traced, width = columns."""
    columns = flags.shape[-1]
    count = jnp.cumsum(flags, -1, dtype=jnp.int32)
    place = jnp.where(flags, count - 1, columns)
    number = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), flags.shape)
    flat_place = place.reshape(math.prod(flags.shape[:-1]), columns)
    rows = jnp.arange(flat_place.shape[0], dtype=jnp.int32)[:, None]
    index = (
        jnp.zeros(flat_place.shape, jnp.int32).at[rows, flat_place].set(number.reshape(flat_place.shape), mode="drop")
    )
    num = jnp.sum(flags, -1, dtype=jnp.int32)
    return num, index.reshape(flags.shape)


def lists_of_places(places: np.ndarray, shape: tuple[int, int, int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(num, index) from coordinates [n, 4] (batch, head, row, column), none of more than `width` a row. On the host."""
    b, h, row, columns = places.astype(np.int64).T
    rows = (b * shape[1] + h) * shape[2] + row
    last = int(columns.max()) + 1 if len(columns) else 1
    order = np.argsort(rows * last + columns)
    rows, columns = rows[order], columns[order]
    num = np.bincount(rows, minlength=math.prod(shape)).astype(np.int32)
    index = np.zeros((num.size, width), np.int32)
    first = np.concatenate([[0], np.cumsum(num)[:-1]]) if num.size else np.zeros(0, int)
    index[rows, np.arange(len(rows)) - first[rows]] = columns
    return num.reshape(shape), index.reshape(*shape, width)


def narrowed(lists: Sequence[Array]) -> list[Array]:
    """Two pairs of lists without most of what lies past the longest rows, where they are known."""
    num, index, full_num, full_index = lists
    if any(isinstance(x, Tracer) for x in lists) or not num.size:
        return list(lists)
    longest = [int(np.max(np.asarray(n))) for n in (num, full_num)]
    width, full_width = rounded(longest, max(index.shape[-1], full_index.shape[-1]))
    return [num, index[..., :width], full_num, full_index[..., :full_width]]


def q_widths(lists: Sequence[Array], columns: int) -> tuple[int, int]:
    """Widths of the transposed lists (see Parts): rounded where the lists are known, else the number of rows."""
    rows = lists[0].shape[-1]
    widths = (rows, rows)
    if not any(isinstance(x, Tracer) for x in lists):
        batch, heads = lists[0].shape[:2]
        pairs = [places_of_lists(np.asarray(n), np.asarray(i)) for n, i in (lists[:2], lists[2:])]
        widths = rounded([longest_row(turned(places), (batch, heads, columns)) for places in pairs], rows)
    return tuple(w if x.shape[-1] else 0 for w, x in zip(widths, lists[1::2], strict=True))  # type: ignore[return-value]


def turned(places: np.ndarray) -> np.ndarray:
    """Coordinates with rows and columns exchanged."""
    return places[:, [0, 1, 3, 2]]


def longest_row(places: np.ndarray, shape: tuple[int, int, int]) -> int:
    """How many of the coordinates [n, 4] (batch, head, row, column) are in one row, at most."""
    b, h, row, _ = places.astype(np.int64).T
    return int(np.bincount((b * shape[1] + h) * shape[2] + row).max(initial=0))


@functools.partial(jax.jit, static_argnames=("columns", "width"))
def transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    """The lists of rows for each column, int32 [..., columns] and [..., columns, width]; no column is in more than `width`."""
    back_num, back = lists_of(jnp.swapaxes(flags_of_lists(num, index, columns), -1, -2))
    return back_num, back[..., :width]


def places_of_lists(num: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Coordinates [n, 4] of the entries that count. On the host."""
    live = np.arange(index.shape[-1]) < num[..., None]
    where = np.argwhere(live)
    return np.concatenate([where[:, :3], index[live][:, None]], 1)


def flags_of_lists(num: Array, index: Array, columns: int) -> Array:
    """bool [..., rows, columns] of the entries that count; traced."""
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    place = jnp.where(live, index, columns)
    flat = place.reshape(math.prod(num.shape), place.shape[-1])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flags = jnp.zeros((flat.shape[0], columns), bool).at[rows, flat].set(True, mode="drop")
    return flags.reshape(*place.shape[:-1], columns)
