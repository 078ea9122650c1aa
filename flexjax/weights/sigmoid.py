"""Sigmoid attention: each key counts by itself, whatever the others are."""

import jax
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import head_value
from flexjax.mod_tools.factory_arguments import finite_number, float_array
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def sigmoid(bias: ArrayLike) -> ScoreMod:
    """1 / (1 + exp(-(s + bias[h])))

    bias:  number, or floating `[]` or `[N]`, differentiable. -log(n) for n keys makes rows add up to about 1.
    A call of other sizes raises ValueError. Source: Ramapuram et al., "Theory, Analysis, and Best Practices for
    Sigmoid Self-Attention", arXiv:2409.04431.
    """
    advice = "Pass -math.log(n) for n keys."
    number = isinstance(bias, int | float)
    added = finite_number("sigmoid", "bias", bias, advice) if number else None
    logits = added if added is not None else float_array("sigmoid", "bias", bias, {0: "[]", 1: "[N]"}, advice)

    @named("sigmoid", *of_array("bias", logits, "N"))
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jax.nn.sigmoid(score + head_value(logits, h, score))

    return weights
