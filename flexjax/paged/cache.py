"""Keys and values in pages: the pool, and how tokens are written to it and read from it.

The pool of keys is [P, page, M, D], that of values [P, page, M, E], M key heads. `append` writes into the pool in place if the
caller donates it (`jax.jit(..., donate_argnums=...)`): XLA then updates the donated buffer and copies nothing but the new tokens and
pages that are shared (table.py). One exception: on a CPU a pool of bfloat16, float16 or float8 is copied once by each append,
because XLA has no update of such arrays there.

**Quantised pools** (int8, float8_e4m3fn) have scales: key = stored * scale. Two forms, told apart by their rank:

    float32 [M]      given by the caller of `empty`, one for each key head, never changed
    float32 [P, M]   one for each page and head, set by `append` when it writes the first token of a page:
                     2 * max |token| / L, L = 127 (int8) or 448 (float8_e4m3fn); a token of zeros counts as max |token| = 1

A number x is stored as x / scale, rounded to nearest even, after clipping to -L .. L. The factor 2 leaves room for later tokens of
the page.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from flexjax.errors import bad_argument, kind_of
from flexjax.paged.table import (
    Growth,
    PageTable,
    check_int32,
    check_page,
    check_positive,
    check_table,
    described,
    grow,
)
from flexjax.plan.pages import tokens_of_pages

Array = jax.Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number that a quantised pool stores, by dtype."""
PLAIN = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of pools without scales."""


@dataclasses.dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values of one layer in P pages; a pytree, made by `flexjax.paged.empty`.

    key           [P, page, M, D], bfloat16, float16, float32 or float64, or quantised: int8 or float8_e4m3fn
    value         [P, page, M, E], of the same dtype
    key_scales    float32 [M] or [P, M] of a quantised pool: what a stored key is multiplied by; else None
    value_scales  the same for values
    """

    key: Array
    value: Array
    key_scales: Array | None = None
    value_scales: Array | None = None


jax.tree_util.register_dataclass(PagedCache, data_fields=["key", "value", "key_scales", "value_scales"], meta_fields=[])

Scales = float | Array | np.ndarray


def empty(
    P: int,
    page: int,
    M: int,
    D: int,
    *,
    E: int | None = None,
    dtype: DTypeLike,
    scales: Scales | tuple[Scales, Scales] | None = None,
) -> PagedCache:
    """A pool of P pages of `page` tokens, for M key heads of head dim D, all zeros.

    E        head dim of values; None: that of keys
    dtype    bfloat16, float16, float32 or float64; int8 or float8_e4m3fn stores quantised numbers
    scales   of a quantised pool: a number or float [M] for keys and values, or a pair (keys, values) of these. None: `append`
             chooses a scale for each page and head

    Raises ValueError for sizes that are no positive ints, a page that is no multiple of 8, another dtype, and scales of another
    shape, of known numbers that are not finite and above 0, or of a pool that is not quantised.
    """
    value_dim = D if E is None else E
    for name, number in (("P", P), ("M", M), ("D", D), ("E", value_dim)):
        check_positive(name, number)
    check_page("page", page)
    name = _name_of(dtype)
    if name not in (*PLAIN, *LARGEST):
        raise bad_argument("dtype", name, "one of " + ", ".join((*PLAIN, *LARGEST)), "Store the cache in one of these.")
    key, value = jnp.zeros((P, page, M, D), name), jnp.zeros((P, page, M, value_dim), name)
    if name not in LARGEST:
        if scales is not None:
            raise bad_argument("scales", "given", f"None for {name}", "Only int8 and float8_e4m3fn pools have scales.")
        return PagedCache(key, value)
    if scales is None:
        return PagedCache(key, value, *(jnp.ones((P, M), jnp.float32) for _ in range(2)))
    pair = scales if isinstance(scales, tuple) else (scales, scales)
    if len(pair) != 2:
        raise bad_argument("scales", f"a tuple of {len(pair)}", "a pair (keys, values)", "Pass one for each.")
    return PagedCache(key, value, *(_given_scale(x, M) for x in pair))


def _name_of(dtype: DTypeLike | None) -> str:
    """The name of a dtype; of what is none, and of None, which numpy reads as float64, how it prints."""
    if dtype is None:
        return "None"
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _given_scale(given: Scales, heads: int) -> Array:
    """The scales that a caller gives for keys or for values, as float32 [M].

    given   a number or an array [] or [M], of a floating dtype
    heads   M

    Raises ValueError for another shape or dtype, an int included, and for known numbers that are not finite and above 0.
    """
    array = jnp.asarray(given)
    if array.shape not in ((), (heads,)) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise bad_argument(
            "scales", described(array), f"a float or float32[{heads}]", "Give one for all key heads or for each."
        )
    known = None if isinstance(given, Tracer) else np.asarray(given, np.float32)
    if known is not None and not ((known > 0) & np.isfinite(known)).all():
        raise bad_argument(
            "scales", str(known.tolist()), "finite numbers above 0", "Stored numbers are divided by them."
        )
    return jnp.broadcast_to(array.astype(jnp.float32), (heads,))


def append(
    cache: PagedCache,
    table: PageTable,
    k: Array | np.ndarray,
    v: Array | np.ndarray,
    *,
    query_seq_lengths: Array | np.ndarray | None = None,
    cu_q_lens: Array | np.ndarray | None = None,
) -> tuple[PagedCache, PageTable]:
    """Writes new tokens after those that each request has: (cache, table).

    k, v                [R, T, M, D] and [R, T, M, E], or the tokens of all requests one after the other, [tokens, M, D] and
                        [tokens, M, E], with cu_q_lens. They are cast to the dtype of the cache, or quantised
    query_seq_lengths   int32 [R], for [R, T, M, D]: how many of the T tokens of each request count; default all
    cu_q_lens           int32 [R + 1]: request r has the tokens cu_q_lens[r] .. cu_q_lens[r + 1] - 1; tokens after the last are
                        padding

    `allocate` has to reserve the pages before. The tokens of a request whose pages are not all reserved are not written, and its
    length stays. A partly filled last page that other requests hold too is copied to the reserved page first (table.py). Every layer
    has a cache of its own and all share the table: give each layer the same old table, and keep the table that any of them returns.
    Donate `cache`, so that it is updated in place. Raises ValueError for arguments of other types or shapes.
    """
    pool, page = check_cache(cache)
    check_table(table, page)
    if table.uses.shape[0] != pool:
        raise bad_argument(
            "table.uses",
            f"of shape {table.uses.shape}",
            f"({pool},), a count for each page of the cache",
            "Make them agree.",
        )
    rows = table.lengths.shape[0]
    k, v = (
        _new_tokens(name, x, like, rows, cu_q_lens) for name, x, like in (("k", k, cache.key), ("v", v, cache.value))
    )
    if k.shape[:-2] != v.shape[:-2]:
        raise bad_argument("v", described(v), f"the tokens of k, {described(k)}", "Make them agree.")
    if cu_q_lens is None:
        most = k.shape[1]
        counts = jnp.full(rows, most, jnp.int32)
        if query_seq_lengths is not None:
            counts = jnp.clip(check_int32("query_seq_lengths", query_seq_lengths, (rows,)), 0, most)
        row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), most)
        place = jnp.tile(jnp.arange(most, dtype=jnp.int32), rows)
    else:
        if query_seq_lengths is not None:
            raise bad_argument(
                "query_seq_lengths", "given beside cu_q_lens", "one of them", "cu_q_lens has the lengths."
            )
        row, place, counts, _ = rows_of_tokens(cu_q_lens, rows, k.shape[0])
    return _appended(cache, table, k, v, row, place, counts)


@functools.partial(jax.jit, inline=True)  # eagerly, its loops would be compiled in each call
def _appended(
    cache: PagedCache, table: PageTable, k: Array, v: Array, row: Array, place: Array, counts: Array
) -> tuple[PagedCache, PageTable]:
    """What `append` returns, for checked arguments.

    row      int32 [tokens]: the request of each of the tokens of k and v
    place    int32 [tokens]: its number among the new tokens of its request
    counts   int32 [R]: how many tokens of each request are written
    """
    pool, page = cache.key.shape[:2]
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    growth = grow(table, counts, page)
    position = growth.starts[row] + place
    pages = growth.table.pages
    column = jnp.clip(position // page, 0, pages.shape[1] - 1)
    at = Places(growth, jnp.where(place < growth.writes[row], pages[row, column], pool), position % page)
    key, key_scales = _append_to(cache.key, cache.key_scales, k, at)
    value, value_scales = _append_to(cache.value, cache.value_scales, v, at)
    return PagedCache(key, value, key_scales, value_scales), growth.table


class Places(typing.NamedTuple):
    """Where new tokens are written, after the copies of `growth`.

    page   int32 [tokens]: the page of each token; P, the number of pages, for a token that is not written
    slot   int32 [tokens]: its number in the page
    """

    growth: Growth
    page: Array
    slot: Array


def _append_to(pool: Array, scales: Array | None, tokens: Array, at: Places) -> tuple[Array, Array | None]:
    """(pool, scales): a pool of keys or values with new tokens written to it, after the copies of pages that `at.growth` names, and its
    scales.

    scales   float32 [M], which stay, or [P, M], which get an entry for each page that begins; None if the pool is not quantised
    tokens   [tokens, M, D] ([tokens, M, E] of values), not yet cast or quantised
    at       where each of them goes; a token whose page is P is not written
    """
    if scales is not None and scales.ndim == 2:
        most = jnp.max(jnp.abs(tokens.astype(jnp.float32)), -1)
        found = 2 * jnp.where(most == 0, 1, most) / LARGEST[pool.dtype.name]
        scales = _copy_pages(scales, at.growth)
        scales = scales.at[jnp.where(at.slot == 0, at.page, pool.shape[0])].set(found, mode="drop")
    if scales is not None:
        most = LARGEST[pool.dtype.name]
        scale = scales if scales.ndim == 1 else scales.at[at.page].get(mode="clip")
        tokens = jnp.clip(tokens.astype(jnp.float32) / scale[..., None], -most, most)
        tokens = jnp.round(tokens) if pool.dtype.name == "int8" else tokens
    tokens = tokens.astype(pool.dtype)

    def write(pool: Array, tokens: Array) -> Array:
        """The pool after the copies of pages of `at.growth`, with each token in its slot of its page; a token that is not written is left
        out.

        pool, tokens   of one dtype, which may be integers that stand for their bits
        """
        return _copy_pages(pool, at.growth).at[at.page, at.slot].set(tokens, mode="drop")

    if not jnp.issubdtype(pool.dtype, jnp.floating) or pool.dtype.itemsize >= 4:
        return write(pool, tokens), scales
    # XLA for CPUs turns a pool of narrow floats to float32 for each update; as integers it is copied once
    bits = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    as_bits = lambda x: lax.bitcast_convert_type(x, bits)
    on_cpu = lambda pool, tokens: lax.bitcast_convert_type(write(as_bits(pool), as_bits(tokens)), pool.dtype)
    return lax.platform_dependent(pool, tokens, cpu=on_cpu, default=write), scales


def _copy_pages(x: Array, growth: Growth) -> Array:
    """Copies the pages that an append has to copy before it writes: page growth.copied[i, 0] to growth.copied[i, 1] for each
    i < growth.copies.

    x   a pool [P, ...] or its scales [P, M]; the result has its shape

    The loop has `growth.copies` rounds, most often 0. Each round is a slice and an update, which XLA makes in place.
    """

    def copy(i: Array, x: Array) -> Array:
        """x after copy number i, which writes page growth.copied[i, 0] over page growth.copied[i, 1]."""
        old, new = jnp.clip(growth.copied[i], 0, x.shape[0] - 1)
        return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, old, 1, 0), new, 0)

    return lax.fori_loop(jnp.int32(0), growth.copies, copy, x)


def _new_tokens(name: str, given: object, like: Array, rows: int, cu_q_lens: object) -> Array:
    """The argument `name` ("k" or "v") of `append`, whose value is `given`, as an array: [R, T, M, D], or [tokens, M, D] with cu_q_lens.

    like        the pool that the tokens are written to
    rows        R, the requests of the table
    cu_q_lens   that argument of `append`; None: tokens are given by request

    Raises ValueError for another rank, number of requests, number of heads or head dim, and for numbers that are not floating.
    """
    lead, letters = ((rows,), "R, T") if cu_q_lens is None else ((), "tokens")
    heads = like.shape[2:]
    rank = 2 + len(letters.split(","))
    fits = isinstance(given, Array | np.ndarray) and given.ndim == rank and jnp.issubdtype(given.dtype, jnp.floating)
    if not fits or given.shape[-2:] != heads or given.shape[: len(lead)] != lead:  # type: ignore[union-attr]
        sizes = f"R = {rows}, " if lead else ""
        other = (
            "Pass cu_q_lens for tokens one after the other."
            if cu_q_lens is None
            else "Leave cu_q_lens out for [R, T, ..]."
        )
        raise bad_argument(
            name, described(given), f"floats [{letters}, M, {'D' if name == 'k' else 'E'}] with {sizes}the heads and head dim "
            f"{heads} of the cache", other,
        )  # fmt: skip
    return jnp.asarray(given)


class TokenRows(typing.NamedTuple):
    """Which request each token belongs to, where the tokens of all requests lie one after the other.

    row      int32 [tokens]: the request of each token
    place    int32 [tokens]: its number among the tokens of its request; counts[row] or more for a padding token
    counts   int32 [R]: how many tokens each request has
    starts   int32 [R]: the index of the first token of each request
    """

    row: Array
    place: Array
    counts: Array
    starts: Array


def rows_of_tokens(cu_q_lens: object, rows: int, tokens: int) -> TokenRows:
    """Which request each token belongs to: request r has the tokens cu_q_lens[r] .. cu_q_lens[r + 1] - 1.

    cu_q_lens   the argument, int32 [R + 1]; entries are clipped to 0 .. tokens
    rows        R
    tokens      how many tokens there are, padding included

    Raises ValueError for cu_q_lens of another type or shape.
    """
    ends = jnp.clip(check_int32("cu_q_lens", cu_q_lens, (rows + 1,)), 0, tokens)
    number = jnp.arange(tokens, dtype=jnp.int32)
    # Every end is compared with every token, in one kernel; a binary search is a loop of several on a GPU.
    row = jnp.searchsorted(ends[1:], number, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    place = number - ends[row]
    place = jnp.where(place < 0, tokens, place)  # before the first request
    return TokenRows(row, place, jnp.maximum(ends[1:] - ends[:-1], 0), ends[:-1])


def gather(cache: PagedCache, table: PageTable, *, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
    """The keys and values of all requests, contiguous: [R, n * page, M, D] and [R, n * page, M, E].

    dtype   of the result; default that of the cache, float32 if it is quantised. Quantised numbers are multiplied by their scales

    Tokens of a page number outside 0 .. P - 1 are 0; those after the length of a request are whatever its pages hold. It is
    the definition of `flexjax.paged_attention`, which makes these arrays only where a kernel cannot read the pages in place. Raises
    ValueError for arguments of other types or shapes.
    """
    check_table(table, check_cache(cache)[1])

    def contiguous(x: Array, scales: Array | None) -> Array:
        """The tokens of the pool x, [R, n * page, M, D or E], multiplied by `scales` if it has them, in the dtype that `gather` returns."""
        found = tokens_of_pages(jnp.asarray(x), scales, jnp.asarray(table.pages), jnp.float32)
        return found if dtype is None else found.astype(dtype)

    return contiguous(cache.key, cache.key_scales), contiguous(cache.value, cache.value_scales)


def check_cache(cache: object) -> tuple[int, int]:
    """Checks a cache and returns (P, the number of its pages, tokens of a page).

    Raises ValueError unless it is a PagedCache of two arrays of four dims, of one supported dtype and the same pages, tokens and heads,
    with a page of a multiple of 8 tokens, and with float32 scales [M] or [P, M] exactly where the dtype is quantised.
    """
    if not isinstance(cache, PagedCache):
        raise bad_argument("cache", kind_of(cache), "a flexjax.paged.PagedCache", "Make it with flexjax.paged.empty.")
    for name, array, letters in (("key", cache.key, "[P, page, M, D]"), ("value", cache.value, "[P, page, M, E]")):
        is_array = isinstance(array, Array | np.ndarray) and array.ndim == 4
        if not is_array or array.dtype.name not in (*PLAIN, *LARGEST):
            raise bad_argument(
                f"cache.{name}",
                described(array),
                f"{letters} of one of {', '.join((*PLAIN, *LARGEST))}",
                "Cast or reshape it.",
            )
    key, value = cache.key, cache.value
    if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype:
        raise bad_argument(
            "cache.value", described(value), f"{key.dtype.name} with the pages, tokens and heads of cache.key, {key.shape[:3]}",
            "Make them agree.",
        )  # fmt: skip
    pool, page, heads = key.shape[:3]
    check_page("the page of cache.key", page)
    for name, scales in (("key_scales", cache.key_scales), ("value_scales", cache.value_scales)):
        if key.dtype.name in PLAIN:
            if scales is not None:
                raise bad_argument(
                    f"cache.{name}", "given", f"None for {key.dtype.name}", "Only int8 and float8_e4m3fn have scales."
                )
            continue
        known = isinstance(scales, Array | np.ndarray) and scales.dtype == jnp.float32
        if not known or scales.shape not in ((heads,), (pool, heads)):  # type: ignore[union-attr]
            raise bad_argument(
                f"cache.{name}",
                described(scales),
                f"float32[{heads}] or float32[{pool}, {heads}]",
                "A quantised cache needs scales.",
            )
    return pool, page
