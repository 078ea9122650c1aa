"""paged_attention on the decode kernel, in the simulator; `tools/device/check_pages.py` runs the same checks on a GPU."""

import dataclasses
import typing
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks, paged
from flexjax.backends.mosaic_gpu import support
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.paged.call import PagedArguments, prepare_paged
from tests.cases.small import quick_jit
from tests.marks import some_slow
from tests.paged.test_paged_attention import ALL, CASES, LENGTHS, D, M, N, biased, definition, draw, served

INSTRUCTION: typing.Literal["mma", "tcgen05"] | None = None
"""What all calls ask for; `tools/device/check_pages.py --instruction mma` sets it."""
needs_kernels = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11")


def bf16(cache: paged.PagedCache) -> paged.PagedCache:
    return dataclasses.replace(cache, key=cache.key.astype("bfloat16"), value=cache.value.astype("bfloat16"))


def on_gpu(interpret: bool) -> dict[str, typing.Any]:
    options = KernelOptions(interpret=interpret, instruction=INSTRUCTION)
    return dict(implementation="mosaic_gpu", kernel_options=options)


def jitted(interpret: bool, function: typing.Callable) -> typing.Callable:
    """The function compiled; as it is in the simulator, whose callbacks run in order and so not inside another jit."""
    return function if interpret else quick_jit(function)


def assert_near(got: typing.Any, want: typing.Any) -> None:
    """Both are of the same bfloat16 inputs; `want` was computed in float32."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=2e-2)


def check_case(name: str, interpret: bool) -> None:
    """A row of the table of tests/paged: with NaN in free pages, past the lengths and in queries that do not exist."""
    page, most, call = CASES[name]
    cache, table = served(LENGTHS, page)
    cache = bf16(cache)
    q, rows = draw(100, len(LENGTHS), most, N, D).astype("bfloat16"), call.get("query_seq_lengths")
    if rows is not None:
        q = jnp.where(jnp.arange(most)[:, None, None] < rows[:, None, None, None], q, jnp.nan)
    attend = jitted(interpret, lambda *x: flexjax.paged_attention(*x, return_aux=ALL, **call, **on_gpu(interpret)))
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, cache)
    assert_near(attend(q, cache, table), definition(q.astype("float32"), wide, table, return_aux=ALL, **call))


def check_ragged(interpret: bool) -> None:
    """Ragged queries of several requests, one of them without any and one of several tiles."""
    counts = [3, 0, 1, 17]
    cache, table = served(LENGTHS, 8)
    cache, bias = bf16(cache), biased(draw(8, N, 30))
    q = draw(100, len(LENGTHS), 17, N, D).astype("bfloat16")
    flat = jnp.concatenate([q[r, :c] for r, c in enumerate(counts)] + [jnp.full((4, N, D), jnp.nan, q.dtype)])
    ends = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    attend = jitted(
        interpret, lambda *x: flexjax.paged_attention(*x[:3], cu_q_lens=x[3], score_mod=bias, **on_gpu(interpret))
    )
    got = attend(flat, cache, table, ends)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, cache)
    want = definition(q.astype("float32"), wide, table, score_mod=bias, query_seq_lengths=jnp.asarray(counts))
    for r, c in enumerate(counts):
        assert_near(got[ends[r] : ends[r + 1]], want[r, :c])
    assert not np.any(np.asarray(got[ends[-1] :], np.float32))


def check_quantised(stored: str, dtype: str, given: bool, dim: int, queries: int, interpret: bool) -> None:
    """8-bit pages of value dim 128, with scales by page and head or given ones; NaN scales of free pages, and NaN in the slots of float8
    pages that hold no token.

    queries   of a request: few of them at head dim 128 are multiplied with bytes straight from registers
    """
    lengths, page = np.asarray([19, 0, 33] if dim == 64 else [140, 0, 33], np.int32), 8
    most = int(max(lengths))
    columns = -(-most // page) + 1
    table, _ = paged.allocate(paged.table(3, columns, 2 * columns, page), lengths)
    scales = (jnp.full(M, 0.04), jnp.full(M, 0.03)) if given else None
    cache = paged.empty(2 * columns, page, M, dim, E=128, dtype=stored, scales=scales)
    if stored != "int8":
        unwritten = lambda x: dataclasses.replace(x, values=jnp.full_like(x.values, jnp.nan))
        cache = paged.PagedCache(unwritten(cache.key), unwritten(cache.value))
    tokens = draw(0, 3, most, M, dim), draw(1, 3, most, M, 128)
    cache, table = quick_jit(paged.append)(cache, table, *tokens, query_seq_lengths=lengths)
    if not given:
        free = (table.uses == 0)[:, None]
        spoil = lambda x: dataclasses.replace(x, scales=jnp.where(free, jnp.nan, x.scales))
        cache = paged.PagedCache(spoil(cache.key), spoil(cache.value))
    q = draw(2, 3, queries, N, dim).astype(dtype)
    got = jitted(
        interpret,
        lambda *x: flexjax.paged_attention(*x, score_mod=biased(draw(8, N, 30)), **on_gpu(interpret)),
    )
    want = definition(q.astype("float32"), cache, table, score_mod=biased(draw(8, N, 30)))
    assert_near(got(q, cache, table), want)


def check_bits(interpret: bool) -> None:
    """A request whose keys are three work items, alone, and among others in other pages of a larger pool and a wider table: two in the
    simulator, 256 on a GPU.
    """
    slopes, found, others = draw(8, N), [], 2 if interpret else 256
    alibi = lambda score, b, h, q, kv: score - 0.01 * slopes[h] * (q - kv)
    call = on_gpu(interpret)
    call["kernel_options"] = dataclasses.replace(call["kernel_options"], split=128)
    attend = jitted(interpret, lambda *x: flexjax.paged_attention(*x, score_mod=alibi, **call))
    among = np.random.default_rng(0).integers(0, 310, others).tolist()
    where: dict[str, typing.Any] = dict(n=40, pool=60 if interpret else 6000, hole=1e30)
    for lengths, seeds, given in (
        ([300], [0], {}),
        ([among[0], 300, *among[1:]], [1, 0, *range(2, others + 1)], where),
    ):
        cache, table = served(lengths, 16, seeds=seeds, **given)
        q = jnp.stack([draw(200 + s, 2, N, D) for s in seeds]).astype("bfloat16")
        found.append(np.asarray(attend(q, bf16(cache), table)[seeds.index(0)], np.float32))
    np.testing.assert_array_equal(*found)


def check_steps(interpret: bool) -> None:
    """Steps of other lengths, page tables and tokens, 30 on a GPU, are traced and compiled once."""
    slopes, traced, lowered = draw(8, N), [], []
    forward = support.MosaicGpu.forward

    def alibi(score: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
        return score - 0.01 * slopes[h] * (q - kv)

    def attend(*given: typing.Any) -> typing.Any:
        traced.append(1)
        return flexjax.paged_attention(*given, score_mod=alibi, **on_gpu(interpret))

    def counted(*given: typing.Any) -> typing.Any:
        lowered.append(1)
        return forward(*given)

    rng, attend = np.random.default_rng(0), jitted(interpret, attend)
    with mock.patch.object(support.MosaicGpu, "forward", counted):
        for step in range(3 if interpret else 30):
            lengths = rng.integers(0, 150, 3).tolist()
            cache, table = served(lengths, 8, n=20, pool=60, seeds=[step, step + 1, step + 2])
            order = rng.permutation(60)  # other pages hold them
            pages = jnp.where(
                (table.pages >= 0) & (table.pages < 60), jnp.asarray(order)[table.pages % 60], table.pages
            )
            moved = jax.tree.map(lambda x, order=order: x[np.argsort(order)], bf16(cache))
            q = draw(step, 3, 1, N, D).astype("bfloat16")
            got = attend(q, moved, dataclasses.replace(table, pages=pages))
            if step in (0, 2):
                wide = jax.tree.map(lambda x: x.astype("float32"), bf16(cache))
                assert_near(got, definition(q.astype("float32"), wide, table, score_mod=alibi))
    assert len(lowered) == 1
    assert interpret or len(traced) == 1


def check_tree(interpret: bool) -> None:
    """Candidates of a speculative tree are the last tokens of the cache."""
    tree = masks.tree(np.asarray([-1, 0, 0, 1, 2]), jnp.asarray([16, 3]), queries_follow_context=True)
    cache, table = served([21, 8], 8)
    cache, q = bf16(cache), draw(3, 2, 5, N, D).astype("bfloat16")
    got = jitted(interpret, lambda *x: flexjax.paged_attention(*x, mask_mod=tree, **on_gpu(interpret)))(q, cache, table)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, cache)
    assert_near(got, definition(q.astype("float32"), wide, table, tree))


@needs_kernels
@pytest.mark.parametrize("name", some_slow(CASES, ("bias_by_request",)))
def test_it_is_attention_on_gathered_keys(name: str) -> None:
    check_case(name, interpret=True)


@needs_kernels
@pytest.mark.slow
def test_ragged_queries_trees_and_bits() -> None:
    check_ragged(interpret=True)
    check_tree(interpret=True)
    check_bits(interpret=True)


@needs_kernels
@pytest.mark.slow
def test_steps_compile_once() -> None:
    check_steps(interpret=True)


QUANTISED = [
    ("int8", "bfloat16", False, 128, 12),
    ("int8", "bfloat16", False, 128, 2),
    ("float8_e4m3fn", "float16", False, 64, 2),
    ("int8", "float16", True, 64, 2),
    ("float8_e4m3fn", "bfloat16", True, 128, 2),
]


@needs_kernels
@pytest.mark.parametrize(("stored", "dtype", "given", "dim", "queries"), some_slow(QUANTISED, QUANTISED[1:2]))
def test_quantised_caches(stored: str, dtype: str, given: bool, dim: int, queries: int) -> None:
    check_quantised(stored, dtype, given, dim, queries, interpret=True)


def check_many_queries(interpret: bool) -> None:
    """A chunk of a prefill, alone and among others in other pages of a larger pool and a wider table: in place, and with gathered keys
    of a quantised cache.
    """
    slopes, most, found = draw(8, N), 40, []
    alibi = lambda score, b, h, q, kv: score - 0.01 * slopes[h] * (q - kv)
    run = dict(score_mod=alibi, return_aux=ALL, query_seq_lengths=jnp.asarray([40]))
    attend = jitted(interpret, lambda *x, **rows: flexjax.paged_attention(*x, **(run | rows), **on_gpu(interpret)))
    q = jnp.stack([draw(200 + s, most, N, D) for s in range(3)]).astype("bfloat16")
    for lengths, seeds, rows, where in (
        ([45], [0], [40], dict(n=6)),
        ([150, 45, 0], [1, 0, 2], [7, 40, 0], dict(n=40, pool=60, hole=np.nan)),
    ):
        cache, table = served(lengths, 8, seeds=seeds, **where)
        queries = q[np.asarray(seeds)]
        got = attend(queries, bf16(cache), table, query_seq_lengths=jnp.asarray(rows))
        wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, bf16(cache))
        want = definition(queries.astype("float32"), wide, table, **(run | dict(query_seq_lengths=jnp.asarray(rows))))
        assert_near(got, want)
        found.append([np.asarray(x[seeds.index(0)], np.float32) for x in jax.tree.leaves(got)])
    jax.tree.map(np.testing.assert_array_equal, *found)
    quantised = []
    for columns, pool in ((6, 8), (12, 8)):  # gathered; a pool smaller than the table, widened
        table, _ = paged.allocate(paged.table(1, columns, pool, 8), np.asarray([45], np.int32))
        cache = paged.empty(pool, 8, M, D, dtype="int8")
        cache, table = quick_jit(paged.append)(cache, table, draw(0, 1, 45, M, D), draw(1, 1, 45, M, D))
        got = attend(q[:1], cache, table)
        assert_near(got, definition(q[:1].astype("float32"), cache, table, **run))
        quantised.append(got)
    jax.tree.map(np.testing.assert_array_equal, *quantised)


def check_prefill_in_pages(page: int, hole: float, dim: int, interpret: bool) -> None:
    """Many queries over pages that lie in any order. What free pages, slots past the lengths and hidden pages that are no page's hold does
    not matter; lengths end in the middle and at the end of a page and of a tile of 128 keys.

    dim   head dim; that of the values stays
    """
    lengths = [131, 0, 128, 2 * page]
    cache, table = served(lengths, page, hole=hole)
    wider = jnp.where(jnp.isnan(cache.key[..., :1]), jnp.nan, 0).repeat(dim - D, -1)
    cache = bf16(dataclasses.replace(cache, key=jnp.concatenate([cache.key, wider], -1)))
    recent = lambda b, h, q, kv: (q >= kv) & ((b != 0) | (kv >= page))  # hides the first page of request 0
    evicted = dataclasses.replace(table, pages=table.pages.at[0, 0].set(2**31 - 1))
    given = dict(mask_mod=recent, score_mod=biased(draw(8, N, 30)), return_aux=ALL)
    call = given | on_gpu(interpret)
    attend = jitted(interpret, lambda *x: flexjax.paged_attention(*x, **call))
    q = draw(100, len(lengths), 40, N, dim).astype("bfloat16")
    plan = prepare_paged(PagedArguments(q, cache, evicted))[0].call.plan
    plan = dataclasses.replace(plan, options=call["kernel_options"])
    assert choose_kernel.reads_pages(plan)
    wide = jax.tree.map(lambda x: x.astype("float32"), cache)
    assert_near(attend(q, cache, evicted), definition(q.astype("float32"), wide, table, **given))


def check_many_ragged(interpret: bool) -> None:
    """Requests of many and of few queries in one call, which are two passes; the bits of one with many, alone and among them."""
    slopes, page, found = draw(8, N), 16, []
    alibi = lambda score, b, h, q, kv: score - 0.01 * slopes[h] * (q - kv)
    attend = jitted(
        interpret, lambda *x: flexjax.paged_attention(*x[:3], cu_q_lens=x[3], score_mod=alibi, **on_gpu(interpret))
    )
    q = draw(200, 4, 270, N, D).astype("bfloat16")
    for lengths, counts, seeds, where in (
        ([300], [270], [0], {}),
        ([40, 300, 0, 258], [3, 270, 0, 258], [1, 0, 2, 3], dict(n=22, pool=60)),
    ):
        cache, table = served(lengths, page, seeds=seeds, **where)
        cache, rows = bf16(cache), q[np.asarray(seeds)]
        flat = jnp.concatenate([rows[r, :c] for r, c in enumerate(counts)] + [jnp.full((4, N, D), jnp.nan, q.dtype)])
        ends = np.cumsum([0, *counts]).astype(np.int32)
        got = attend(flat, cache, table, jnp.asarray(ends))
        wide = jax.tree.map(lambda x: x.astype("float32"), cache)
        given = dict(score_mod=alibi, query_seq_lengths=jnp.asarray(counts))
        want = definition(rows.astype("float32"), wide, table, **given)
        for r, c in enumerate(counts):
            assert_near(got[ends[r] : ends[r + 1]], want[r, :c])
        assert not np.any(np.asarray(got[ends[-1] :], np.float32))
        me = seeds.index(0)
        found.append(np.asarray(got[ends[me] : ends[me + 1]], np.float32))
    np.testing.assert_array_equal(*found)


@needs_kernels
@pytest.mark.slow
def test_many_queries() -> None:
    check_many_queries(interpret=True)
    check_many_ragged(interpret=True)


PREFILL = [(8, np.nan, D), (24, np.inf, D), (64, 1e30, D), (128, np.nan, D), (24, np.nan, 192)]


@needs_kernels
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in matmul:RuntimeWarning"
)  # the simulator multiplies what is hidden
@pytest.mark.parametrize(("page", "hole", "dim"), some_slow(PREFILL, PREFILL[:0]))
def test_prefill_in_pages(page: int, hole: float, dim: int) -> None:
    check_prefill_in_pages(page, hole, dim, interpret=True)


@needs_kernels
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("copied", ["8.0", "9.0", "tcgen05"])  # by cp.async; by TMA; by TMA for tcgen05
@pytest.mark.parametrize(("page", "hole", "dim"), PREFILL)
def test_prefill_in_pages_on_other_cards(
    page: int, hole: float, dim: int, copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At head dim 192 with two warpgroups on mma.sync, each of which copies the parts of half a tile."""
    from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS

    monkeypatch.setitem(globals(), "INSTRUCTION", "mma" if copied in CARDS else "tcgen05")
    monkeypatch.setitem(CARDS, "9.0", dataclasses.replace(CARDS.get(copied, CARDS["9.0"]), capability="9.0"))
    check_prefill_in_pages(page, hole, dim, interpret=True)
