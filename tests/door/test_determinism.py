"""The same inputs give the same bits: eagerly, compiled, compiled anew; gradients to captured arrays included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from tests.arrays import array

B, N, M, T, D = 2, 4, 2, 150, 16


def arrays(dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = dict(
        q=(B, T, N, D), k=(B, T, M, D), v=(B, T, M, D), table=(N, 2 * T), column=(T,), few=(7,), pair=(T, T), sinks=(N,)
    )
    return {n: array(rng.standard_normal(s), dtype if n in "qkv" else "float32") for n, s in shapes.items()}


def loss(a: dict[str, jax.Array]) -> jax.Array:
    """Reads that add up many entries of the matrix into one number, and a table read by gathers that collide."""

    def score_mod(score: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
        return score + a["table"][h, q - kv + T] + a["column"][kv] * a["few"][(q * kv) % 7] + a["pair"][q, kv]

    out = flexjax.flex_attention(
        a["q"], a["k"], a["v"], score_mod=score_mod, mask_mod=masks.causal, sinks=a["sinks"],
        dropout=flexjax.Dropout(0.1, jax.random.key(0)),
    )  # fmt: skip
    return (out.astype(jnp.float32) ** 2).sum()


# TableConformance.test_gradients compares the bits of two runs of each case
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twice_the_same_bits(dtype: str) -> None:
    a = arrays(dtype)
    step = jax.jit(jax.value_and_grad(loss))
    first = step(a)
    runs = [step(a), step(a)]
    anew = lambda a: loss(a)  # the compilation cache knows programs by their names too
    runs.append(jax.jit(jax.value_and_grad(anew))(a))
    for run in runs:
        for x, y in zip(jax.tree.leaves(run), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(x, y)
    assert all(bool((x != 0).any()) for x in jax.tree.leaves(first))
