"""Attention with linear biases (ALiBi): the score falls linearly with distance, by a slope for each head."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import ScoreMod, named
from flexjax.mods.distance import distance_penalty


def alibi_slopes(num_heads: int) -> np.ndarray:
    """slopes[i] = 2 ** (-8 * (i + 1) / n)   if `num_heads = n` is a power of two

    num_heads:  int of at least 1: number of query heads.

    Otherwise the slopes of the nearest smaller power of two `n`, followed by every other slope of `2 * n`,
    the first, third and so on, as many as are missing.  float32 `[num_heads]`.

    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409, section 3; the rule for other numbers of
    heads is that of the authors' code.

    Raises ValueError if `num_heads` is less than 1 or not an int.
    """
    heads = integer("alibi_slopes", "num_heads", num_heads, 1, "Pass the number of query heads.")
    power = 1 << (heads.bit_length() - 1)
    between = _geometric(2 * power)[0::2][: heads - power]
    return np.concatenate([_geometric(power), between]).astype(np.float32)


def alibi(num_heads: int) -> ScoreMod:
    """score - slopes[h] * abs(q_idx - kv_idx),  slopes = alibi_slopes(num_heads)

    num_heads:  int of at least 1: number of query heads.

    The score falls with distance, slowly in some heads and fast in others.  Under `masks.causal` this is the
    formula of the paper; without it, later keys are penalised as earlier ones are.  For slopes of your own,
    or learned ones, see `distance_penalty`.

    `num_heads` is not checked against the call: heads past it have the last slope.

    Source: Press et al., "Train Short, Test Long", arXiv:2108.12409.

    Raises ValueError if `num_heads` is less than 1 or not an int.
    """
    heads = integer("alibi", "num_heads", num_heads, 1, "Pass the number of query heads.")
    penalty = distance_penalty(jnp.asarray(alibi_slopes(heads), jnp.float32))

    @named(f"alibi_{heads}")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score minus the slope of the head times the distance."""
        return penalty(score, b, h, q_idx, kv_idx)

    return score_mod


def _geometric(heads: int) -> np.ndarray:
    """The slopes `2 ** (-8 * (i + 1) / heads)` for `i` in `0 .. heads - 1`: float64 `[heads]`."""
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
