"""A language model with a long context: every layer sees a sliding window, so work grows with the length, not its square.

python examples/long_context_window.py        # two minutes on two cores; needs matplotlib for the picture

The first four tokens stay visible to all (attention sinks, Xiao et al., arXiv:2309.17453), and learned sink logits let a head
attend to nothing.
"""

import jax
import jax.numpy as jnp
import small_training as small

import flexjax
from flexjax import masks, mods


def main(length: int = 2048, window: int = 128, steps: int = 60, width: int = 64, batch: int = 1) -> dict[str, float]:
    heads = 4
    block_mask = flexjax.create_block_mask(masks.streaming(4, window), None, None, length, length)

    def loss(params: small.Params, tokens: jax.Array) -> jax.Array:
        attend = lambda q, k, v: flexjax.flex_attention(
            q, k, v, score_mod=mods.alibi(heads), block_mask=block_mask, sinks=params["sinks"]
        )
        return jnp.mean(small.nats(params["model"], tokens, attend))

    params = {"model": small.language_model(jax.random.key(0), 2, width, heads), "sinks": jnp.zeros(heads)}
    params, losses = small.train(params, loss, small.rows(small.text(), batch, length + 1), steps)
    sparsity = float(block_mask.sparsity())
    print(f"{length} tokens, window {window}: {sparsity:.0f} % of the blocks are skipped")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte; learned sinks {params['sinks'].round(2)}")
    small.save(flexjax.visualize.mask(masks.streaming(4, window), length, length), "long_context_window")
    return {
        "first": losses[0],
        "last": losses[-1],
        "sparsity": sparsity,
        "sinks": float(jnp.abs(params["sinks"]).max()),
    }


if __name__ == "__main__":
    main()
