"""Power attention: an even power of the score, divided by the sum of the row."""

from jax import Array, lax

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import named
from flexjax.types import Weights
from flexjax.weights.divisors import total_itself


@without_frames
def power(p: int) -> Weights:
    """s ** p,  out divided by the total

    p:  even int of at least 2, so that no weight is negative.
    Source: Gelada et al., "Scaling Context Requires Rethinking Attention", arXiv:2507.04239.
    """
    advice = "Pass an even number, so that no weight is negative."
    exponent = integer("power", "p", p, 2, advice)
    if exponent % 2:
        raise ValueError(f"`power`: `p` is {p!r}; expected an even int. {advice}")

    @named(f"power_{exponent}")
    def weights(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return lax.integer_pow(score, exponent)

    return Weights(weights, total_itself)
