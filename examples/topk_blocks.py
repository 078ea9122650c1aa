"""Attention to the top-k blocks of keys, chosen by the data: block lists of a static width, made under jit.

Each block of queries picks the `keep` blocks of keys whose mean key has the largest product with its mean query,
always its own block among them (as MoBA does, Lu et al., arXiv:2502.13189).  The choice is an array, from which
`BlockMask.from_kv_blocks` builds the block mask inside the jitted function.  The width of its lists is static, so
nothing recompiles when the data changes the choice.

python examples/topk_blocks.py
"""

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks


def chosen_blocks(q: jax.Array, k: jax.Array, block: int, keep: int) -> tuple[jax.Array, jax.Array]:
    """How many [B, N, blocks] and which [B, N, blocks, keep] blocks of keys each block of queries reads."""
    B, T, N, D = q.shape
    blocks = T // block
    mean_q, mean_k = (x.reshape(B, blocks, block, N, D).mean(axis=2) for x in (q, k))
    fit = jnp.einsum("bqnd,bknd->bnqk", mean_q, mean_k)
    here, there = jnp.arange(blocks)[:, None], jnp.arange(blocks)[None, :]
    fit = jnp.where(there == here, jnp.inf, jnp.where(there < here, fit, -jnp.inf))
    values, indices = jax.lax.top_k(fit, keep)
    count = jnp.sum(values > -jnp.inf, axis=-1)
    # The first `count` entries are the list, ascending; the entries after it are arbitrary valid blocks.
    order = jnp.sort(jnp.where(values > -jnp.inf, indices, blocks), axis=-1)
    return count.astype(jnp.int32), jnp.minimum(order, blocks - 1).astype(jnp.int32)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, block: int, keep: int) -> jax.Array:
    """Causal attention within the chosen blocks, [B, T, N, D]."""
    count, indices = chosen_blocks(q, k, block, keep)
    length = q.shape[1]
    block_mask = flexjax.BlockMask.from_kv_blocks(
        count, indices, block_size=block, mask_mod=masks.causal, q_len=length, kv_len=length
    )
    return flexjax.flex_attention(q, k, v, block_mask=block_mask)


def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, block: int, keep: int) -> jax.Array:
    """`attend` with the whole score matrix in memory."""
    count, indices = chosen_blocks(q, k, block, keep)
    blocks = q.shape[1] // block
    listed = jnp.arange(indices.shape[-1]) < count[..., None]
    on = jnp.any((indices[..., None] == jnp.arange(blocks)) & listed[..., None], axis=-2)
    on = jnp.repeat(jnp.repeat(on, block, axis=-2), block, axis=-1) & jnp.tri(q.shape[1], dtype=bool)
    scores = jnp.where(on, jnp.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5, -jnp.inf)
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores, axis=-1), v)


def main(length: int = 1024, block: int = 64, keep: int = 4) -> dict[str, float]:
    q, k, v = (jax.random.normal(key, (2, length, 2, 32)) for key in jax.random.split(jax.random.key(0), 3))

    def value_and_gradient(attention):
        total = lambda q, k, v: jnp.sum(attention(q, k, v, block, keep) ** 2)
        return jax.jit(jax.value_and_grad(total, argnums=2))(q, k, v)

    (got, got_gradient), (want, want_gradient) = value_and_gradient(attend), value_and_gradient(attend_dense)
    error = float(jnp.abs(got - want) / jnp.abs(want))
    gradient_error = float(jnp.abs(got_gradient - want_gradient).max() / jnp.abs(want_gradient).max())
    print(f"each of {length // block} query blocks reads at most {keep} key blocks, chosen by the data")
    print(f"relative error to dense attention: {error:.1e}, of the gradient of the values: {gradient_error:.1e}")
    return dict(error=error, slope=gradient_error)


if __name__ == "__main__":
    main()
