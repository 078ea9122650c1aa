"""Every primitive that a program may hold, through a small mod: on a tile of the xla backend, value and derivatives, against jax.

The primitives of the table in primitives.py that jax binds by themselves each have a row here, or the first test fails.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.ir.evaluate import evaluate
from flexjax.ir.program import Load
from flexjax.trace.primitives import ELEMENTWISE
from flexjax.trace.trace_mod import trace_score_mod

SIZES = B, N, T, S = (1, 2, 3, 4)
rng = np.random.default_rng(3)
ROW = jnp.asarray(rng.uniform(0.15, 0.85, T), jnp.float32)
SCORES = jnp.asarray(rng.uniform(0.15, 0.85, SIZES), jnp.float32)
WORDS = jnp.asarray(rng.integers(-(2**31), 2**31, S), jnp.int32)
F32 = lambda x: x.astype(jnp.float32)

# name: function of the score x and a captured number y, both in 0.15..0.85, and of a captured integer n
OF_FLOATS = {name: (lambda x, y, n, name=name: getattr(lax, name)(x * y)) for name in (
    "abs", "acos", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh", "digamma",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log1p", "logistic", "neg", "rsqrt", "sign",
    "sin", "sinh", "sqrt", "square", "tan", "tanh", "round",
)} | {name: (lambda x, y, n, name=name: getattr(lax, name)(x, 2.1 * y)) for name in (
    "add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2", "nextafter", "igamma", "igammac", "igamma_grad_a",
)} | {name: (lambda x, y, n, name=name: jnp.where(getattr(lax, name)(x, y), x * y, x)) for name in (
    "eq", "ne", "lt", "le", "gt", "ge",
)} | {name: (lambda x, y, n, name=name: F32(getattr(lax, name)(n)) * x) for name in ("clz", "population_count")
} | {name: (lambda x, y, n, name=name: F32(getattr(lax, name)(n, jnp.int32(3))) * x) for name in (
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "mulhi",
)} | {name: (lambda x, y, n, name=name: F32(getattr(lax, "bitwise_" + name)(n, jnp.int32(0x5555))) * x) for name in (
    "and", "or", "xor",
)} | {
    "acosh": lambda x, y, n: lax.acosh(1 + x * y),
    "not": lambda x, y, n: F32(lax.bitwise_not(n)) * x,
    "is_finite": lambda x, y, n: jnp.where(lax.is_finite(x / (y - ROW[1])), x, y),
    "clamp": lambda x, y, n: lax.clamp(0.3 * y, x, y),
    "select_n": lambda x, y, n: lax.select_n(n & 1, x * y, y),
    "integer_pow": lambda x, y, n: lax.integer_pow(x * y, -3),
    "reduce_precision": lambda x, y, n: lax.reduce_precision(x * y, 5, 4),
    "convert_element_type": lambda x, y, n: F32((x * y).astype(jnp.float16)),
    "zeta": lambda x, y, n: lax.zeta(x + 2, jnp.float32(1.5)) * y,
    "polygamma": lambda x, y, n: lax.polygamma(jnp.float32(1), x * y),
    "regularized_incomplete_beta": lambda x, y, n: lax.betainc(jnp.float32(1.5), jnp.float32(2), x * y),
    "complex": lambda x, y, n: jnp.abs(lax.complex(x, y)),
    "real": lambda x, y, n: lax.real(lax.complex(x, y) ** 2),
    "imag": lambda x, y, n: lax.imag(jnp.exp(lax.complex(x, y))),
    "conj": lambda x, y, n: lax.real(lax.conj(lax.complex(x, y)) * (x + 2j)),
}  # fmt: skip
NOT_BOUND = {"add_any", "copy", "copy_p", "stop_gradient"}
"""Written by jax's transformations, or by none: names of the program's own."""
NO_DERIVATIVE = {"igamma_grad_a", "nextafter", "zeta"}
"""Of which jax has none."""
OTHERS: dict[str, Callable] = {
    "bitcast of one width": lambda x, y, n: F32(lax.bitcast_convert_type(x, jnp.int32) >> 8) * y,
    "bitcast to bytes": lambda x, y, n: F32(lax.bitcast_convert_type(n, jnp.uint8)[2]) * x * y,
    "bitcast of halves": lambda x, y, n: (
        F32(lax.bitcast_convert_type(lax.bitcast_convert_type(n, jnp.int16)[::-1], jnp.int32)) * 2.0**-31 * x * y
    ),
    "bitcast to bfloat16": lambda x, y, n: F32(lax.bitcast_convert_type(n & 0x3FFF3FFF, jnp.bfloat16)[0]) * x * y,
    "cumlogsumexp": lambda x, y, n: lax.cumlogsumexp(jnp.stack([x, y, 2 * x]))[1],
    "cumlogsumexp, reversed": lambda x, y, n: lax.cumlogsumexp(jnp.stack([x, y, 2 * x]), reverse=True) @ jnp.arange(3.0),
    "inverse": lambda x, y, n: jnp.linalg.inv(jnp.eye(2) + jnp.stack([x * x, y, 0, 1.0]).reshape(2, 2))[0, 0],
    "inverse of captured numbers": lambda x, y, n: jnp.linalg.solve(jnp.diag(ROW) + 2.0, jnp.stack([x, y, 1.0]))[0],
    "sort": lambda x, y, n: jnp.sort(jnp.stack([x, y, 0.5 * x]))[1],
}  # fmt: skip
ROWS = OF_FLOATS | OTHERS


def test_every_elementwise_primitive_has_a_row() -> None:
    assert set(OF_FLOATS) | NOT_BOUND == ELEMENTWISE
    one, word = jnp.float32(0.5), jnp.int32(5)
    for name, function in OF_FLOATS.items():
        bound = {e.primitive.name for e in jax.make_jaxpr(function)(one, one, word).jaxpr.eqns}
        assert name in bound, f"the row of {name} binds {sorted(bound)}"


def on_tile(program: Any, arrays: Any, score: jax.Array) -> list[np.ndarray]:
    region = Region(0, B, 0, N, 0, T, jnp.zeros(1, jnp.int32), S)
    everywhere = [frozenset({"b", "h", "q", "kv"})] * len(program.results)
    return [np.broadcast_to(x, SIZES) for x in evaluate(program, XlaTile(region, arrays, score), everywhere)]


@pytest.mark.parametrize("name", ROWS)
def test_value_and_derivatives_are_those_of_jax(name: str) -> None:
    function = ROWS[name]
    make = lambda row: lambda s, b, h, q, k: function(s, row[q], WORDS[k])
    traced = trace_score_mod(make(ROW), SIZES)
    flat = [x.ravel() for x in jnp.meshgrid(*map(jnp.arange, SIZES), indexing="ij")]
    entry = lambda s, y, k: function(s, y, WORDS[k])
    operands = (SCORES.ravel(), ROW[flat[2]], flat[3])
    close = lambda got, want: np.testing.assert_allclose(got.ravel(), want, rtol=2e-5, atol=2e-6)
    close(on_tile(traced.program, traced.arrays, SCORES)[0], jax.vmap(entry)(*operands))
    if name in NO_DERIVATIVE:
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            jax.vmap(jax.grad(entry, (0, 1)))(*operands)
        assert traced.derivative is None
        assert traced.why_not == (
            f"`score_mod` cannot be differentiated: {refused.value}. Stop the gradient before that operation with "
            "jax.lax.stop_gradient, or give the function a derivative rule with jax.custom_jvp."
        )
        return
    wanted = jax.vmap(jax.grad(entry, (0, 1)))(*operands)
    assert traced.why_not == ""
    assert traced.derivative is not None
    value, by_score, *by_loads = on_tile(traced.derivative, traced.arrays, SCORES)
    close(value, jax.vmap(entry)(*operands))
    close(by_score, wanted[0])
    loads = [traced.derivative.steps[place] for place in traced.derivative.gradients]
    moving = [g for g, load in zip(by_loads, loads, strict=True) if isinstance(load, Load) and "q" in load.out.axes]
    close(np.asarray(sum(moving, np.zeros(SIZES))), wanted[1])
