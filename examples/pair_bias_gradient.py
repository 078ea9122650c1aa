"""Attention with a pair bias, as in AlphaFold's row attention, and the gradient of the pair representation.

    score[b, h, q, kv] + bias[h, q, kv],   bias[h, q, kv] = <pair[q, kv], w[h]>

The bias is an array that `score_mod` captures.  JAX differentiates through the captured array to the pair
representation and the weights; no probability matrix is stored.

python examples/pair_bias_gradient.py
"""

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks


def attend(q: jax.Array, k: jax.Array, v: jax.Array, pair: jax.Array, w: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention with the bias, [B, T, N, D].

    q, k, v [B, T, N, D]; pair [T, T, C]; w [C, N]; lengths [B]: residues from there on are padding.
    """
    bias = jnp.einsum("qkc,cn->nqk", pair, w)

    def add_bias(score, b, h, q, kv):
        return score + bias[h, q, kv]

    return flexjax.flex_attention(q, k, v, score_mod=add_bias, mask_mod=masks.padding(lengths))


def attend_dense(
    q: jax.Array, k: jax.Array, v: jax.Array, pair: jax.Array, w: jax.Array, lengths: jax.Array
) -> jax.Array:
    """`attend` with the whole score matrix in memory."""
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5 + jnp.einsum("qkc,cn->nqk", pair, w)
    inside = jnp.arange(k.shape[1]) < lengths[:, None]
    probs = jax.nn.softmax(jnp.where(inside[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknd->bqnd", probs, v)


def main(length: int = 200) -> dict[str, float]:
    B, N, D, C = 2, 4, 16, 8
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (B, length, N, D)) for key in keys[:3])
    pair, w = jax.random.normal(keys[3], (length, length, C)), jax.random.normal(keys[4], (C, N))
    lengths = jnp.array([length, length * 3 // 5])

    def gradients_of(attention):
        loss = lambda pair, w, q, k, v: jnp.sum(attention(q, k, v, pair, w, lengths) ** 2)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(pair, w, q, k, v)

    gradients = [gradients_of(f) for f in (attend, attend_dense)]
    errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*gradients, strict=True)]
    print(f"gradient of the pair representation {pair.shape}: relative error {errors[0]:.1e} to dense attention")
    print(f"gradient of the weights {w.shape}: relative error {errors[1]:.1e}")
    return dict(pair=errors[0], weights=errors[1])


if __name__ == "__main__":
    main()
