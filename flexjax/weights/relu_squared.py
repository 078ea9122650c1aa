"""Squared ReLU weights, which are sparse: a key with a negative score does not count."""

import jax
import jax.numpy as jnp
from jax import Array

from flexjax.mod_tools.factory_arguments import positive_number
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def relu_squared(n: float) -> ScoreMod:
    """max(s, 0) ** 2 / n

    n:  finite number above 0: the number of keys.
    Source: Wortsman et al., "Replacing softmax with ReLU in Vision Transformers", arXiv:2309.08586, for the division;
    squared ReLU weights are those of Hua et al., "Transformer Quality in Linear Time", arXiv:2202.10447.
    """
    divisor = positive_number("relu_squared", "n", n, "Pass the number of keys.")

    @named("relu_squared")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jnp.square(jax.nn.relu(score)) * (1 / divisor)

    return weights
