"""Scores scaled by one factor at even and another at odd distances, like the fields of a checkerboard."""

import jax.numpy as jnp
from jax import Array

from flexjax.mod_tools.factory_arguments import finite_number
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def checkerboard(even: float = 1.0, odd: float = 0.5) -> ScoreMod:
    """score * (even if (q_idx - kv_idx) % 2 == 0 else odd)

    even, odd:  factors for keys at an even or odd distance from the query, easy to see in a picture of the scores.
    Source: the checkerboard of the PyTorch FlexAttention examples. Raises ValueError if either is not a finite number.
    """
    even = finite_number("checkerboard", "even", even, "It is the factor at even distances.")
    odd = finite_number("checkerboard", "odd", odd, "It is the factor at odd distances.")

    @named(f"checkerboard_{even:g}_{odd:g}")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jnp.where((q_idx - kv_idx) % 2 == 0, score * even, score * odd)

    return score_mod
