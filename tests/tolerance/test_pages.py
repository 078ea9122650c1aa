"""`tolerance=` over keys in pages: the norms that `append` keeps, which pages are read, and what is refused."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, KernelOptions, paged
from flexjax.paged.call import PagedArguments, Part, prepare_paged
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

N, M, D, PAGE, COLUMNS, POOL = 4, 2, 16, 32, 16, 60
LENGTHS = [500, 130, 290]
TOLERANCE = 2.0**-24
SLOPES = np.float32([0.25, 0.5, 1.0, 2.0])
append, allocate, fork = (quick_jit(f) for f in (paged.append, paged.allocate, paged.fork))


def falling(steep: float = 1.0) -> Callable:
    slopes = array(SLOPES * steep)
    return lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j)


@functools.cache
def served(
    dtype: str = "float32", norms: bool = True, dim: int = D
) -> tuple[paged.PagedCache, paged.PageTable, np.ndarray, np.ndarray]:
    """(cache, table, k, v) of requests of LENGTHS tokens, k and v [R, S, M, D]."""
    rng = np.random.default_rng(0)
    k, v = (np.float32(rng.standard_normal((3, COLUMNS * PAGE, M, dim))) for _ in range(2))
    table, granted = allocate(paged.table(3, COLUMNS, POOL, PAGE), np.asarray(LENGTHS, np.int32))
    assert granted.all()
    cache = paged.empty(POOL, PAGE, M, dim, dtype=dtype, norms=norms)
    given = (jnp.asarray(x, jnp.bfloat16) if dtype == "bfloat16" else x for x in (k, v))
    cache, table = append(cache, table, *given, query_seq_lengths=np.asarray(LENGTHS, np.int32))
    return cache, table, k, v


def longest(cache: paged.PagedCache) -> np.ndarray:
    """[P, M]: the largest norm of the keys that each page holds, by numpy."""
    key: Any = cache.key
    pool = np.float64(key.values) * np.float64(key.scales)[:, None, :, None] if hasattr(key, "scales") else key
    return np.sqrt((np.float64(pool) ** 2).sum(-1)).max(1)


# ------------------------------------------------------------------- the norms of a cache


@pytest.mark.parametrize("dtype", some_slow(["float32", "int8", "bfloat16"], ["float32"]))
def test_append_keeps_the_largest_norm_of_each_page(dtype: str) -> None:
    cache = served(dtype)[0]
    found = np.asarray(cache.norms)
    np.testing.assert_allclose(found, longest(cache), rtol=1e-5, atol=1e-6)
    assert (found >= longest(cache) * (1 - 1e-9)).all()
    assert (found[np.asarray(served(dtype)[1].pages)[0, :15]] > 0).all()


def test_norms_follow_copies_of_pages_and_pages_begin_anew() -> None:
    small = lambda size: np.full((2, 1, M, D), size, np.float32)
    table, _ = allocate(paged.table(2, 2, 4, 8), np.asarray([12, 0], np.int32))
    cache = paged.empty(4, 8, M, D, dtype="float32", norms=True)
    first = np.full((2, 12, M, D), 1.0, np.float32)
    cache, table = append(cache, table, first, first, query_seq_lengths=np.asarray([12, 0], np.int32))
    table = fork(table, np.asarray([0, 0], np.int32))
    table, _ = allocate(table, np.asarray([13, 13], np.int32))
    cache, table = append(cache, table, small(5.0) * np.float32([1.0, 0.1])[:, None, None, None], small(0))
    np.testing.assert_allclose(np.asarray(cache.norms)[np.asarray(table.pages)][:, :, 0], [[4, 20], [4, 4]], rtol=1e-5)
    table = paged.release(table, np.asarray([True, True]))
    table, _ = allocate(table, np.asarray([1, 1], np.int32))
    cache, table = append(cache, table, small(0.25), small(0))
    np.testing.assert_allclose(np.asarray(cache.norms)[np.asarray(table.pages)[:, 0]], 1.0, rtol=1e-5)
    cache, _ = append(cache, allocate(table, np.asarray([2, 1], np.int32))[0], small(np.nan), small(0),
                      query_seq_lengths=np.asarray([1, 0], np.int32))  # fmt: skip
    assert np.isinf(np.asarray(cache.norms)[int(table.pages[0, 0])]).all()


# ------------------------------------------------------------------- calls


def attend(q: Any, tolerance: float | None, cache: paged.PagedCache, table: paged.PageTable, **more: Any) -> Any:
    asked = AuxRequest(lse=True, lost=tolerance is not None)
    more = {"score_mod": falling()} | more
    return flexjax.paged_attention(q, cache, table, tolerance=tolerance, return_aux=asked, **more)


def dense(q: np.ndarray, r: int, visible: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, D], lost [T, N]) of request r by numpy; `visible`, bool [N, T, S]: without the other entries."""
    _, _, k, v = served()
    count, length = q.shape[1], LENGTHS[r]
    keys, values = (np.repeat(np.float64(x[r, :length]), N // M, 1) for x in (k, v))
    i, j = np.arange(length - count, length)[:, None], np.arange(length)
    s = np.einsum("tnd,snd->nts", np.float64(q[r]), keys) * D**-0.5
    s = np.where(i >= j, s - SLOPES[:, None, None].astype(float) * np.abs(i - j), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    lost = np.zeros(p.shape[:2]) if visible is None else np.where(visible[:, :, :length], 0, p).sum(-1)
    return np.einsum("nts,snd->tnd", p, values), lost.T


def kept(q: Any, cache: paged.PagedCache, table: paged.PageTable, **more: Any) -> list[np.ndarray]:
    """The entries that stay, bool [B, N, T, S], of each pass of the call."""
    given = PagedArguments(q, cache, table, score_mod=falling(), tolerance=TOLERANCE, **more)
    return [entries(part) for part in prepare_paged(given)]


def entries(part: Part) -> np.ndarray:
    """The entries of the blocks that stay, bool [B, N, T, S]."""
    assert part.call.skipped is not None
    assert part.call.skipped.mask is not None
    blocks = np.asarray(part.call.skipped.mask.to_dense()).astype(bool)
    return np.repeat(np.repeat(blocks, 128, 2)[:, :, : part.call.plan.q_len], 128, 3)


@pytest.mark.parametrize(("count", "implementation"), some_slow(
    [(1, "xla"), (1, "reference"), (40, "xla"), (40, "reference")], [(1, "xla")]
))  # fmt: skip
def test_a_row_loses_no_more_than_its_bound(count: int, implementation: str) -> None:
    q = np.float32(np.random.default_rng(1).standard_normal((3, count, N, D)))
    cache, table, _, _ = served()
    out, aux = quick_jit(functools.partial(attend, tolerance=TOLERANCE, implementation=implementation))(
        q, cache=cache, table=table
    )
    (visible,) = kept(q, cache, table)
    assert not visible.all()
    for r in range(3):
        want, lost = dense(q, r, visible[r])
        np.testing.assert_allclose(out[r], want, atol=3e-6)
        assert (lost <= np.asarray(aux.lost[r]) * (1 + 1e-5)).all()
    assert 0 < float(aux.lost.max()) <= TOLERANCE


def without_far_values(cache: paged.PagedCache, table: paged.PageTable, visible: np.ndarray) -> paged.PagedCache:
    """The cache with NaN in the values of pages that no head visits."""
    on = visible.any((1, 2)).reshape(3, COLUMNS, PAGE).any(-1)
    read = np.unique(np.asarray(table.pages)[on])
    value = np.full(cache.value.shape, np.nan, np.float32)
    value[read] = np.asarray(cache.value, np.float32)[read]
    return dataclasses.replace(cache, value=jnp.asarray(value, cache.value.dtype))


HOPPER = KernelOptions(interpret=True)
KERNELS: dict[str, tuple[Any, KernelOptions | None]] = {
    "hopper": ("mosaic_gpu", HOPPER),
    "mma": ("mosaic_gpu", KernelOptions(interpret=True, instruction="mma")),
    "tpu": ("mosaic_tpu", KernelOptions(interpret=True, block_kv=128)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_read_pages_that_go(name: str) -> None:
    implementation, options = KERNELS[name]
    if implementation == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12")
    dim = 128 if name == "tpu" else D
    cache, table, _, _ = served("bfloat16", dim=dim)
    q = array(np.random.default_rng(2).standard_normal((3, 1, N, dim)), jnp.bfloat16)
    steep = falling(8.0)
    given = PagedArguments(q, cache, table, score_mod=steep, tolerance=TOLERANCE)
    (part,) = prepare_paged(given)
    emptied = without_far_values(cache, table, entries(part))
    assert bool(jnp.isnan(emptied.value[table.pages[0, 0]]).all())
    run = functools.partial(
        attend, q, table=table, score_mod=steep, implementation=implementation, kernel_options=options
    )
    want, got = run(None, cache)[0], run(TOLERANCE, emptied)[0]
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2)


@pytest.mark.parametrize("kind", some_slow(["ragged", "bound", "int8"], ["ragged"]))
def test_other_calls_are_those_without_within_the_tolerance(kind: str) -> None:
    """Ragged queries; a bound in place of norms, for the same blocks or more; a quantised cache."""
    rng, more = np.random.default_rng(3), {}
    cache, table, _, _ = served("int8" if kind == "int8" else "float32", kind != "bound")
    q = array(rng.standard_normal((3, 2, N, D)), jnp.float32)
    if kind == "ragged":
        q, more = (
            array(rng.standard_normal((24, N, D)), jnp.float32),
            {"cu_q_lens": np.asarray([0, 1, 21, 22], np.int32)},
        )
    if kind == "bound":
        more = {"score_bound": 12.0}
    assert any(not x.all() for x in kept(q, cache, table, **more))
    run = lambda tolerance, more: quick_jit(lambda q, cache, table: attend(q, tolerance, cache, table, **more))
    out, aux = run(TOLERANCE, more)(q, cache, table)
    want, whole = run(None, {n: x for n, x in more.items() if n != "score_bound"})(q, cache, table)
    np.testing.assert_allclose(out, want, atol=3e-6)
    np.testing.assert_allclose(aux.lse, whole.lse, atol=3e-6)
    assert aux.lost.shape == aux.lse.shape
    assert 0 < float(aux.lost.max()) <= TOLERANCE


def test_a_step_reads_the_keys_of_witnesses_alone() -> None:
    """The lists come from norms of pages: nothing that is computed for them has as many numbers as the keys have."""
    cache, table, _, _ = served()
    q = array(np.zeros((3, 1, N, D)), jnp.float32)
    (call,) = [
        part.call for part in prepare_paged(PagedArguments(q, cache, table, score_mod=falling(), tolerance=1e-6))
    ]
    assert call.skipped is not None
    text = str(
        jax.make_jaxpr(
            lambda q, c, t: (
                prepare_paged(PagedArguments(q, c, t, score_mod=falling(), tolerance=1e-6))[0].call.operands.lists
            )
        )(q, cache, table)
    )
    assert f"f32[3,{COLUMNS * PAGE}" not in text
    assert f"f32[3,{COLUMNS},{PAGE}" not in text


def test_explain_counts_what_a_kernel_reads_once_for_several_heads() -> None:
    """On a TPU pages are read for all four heads, of which the first keeps most, and in tiles; on a GPU for two heads."""
    table, cache = served()[1], paged.empty(POOL, PAGE, M, 128, dtype="bfloat16", norms=True)
    q = jax.ShapeDtypeStruct((3, 1, N, 128), jnp.bfloat16)

    def shares(device: str, block: int | None = None) -> list[str]:
        text = str(flexjax.explain(q, cache, table, score_mod=falling(), tolerance=TOLERANCE, score_bound=10.0, device=device, kernel_options=KernelOptions(block_kv=block)))  # fmt: skip
        return [line.strip() for line in text.split("\n") if line.startswith("  by ")]

    assert shares("v6e", 128) == ["by group of 4 heads, whose keys are read together 0: 0.78"]
    assert shares("v6e") == ["by group of 4 heads, whose keys are read together 0: 1.00"]  # one tile has all pages
    if jax.__version_info__ >= (0, 11):  # the GPU kernels need it
        assert shares("h100") == ["by group of 2 heads, whose keys are read together 0: 0.78, 1: 0.56"]
    assert shares("cpu") == ["by head 0: 0.78, 1: 0.56, 2: 0.56, 3: 0.44"]


# ------------------------------------------------------------------- refusals


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no norms": (
        lambda: attend(np.zeros((3, 1, N, D), np.float32), 1e-3, *served(norms=False)[:2]),
        "`score_bound` is None for keys in pages without norms; expected a number beside tolerance. Or make the cache with "
        "paged.empty(..., norms=True): `append` then keeps the norms of each page.",
    ),
    "a bound by block": (
        lambda: attend(np.zeros((3, 1, N, D), np.float32), 1e-3, *served()[:2], score_bound=jnp.ones((3, N))),
        "`score_bound` is of shape (3, 4); expected one number for keys in pages. Blocks of pages follow from the table.",
    ),
    "shared": (
        lambda: attend(np.zeros((3, 1, N, D), np.float32), 1e-3, *served()[:2], shared=object()),
        "`tolerance` is given beside shared; expected None. Its proof is of all keys of a row, in one pass over them.",
    ),
    "lost without": (
        lambda: flexjax.paged_attention(
            np.zeros((3, 1, N, D), np.float32), *served()[:2], return_aux=AuxRequest(lost=True)
        ),
        "`return_aux.lost` is True without tolerance; expected False. Without it nothing is lost.",
    ),
    "norms of another pool": (
        lambda: attend(
            np.zeros((3, 1, N, D), np.float32), 1e-3,
            dataclasses.replace(served()[0], norms=jnp.zeros((POOL, 3))), served()[1],
        ),
        "`cache.norms` is float32[60, 3]; expected float32[60, 2] or None. Make the cache with paged.empty(..., norms=True).",
    ),
    "a number for norms": (
        lambda: paged.empty(POOL, PAGE, M, D, dtype="float32", norms=1),  # type: ignore[arg-type]
        "`norms` is 1; expected a bool. True keeps the largest norm of each page's keys.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_and_in_which_words(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=r".") as error:
        call()
    assert str(error.value) == message
