"""jit gives what the eager call gives, with arrays donated too, and twice the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.transforms.problems import PROBLEMS, some_slow

EPSILON = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", some_slow(PROBLEMS, ("causal", "blocks", "reads", "dropout")))
def test_jit_is_the_eager_call(name: str) -> None:
    """To the last bits only: inside jit, XLA merges what surrounds the attention, such as a change of layout, with it."""
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    eager = problem.run(arrays)
    compiled = jax.jit(problem.run)
    for got, again, want in zip(compiled(arrays), compiled(arrays), eager, strict=True):
        np.testing.assert_array_equal(got, again)
        np.testing.assert_allclose(got, want, rtol=0, atol=8 * EPSILON * np.abs(want).max())


def test_an_argument_may_be_donated() -> None:
    problem = PROBLEMS["bnth"]
    arrays = problem.arrays()
    want = problem.run(arrays)[0]
    swapped = [jnp.swapaxes(arrays[n], 1, 2) for n in ("query", "key", "value")]
    run = jax.jit(
        lambda q, k, v, s: flexjax.flex_attention(q, k, v, layout="BNTH", sinks=s, mask_mod=flexjax.masks.causal),
        donate_argnums=0,
    )
    np.testing.assert_allclose(run(*swapped, arrays["sinks"]), want, rtol=1e-6)
    assert swapped[0].is_deleted()


def test_strict_promotion_and_rank_settings_are_respected() -> None:
    problem = PROBLEMS["sinks"]
    arrays = problem.arrays()
    want = jax.grad(problem.loss)(arrays)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = jax.grad(
            lambda q, s: (flexjax.flex_attention(q, arrays["key"], arrays["value"], sinks=s) ** 2).sum(), argnums=(0, 1)
        )(arrays["query"], arrays["sinks"])
    assert [x.shape for x in got] == [want["query"].shape, want["sinks"].shape]


def test_no_nan_arises_on_the_way() -> None:
    problem = PROBLEMS["empty_rows"]
    with jax.debug_nans(True):
        gradient = jax.jit(jax.grad(problem.loss))(problem.arrays())
    assert all(bool(jnp.isfinite(x).all()) for x in gradient.values())


def test_no_tracer_leaks() -> None:
    problem = PROBLEMS["reads"]
    with jax.checking_leaks():
        jax.eval_shape(jax.grad(problem.loss), problem.arrays())
