"""Conversions between the classes of all blocks and block lists, and from lists of key blocks to lists of query blocks.

Rows are query blocks and columns are key blocks (in transposed lists the other way round). A pair of lists is int32: `num`
[batch, heads, rows] is how many columns each row lists, and `index` [batch, heads, rows, width] has their numbers. These ascend in
lists that are made here, but not in all lists of users; past the count `index` has any number. `places` are the same blocks as
coordinates [n, 4] (batch, head, row, column).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from flexjax.block_mask.host_or_program import known, not_folded

Array = jax.Array

EMPTY, PARTIAL, FULL = 0, 1, 2
MOST_PAIRS = 1 << 21
"""The most comparisons, of pairs of columns of all rows, by which lists are made in a program on GPUs and TPUs. There launches take
longer than what they compute; a CPU scatters."""


def rounded(widths: Sequence[int], most: int) -> tuple[int, ...]:
    """All `widths` rounded up to one number: the smallest power of two, at least 16, that none of them exceeds, but at most
    `most`.

    For lists whose contents may change between calls: the width is part of an array's shape, and a new shape is compiled again.
    """
    return (min(most, max(16, 1 << (max(widths) - 1).bit_length())),) * len(widths)


def lists_of(flags: Array) -> tuple[Array, Array]:
    """The pair of lists (num, index) of the columns at which each row of `flags`, bool [..., rows, columns], is True.

    Runs on the host for numpy arrays, otherwise on the device, also on traced arrays. The width of `index` is `columns`; past
    the counts `index` is 0.
    """
    columns = flags.shape[-1]
    if known(flags):
        num = np.asarray(flags).sum(-1, dtype=np.int32)
        first = np.argsort(~np.asarray(flags), axis=-1, kind="stable").astype(np.int32)
        return num, np.where(np.arange(columns) < num[..., None], first, 0)  # pyright: ignore[reportReturnType]
    if flags.size * columns <= MOST_PAIRS:
        return lax.platform_dependent(flags, cpu=_lists_by_scatter, default=_lists_by_pairs)
    return _lists_by_scatter(flags)


def _lists_by_pairs(flags: Array) -> tuple[Array, Array]:
    """What `lists_of` returns for `flags`, on the device, by comparing all pairs of columns: two kernels of a GPU."""
    num, at = jnp.sum(flags, -1, dtype=jnp.int32), jnp.arange(flags.shape[-1], dtype=jnp.int32)
    count = jnp.sum(flags[..., None, :] & (at <= at[:, None]), -1, dtype=jnp.int32)
    index = jnp.sum(count[..., None, :] <= at[:, None], -1, dtype=jnp.int32)
    return num, jnp.where(at < num[..., None], index, 0)


def _lists_by_scatter(flags: Array) -> tuple[Array, Array]:
    """What `lists_of` returns for `flags`, on the device, by a prefix sum and a scatter: six kernels of a GPU, and less work."""
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
    """The pair of lists (num, index) of the blocks at the coordinates `places` [n, 4], computed on the host.

    shape   batch, heads, rows
    width   of index, at least the largest number of coordinates in one row
    """
    rows, columns = _row_numbers(places, shape), places[:, 3].astype(np.int64)
    last = int(columns.max()) + 1 if len(columns) else 1
    order = np.argsort(rows * last + columns)
    rows, columns = rows[order], columns[order]
    num = np.bincount(rows, minlength=math.prod(shape)).astype(np.int32)
    index = np.zeros((num.size, width), np.int32)
    first = np.concatenate([[0], np.cumsum(num)[:-1]]) if num.size else np.zeros(0, int)
    index[rows, np.arange(len(rows)) - first[rows]] = columns
    return num.reshape(shape), index.reshape(*shape, width)


def narrowed(lists: Sequence[Array]) -> list[Array]:
    """`lists`, two pairs [num, index, full_num, full_index], with both index arrays cut to one width: the largest count in `num` and
    `full_num`, rounded up (`rounded`).

    An index array of at most that width stays as it is. So do all lists if one of them is traced, or if they have no rows.
    """
    num, index, full_num, full_index = lists
    if any(isinstance(x, Tracer) for x in lists) or not num.size:
        return list(lists)
    longest = [int(np.max(np.asarray(n))) for n in (num, full_num)]
    width, full_width = rounded(longest, max(index.shape[-1], full_index.shape[-1]))
    return [num, index[..., :width], full_num, full_index[..., :full_width]]


def q_widths(lists: Sequence[Array], columns: int) -> tuple[int, int]:
    """The widths of the transposed lists of two pairs (see Parts.q_widths): the most rows that list one column.

    lists     num, index, full_num, full_index
    columns   how many columns there are

    The widths are rounded up (`rounded`) if the lists are concrete, and are the number of rows if they are traced. 0 for a list
    of width 0.
    """
    rows = lists[0].shape[-1]
    widths = (rows, rows)
    if not any(isinstance(x, Tracer) for x in lists):
        batch, heads = lists[0].shape[:2]
        pairs = [places_of_lists(np.asarray(n), np.asarray(i)) for n, i in (lists[:2], lists[2:])]
        widths = rounded([longest_row(transposed_places(places), (batch, heads, columns)) for places in pairs], rows)
    return tuple(w if x.shape[-1] else 0 for w, x in zip(widths, lists[1::2], strict=True))  # type: ignore[return-value]


def transposed_places(places: np.ndarray) -> np.ndarray:
    """The coordinates `places` [n, 4] with row and column exchanged."""
    return places[:, [0, 1, 3, 2]]


def longest_row(places: np.ndarray, shape: tuple[int, int, int]) -> int:
    """The largest number of the coordinates `places` [n, 4] that lie in one row. shape: batch, heads, rows."""
    return int(np.bincount(_row_numbers(places, shape)).max(initial=0))


def _row_numbers(places: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """int64 [n]: the row of each of the coordinates `places` [n, 4], counted over all batch entries and heads. shape: batch, heads,
    rows.
    """
    b, h, row, _ = places.T
    return (b.astype(np.int64) * shape[1] + h) * shape[2] + row


def transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    """The transposed pair of lists: how many rows list each column, int32 [..., columns], and their numbers, ascending, [..., columns,
    width], with 0 past the count.

    num, index   how many columns each row lists, and their numbers
    columns      how many columns there are
    width        at least the largest number of rows that list one column; further rows would be left out

    Runs on the host for numpy arrays, otherwise on the device as one compiled function.
    """
    return (_transposed if known(num, index) else _transposed_by_jit)(num, index, columns=columns, width=width)


def _transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    """The transposed pair of lists from the same arguments as `transposed`, by numpy on known lists, else by operations of the caller's
    program.
    """
    num, index = not_folded(num, index)
    back_num, back = lists_of(flags_of_lists(num, index, columns).swapaxes(-1, -2))
    return back_num, back[..., :width]


_transposed_by_jit = jax.jit(_transposed, static_argnames=("columns", "width"))


def places_of_lists(num: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The coordinates (batch entry, head, row, column) of the blocks that a pair of lists names, int [n, 4], row after row in the order
    of the lists, computed on the host. Entries past the counts name no block; numbers are not checked.

    num, index   how many columns each row lists, [B, H, rows], and their numbers, [B, H, rows, width]
    """
    live = np.arange(index.shape[-1]) < num[..., None]
    where = np.argwhere(live)
    return np.concatenate([where[:, :3], index[live][:, None]], 1)


def flags_of_lists(num: Array, index: Array, columns: int) -> Array:
    """bool [..., rows, columns], True at the blocks that a pair of lists names.

    Runs on the host for numpy arrays, otherwise on the device, also on traced lists.

    Before the counts, numbers from `columns` on name nothing, and negative ones must not occur; after them any number
    may.
    """
    if known(num, index):
        live = np.arange(index.shape[-1]) < np.asarray(num)[..., None]
        place = np.where(live, np.minimum(index, columns), columns).reshape(math.prod(num.shape), index.shape[-1])
        flags = np.zeros((place.shape[0], columns + 1), bool)
        flags[np.arange(place.shape[0])[:, None], place] = True
        return flags[:, :columns].reshape(*num.shape, columns)  # pyright: ignore[reportReturnType]
    return _flags_by_jit(num, index, columns)


@functools.partial(jax.jit, static_argnames="columns")  # eagerly each operation would be compiled alone
def _flags_by_jit(num: Array, index: Array, columns: int) -> Array:
    """`flags_of_lists` on the device: bool [..., rows, columns], True at the blocks that a pair of lists names."""
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    by_pairs = lambda live, index: jnp.any(live[..., None] & (index[..., None] == jnp.arange(columns)), -2)
    by_scatter = functools.partial(_flags_by_scatter, columns=columns)
    if index.size * columns <= MOST_PAIRS:
        return lax.platform_dependent(live, index, cpu=by_scatter, default=by_pairs)
    return by_scatter(live, index)


def _flags_by_scatter(live: Array, index: Array, columns: int) -> Array:
    """bool [..., rows, columns], True at the blocks that `index` names where it is `live` (bool in its shape)."""
    place = jnp.where(live, index, columns)
    flat = place.reshape(math.prod(place.shape[:-1]), place.shape[-1])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flags = jnp.zeros((flat.shape[0], columns), bool).at[rows, flat].set(True, mode="drop")
    return flags.reshape(*place.shape[:-1], columns)
