"""Keys stored as float8 with a scale a token, undone inside the attention by a score mod.

python examples/fp8_keys.py

A cache of float8 keys takes half the memory of bfloat16. Each key is divided by its largest number before it is rounded, and
`mods.key_scales` multiplies the scores by those numbers: an operation on the score, so it fuses.
"""

import jax
import jax.numpy as jnp

import flexjax
from flexjax import masks, mods


def main(length: int = 1024, heads: int = 4, dim: int = 64) -> dict[str, float]:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, heads, dim))
    k = k * jnp.exp(2 * jax.random.normal(jax.random.key(1), (1, length, heads, 1)))  # keys of very different sizes
    largest = jnp.max(jnp.abs(k), axis=-1)  # [1, length, heads]
    top = float(jnp.finfo(jnp.float8_e4m3fn).max)
    scales = largest / top
    stored = (k / scales[..., None]).astype(jnp.float8_e4m3fn)

    @jax.jit
    def attend(stored: jax.Array, scales: jax.Array) -> jax.Array:
        score_mod = mods.key_scales(scales.swapaxes(1, 2))  # [1, heads, length]
        return flexjax.flex_attention(
            q / dim, stored.astype(q.dtype), v, score_mod=score_mod, mask_mod=masks.causal, scale=1.0
        )

    out = attend(stored, scales)
    exact = flexjax.flex_attention(q / dim, k, v, mask_mod=masks.causal, scale=1.0)
    unscaled = flexjax.flex_attention(
        q / dim, jnp.clip(k, -top, top).astype(jnp.float8_e4m3fn).astype(q.dtype), v, mask_mod=masks.causal, scale=1.0
    )
    error = lambda x: float(jnp.abs(x - exact).mean() / jnp.abs(exact).mean())
    print(f"{stored.nbytes + scales.nbytes:,} bytes for keys of {k.nbytes // 2:,} in bfloat16")
    print(f"mean error relative to exact keys: {error(out):.4f} with scales, {error(unscaled):.4f} without")
    return {
        "error": error(out),
        "unscaled": error(unscaled),
        "share": (stored.nbytes + scales.nbytes) / (k.nbytes // 2),
    }


if __name__ == "__main__":
    main()
