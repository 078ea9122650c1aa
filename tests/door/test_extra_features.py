"""query_extra and key_extra: a second dot product, as if the features were concatenated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.marks import some_slow

B, T, S, N, M, D, R = 2, 10, 14, 4, 2, 8, 5


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, V, QX = draw(B, T, N, D), draw(B, S, M, D, seed=1), draw(B, S, M, D, seed=2), draw(B, T, N, R, seed=3)


def concatenated(
    q: jax.Array, k: jax.Array, v: jax.Array, qx: jax.Array, kx: jax.Array, **keywords: object
) -> jax.Array:
    """The features of each query head beside its own, keys repeated for it."""
    per_head = lambda x: jnp.repeat(x, q.shape[2] // x.shape[2], 2)
    q, k = jnp.concatenate([q, qx], -1), jnp.concatenate([per_head(k), per_head(kx)], -1)
    return flexjax.flex_attention(q, k, per_head(v), scale=D**-0.5, **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "blocks"), some_slow([(1, 4), (2, 128), (4, 4)], [(2, 128)]))
def test_values_and_gradients(heads: int, blocks: int) -> None:
    kx = draw(B, S, heads, R, seed=4)
    mask = flexjax.create_block_mask(masks.causal, None, None, T, S, block_size=blocks)
    ours = lambda q, k, v, qx, kx: flexjax.flex_attention(q, k, v, query_extra=qx, key_extra=kx, block_mask=mask)
    theirs = lambda *a: concatenated(*a, block_mask=mask)
    both = [
        jax.jit(jax.value_and_grad(lambda *a, f=f: (f(*a) ** 2).sum(), range(5)))(Q, K, V, QX, kx)
        for f in (ours, theirs)
    ]
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


HEADS = ((6, 3, 2), (6, 2, 3), (12, 4, 6), (12, 6, 2), (12, 1, 4))


@pytest.mark.parametrize(
    ("n", "m", "k", "length"),
    some_slow([(*n, t) for n in HEADS for t in (10, 300)], [(6, 3, 2, 10)]),
)
def test_heads_of_key_extra_that_do_not_share_with_those_of_key(n: int, m: int, k: int, length: int) -> None:
    """Query heads are cut so that no tile straddles the heads of either."""
    shapes = (n, D), (m, D), (m, D), (n, R), (k, R)
    given = [draw(1, length, *shape, seed=i) for i, shape in enumerate(shapes)]
    ours = lambda q, k, v, qx, kx: flexjax.flex_attention(q, k, v, query_extra=qx, key_extra=kx, mask_mod=masks.causal)
    theirs = lambda *a: concatenated(*a, mask_mod=masks.causal)
    both = [jax.jit(jax.value_and_grad(lambda *a, f=f: (f(*a) ** 2).sum(), range(5)))(*given) for f in (ours, theirs)]
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-5)


def test_a_batch_of_one_and_the_other_layout() -> None:
    kx = draw(1, S, 1, R)
    want = flexjax.flex_attention(Q, K, V, query_extra=QX, key_extra=jnp.repeat(kx, B, 0))
    np.testing.assert_allclose(flexjax.flex_attention(Q, K, V, query_extra=QX, key_extra=kx), want, atol=1e-6)
    swapped = [jnp.swapaxes(x, 1, 2) for x in (Q, K, V, QX, kx)]
    got = flexjax.flex_attention(*swapped[:3], query_extra=swapped[3], key_extra=swapped[4], layout="BNTH")
    np.testing.assert_allclose(jnp.swapaxes(got, 1, 2), want, atol=1e-6)


def test_the_default_scale_is_that_of_the_head_dim_alone() -> None:
    kx = draw(B, S, 1, R)
    want = flexjax.flex_attention(Q, K, V, query_extra=QX, key_extra=kx, scale=D**-0.5)
    np.testing.assert_array_equal(flexjax.flex_attention(Q, K, V, query_extra=QX, key_extra=kx), want)
