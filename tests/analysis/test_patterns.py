"""Programs of a simple form: what is recognised, and what only looks like it."""

import typing

import jax
import jax.numpy as jnp
import pytest

from flexjax import masks
from flexjax.analysis import patterns
from flexjax.call.arguments import Arguments
from flexjax.call.prepare import prepare
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.trace.trace_mod import trace_mask_mod

SLOPES = jnp.ones(2)


def plan(**arguments: typing.Any) -> KernelPlan:
    """The plan of a call of flex_attention with these arguments, batch 1, 256 queries and keys, 2 heads."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.float32)
    found: list[KernelPlan] = []
    jax.eval_shape(lambda q: found.append(prepare(Arguments(q, q, q, **arguments)).plan), x)
    return found[0]


ADDING: dict[str, tuple[typing.Callable, bool]] = {
    "slope": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), True),
    "two terms": (lambda s, b, h, q, k: (2.0 + s) - SLOPES[h] + q, True),
    "where added": (lambda s, b, h, q, k: s + jnp.where(q > k, 0.0, -5.0), True),
    "taken from": (lambda s, b, h, q, k: SLOPES[h] - s, False),
    "twice": (lambda s, b, h, q, k: s + (s + 1.0), False),
    "scaled": (lambda s, b, h, q, k: s * 2.0 + 1.0, False),
    "soft cap": (lambda s, b, h, q, k: 30.0 * jnp.tanh(s / 30.0), False),
    "chosen": (lambda s, b, h, q, k: jnp.where(q > k, s, -5.0), False),
    "without the score": (lambda s, b, h, q, k: SLOPES[h] * 1.0, False),
}


@pytest.mark.parametrize("name", ADDING)
def test_adds_to_score(name: str) -> None:
    score_mod, adds = ADDING[name]
    score = plan(score_mod=score_mod).score
    assert score is not None
    assert patterns.adds_to_score(score) is adds


TRIANGLES: dict[str, tuple[typing.Any, bool]] = {
    "causal": (masks.causal, True),
    "causal, turned round": (lambda b, h, q, k: k <= q, True),
    "strict": (lambda b, h, q, k: q > k, True),
    "shifted": (masks.causal_offset(7), True),
    "by the difference": (lambda b, h, q, k: q - k >= 0, True),
    "by the difference, turned round": (lambda b, h, q, k: k - q < 3, True),
    "upper": (lambda b, h, q, k: q <= k, False),
    "upper, by the difference": (lambda b, h, q, k: k - q > 0, False),
    "diagonal": (lambda b, h, q, k: q == k, False),
    "window": (masks.sliding_window(16), False),
    "queries alone": (lambda b, h, q, k: q >= 7, False),
    "antidiagonal": (lambda b, h, q, k: q + k >= 7, False),
    "blocks": (lambda b, h, q, k: q // 2 >= k, False),
    "read": (lambda b, h, q, k: jnp.ones(256, bool)[q], False),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_is_causal_like(name: str) -> None:
    mask_mod, triangle = TRIANGLES[name]
    mask = plan(mask_mod=mask_mod).mask
    assert mask is not None
    assert patterns.is_causal_like(mask) is triangle


STEPS = jnp.arange(2)
ROWS = jnp.arange(256)
DIVISIONS: dict[str, tuple[typing.Any, bool]] = {
    "a distance by a number of the head": (lambda b, h, q, k: (q - k) % STEPS[h] == 0, True),
    "a sum by a number of the query": (lambda b, h, q, k: (q + k) // ROWS[q] < 3, True),
    "a number of the head by a distance": (lambda b, h, q, k: jax.lax.rem(STEPS[h], q - k) == 0, True),
    "a distance by a literal": (lambda b, h, q, k: (q - k) % 3 == 0, False),
    "positions by a number of the head": (lambda b, h, q, k: q // STEPS[h] == k // STEPS[h], False),
    "floats": (lambda b, h, q, k: (q - k) / STEPS[h] < 2.0, False),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_fill_registers(name: str) -> None:
    mask_mod, divides = DIVISIONS[name]
    made = plan(mask_mod=mask_mod)
    assert made.mask is not None
    assert patterns.fills_registers(made.mask) is divides
    assert not patterns.fills_registers(made.score)


LIST = jnp.arange(256 * 64).reshape(256, 64)
KEYS = jax.random.split(jax.random.key(0), 256)
LONG: dict[str, tuple[typing.Any, bool]] = {
    "a hash of both": (
        lambda b, h, q, k: jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(KEYS[0], q), k)),
        True,
    ),
    "a hash of the query": (lambda b, h, q, k: jax.random.bernoulli(jax.random.fold_in(KEYS[0], q)) | (k < q), False),
    "a loop": (lambda b, h, q, k: jnp.any(LIST[q] == k), True),
    "a loop for the query": (lambda b, h, q, k: jnp.any(LIST[q] == 3) | (k < q), False),
}


@pytest.mark.parametrize("name", LONG)
def test_hashes_and_loops_fill_registers(name: str) -> None:
    mask_mod, fills = LONG[name]
    mask = plan(mask_mod=mask_mod).mask
    assert mask is not None
    assert patterns.fills_registers(mask) is fills


def test_run_lengths() -> None:
    words, row = jnp.zeros((4, 8), jnp.int32), jnp.zeros(64)
    runs: dict[str, tuple[typing.Callable, int, int]] = {  # a mask, and the run of its result along q and kv
        "index": (lambda b, h, q, k: k > 1, 0, 1),
        "quotient": (lambda b, h, q, k: k // 16 > 1, 0, 16),
        "quotient of a shifted index": (lambda b, h, q, k: (k + 40) // 16 > 3, 0, 8),
        "quotients": (lambda b, h, q, k: k // 16 > q // 24, 24, 16),
        "two of one axis": (lambda b, h, q, k: k // 16 + k // 24 > 1, 0, 8),
        "load": (lambda b, h, q, k: words[h, k // 8] > q, 1, 8),
        "load at all": (lambda b, h, q, k: row[q] > 0, 1, 0),
        "difference": (lambda b, h, q, k: (q - k) // 16 > 1, 1, 1),
        "multiple": (lambda b, h, q, k: 2 * k // 16 > 1, 0, 1),
        "by no literal": (lambda b, h, q, k: k // (h + 1) > 1, 0, 1),
        "head": (lambda b, h, q, k: (h + k) // 16 > 1, 0, 1),
    }
    for name, (mask, *want) in runs.items():
        program = trace_mask_mod(mask, (2, 4, 64, 64)).program
        got = [patterns.run_lengths(program, axis)[program.results[0].id] for axis in ("q", "kv")]
        assert got == want, name
