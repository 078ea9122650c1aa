"""Thirty steps of training a one-layer model on a copy task, for comparing two attention layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
STEPS = 30
TOLERANCE = 2e-5  # relative; float32 rounding of thirty steps


def batch(tokens: int = 20, width: int = 16) -> tuple[Array, Array]:
    """x [4, tokens, width] and the target: x three tokens earlier."""
    x = jax.random.normal(jax.random.key(3), (4, tokens, width))
    return x, jnp.roll(x, 3, axis=1)


def losses(parameters: object, apply: Callable[..., Array], *, rate: float = 0.3) -> np.ndarray:
    """The mean squared error before each of STEPS steps of gradient descent on `apply(parameters, x, step) -> y`."""
    x, target = batch()

    @jax.jit
    def update(parameters: object, step: Array) -> tuple[object, Array]:
        def loss(p: object) -> Array:
            return jnp.mean((apply(p, x, step) - target) ** 2)

        value, grads = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - rate * g, parameters, grads), value

    seen = []
    for step in range(STEPS):
        parameters, value = update(parameters, jnp.asarray(step))
        seen.append(float(value))
    return np.array(seen)


def assert_same_training(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert theirs[-1] < 0.95 * theirs[0], "the task is not learned, so equal losses would show nothing"
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)
