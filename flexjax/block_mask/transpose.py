"""Conversions between the classes of all blocks and block lists, and from lists of key blocks to lists of query blocks.

Rows are query blocks and columns are key blocks (in transposed lists the other way round). A pair of lists is int32:
`num` [batch, heads, rows] is how many columns each row lists, and `index` [batch, heads, rows, width] has their
numbers. These ascend in lists that are made here, but not in all lists of users; past the count `index` has any number.
`bits` are the same blocks as uint32 [batch, heads, rows, words]: bit k of word w is column 32 w + k. Lists as wide as
all columns take 32 times as much memory, so a program makes large ones in parts, from bits.
`places` are the same blocks as coordinates [n, 4] (batch, head, row, column). Everything runs on the host for numpy
arrays, and on the device for others.
"""

import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from flexjax.block_mask.host_or_program import known, not_folded
from flexjax.integers import cdiv

Array = jax.Array

EMPTY, PARTIAL, FULL = 0, 1, 2
MOST_PAIRS = 1 << 21
"""The most comparisons, of pairs of columns of all rows, by which a program on GPUs and TPUs makes lists.

There launches take longer than what they compute; a CPU scatters.
"""


WORD = 32  # columns of a word of bits
LARGE = 1 << 18  # blocks above which traced lists are stored as bits, and transposed as such
AT_ONCE = 1 << 21  # blocks whose lists a program makes at once


def rounded(widths: Sequence[int], most: int) -> tuple[int, ...]:
    """One width for all: the smallest power of two, at least 16, that no width exceeds, but at most `most`."""
    # the width is part of an array's shape, and a new shape is compiled again
    return (min(most, max(16, 1 << (max(widths) - 1).bit_length())),) * len(widths)


def lists_of(flags: Array) -> tuple[Array, Array]:
    """The pair of lists of the columns at which each row of `flags`, bool [..., rows, columns], is True."""
    columns = flags.shape[-1]
    if known(flags):
        num = np.asarray(flags).sum(-1, dtype=np.int32)
        first = np.argsort(~np.asarray(flags), axis=-1, kind="stable").astype(np.int32)
        return num, np.where(np.arange(columns) < num[..., None], first, 0)  # pyright: ignore[reportReturnType]
    by_scatter = lambda flags: lists_of_bits(bits_of(flags), columns)
    if flags.size * columns <= MOST_PAIRS:
        return lax.platform_dependent(flags, cpu=by_scatter, default=_lists_by_pairs)
    return by_scatter(flags)


def _lists_by_pairs(flags: Array) -> tuple[Array, Array]:
    """`lists_of` on the device, by comparing all pairs of columns: two kernels of a GPU."""
    num, at = jnp.sum(flags, -1, dtype=jnp.int32), jnp.arange(flags.shape[-1], dtype=jnp.int32)
    count = jnp.sum(flags[..., None, :] & (at <= at[:, None]), -1, dtype=jnp.int32)
    index = jnp.sum(count[..., None, :] <= at[:, None], -1, dtype=jnp.int32)
    return num, jnp.where(at < num[..., None], index, 0)


def bits_of(flags: Array) -> Array:
    """The bits of flags, bool [..., columns]: uint32 [..., words]."""
    words = cdiv(flags.shape[-1], WORD)
    padded = jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, words * WORD - flags.shape[-1])])
    bits = padded.reshape(*flags.shape[:-1], words, WORD).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), -1, dtype=jnp.uint32)


def flags_of_bits(bits: Array, columns: int) -> Array:
    """bool [..., columns], the inverse of `bits_of`."""
    flags = (bits[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1 > 0
    return flags.reshape(*bits.shape[:-1], bits.shape[-1] * WORD)[..., :columns]


def counts_of_bits(bits: Array) -> Array:
    """int32 [...]: how many bits of each row are 1."""
    return jnp.sum(lax.population_count(bits), -1, dtype=jnp.int32)


def lists_of_bits(bits: Array, columns: int) -> tuple[Array, Array]:
    """The pair of lists of the columns in the bits of each row; in parts, because they take 32 times the memory."""
    flat = bits.reshape(math.prod(bits.shape[:-1]), bits.shape[-1])
    num, index = _by_rows(functools.partial(_lists_of_words, columns=columns), columns, flat)
    return num.reshape(bits.shape[:-1]), index.reshape(*bits.shape[:-1], columns)


def _lists_of_words(bits: Array, columns: int) -> tuple[Array, Array]:
    """`lists_of_bits` of uint32 [rows, words], by a scatter of each column to its place in the list."""
    at, counts = jnp.arange(WORD, dtype=jnp.uint32), lax.population_count(bits).astype(jnp.int32)
    before = jnp.cumsum(counts, -1, dtype=jnp.int32) - counts
    in_word = lax.population_count(bits[..., None] & ((1 << at) - 1)).astype(jnp.int32)
    number = jnp.arange(bits.shape[-1] * WORD, dtype=jnp.int32)
    place = (before[..., None] + in_word).reshape(bits.shape[0], number.size)
    # columns that are not listed go past the end, each to another place
    place = jnp.where(flags_of_bits(bits, number.size), place, columns + number)
    rows, number = jnp.arange(bits.shape[0], dtype=jnp.int32)[:, None], jnp.broadcast_to(number, place.shape)
    empty = jnp.zeros((bits.shape[0], columns), jnp.int32)
    return jnp.sum(counts, -1, dtype=jnp.int32), empty.at[rows, place].set(number, mode="drop", unique_indices=True)


def _by_rows(function: Callable[..., typing.Any], columns: int, *rows: Array) -> typing.Any:
    """A function of rows, applied to all, about AT_ONCE blocks at a time."""
    count = rows[0].shape[0]
    parts = cdiv(count * columns, AT_ONCE)
    if parts <= 1:
        return function(*rows)
    each = cdiv(count, parts)
    past = parts * each - count
    cut = lambda x: jnp.pad(x, [(0, past), *[(0, 0)] * (x.ndim - 1)]).reshape(parts, each, *x.shape[1:])
    joined = lambda x: x.reshape(parts * each, *x.shape[2:])[:count]
    return jax.tree.map(joined, lax.map(lambda part: function(*part), tuple(map(cut, rows))))


def transposed_bits(bits: Array, columns: int) -> Array:
    """The bits of the transposed blocks: uint32 [..., columns, words of rows]."""
    *lead, rows, words = bits.shape
    words_t = cdiv(rows, WORD)
    padded = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, words_t * WORD - rows), (0, 0)])
    at = jnp.arange(WORD, dtype=jnp.uint32)
    # [.., words of rows, row in its word, words, column in its word], of which XLA stores the sum alone
    bit = (padded.reshape(*lead, words_t, WORD, words)[..., None] >> at) & 1
    turned = jnp.sum(bit << at[:, None, None], -3, dtype=jnp.uint32)
    return jnp.moveaxis(turned, -3, -1).reshape(*lead, words * WORD, words_t)[..., :columns, :]


def lists_of_places(places: np.ndarray, shape: tuple[int, int, int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The pair of lists of the blocks at `places`, on the host; `shape` is (batch, heads, rows)."""
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
    """Two pairs of lists, if they are concrete, cut to one width: the largest count, rounded up."""
    num, index, full_num, full_index = lists
    if any(isinstance(x, Tracer) for x in lists) or not num.size:
        return list(lists)
    longest = [int(np.max(np.asarray(n))) for n in (num, full_num)]
    width, full_width = rounded(longest, max(index.shape[-1], full_index.shape[-1]))
    return [num, index[..., :width], full_num, full_index[..., :full_width]]


def q_widths(lists: Sequence[Array], columns: int) -> tuple[int, int]:
    """The widths of the transposed lists of two pairs: the most rows that list one column, rounded up."""
    # traced lists may have any column in every row
    rows = lists[0].shape[-1]
    widths = (rows, rows)
    if not any(isinstance(x, Tracer) for x in lists):
        batch, heads = lists[0].shape[:2]
        pairs = [places_of_lists(np.asarray(n), np.asarray(i)) for n, i in (lists[:2], lists[2:])]
        widths = rounded([longest_row(transposed_places(places), (batch, heads, columns)) for places in pairs], rows)
    pairs = zip(widths, lists[1::2], strict=True)
    return tuple(w if x.shape[-1] else 0 for w, x in pairs)  # type: ignore[return-value]


def transposed_places(places: np.ndarray) -> np.ndarray:
    return places[:, [0, 1, 3, 2]]


def longest_row(places: np.ndarray, shape: tuple[int, int, int]) -> int:
    """The most blocks of `places` that lie in one row."""
    return int(np.bincount(_row_numbers(places, shape)).max(initial=0))


def _row_numbers(places: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """int64 [n]: the row of each block, counted over all batch entries and heads."""
    b, h, row, _ = places.T
    return (b.astype(np.int64) * shape[1] + h) * shape[2] + row


def transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    """The transposed pair of lists: [..., columns] and [..., columns, width], ascending, 0 past the count."""
    return (_transposed if known(num, index) else _transposed_by_jit)(num, index, columns=columns, width=width)


def _transposed(num: Array, index: Array, columns: int, width: int) -> tuple[Array, Array]:
    num, index = not_folded(num, index)
    if known(num, index) or num.size * columns <= LARGE:
        back_num, back = lists_of(flags_of_lists(num, index, columns).swapaxes(-1, -2))
    else:
        live = lambda num, index: jnp.arange(index.shape[-1]) < num[:, None]
        words = lambda num, index: bits_of(_flags_by_scatter(live(num, index), index, columns))
        bits = _by_rows(words, columns, num.reshape(-1), index.reshape(num.size, index.shape[-1]))
        back_num, back = lists_of_bits(transposed_bits(bits.reshape(*num.shape, -1), columns), num.shape[-1])
    return back_num, back[..., :width]


_transposed_by_jit = jax.jit(_transposed, static_argnames=("columns", "width"))


def places_of_lists(num: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The coordinates [n, 4] of the blocks that a pair of lists names, in the order of the lists, on the host."""
    live = np.arange(index.shape[-1]) < num[..., None]
    where = np.argwhere(live)
    return np.concatenate([where[:, :3], index[live][:, None]], 1)


def flags_of_lists(num: Array, index: Array, columns: int) -> Array:
    """bool [..., rows, columns], True at the blocks that a pair of lists, of numbers of at least 0, names."""
    if known(num, index):
        live = np.arange(index.shape[-1]) < np.asarray(num)[..., None]
        place = np.where(live, np.minimum(index, columns), columns).reshape(math.prod(num.shape), index.shape[-1])
        flags = np.zeros((place.shape[0], columns + 1), bool)
        flags[np.arange(place.shape[0])[:, None], place] = True
        return flags[:, :columns].reshape(*num.shape, columns)  # pyright: ignore[reportReturnType]
    return _flags_by_jit(num, index, columns)


@functools.partial(jax.jit, static_argnames="columns")  # eagerly each operation would be compiled alone
def _flags_by_jit(num: Array, index: Array, columns: int) -> Array:
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    by_pairs = lambda live, index: jnp.any(live[..., None] & (index[..., None] == jnp.arange(columns)), -2)
    by_scatter = functools.partial(_flags_by_scatter, columns=columns)
    if index.size * columns <= MOST_PAIRS:
        return lax.platform_dependent(live, index, cpu=by_scatter, default=by_pairs)
    return by_scatter(live, index)


def _flags_by_scatter(live: Array, index: Array, columns: int) -> Array:
    place = jnp.where(live, index, columns)
    flat = place.reshape(math.prod(place.shape[:-1]), place.shape[-1])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flags = jnp.zeros((flat.shape[0], columns), bool).at[rows, flat].set(True, mode="drop")
    return flags.reshape(*place.shape[:-1], columns)
