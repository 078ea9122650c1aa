"""Sinks: one more column of the softmax, without a value behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

B, T, S, N, M, D = 2, 9, 12, 4, 2, 8


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, V = draw(B, T, N, D), draw(B, S, M, D, seed=1), draw(B, S, M, D, seed=2)


def late(b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
    return q >= 4


def attend(sinks: jax.Array | None, **keywords: object) -> tuple[jax.Array, jax.Array]:
    asked = flexjax.AuxRequest(lse=True)
    out, aux = flexjax.flex_attention(Q, K, V, sinks=sinks, return_aux=asked, mask_mod=late, **keywords)  # type: ignore[arg-type]
    return out, aux.lse


@pytest.mark.slow
def test_a_key_whose_value_is_zero_and_whose_score_is_the_sink() -> None:
    """One more key, alone visible to empty rows, with the sink as its score."""
    sinks = draw(N, seed=3)

    def with_a_key(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        grow = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))
        out, aux = flexjax.flex_attention(
            Q, grow(K), grow(V),
            score_mod=lambda s, b, h, q, kv: jnp.where(kv == S, sinks[h], s),
            mask_mod=lambda b, h, q, kv: (kv == S) | (q >= 4),
            return_aux=flexjax.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    loss = lambda f: lambda s: (f(s)[0] ** 2).sum() + jnp.sin(f(s)[1]).sum()
    for got, want in zip(attend(sinks), with_a_key(sinks), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    got, want = (quick_jit(jax.grad(loss(f)))(sinks) for f in (attend, with_a_key))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


MAPPED = jax.jit(lambda sinks: jax.vmap(attend)(sinks[None]))
GRADIENTS = [jax.jit(jax.grad(lambda s, run=run: sum(x.sum() for x in run(s)))) for run in (attend, MAPPED)]


@pytest.mark.parametrize("logit", some_slow([-1e30, -200.0, -90.0, 0.0, 90.0, 200.0], [-1e30, -90.0, 200.0]))
def test_logits_of_any_size(logit: float) -> None:
    """Rows without a key have lse of the sink and output 0, and no NaN anywhere."""
    sinks = jnp.full(N, logit, jnp.float32)
    out, lse = map(np.asarray, attend(sinks))
    np.testing.assert_array_equal(out[:, :4], np.zeros_like(out[:, :4]))
    np.testing.assert_allclose(lse[:, :4], np.full_like(lse[:, :4], logit), rtol=1e-6)
    plain, plain_lse = map(np.asarray, attend(None))
    np.testing.assert_allclose(lse[:, 4:], np.logaddexp(plain_lse[:, 4:], np.float32(logit)), rtol=1e-6)
    weight = np.exp(plain_lse - lse)[:, 4:, :, None]
    np.testing.assert_allclose(out[:, 4:], plain[:, 4:] * weight, atol=1e-6)
    for mapped, run in enumerate((attend, MAPPED)):
        gradient = GRADIENTS[mapped](sinks)
        assert np.isfinite(gradient).all()
        np.testing.assert_allclose(np.reshape(run(sinks)[1], lse.shape), lse, rtol=1e-6)


def test_a_step_of_the_online_softmax_is_sound_without_the_compilers_help() -> None:
    """Eagerly, one operation at a time: inf * 0 must not arise where a row is empty and the sink far below."""
    from flexjax.backends import tile_math

    empty = jnp.full((1, 1), -jnp.inf)
    for sink in (-1e30, -200.0, 0.0, 200.0, -jnp.inf):
        out, lse = tile_math.finalise(empty, jnp.zeros((1, 1)), jnp.zeros((1, 3)), jnp.full((1, 1), sink))
        np.testing.assert_array_equal(out, np.zeros((1, 3)))
        np.testing.assert_array_equal(lse, [[np.float32(sink)]])


def test_a_sink_of_minus_infinity_is_none() -> None:
    for got, want in zip(attend(jnp.full(N, -jnp.inf)), attend(None), strict=True):
        np.testing.assert_array_equal(got, want)
    gradient = quick_jit(jax.grad(lambda s: attend(s)[0].sum()))(jnp.full(N, -jnp.inf))
    np.testing.assert_array_equal(gradient, np.zeros(N))


@pytest.mark.parametrize("dtype", some_slow(["bfloat16", "float16", "float64"], ["float64"]))
def test_dtypes_of_sinks(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        sinks = draw(N, seed=3).astype(dtype)
        slope = quick_jit(jax.grad(lambda s: attend(s)[0].sum()))
        want, gradient = slope(sinks.astype("float32")), slope(sinks)
        assert gradient.dtype == sinks.dtype
        np.testing.assert_allclose(gradient.astype("float32"), want, rtol=1e-2, atol=1e-2)


def test_blocks_of_any_size_agree() -> None:
    sinks = draw(N, seed=3)
    runs = []
    for size in (3, 4, 128):
        mask = flexjax.create_block_mask(masks.causal, None, None, T, S, block_size=size)
        loss = lambda s, mask=mask: (flexjax.flex_attention(Q, K, V, sinks=s, block_mask=mask) ** 2).sum()
        runs.append(quick_jit(jax.value_and_grad(loss))(sinks))
    for value, gradient in runs[1:]:
        np.testing.assert_allclose(value, runs[0][0], rtol=1e-5)
        np.testing.assert_allclose(gradient, runs[0][1], rtol=1e-4, atol=1e-5)
