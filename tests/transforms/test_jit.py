"""jit gives what the eager call gives to rounding, with arrays donated too, and twice the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.cases.small import PROBLEMS, assert_same_to_rounding
from tests.marks import some_slow


@pytest.mark.parametrize("name", some_slow(PROBLEMS, ("causal", "blocks", "reads", "dropout")))
def test_jit_is_the_eager_call(name: str) -> None:
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    compiled = jax.jit(problem.run)
    first = compiled(arrays)
    assert_same_to_rounding(first, problem.run(arrays))
    for got, want in zip(compiled(arrays), first, strict=True):
        np.testing.assert_array_equal(got, want)


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
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = jax.grad(
            lambda q, s: (flexjax.flex_attention(q, arrays["key"], arrays["value"], sinks=s) ** 2).sum(), argnums=(0, 1)
        )(arrays["query"], arrays["sinks"])
    assert [x.shape for x in got] == [arrays["query"].shape, arrays["sinks"].shape]


def test_no_nan_arises_on_the_way() -> None:
    problem = PROBLEMS["empty_rows"]
    with jax.debug_nans(True):
        gradient = jax.jit(jax.grad(problem.loss))(problem.arrays())
    assert all(bool(jnp.isfinite(x).all()) for x in gradient.values())


def test_no_tracer_leaks() -> None:
    problem = PROBLEMS["reads"]
    with jax.checking_leaks():
        jax.eval_shape(jax.grad(problem.loss), problem.arrays())


def test_calls_run_where_jit_is_disabled() -> None:
    problem = PROBLEMS["causal"]
    arrays, rows = problem.arrays(), jnp.zeros((2, 9), jnp.int32)
    attend = lambda x: flexjax.flex_attention(x, x, x, mask_mod=flexjax.masks.document(rows)).sum()
    want = problem.run(arrays)[0]
    with jax.disable_jit():
        got = problem.run(arrays)[0]
        gradient = jax.grad(attend)(arrays["query"])  # its block mask reads a captured array
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert bool(jnp.isfinite(gradient).all())


def test_a_call_is_traced_under_a_transfer_guard() -> None:
    arrays = PROBLEMS["causal"].arrays()
    table, ids = np.ones(4, np.float32), np.zeros((2, 11), np.int32)

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        mask_mod = flexjax.and_masks(flexjax.masks.causal, lambda b, h, q_idx, kv_idx: ids[b, kv_idx] == 0)
        score_mod = flexjax.chain_mods(flexjax.mods.alibi(4), lambda score, b, h, q_idx, kv_idx: score * table[h])
        return flexjax.flex_attention(q, k, k, score_mod=score_mod, mask_mod=mask_mod).sum()

    with jax.transfer_guard("disallow"):  # which lets jax.numpy make the constants of a jitted program
        gradient = jax.jit(jax.grad(attend))(arrays["query"], arrays["key"])
    assert bool(jnp.isfinite(gradient).all())
