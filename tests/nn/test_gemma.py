"""flexjax.nn.gemma.install beside the attention of gemma.gm.nn: blocks, gradients, decoding over a ring."""

import importlib.util
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax.nn

if importlib.util.find_spec("gemma") is None:
    pytest.skip("flexjax.nn.gemma adapts to gemma: pip install gemma", allow_module_level=True)
if importlib.util.find_spec("tensorflow") is None:  # kauldron, which gemma's blocks import, names its arrays in types
    sys.modules["tensorflow"] = types.SimpleNamespace(Tensor=type("Tensor", (), {}))  # type: ignore[assignment]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what gemma imports is deprecated in places
    from gemma.gm.nn import _modules

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH, TOKENS, RING, WIDTH, DIM = 2, 6, 8, 16, 4
X = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
AT = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
CAUSAL = jnp.broadcast_to(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), (BATCH, TOKENS, TOKENS))


def block(kind: str, kv_heads: int) -> _modules.Block:
    return _modules.Block(
        num_heads=4,
        num_kv_heads=kv_heads,
        embed_dim=WIDTH,
        head_dim=DIM,
        hidden_dim=8,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attn_type=_modules.AttentionType[kind],
        query_pre_attn_scalar=0.4,
        transpose_gating_einsum=False,
        attn_logits_soft_cap=2.0 if kind == "GLOBAL" else None,
        sliding_window_size=3,
        use_qk_norm=True,
    )


@pytest.mark.parametrize("kind", ["GLOBAL", "LOCAL_SLIDING"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_blocks_and_gradients(kind: str, kv_heads: int) -> None:
    layer = block(kind, kv_heads)
    parameters = layer.init(jax.random.key(1), X, AT, None, CAUSAL)
    loss = lambda p: jnp.sum(jnp.sin(layer.apply(p, X, AT, None, CAUSAL)[1]))
    theirs = jax.value_and_grad(loss)(parameters)
    with flexjax.nn.gemma.install():
        ours = jax.value_and_grad(loss)(parameters)
        program = str(jax.make_jaxpr(lambda p: loss(p))(parameters))
    assert program != str(jax.make_jaxpr(lambda p: loss(p))(parameters)), "flexjax was not called, or stays installed"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("kind", ["GLOBAL", "LOCAL_SLIDING"])
def test_decoding_over_a_ring_that_wraps(kind: str) -> None:
    layer = block(kind, 2)
    parameters = layer.init(jax.random.key(1), X, AT, None, CAUSAL)
    tokens = jax.random.normal(jax.random.key(2), (RING + 3, BATCH, 1, WIDTH))

    def decode() -> list[jax.Array]:
        cache = _modules.Attention.init_cache(RING, 2, DIM, BATCH, jnp.float32)
        step = jax.jit(lambda cache, x, at, mask: layer.apply(parameters, x, at, cache, mask))
        outs = []
        for t, x in enumerate(tokens):
            mask = jnp.broadcast_to(jnp.arange(RING) <= t, (BATCH, 1, RING))
            cache, y = step(cache, x, jnp.full((BATCH, 1), t), mask)
            outs.append(y)
        return outs

    theirs = decode()
    with flexjax.nn.gemma.install():
        ours = decode()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
