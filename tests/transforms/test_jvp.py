"""Forward mode: the slope along a direction, and the transpose of reverse mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases.small import PROBLEMS, assert_same_to_rounding, direction, dot, quick_jit
from tests.marks import some_slow

STEP = 1e-5


@pytest.mark.parametrize("name", some_slow(PROBLEMS, ("reads", "sinks")))
def test_jvp_is_the_slope_and_the_transpose_of_vjp(name: str) -> None:
    problem = PROBLEMS[name]
    with jax.enable_x64(True):
        arrays = problem.arrays()
        tangents = direction(arrays)
        run = quick_jit(problem.run)
        results, moved = quick_jit(lambda a, t: jax.jvp(problem.run, (a,), (t,)))(arrays, tangents)
        at = lambda step: run({n: x + step * tangents[n] for n, x in arrays.items()})
        for result, tangent, plain, up, down in zip(results, moved, run(arrays), at(STEP), at(-STEP), strict=True):
            np.testing.assert_allclose(result, plain, rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose(tangent, (up - down) / (2 * STEP), rtol=1e-6, atol=1e-8)
        cotangents = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in results)
        (back,) = quick_jit(lambda a, c: jax.vjp(problem.run, a)[1](c))(arrays, cotangents)
        np.testing.assert_allclose(dot(back, tangents), dot(cotangents, moved), rtol=1e-10)


@pytest.mark.parametrize("moving", some_slow(["query", "value", "diagonal", "pair"], ["pair"]))
def test_one_array_moves_alone(moving: str) -> None:
    problem = PROBLEMS["reads"]
    arrays = problem.arrays()
    tangents = direction(arrays)
    alone = {n: t if n == moving else jnp.zeros_like(t) for n, t in tangents.items()}
    _, want = jax.jvp(problem.run, (arrays,), (alone,))
    _, got = jax.jvp(lambda x: problem.run(arrays | {moving: x}), (arrays[moving],), (tangents[moving],))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_linearize_and_its_transpose() -> None:
    problem = PROBLEMS["sinks"]
    arrays = problem.arrays()
    tangents = direction(arrays)
    value, linear = jax.linearize(problem.loss, arrays)
    assert_same_to_rounding(value, problem.loss(arrays))
    (gradient,) = jax.linear_transpose(linear, arrays)(jnp.float32(1))
    np.testing.assert_allclose(dot(gradient, tangents), linear(tangents), rtol=1e-4)
