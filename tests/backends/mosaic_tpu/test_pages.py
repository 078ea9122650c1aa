"""Keys and values in pages: the results are those of xla, the bits are a request's own, and what is not read is not looked at."""

import dataclasses
import functools
import re
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import flexjax
from flexjax import AuxRequest, KernelOptions, Origin, masks, paged
from flexjax.backends.mosaic_tpu.page_copies import column_scales
from flexjax.backends.mosaic_tpu.support import MosaicTpuBackend
from flexjax.backends.target import Target
from flexjax.call.arguments import Arguments
from flexjax.call.checks import CallSizes, CheckedArrays
from flexjax.call.prepare import InPages, prepare
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import KernelPlan, Wanted
from tests.cases.small import quick_jit

Array = jax.Array
N, M, D = 4, 2, 128
ALL = AuxRequest(lse=True, max_scores=True)
HOLE = -3
"""A page number of a request that is in no pool."""


def draw(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def served(
    lengths: list[int], page: int, n: int, pool: int, *, seed: int = 0, rest: float = np.nan, holes: tuple = ()
) -> tuple[paged.PagedCache, paged.PageTable]:
    """Requests of which number r has the keys of seed r, in pages that `seed` shuffles. All else of the pool is `rest`, and of the table
    -7 or 2**31 - 1.

    holes   (request, column) of pages that are in no pool
    """
    order = iter(np.random.default_rng(seed).permutation(pool).tolist())
    key, value = (np.full((pool, page, M, D), rest, np.float32) for _ in range(2))
    pages = np.where(np.arange(n) % 2, -7, 2**31 - 1)[None].repeat(len(lengths), 0).astype(np.int32)
    for r, length in enumerate(lengths):
        for i in range(-(-length // page)):
            pages[r, i] = HOLE if (r, i) in holes else next(order)
        for which, x in enumerate((key, value)):
            tokens = np.random.default_rng((r, which)).standard_normal((length, M, D))
            for i in range(-(-length // page)):
                if pages[r, i] != HOLE:
                    part = tokens[i * page : (i + 1) * page]
                    x[pages[r, i], : len(part)] = part
    table = paged.PageTable(jnp.asarray(pages), jnp.asarray(lengths, jnp.int32), jnp.zeros(pool, jnp.int32), page)
    return paged.PagedCache(jnp.asarray(key), jnp.asarray(value)), table


def on_kernel(**call: typing.Any) -> typing.Any:
    """The call on the interpreted kernel, jitted. block_kv: tokens of a tile."""
    options = KernelOptions(interpret=True, block_kv=call.pop("block_kv", None), block_q=call.pop("block_q", None))
    call = {"return_aux": ALL} | call
    return quick_jit(
        functools.partial(flexjax.paged_attention, implementation="mosaic_tpu", kernel_options=options, **call)
    )


def definition(query: Array, cache: paged.PagedCache, table: paged.PageTable, **call: typing.Any) -> typing.Any:
    """As one program: called eagerly it is forty."""
    call = {"mask_mod": masks.causal, "origin": Origin(query="end"), "return_aux": ALL} | call

    def run(query: Array, cache: paged.PagedCache, table: paged.PageTable) -> typing.Any:
        lengths = {"key_value_seq_lengths": table.lengths}
        return flexjax.flex_attention(query, *paged.gather(cache, table), implementation="reference", **lengths, **call)

    return jax.jit(run)(query, cache, table)


def assert_same(got: typing.Any, want: typing.Any, within: float = 2e-5) -> None:
    close = lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=within, atol=within)
    jax.tree.map(close, got, want)


def window(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return (q >= kv) & (q - kv < 12)


def window_by_head(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return (q >= kv) & (q - kv < 3 + 5 * h)


TABLE, KINDS = draw(8, N, 30), jnp.asarray(np.arange(200).reshape(5, 40) % 7)


def by_request(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
    return score * (1 + 0.1 * b) + TABLE[h, jnp.clip(q - kv, 0, 29)] + 0.01 * (kv % 3)


def documents(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return KINDS[b, jnp.minimum(kv, 39)] != 3


FUNCTIONS = {
    "distance": lambda s, b, h, q, kv: q - kv,
    "log": lambda s, b, h, q, kv: s * jnp.log(1.0 + q - kv),
}  # NaN if hidden

# fmt: off
CASES: dict[str, tuple[int, int, dict[str, typing.Any]]] = {  # page, T, arguments
    "window": (8, 3, dict(mask_mod=window, block_kv=64)),
    "no_mask": (8, 2, dict(mask_mod=None, block_kv=64)),
    "bias_and_query_lengths": (16, 3, dict(score_mod=by_request, query_seq_lengths=jnp.asarray([3, 0, 1, 2, 3]), block_kv=64)),
    "documents": (8, 2, dict(mask_mod=documents)),
    "mask_by_head": (16, 2, dict(mask_mod=window_by_head, block_kv=64)),
    "page_larger_than_tile": (128, 1, dict(block_kv=64)),
    "page_beside_tile": (24, 1, dict(block_kv=64)),
    "tiles_of_queries": (16, 70, dict(block_q=32, block_kv=64)),
    "expectations": (16, 3, dict(score_mod=by_request, return_aux=AuxRequest(lse=True, expectations=FUNCTIONS), block_kv=64)),
}
# fmt: on


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_on_gathered_keys(name: str) -> None:
    """With NaN in free pages, past the lengths and in the rows of queries that do not exist."""
    page, queries, call = CASES[name]
    lengths = [150, 0, 8, 21, 40] if name != "documents" else [33, 0, 8, 21, 40]
    cache, table = served(lengths, page, 160 // page + 1, 40)
    q, rows = draw(100, len(lengths), queries, N, D), call.get("query_seq_lengths")
    if rows is not None:
        q = jnp.where(jnp.arange(queries)[:, None, None] < rows[:, None, None, None], q, jnp.nan)
    want = {name: x for name, x in call.items() if not name.startswith("block")}
    assert_same(on_kernel(**call)(q, cache, table), definition(q, cache, table, **want))


@pytest.mark.slow
def test_bfloat16_and_ragged_queries() -> None:
    cache, table = served([150, 0, 8, 21], 16, 10, 40)
    cache = paged.PagedCache(cache.key.astype("bfloat16"), cache.value.astype("bfloat16"))
    counts, q = [3, 0, 1, 5], draw(100, 4, 5, N, D).astype("bfloat16")
    flat = jnp.concatenate([q[r, :c] for r, c in enumerate(counts)] + [jnp.full((4, N, D), jnp.nan, "bfloat16")])
    ends = np.cumsum([0, *counts]).astype(np.int32)
    out, _ = on_kernel(block_q=2)(flat, cache, table, cu_q_lens=ends)
    want, _ = definition(q, cache, table, query_seq_lengths=jnp.asarray(counts))
    for r, c in enumerate(counts):
        assert_same(out[ends[r] : ends[r + 1]], want[r, :c], 0.02)
    assert not np.any(np.float32(out[ends[-1] :]))


QUANTISED = [("int8", "float32", False, 1), ("float8_e4m3fn", "bfloat16", False, 3), ("int8", "bfloat16", True, 40)]


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "dtype", "given", "queries"), QUANTISED)
def test_quantised_pages(stored: str, dtype: str, given: bool, queries: int) -> None:
    """With scales by page and head, NaN for free pages, or given ones; NaN in the slots of float8 pages that hold no token; bits of a
    request alone and among others.
    """
    heads, page, lengths = 4, 8, np.asarray([150, 0, 21], np.int32)
    scales = (jnp.full(heads, 0.04), jnp.full(heads, 0.03)) if given else None
    table, _ = paged.allocate(paged.table(3, 20, 40, page), lengths)
    empty = paged.empty(40, page, heads, D, dtype=stored, scales=scales)
    if stored != "int8":
        hole = lambda x: dataclasses.replace(x, values=jnp.full_like(x.values, jnp.nan))
        empty = paged.PagedCache(hole(empty.key), hole(empty.value))
    tokens = draw(0, 3, 150, heads, D), draw(1, 3, 150, heads, D)
    cache, table = quick_jit(paged.append)(empty, table, *tokens, query_seq_lengths=lengths)
    q = draw(2, 3, queries, N, D).astype(dtype)
    want = definition(q.astype("float32"), cache, table, score_mod=by_request)
    if not given:
        free = (table.uses == 0)[:, None]
        spoil = lambda x: dataclasses.replace(x, scales=jnp.where(free, jnp.nan, x.scales))
        cache = paged.PagedCache(spoil(cache.key), spoil(cache.value))
    attend = on_kernel(score_mod=by_request, block_kv=64)
    got = attend(q, cache, table)
    assert_same(got, want, 2e-5 if dtype == "float32" else 0.03)
    alone = dataclasses.replace(table, pages=table.pages[:1], lengths=table.lengths[:1])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), got, attend(q[:1], cache, alone))


def test_scales_of_a_page_that_is_in_no_pool_are_zero() -> None:
    """The scales of the pages in the pool that are free are NaN, and 0 times NaN is NaN."""
    heads, page, pool = 4, 8, 3
    scale = jnp.full((pool, heads), jnp.nan).at[1].set(jnp.arange(1.0, 5.0))
    plan: typing.Any = types.SimpleNamespace(page=page * heads, kv_len=3 * page * heads)
    operands: typing.Any = types.SimpleNamespace(
        scales=(scale, 2 * scale),
        pages=jnp.asarray([[HOLE, 1, 2**31 - 1]]),
        lengths=types.SimpleNamespace(key=jnp.asarray([3 * page * heads])),
        key=jnp.zeros((pool, page, heads, D), "int8"),
    )
    found = column_scales(plan, operands, 128)
    assert found is not None
    wanted = np.concatenate([np.zeros(32), np.tile(np.arange(1.0, 5.0), page), np.zeros(64)])
    np.testing.assert_array_equal(np.asarray(found[0]), wanted[None, None])
    np.testing.assert_array_equal(np.asarray(found[1]), 2 * wanted[None, None])


def test_bits_of_a_request_are_its_own() -> None:
    """Whatever the others, the page numbers, and what the rest of the pool holds. Lengths 0, 1, and around a page; an evicted page is
    hidden, one that is visible reads as zeros.
    """
    page, lengths, holes = 64, [0, 1, 63, 64, 65, 150, 200], ((5, 0), (6, 1))
    call: dict[str, typing.Any] = dict(
        mask_mod=lambda b, h, q, kv: (q >= kv) & ((b != 5) | (kv >= 64)), sinks=draw(7, N)
    )
    attend, q, own = on_kernel(block_kv=128, **call), draw(100, 7, 1, N, D), np.asarray([1, 3])
    first = attend(q, *served(lengths, page, 4, 30, holes=holes))
    assert_same(first, definition(q, *served(lengths, page, 4, 30, holes=holes, rest=0.0), **call))
    moved = attend(q, *served(lengths, page, 4, 30, seed=1, holes=holes, rest=1e30))
    others = attend(q, *served([150, 1, 200, page, 9, 0, 0], page, 4, 30, seed=2))
    for x, y, z in zip(jax.tree.leaves(first), jax.tree.leaves(moved), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x[own], z[own])


def prepared(query: Array, cache: paged.PagedCache, table: paged.PageTable, **given: typing.Any) -> typing.Any:
    """The plan and the operands of a call."""
    batch, queries = query.shape[:2]
    columns, page = table.pages.shape[1], cache.key.shape[1]
    sizes = CallSizes(batch, N, M, queries, columns * page, D, D)
    inputs = CheckedArrays(query, cache.key, cache.value, None, None, None, sizes, query.dtype.name)
    where = InPages(inputs, table.pages, page, None, None)
    arguments: typing.Any = {"origin": Origin(query="end"), "key_value_seq_lengths": table.lengths} | given
    return prepare(Arguments(query, cache.key, cache.value, **arguments), where)


@pytest.mark.slow
def test_simulator_finds_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies arrive as late as their waits allow, and memory that nothing was written to is NaN."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    made: list[typing.Any] = []
    make = vars(interpret_pallas_call)["RaceDetectionState"]
    monkeypatch.setattr(
        interpret_pallas_call, "RaceDetectionState", lambda *a, **k: made.append(make(*a, **k)) or made[-1]
    )
    given = draw(100, 5, 1, N, D), *served([21, 0, 8, 40, 33], 8, 6, 20, holes=((3, 0), (4, 1)))
    call = prepared(*given, mask_mod=masks.causal, kernel_options=KernelOptions(block_kv=64))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        got = Run(MosaicTpuBackend(), call.plan, Target("cpu")).forward(call.operands)
        jax.effects_barrier()
    assert [state.races_found for state in made] == [False]
    assert_same(got.out, definition(*given)[0])


# ------------------------------------------------------------------- refusals

PLAN = KernelPlan(2, 32, 8, 1, 512, 128, 128, "bfloat16", "BTNH", 0.1, page=16, lengths=(False, True))
IN_PLACE = (
    "mosaic_tpu reads pages in place where head dims are multiples of 128 and the key heads a multiple of 8, and for head dims "
    "of 128 also where they are 1, 2 or 4; this cache has {} key heads, and head dims of {} and {}."
)
BYTES_IN_PLACE = (
    "mosaic_tpu reads quantised pages in place where key heads are not 2, and tokens of a page times key heads a multiple of 32; this cache "
    "has {} key heads and pages of {} tokens."
)
REFUSED: dict[str, tuple[dict[str, typing.Any], str | None]] = {
    "taken": ({}, None),
    "one head": ({"kv_heads": 1, "head_dim": 256}, None),
    "quantised": ({"cache_dtype": "int8"}, None),
    "quantised, one head": ({"cache_dtype": "int8", "kv_heads": 1, "page": 32, "dtype": "float32"}, None),
    "quantised, two heads": ({"cache_dtype": "float8_e4m3fn", "kv_heads": 2}, BYTES_IN_PLACE.format(2, 16)),
    "quantised, short pages": ({"cache_dtype": "int8", "kv_heads": 1}, BYTES_IN_PLACE.format(1, 16)),
    "head dim": ({"value_dim": 64}, IN_PLACE.format(8, 128, 64)),
    "heads": ({"kv_heads": 4, "head_dim": 256}, IN_PLACE.format(4, 256, 128)),
    "table": (
        {"batch": 512, "kv_len": 8192},
        "mosaic_tpu keeps the page numbers of a call in SMEM, up to 163840 of them; this table has 512 x 512. Use larger pages or "
        "shorter tables.",
    ),
    "float16": ({"dtype": "float16"}, "mosaic_tpu computes float32 and bfloat16; query, key and value are float16."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU7x"])
def test_what_is_refused(name: str, kind: str) -> None:
    fields, sentence = REFUSED[name]
    assert MosaicTpuBackend().refuses(dataclasses.replace(PLAN, **fields), Target("tpu", kind)) == sentence


def test_gradients_are_refused() -> None:
    wanted = Wanted(True, False, False, False, False, False, ())
    sentence = "mosaic_tpu has no gradients of a call with keys in pages."
    assert MosaicTpuBackend().refuses_backward(PLAN, Target("tpu", "TPU v6e"), wanted, None) == sentence


def test_the_sentence_reaches_the_user() -> None:
    cache, table = served([8], 8, 1, 1)
    narrow = paged.PagedCache(cache.key[..., :64], cache.value[..., :64])
    with pytest.raises(NotImplementedError, match=re.escape(IN_PLACE.format(2, 64, 64))):
        on_kernel()(draw(3, 1, 1, N, 64), narrow, table)
