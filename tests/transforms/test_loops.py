"""Attention inside scan, while_loop, cond and map, and gradients through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases.small import PROBLEMS


def test_layers_in_a_scan_are_the_layers_one_by_one() -> None:
    problem = PROBLEMS["reads"]
    arrays = problem.arrays()
    gates = jnp.stack([arrays["gate"], 2 * arrays["gate"], -arrays["gate"]])

    def layer(query: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = problem.run(arrays | {"query": query, "gate": gate})
        return query + out, lse.sum()

    def scanned(query: jax.Array, gates: jax.Array) -> jax.Array:
        out, sums = jax.lax.scan(layer, query, gates)
        return (out**2).sum() + sums.sum()

    def unrolled(query: jax.Array, gates: jax.Array) -> jax.Array:
        total = 0.0
        for gate in gates:
            query, sums = layer(query, gate)
            total = total + sums
        return (query**2).sum() + total

    got = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(arrays["query"], gates)
    want = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(arrays["query"], gates)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_rounds_of_a_while_loop_and_their_tangent() -> None:
    problem = PROBLEMS["causal"]
    arrays = problem.arrays()

    def rounds(query: jax.Array, count: jax.Array) -> jax.Array:
        step = lambda state: (state[0] + 1, problem.run(arrays | {"query": state[1]})[0])
        return jax.lax.while_loop(lambda state: state[0] < count, step, (0, query))[1]

    twice = lambda q: problem.run(arrays | {"query": problem.run(arrays | {"query": q})[0]})[0]
    query = arrays["query"]
    np.testing.assert_allclose(jax.jit(rounds)(query, 2), twice(query), atol=1e-6)
    push = lambda f: jax.jit(lambda query: jax.jvp(f, (query,), (jnp.cos(query),))[1])(query)
    np.testing.assert_allclose(push(lambda q: rounds(q, 2)), push(twice), atol=1e-6)


@pytest.mark.slow
def test_branches() -> None:
    problem = PROBLEMS["sinks"]
    arrays = problem.arrays()
    loss = lambda on, a: jax.lax.cond(on, problem.loss, lambda a: jnp.float32(0), a)
    gradient = jax.jit(jax.grad(loss, argnums=1))
    want = jax.jit(jax.grad(problem.loss))(arrays)
    for array, value in gradient(True, arrays).items():
        np.testing.assert_allclose(value, want[array], rtol=1e-4, atol=1e-5)
    assert not any(bool(x.any()) for x in gradient(False, arrays).values())
