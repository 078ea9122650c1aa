"""Static bounds of score programs hold at random scores, and are what they should be for the soft cap."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax import mods
from flexjax.analysis.bounds import bounds, finite_results
from flexjax.trace.trace_mod import trace_score_mod

SIZES = (2, 3, 16, 16)
TABLE = jnp.arange(3.0)
BOUNDED = {
    "softcap": (mods.softcap(30.0), -30.0, 30.0),
    "shifted": (lambda s, b, h, q, k: 5.0 - 2.0 * jax.nn.sigmoid(s), 3.0, 5.0),
    "clip": (lambda s, b, h, q, k: jnp.clip(s, -3.0, 7.0), -3.0, 7.0),
    "by_head": (lambda s, b, h, q, k: jnp.tanh(s) * (h + 1), -3.0, 3.0),
    "positions": (lambda s, b, h, q, k: jnp.tanh(s) + (q - k), -16.0, 16.0),
    "divided": (lambda s, b, h, q, k: jnp.sin(s) / (h + 2.0), -0.5, 0.5),
    "narrow": (lambda s, b, h, q, k: jnp.tanh(s) + (q * 100).astype(jnp.int8) / 128.0, -2.0, 1.9921875),
    "where": (lambda s, b, h, q, k: jnp.where(q > k, jnp.cos(s), jnp.abs(jnp.tanh(s)) * 4), -1.0, 4.0),
    "comparison": (lambda s, b, h, q, k: jnp.tanh(s) * (q >= k), -1.0, 1.0),
    "logarithm": (lambda s, b, h, q, k: jnp.tanh(s) * jnp.log(q + 1.0), -np.log(16.0), np.log(16.0)),
    "distance": (lambda s, b, h, q, k: jnp.tanh(s) - jnp.log1p(jnp.abs(q - k)), -1 - np.log(16.0), 1.0),
    "root": (lambda s, b, h, q, k: jnp.tanh(s) / jnp.sqrt(h + 1.0), -1.0, 1.0),
    "largest": (
        lambda s, b, h, q, k: jnp.where(q > k, 0 * jnp.tanh(s), jnp.finfo(jnp.float32).min),
        -3.4028235e38,
        0.0,
    ),
}
UNBOUNDED = {
    "identity": lambda s, b, h, q, k: s,
    "scaled": lambda s, b, h, q, k: 0.0 * s,
    "table": lambda s, b, h, q, k: jnp.tanh(s) + TABLE[h],
    "switched_off": lambda s, b, h, q, k: jnp.where(q > k, jnp.tanh(s), -jnp.inf),
    "divided": lambda s, b, h, q, k: jnp.tanh(s) / (q - k),
    "exponential": lambda s, b, h, q, k: jnp.exp(s),
    # integers that wrap around, lose their sign or are cut off
    "unsigned": lambda s, b, h, q, k: jnp.tanh(s) + 1e-3 * (q.astype(jnp.uint32) - k.astype(jnp.uint32)),
    "wrapping": lambda s, b, h, q, k: jnp.tanh(s) + (h * 1103515245 + 12345) / 2.0**31,
    "cut_off": lambda s, b, h, q, k: 200 * (jax.nn.sigmoid(s) * 0.5 + 0.5).astype(jnp.int32).astype(jnp.float32),
    "overflow": lambda s, b, h, q, k: jnp.tanh(s) * 1e30 * 1e30 * 1e-30 * 1e-30,
    "narrow_float": lambda s, b, h, q, k: jnp.tanh(s).astype(jnp.bfloat16).astype(jnp.float32),
    "nan": lambda s, b, h, q, k: jnp.minimum(jnp.nan, jnp.tanh(s)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded(name: str) -> None:
    mod, low, high = BOUNDED[name]
    ((least, most),) = bounds(trace_score_mod(mod, SIZES).program)
    assert (least, most) == pytest.approx((low, high), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_unbounded(name: str) -> None:
    ((least, most),) = bounds(trace_score_mod(UNBOUNDED[name], SIZES).program)
    assert least == -math.inf or most == math.inf


def test_what_rounds_away_is_no_bound() -> None:
    mod = lambda s, b, h, q, k: ((q - k) % 2 + 1).astype(jnp.float32) + 1e-8
    ((low, _),) = bounds(trace_score_mod(mod, SIZES).program)
    assert low <= 1.0
    ((low, _),) = bounds(trace_score_mod(lambda *at: jnp.log(mod(*at)), SIZES).program)
    assert low <= 0.0


FINITE = {
    "distance": (lambda s, b, h, q, k: -0.5 * jnp.abs(q - k).astype(jnp.float32), True),
    "literal": (lambda s, b, h, q, k: jnp.float32(2.0), True),
    "infinite literal": (lambda s, b, h, q, k: jnp.float32(jnp.inf), False),
    "score": (lambda s, b, h, q, k: jnp.tanh(s), False),
    "table": (lambda s, b, h, q, k: jnp.clip(TABLE[h], -1.0, 1.0), False),
    "quotient": (lambda s, b, h, q, k: 1.0 / (q - k), False),
    "almost infinite": (lambda s, b, h, q, k: q * jnp.float32(1e30), False),
}


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite_whatever_is_computed(name: str) -> None:
    mod, expected = FINITE[name]
    program = trace_score_mod(mod, SIZES).program
    assert finite_results(program) == (expected,)


def test_chains_take_no_time_of_their_own() -> None:
    """Each value is looked at once, also where two operands are the same, and in a chain longer than Python's stack."""

    def mod(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        x = q.astype(jnp.float32) * 1e-3
        for _ in range(600):
            x = jnp.maximum(x * (1.0 - x) * 0.5, 0.25)
        return x

    assert finite_results(trace_score_mod(mod, SIZES).program) == (True,)


@hypothesis.given(
    st.sampled_from(sorted(BOUNDED)),
    st.floats(width=32, allow_nan=False),
    st.tuples(*(st.integers(0, n - 1) for n in SIZES)),
)
def test_bounds_hold(name: str, score: float, at: tuple[int, ...]) -> None:
    mod = BOUNDED[name][0]
    ((low, high),) = bounds(trace_score_mod(mod, SIZES).program)
    value = float(mod(jnp.float32(score), *map(jnp.int32, at)))
    slack = 1e-6 * max(abs(low), abs(high))
    assert low - slack <= value <= high + slack or np.isnan(value)
