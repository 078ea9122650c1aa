"""Gradients against finite differences in float64, without any other implementation of attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.arrays import array
from tests.cases.small import PROBLEMS, direction, quick_jit
from tests.marks import some_slow

STEP = 1e-5


@pytest.mark.parametrize("name", some_slow(PROBLEMS, ("reads", "sinks", "extra", "wide_value")))
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    problem = PROBLEMS[name]
    with jax.enable_x64(True):
        arrays = problem.arrays()
        loss = quick_jit(problem.loss)
        value, gradient = quick_jit(jax.value_and_grad(problem.loss))(arrays)
        np.testing.assert_allclose(value, loss(arrays), rtol=1e-13)
        tangents = direction(arrays)
        for moved in arrays:
            at = lambda step, moved=moved: loss(arrays | {moved: arrays[moved] + step * tangents[moved]})
            slope = (at(STEP) - at(-STEP)) / (2 * STEP)
            np.testing.assert_allclose(jnp.vdot(gradient[moved], tangents[moved]), slope, rtol=2e-7, atol=5e-8)


def test_gradients_keep_dtypes() -> None:
    problem = PROBLEMS["reads"]
    arrays = problem.arrays()
    mixed = {n: x.astype(jnp.bfloat16) if n in ("query", "key", "value", "row") else x for n, x in arrays.items()}
    gradient = jax.grad(lambda a: problem.run(a)[0].astype(jnp.float32).sum())(mixed)
    assert {n: g.dtype for n, g in gradient.items()} == {n: x.dtype for n, x in mixed.items()}


def test_integers_have_no_gradient() -> None:
    problem = PROBLEMS["plain"]
    arrays = problem.arrays()
    offsets = jnp.arange(4, dtype=jnp.int32)

    def loss(offsets: jax.Array, query: jax.Array) -> jax.Array:
        mod = lambda s, b, h, q, kv: s + offsets[h]
        mask = lambda b, h, q, kv: kv <= q + offsets[h]
        return flexjax.flex_attention(query, arrays["key"], arrays["value"], score_mod=mod, mask_mod=mask).sum()

    gradient = jax.grad(loss, allow_int=True)(offsets, arrays["query"])
    assert gradient.dtype == jax.dtypes.float0
    _, tangent = jax.jvp(loss, (offsets, arrays["query"]), (np.zeros(4, jax.dtypes.float0), arrays["query"]))
    assert bool(jnp.isfinite(tangent))


def test_max_scores_have_no_gradient() -> None:
    arrays = PROBLEMS["plain"].arrays()
    asked = flexjax.AuxRequest(max_scores=True)
    loss = lambda q: flexjax.flex_attention(q, arrays["key"], arrays["value"], return_aux=asked)[1].max_scores.sum()
    assert not bool(jax.grad(loss)(arrays["query"]).any())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero(lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    arrays = PROBLEMS["sinks"].arrays()
    query, key, value = arrays["query"][:, :q_len], arrays["key"][:, :kv_len], arrays["value"][:, :kv_len]
    asked = flexjax.AuxRequest(lse=True)

    def loss(*a: jax.Array) -> jax.Array:
        out, aux = flexjax.flex_attention(*a[:3], sinks=a[3], return_aux=asked, mask_mod=flexjax.masks.causal)
        assert out.shape == query.shape
        return out.sum() + aux.lse.sum()

    *gradients, d_sinks = jax.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, arrays["sinks"])
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
    np.testing.assert_array_equal(d_sinks, jnp.full(4, 2.0 * q_len))


def test_a_batch_of_one_for_keys_is_shared() -> None:
    arrays = PROBLEMS["plain"].arrays()
    one = [arrays[n][:1] for n in ("key", "value")]
    run = lambda k, v: flexjax.flex_attention(arrays["query"], k, v)
    np.testing.assert_array_equal(run(*one), run(*(jnp.repeat(x, 2, 0) for x in one)))
    assert jax.grad(lambda k: run(k, one[1]).sum())(one[0]).shape == one[0].shape


@pytest.mark.parametrize("dtype", some_slow(["float32", "bfloat16"], ["bfloat16"]))
def test_wide_captures_beside_narrow_inputs(dtype: str) -> None:
    """Under x64: float64 captured by a mod of float32 scores."""
    with jax.enable_x64(True):
        arrays = {n: x.astype(dtype) for n, x in PROBLEMS["plain"].arrays().items()}
        gate = jnp.linspace(0.5, 1.5, 4, dtype=jnp.float64)

        def run(query: jax.Array, gate: jax.Array, implementation: str = "xla") -> jax.Array:
            mod = lambda s, b, h, q, kv: s * gate[h] + jnp.sin(gate[h] * q)
            main = (query, arrays["key"], arrays["value"])
            return flexjax.flex_attention(*main, score_mod=mod, implementation=implementation, sinks=gate)

        out, (moved, gradients) = run(arrays["query"], gate), _both_modes(run, arrays["query"], gate)
        assert [x.dtype for x in (out, moved, *gradients)] == [dtype, dtype, dtype, "float64"]
        want = _both_modes(lambda *a: run(*a, implementation="reference"), arrays["query"], gate)
        for got, expected in zip(jax.tree.leaves((moved, gradients)), jax.tree.leaves(want), strict=True):
            bound = 1e-5 if dtype == "float32" else 0.1
            np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (got, expected)), rtol=bound, atol=bound)


def _both_modes(run: Callable, *at: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def both(*at: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        moved = jax.jvp(run, at, at)[1]
        return moved, jax.grad(lambda *a: (run(*a).astype(jnp.float32) ** 2).sum(), (0, 1))(*at)

    return quick_jit(both)(*at)


def test_an_array_that_only_the_derivative_reads() -> None:
    """By tiles that hang over its end: the derivative has reads that the mod itself does not have."""
    slopes = array(np.random.default_rng(0).standard_normal((9, 11)), jnp.float32)

    @jax.custom_vjp
    def double(score: jax.Array, slope: jax.Array) -> jax.Array:
        return score * 2

    double.defvjp(lambda score, slope: (score * 2, slope), lambda slope, c: (c * slope, jnp.zeros_like(slope)))
    arrays = PROBLEMS["plain"].arrays()

    def loss(query: jax.Array, implementation: str) -> jax.Array:
        mod = lambda s, b, h, q, kv: double(s, slopes[q, kv])
        options = flexjax.KernelOptions(block_q=5, block_kv=8) if implementation == "xla" else None
        out = flexjax.flex_attention(
            query, arrays["key"], arrays["value"], score_mod=mod, implementation=implementation, kernel_options=options
        )
        return (out**2).sum()

    got, want = (quick_jit(jax.grad(loss), static_argnums=1)(arrays["query"], name) for name in ("xla", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_complex_captures() -> None:
    """Rotary phases, for one: the gradient of a captured complex array is that of jax, by its real and its imaginary part."""
    rng = np.random.default_rng(2)
    q, k, v = (array(rng.standard_normal((1, 9, 2, 8)), jnp.float32) for _ in range(3))
    phases = array(rng.standard_normal((2, 9)) + 1j * rng.standard_normal((2, 9)), jnp.complex64)

    def loss(phases: jax.Array, implementation: str) -> jax.Array:
        score_mod = lambda s, b, h, i, j: s + jnp.real(phases[h, i] * jnp.conj(phases[h, j])) + jnp.imag(phases[h, j])
        return (flexjax.flex_attention(q, k, v, score_mod=score_mod, implementation=implementation) ** 2).sum()

    wanted = quick_jit(jax.grad(loss), static_argnums=1)(phases, "reference")
    assert float(abs(wanted).max()) > 0.1
    for gradient in (jax.grad(loss), quick_jit(jax.grad(loss), static_argnums=1)):
        np.testing.assert_allclose(gradient(phases, "xla"), wanted, rtol=1e-4, atol=1e-5)
