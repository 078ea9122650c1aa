"""flexjax.nn.MultiheadAttention beside equinox.nn.MultiheadAttention."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn
from flexjax import masks
from tests.nn.training import assert_same_training, batch, losses

eqx = pytest.importorskip("equinox", reason="flexjax.nn adapts to equinox: pip install '.[nn]'")

HEADS = 4
X, _ = batch()
TOKENS, WIDTH = X.shape[1:]
SIZES = {
    "key_size": WIDTH,
    "value_size": WIDTH,
    "qk_size": 6,
    "vo_size": 5,
    "use_query_bias": True,
    "use_output_bias": True,
}


def layers(**options: object) -> tuple[object, object]:
    build = lambda cls: cls(HEADS, WIDTH, key=jax.random.key(0), **SIZES, **options)
    return build(flexjax.nn.MultiheadAttention), build(eqx.nn.MultiheadAttention)


@pytest.mark.parametrize("mask", ["none", "shared", "by head"])
def test_same_numbers(mask: str) -> None:
    array = None
    if mask != "none":
        shape = (TOKENS, TOKENS) if mask == "shared" else (HEADS, TOKENS, TOKENS)
        array = jax.random.bernoulli(jax.random.key(5), 0.6, shape).at[..., 0].set(True)
    ours, theirs = (jax.vmap(lambda x, layer=layer: layer(x, x, x, mask=array))(X) for layer in layers())
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_cross_attention_and_process_heads() -> None:
    double = lambda q, k, v: (2 * q, k, v)
    ours, theirs = (layer(X[0, :7], X[1], X[2], process_heads=double) for layer in layers())
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_trains_as_equinox_with_a_mask_mod_for_its_mask() -> None:
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    ours = flexjax.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0), mask_mod=masks.causal)
    theirs = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))

    def train(layer: object, mask: object) -> np.ndarray:
        arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
        apply = lambda p, x, _: jax.vmap(lambda x: eqx.combine(p, rest)(x, x, x, mask=mask))(x)
        return losses(arrays, apply, rate=2.0)

    assert_same_training(train(ours, None), train(theirs, causal))


class Slopes(eqx.Module):
    """A score_mod that is part of the model."""

    slopes: jax.Array

    def __call__(self, score: jax.Array, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        return score - self.slopes[h] * (q_idx - kv_idx)


def test_a_mod_that_is_a_module_is_trained() -> None:
    layer = flexjax.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0), score_mod=Slopes(jnp.ones(HEADS)))
    grads = eqx.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(X, X, X) ** 2))(layer)
    assert (np.abs(grads.score_mod.slopes) > 1e-6).all()


def test_dropout_and_inference() -> None:
    layer = layers(dropout_p=0.5)[0]
    x = X[0]
    run = lambda seed, **o: layer(x, x, x, key=jax.random.key(seed), **o)
    assert not np.allclose(run(0), run(1), atol=1e-3)
    np.testing.assert_allclose(run(0, inference=True), layers()[1](x, x, x), atol=2e-6)
    np.testing.assert_array_equal(eqx.nn.inference_mode(layer)(x, x, x), run(0, inference=True))
    with pytest.raises(
        ValueError,
        match=re.escape("`key` is None; expected a key, since dropout is on. Pass key=..., or inference=True."),
    ):
        layer(x, x, x)


def test_parameters_of_equinox_load() -> None:
    ours, theirs = layers()
    arrays = jax.tree.leaves(eqx.filter(theirs, eqx.is_array))
    assert [a.shape for a in jax.tree.leaves(eqx.filter(ours, eqx.is_array))] == [a.shape for a in arrays]


@pytest.mark.parametrize("mask", [jnp.ones((3, 3), bool), jnp.ones((TOKENS, TOKENS))])
def test_a_mask_of_another_shape_or_dtype_is_refused(mask: jax.Array) -> None:
    with pytest.raises(
        ValueError, match=r"^`mask` is .*; expected bool\[20, 20\] or bool\[4, 20, 20\]\. True where attended\."
    ):
        layers()[0](X[0], X[0], X[0], mask=mask)
