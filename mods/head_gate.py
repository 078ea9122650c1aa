"""A learned factor for the scores of each head, which decides how sharply the head attends."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.factory_arguments import float_array
from flexjax.mod_tools.signatures import ScoreMod, named


def head_gate(gate: ArrayLike) -> ScoreMod:
    """score * sigmoid(gate[h])

    gate:  floating `[N]`, or `[B, N]` if it depends on the input: one logit per query head.  Differentiable.

    A factor `sigmoid(gate[h])` near 0 flattens the head towards an average of what it sees, one near 1 leaves it as
    it is.  To switch a head off instead, scale its output after attention.

    Sizes are not checked against those of the call: an index past the end of `gate` reads the last element.

    Source: the learnable biases of the PyTorch FlexAttention examples; no paper known.

    Raises ValueError if `gate` is not floating or has other than one or two axes.
    """
    advice = "Pass one logit per query head."
    logits = float_array("head_gate", "gate", gate, {1: "[N]", 2: "[B, N]"}, advice)
    factor = jax.nn.sigmoid(logits.astype(jnp.float32) if logits.dtype.itemsize < 4 else logits)

    @named("head_gate")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score times `sigmoid(gate[h])`."""
        return score * batched_value_at(factor, b, h).astype(score.dtype)

    return score_mod
