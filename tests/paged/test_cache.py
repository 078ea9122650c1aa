"""Tokens in pages: written, quantised, gathered, in place; and every message about arguments that do not fit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import Quantized, paged
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

M, D, E, PAGE = 2, 4, 3, 8
append, allocate, fork, gather = (quick_jit(f) for f in (paged.append, paged.allocate, paged.fork, paged.gather))


def tokens(rng: np.random.Generator, *lead: int, dim: int = D) -> np.ndarray:
    return rng.standard_normal((*lead, M, dim)).astype(np.float32)


def started(totals: list[int], *, pool: int = 12, n: int = 4, dtype: str = "float32", scales: object = None):
    """A cache and a table in which the pages for so many tokens are reserved."""
    table, granted = allocate(paged.table(len(totals), n, pool, PAGE), np.asarray(totals, np.int32))
    assert granted.all()
    return paged.empty(pool, PAGE, M, D, E=E, dtype=dtype, scales=scales), table  # type: ignore[arg-type]


def test_ragged_tokens_are_those_of_rows() -> None:
    """Also with padding before the first and after the last token, and a request without tokens in the middle."""
    rng, counts = np.random.default_rng(0), [3, 0, 9]
    k, v = tokens(rng, 3, 9), tokens(rng, 3, 9, dim=E)
    none = lambda x: np.full((2, *x.shape[2:]), np.nan, np.float32)
    flat = lambda x: np.concatenate([none(x), *(x[r, :c] for r, c in enumerate(counts)), none(x)])
    cache, table = started([3, 0, 9])
    one, after = append(cache, table, k, v, query_seq_lengths=np.asarray(counts))
    two, also = append(cache, table, flat(k), flat(v), cu_q_lens=np.asarray([2, 5, 5, 14]))
    jax.tree.map(np.testing.assert_array_equal, (one, after), (two, also))
    assert after.lengths.tolist() == counts
    for found, given in zip(map(np.asarray, gather(one, after)), (k, v), strict=True):
        for r, c in enumerate(counts):
            np.testing.assert_array_equal(found[r, :c], given[r, :c])


@pytest.mark.parametrize("dtype", some_slow(["int8", "float8_e4m3fn"], ["int8"]))
def test_a_page_takes_its_scale_from_its_first_token(dtype: str) -> None:
    """Token by token and all at once store the same bits, those that numpy finds."""
    most, rng = {"int8": 127, "float8_e4m3fn": 448}[dtype], np.random.default_rng(1)
    k, v = tokens(rng, 1, 11), tokens(rng, 1, 11, dim=E)
    k[0, 8, 1] = 0  # a page whose first token is 0 in a head
    k[0, 3, 0] = 100  # clipped
    cache, table = started([11], dtype=dtype)
    at_once, filled = append(cache, table, k, v)
    one_by_one = cache, table
    for t in range(11):
        one_by_one = append(*one_by_one, k[:, t : t + 1], v[:, t : t + 1])
    jax.tree.map(np.testing.assert_array_equal, (at_once, filled), one_by_one)
    pools = jax.tree.map(np.asarray, at_once)
    for x, pool in ((k, pools.key), (v, pools.value)):
        stored, scales = pool.values, pool.scales
        for page in range(2):
            part = x[0, page * PAGE : min(11, (page + 1) * PAGE)]
            top = np.abs(part[0]).max(-1)
            scale = (2 * np.where(top == 0, 1, top) / np.float32(most)).astype(np.float32)
            np.testing.assert_allclose(scales[page], scale, rtol=1e-6)
            exact = np.clip(part / np.asarray(scales[page])[:, None], -most, most)
            want = np.rint(exact) if dtype == "int8" else exact.astype(jnp.float8_e4m3fn)
            got, want = (np.asarray(a, np.float32) for a in (stored[page, : len(part)], want))
            tie = np.abs(got - exact) <= np.abs(want - exact) * (1 + 1e-5)  # the largest of a first token is L / 2
            np.testing.assert_array_equal(np.where(tie, want, got), want)
    keys, _ = gather(at_once, filled)
    np.testing.assert_allclose(np.asarray(keys)[0, :3], k[0, :3], atol=0.07 * float(np.abs(k[0, :3]).max()))


FORGOTTEN = {
    "allocate": lambda table: table,
    "a total in place of a difference": lambda table: paged.allocate(table, np.asarray([9, 1], np.int32))[0],
    "a fork's copy": lambda table: paged.fork(table, np.asarray([-1, 0], np.int32)),
    "release": lambda table: paged.release(table, np.asarray([True, False])),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_tokens_without_pages_are_refused_outside_of_jit(case: str) -> None:
    cache, table = started([9, 0])
    k, v = jnp.ones((2, 9, M, D)), jnp.ones((2, 9, M, E))
    cache, table = paged.append(cache, table, k, v, query_seq_lengths=np.asarray([9, 0], np.int32))
    table = FORGOTTEN[case](table)
    counts = np.asarray([9, 9], np.int32)
    r, old = 0, int(table.lengths[0])
    sentence = (
        f"`table` is without reserved pages for 9 new tokens of request {r}, which has {old}; expected pages for every new token. Call "
        "table, granted = paged.allocate(table, table.lengths + counts) first, with totals, and append no tokens of requests that it does "
        "not grant: counts = jnp.where(granted, counts, 0)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        paged.append(cache, table, k, v, query_seq_lengths=counts)
    _, after = jax.jit(paged.append)(cache, table, k, v, query_seq_lengths=counts)  # the result says it by its lengths
    assert int(after.lengths[r]) == old


def test_a_shared_page_is_copied_with_its_scales() -> None:
    rng = np.random.default_rng(2)
    k, v = tokens(rng, 2, 5), tokens(rng, 2, 5, dim=E)
    cache, table = started([5, 0], dtype="int8")
    cache, table = append(cache, table, k, v, query_seq_lengths=np.asarray([5, 0]))
    table = fork(table, np.asarray([-1, 0]))
    before = gather(cache, table)
    table, granted = allocate(table, np.asarray([5, 6]))
    assert granted.all()
    cache, table = append(cache, table, k[:, 4:], v[:, 4:], query_seq_lengths=np.asarray([0, 1]))
    assert len(set(np.asarray(table.pages)[:2, 0])) == 2
    for old, new in zip(map(np.asarray, before), map(np.asarray, gather(cache, table)), strict=True):
        np.testing.assert_array_equal(old[:, :5], new[:, :5])


def test_scales_that_are_given_stay() -> None:
    rng = np.random.default_rng(3)
    k, v = tokens(rng, 1, 9), tokens(rng, 1, 9, dim=E)
    cache, table = started([9], dtype="int8", scales=(array([0.5, 0.25]), 0.125))
    cache, table = append(cache, table, k, v)
    assert isinstance(cache.key, Quantized)
    assert cache.key.scales.tolist() == [0.5, 0.25]
    keys, values = map(np.asarray, quick_jit(functools.partial(paged.gather, dtype="bfloat16"))(cache, table))
    assert keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(keys[0, :9, 0], np.rint(k[0, :, 0] / 0.5) * 0.5)
    np.testing.assert_array_equal(values[0, :9], np.clip(np.rint(v[0] / 0.125), -127, 127) * 0.125)


def test_page_numbers_that_are_none_read_as_zeros() -> None:
    cache = jax.tree.map(lambda x: x + 1, paged.empty(2, PAGE, M, D, dtype=jnp.float32))
    table = paged.PageTable(array([[1, -7, 2**31 - 1, 0]], jnp.int32), array([32]), jnp.zeros(2, jnp.int32))
    keys, _ = gather(cache, table)
    assert keys[0, :, 0, 0].tolist() == [1.0] * 8 + [0.0] * 16 + [1.0] * 8


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_donated_cache_is_updated_in_place(dtype: str) -> None:
    """No copy of the pools, also where a shared page is copied."""
    cache, table = started([5, 0], pool=256, dtype=dtype)
    k, v = jnp.ones((2, 3, M, D)), jnp.ones((2, 3, M, E))
    compiled = jax.jit(paged.append, donate_argnums=0).lower(cache, table, k, v).compile()
    pools = [x for x in jax.tree.leaves(cache) if x.ndim == 4]
    memory, size = compiled.memory_analysis(), sum(pool.nbytes for pool in pools)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 2
    for pool in pools:
        shape = f"[{','.join(map(str, pool.shape))}]"
        assert shape in compiled.as_text()
        assert not re.findall(rf"= \w+{re.escape(shape)}\S* copy\(", compiled.as_text())


CACHE, TABLE = paged.empty(2, PAGE, M, D, dtype="float32"), paged.table(2, 3, 2, PAGE)
BYTES = paged.empty(2, PAGE, M, D, dtype="int8")
NEW = jnp.ones((2, 1, M, D))
DTYPES = "bfloat16, float16, float32, float64"
# fmt: off
ERRORS = [
    (lambda: paged.empty(0, 8, M, D, dtype="float32"),
     "`P` is 0; expected a positive int. Sizes are static: they are compiled into the program."),
    (lambda: paged.empty(2, 12, M, D, dtype="float32"),
     "`page` is 12; expected a positive multiple of 8. Kernels copy 8 tokens at a time."),
    (lambda: paged.empty(2, 8, M, D, dtype="int32"),
     f"`dtype` is int32; expected one of {DTYPES}, int8, float8_e4m3fn. Store the cache in one of these."),
    (lambda: paged.empty(2, 8, M, D, dtype=None),
     f"`dtype` is None; expected one of {DTYPES}, int8, float8_e4m3fn. Store the cache in one of these."),
    (lambda: paged.empty(2, 8, M, D, dtype="int8", scales=(1.0, np.array([0.5, np.nan], np.float32))),
     "`scales` is [0.5, nan]; expected finite numbers above 0. Stored numbers are divided by them."),
    (lambda: paged.empty(2, 8, M, D, dtype="foo"),
     "`dtype` is 'foo'; expected one of bfloat16, float16, float32, float64, int8, float8_e4m3fn. Store the cache in one of these."),
    (lambda: paged.empty(2, 8, M, D, dtype="float32", scales=1.0),
     "`scales` is given; expected None for float32. Only int8 and float8_e4m3fn pools have scales."),
    (lambda: paged.empty(2, 8, M, D, dtype="int8", scales=jnp.ones(3)),
     "`scales` is float32[3]; expected a float or float32[2]. Give one for all key heads or for each."),
    (lambda: paged.empty(2, 8, M, D, dtype="int8", scales=(1.0, 1.0, 1.0)),
     "`scales` is a tuple of 3; expected a pair (keys, values). Pass one for each."),
    (lambda: paged.table(2, 3, 2, 7),
     "`page` is 7; expected a positive multiple of 8. Kernels copy 8 tokens at a time."),
    (lambda: paged.table(2, True, 2, 8),
     "`n` is True; expected a positive int. Sizes are static: they are compiled into the program."),
    (lambda: paged.allocate(TABLE, [1, 2]),  # type: ignore[arg-type]
     "`new_lengths` is a list; expected int32[2]. Pass it through jnp.asarray."),
    (lambda: paged.allocate(TABLE, np.ones(2)),
     "`new_lengths` is float64[2]; expected int32[2]. Cast or reshape it."),
    (lambda: paged.allocate(CACHE, np.ones(2)),  # type: ignore[arg-type]
     "`table` is a PagedCache; expected a flexjax.paged.PageTable. Make it with flexjax.paged.table."),
    (lambda: paged.allocate(dataclasses.replace(TABLE, page=None), np.ones(2, np.int32)),
     "`table.page` is None; expected the tokens of a page. Make the table with flexjax.paged.table, or pass page= to PageTable."),
    (lambda: paged.fork(dataclasses.replace(TABLE, pages=jnp.zeros(3, jnp.int32)), np.ones(2, np.int32)),
     "`table.pages` is int32[3]; expected int32 [R, n]. Cast or reshape it."),
    (lambda: paged.fork(dataclasses.replace(TABLE, lengths=jnp.zeros(3, jnp.int32)), np.ones(2, np.int32)),
     "`table.lengths` is of shape (3,); expected (2,), a length for each row of pages. Make them agree."),
    (lambda: paged.release(TABLE, np.ones(2, np.int32)),
     "`requests` is int32[2]; expected bool[2]. Cast or reshape it."),
    (lambda: paged.append(CACHE, paged.table(2, 3, 2, 16), NEW, NEW),
     "`table.page` is 16; expected 8, the tokens of a page of the cache. Make them agree."),
    (lambda: paged.append(CACHE, paged.table(2, 3, 5, 8), NEW, NEW),
     "`table.uses` is of shape (5,); expected (2,), a count for each page of the cache. Make them agree."),
    (lambda: paged.append(CACHE, TABLE, NEW[0], NEW),
     "`k` is float32[1, 2, 4]; expected floats [R, T, M, D] with R = 2, the heads and head dim (2, 4) of the cache. "
     "Pass cu_q_lens for tokens one after the other."),
    (lambda: paged.append(CACHE, TABLE, NEW, NEW, cu_q_lens=np.zeros(3, np.int32)),
     "`k` is float32[2, 1, 2, 4]; expected floats [tokens, M, D] with the heads and head dim (2, 4) of the cache. "
     "Leave cu_q_lens out for [R, T, ..]."),
    (lambda: paged.append(CACHE, TABLE, NEW, jnp.ones((2, 2, M, D))),
     "`v` is float32[2, 2, 2, 4]; expected the tokens of k, float32[2, 1, 2, 4]. Make them agree."),
    (lambda: paged.append(CACHE, TABLE, NEW[0], NEW[0], cu_q_lens=np.zeros(2, np.int32)),
     "`cu_q_lens` is int32[2]; expected int32[3]. Cast or reshape it."),
    (lambda: paged.append(CACHE, TABLE, NEW[0], NEW[0], cu_q_lens=np.zeros(3, np.int32), query_seq_lengths=np.ones(2, np.int32)),
     "`query_seq_lengths` is given beside cu_q_lens; expected one of them. cu_q_lens has the lengths."),
    (lambda: paged.gather(TABLE, TABLE),  # type: ignore[arg-type]
     "`cache` is a PageTable; expected a flexjax.paged.PagedCache. Make it with flexjax.paged.empty."),
    (lambda: paged.gather(dataclasses.replace(CACHE, value=NEW[0]), TABLE),
     f"`cache.value` is float32[1, 2, 4]; expected [P, page, M, E] of one of {DTYPES}. Cast or reshape it."),
    (lambda: paged.gather(dataclasses.replace(CACHE, value=CACHE.value[:1]), TABLE),
     "`cache.value` is float32[1, 8, 2, 4]; expected float32 with the pages, tokens and heads of cache.key, (2, 8, 2). Make them agree."),
    (lambda: paged.gather(jax.tree.map(lambda x: x[:, :4], CACHE), TABLE),
     "`the page of cache.key` is 4; expected a positive multiple of 8. Kernels copy 8 tokens at a time."),
    (lambda: paged.gather(dataclasses.replace(CACHE, key=Quantized(CACHE.key, jnp.ones(2))), TABLE),
     "`cache.key.values` is float32[2, 8, 2, 4]; expected [P, page, M, D] of one of int8, float8_e4m3fn. Cast or reshape it."),
    (lambda: paged.gather(dataclasses.replace(BYTES, key=BYTES.key.values), TABLE),
     "`cache.key` is int8[2, 8, 2, 4]; expected flexjax.Quantized(values, scales). A quantised cache needs scales."),
    (lambda: paged.gather(dataclasses.replace(BYTES, value=CACHE.value), TABLE),
     "`cache.value` is float32[2, 8, 2, 4]; expected int8 with the pages, tokens and heads of cache.key, (2, 8, 2). Make them agree."),
    (lambda: paged.gather(dataclasses.replace(BYTES, value=dataclasses.replace(BYTES.value, scales=jnp.ones(3))), TABLE),
     "`cache.value.scales` is float32[3]; expected float32[2] or float32[2, 2]. Give one for each key head, or for each page and key head."),
]
# fmt: on


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=lambda x: "" if callable(x) else x[:40])
def test_messages(call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message
