"""A prefix that requests share is attended once for all of them, and nobody can tell from the results."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, KernelOptions, SharedPrefix, paged
from flexjax.paged.call import PagedArguments, prepare_paged
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

Array = jax.Array
N, M, D, PAGE = 4, 2, 8, 8
ALL = AuxRequest(lse=True, max_scores=True)


def draw(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def forked(own: list[tuple[int, int]], shared: dict[int, int], *, n: int = 8, pool: int = 40):
    """Requests (group, tokens of its own), of which those of a group begin with shared[group] tokens and lie in forked pages, as far
    as these are whole.  The keys of a request depend on its group and its own tokens alone.  Free pages and slots past the ends are NaN.
    """
    key, value = (np.full((pool, PAGE, M, D), np.nan, np.float32) for _ in range(2))
    free = np.random.default_rng(pool).permutation(pool).tolist()
    whole = {g: [free.pop() for _ in range(length // PAGE)] for g, length in shared.items()}
    pages = np.full((len(own), n), -7, np.int32)
    lengths = []
    for r, (group, count) in enumerate(own):
        before = shared.get(group, 0)
        lengths.append(before + count)
        mine = whole.get(group, [])
        mine = mine + [free.pop() for _ in range(-(-lengths[-1] // PAGE) - len(mine))]
        pages[r, : len(mine)] = mine
        for seed, x in enumerate((key, value)):
            normal = lambda size, *seeds: np.random.default_rng(seeds).standard_normal((size, M, D))
            tokens = np.concatenate([normal(before, seed, group + 1), normal(count, seed, group + 1, count)])
            for at, token in enumerate(tokens):
                x[mine[at // PAGE], at % PAGE] = token
    table = paged.PageTable(array(pages), array(lengths, np.int32), array(np.zeros(pool, np.int32)), PAGE)
    leaders = [next((r for r, (g, _) in enumerate(own) if g == group), 0) for group in shared]
    given = SharedPrefix(
        array([group for group, _ in own], np.int32),
        array(pages[leaders, : n // 2]),
        array(list(shared.values()), np.int32),
    )
    return paged.PagedCache(array(key), array(value)), table, given


OWN = [(0, 5), (1, 4), (-1, 13), (0, 9), (0, 2), (7, 3), (1, 20)]
COUNTS = [3, 0, 2, 1, 2, 3, 3]


def bias(score: Array, b: Array, h: Array, q: Array, kv: Array) -> Array:
    return score * (1 + 0.1 * b) + 0.1 * h - 0.02 * (q - kv) + 0.05 * (kv % 3)


def window(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return (q >= kv) & ((q - kv < 11 + b) | (kv < 2))


ASKED = {"distance": lambda s, b, h, q, kv: q - kv, "score": lambda s, b, h, q, kv: s}
"""Of positions in the request, over the parts of a prefix that is read once."""

# fmt: off
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # ragged, arguments
    "causal": (False, {}),
    "mods_and_sinks": (False, dict(score_mod=bias, mask_mod=window, sinks=draw(7, N))),
    "ragged_no_mask": (True, dict(score_mod=bias, mask_mod=None, kernel_options=KernelOptions(block_q=2))),
    "expectations": (True, dict(score_mod=bias, return_aux=AuxRequest(lse=True, expectations=ASKED))),
}
# fmt: on


@pytest.mark.parametrize("name", some_slow(CASES, ["mods_and_sinks", "expectations"]))
def test_it_is_the_call_without_sharing(name: str) -> None:
    """With NaN in free pages, past the ends and in queries that do not exist. A prefix ends inside a page; request 3 has fewer
    tokens than its group shares.
    """
    ragged, call = CASES[name]
    cache, table, shared = forked(OWN, {0: 16, 1: 27})
    table = dataclasses.replace(table, lengths=table.lengths.at[3].set(12))
    q = draw(1, len(OWN), 3, N, D)
    counts = jnp.asarray(COUNTS)
    q = jnp.where(jnp.arange(3)[:, None, None] < counts[:, None, None, None], q, jnp.nan)
    rows: dict[str, Any] = dict(query_seq_lengths=counts)
    if ragged:
        q = jnp.concatenate([q[r, :c] for r, c in enumerate(COUNTS)] + [jnp.full((2, N, D), jnp.nan)])
        rows = dict(cu_q_lens=jnp.asarray(np.cumsum([0, *COUNTS]), jnp.int32))
    rows = {"return_aux": ALL} | rows | call
    attend = lambda shared: flexjax.paged_attention(q, cache, table, shared=shared, **rows)
    got, want = quick_jit(attend)(shared), quick_jit(attend)(None)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-6), got, want)


@pytest.mark.slow
def test_bits_do_not_depend_on_who_else_shares() -> None:
    """Alone in its group; among others, in another tile and in other pages."""

    def request(own: list[tuple[int, int]], shared: dict[int, int], me: int, **where: int) -> np.ndarray:
        cache, table, given = forked(own, shared, **where)
        q = np.stack([draw(100 + group + 50 * count, 2, N, D) for group, count in own])
        mask = lambda b, h, q, kv: q >= kv
        return np.asarray(
            quick_jit(lambda *x: flexjax.paged_attention(*x[:3], mask_mod=mask, shared=x[3]))(q, cache, table, given)[
                me
            ]
        )

    alone = request([(0, 5)], {0: 150}, 0, n=40)
    others = [(0, count) for count in range(10, 19)]
    np.testing.assert_array_equal(
        alone, request([*others, (1, 3), (0, 5), (-1, 9)], {0: 150, 1: 8}, 10, n=64, pool=100)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_without_sharing(dtype: str) -> None:
    """In the dtype of the query, though parts are in float32."""
    cache, table, shared = forked(OWN[:4], {0: 16, 1: 27})
    cache = jax.tree.map(lambda x: x.astype(dtype), cache)
    x = dict(q=draw(3, 4, 2, N, D).astype(dtype), slopes=draw(4, N), sinks=draw(7, N))

    def loss(x: dict[str, Array], shared: SharedPrefix | None) -> Array:
        alibi = lambda s, b, h, q, kv: s - x["slopes"][h] * 0.01 * (q - kv)
        out = flexjax.paged_attention(x["q"], cache, table, score_mod=alibi, sinks=x["sinks"], shared=shared)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    got, want = (quick_jit(jax.grad(loss))(x, given) for given in (shared, None))
    for name, y in want.items():
        assert got[name].dtype == y.dtype
        within = 0.03 if dtype == "bfloat16" else 3e-5
        np.testing.assert_allclose(*(a.astype(jnp.float32) for a in (got[name], y)), rtol=within, atol=within)


def test_a_prefix_is_read_once_for_sixteen_queries() -> None:
    """One tile of 20 requests' queries is full, the other has four; their own pass begins after the prefix."""
    cache, table, shared = forked([(0, 1)] * 20, {0: 512}, n=128, pool=128)

    @quick_jit
    def planned(shared: SharedPrefix) -> tuple[Any, ...]:
        """Queries and keys of each tile of the prefix, and how many blocks of their own all requests visit."""
        prefix, own = prepare_paged(PagedArguments(draw(1, 20, 1, N, D), cache, table, shared=shared))
        lists = own.call.operands.lists
        assert lists is not None
        visited = sum(jnp.sum(x) for x in (lists.partial_num, lists.full_num) if x is not None)
        return prefix.rows.query_lengths, prefix.rows.key_lengths, visited

    queries, keys, visited = planned(shared)
    assert queries.tolist() == [4, 16]
    assert keys.tolist() == [512, 512]
    assert visited == 20  # one of the five blocks of 128 keys


CACHE, TABLE, SHARED = forked([(0, 5), (1, 4)], {0: 16, 1: 8})
PAGES = SHARED.prefix_pages
# fmt: off
ERRORS = [
    (np.zeros(2, np.int32), "`shared` is int32[2]; expected a flexjax.SharedPrefix or None. None shares nothing."),
    (SharedPrefix(jnp.zeros(3, jnp.int32), PAGES, SHARED.prefix_lengths),
     "`shared.group` is int32[3]; expected int32[2]. Cast or reshape it."),
    (SharedPrefix(SHARED.group, PAGES[0], SHARED.prefix_lengths),
     "`shared.prefix_pages` is int32[4]; expected int32 [groups, n], neither of them 0. Cast or reshape it."),
    (SharedPrefix(SHARED.group, PAGES, jnp.zeros(3, jnp.int32)),
     "`shared.prefix_lengths` is int32[3]; expected int32[2]. Cast or reshape it."),
]
# fmt: on


@pytest.mark.parametrize(("shared", "message"), ERRORS, ids=range(len(ERRORS)))
def test_messages(shared: Any, message: str) -> None:
    call: Callable = lambda: flexjax.paged_attention(draw(1, 2, 1, N, D), CACHE, TABLE, shared=shared)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert str(caught.value) == message
