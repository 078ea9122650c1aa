"""Conversions between the classes of all blocks and block lists, and from lists of key blocks to lists of query blocks.

A pair of lists is int32: `num` [batch, heads, rows] is the number of valid entries in each row of `index` [batch, heads, rows,
width]. The valid entries ascend; the rest are 0. `places` are the same as coordinates [n, 4] (batch, head, row, column).
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
    """Widths for a pair of lists whose values may change between calls: the power of two, from 16, that holds both.

    The widths never exceed `most`. They are rounded because the width is part of an array's shape, and a new shape is compiled
    again.
    """
    return (min(most, max(16, 1 << (max(widths) - 1).bit_length())),) * len(widths)


def lists_of(flags: Array) -> tuple[Array, Array]:
    """(num, index) of the True columns of each row of bool [..., rows, columns], on the device; the width is `columns`."""
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
    """(num, index) from coordinates [n, 4], at most `width` of them in a row, on the host; shape: batch, heads, rows."""
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
    """Two pairs of lists whose index arrays are cut to the longest rows, rounded up; traced lists stay as they are."""
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
        widths = rounded([longest_row(transposed_places(places), (batch, heads, columns)) for places in pairs], rows)
    return tuple(w if x.shape[-1] else 0 for w, x in zip(widths, lists[1::2], strict=True))  # type: ignore[return-value]


def transposed_places(places: np.ndarray) -> np.ndarray:
    """Coordinates [n, 4] with rows and columns exchanged."""
    return places[:, [0, 1, 3, 2]]


def longest_row(places: np.ndarray, shape: tuple[int, int, int]) -> int:
    """The largest number of coordinates [n, 4] in one row; shape: batch, heads, rows."""
    b, h, row, _ = places.astype(np.int64).T
    return int(np.bincount((b * shape[1] + h) * shape[2] + row).max(initial=0))


@functools.partial(jax.jit, static_argnames=("columns", "width"))
def transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    """The lists of rows of each column, int32 [..., columns] and [..., columns, width].

    width   at least the largest number of rows that list one column
    """
    back_num, back = lists_of(jnp.swapaxes(flags_of_lists(num, index, columns), -1, -2))
    return back_num, back[..., :width]


def places_of_lists(num: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Coordinates [n, 4] of the valid entries of a pair of lists, on the host."""
    live = np.arange(index.shape[-1]) < num[..., None]
    where = np.argwhere(live)
    return np.concatenate([where[:, :3], index[live][:, None]], 1)


def flags_of_lists(num: Array, index: Array, columns: int) -> Array:
    """bool [..., rows, columns], True at the valid entries of a pair of lists, on the device."""
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    place = jnp.where(live, index, columns)
    flat = place.reshape(math.prod(num.shape), place.shape[-1])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flags = jnp.zeros((flat.shape[0], columns), bool).at[rows, flat].set(True, mode="drop")
    return flags.reshape(*place.shape[:-1], columns)
