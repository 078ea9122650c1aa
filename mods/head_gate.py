"""A learned factor for the scores of each head, which decides how sharply the head attends."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.factory_arguments import float_array
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def head_gate(gate: ArrayLike) -> ScoreMod:
    """score * sigmoid(gate[h])

    gate:  floating `[N]`, or `[B, N]`: one logit per query head. Differentiable.
    A call of other sizes raises ValueError. Source: the learnable biases of the PyTorch FlexAttention examples.
    """
    advice = "Pass one logit per query head."
    logits = float_array("head_gate", "gate", gate, {1: "[N]", 2: "[B, N]"}, advice)
    factor = jax.nn.sigmoid(logits.astype(jnp.float32) if logits.dtype.itemsize < 4 else logits)

    @named("head_gate", *of_array("gate", logits, "BN"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score * batched_value_at(factor, b, h).astype(score.dtype)

    return score_mod
