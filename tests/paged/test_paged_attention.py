"""paged_attention is flex_attention on gathered keys, whatever lies in other pages, and a request's bits are its own."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, KernelOptions, Origin, masks, paged
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.paged.call import PagedArguments, prepare_paged
from tests.arrays import array
from tests.cases.small import by_definition, launches, quick_jit
from tests.marks import some_slow

Array = jax.Array
N, M, D, E = 4, 2, 8, 6
gather = jax.jit(paged.gather)
ALL = AuxRequest(lse=True, max_scores=True)


def draw(seed: int, *shape: int) -> Array:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def served(
    lengths: list[int],
    page: int,
    *,
    n: int | None = None,
    pool: int | None = None,
    hole: float = np.nan,
    seeds: Any = None,
) -> tuple[paged.PagedCache, paged.PageTable]:
    """Requests whose keys depend on their seed alone, in pages in a random order.  Free pages and slots past the lengths hold `hole`,
    and the table is -7 or 2**31 - 1 past the last token.
    """
    needs = [-(-length // page) for length in lengths]
    n, pool = n or max(needs) + 1, pool or sum(needs) + 3
    order = np.random.default_rng(pool).permutation(pool).tolist()
    key, value = (np.full((pool, page, M, dim), hole, np.float32) for dim in (D, E))
    pages = np.where(np.arange(n) % 2, -7, 2**31 - 1)[None].repeat(len(lengths), 0).astype(np.int32)
    for r, length in enumerate(lengths):
        seed = r if seeds is None else seeds[r]
        for x, dim in ((key, D), (value, E)):
            tokens = np.random.default_rng((seed, dim)).standard_normal((length, M, dim))
            for i in range(needs[r]):
                pages[r, i] = order[sum(needs[:r]) + i]
                part = tokens[i * page : (i + 1) * page]
                x[pages[r, i], : len(part)] = part
    table = paged.PageTable(array(pages), array(lengths, np.int32), array(np.zeros(pool, np.int32)), page)
    return paged.PagedCache(array(key), array(value)), table


def definition(
    query: Array, cache: paged.PagedCache, table: paged.PageTable, mask_mod: Any = masks.causal, **call: Any
):
    k, v = (x.astype(query.dtype) for x in gather(cache, table))
    call = dict(origin=Origin(query="end"), key_value_seq_lengths=table.lengths, implementation="reference") | call
    return jax.jit(functools.partial(flexjax.flex_attention, mask_mod=mask_mod, **call))(query, k, v)


def assert_same(got: Any, want: Any, within: float = 2e-6) -> None:
    close = lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=within, atol=within)
    jax.tree.map(close, got, want)


def biased(table: Array) -> Callable:
    """Reads by head and distance, by request, and of a row of keys."""

    def score_mod(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
        return score * (1 + 0.1 * b) + table[h, jnp.clip(q - kv, 0, table.shape[1] - 1)] + 0.01 * (kv % 3)

    return score_mod


LENGTHS = [21, 0, 8, 40]
# fmt: off
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # page, T, arguments
    "one_token": (8, 1, {}),
    "no_mask": (24, 2, dict(mask_mod=None)),
    "window_and_sinks": (8, 3, dict(mask_mod=flexjax.and_masks(masks.causal, lambda b, h, q, kv: q - kv < 12), sinks=draw(7, N))),
    "bias_by_request": (16, 3, dict(score_mod=biased(draw(8, N, 30)), query_seq_lengths=array([3, 0, 1, 2]))),
    "documents": (8, 2, dict(mask_mod=lambda b, h, q, kv: jnp.asarray(np.arange(160).reshape(4, 40) % 7)[b, jnp.minimum(kv, 39)] != 3)),
    "scaled": (40, 2, dict(scale=jnp.float32(0.3))),
}
# fmt: on


SLOW = ("no_mask", "documents", "scaled", "one_token")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_it_is_attention_on_gathered_keys(name: str) -> None:
    """With NaN in free pages, past the lengths and in the rows of queries that do not exist."""
    page, most, call = CASES[name]
    cache, table = served(LENGTHS, page)
    q, rows = draw(100, len(LENGTHS), most, N, D), call.get("query_seq_lengths")
    if rows is not None:
        q = jnp.where(jnp.arange(most)[:, None, None] < rows[:, None, None, None], q, jnp.nan)
    got = quick_jit(lambda *x: flexjax.paged_attention(*x, return_aux=ALL, **call))(q, cache, table)
    assert_same(got, definition(q, cache, table, return_aux=ALL, **call))


def test_expectations_count_positions_in_the_request() -> None:
    functions = {"distance": lambda s, b, h, q, kv: q - kv, "score": lambda s, b, h, q, kv: s + 0.1 * b}
    asked = dataclasses.replace(ALL, expectations=functions)
    cache, table = served(LENGTHS, 8)
    q = draw(100, len(LENGTHS), 3, N, D)
    got = quick_jit(lambda *x: flexjax.paged_attention(*x, return_aux=asked))(q, cache, table)
    assert_same(got, definition(q, cache, table, return_aux=asked), 6e-6)


def test_functions_of_expectations_are_made_for_the_call() -> None:
    cache, table = served(LENGTHS, 8)
    made = flexjax.made_for(heads=N + 1)(lambda s, b, h, q, kv: s)
    with pytest.raises(ValueError, match=r"return_aux\.expectations\['f'\]") as caught:
        flexjax.paged_attention(
            draw(100, len(LENGTHS), 1, N, D),
            cache,
            table,
            return_aux=dataclasses.replace(ALL, expectations={"f": made}),
        )
    assert str(N + 1) in str(caught.value)


@pytest.mark.parametrize("counts", [[3, 0, 1, 17], pytest.param([0, 0, 0, 2], marks=pytest.mark.slow)])
def test_ragged_queries_are_those_of_requests(counts: list[int]) -> None:
    """Mods see the request; padding is 0 and -inf; block_q cuts other tiles."""
    cache, table = served(LENGTHS, 8)
    q, bias = draw(100, len(LENGTHS), 17, N, D), biased(draw(8, N, 30))
    rows = np.asarray(q)
    flat = np.concatenate([rows[r, :c] for r, c in enumerate(counts)] + [np.full((4, N, D), np.nan, np.float32)])
    ends = np.cumsum([0, *counts]).astype(np.int32)
    want, of_rows = jax.tree.map(
        np.asarray, definition(q, cache, table, score_mod=bias, query_seq_lengths=np.asarray(counts), return_aux=ALL)
    )
    for options in (None, KernelOptions(block_q=5)):
        call = dict(score_mod=bias, return_aux=ALL, kernel_options=options)
        attend = quick_jit(functools.partial(flexjax.paged_attention, **call))
        out, aux = jax.tree.map(np.asarray, attend(flat, cache, table, cu_q_lens=ends))
        for r, c in enumerate(counts):
            got = [x[ends[r] : ends[r + 1]] for x in jax.tree.leaves((out, aux))]
            assert_same(got, [x[r, :c] for x in jax.tree.leaves((want, of_rows))])
        assert not np.any(out[ends[-1] :])
        assert np.all(np.isneginf(aux.lse[ends[-1] :]))


@pytest.mark.parametrize(
    ("dtype", "dim", "tokens", "block_q", "passes"),
    [
        ("bfloat16", 128, 257, None, 2),
        ("bfloat16", 128, 256, None, 1),
        ("bfloat16", 128, 257, 16, 1),
        ("bfloat16", 320, 257, None, 1),
        ("float32", 128, 257, None, 1),
        ("int8", 128, 257, None, 1),
    ],
)
def test_how_many_passes_ragged_queries_have(
    dtype: str, dim: int, tokens: int, block_q: int | None, passes: int
) -> None:
    """Two where a request may have many queries, and a GPU kernel for these reads the pages in place."""
    found: list[int] = []

    def plan(query: Array, cache: paged.PagedCache, table: paged.PageTable, ends: Array) -> None:
        call: Any = dict(cu_q_lens=ends, kernel_options=KernelOptions(block_q=block_q))
        found.append(len(prepare_paged(PagedArguments(query, cache, table, **call))))

    cache = jax.eval_shape(lambda: paged.empty(40, 16, M, dim, dtype=dtype))
    query = jax.ShapeDtypeStruct((tokens, N, dim), "bfloat16" if dtype == "int8" else dtype)
    table = jax.eval_shape(lambda: paged.table(2, 20, 40, 16))
    jax.eval_shape(plan, query, cache, table, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert found == [passes]


@pytest.mark.slow
def test_requests_of_many_ragged_queries_are_a_pass_of_their_own() -> None:
    """Its tiles are larger, and a request's bits are its own."""
    lengths, counts = np.asarray([300, 21, 0, 290, 40]), np.asarray([258, 3, 0, 290, 1])
    q, found = draw(100, len(lengths), 290, N, D).astype("bfloat16"), []
    alibi = lambda score, b, h, q, kv: score - 0.01 * (h + 1) * (q - kv)
    attend = jax.jit(functools.partial(flexjax.paged_attention, score_mod=alibi, return_aux=ALL))

    for rows in ([0, 1, 2, 3, 4], [0], [3, 0]):
        cache, table = served(lengths[rows].tolist(), 16, seeds=rows)
        cache = jax.tree.map(lambda x: x.astype("bfloat16"), cache)
        ends = np.cumsum([0, *counts[rows]]).astype(np.int32)
        flat = jnp.concatenate([q[r, : counts[r]] for r in rows] + [jnp.full((4, N, D), jnp.nan, q.dtype)])
        names = [part.name for part in prepare_paged(PagedArguments(flat, cache, table, cu_q_lens=ends))]
        assert names == ["requests of few queries", "requests of many queries"]
        out, aux = jax.tree.map(np.asarray, attend(flat, cache, table, cu_q_lens=ends))
        assert not np.any(out[ends[-1] :])
        assert np.all(np.isneginf(aux.lse[ends[-1] :]))
        me = rows.index(0)
        found.append(jax.tree.map(lambda x, at=slice(*ends[me : me + 2]): x[at], (out, aux)))
        if len(rows) < 5:
            continue
        want = definition(
            q[np.asarray(rows)], cache, table, score_mod=alibi, return_aux=ALL, query_seq_lengths=counts[rows]
        )
        for r, _ in enumerate(rows):
            got = jax.tree.map(lambda x, at=slice(*ends[r : r + 2]): x[at], (out, aux))
            assert_same(got, jax.tree.map(lambda x, r=r, c=counts[rows[r]]: x[r, :c], want), 2e-2)
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


@pytest.mark.slow
def test_gradients_of_requests_of_many_ragged_queries() -> None:
    counts, slopes, q = [258, 3], draw(8, N), draw(100, 2, 258, N, D).astype("bfloat16")
    cache, table = served([300, 21], 16, hole=0.0)
    cache = jax.tree.map(lambda x: x.astype("bfloat16"), cache)
    flat, ends = jnp.concatenate([q[r, :c] for r, c in enumerate(counts)]), np.asarray([0, 258, 261], np.int32)

    def loss(x: tuple[Array, Array], **rows: Any) -> Array:
        alibi = lambda score, b, h, q, kv: score - 0.01 * x[1][h] * (q - kv)
        return jnp.sum(
            jnp.sin(flexjax.paged_attention(x[0], cache, table, score_mod=alibi, **rows).astype(jnp.float32))
        )

    of_tokens, of_slopes = jax.jit(jax.grad(functools.partial(loss, cu_q_lens=ends)))((flat, slopes))
    want, want_slopes = jax.jit(jax.grad(functools.partial(loss, query_seq_lengths=np.asarray(counts))))((q, slopes))
    assert_same(of_tokens, jnp.concatenate([want[r, :c] for r, c in enumerate(counts)]), 3e-2)
    assert_same(of_slopes, want_slopes, 3e-2)


@pytest.mark.parametrize("ragged", [True, False])
def test_block_q_cuts_tiles_that_the_decode_kernel_takes(ragged: bool) -> None:
    """The tiles of ragged queries, and those of a shared prefix."""
    cache, table = served([20, 30], 16)
    cache = paged.PagedCache(cache.key.astype(jnp.bfloat16), cache.value.astype(jnp.bfloat16))
    query = jnp.ones((6, N, D) if ragged else (2, 3, N, D), jnp.bfloat16)
    call: Any = dict(kernel_options=KernelOptions(block_q=5))
    if ragged:
        call["cu_q_lens"] = jnp.asarray([0, 3, 6])
    else:
        pages = jnp.asarray(table.pages[:1, :1])
        call["shared"] = flexjax.SharedPrefix(jnp.asarray([0, 0]), pages, jnp.asarray([16]))
    first = prepare_paged(PagedArguments(query, cache, table, **call))[0].call.plan
    assert first.q_len == 5
    assert decode_hopper_tiles.decode_refuses(first) is None


@pytest.mark.parametrize("dtype", some_slow(["int8", "float8_e4m3fn", "bfloat16"], ["int8"]))
def test_quantised_and_narrow_caches(dtype: str) -> None:
    table, _ = quick_jit(paged.allocate)(paged.table(2, 3, 8, 8), np.asarray([19, 9], np.int32))
    cache = paged.empty(8, 8, M, D, E=E, dtype=dtype)
    given = draw(0, 2, 19, M, D), draw(1, 2, 19, M, E)
    cache, table = quick_jit(paged.append)(cache, table, *given, query_seq_lengths=np.asarray([19, 9]))
    q = draw(2, 2, 3, N, D).astype("bfloat16" if dtype == "bfloat16" else "float32")
    got = quick_jit(flexjax.paged_attention)(q, cache, table)
    assert_same(
        got.astype("float32"), definition(q, cache, table).astype("float32"), 0.02 if dtype == "bfloat16" else 2e-6
    )


@pytest.mark.slow
def test_bits_of_a_request_are_its_own() -> None:
    """Alone; among others, in other pages; in wider tables and larger pools; with padding and rows that do not exist. The prompt is
    long enough for several visits of several blocks.
    """
    slopes, length, most = draw(8, N), 1700, 5
    alibi = lambda score, b, h, q, kv: score - 0.01 * slopes[h] * (q - kv)
    attend = quick_jit(lambda *x, **rows: flexjax.paged_attention(*x, score_mod=alibi, **rows))

    def request(lengths: list[int], seeds: list[int], rows: list[int], me: int, **where: Any) -> list[np.ndarray]:
        cache, table = served(lengths, 16, seeds=seeds, **where)
        q = np.stack([draw(200 + s, most, N, D) for s in seeds])
        for r, count in enumerate(rows):
            q[r, count:] = where.get("hole", np.nan)
        flat = np.concatenate([q[r, :count] for r, count in enumerate(rows)] + [q[0, rows[0] :]])
        first, *_ = ends = np.cumsum([0, *rows]).astype(np.int32)[[me, *range(len(rows) + 1)]]
        padded = attend(q, cache, table, query_seq_lengths=np.asarray(rows, np.int32))[me, : rows[me]]
        return [
            np.asarray(x) for x in (padded, attend(flat, cache, table, cu_q_lens=ends[1:])[first : first + rows[me]])
        ]

    alone = request([length], [0], [4], 0, hole=0.0)
    for others in (
        request([30, length, 300], [1, 0, 2], [1, 4, 5], 1),
        request([length, 1], [0, 3], [4, 0], 0, n=140, pool=300, hole=1e30),
    ):
        for x, y in zip(alone, others, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_tree_of_candidates() -> None:
    """Its nodes are the last tokens of the cache."""
    parents, context = np.asarray([-1, 0, 0, 1, 2]), array([16, 3])
    cache, table = served([21, 8], 8)
    q = draw(3, 2, 5, N, D)
    tree = masks.tree(parents, context, queries_follow_context=True)
    got = quick_jit(lambda *x: flexjax.paged_attention(*x, mask_mod=tree))(q, cache, table)
    k, v = gather(cache, table)
    want = by_definition(q, k, v, mask_mod=masks.tree(parents, context), key_value_seq_lengths=table.lengths)
    assert_same(got, want)


def test_gradients_of_queries_sinks_and_captures() -> None:
    """Those of the definition, also with NaN in free pages; the cache has none, in a sentence."""
    cache, table = served([21, 8], 8)
    given = dict(q=draw(3, 2, 3, N, D), bias=draw(8, N, 30), sinks=draw(7, N), scale=jnp.float32(0.4))

    def loss(function: Callable, x: dict[str, Array], cache: paged.PagedCache, **rows: Any) -> Array:
        call = dict(score_mod=biased(x["bias"]), sinks=x["sinks"], scale=x["scale"], return_aux=AuxRequest(lse=True))
        out, aux = function(x["q"], cache, table, **call, **rows)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + jnp.sum(jnp.sin(aux.lse))

    got = quick_jit(jax.value_and_grad(lambda x: loss(flexjax.paged_attention, x, cache)))(given)
    assert_same(got, quick_jit(jax.value_and_grad(lambda x: loss(definition, x, cache)))(given), 2e-5)
    flat = given | {"q": given["q"].reshape(-1, N, D)}
    ends = array([0, 3, 6])
    ragged = quick_jit(jax.grad(lambda x: loss(flexjax.paged_attention, x, cache, cu_q_lens=ends)))(flat)
    for name, x in ragged.items():
        if name != "q":  # the order of queries changes the weights of the loss in no other way
            assert_same(x, got[1][name], 2e-5)
    message = (
        "paged_attention has no gradients of the keys and values in the cache. Compute them with flex_attention on contiguous "
        "keys, or put jax.lax.stop_gradient around the cache."
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        jax.grad(lambda c: loss(flexjax.paged_attention, given, c))(cache)


@pytest.mark.parametrize(
    "mapped", [(0, 0, 0), *(pytest.param(m, marks=pytest.mark.slow) for m in ((0, None, None), (None, 0, None)))]
)
def test_vmap_is_one_call(mapped: tuple[int | None, ...]) -> None:
    """Of copies that share the pool, or have pools of their own."""
    copies = [served([21, 8], 8, seeds=seeds, pool=9) for seeds in ((0, 1), (2, 3))]
    stack = lambda *xs: jax.tree.map(lambda *x: jnp.stack(x), *xs)
    given = (draw(3, 2, 2, 1, N, D), stack(*(c for c, _ in copies)), stack(*(t for _, t in copies)))
    given = tuple(x if m == 0 else jax.tree.map(lambda a: a[0], x) for x, m in zip(given, mapped, strict=True))
    call = jax.vmap(flexjax.paged_attention, mapped)
    assert launches(jax.make_jaxpr(call)(*given).jaxpr).count("flexjax_forward") == 1
    one = lambda i: (x if m is None else jax.tree.map(lambda a: a[i], x) for x, m in zip(given, mapped, strict=True))
    assert_same(quick_jit(call)(*given), jnp.stack([definition(*one(i)) for i in range(2)]))


@pytest.mark.parametrize("dtype", some_slow(["float32", "bfloat16", "int8", "float8_e4m3fn"], ["float32"]))
def test_a_step_never_gathers_nor_widens_the_cache(dtype: str) -> None:
    of_query = dtype if dtype == "bfloat16" else "float32"
    q, (cache, table) = draw(3, 2, 1, N, D).astype(of_query), served([21, 8], 8, n=256, pool=4096, hole=0.0)
    cache = paged.empty(4096, 8, M, D, dtype=dtype) if dtype != "float32" else cache
    memory = jax.jit(flexjax.paged_attention).lower(q, cache, table).compile().memory_analysis()
    contiguous = 256 * 8 * M * (D + E) * 4  # of one request
    keys = max(x.nbytes for x in jax.tree.leaves(cache.key))
    assert memory.temp_size_in_bytes < min(contiguous, keys / 2)


def test_work_follows_the_lengths() -> None:
    """A table of a million tokens, of which sixteen exist: computing all of it would take minutes."""
    cache, table = served([16], 8, n=131072, hole=0.0)
    got = quick_jit(lambda *x: flexjax.paged_attention(*x, mask_mod=None))(draw(3, 1, 1, N, D), cache, table)
    small = dataclasses.replace(table, pages=table.pages[:, :2])
    assert_same(got, definition(draw(3, 1, 1, N, D), cache, small, None))


CACHE, TABLE = served([16, 8], 8, hole=0.0)
Q = draw(3, 2, 1, N, D)
# fmt: off
ERRORS: list[tuple[Callable, str]] = [
    (lambda: flexjax.paged_attention(Q[0], CACHE, TABLE),
     "`query` is float32[1, 4, 8]; expected [R, T, N, D]. Pass cu_q_lens for queries one after the other."),
    (lambda: flexjax.paged_attention(Q, CACHE, TABLE, cu_q_lens=np.zeros(3, np.int32)),
     "`query` is float32[2, 1, 4, 8]; expected [tokens, N, D]. Leave cu_q_lens out for [R, T, N, D]."),
    (lambda: flexjax.paged_attention(Q[:1], CACHE, TABLE),
     "`query` is float32[1, 1, 4, 8]; expected 2 requests, as table has. A request without a query has query_seq_lengths 0."),
    (lambda: flexjax.paged_attention(Q[..., :6], CACHE, TABLE),
     "`query` is float32[2, 1, 4, 6]; expected a last dim of 8, that of cache.key. Project both to one head dim."),
    (lambda: flexjax.paged_attention(Q[:, :, :3], CACHE, TABLE),
     "`query` is float32[2, 1, 3, 8]; expected a multiple of the 2 heads of cache.key. Query heads share key heads."),
    (lambda: flexjax.paged_attention(Q.astype("bfloat16"), CACHE, TABLE),
     "`query` is bfloat16[2, 1, 4, 8]; expected float32, the dtype of the cache. Cast it."),
    (lambda: flexjax.paged_attention(Q[0], CACHE, TABLE, cu_q_lens=np.zeros(2, np.int32)),
     "`cu_q_lens` is int32[2]; expected int32[3]. Cast or reshape it."),
    (lambda: flexjax.paged_attention(Q, CACHE, TABLE, query_seq_lengths=np.ones(3, np.int32)),
     "`query_seq_lengths` is int32[3]; expected int32[2]. Cast or reshape it."),
    (lambda: flexjax.paged_attention(Q[0], CACHE, TABLE, cu_q_lens=np.zeros(3, np.int32), query_seq_lengths=np.ones(2, np.int32)),
     "`query_seq_lengths` is given beside cu_q_lens; expected one of them. cu_q_lens has the lengths."),
    (lambda: flexjax.paged_attention(Q, TABLE, CACHE),  # type: ignore[arg-type]
     "`cache` is a PageTable; expected a flexjax.paged.PagedCache. Make it with flexjax.paged.empty."),
    (lambda: flexjax.paged_attention(Q, CACHE, TABLE, sinks=jnp.ones(3)),
     "`sinks` is float32[3]; expected float32[4], a logit for each query head. Reshape it."),
]
# fmt: on


def test_one_number_counts_the_queries_of_every_request() -> None:
    attend = lambda counts: np.asarray(flexjax.paged_attention(Q, CACHE, TABLE, query_seq_lengths=counts))
    np.testing.assert_array_equal(attend(0), attend(np.zeros(2, np.int32)))
    np.testing.assert_array_equal(attend(5), attend(None))


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=range(len(ERRORS)))
def test_messages(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message
    assert caught.value.__notes__[0].startswith("in paged_attention(query=")


def test_no_queries_and_no_tokens() -> None:
    attend = quick_jit(flexjax.paged_attention)
    assert attend(Q[:, :0], CACHE, TABLE).shape == (2, 0, N, E)
    assert attend(Q[0, :0], CACHE, TABLE, cu_q_lens=jnp.zeros(3, jnp.int32)).shape == (0, N, E)
