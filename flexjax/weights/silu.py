"""The weights of HSTU: the SiLU of the score, without normalisation."""

import jax
from jax import Array

from flexjax.mod_tools.factory_arguments import positive_number
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def silu(n: float) -> ScoreMod:
    """s * sigmoid(s) / n

    n:  finite number above 0: HSTU's largest number of tokens. For a number of each row, such as the length of its
    document, write the function: `jax.nn.silu(s) / length[b, q_idx]`.
    Source: Zhai et al., "Actions Speak Louder than Words", arXiv:2402.17152 (HSTU).
    """
    divisor = positive_number("silu", "n", n, "Pass the largest number of tokens.")

    @named("silu")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return jax.nn.silu(score) * (1 / divisor)

    return weights
