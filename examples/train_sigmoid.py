"""Sigmoid attention (Ramapuram et al., arXiv:2409.04431) beside softmax: two language models, the same text, the same steps.

python examples/train_sigmoid.py              # a minute on two cores; needs matplotlib for the picture

Each key has a weight of its own, `sigmoid(score + bias[h])`; rows need not add up to 1. The bias of each head begins at -log(length)
and is learned. Both models have ALiBi, as in the paper.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import small_training as small

import flexjax
from flexjax import masks, mods, weights

HEADS = 4
ALIBI = mods.alibi(HEADS)


def softmax(params: small.Params) -> small.Attend:
    return lambda q, k, v: flexjax.flex_attention(q, k, v, score_mod=ALIBI, mask_mod=masks.causal)


def sigmoid(params: small.Params) -> small.Attend:
    function = weights.sigmoid(params["bias"])
    return lambda q, k, v: flexjax.flex_attention(q, k, v, score_mod=ALIBI, mask_mod=masks.causal, weights=function)


def main(length: int = 256, steps: int = 200, width: int = 64, batch: int = 4, layers: int = 2) -> dict[str, float]:
    tokens = small.text()
    cut = len(tokens) // 10
    unseen = jnp.asarray(next(small.rows(tokens[:cut], 32, length + 1, seed=1)))
    results, curves = {}, {}
    for name, make in {"softmax": softmax, "sigmoid": sigmoid}.items():
        loss = lambda params, rows, make=make: jnp.mean(small.nats(params["model"], rows, make(params)))
        params = {
            "model": small.language_model(jax.random.key(0), layers, width, HEADS),
            "bias": jnp.full(HEADS, -math.log(length)),
        }
        params, losses = small.train(params, loss, small.rows(tokens[cut:], batch, length + 1), steps)
        results |= {"first": losses[0], name: float(jax.jit(loss)(params, unseen))}
        curves[name] = np.convolve(losses, np.ones(min(16, steps)) / min(16, steps), "valid")
        print(f"{name}: {results[name]:.3f} nats a byte on unseen text after {steps} steps")
    moved = params["bias"] + math.log(length)
    print(f"learned biases, less the -{math.log(length):.2f} where they began: {moved.round(2)}")
    small.save(small.curves(curves, "step", "nats a byte"), "train_sigmoid")
    return results | {"last": losses[-1], "moved": float(jnp.abs(moved).max())}


if __name__ == "__main__":
    main()
