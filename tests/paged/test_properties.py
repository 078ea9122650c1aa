"""What holds for any step of serving: prompts in any cut, anything in hidden places, any number of other requests, one program."""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, SharedPrefix, masks, paged
from tests.cases.small import quick_jit
from tests.paged.test_paged_attention import D, E, M, N, assert_same, definition, draw, served

Array = jax.Array


def alibi(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
    return score - 0.01 * (h + 1) * (q - kv)


CUTS = ([1, 7, 15, 16, 17], [17, 17, 16, 6, 0], [16, 1, 1, 17, 17])


@pytest.mark.parametrize("ragged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prompt_in_any_cut(ragged: bool) -> None:
    """A chunk ends before, at and after the end of a page; requests read chunks of other sizes in one call."""
    page, most, rows = 16, 17, len(CUTS)
    q, k, v = (draw(n, rows, 64, heads, dim) for n, (heads, dim) in enumerate(((N, D), (M, D), (M, E))))

    @quick_jit
    def step(cache: paged.PagedCache, table: paged.PageTable, counts: Array) -> tuple[Any, ...]:
        """Appends and attends the next counts[r] tokens of each request."""
        at = table.lengths[:, None] + jnp.arange(most)
        new = [jnp.take_along_axis(x, jnp.minimum(at, 63)[:, :, None, None], 1) for x in (q, k, v)]
        given: dict[str, Any] = dict(query_seq_lengths=counts)
        if ragged:
            ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
            number = jnp.arange(rows * most)
            row = jnp.minimum(jnp.searchsorted(ends[1:], number, side="right"), rows - 1)
            new = [x[row, jnp.minimum(number - ends[row], most - 1)] for x in new]
            given = dict(cu_q_lens=ends)
        table, granted = paged.allocate(table, table.lengths + counts)
        cache, table = paged.append(cache, table, new[1], new[2], **given)
        out = flexjax.paged_attention(new[0], cache, table, score_mod=alibi, **given)
        return cache, table, out, granted

    cache, table = paged.empty(13, page, M, D, E=E, dtype="float32"), paged.table(rows, 4, 13, page)
    found: list[list[np.ndarray]] = [[] for _ in CUTS]
    for counts in zip(*CUTS, strict=True):
        cache, table, out, granted = step(cache, table, jnp.asarray(counts))
        assert granted.all()
        for r, count in enumerate(counts):
            first = sum(counts[:r]) if ragged else 0
            found[r].append(np.asarray((out if ragged else out[r])[first : first + count]))
    want = quick_jit(functools.partial(flexjax.flex_attention, score_mod=alibi, mask_mod=masks.causal))(q, k, v)
    for r, parts in enumerate(found):
        assert_same(np.concatenate(parts), want[r, : sum(CUTS[r])])


def test_what_lies_in_hidden_places_does_not_matter() -> None:
    """In free pages, past lengths, in pages that are no page's and in rows past query_seq_lengths: not a bit."""
    lengths, counts = [21, 0, 9, 40], jnp.asarray([3, 1, 0, 2])
    recent = lambda b, h, q, kv: (q >= kv) & (kv >= 8)  # hides the first page
    attend = quick_jit(
        lambda *x: flexjax.paged_attention(*x, score_mod=alibi, mask_mod=recent, query_seq_lengths=counts)
    )
    found = []
    for hole in (0.0, np.nan, np.inf, -np.inf, 1e30):
        cache, table = served(lengths, 8, hole=hole)
        table = dataclasses.replace(table, pages=table.pages.at[:, 0].set(-1 if hole == 0 else 2**31 - 1))
        q = jnp.where(jnp.arange(3)[:, None, None] < counts[:, None, None, None], draw(100, 4, 3, N, D), hole)
        found.append(attend(q, cache, table))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_among_256_others(dtype: str) -> None:
    """A long prompt in several visits; as one query, as a chunk, and ragged."""
    attend = jax.jit(functools.partial(flexjax.paged_attention, score_mod=alibi))
    rng = random.Random(0)

    def request(lengths: list[int], rows: list[int], me: int, pool: int) -> list[np.ndarray]:
        cache, table = served(lengths, 16, seeds=[length for length in lengths], hole=0.0, n=80, pool=pool)
        cache = jax.tree.map(lambda x: x.astype(dtype), cache)
        q = jnp.stack([draw(length, 5, N, D) for length in lengths]).astype(dtype)
        flat = jnp.concatenate([q[r, :count] for r, count in enumerate(rows)])
        ends = np.cumsum([0, *rows]).astype(np.int32)
        padded = attend(q, cache, table, query_seq_lengths=np.asarray(rows, np.int32))[me, : rows[me]]
        one = attend(q[:, :1], cache, table)[me]
        ragged = attend(flat, cache, table, cu_q_lens=ends)[ends[me] : ends[me + 1]]
        return [np.asarray(x.astype(jnp.float32)) for x in (padded, one, ragged)]

    alone = request([1100], [4], 0, 80)
    others = [rng.randrange(90) for _ in range(256)]
    rows = [rng.randrange(6) for _ in others]
    among = request([*others[:100], 1100, *others[100:]], [*rows[:100], 4, *rows[100:]], 100, 2000)
    for x, y in zip(alone, among, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(3, 1, 40, 40), (4, 4, 80, 24), (7, 1, 8, 8), (12, 2, 8, 192), (71, 1, 8, 8), (64, 1, 8, 8), (65, 1, 8, 8)],
)
def test_lengths_at_the_ends_of_pages(heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
    """With groups of any size, a request without queries in the middle, and blocks of 16 queries that end at counts."""
    page, lengths, counts = 16, [0, 1, 15, 16, 17, 128, 129], [1, 1, 0, 16, 17, 2, 3]
    rows, n, most = len(lengths), 9, 17
    cache = paged.empty(40, page, kv_heads, dim, E=value_dim, dtype="float32")
    table, granted = paged.allocate(paged.table(rows, n, 40, page), np.asarray(lengths, np.int32))
    assert granted.all()
    k, v = (draw(s, rows, 129, kv_heads, d) for s, d in ((1, dim), (2, value_dim)))
    cache, table = paged.append(cache, table, k, v, query_seq_lengths=np.asarray(lengths))
    q = draw(3, rows, most, heads, dim)
    rows_of = dict(query_seq_lengths=jnp.asarray(counts))
    got = jax.jit(functools.partial(flexjax.paged_attention, score_mod=alibi, **rows_of))(q, cache, table)
    want = definition(q, cache, table, score_mod=alibi, **rows_of)
    assert_same(got, want, 5e-6)
    flat = jnp.concatenate([q[r, :c] for r, c in enumerate(counts)])
    ends = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    got = jax.jit(functools.partial(flexjax.paged_attention, score_mod=alibi))(flat, cache, table, cu_q_lens=ends)
    assert_same(got, jnp.concatenate([want[r, :c] for r, c in enumerate(counts)]), 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 1000])
def test_any_steps_compile_once(steps: int) -> None:
    """Requests come, continue others, grow, check trees of candidates, take tokens back and end; prefixes are shared or not."""
    R, n, P, page, T, rng = 4, 6, 14, 8, 3, random.Random(steps)
    traces: list[int] = []

    @functools.partial(quick_jit, donate_argnums=0)
    def step(
        cache: paged.PagedCache,
        table: paged.PageTable,
        ends: Array,
        source: Array,
        counts: Array,
        parents: Array,
        group: Array,
    ) -> tuple[Any, ...]:
        traces.append(0)
        table = paged.fork(paged.release(table, ends), source)
        context = table.lengths
        table, granted = paged.allocate(table, context + counts)
        counts = jnp.where(granted, counts, 0)
        cache, table = paged.append(cache, table, draw(1, R, T, M, D), draw(2, R, T, M, E), query_seq_lengths=counts)
        tree = masks.tree(parents, context, queries_follow_context=True)
        shared = SharedPrefix(group, table.pages[:1, :2], jnp.minimum(table.lengths[:1], 2 * page))
        attend = functools.partial(flexjax.paged_attention, query_seq_lengths=counts, mask_mod=tree)
        q = draw(3, R, T, N, D)
        small = KernelOptions(block_q=4)
        return (
            cache,
            table,
            counts,
            attend(q, cache, table, shared=shared, kernel_options=small),
            attend(q, cache, table),
        )

    cache, table = paged.empty(P, page, M, D, E=E, dtype="float32"), paged.table(R, n, P, page)
    shares = False
    for _ in range(steps):
        ends = np.asarray([rng.random() < 0.1 for _ in range(R)])
        source = np.asarray([rng.choice([-1] * 8 + [0]) for _ in range(R)], np.int32)
        lead = np.asarray(table.pages[0, :2])
        counts = np.asarray([rng.randrange(T + 1) for _ in range(R)], np.int32)
        parents = np.asarray(
            [[rng.randrange(-1, node) if node else -1 for node in range(T)] for _ in range(R)], np.int32
        )
        moved = np.where((source == 0) & ~ends[0], np.asarray(table.pages)[0, :1], np.asarray(table.pages)[:, 0])
        alike = (moved == lead[0]) & (np.asarray(table.lengths) > 2 * page + T) & ~ends & (source < 0)
        alike &= (np.asarray(table.pages)[:, :2] == lead).all(1)
        group = np.where(alike & (not ends[0]), 0, -1).astype(np.int32)
        shares |= int(alike.sum()) > 1
        cache, table, counts, together, apart = step(cache, table, ends, source, counts, parents, group)
        np.testing.assert_allclose(together, apart, rtol=3e-6, atol=3e-6)
        back = np.asarray(counts) * np.asarray([rng.random() < 0.3 for _ in range(R)])
        table = dataclasses.replace(table, lengths=table.lengths - back.astype(np.int32))
    assert len(traces) == 1
    assert shares or steps < 100
