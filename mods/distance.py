"""Penalties that grow with the distance of query and key."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import positive_number_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def distance_penalty(slopes: ArrayLike) -> ScoreMod:
    """score - slopes[h] * abs(q_idx - kv_idx)

    slopes:  positive number, or floating `[]` or `[N]`. Differentiable. A call of other sizes raises ValueError.
    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409; its slopes are those of `alibi`.
    """
    advice = "Pass how much a step of distance takes off, for all heads or for each."
    per_head = positive_number_or_vector("distance_penalty", "slopes", slopes, advice)

    @named("distance_penalty", *of_array("slopes", per_head, "N"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - head_value(per_head, h, score) * distance

    return score_mod


@without_frames
def log_distance_penalty(height: ArrayLike, rate: ArrayLike) -> ScoreMod:
    """score - height[h] * log(1 + rate[h] * abs(q_idx - kv_idx))

    height, rate:  positive numbers, or floating `[]` or `[N]`. Differentiable; keep them positive.
    A call of other sizes raises ValueError. Source: Chi et al., "KERPLE", arXiv:2205.09921, its logarithmic variant.
    """
    call = "log_distance_penalty"
    heights = positive_number_or_vector(call, "height", height, "Pass the factor of the logarithm.")
    rates = positive_number_or_vector(call, "rate", rate, "Pass the factor of the distance.")

    @named(call, *of_array("height", heights, "N"), *of_array("rate", rates, "N"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = jnp.abs(q_idx - kv_idx).astype(score.dtype)
        return score - head_value(heights, h, score) * jnp.log1p(head_value(rates, h, score) * distance)

    return score_mod
