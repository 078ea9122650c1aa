"""Penalties that grow with the distance of query and key."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import positive_number_or_vector
from flexjax.mod_tools.signatures import ScoreMod, named


def distance_penalty(slopes: ArrayLike) -> ScoreMod:
    """score - slopes[h] * abs(q_idx - kv_idx)

    slopes:  positive number, or floating `[]` or `[N]`, one per query head.  Differentiable.

    Sizes are not checked against those of the call: an index past the end of `slopes` reads the last element.

    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409; its slopes are those of `alibi`.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    advice = "Pass how much a step of distance takes off, for all heads or for each."
    per_head = positive_number_or_vector("distance_penalty", "slopes", slopes, advice)

    @named("distance_penalty")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score minus the slope of the head times the distance."""
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - head_value(per_head, h, score) * distance

    return score_mod


def log_distance_penalty(height: ArrayLike, rate: ArrayLike) -> ScoreMod:
    """score - height[h] * log(1 + rate[h] * abs(q_idx - kv_idx))

    height, rate:  positive numbers, or floating `[]` or `[N]`, one per query head.  Differentiable; keep them
                   positive while learning, for example as `jax.nn.softplus` of free parameters.

    The penalty grows ever more slowly, so distant keys keep some weight.

    Sizes are not checked against those of the call: an index past the end of an array reads the last element.

    Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
    arXiv:2205.09921, its logarithmic variant.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    call = "log_distance_penalty"
    heights = positive_number_or_vector(call, "height", height, "Pass the factor of the logarithm.")
    rates = positive_number_or_vector(call, "rate", rate, "Pass the factor of the distance.")

    @named(call)
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score minus the logarithmic penalty of the distance."""
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - head_value(heights, h, score) * jnp.log1p(head_value(rates, h, score) * distance)

    return score_mod
