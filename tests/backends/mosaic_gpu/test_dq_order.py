"""The order of dQ additions: no CTA waits for one that has not started, and all additions are made, however many CTAs run."""

import dataclasses
import random
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import KernelOptions
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.dq_order import DqOrder
from flexjax.plan.kernel_plan import KernelPlan


def plan(tokens: int, heads: int, dim: int = 128, group: int = 1) -> KernelPlan:
    """A full matrix."""
    return KernelPlan(
        1, heads * group, heads, tokens, tokens, dim, dim, "bfloat16", "BTNH", 1.0, options=KernelOptions()
    )


@dataclasses.dataclass
class Cta:
    """Adds to its query tiles one after the other."""

    start: int
    sum_of: tuple[int, int]
    visits: list[tuple[int, int]]  # query tile, ticket
    done: int = 0


def ctas(order: DqOrder, visited: np.ndarray, key_heads: int) -> list[Cta]:
    kv_tiles, q_tiles = visited.shape
    ticket = np.asarray(dq_order.tickets(jnp.asarray(visited, jnp.int32), order))
    place = jax.jit(lambda start: dq_order.assignment_of(start, order, kv_tiles, key_heads))
    made = []
    for start in range(kv_tiles * key_heads):
        head, tile, rank = (int(x) for x in place(jnp.int32(start)))
        queries = [m for m in range(q_tiles) if visited[tile, m]]
        if order.downward:
            queries.reverse()
        made.append(Cta(start, (head, rank % order.sums), [(m, int(ticket[tile, m])) for m in queries]))
    return made


def run(waiting: list[Cta], resident: int, seed: int) -> dict[tuple[tuple[int, int], int], list[int]]:
    """Additions to each (sum, query tile) by start number, with so many CTAs at a time; fails where none can go on."""
    draw, running, log = random.Random(seed), [], {}
    waiting = list(waiting)
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(waiting.pop(0))
        draw.shuffle(running)
        moved = False
        for cta in list(running):
            if cta.done < len(cta.visits):
                query_tile, ticket = cta.visits[cta.done]
                added = log.setdefault((cta.sum_of, query_tile), [])
                if len(added) < ticket:
                    continue
                added.append(cta.start)
                cta.done += 1
            if cta.done == len(cta.visits):
                running.remove(cta)
            moved = True
        assert moved, "every resident CTA waits"
    return log


def visits(name: str, kv_tiles: int, q_tiles: int) -> np.ndarray:
    n, m = np.arange(kv_tiles)[:, None], np.arange(q_tiles)[None, :]
    if name == "full":
        return np.ones((kv_tiles, q_tiles), bool)
    if name == "causal":
        return m * kv_tiles >= n * q_tiles
    if name == "window":
        return (m >= n) & (m < n + 3)
    return np.random.default_rng(0).random((kv_tiles, q_tiles)) < 0.4


@pytest.mark.parametrize("name", ["full", "causal", "window", "random"])
@pytest.mark.parametrize("order", [DqOrder(1, 1, True, 0.0), DqOrder(2, 1, False, 0.0), DqOrder(3, 4, True, 0.0)])
def test_progress_and_bits_with_any_number_of_resident_ctas(name: str, order: DqOrder) -> None:
    visited = visits(name, 7, 9)
    logs = [run(ctas(order, visited, key_heads=4), resident, seed) for resident, seed in ((1, 0), (5, 1), (28, 2))]
    assert logs[0] == logs[1] == logs[2]  # the order of additions, hence the bits
    assert sum(map(len, logs[0].values())) == 4 * visited.sum()


def test_the_order_before_would_have_stopped_here() -> None:
    """Key tiles of a full matrix that start at rotated queries wait in a circle; fewer resident CTAs than that stand still."""
    tiles = 4
    rotated = [
        Cta(n, (0, 0), [((i + n) % tiles, (tiles - 1 - n + (i + n)) % tiles if i else 0) for i in range(tiles)])
        for n in range(tiles)
    ]
    with pytest.raises(AssertionError, match="every resident CTA waits"):
        run(rotated, 1, 0)


def test_every_key_tile_is_owned_once() -> None:
    for heads, key_heads, kv_tiles in ((1, 1, 1), (8, 13, 5), (4, 4, 3), (16, 3, 2)):
        order = DqOrder(heads, 1, True, 0.0)
        starts = jnp.arange(key_heads * kv_tiles, dtype=jnp.int32)
        head, tile, _ = jax.jit(
            jax.vmap(lambda s, o=order, k=kv_tiles, h=key_heads: dq_order.assignment_of(s, o, k, h))
        )(starts)
        assert sorted(zip(head.tolist(), tile.tolist(), strict=True)) == [
            (h, n) for h in range(key_heads) for n in range(kv_tiles)
        ]


def test_tickets_are_int32_and_count_lower_ranks() -> None:
    visited = visits("random", 6, 5)
    with jax.enable_x64(True):
        found = dq_order.tickets(jnp.asarray(visited, jnp.int32)[None, None], DqOrder(1, 2, False, 0.0))
    assert found.dtype == jnp.int32
    rank = 5 - np.arange(6)
    for n, m in np.ndindex(6, 5):
        lower = [o for o in range(6) if visited[o, m] and rank[o] < rank[n] and rank[o] % 2 == rank[n] % 2]
        assert found[0, 0, n, m] == len(lower)


@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [
        (8192, 32, (4, 1)),  # enough to do: one sum
        (8192, 2, (2, 8)),
        (4096, 4, (4, 4)),  # few CTAs, each of which would wait for up to 31 others
        (2048, 8, (8, 4)),
        (16384, 5, (3, 2)),
    ],
)
def test_heads_and_sums_follow_the_problem(tokens: int, heads: int, expected: tuple[int, int]) -> None:
    order = dq_order.order_for(plan(tokens, heads), tokens // 64, tokens // 128)
    assert (order.heads, order.sums) == expected
    assert order.downward


def test_the_modelled_delay_is_small_where_there_is_much_to_do() -> None:
    delays: dict[typing.Any, float] = {}
    for tokens in range(2048, 20481, 512):
        for heads in (4, 8, 16, 32, 64):
            if heads * tokens // 128 >= 4 * dq_order.REFERENCE_SMS:
                delays[tokens, heads] = dq_order.order_for(plan(tokens, heads), tokens // 64, -(-tokens // 128)).delay
    assert max(delays.values()) < 0.1, max(delays, key=lambda at: delays[at])
