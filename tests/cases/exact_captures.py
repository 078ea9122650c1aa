"""Gradients of captured arrays with bfloat16 inputs, in programs where terms cancel along a row.

A distance that is large for a whole row multiplies whatever error of delta = rowsum(dO * O) the row has: the sum over the row of the
cotangents of the scores should be 0, and is that error.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import flexjax
from tests.arrays import array

N, S, D = 2, 16, 16
FAR = 256
MODS: dict[str, Callable[[jax.Array, jax.Array], flexjax.types.ScoreMod]] = {
    "slope": lambda slopes, far: lambda s, b, h, q, k: s - slopes[h] * (jnp.abs(q - k) + FAR),
    # scores that may be large, since arrays may hold anything: their references are not in powers of two
    "table": lambda slopes, far: lambda s, b, h, q, k: s - (slopes[:, None] * far[0])[h, jnp.abs(q - k)],
    "pair": lambda slopes, far: lambda s, b, h, q, k: s - (slopes[:, None, None] * far)[h, q, k],
    # what is the same along a row counts from the first query of a tile, and tiles of forward kernels have up to 128
    "linear": lambda slopes, far: lambda s, b, h, q, k: s + slopes[h] * (q - k),
    "dropout": lambda slopes, far: lambda s, b, h, q, k: s - slopes[h] * (jnp.abs(q - k) + FAR),
}


def check(implementation: str, mod: str, jit: Callable[[Callable], Callable] = jax.jit) -> None:
    """The gradient of the slopes is within 0.5% of that of the same inputs in float32; with delta of the rounded out, or with
    weights that one pass rounds and the other does not, it is off by 3% to 9%. `jit` is put around the gradient of the implementation."""
    rng, T = np.random.default_rng(0), 130 if mod == "linear" else 40
    query, key, value, d_out = (array(rng.standard_normal((1, length, N, D)), jnp.bfloat16) for length in (T, S, S, T))
    slopes = array(rng.uniform(0.01, 0.3, N), jnp.float32)
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)[None]) if mod == "pair" else jnp.arange(T)[None]
    dropout = {"dropout": flexjax.Dropout(0.25, jax.random.key(0))} if mod == "dropout" else {}

    def gradient(implementation: str, dtype: str, jit: Callable[[Callable], Callable] = jax.jit) -> jax.Array:
        def loss(slopes: jax.Array) -> jax.Array:
            score_mod = MODS[mod](slopes, (distance + FAR).astype(jnp.float32))
            inputs = (x.astype(dtype) for x in (query, key, value))
            attend = flexjax.flex_attention
            out = attend(*inputs, score_mod=score_mod, implementation=implementation, **dropout)
            return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum()

        return jit(jax.grad(loss))(slopes)

    got, want = gradient(implementation, "bfloat16", jit), gradient("reference", "float32")
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3 * float(jnp.linalg.norm(want)))
