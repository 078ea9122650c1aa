"""A flax.nnx transformer whose attention is flexjax: one argument of nnx.MultiHeadAttention.

python examples/train_nnx.py                  # a minute on two cores; needs flax, and matplotlib for the picture
"""

import jax
import jax.numpy as jnp
import small_training as small
from flax import nnx

import flexjax
from flexjax import masks, mods


class Layer(nnx.Module):
    """Pre-norm attention and MLP on [B, T, width]."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        attend = flexjax.nn.attention_fn(mods.alibi(heads), flexjax.and_masks(masks.causal, masks.sliding_window(64)))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, attention_fn=attend, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Bytes to logits."""

    def __init__(self, width: int, heads: int, layers: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(small.VOCABULARY, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.attend(self.norm(x))


def main(length: int = 256, steps: int = 150, width: int = 64, batch: int = 4) -> dict[str, float]:
    graph, params, rest = nnx.split(Model(width, 4, 2, nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(nnx.merge(graph, params, rest)(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    _, losses = small.train(params, loss, small.rows(small.text(), batch, length + 1), steps)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats a byte")
    small.save(small.curves({"loss": losses}, "step", "nats a byte"), "train_nnx")
    return {"first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
