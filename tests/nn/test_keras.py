"""flexjax.nn.keras.install beside Keras's own attention: values, gradients, layers, dropout."""

import importlib.util
import inspect
import os
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn

if importlib.util.find_spec("keras") is None:
    pytest.skip("flexjax.nn.keras adapts to keras: pip install '.[nn]'", allow_module_level=True)
os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported
import keras

BATCH, TOKENS, KEYS, HEADS, DIM = 2, 7, 9, 4, 8
Q, K, V = (
    jax.random.normal(jax.random.key(i), (BATCH, n, m, DIM))
    for i, (n, m) in enumerate([(TOKENS, HEADS), (KEYS, 2), (KEYS, 2)])
)
MASK = jax.random.bernoulli(jax.random.key(5), 0.6, (BATCH, HEADS, TOKENS, KEYS)).at[..., 0].set(True)
BIAS = jax.random.normal(jax.random.key(6), (BATCH, HEADS, TOKENS, KEYS))


@pytest.fixture
def installed() -> Iterator[None]:
    with flexjax.nn.keras.install():
        yield


def value_and_gradients(**options: object) -> object:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(keras.ops.dot_product_attention(q, k, v, **options)))

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(Q, K, V)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "scale": 0.3},
        {"mask": MASK, "bias": BIAS},
        {"mask": MASK[:, :1, :1]},
        {"bias": BIAS[:1], "flash_attention": False},
        {"mask": MASK[0, 0], "bias": BIAS[0, 1]},
        {"mask": MASK[0]},
    ],
)
def test_same_numbers_and_gradients(options: dict[str, object]) -> None:
    theirs = value_and_gradients(**options)
    with flexjax.nn.keras.install():
        ours = value_and_gradients(**options)
    assert value_and_gradients(**options)[0] == theirs[0], "Keras's own function is back"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


def test_the_soft_cap_is_honoured(installed: None) -> None:
    """In the backend's function and in functional models; keras.ops refuses it before the backend is asked."""
    ours = keras.src.backend.nn.dot_product_attention(Q, K, V, bias=BIAS, attn_logits_soft_cap=0.5)
    k, v = (jnp.repeat(x, 2, axis=2) for x in (K, V))
    scores = jnp.einsum("btnd,bsnd->bnts", Q, k) / np.sqrt(DIM)
    weights = jax.nn.softmax(0.5 * jnp.tanh(scores / 0.5) + BIAS)
    np.testing.assert_allclose(ours, jnp.einsum("bnts,bsnd->btnd", weights, v), atol=2e-6)


def layers() -> list[keras.layers.Layer]:
    return [
        keras.layers.MultiHeadAttention(HEADS, DIM, seed=1),
        keras.layers.GroupQueryAttention(DIM, HEADS, 2, seed=1),
    ]


@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
def test_layers(layer: keras.layers.Layer) -> None:
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, 16))
    mask = np.asarray(MASK[:, 0, :, :TOKENS])
    short, square = x[:, :BATCH], np.tril(np.ones((BATCH, BATCH), bool))  # [T, S] as long as the batch
    run = lambda: (
        layer(x, x, use_causal_mask=True), layer(x, x, attention_mask=mask), layer(short, short, attention_mask=square)
    )  # fmt: skip
    theirs = run()
    calls = []
    with flexjax.nn.keras.install():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run(), theirs)
        calls.append(str(jax.make_jaxpr(lambda x: layer(x, x, use_causal_mask=True))(x)))
    calls.append(str(jax.make_jaxpr(lambda x: layer(x, x, use_causal_mask=True))(x)))
    assert calls[0] != calls[1], "the layer runs the same program with and without flexjax"
    with flexjax.nn.keras.install():
        _, scores = layer(x, x, return_attention_scores=True)
    assert scores.shape == (BATCH, HEADS, TOKENS, TOKENS)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_dropout_of_layers(installed: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    called = flexjax.nn.keras.flex_attention

    def spy(*arrays: jax.Array, **options: object) -> object:
        rates.append(options["dropout"])
        return called(*arrays, **options)

    monkeypatch.setattr(flexjax.nn.keras, "flex_attention", spy)
    sizes = (HEADS, DIM) if name == "MultiHeadAttention" else (DIM, HEADS, 2)
    layer = getattr(keras.layers, name)(*sizes, dropout=0.5, seed=1)
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, 16))
    still = layer(x, x, training=False)
    first, second = layer(x, x, training=True), layer(x, x, training=True)
    assert rates[-3] is None
    assert [dropout.rate for dropout in rates[-2:]] == [0.5, 0.5]
    assert not np.allclose(first, second, atol=1e-3)
    assert not np.allclose(first, still, atol=1e-3)


def test_the_signature_is_that_of_keras() -> None:
    theirs = inspect.signature(keras.src.backend.nn.dot_product_attention)
    with flexjax.nn.keras.install():
        ours = inspect.signature(keras.src.backend.nn.dot_product_attention)
    bare = lambda s: [(p.name, p.kind, p.default) for p in s.parameters.values()]
    assert bare(ours) == bare(theirs)


def test_fit_trains_with_dropout(installed: None) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TOKENS, 16))
    y = keras.layers.MultiHeadAttention(HEADS, DIM, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, y)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(8, TOKENS, 16)).astype(np.float32)
    losses = model.fit(x, np.roll(x, 1, axis=1), epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_other_axes_are_refused(installed: None) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("`query` is of shape (7, 4, 8); expected 4 dims, [B, tokens, heads, dim]. Reshape it."),
    ):
        keras.src.backend.nn.dot_product_attention(Q[0], K, V)


def test_of_two_installs_the_later_one_ends_first() -> None:
    own = keras.src.backend.nn.dot_product_attention
    first, second = flexjax.nn.keras.install(), flexjax.nn.keras.install()
    why = "`dot_product_attention` was replaced again after this install(). Uninstall the later one first."
    with pytest.raises(RuntimeError, match=re.escape(why)):
        first.uninstall()
    second.uninstall()
    first.uninstall()
    assert keras.src.backend.nn.dot_product_attention is own


@pytest.mark.parametrize("heads", [2, 3])
def test_a_mask_without_a_batch_is_one_of_all_entries(heads: int) -> None:
    """As many tokens as batch entries and heads, so that nothing but the rule tells the axes apart."""
    q = jax.random.normal(jax.random.key(2), (3, 3, heads, DIM))
    mask, bias = jnp.tril(jnp.ones((3, 3), bool)), jax.random.normal(jax.random.key(3), (3, 3))
    asked = [dict(mask=mask), dict(bias=bias), dict(mask=jnp.stack([mask] * heads))]
    run = lambda: [keras.ops.dot_product_attention(q, q, q, **words) for words in asked]
    theirs = run()
    with flexjax.nn.keras.install():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run(), theirs)
