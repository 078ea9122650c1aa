"""Attention with linear biases (ALiBi): the score falls linearly with distance, by a slope for each head."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.made_for import Size
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named
from flexjax.mods.distance import distance_penalty


@without_frames
def alibi_slopes(num_heads: int) -> np.ndarray:
    """slopes[i] = 2 ** (-8 * (i + 1) / n)   if `num_heads = n` is a power of two

    num_heads:  int of at least 1: number of query heads.
    float32. Otherwise the slopes of the nearest smaller power of two `n`, then every other slope of `2 * n`.
    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409, and its code. Raises ValueError for other numbers.
    """
    heads = integer("alibi_slopes", "num_heads", num_heads, 1, "Pass the number of query heads.")
    power = 1 << (heads.bit_length() - 1)
    between = _geometric(2 * power)[0::2][: heads - power]
    return np.concatenate([_geometric(power), between]).astype(np.float32)


@without_frames
def alibi(num_heads: int) -> ScoreMod:
    """score - slopes[h] * abs(q_idx - kv_idx),  slopes = alibi_slopes(num_heads)

    num_heads:  int of at least 1: number of query heads. For slopes of your own see `distance_penalty`.
    A call of another number of heads raises ValueError. Source: Press et al., arXiv:2108.12409.
    """
    heads = integer("alibi", "num_heads", num_heads, 1, "Pass the number of query heads.")
    penalty = distance_penalty(jnp.asarray(alibi_slopes(heads), jnp.float32))

    @named(f"alibi_{heads}", Size("heads", heads, heads, "`num_heads`"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return penalty(score, b, h, q_idx, kv_idx)

    return score_mod


def _geometric(heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
