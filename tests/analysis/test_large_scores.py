"""Which score programs are taken to stay near, and which may give scores that are far out."""

import jax.numpy as jnp
import pytest

from flexjax import mods
from flexjax.analysis.large_scores import may_be_large, may_be_large_product
from flexjax.trace.trace_mod import trace_score_mod

SIZES = (2, 3, 1 << 17, 1 << 17)
HEADS, FLAGS, OFF, HIDE = jnp.arange(1.0, 4.0), jnp.ones(2, bool), jnp.ones(2), jnp.float32(1)
TOKENS, PAIRS = jnp.zeros(16), jnp.zeros((16, 16), jnp.bfloat16)
F32, BF16 = jnp.finfo(jnp.float32), jnp.finfo(jnp.bfloat16)
NEAR = {
    "softcap": mods.softcap(30.0),
    "softcap_approx": mods.softcap_approx(30.0),
    "alibi": mods.alibi(3),
    "checkerboard": mods.checkerboard(),
    "head_gate": mods.head_gate(HEADS),
    "temperature": mods.temperature(HEADS),
    "log_n_scaling": mods.log_n_scaling(128),
    "scalable_softmax": mods.scalable_softmax(HEADS),
    "key_scales": mods.key_scales(jnp.ones((2, 1 << 17))),
    "computed slope": lambda s, b, h, q, k: s - jnp.exp2(-(h + 1.0)) * jnp.abs(q - k),
    "comparison": lambda s, b, h, q, k: s * (q >= k),
    "literal": lambda s, b, h, q, k: jnp.where(q > k, s, -1e4),
    "switched off": lambda s, b, h, q, k: jnp.where(q > k, s, -jnp.inf),
    "minus infinity added": lambda s, b, h, q, k: s + jnp.where(q > k, 0.0, -jnp.inf),
    "minus infinity of a batch entry": lambda s, b, h, q, k: s + jnp.where(FLAGS[b], 0.0, -jnp.inf),
}
MAYBE_LARGE = {
    "row": lambda s, b, h, q, k: s + TOKENS[q % 16],
    "pair": lambda s, b, h, q, k: s + PAIRS[q % 16, k % 16],
    "number of a batch entry": lambda s, b, h, q, k: s + OFF[b],
    "chosen number": lambda s, b, h, q, k: jnp.where(q > k, s, OFF[b]),
    "literal": lambda s, b, h, q, k: jnp.where(q > k, s, -1e10),
    "smallest": lambda s, b, h, q, k: jnp.where(q > k, s, F32.min),
    "literal of a batch entry": lambda s, b, h, q, k: s + jnp.where(FLAGS[b], 0.0, -1e30),
    "smallest of a batch entry": lambda s, b, h, q, k: s + jnp.where(FLAGS[b], 0.0, F32.min),
    "times the smallest": lambda s, b, h, q, k: s + (1 - OFF[b]) * F32.min,
    "smallest bfloat16": lambda s, b, h, q, k: s + jnp.where(FLAGS[b], 0.0, BF16.min),
    "bfloat16": lambda s, b, h, q, k: s + jnp.where(FLAGS[b], jnp.bfloat16(0), jnp.bfloat16(-1e30)),
    "captured, times a mask": lambda s, b, h, q, k: s + (q < k) * HIDE,
    "captured, times what is off": lambda s, b, h, q, k: s * (q >= k) + (1 - (q >= k).astype(jnp.float32)) * HIDE,
    "captured, times flags": lambda s, b, h, q, k: s + (1 - FLAGS[b]) * HIDE,
    "captured, times a sign": lambda s, b, h, q, k: s + jnp.sin(k * 1.0) * HIDE,
    "logarithm": lambda s, b, h, q, k: s + jnp.nan_to_num(jnp.log(OFF[b])),
    "held up": lambda s, b, h, q, k: s + jnp.maximum(jnp.log(OFF[b]), -1e30),
    "under nothing": lambda s, b, h, q, k: jnp.maximum(jnp.where(q > k, s, -1e30), -jnp.inf),
    "beside a bound": lambda s, b, h, q, k: 20 * jnp.tanh(s / 20) + 1e9,
    "integers": lambda s, b, h, q, k: s + jnp.where(q > k, 0, -(2**30)),
    "square": lambda s, b, h, q, k: s * s * s,
    "nan": lambda s, b, h, q, k: jnp.where(q > k, s, jnp.nan),
}


@pytest.mark.parametrize("name", NEAR)
def test_stays_near(name: str) -> None:
    assert not may_be_large(trace_score_mod(NEAR[name], SIZES).program)


@pytest.mark.parametrize("name", MAYBE_LARGE)
def test_may_be_far(name: str) -> None:
    assert may_be_large(trace_score_mod(MAYBE_LARGE[name], SIZES).program)


def test_the_identity_stays_near() -> None:
    assert not may_be_large(None)
    assert not may_be_large_product(None)


PRODUCTS = {
    "gate": lambda s, b, h, q, k: (s + TOKENS[q % 16]) * HEADS[h],
    "the other way round": lambda s, b, h, q, k: -((s + TOKENS[q % 16]) * HEADS[h]),
    "quotient": lambda s, b, h, q, k: jnp.where(q > k, s, -1e10) / HEADS[h],
    "square": lambda s, b, h, q, k: s * s * s,
}


@pytest.mark.parametrize("name", [*PRODUCTS, *NEAR, *MAYBE_LARGE])
def test_large_products(name: str) -> None:
    program = trace_score_mod((PRODUCTS | NEAR | MAYBE_LARGE)[name], SIZES).program
    assert may_be_large_product(program) == (name in PRODUCTS)
