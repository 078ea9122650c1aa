"""Retention: scores that decay with distance, without a softmax."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import positive_number_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import named
from flexjax.types import Weights
from flexjax.weights.divisors import at_least_one


@without_frames
def retention(decay: ArrayLike) -> Weights:
    """s * decay[h] ** max(q_idx - kv_idx, 0),  out divided by max(abs(total), 1)

    decay:  number above 0, or floating `[]` or `[N]` of numbers above 0, differentiable; below 1, and
    `1 - 2 ** (-5 - h)` in the paper. Use it with a causal mask. A call of other sizes raises ValueError.
    Source: Sun et al., "Retentive Network", arXiv:2307.08621, and its normalisation of retention scores.
    """
    rates = positive_number_or_vector("retention", "decay", decay, "Pass 1 - 2 ** (-5 - h) for head h.")

    @named("retention", *of_array("decay", rates, "N"))
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.maximum(q_idx - kv_idx, 0).astype(score.dtype)
        # a logarithm of each head, and one exponential an entry
        rate = jnp.log(jnp.asarray(head_value(rates, h, score), score.dtype))
        return score * jnp.exp(rate * distance)

    return Weights(weights, at_least_one)
