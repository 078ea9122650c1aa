"""Hessian-vector products, three ways round, against the dense implementation differentiated by JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.cases.small import PROBLEMS, Arrays, direction, dot, quick_jit
from tests.marks import some_slow

Loss = Callable[[Arrays], jax.Array]


def forward_over_reverse(loss: Loss, arrays: Arrays, tangents: Arrays) -> Arrays:
    return jax.jvp(jax.grad(loss), (arrays,), (tangents,))[1]


def reverse_over_reverse(loss: Loss, arrays: Arrays, tangents: Arrays) -> Arrays:
    return jax.grad(lambda a: dot(jax.grad(loss)(a), tangents))(arrays)


def reverse_over_forward(loss: Loss, arrays: Arrays, tangents: Arrays) -> Arrays:
    return jax.grad(lambda a: jax.jvp(loss, (a,), (tangents,))[1])(arrays)


WAYS = (forward_over_reverse, reverse_over_reverse, reverse_over_forward)
CASES = [f"{name}-{way.__name__}" for name in PROBLEMS for way in WAYS]
EVERYDAY = ("reads-forward_over_reverse", "plain-reverse_over_reverse", "plain-reverse_over_forward")


@pytest.mark.parametrize("case", some_slow(CASES, EVERYDAY))
def test_hessian_vector_products(case: str) -> None:
    name, way_name = case.split("-")
    problem, way = PROBLEMS[name], globals()[way_name]
    with jax.enable_x64(True):
        arrays = problem.arrays()
        tangents = direction(arrays)
        dense = lambda a: problem.loss(a, "reference")
        want = quick_jit(lambda a, t: forward_over_reverse(dense, a, t))(arrays, tangents)
        got = quick_jit(lambda a, t: way(problem.loss, a, t))(arrays, tangents)
        for array in arrays:
            np.testing.assert_allclose(got[array], want[array], rtol=1e-7, atol=1e-8, err_msg=array)


@pytest.mark.slow
def test_hessian_of_a_head_gate() -> None:
    problem = PROBLEMS["reads"]
    arrays = problem.arrays()
    at = lambda gate, implementation: problem.loss(arrays | {"gate": gate}, implementation)
    got = quick_jit(jax.hessian(lambda g: at(g, "xla")))(arrays["gate"])
    want = quick_jit(jax.hessian(lambda g: at(g, "reference")))(arrays["gate"])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_masked_entries_leak_no_nan() -> None:
    """Captured values that are NaN wherever they are read are masked everywhere."""
    arrays = PROBLEMS["plain"].arrays()
    shift = jnp.where(jnp.arange(11) < 8, 0.5, jnp.nan)

    def loss(query: jax.Array, shift: jax.Array) -> jax.Array:
        mod = lambda s, b, h, q, kv: jnp.sqrt(s * s + 1) + shift[kv] * s * s + jnp.sqrt((7.5 - kv) * s * s)
        mask = lambda b, h, q, kv: (kv < 8) & (q > 2)
        return (flexjax.flex_attention(query, arrays["key"], arrays["value"], score_mod=mod, mask_mod=mask) ** 2).sum()

    at = (arrays["query"], shift)
    product = lambda a, t: jax.jvp(jax.grad(loss, (0, 1)), a, t)[1]
    twice = jax.grad(lambda *a: sum(x.sum() for x in jax.grad(loss, (0, 1))(*a)), (0, 1))
    ones = (jnp.ones_like(at[0]), jnp.ones_like(at[1]))
    for result in (quick_jit(product)(at, ones), quick_jit(twice)(*at)):
        assert all(bool(jnp.isfinite(x).all()) for x in result)
    np.testing.assert_allclose(quick_jit(product)(at, ones)[0], quick_jit(twice)(*at)[0], rtol=5e-3, atol=5e-3)
