"""The numerics of flash attention on one tile, written once.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135) with three rules kept
everywhere: a row in which nothing is on has output 0 and lse -inf; the sink is one more column without a value; a masked
entry contributes exactly 0 to every sum, whatever its score was.
"""

import jax
import jax.numpy as jnp

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.ir.program import Program

Array = jax.Array


def finite_or_zero(maximum: Array) -> Array:
    """The row maximum as something that may be subtracted: 0 where the row is empty so far."""
    return jnp.where(jnp.isneginf(maximum), jnp.zeros_like(maximum), maximum)


def exact_distance(scores: Array, reference: Array) -> Array:
    """scores - reference, and 0 where they are equal, even where a compiler computes the score anew and does not round it.

    A score that ends in a product is such a case: compilers merge the product with the subtraction. Beyond 1e9 what the rounding
    took off is hundreds, and its exponential infinite or 0. Where a score is less, it is less by more than was taken off.
    """
    nothing = reference - reference  # NaN for an infinite one
    return jnp.where(scores == reference, nothing, scores - reference)


def large_distance(program: Program | None, scores: Array, reference: Array) -> Array:
    """scores - reference in a kernel, of scores of `program` that may be far out (analysis/large_scores.py)."""
    return exact_distance(scores, reference) if may_be_large_product(program) else scores - reference


distance = jax.custom_jvp(exact_distance)
"""exact_distance, with the derivative of the difference."""


@distance.defjvp
def _distance_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return distance(*primals), tangents[0] - tangents[1]


def online_step(maximum: Array, total: Array, scores: Array) -> tuple[Array, Array, Array, Array]:
    """(new maximum, new total, factor for what was accumulated, exponentials) of one more tile of scores.

    maximum, total [..., 1], scores [..., keys]; -inf where masked.
    """
    new = jnp.maximum(maximum, scores.max(-1, keepdims=True))
    base = finite_or_zero(new)
    factor = jnp.exp(maximum - base)
    exponentials = jnp.exp(distance(scores, base))
    return new, total * factor + exponentials.sum(-1, keepdims=True), factor, exponentials


def finalise(maximum: Array, total: Array, accumulated: Array, sinks: Array | None) -> tuple[Array, Array]:
    """(output, lse) of a row: accumulated / total, and the logarithm of the denominator, the sink included."""
    if sinks is not None:
        new = jnp.maximum(maximum, sinks)
        factor = jnp.exp(maximum - finite_or_zero(new))
        total = total * factor + jnp.exp(sinks - finite_or_zero(new))
        accumulated, maximum = accumulated * factor, new
    empty = total == 0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    out = jnp.where(empty, jnp.zeros_like(accumulated), accumulated / safe)
    lse = jnp.where(empty, jnp.full_like(total, -jnp.inf), finite_or_zero(maximum) + jnp.log(safe))
    return out, lse


def probabilities(scores: Array, lse: Array) -> Array:
    """exp(scores - lse), 0 in empty rows; scores are -inf where masked."""
    return jnp.exp(distance(scores, finite_or_zero(lse)))
