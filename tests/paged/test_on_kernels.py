"""What holds for any step of serving, on the GPU kernels in the simulator and on the TPU kernel in the interpreter: the properties of
test_properties.py, with keys that are split. `tools/device/check_pages.py` runs the tests of GPU kernels on a GPU.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, SharedPrefix, paged
from tests.backends.mosaic_tpu.test_pages import HOLE, D, M, N, definition, draw, served
from tests.cases.small import quick_jit

GPU, TPU = "mosaic_gpu", "mosaic_tpu"
INTERPRET: bool = True
INSTRUCTION: typing.Literal["mma"] | None = None
"""Whether GPU kernels run in the simulator, and the family that they are of; `tools/device/check_pages.py` sets both."""
PAGE, CHUNK = 8, 128
"""Tokens of a page, and keys that a work item of the GPU kernel sums here, so that short prompts are split."""
needs_kernels = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the GPU kernels need jax 0.11")
# the simulator multiplies what is hidden
quiet = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul:RuntimeWarning")
both = pytest.mark.parametrize("backend", [pytest.param(GPU, marks=[needs_kernels, quiet]), TPU])
pytestmark = pytest.mark.slow


def alibi(score: typing.Any, b: typing.Any, h: typing.Any, q: typing.Any, kv: typing.Any) -> typing.Any:
    return score - 0.01 * (h + 1) * (q - kv)


def stored(backend: str, *given: typing.Any, **where: typing.Any) -> tuple[typing.Any, typing.Any]:
    """(cache, table) of `served`, in bfloat16 for the GPU kernels, which take no pages of float32."""
    cache, table = served(*given, **where)
    return jax.tree.map(lambda x: x.astype(dtype_of(backend)), cache), table


def dtype_of(backend: str) -> str:
    return "bfloat16" if backend == GPU else "float32"


def run(backend: str, query: jax.Array, cache: typing.Any, table: typing.Any, **call: typing.Any) -> np.ndarray:
    """out of paged_attention on a backend, in float32, with keys split or in tiles of 64."""
    few = query.ndim == 3 or query.shape[1] * query.shape[-2] // M <= 64
    options = KernelOptions(interpret=True, block_kv=64)
    if backend == GPU:
        options = KernelOptions(interpret=INTERPRET, instruction=INSTRUCTION, split=CHUNK if few else None)
    attend = lambda q, cache, table: flexjax.paged_attention(
        q, cache, table, implementation=typing.cast(typing.Any, backend), kernel_options=options, **call
    )
    simulated = backend == GPU and INTERPRET
    attend = attend if simulated else quick_jit(attend)  # callbacks of the simulator run in order
    return np.asarray(attend(query.astype(dtype_of(backend)), cache, table), np.float32)


def assert_near(backend: str, got: typing.Any, want: typing.Any) -> None:
    np.testing.assert_allclose(got, np.asarray(want, np.float32), atol=2e-2 if backend == GPU else 2e-5)


def of_definition(
    backend: str, query: jax.Array, cache: typing.Any, table: typing.Any, **call: typing.Any
) -> jax.Array:
    """out of the definition on the numbers that the backend gets, in float32."""
    wide = lambda x: x.astype("float32")
    return definition(wide(query.astype(dtype_of(backend))), jax.tree.map(wide, cache), table, **call)[0]


@both
def test_a_prompt_in_any_cut(backend: str) -> None:
    """A chunk ends before, at and after the end of a page and of what a work item sums."""
    total, cuts = 150, ([1, 7, 1, 15, 126], [126, 1, 1, 7, 15])
    cache, table = stored(backend, [total, total], PAGE, 20, 40)
    q = draw(100, 2, total, N, D)
    want = of_definition(backend, q, cache, table, score_mod=alibi)
    done = np.zeros(2, np.int32)
    for counts in zip(*cuts, strict=True):
        most = 16 if max(counts) <= 16 else 128
        at = np.minimum(done[:, None] + np.arange(most), total - 1)
        new = jnp.take_along_axis(q, jnp.asarray(at)[:, :, None, None], 1)
        step = dataclasses.replace(table, lengths=jnp.asarray(done + counts))
        got = run(backend, new, cache, step, score_mod=alibi, query_seq_lengths=jnp.asarray(counts))
        for r, count in enumerate(counts):
            assert_near(backend, got[r, :count], want[r, done[r] : done[r] + count])
        done += counts


@both
@pytest.mark.parametrize("queries", [3, 32, 33])
def test_lengths_at_the_ends_of_pages_and_chunks(backend: str, queries: int) -> None:
    """A request without keys, one without queries, and 64 packed rows, the most of the GPU kernel for few queries, and 66."""
    edges = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1]
    lengths = edges if queries == 3 else [CHUNK + 1, 40, 0]
    counts = np.minimum([queries, 1, 1, 0, 3, 2, 3, 3][: len(lengths)], queries)
    cache, table = stored(backend, lengths, PAGE, 18, 90)
    q = draw(100, len(lengths), queries, N, D)
    rows = dict(score_mod=alibi, query_seq_lengths=jnp.asarray(counts))
    got = run(backend, q, cache, table, **rows)
    full = dataclasses.replace(cache, key=jnp.nan_to_num(cache.key), value=jnp.nan_to_num(cache.value))
    assert_near(backend, got, of_definition(backend, q, full, table, **rows))


@both
@pytest.mark.parametrize(("group", "queries"), [(7, 9), (5, 13), (12, 1), (71, 1)])
def test_rows_that_fill_no_tile(backend: str, group: int, queries: int) -> None:
    """63 and 65 packed rows, one less and one more than the GPU kernel for few queries takes; groups that divide no tile, one of them larger
    than a tile.
    """
    lengths = (
        [CHUNK + 9, 0, 21] if group < 71 else [CHUNK + 9]
    )  # the simulator takes a quarter of a second for each query head
    counts = jnp.asarray([queries, 1, (queries + 1) // 2][: len(lengths)])
    cache, table = stored(backend, lengths, PAGE, 18, 40)
    q = draw(100, len(lengths), queries, group * M, D)
    rows = dict(score_mod=alibi, query_seq_lengths=counts)
    full = dataclasses.replace(cache, key=jnp.nan_to_num(cache.key), value=jnp.nan_to_num(cache.value))
    assert_near(backend, run(backend, q, cache, table, **rows), of_definition(backend, q, full, table, **rows))


@needs_kernels
@quiet
@pytest.mark.parametrize("queries", [1, 5])
def test_a_quantised_cache_against_float64(queries: int) -> None:
    """Computed by numpy from the stored bytes, scales and page numbers, without any function of flexjax.paged."""
    lengths, columns, page = [CHUNK + 9, 21], 6, 32
    table, _ = paged.allocate(paged.table(2, columns, 2 * columns, page), jnp.asarray(lengths))
    cache = paged.empty(2 * columns, page, M, D, dtype="int8")
    tokens = (draw(n, 2, max(lengths), M, D) for n in (0, 1))
    cache, table = quick_jit(paged.append)(cache, table, *tokens, query_seq_lengths=jnp.asarray(lengths))
    q = draw(100, 2, queries, N, D).astype(dtype_of(GPU))
    got = run(GPU, q, cache, table, score_mod=alibi)
    pages, query = np.asarray(table.pages), np.asarray(q).astype(np.float64)
    for r, length in enumerate(lengths):
        held = pages[r, : -(-length // page)]
        key, value = (
            (np.asarray(x.values)[held] * np.asarray(x.scales, np.float64)[held][:, None, :, None]).reshape(-1, M, D)[
                :length
            ]
            for x in (cache.key, cache.value)
        )
        for h in range(N):
            head, at = h * M // N, length - queries + np.arange(queries)
            seen = at[:, None] - np.arange(length)
            scores = query[r, :, h] @ key[:, head].T / np.sqrt(D) - 0.01 * (h + 1) * seen
            weights = np.exp(np.where(seen >= 0, scores - scores.max(-1, keepdims=True), -np.inf))
            assert_near(GPU, got[r, :, h], weights @ value[:, head] / weights.sum(-1, keepdims=True))


@both
def test_what_lies_in_hidden_places_does_not_matter(backend: str) -> None:
    """In free pages, past lengths, in hidden pages that are no page's and in rows past query_seq_lengths: not a bit."""
    lengths, counts, found = [21, 0, 9, 140], jnp.asarray([3, 1, 0, 2]), []
    recent = lambda b, h, q, kv: (q >= kv) & (kv >= PAGE)  # hides the first page
    for rest in (0.0, np.nan, np.inf, -np.inf, 1e30):
        cache, table = stored(backend, lengths, PAGE, 19, 30, rest=rest)
        pages = table.pages.at[:, 0].set(HOLE if rest == 0 else 2**31 - 1)
        q = jnp.where(jnp.arange(3)[:, None, None] < counts[:, None, None, None], draw(100, 4, 3, N, D), rest)
        moved = dataclasses.replace(table, pages=pages)
        found.append(run(backend, q, cache, moved, score_mod=alibi, mask_mod=recent, query_seq_lengths=counts))
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@both
@pytest.mark.parametrize("queries", [1, 5])
def test_bits_of_a_request_whose_keys_are_split(backend: str, queries: int) -> None:
    """Alone, and among others in other pages of a larger pool and a wider table; as rows and as ragged queries."""
    found, length = [], 2 * CHUNK + 30
    for others, where in (([], (36, 40)), ([30, 0, 150], (50, 80))):
        lengths = [length, *others]
        cache, table = stored(backend, lengths, PAGE, *where, seed=len(others), rest=1e30)
        q = draw(100, 4, queries, N, D)[: len(lengths)]
        counts = np.minimum([queries, 1, 1, 2][: len(lengths)], queries)
        flat = jnp.concatenate([q[r, :c] for r, c in enumerate(counts)])
        ends = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        rows = run(backend, q, cache, table, score_mod=alibi, query_seq_lengths=jnp.asarray(counts))[0]
        found.append((rows, run(backend, flat, cache, table, score_mod=alibi, cu_q_lens=ends)[:queries]))
    assert np.any(found[0][0])
    jax.tree.map(np.testing.assert_array_equal, *found)


@both
def test_a_shared_prefix(backend: str) -> None:
    """It ends inside a page and, on the GPU, inside a work item; one request is in no group."""
    cache, table = stored(backend, [160, 155, 21, 170], PAGE, 22, 90)
    pages = np.array(table.pages)
    pages[[1, 3], :18] = pages[0, :18]
    table = dataclasses.replace(table, pages=jnp.asarray(pages))
    group = jnp.asarray([0, 0, -1, 0])
    shared = SharedPrefix(group, table.pages[:1, :18], jnp.asarray([141]))
    q = draw(100, 4, 2, N, D)
    # `definition` is given the same pages; the tokens past the ends are NaN, which it multiplies by 0
    clean = dataclasses.replace(cache, key=jnp.nan_to_num(cache.key), value=jnp.nan_to_num(cache.value))
    got = run(backend, q, cache, table, score_mod=alibi, shared=shared)
    assert_near(backend, got, of_definition(backend, q, clean, table, score_mod=alibi))


@needs_kernels
@pytest.mark.parametrize(("mask", "tiles", "items"), [("causal", 6, 4), ("window", 3, 3), ("every other block", 4, 3)])
def test_only_tiles_that_some_query_sees_are_copied(
    mask: str, tiles: int, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 64 keys, counted by the copies of the simulator: one of keys and one of values for each, and one of queries for each work
    item. A request without keys has none, whatever the width of the table.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    copies: list[int] = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def counted(**given: typing.Any) -> typing.Any:
        copies.append(1)
        return copy(**given)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", counted)
    lengths = [260, 0, 40]
    masks = {
        "causal": flexjax.masks.causal,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 64),
        "every other block": lambda b, h, q, kv: (q >= kv) & ((kv // 128) % 2 == 0),
    }
    cache, table = stored(GPU, lengths, 64, 16, 40)
    run(GPU, draw(100, 3, 1, N, D), cache, table, mask_mod=masks[mask])
    assert len(copies) == M * (2 * tiles + items)
