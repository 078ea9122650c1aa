"""attention_fn in flax.linen and flax.nnx: same numbers and same training as flax's own function, or a refusal."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
import flexjax.nn
from flexjax import masks, mods
from tests.nn.training import assert_same_training, batch, losses

flax = pytest.importorskip("flax", reason="flexjax.nn adapts to flax: pip install '.[nn]'")
from flax import linen, nnx  # noqa: E402

HEADS = 4
X, _ = batch()
TOKENS, WIDTH = X.shape[1:]
PADDING = linen.make_attention_mask(*[jnp.arange(TOKENS)[None] < jnp.array([20, 7, 13, 1])[:, None]] * 2)


def linen_layer(*mods_: object, **options: object) -> linen.MultiHeadDotProductAttention:
    return linen.MultiHeadDotProductAttention(HEADS, attention_fn=flexjax.nn.attention_fn(*mods_), **options)


@pytest.fixture(scope="module")
def parameters() -> object:
    return linen.MultiHeadDotProductAttention(HEADS).init(jax.random.key(1), X)


def nnx_layer(attend: object = None, **options: object) -> nnx.MultiHeadAttention:
    given = {} if attend is None else {"attention_fn": attend}
    return nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), decode=False, **given, **options)


def test_linen_mask_is_honoured(parameters: object) -> None:
    mask = linen.combine_masks(linen.make_causal_mask(X[..., 0]), PADDING)
    theirs = linen.MultiHeadDotProductAttention(HEADS).apply(parameters, X, mask=mask)
    ours = linen_layer().apply(parameters, X, mask=mask)
    shown = np.asarray(mask).any(axis=(1, 3))  # flax gives rows that see nothing the mean of all values
    np.testing.assert_allclose(ours[shown], theirs[shown], atol=2e-6)
    assert not np.allclose(ours, linen_layer().apply(parameters, X), atol=1e-3)


def test_bias_broadcasts_over_batch_axes() -> None:
    q = jax.random.normal(jax.random.key(0), (2, 3, 5, HEADS, 8))
    for shape in ((HEADS, 5, 5), (2, 1, 1, 5, 5), (2, 3, HEADS, 1, 5)):
        bias = jax.random.normal(jax.random.key(2), shape)
        ours = flexjax.nn.attention_fn()(q, q, q, bias=bias)
        np.testing.assert_allclose(ours, linen.dot_product_attention(q, q, q, bias=bias), atol=2e-6)


def test_batch_axes_that_differ_are_refused() -> None:
    q = jnp.ones((2, 3, 7, 4, 8))
    with pytest.raises(
        ValueError, match=re.escape("`key` is float32[3, 2, 7, 4, 8]; expected the batch axes of query, [2, 3].")
    ):
        flexjax.nn.attention_fn()(q, jnp.ones((3, 2, 7, 4, 8)), q)


def test_unbatched() -> None:
    q = jax.random.normal(jax.random.key(0), (5, HEADS, 8))
    np.testing.assert_allclose(flexjax.nn.attention_fn()(q, q, q), linen.dot_product_attention(q, q, q), atol=2e-6)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_decoding_gives_the_mods_the_position_of_the_token(library: str) -> None:
    mods_ = (mods.alibi(HEADS), flexjax.and_masks(masks.causal, masks.sliding_window(5)))
    attend = flexjax.nn.attention_fn(*mods_)
    if library == "linen":
        layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attend, decode=True)
        variables = layer.init(jax.random.key(1), X)
        whole = linen_layer(*mods_).apply({"params": variables["params"]}, X)

        @jax.jit
        def step(cache: object, x: jax.Array) -> tuple[jax.Array, object]:
            out, new = layer.apply({"params": variables["params"], "cache": cache}, x, mutable=["cache"])
            return out, new["cache"]

        cache, outs = variables["cache"], []
        for t in range(TOKENS):
            out, cache = step(cache, X[:, t : t + 1])
            outs.append(out)
    else:
        layer = nnx_layer(attend)
        whole = layer(X)
        layer.init_cache(X.shape)
        step = nnx.jit(lambda layer, x, at: layer(x, decode=True, input_positions=at))
        outs = [step(layer, X[:, t : t + 1], jnp.full((len(X), 1), t)) for t in range(TOKENS)]
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole, atol=3e-6)


def test_input_positions_of_packed_rows() -> None:
    at = jnp.broadcast_to(jnp.arange(TOKENS) % 7, X.shape[:2])
    score_mod = mods.alibi(HEADS)
    q = jax.random.normal(jax.random.key(0), (*X.shape[:2], HEADS, 8))
    ours = flexjax.nn.attention_fn(score_mod)(q, q, q, input_positions=at)
    by_hand = lambda s, b, h, i, j: score_mod(s, b, h, at[b, i], at[b, j])
    np.testing.assert_allclose(ours, flexjax.flex_attention(q, q, q, score_mod=by_hand), atol=1e-6)


def test_linen_trains_as_its_own_attention(parameters: object) -> None:
    mask = linen.make_causal_mask(X[..., 0])
    train = lambda layer: losses(parameters, lambda p, x, _: layer.apply(p, x, mask=mask))
    assert_same_training(train(linen_layer()), train(linen.MultiHeadDotProductAttention(HEADS)))


def test_nnx_trains_as_its_own_attention() -> None:
    def train(layer: nnx.MultiHeadAttention) -> np.ndarray:
        graph, state = nnx.split(layer, nnx.Param, ...)[:2]
        rest = nnx.split(layer, nnx.Param, ...)[2]
        return losses(state, lambda p, x, _: nnx.merge(graph, p, rest)(x, is_causal=True))

    assert_same_training(train(nnx_layer(flexjax.nn.attention_fn())), train(nnx_layer()))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(parameters: object, broadcast: bool) -> None:
    layer = linen_layer(dropout_rate=0.5, broadcast_dropout=broadcast)
    run = lambda seed: layer.apply(parameters, X, deterministic=False, rngs={"dropout": jax.random.key(seed)})
    assert np.array_equal(run(0), run(0))
    assert not np.allclose(run(0), run(1), atol=1e-3)
    still = layer.apply(parameters, X, deterministic=True)
    np.testing.assert_allclose(still, linen.MultiHeadDotProductAttention(HEADS).apply(parameters, X), atol=2e-6)


def test_broadcast_dropout_drops_the_same_positions_everywhere() -> None:
    n = 6
    uniform = jnp.zeros((2, n, 3, n))  # every probability is 1 / n
    value = jnp.broadcast_to(jnp.eye(n)[None, :, None], uniform.shape)  # so that out is the matrix of probabilities
    run = lambda broadcast: flexjax.nn.attention_fn()(
        uniform, uniform, value, dropout_rng=jax.random.key(0), dropout_rate=0.5, broadcast_dropout=broadcast
    )
    kept = np.asarray(run(True)) > 0
    assert (kept == kept[:1, :, :1]).all()
    assert kept.any()
    assert not kept.all()
    apart = np.asarray(run(False)) > 0
    assert not (apart == apart[:1, :, :1]).all()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"qk_attn_weights_einsum": jnp.einsum},
            "`qk_attn_weights_einsum` is a function; expected None. Leave it out: fused attention has no einsum that could be "
            "replaced.",
        ),
        (
            {"module": object()},
            "`module` is an object; expected None. Leave it out: fused attention never has the weights as an array, so they "
            "cannot be sown; see flexjax.attention_weights.",
        ),
        (
            {"dropout_rate": 0.1},
            "`dropout_rng` is None; expected a key, since dropout_rate is positive. Pass deterministic=True for no dropout.",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(argument: dict[str, object], message: str) -> None:
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        flexjax.nn.attention_fn()(q, q, q, **argument)


def test_the_precision_is_that_of_the_call() -> None:
    """It reaches the products in the program of the call."""
    q = jnp.ones((1, 4, 2, 8))
    attend = flexjax.nn.attention_fn(implementation="xla")
    program = lambda precision: str(jax.make_jaxpr(lambda q: attend(q, q, q, precision=precision))(q))
    assert "HIGHEST" in program(jax.lax.Precision.HIGHEST)
    assert "HIGHEST" not in program(None)
    with pytest.raises(ValueError, match=r"^`precision` is 'exact'; expected "):
        attend(q, q, q, precision="exact")


def test_positions_that_int32_cannot_hold_are_refused() -> None:
    q, positions = jnp.ones((1, 2, 2, 8)), np.array([0, 2**32])
    attend = flexjax.nn.attention_fn(mask_mod=masks.causal)
    with pytest.raises(
        ValueError, match=r"^`attention_fn`: `input_positions` has numbers from 0 to 4294967296; expected"
    ):
        attend(q, q, q, input_positions=positions)


def test_sown_weights_are_refused(parameters: object) -> None:
    with pytest.raises(ValueError, match="cannot be sown"):
        linen_layer().apply(parameters, X, sow_weights=True, mutable=["intermediates"])


def test_a_decoding_step_with_mods_and_no_mask_is_refused() -> None:
    q, k = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"Pass input_positions=\[\.\.\.\]\."):
        flexjax.nn.attention_fn(mods.alibi(2))(q, k, k)


def test_every_argument_of_flax_is_named() -> None:
    """linen drops arguments that the signature does not name."""
    import inspect

    ours = inspect.signature(flexjax.nn.attention_fn()).parameters
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(function).parameters) <= set(ours)


@pytest.mark.filterwarnings("ignore:'.value' access is now deprecated")  # by flax, of its own RoPE
@pytest.mark.parametrize("where", ["factory", "partial"])
def test_rope_rotates_as_that_of_flax(where: str) -> None:
    """Also in decoding, where the cache holds keys that are not rotated."""
    rope = nnx.RoPE(embedding_size=WIDTH // HEADS, max_seq_len=64)
    if where == "factory":
        attend = flexjax.nn.attention_fn(mask_mod=masks.causal, rope=rope)
    else:
        attend = functools.partial(flexjax.nn.attention_fn(mask_mod=masks.causal), rope=rope)
    theirs = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    layer = nnx_layer(attend)
    whole = layer(X)
    np.testing.assert_allclose(whole, nnx_layer(theirs)(X, is_causal=True), atol=2e-6)
    layer.init_cache(X.shape)
    outs = [layer(X[:, t : t + 1], decode=True) for t in range(4)]
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole[:, :4], atol=3e-6)
