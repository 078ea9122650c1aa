"""Bounds of a score_mod's result on blocks where the score lies in [-c, c]: no entry at any such score leaves them.

The truth is jax on the mod itself, at random scores and at both ends; a mod that has no bounds (NaN) is no failure here,
but each operation that has a rule is bounded at least once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax.analysis.block_grid import block_grid
from flexjax.analysis.interval_values import Interval
from flexjax.analysis.intervals import bound
from flexjax.trace.trace_mod import trace_score_mod
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.primitives import OWN_ROWS, ROWS

T, S, B_Q, B_KV = 24, 40, 8, 8
RNG = np.random.default_rng(5)
ROW = array(RNG.uniform(0.15, 0.85, T), jnp.float32)
WIDE = array(RNG.uniform(-3, 3, S), jnp.float32)
F32 = lambda x: x.astype(jnp.float32)
AWAY = lambda q, k: F32(jnp.abs(q - k))

MODS: dict[str, Callable[..., Any]] = {
    "root": lambda s, b, h, q, k: s - AWAY(q, k) ** 0.5,
    "power of two": lambda s, b, h, q, k: s - 2.0 ** (-0.1 * AWAY(q, k)),
    "power of reads": lambda s, b, h, q, k: s + ROW[q] ** WIDE[k],
    "even power of signed": lambda s, b, h, q, k: s + lax.pow(WIDE[k] + s, jnp.float32(2)),
    "odd power of signed": lambda s, b, h, q, k: s + lax.pow(WIDE[k] + s, jnp.float32(3)),
    "power 0": lambda s, b, h, q, k: lax.pow(s, jnp.float32(0)),
    "falling power": lambda s, b, h, q, k: s + (1 + AWAY(q, k)) ** -1.5,
    "reciprocal": lambda s, b, h, q, k: s + lax.integer_pow(1 + AWAY(q, k), -2),
    "negative reciprocal": lambda s, b, h, q, k: s + lax.integer_pow(-1 - AWAY(q, k), -1),
    "reciprocal root": lambda s, b, h, q, k: s + lax.rsqrt(1 + AWAY(q, k)),
    "wave": lambda s, b, h, q, k: s + jnp.sin(s + q) * jnp.cos(WIDE[k]),
    "tangent": lambda s, b, h, q, k: jnp.tan(0.1 * s + 0.3 * WIDE[k]),
    "tangent with poles": lambda s, b, h, q, k: jnp.tan(s + F32(q - k)),
    "erfc": lambda s, b, h, q, k: lax.erfc(s - WIDE[k]),
    "remainder": lambda s, b, h, q, k: lax.rem(5 * s + WIDE[k], 1 + ROW[q]),
    "remainder of integers": lambda s, b, h, q, k: s + F32(lax.rem(q - k, jnp.int32(-7))),
    "remainder by a variable": lambda s, b, h, q, k: s + F32(lax.rem(q - k, k - 3)),
    "round": lambda s, b, h, q, k: jnp.round(3 * s + WIDE[k]) + lax.round(s),
    "atan2": lambda s, b, h, q, k: lax.atan2(s, WIDE[k]),
    "atan2 to the right": lambda s, b, h, q, k: lax.atan2(s - 1, 1 + AWAY(q, k)),
    "reduced": lambda s, b, h, q, k: lax.reduce_precision(s + WIDE[k], 8, 7),
    "arcs": lambda s, b, h, q, k: lax.asin(0.1 * s) + lax.acos(0.2 * WIDE[k]) + lax.atanh(0.2 * s),
    "hyperbolic": lambda s, b, h, q, k: lax.cosh(s) + lax.acosh(1 + AWAY(q, k)) - lax.cosh(WIDE[k]),
    "shifts": lambda s, b, h, q, k: s + F32((q - k) >> 2) + F32(lax.shift_right_logical(q + k, 1)),
    "shift of a negative": lambda s, b, h, q, k: s + F32(lax.shift_right_logical(q - k, 28)),
    "bits": lambda s, b, h, q, k: s + F32((q - k) & 7) + F32(q & k),
    "bits of negatives": lambda s, b, h, q, k: s + F32((q - k) & (k - q)),
    "softcap": lambda s, b, h, q, k: 2 * jnp.tanh(s / 2) - 0.1 * AWAY(q, k),
    "written -inf": lambda s, b, h, q, k: jnp.where((q - k) % 3 == 1, -jnp.inf, s),
}  # fmt: skip
UNBOUNDED = {"tangent with poles"}


def of_row(row: Callable) -> Callable:
    return lambda s, b, h, q, k: row(0.15 + 0.35 * (1 + s / 3), ROW[q], (q - 3 * k) * jnp.int32(7919))


EVERY = MODS | {f"row {name}": of_row(row) for name, row in (ROWS | OWN_ROWS).items()}
HAVE_NO_BOUNDS = {
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "complex", "conj", "digamma", "erf_inv", "igamma", "igamma_grad_a",
    "igammac", "imag", "is_finite", "lgamma", "nextafter", "polygamma", "real", "regularized_incomplete_beta", "zeta",
}  # fmt: skip


@functools.cache
def blocks_of(name: str, c: float) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of each block."""
    traced = trace_score_mod(EVERY[name], (1, 1, T, S))
    grid = block_grid(1, 1, jnp.arange(T // B_Q), jnp.arange(S // B_KV), (T, S, B_Q, B_KV))

    def run(arrays: Any, c: Any) -> Any:
        c = jnp.reshape(c, (1, 1, 1, 1))
        found = bound(traced.program, arrays, grid, score=Interval(-c, c))
        return found[:2]

    ends = quick_jit(run)(traced.arrays, jnp.float32(c))
    return tuple(np.broadcast_to(np.asarray(e), (1, 1, T // B_Q, S // B_KV))[0, 0] for e in ends)  # type: ignore[return-value]


def values_of(name: str, scores: np.ndarray) -> np.ndarray:
    mod = EVERY[name]
    of = lambda s, q, k: mod(s, jnp.int32(0), jnp.int32(0), q, k)
    dense = jax.vmap(jax.vmap(of, (0, None, 0)), (0, 0, None))
    q, k = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    return np.asarray(quick_jit(jax.vmap(lambda s: dense(s, q, k)))(scores), np.float64)


@pytest.mark.parametrize("name", EVERY)
def test_no_entry_leaves_its_bounds(name: str) -> None:
    c = 1.5
    scores = RNG.uniform(-c, c, (6, T, S)).astype(np.float32)
    scores[0], scores[1], scores[2] = -c, c, 0
    low, high = blocks_of(name, c)
    found = values_of(name, scores)
    tiles = found.reshape(6, T // B_Q, B_Q, S // B_KV, B_KV)
    low, high = low[None, :, None, :, None], high[None, :, None, :, None]
    known = ~(np.isnan(low) | np.isnan(high))
    assert not (known & ~((tiles >= low) & (tiles <= high))).any()
    if name.removeprefix("row ") not in UNBOUNDED | HAVE_NO_BOUNDS:
        assert known.any(), "nothing is bounded"
