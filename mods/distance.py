"""Penalties that grow with the distance of query and key."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.masks.mask_mod import named
from flexjax.mods.check_arguments import positive_of_head
from flexjax.mods.score_mod import ScoreMod, of_head


def distance_penalty(slopes: ArrayLike) -> ScoreMod:
    """score - slopes[h] * abs(q_idx - kv_idx)

    slopes:  positive number, or floating `[]` or `[N]`, one per query head.  Differentiable.

    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409; its slopes are those of `alibi`.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    advice = "Pass how much a step of distance takes off, for all heads or for each."
    per_head = positive_of_head("distance_penalty", "slopes", slopes, advice)

    @named("distance_penalty")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - of_head(per_head, h, score) * distance

    return score_mod


def log_distance_penalty(height: ArrayLike, rate: ArrayLike) -> ScoreMod:
    """score - height[h] * log(1 + rate[h] * abs(q_idx - kv_idx))

    height, rate:  positive numbers, or floating `[]` or `[N]`, one per query head.  Differentiable; keep them
                   positive while learning, for example as `jax.nn.softplus` of free parameters.

    Grows ever more slowly, so far keys stay in reach.

    Source: Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
    arXiv:2205.09921, its logarithmic variant.

    Raises ValueError if a number is not positive, or an array is not floating or has more than one axis.
    """
    call = "log_distance_penalty"
    heights = positive_of_head(call, "height", height, "Pass the factor of the logarithm.")
    rates = positive_of_head(call, "rate", rate, "Pass the factor of the distance.")

    @named(call)
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - of_head(heights, h, score) * jnp.log1p(of_head(rates, h, score) * distance)

    return score_mod
