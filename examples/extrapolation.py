"""ALiBi against rotary embeddings on sequences longer than those of training (Press et al., arXiv:2108.12409).

python examples/extrapolation.py              # two minutes on two cores; needs matplotlib for the picture

Two models are trained on 96 tokens and read 384. Past the training length the rotary model's loss rises, that of ALiBi does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import masks, mods

HEADS = 4


def rotary(x: jax.Array) -> jax.Array:
    """[B, T, N, D] rotated by position (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


ATTEND: dict[str, small.Attend] = {
    "ALiBi": lambda q, k, v: flexjax.flex_attention(q, k, v, score_mod=mods.alibi(HEADS), mask_mod=masks.causal),
    "rotary": lambda q, k, v: flexjax.flex_attention(rotary(q), rotary(k), v, mask_mod=masks.causal),
}


def main(length: int = 96, longer: int = 384, steps: int = 400, width: int = 64, batch: int = 8) -> dict[str, float]:
    tokens = small.text()
    cut = len(tokens) // 10
    unseen = jnp.asarray(next(small.rows(tokens[:cut], 32, longer + 1, seed=1)))
    results, by_position = {}, {}
    for name, attend in ATTEND.items():
        loss = lambda params, rows, attend=attend: jnp.mean(small.nats(params, rows, attend))
        params = small.language_model(jax.random.key(0), 2, width, HEADS)
        params, _ = small.train(params, loss, small.rows(tokens[cut:], batch, length + 1), steps)
        at = np.asarray(jnp.mean(jax.jit(small.nats, static_argnums=2)(params, unseen, attend), axis=0))
        results[f"{name} inside"] = float(at[length // 2 : length].mean())
        results[f"{name} beyond"] = float(at[length * 2 :].mean())
        by_position[name] = np.convolve(at, np.ones(16) / 16, "valid")
        print(
            f"{name}: {results[f'{name} inside']:.2f} nats a byte inside {length} tokens, {results[f'{name} beyond']:.2f} beyond {2 * length}"
        )
    small.save(small.curves(by_position, "position", "nats a byte on unseen text"), "extrapolation")
    return results


if __name__ == "__main__":
    main()
