"""Functions with derivative rules of their own that close over what they use: what jax takes is taken, what it refuses is refused."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax import flex_attention
from flexjax.errors import ModError
from flexjax.ir.evaluate_scalars import call_program
from flexjax.ir.rewrite import with_results
from flexjax.trace.trace_mod import trace_score_mod

SIZES = (1, 1, 12, 12)


def times(kind: str, read: Callable) -> Callable:
    """x * read(j), whose derivative by x is said to be 3 * read(j)."""
    if kind == "custom_vjp":
        function = jax.custom_vjp(lambda x, j: x * read(j))
        function.defvjp(lambda x, j: (x * read(j), j), lambda j, g: (g * 3 * read(j), None))
    else:
        function = jax.custom_jvp(lambda x, j: x * read(j))
        function.defjvp(lambda p, t: (p[0] * read(p[1]), t[0] * 3 * read(p[1])))
    return function


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("size", [12, 100])
def test_a_rule_may_close_over_an_array(kind: str, size: int) -> None:
    weights = jnp.sin(jnp.arange(1.0, size + 1))
    function = times(kind, lambda j: weights[j])
    traced = trace_score_mod(lambda s, b, h, q, k: function(s, k) + weights[0], SIZES)
    assert not traced.program.calls
    assert traced.derivative is not None
    got = [
        call_program(with_results(traced.derivative, [r]), traced.arrays, (0, 0, 2, 5), jnp.float32(0.5))
        for r in traced.derivative.results[:2]
    ]
    np.testing.assert_allclose(got, [0.5 * weights[5] + weights[0], 3 * weights[5]], rtol=1e-6)


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_gradients_of_queries_and_of_what_is_closed_over(kind: str) -> None:
    query = jax.random.normal(jax.random.key(0), (1, 12, 1, 8))
    message = (
        "`score_mod` cannot be differentiated with respect to a captured array of float32[12], because a function with a "
        "derivative rule of its own closes over it; pass its element as an argument of that function, or stop its gradient "
        "with lax.stop_gradient."
    )

    def loss(query: jax.Array, weights: jax.Array, implementation: str) -> jax.Array:
        function = times(kind, lambda j: weights[j])
        mod = lambda s, b, h, q, k: function(s, k)
        return jnp.sum(flex_attention(query, query, query, score_mod=mod, implementation=implementation) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    for weights in (jnp.arange(12.0), jnp.ones(12)):
        np.testing.assert_allclose(gradient(query, weights, "xla"), gradient(query, weights, "reference"), atol=2e-4)
    with pytest.raises(ModError, match=f"^{re.escape(message)}"):
        jax.grad(loss, 1)(query, jnp.ones(12), "xla")
    with pytest.raises(ModError, match=f"^{re.escape(message)}"):
        jax.grad(jax.jit(loss, static_argnums=2), 1)(query, jnp.ones(12), "xla")


ELEMENT = (
    "`score_mod` cannot be differentiated: a function with a custom_vjp rule closes over the score or over an element of a "
    "captured array, for which the rule has no derivative; hand it over as an argument of that function, or stop its gradient "
    "with lax.stop_gradient."
)
IN_RULE = (
    "`score_mod` cannot be differentiated: the derivative rule of a function in it closes over a value that the mod computes or "
    "is given; hand it over as an argument of that function."
)
TABLE = jnp.arange(12.0)
# name: (what the function closes over, whether its rule does too, why there is no derivative)
VALUES = {
    "score": (lambda s, q: s, False, ELEMENT),
    "element": (lambda s, q: TABLE[q], False, ELEMENT),
    "stopped element": (lambda s, q: lax.stop_gradient(TABLE[q]), False, ""),
    "position": (lambda s, q: q.astype(jnp.float32), False, ""),
    "position in the rule": (lambda s, q: q.astype(jnp.float32), True, IN_RULE),
}


@pytest.mark.parametrize("what", VALUES)
def test_values_of_the_mod_that_a_custom_vjp_closes_over(what: str) -> None:
    make, in_rule, why_not = VALUES[what]

    def mod(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        value = make(s, q)
        function = jax.custom_vjp(lambda x: x * value)
        function.defvjp(lambda x: (x, None), lambda _, g: (g * (value if in_rule else 3.0),))
        return function(s)

    traced = trace_score_mod(mod, SIZES)
    assert traced.why_not == why_not
    assert (traced.derivative is None) == bool(why_not)
    got = call_program(traced.program, traced.arrays, (0, 0, 3, 1), jnp.float32(2.0))
    assert got == (4 if what == "score" else 6)
