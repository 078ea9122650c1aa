"""Keys and values in pages: the pool, and how tokens are written to it and read from it.

A quantised pool (int8, float8_e4m3fn) is a Quantized with scales, key = stored * scale, in two forms:

    float32 [M]      given by the caller of `empty`, one for each key head, never changed
    float32 [P, M]   set by `append` with the first token of a page: 2 * max |token| / L, L = 127 or 448; the factor 2
                     is for later tokens, which are clipped to -L .. L
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

from flexjax.errors import bad_argument, kind_of, public
from flexjax.mod_tools.numpy_arrays import unwrapped
from flexjax.mod_tools.settings import own
from flexjax.paged import page_norms
from flexjax.paged.table import Growth, PageTable, check_int32, check_page, check_positive, check_table, described, grow
from flexjax.rewrites.pages import tokens_of_pages
from flexjax.types import Quantized

Array = jax.Array

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # number that a quantised pool stores
PLAIN = ("bfloat16", "float16", "float32", "float64")  # dtypes of pools without scales


@dataclasses.dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values of one layer in P pages; a pytree, made by `flexjax.paged.empty`.

    key, value   [P, page, M, D] and [P, page, M, E], bfloat16, float16, float32 or float64; or a `flexjax.Quantized` of
                 int8 or float8_e4m3fn with scales float32 [M] or [P, M]
    norms        float32 [P, M], kept by `append`: no key of the page is longer; None: they are not kept
    """

    key: Array | Quantized
    value: Array | Quantized
    norms: Array | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, unwrapped(getattr(self, field.name)))


jax.tree_util.register_dataclass(PagedCache, data_fields=["key", "value", "norms"], meta_fields=[])


class Stored(typing.NamedTuple):
    """What the keys or values of a cache are: the pool, and the scales of a quantised one."""

    pool: Array
    scales: Array | None


def stored(x: Array | Quantized) -> Stored:
    if isinstance(x, Quantized):
        return Stored(typing.cast(Array, x.values), typing.cast(Array, x.scales))
    return Stored(x, None)


Scales = float | Array | np.ndarray


@public
@own
def empty(
    P: int,
    page: int,
    M: int,
    D: int,
    *,
    E: int | None = None,
    dtype: DTypeLike,
    scales: Scales | tuple[Scales, Scales] | None = None,
    norms: bool = False,
) -> PagedCache:
    """A pool of P pages of `page` tokens, for M key heads of head dim D, all zeros.

    E        head dim of values; None: that of keys
    dtype    bfloat16, float16, float32 or float64; int8 or float8_e4m3fn stores quantised numbers
    scales   of a quantised pool: a number or float [M], or a pair (keys, values) of these. None: `append` chooses
    norms    whether `append` keeps the largest norm of the keys of each page, which calls with `tolerance` read

    Raises ValueError for sizes that are no positive ints, a page that is no multiple of 8, and scales that do not fit.
    """
    value_dim = D if E is None else E
    for name, number in (("P", P), ("M", M), ("D", D), ("E", value_dim)):
        check_positive(name, number)
    check_page("page", page)
    if not isinstance(norms, bool):
        raise bad_argument("norms", repr(norms), "a bool", "True keeps the largest norm of each page's keys.")
    longest = jnp.zeros((P, M), jnp.float32) if norms else None
    name = _name_of(dtype)
    if name not in (*PLAIN, *LARGEST):
        raise bad_argument("dtype", name, "one of " + ", ".join((*PLAIN, *LARGEST)), "Store the cache in one of these.")
    key, value = jnp.zeros((P, page, M, D), name), jnp.zeros((P, page, M, value_dim), name)
    if name not in LARGEST:
        if scales is not None:
            raise bad_argument("scales", "given", f"None for {name}", "Only int8 and float8_e4m3fn pools have scales.")
        return PagedCache(key, value, longest)
    if scales is None:
        ones = jnp.ones((P, M), jnp.float32)
        return PagedCache(Quantized(key, ones), Quantized(value, ones), longest)
    pair = scales if isinstance(scales, tuple) else (scales, scales)
    if len(pair) != 2:
        raise bad_argument("scales", f"a tuple of {len(pair)}", "a pair (keys, values)", "Pass one for each.")
    of_key, of_value = (_given_scale(s, M) for s in pair)
    return PagedCache(Quantized(key, of_key), Quantized(value, of_value), longest)


def _name_of(dtype: DTypeLike | None) -> str:
    if dtype is None:
        return "None"
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _given_scale(given: Scales, heads: int) -> Array:
    """The scales, [] or [M], as float32 [M]. Raises ValueError for ints, and known numbers not finite and above 0."""
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


@public
@own
def append(
    cache: PagedCache,
    table: PageTable,
    k: Array | np.ndarray,
    v: Array | np.ndarray,
    *,
    query_seq_lengths: Array | np.ndarray | None = None,
    cu_q_lens: Array | np.ndarray | None = None,
) -> tuple[PagedCache, PageTable]:
    """Writes new tokens after those that each request has: (cache, table). Donate `cache`, so that it is updated in
    place.

    k, v                [R, T, M, D] and [R, T, M, E], or [tokens, M, D] and [tokens, M, E] with cu_q_lens
    query_seq_lengths   int32 [R], for [R, T, M, D]: how many of the T tokens of each request count; default all
    cu_q_lens           int32 [R + 1]: request r has the tokens cu_q_lens[r] .. cu_q_lens[r + 1] - 1

    Call `allocate` before. Tokens of a request whose pages are not all reserved raise ValueError outside of jit; in a
    program they are not written, and `table.lengths` stays. A shared, partly filled page is copied first. Every layer
    has a cache of its own: give each the same old table, and keep the table that any of them returns.
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
        _new_tokens(name, x, stored(like).pool, rows, cu_q_lens)
        for name, x, like in (("k", k, cache.key), ("v", v, cache.value))
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
    after = _appended(cache, table, k, v, row, place, counts)
    if not isinstance(after[1].lengths, Tracer) and after[1].lengths.is_fully_addressable:
        _check_reserved(table, counts, after[1])
    return after


def _check_reserved(before: PageTable, counts: Array, after: PageTable) -> None:
    """Raises ValueError if `counts` tokens of a request were not written because its pages are not reserved."""
    old, new, wanted = (np.asarray(x) for x in jax.device_get((before.lengths, after.lengths, counts)))
    missing = np.flatnonzero(new - old != wanted)
    if missing.size:
        r = int(missing[0])
        raise bad_argument(
            "table",
            f"without reserved pages for {int(wanted[r])} new tokens of request {r}, which has {int(old[r])}",
            "pages for every new token",
            "Call table, granted = paged.allocate(table, table.lengths + counts) first, with totals, and append no "
            "tokens of requests that it does not grant: counts = jnp.where(granted, counts, 0).",
        )


@functools.partial(jax.jit, inline=True)  # eagerly, its loops would be compiled in each call
def _appended(
    cache: PagedCache, table: PageTable, k: Array, v: Array, row: Array, place: Array, counts: Array
) -> tuple[PagedCache, PageTable]:
    """What `append` returns, for checked arguments: token i is number place[i] of counts[row[i]] of request row[i]."""
    pool, page = stored(cache.key).pool.shape[:2]
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
    growth = grow(table, counts, page)
    position = growth.starts[row] + place
    pages = growth.table.pages
    column = jnp.clip(position // page, 0, pages.shape[1] - 1)
    at = Places(growth, jnp.where(place < growth.writes[row], pages[row, column], pool), position % page)
    key, value = _append_to(cache.key, k, at), _append_to(cache.value, v, at)
    if cache.norms is None:
        return PagedCache(key, value), growth.table
    norms = page_norms.with_tokens(_copy_pages(cache.norms, growth), *stored(key), at.page, at.slot)
    return PagedCache(key, value, norms), growth.table


class Places(typing.NamedTuple):
    """Where new tokens are written, after the copies of `growth`: int32 [tokens] each; page P is not written."""

    growth: Growth
    page: Array
    slot: Array


def _append_to(cached: Array | Quantized, tokens: Array, at: Places) -> Array | Quantized:
    """Keys or values of a cache with new tokens [tokens, M, D or E] written, after the copies of pages."""
    pool, scales = stored(cached)
    # scales [M] stay; [P, M] get an entry for each page that begins
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
        return _copy_pages(pool, at.growth).at[at.page, at.slot].set(tokens, mode="drop")

    if not jnp.issubdtype(pool.dtype, jnp.floating) or pool.dtype.itemsize >= 4:
        pool = write(pool, tokens)
        return pool if scales is None else Quantized(pool, scales)
    # XLA for CPUs turns a pool of narrow floats to float32 for each update; as integers it is copied once
    bits = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    as_bits = lambda x: lax.bitcast_convert_type(x, bits)
    on_cpu = lambda pool, tokens: lax.bitcast_convert_type(write(as_bits(pool), as_bits(tokens)), pool.dtype)
    pool = lax.platform_dependent(pool, tokens, cpu=on_cpu, default=write)
    return pool if scales is None else Quantized(pool, scales)


def _copy_pages(x: Array, growth: Growth) -> Array:
    """x, a pool [P, ...] or its scales, with page growth.copied[i, 0] at growth.copied[i, 1] for i < growth.copies."""

    def copy(i: Array, x: Array) -> Array:
        old, new = jnp.clip(growth.copied[i], 0, x.shape[0] - 1)
        return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, old, 1, 0), new, 0)

    # most often there is no round; each is a slice and an update, which XLA makes in place
    return lax.fori_loop(jnp.int32(0), growth.copies, copy, x)


def _new_tokens(name: str, given: object, like: Array, rows: int, cu_q_lens: object) -> Array:
    """The argument `name` of `append`: [R, T, M, D], or [tokens, M, D] with cu_q_lens. Raises ValueError."""
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
            name, described(given),
            f"floats [{letters}, M, {'D' if name == 'k' else 'E'}] with {sizes}the heads and head dim "
            f"{heads} of the cache", other,
        )  # fmt: skip
    return jnp.asarray(given)


class TokenRows(typing.NamedTuple):
    """Which request each token belongs to, where the tokens of all requests lie one after the other.

    row, place      int32 [tokens]: its request, and its number there; counts[row] or more for a padding token
    counts, starts  int32 [R]: how many tokens each request has, and the index of its first one
    """

    row: Array
    place: Array
    counts: Array
    starts: Array


def rows_of_tokens(cu_q_lens: object, rows: int, tokens: int) -> TokenRows:
    ends = jnp.clip(check_int32("cu_q_lens", cu_q_lens, (rows + 1,)), 0, tokens)
    number = jnp.arange(tokens, dtype=jnp.int32)
    # Every end is compared with every token, in one kernel; a binary search is a loop of several on a GPU.
    row = jnp.searchsorted(ends[1:], number, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    place = number - ends[row]
    place = jnp.where(place < 0, tokens, place)  # before the first request
    return TokenRows(row, place, jnp.maximum(ends[1:] - ends[:-1], 0), ends[:-1])


@public
@own
def gather(cache: PagedCache, table: PageTable, *, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
    """The keys and values of all requests, contiguous: [R, n * page, M, D] and [R, n * page, M, E].

    dtype   of the result; default that of the cache, float32 if it is quantised

    Tokens of a page number outside 0 .. P - 1 are 0; those after the length of a request are whatever its pages hold.
    """
    check_table(table, check_cache(cache)[1])

    def contiguous(cached: Array | Quantized) -> Array:
        x, scales = stored(cached)
        found = tokens_of_pages(jnp.asarray(x), scales, jnp.asarray(table.pages), jnp.float32)
        return found if dtype is None else found.astype(dtype)

    return contiguous(cache.key), contiguous(cache.value)


def check_cache(cache: object) -> tuple[int, int]:
    """(P, the number of pages, tokens of a page) of a cache. Raises ValueError."""
    if not isinstance(cache, PagedCache):
        raise bad_argument("cache", kind_of(cache), "a flexjax.paged.PagedCache", "Make it with flexjax.paged.empty.")
    for name, cached, letters in (("key", cache.key, "[P, page, M, D]"), ("value", cache.value, "[P, page, M, E]")):
        array = stored(cached).pool
        dtypes = LARGEST if isinstance(cached, Quantized) else PLAIN
        is_array = isinstance(array, Array | np.ndarray) and array.ndim == 4
        if is_array and array.dtype.name in LARGEST and not isinstance(cached, Quantized):
            raise bad_argument(
                f"cache.{name}",
                described(array),
                "flexjax.Quantized(values, scales)",
                "A quantised cache needs scales.",
            )
        if not is_array or array.dtype.name not in dtypes:
            raise bad_argument(
                f"cache.{name}{'.values' if dtypes is LARGEST else ''}",
                described(array),
                f"{letters} of one of {', '.join(dtypes)}",
                "Cast or reshape it.",
            )
    key, value = stored(cache.key), stored(cache.value)
    pool, page, heads = key.pool.shape[:3]
    if value.pool.shape[:3] != key.pool.shape[:3] or value.pool.dtype != key.pool.dtype:
        raise bad_argument(
            "cache.value", described(value.pool),
            f"{key.pool.dtype.name} with the pages, tokens and heads of cache.key, {key.pool.shape[:3]}",
            "Make them agree.",
        )  # fmt: skip
    check_page("the page of cache.key", page)
    for name, scales in (("key", key.scales), ("value", value.scales)):
        if scales is None:
            continue
        known = isinstance(scales, Array | np.ndarray) and scales.dtype == jnp.float32
        if not known or scales.shape not in ((heads,), (pool, heads)):
            raise bad_argument(
                f"cache.{name}.scales",
                described(scales),
                f"float32[{heads}] or float32[{pool}, {heads}]",
                "Give one for each key head, or for each page and key head.",
            )
    page_norms.check_norms(cache.norms, pool, heads)
    return pool, page
