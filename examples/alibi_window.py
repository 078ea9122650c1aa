"""ALiBi in a sliding window: a ready-made score mod and mask in one call, whose cost grows with the window alone.

python examples/alibi_window.py
"""

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks, mods


def main(length: int = 4096, window: int = 256) -> dict[str, float]:
    heads, dim = 4, 32
    q, k, v = (jax.random.normal(key, (1, length, heads, dim)) for key in jax.random.split(jax.random.key(0), 3))
    block_mask = flexjax.create_block_mask(masks.sliding_window(window), None, None, length, length)
    attend = jax.jit(
        lambda q, k, v: flexjax.flex_attention(q, k, v, score_mod=mods.alibi(heads), block_mask=block_mask)
    )
    out = attend(q, k, v)

    # The formula written out for the last query: its `window` keys, each penalised by its distance.
    near = slice(length - window, length)
    distance = jnp.arange(window)[::-1]
    scores = jnp.einsum("hd,khd->hk", q[0, -1], k[0, near]) / dim**0.5
    probs = jax.nn.softmax(scores - jnp.asarray(mods.alibi_slopes(heads))[:, None] * distance, axis=-1)
    error = float(jnp.abs(out[0, -1] - jnp.einsum("hk,khd->hd", probs, v[0, near])).max())

    sparsity = float(block_mask.sparsity())
    print(f"{length} tokens, window {window}: {sparsity:.1f} % of the blocks are skipped")
    print(f"the last query agrees with the formula written out to {error:.1e}")
    return dict(sparsity=sparsity, error=error)


if __name__ == "__main__":
    main()
