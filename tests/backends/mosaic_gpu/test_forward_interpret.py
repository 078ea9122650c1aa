"""The forward kernel in the simulator, against dense numpy: every feature on a small problem, and data races."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import bounded_scores, forward_sm90, memory, tiles
from flexjax.plan.kernel_plan import Results
from tests.cases.on_hopper import Problem, problem

RNG = np.random.default_rng(7)
TABLE = jnp.asarray(RNG.normal(size=(4, 640)), jnp.float32)
SLOPES = jnp.asarray([0.5, 0.03], jnp.float32)
PAIR = jnp.asarray(RNG.normal(size=(2, 256, 256)), jnp.bfloat16)
ODD = jnp.asarray(RNG.normal(size=(2, 200, 240)), jnp.bfloat16)
WIDE = jnp.asarray(RNG.normal(size=(2, 2, 256, 128)), jnp.float32)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 4, (2, 256)), axis=1), jnp.int32)
FLAGS = jnp.asarray(RNG.normal(size=(256, 256)) > 0)


def causal(b: typing.Any, h: typing.Any, q: typing.Any, k: typing.Any) -> typing.Any:
    return q >= k


CASES: dict[str, dict[str, typing.Any]] = {
    "full": {},
    "causal, two batches, grouped heads": {"mask": causal, "batch": 2, "heads": 4, "kv_heads": 2},
    "mask without lists": {"mask": causal, "block": None},
    "odd lengths and dims": {"mask": causal, "q_len": 200, "kv_len": 237, "dim": 40, "value_dim": 24},
    "one query": {"q_len": 1, "kv_len": 130},
    "wide head": {"dim": 256, "value_dim": 64, "heads": 1, "kv_len": 128},
    "BNTH, float16, sinks, largest scores": {
        "mask": causal, "layout": "BNTH", "dtype": "float16", "sinks": True, "max_scores": True,
    },
    "relative table": {"score": lambda s, b, h, q, k: s + TABLE[h, q - k + 300], "mask": causal},
    "relative table, odd": {"score": lambda s, b, h, q, k: s + TABLE[h, q - k + 300], "q_len": 130, "kv_len": 70},
    "pair bias": {"score": lambda s, b, h, q, k: s + PAIR[h, q, k]},
    "pair bias, odd": {
        "score": lambda s, b, h, q, k: s * 2 + PAIR[h, q, k], "q_len": 200, "kv_len": 237, "mask": causal,
    },
    "pair bias that is no whole pieces": {
        "score": lambda s, b, h, q, k: s + ODD[h, q, k], "q_len": 200, "kv_len": 237, "mask": causal,
    },
    "pair bias of each batch, float32": {
        "score": lambda s, b, h, q, k: s + WIDE[b, h // 2, q, k], "batch": 2, "heads": 4, "kv_heads": 2, "kv_len": 128,
    },
    "two pair biases, blocks of 64": {
        "score": lambda s, b, h, q, k: s + PAIR[h, q, k].astype(jnp.float32) * PAIR[1 - h, q, k], "block": (64, 64), "mask": causal,
    },
    "soft cap": {"score": lambda s, b, h, q, k: 5.0 * jnp.tanh(s / 5.0)},
    "soft cap that needs no maximum": {
        "score": lambda s, b, h, q, k: 50.0 * jnp.tanh(s / 2.0), "mask": lambda b, h, q, k: (q >= k) & (k > 100), "sinks": True,
    },
    "bounded away from 0": {"score": lambda s, b, h, q, k: 30.0 - 5.0 * jax.nn.sigmoid(s) - h, "mask": causal},
    "far from the sinks": {
        "score": lambda s, b, h, q, k: 120.0 + 5.0 * jnp.tanh(s), "mask": lambda b, h, q, k: (q >= k) & (k > 20), "sinks": True,
    },
    "bounded, dropout, odd": {
        "score": lambda s, b, h, q, k: 5.0 * jnp.tanh(s), "q_len": 130, "kv_len": 200,
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "slope": {"score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "mask": causal, "q_len": 384, "kv_len": 384},
    "steep slope, odd": {
        "score": lambda s, b, h, q, k: s - 300.0 * SLOPES[h] * (k - q), "mask": causal, "q_len": 300, "kv_len": 333,
    },
    "slope, sinks, largest scores": {
        "score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "mask": causal, "sinks": True, "max_scores": True,
    },
    "slope of a negative scale": {"score": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "scale": -0.1},
    "slope, rows switched off": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q % 5 == 0, -jnp.inf, 1.0)), "mask": causal,
    },
    "slope, infinite rows of which nothing is on": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q < 128, jnp.where(q < 9, jnp.nan, jnp.inf), 0.0)),
        "mask": lambda b, h, q, k: (q >= k) & (q >= 128),
    },
    "slope, infinite rows that end in a tile": {
        "score": lambda s, b, h, q, k: s + (SLOPES[h] * (k - q) + jnp.where(q < 40, jnp.inf, 0.0)),
        "mask": lambda b, h, q, k: (q >= k) & (q >= 40), "q_len": 200, "kv_len": 237,
    },
    "root of a scaled distance": {
        "score": lambda s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32) * 0.1) + jnp.sqrt((q - k) * SLOPES[h]),
        "mask": causal, "q_len": 384, "kv_len": 384,
    },
    "steps of a scaled distance": {
        "score": lambda s, b, h, q, k: jnp.where((q - k) * 0.1 <= 1.0, s + 4.0, s) + 5.0 * jnp.floor((q - k) * 0.1),
        "q_len": 200, "kv_len": 237,
    },
    "slope of bounded scores": {"score": lambda s, b, h, q, k: 3.0 * jnp.tanh(s) + 0.02 * (k - q), "mask": causal},
    "slope and two factors": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * 0.5, s) + SLOPES[h] * (k - q), "mask": causal,
    },
    "soft cap, float16": {"score": lambda s, b, h, q, k: 50.0 * jnp.tanh(s / 2.0), "dtype": "float16"},
    "documents": {
        "mask": lambda b, h, q, k: (q >= k) & (SEGMENTS[b, q] == SEGMENTS[b, k]), "batch": 2, "mask_batch": 2,
    },
    "bool array": {"mask": lambda b, h, q, k: FLAGS[q, k]},
    "dead rows": {
        "mask": lambda b, h, q, k: (q >= k) & (k > 100),
        "score": lambda s, b, h, q, k: jnp.where(q % 5 == 0, -jnp.inf, s),
    },
    "nan where the mask is off": {
        "mask": causal, "score": lambda s, b, h, q, k: s + jnp.sqrt((q - k).astype(jnp.float32)),
    },
    "dropout": {
        "dropout": lambda s, b, h, q, k: jnp.where((q * 7 + k * 3) % 5 > 0, 1.25, 0.0).astype(jnp.float32),
    },
    "blocks of 64": {"mask": causal, "block": (64, 64)},
    "blocks of 256, odd": {"mask": causal, "block": (256, 256), "q_len": 300, "kv_len": 290},
    "mask of each head": {"mask": lambda b, h, q, k: (q >= k) & (k % (h + 2) != 0), "mask_heads": 2},
    "negative scale": {"scale": -0.1},
    "checkerboard": {
        "score": lambda s, b, h, q, k: 2.0 * jnp.where((k - q) % 2 == 0, s * 0.5, s), "dtype": "float16", "max_scores": True,
    },
    "checkerboard, two factors, odd, under a mask": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 1, 2.0 * jnp.where((k + q) % 4 == 0, s * 0.5, s), s),
        "mask": causal, "q_len": 200, "kv_len": 237,
    },
    "checkerboard, then more": {
        "score": lambda s, b, h, q, k: 0.5 * jnp.where((k - q) % 8 == 3, s * 3.0, s) - 0.1 * (q - k) + h, "mask": causal,
    },
    "checkerboard of a negative scale": {
        "score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * 0.5, s), "scale": -0.1,
    },
    "checkerboard of factors that vanish together": {
        "score": lambda s, b, h, q, k: s * 1e-25 * jnp.where((q + k) % 2 == 0, 1e-25, 1.0), "mask": causal,
    },
    "factors of both signs": {"score": lambda s, b, h, q, k: jnp.where((k - q) % 2 == 0, s * -0.5, s)},
    "factors that repeat after 16": {"score": lambda s, b, h, q, k: jnp.where((k - q) % 16 < 5, s * 0.5, s)},
    "capped checkerboard": {
        "score": lambda s, b, h, q, k: 3.0 * jnp.tanh(jnp.where((k - q) % 2 == 0, s * 0.5, s)) * jnp.where((k + q) % 2 == 0, 0.5, 1.0),
    },
}  # fmt: skip


REFERENCES = {
    "soft cap that needs no maximum": 0.0,
    "bounded away from 0": 27.0 * bounded_scores.LOG2E,  # 24 to 30 over both heads
    "far from the sinks": 120.0 * bounded_scores.LOG2E,
    "soft cap, float16": None,
    "soft cap": 0.0,
    "full": None,
    "relative table": None,
}


def test_no_read_lies_outside_where_blocks_hang_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile divides the lengths, the blocks of the mask do not: tiles lie wholly past the end."""
    read, places = memory.gather, []

    def watched(ref: typing.Any, index: tuple, moving: tuple[bool, ...], *rest: typing.Any) -> jax.Array:
        for at, moves, size in zip(index, moving, ref.shape, strict=True):
            if moves:
                note = lambda low, high, size=size: places.append((int(low), int(high), size))
                jax.debug.callback(note, jnp.min(at), jnp.max(at))
        return read(ref, index, moving, *rest)

    monkeypatch.setattr(memory, "gather", watched)
    mod = lambda s, b, h, q, k: s + TABLE[h, (383 - k) // 2] + TABLE[h, (383 - q) // 2]
    run(problem(score=mod, mask=causal, q_len=384, kv_len=384, block=(256, 256)))
    jax.effects_barrier()
    assert places
    assert all(low >= 0 and high < size for low, high, size in places)


@pytest.mark.parametrize("name", REFERENCES)
def test_where_the_maximum_is_left_out(name: str) -> None:
    plan = problem(**CASES[name]).plan
    assert bounded_scores.fixed_reference(plan) == pytest.approx(REFERENCES[name])
    assert bounded_scores.fixed_reference(dataclasses.replace(plan, max_scores=True)) is None


def test_wide_scores_keep_their_maximum() -> None:
    for mod in (lambda s, b, h, q, k: 56.0 * jnp.tanh(s), lambda s, b, h, q, k: jnp.tanh(s) + 1e9):
        assert bounded_scores.fixed_reference(problem(score=mod).plan) is None


def run(made: Problem, programs: int = 3, **manner: typing.Any) -> Results:
    tile = dataclasses.replace(tiles.forward_tile(made.plan), programs=programs, **manner)
    return jax.jit(lambda operands: forward_sm90.forward(made.plan, operands, tile))(made.operands)


def assert_matches(made: Problem, got: Results) -> None:
    out = np.asarray(got.out.astype(jnp.float32))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - made.out) <= 4e-3 * np.linalg.norm(made.out) + 1e-6
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(made.lse))
    np.testing.assert_allclose(got.lse, made.lse, rtol=3e-7, atol=2e-5)
    if got.max_scores is not None:
        np.testing.assert_allclose(got.max_scores, made.max_scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_matches_dense(name: str) -> None:
    made = problem(**CASES[name])
    assert_matches(made, run(made))


STAGGERED = (
    "soft cap that needs no maximum", "far from the sinks", "slope", "steep slope, odd", "slope, rows switched off",
    "slope, infinite rows of which nothing is on", "root of a scaled distance",
    "slope of bounded scores", "slope and two factors", "odd lengths and dims", "dead rows", "dropout", "documents",
    "blocks of 256, odd", "pair bias, odd",
)  # fmt: skip


@pytest.mark.parametrize("name", STAGGERED)
def test_staggered_steps(name: str) -> None:
    """As at larger head dims: softmax beside products, keys waited for early, tiles without a mask from the last keys on."""
    made = problem(**CASES[name])
    assert_matches(made, run(made, overlap=True, slack=True, early=True, reverse=True))


@pytest.mark.parametrize("name", ["slope", "documents", "blocks of 256, odd", "mask without lists"])
@pytest.mark.parametrize("manner", ["early", "reverse"])
def test_whole_steps(name: str, manner: str) -> None:
    made = problem(**CASES[name])
    assert_matches(made, run(made, overlap=False, **{manner: True}))


@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "soft cap that needs no maximum", "dead rows"])
def test_exponentials_by_polynomial(name: str) -> None:
    made = problem(**CASES[name])
    assert_matches(made, run(made, polynomials=4))


STAGED = {
    "pair bias": (2, 2),
    "pair bias, odd": (2, 2),
    "pair bias of each batch, float32": (1, 4),
    "two pair biases, blocks of 64": (2, 2),
    "pair bias that is no whole pieces": (0, 0),
    "relative table": (0, 0),
    "bool array": (0, 0),
}


@pytest.mark.parametrize("name", STAGED)
def test_what_comes_through_shared_memory(name: str) -> None:
    tile = tiles.forward_tile(problem(**CASES[name]).plan)
    assert (tile.staged_slots, tile.staged_bytes) == STAGED[name]


def test_a_pair_bias_that_does_not_fit_is_read_directly() -> None:
    made = problem(**CASES["pair bias"])
    assert_matches(made, run(made, staged_slots=0))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "mask of each head", "dead rows"])
def test_tiles_from_the_queue(name: str, slots: int) -> None:
    made = problem(**CASES[name])
    assert_matches(made, run(made, persistent=False, queue=True, query_slots=slots, stages=2))


MANNERS = {
    "persistent": {"persistent": True},
    "one tile each": {"persistent": False},
    "queue": {"persistent": False, "queue": True},
}


@pytest.mark.parametrize("overlap", [True, False], ids=["staggered", "whole"])
@pytest.mark.parametrize("manner", MANNERS)
def test_manners(races: list, overlap: bool, manner: str) -> None:
    """With one program that takes every tile, so that each slot of a ring comes round; conftest.py looks for races."""
    made = problem(mask=causal, heads=1, q_len=256, kv_len=384)
    assert_matches(made, run(made, programs=1, overlap=overlap, **MANNERS[manner]))
    assert len(races) == 1


def test_a_race_would_be_seen(races: list) -> None:
    """Two warpgroups write the same shared memory."""

    def body(out: typing.Any, shared: typing.Any) -> None:
        shared[...] = jnp.full((128,), lax.axis_index("wg"), jnp.float32)
        out[...] = shared[...]

    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    interpret = plgpu.InterpretGPUParams()
    run = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="wg",
        interpret=interpret,
    )
    jax.block_until_ready(run())
    assert races.pop().races_found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["staggered", "whole"])
@pytest.mark.parametrize("name", ["causal, two batches, grouped heads", "mask of each head", "blocks of 256, odd"])
def test_every_manner(name: str, overlap: bool) -> None:
    made = problem(**CASES[name])
    assert_matches(made, run(made, overlap=overlap, slack=overlap))
    assert_matches(made, run(made, overlap=overlap, persistent=False, query_slots=1, stages=3))
