"""The functions of docs/recipes.md in float64: values and gradients of everything, against the dense formula of each paper."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arrays import array
from tests.docs.test_docs import blocks

B, T, N, D = 2, 24, 4, 8
CAUSAL = np.tri(T, dtype=bool)


@pytest.fixture(scope="module")
def recipes() -> dict[str, typing.Any]:
    """What the page defines; its own sizes are other ones."""
    names: dict[str, typing.Any] = {}
    for block in blocks("recipes.md"):
        exec(compile(block, "recipes.md", "exec"), names)
    return names


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])


def softmax(scores: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(CAUSAL, scores, -jnp.inf), axis=-1)


def forgetting(gates: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Weights times the product of the gates after the key, gate by gate."""
    decay = jnp.stack([jnp.where(CAUSAL[:, j], _products(gates, j), 0) for j in range(T)], -1)
    p = jnp.exp(scores(q, k)) * decay
    return jnp.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)


def _products(gates: jax.Array, key: int) -> jax.Array:
    """[B, N, T]: the product of the gates of the tokens after the key, up to each query."""
    opened = jnp.where(np.arange(T) > key, jax.nn.sigmoid(gates), 1)
    return jnp.cumprod(opened, axis=-1)


def differential(q: jax.Array, k: jax.Array, v: jax.Array, strength: jax.Array) -> jax.Array:
    first, second = (softmax(scores(q[..., part], k[..., part])) for part in (slice(D), slice(D, None)))
    return jnp.einsum("bhij,bjhd->bihd", first - strength[:, None, None] * second, v)


def sigmoid(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    weights = 1 / (1 + jnp.exp(-scores(q, k) - bias[:, None, None]))
    return jnp.einsum("bhij,bjhd->bihd", jnp.where(CAUSAL, weights, 0), v)


TOKENS, WIDE, HEADS = (B, T, N, D), (B, T, N, 2 * D), (N,)
ROWS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "forgetting": (forgetting, ((B, N, T), TOKENS, TOKENS, TOKENS)),
    "differential": (differential, (WIDE, WIDE, WIDE, HEADS)),
    "sigmoid_attention": (sigmoid, (TOKENS, TOKENS, TOKENS, HEADS)),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_formula(name: str, recipes: dict[str, typing.Any]) -> None:
    formula, shapes = ROWS[name]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = [array(rng.standard_normal(shape), jnp.float64) for shape in shapes]

        def both(function: Callable) -> typing.Any:
            out, pull = jax.vjp(function, *x)
            return out, pull(jnp.cos(out))

        for got, want in zip(*(jax.tree.leaves(both(f)) for f in (recipes[name], formula)), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * max(1, float(jnp.abs(want).max())))
