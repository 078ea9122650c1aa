"""Every primitive that a program may hold, through a small mod: on a tile of the xla backend, value and derivatives, against jax.

The primitives of trace/primitives.py that jax binds by themselves each have a row in tests/primitives.py, or the first test fails.
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
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow
from tests.primitives import F32, NO_DERIVATIVE, NOT_BOUND, ROWS, bound_primitives

SIZES = B, N, T, S = (1, 2, 3, 4)
rng = np.random.default_rng(3)
ROW = array(rng.uniform(0.15, 0.85, T), jnp.float32)
SCORES = array(rng.uniform(0.15, 0.85, SIZES), jnp.float32)
WORDS = array(rng.integers(-(2**31), 2**31, S), jnp.int32)
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
EVERY_ROW = ROWS | OTHERS
SLOW = {"inverse of captured numbers", "igammac", "igamma_grad_a"}  # "inverse" and "igamma" are made of the same


def test_every_elementwise_primitive_has_a_row() -> None:
    assert set(ROWS) | NOT_BOUND == ELEMENTWISE
    for name, row in ROWS.items():
        assert name in bound_primitives(row), f"the row of {name} binds {sorted(bound_primitives(row))}"


def on_tile(program: Any, arrays: Any, score: jax.Array) -> list[jax.Array]:
    region = Region(0, B, 0, N, 0, T, jnp.zeros(1, jnp.int32), S)
    everywhere = [frozenset({"b", "h", "q", "kv"})] * len(program.results)
    return [jnp.broadcast_to(x, SIZES) for x in evaluate(program, XlaTile(region, arrays, score), everywhere)]


@pytest.mark.parametrize("name", some_slow(EVERY_ROW, EVERY_ROW.keys() - SLOW))
def test_value_and_derivatives_are_those_of_jax(name: str) -> None:
    function = EVERY_ROW[name]
    make = lambda row: lambda s, b, h, q, k: function(s, row[q], WORDS[k])
    traced = trace_score_mod(make(ROW), SIZES)
    flat = [x.ravel().astype(np.int32) for x in np.meshgrid(*map(np.arange, SIZES), indexing="ij")]
    entry = lambda s, y, k: function(s, y, WORDS[k])
    operands = (np.ravel(SCORES), np.asarray(ROW)[flat[2]], flat[3])
    close = lambda got, want: np.testing.assert_allclose(got.ravel(), want, rtol=2e-5, atol=2e-6)

    @quick_jit
    def both(arrays: Any, score: jax.Array, *operands: jax.Array) -> Any:
        found = [on_tile(p, arrays, score) for p in (traced.program, traced.derivative) if p is not None]
        slopes = () if name in NO_DERIVATIVE else jax.vmap(jax.grad(entry, (0, 1)))(*operands)
        return *found, jax.vmap(entry)(*operands), slopes

    plain, *derived, right, wanted = both(traced.arrays, SCORES, *operands)
    close(plain[0], right)
    if name in NO_DERIVATIVE:
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            jax.vmap(jax.grad(entry, (0, 1)))(*operands)
        assert traced.derivative is None
        assert traced.why_not == (
            f"`score_mod` cannot be differentiated: {refused.value}. Stop the gradient before that operation with "
            "jax.lax.stop_gradient, or give the function a derivative rule with jax.custom_jvp."
        )
        return
    assert traced.why_not == ""
    assert traced.derivative is not None
    value, by_score, *by_loads = derived[0]
    close(value, right)
    close(by_score, wanted[0])
    loads = [traced.derivative.steps[place] for place in traced.derivative.gradients]
    moving = [g for g, load in zip(by_loads, loads, strict=True) if isinstance(load, Load) and "q" in load.out.axes]
    close(np.asarray(sum(moving, np.zeros(SIZES))), wanted[1])
