"""The training mask of block diffusion language models: a noised copy and a clean copy in one sequence.

Arriola et al., "Block Diffusion", arXiv:2503.09573.  The first half of the sequence is noised, the second is
clean.  A noised block sees itself and the clean blocks before it; a clean block sees the clean blocks up to
itself.  One pass then trains the denoising of every block given all that precedes it.

python examples/block_diffusion.py
"""

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks


def main(length: int = 512, block: int = 32) -> dict[str, float]:
    heads, dim = 4, 32
    q, k, v = (jax.random.normal(key, (1, 2 * length, heads, dim)) for key in jax.random.split(jax.random.key(0), 3))
    block_mask = flexjax.create_block_mask(
        masks.block_diffusion(length, block), None, None, 2 * length, 2 * length, block_size=block
    )
    out = jax.jit(lambda q, k, v: flexjax.flex_attention(q, k, v, block_mask=block_mask))(q, k, v)

    # The formula written out for the third noised block, which sees itself and the clean copies of the first two.
    at = slice(2 * block, 3 * block)
    seen = jnp.r_[2 * block : 3 * block, length : length + 2 * block]
    scores = jnp.einsum("qhd,khd->hqk", q[0, at], k[0, seen]) / dim**0.5
    want = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v[0, seen])
    error = float(jnp.abs(out[0, at] - want).max())

    print(block_mask.to_string())
    sparsity = float(block_mask.sparsity())
    print(f"{sparsity:.1f} % of the blocks are skipped; the third block agrees to {error:.1e}")
    return dict(sparsity=sparsity, error=error)


if __name__ == "__main__":
    main()
