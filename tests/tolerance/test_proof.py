"""No program, mask or arrays make a row lose more than `tolerance`, and no row more than the bound that it gets."""

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.analysis.interval_values import Truth
from flexjax.tolerance import keep
from flexjax.tolerance.static import sums_of
from flexjax.trace.trace_mod import trace_score_mod
from tests.marks import some_slow
from tests.tolerance.proof import (
    BLOCK,
    KINDS,
    MASKS,
    SCORES,
    Case,
    Choice,
    D,
    H,
    M,
    arrays_of,
    params_of,
    score_of,
    tight,
)

PROGRAMS: list[tuple[tuple[str, ...], str, int, int, float, bool]] = [
    (("alibi",), "causal", 192, 192, 2.0**-24, False),
    (("gates",), "documents", 200, 256, 1e-6, True),
    (("alibi", "cap"), "before", 200, 200, 1e-3, False),
]
"""Steps of the score_mod, mask, queries, keys, tolerance, whether there are sinks."""
ROOMS = np.random.default_rng(40)
for _ in range(60):
    steps = tuple(str(x) for x in ROOMS.choice(list(SCORES), int(ROOMS.integers(1, 5)), replace=False))
    mask = str(ROOMS.choice(list(MASKS)))
    length = int(ROOMS.choice([192, 200]))
    PROGRAMS.append(
        (
            steps,
            mask,
            length,
            length + 56 * int(ROOMS.random() < 0.3),
            10 ** ROOMS.uniform(-12, -2),
            ROOMS.random() < 0.3,
        )
    )


@pytest.mark.parametrize("program", some_slow([(p,) for p in PROGRAMS], [(p,) for p in PROGRAMS[:3]]), ids=str)
def test_no_row_loses_more_than_the_tolerance(program: Any) -> None:
    steps, mask, q_len, kv_len, tolerance, has_sinks = program
    r = np.random.default_rng(zlib.crc32(repr(program).encode()))
    made, choice, worst, dropped = None, None, 0.0, 0
    for n in range(44):
        q, k = arrays_of(r, q_len, kv_len, KINDS[n % len(KINDS)])
        sinks = np.float32(r.standard_normal(H) * 5) if has_sinks else None
        made = Case(score_of(steps), MASKS[mask], q, k, params_of(r, q_len, kv_len), sinks)
        choice = choice or Choice(made, tolerance)
        found = choice(made)
        assert not found.breaks(tolerance), (n, KINDS[n % len(KINDS)], found.lost.max() / tolerance)
        worst, dropped = max(worst, found.lost.max() / tolerance), dropped + found.dropped
    if steps == ("alibi",):
        assert dropped > 10


# ------------------------------------------------------------------- the bound is nearly attained, and no less is one

LONG, SLOPE, TOLERANCE = 512, 0.08, 1e-6


def alibi(q: np.ndarray, k: np.ndarray, slope: float = SLOPE, mask: str = "causal") -> Case:
    length = q.shape[2]
    params = params_of(np.random.default_rng(0), length, length) | {"slope": np.full(H, slope, np.float32)}
    return Case(score_of(("alibi",)), MASKS[mask], q, k, params)


def most_lost(
    factors: Any, far: int = 1, length: int = LONG, block: int = 8, slope: float = SLOPE, tolerance: float = TOLERANCE
) -> float:
    """The largest loss over the tolerance of tight pairs, each of whose far blocks holds a factor of it."""
    choice, worst = None, 0.0
    for factor in factors:
        case = alibi(*tight(length, block, far, slope, tolerance, factor), slope)
        choice = choice or Choice(case, tolerance, block)
        worst = max(worst, float(choice(case).lost.max() / tolerance))
    return worst


EDGE = np.linspace(0.8, 1.1, 7)


def test_tight_pairs_reach_a_third_of_the_tolerance() -> None:
    assert 0.3 < most_lost(EDGE) <= 1


def test_a_limit_of_half_the_product_of_norms_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keep._limit
    monkeypatch.setattr(keep, "_limit", lambda *given: whole(*given) / 2)
    assert most_lost([10, 1e3, 1e5]) > 1


def test_the_keys_of_a_block_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "_log_keys", lambda spec, kv_blocks: jnp.zeros(kv_blocks.shape))
    assert most_lost([4, 7]) > 2


def test_a_witness_is_a_key_that_the_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask hides the row's own key, the one before and key 0, which have the largest scores."""
    u = np.ones(D) / 4.0
    q, k = np.zeros((1, H, 192, D)), np.zeros((1, M, 192, D))
    q[:], k[:, :, -40:] = 3 * u, 48 * u
    case = alibi(np.float32(q), np.float32(k), 0.01)
    case.mask = lambda p: lambda b, h, i, j: (i > j + 40) & (j > 0)
    assert not Choice(case, 1e-3)(case).breaks(1e-3)

    def shown(*given: Any, **more: Any) -> Truth:
        yes, no = jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)
        return Truth(yes, no, yes, no)

    monkeypatch.setattr(keep, "decide", shown)
    assert Choice(case, 1e-3)(case).lost.max() > 0.9


def test_a_tile_has_the_bound_of_its_worst_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of the last tile has a large score at its own key, which the other rows of the tile do not see."""
    u = np.ones(D) / 4.0
    q, k = np.zeros((1, H, 192, D)), np.zeros((1, M, 192, D))
    q[:], k[:, :, -BLOCK:], k[:, :, -1] = 3 * u, -48 * u, 48 * u
    case = alibi(np.float32(q), np.float32(k), 0.01)
    assert not Choice(case, 1e-3)(case).breaks(1e-3)
    monkeypatch.setattr(keep, "_of_tiles", lambda lower, block: lower.reshape(*lower.shape[:2], -1, block).max(-1))
    assert Choice(case, 1e-3)(case).lost.max() > 0.9


MANY = dict(far=64, length=1024, slope=0.05)
"""A row of 128 blocks, of which 64 are as large as they may be."""


def test_many_blocks_keep_within_the_tolerance_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.3 < most_lost([1, 1 / 64, 1 / 80], **MANY) <= 1
    one_by_one = lambda share, most: (share <= np.log(most), jnp.zeros((*share.shape[:-1], 1)))
    monkeypatch.setattr(keep, "_smallest", one_by_one)
    assert most_lost([0.9], **MANY) > 20


def lost_at_the_edge(common: float = 0.0) -> float:
    """The largest loss over the tolerance of pairs at its edge, where scores are thousands and a float32 steps by 2^-10.

    The fall is read from a table, because that of a product has an interval of its own for its rounding. All keys have
    `common` in the direction of the query.
    """
    r, length, choice, worst = np.random.default_rng(8), 160, None, 0.0
    table = np.float32(-60.0 * np.abs(np.arange(2 * length) - (length - 1)))
    for _ in range(24):
        u = r.standard_normal(D)
        u /= np.linalg.norm(u)
        q, k = tight(length, 1, 1, 60.0, TOLERANCE, 1 + r.uniform(-2e-3, 2e-3), u)
        pair = q, k + np.float32(common * u)
        params = params_of(r, length, length) | {"table": np.tile(table, (H, 1))}
        case = Case(score_of(("table",)), MASKS["causal"], *pair, params)
        choice = choice or Choice(case, TOLERANCE, 1)
        worst = max(worst, float(choice(case).lost.max() / TOLERANCE))
    return worst


@pytest.mark.parametrize("common", [0.0, 4e4])
def test_rounding_of_large_scores_has_its_slack(monkeypatch: pytest.MonkeyPatch, common: float) -> None:
    assert lost_at_the_edge(common) <= 1
    for name in ("SLACK", "SLACK_OF_SCORES", "SLACK_OF_SUM"):
        monkeypatch.setattr(keep, name, 0.0)
    whole = keep._limit
    exact = lambda spec, *given: whole(dataclasses.replace(spec, rounding=0.0), *given)
    monkeypatch.setattr(keep, "_limit", exact)
    assert lost_at_the_edge(common) > 1


# ------------------------------------------------------------------- keys less their mean


@pytest.mark.parametrize("kind", ["normal", "mean", "huge", "growing", "nan"])
def test_keys_less_their_mean_never_keep_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = np.random.default_rng(5)
    case = alibi(*arrays_of(r, LONG, LONG, kind), slope=0.5)
    case.sinks = np.array([-4.0, 4.0], np.float32)
    found = Choice(case, TOLERANCE)(case)
    assert not found.breaks(TOLERANCE)
    monkeypatch.setattr(keep, "sums_of", lambda program: ())
    alone = Choice(case, TOLERANCE)(case)
    assert found.kept.sum() <= alone.kept.sum()
    if kind == "mean":
        assert found.kept.sum() < 0.9 * alone.kept.sum()


def test_both_bounds_are_less_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are one, which alone would let the lower bound of scores as they are, 75, leave everything out."""
    u = np.ones(D) / 4.0
    q, k = (np.tile(n * u, (1, heads, LONG, 1)).astype(np.float32) for n, heads in ((3, H), (100, M)))
    case = alibi(q, k, 0.01)
    assert not Choice(case, TOLERANCE)(case).breaks(TOLERANCE)
    right = keep._views

    def wrong(*given: Any) -> list[keep.View]:
        first, second = right(*given)
        return [first, second._replace(lower=first.lower, least=first.least)]

    monkeypatch.setattr(keep, "_views", wrong)
    assert Choice(case, TOLERANCE)(case).lost.max() > 0.9


ONLY_ADDS: dict[str, tuple[Any, int]] = {
    "a fall": (lambda s, b, h, i, j: s - 0.5 * (i - j), 1),
    "from the left": (lambda s, b, h, i, j: 0.5 * j + s + 1.0, 2),
    "a choice": (lambda s, b, h, i, j: jnp.where(i > j + 9, -jnp.inf, jnp.where(i > j, s + j, s)), 3),
    "a number in its place": (lambda s, b, h, i, j: jnp.where(i > j, -1e9, s), 0),
    "negative": (lambda s, b, h, i, j: j - s, 0),
    "a product": (lambda s, b, h, i, j: 0.5 * s - j, 0),
    "twice": (lambda s, b, h, i, j: s + s - j, 0),
    "a choice by the score": (lambda s, b, h, i, j: jnp.where(s > 0, s - j, s), 0),
    "an index of the score": (lambda s, b, h, i, j: s - jnp.arange(9.0)[jnp.clip(s, 0, 8).astype(jnp.int32)] * j, 0),
    "fewer digits": (lambda s, b, h, i, j: (s.astype(jnp.bfloat16) - j).astype(jnp.float32), 0),
}  # fmt: skip
"""score_mods, and how many numbers lie on the way from the score."""


@pytest.mark.parametrize("name", ONLY_ADDS)
def test_which_programs_only_add_to_the_score(name: str) -> None:
    mod, count = ONLY_ADDS[name]
    assert len(sums_of(trace_score_mod(mod, (1, H, LONG, LONG)).program)) == count


@pytest.mark.parametrize("steps", [("alibi",), ("key bias", "-inf")])
def test_sums_of_large_numbers_round_as_the_bound_allows(steps: tuple[str, ...]) -> None:
    """The common part of the keys makes scores of 1e6, whose float32 steps by 1/16."""
    r = np.random.default_rng(6)
    for _ in range(4):
        q, k = arrays_of(r, 192, 192, "normal")
        case = Case(score_of(steps), MASKS["causal"], q, k * 10 + np.float32(1e6), params_of(r, 192, 192))
        assert not Choice(case, 1e-3)(case).breaks(1e-3)


def test_not_a_number_stays_in_arrays_of_every_size() -> None:
    """XLA's max on a CPU loses NaN in arrays of some sizes."""
    from flexjax.tolerance.norms import largest

    for shape in ((1, 2, 6 * 32), (1, 8, 32 * 32), (2, 16, 64 * 32)):
        x = np.ones(shape, np.float32)
        x[0, 1, 37] = np.nan
        found = np.asarray(largest(jnp.asarray(x), 32))
        assert np.isnan(found[0, 1, 1])
        assert np.isnan(found).sum() == 1


def test_a_bound_of_the_score_alone_is_one_too() -> None:
    r = np.random.default_rng(9)
    q, k = arrays_of(r, 192, 192, "normal")
    case = alibi(q, k, 1.0)
    bound = float(np.abs(np.einsum("hqd,kd->hqk", q[0], k[0, 0])).max() * D**-0.5)
    found = Choice(case, 2.0**-24, bound=bound)(case)
    assert not found.breaks(2.0**-24)
    assert found.dropped
