"""The numerics of flash attention on one tile, shared by the backends.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135) with three rules: a row
without any unmasked entry has output 0 and, without a sink, lse -inf; the sink is one more column without a value; a masked entry
adds exactly 0 to every sum, whatever its score is. Scores are natural: their exponentials are to base e.

Rounded weights: a forward pass that multiplies values by bfloat16 weights exp(score - reference) rounds them. Scaling by a power
of two and rounding commute, so if the references of a row are multiples of ln 2, whichever they are, the backward pass can round its
probabilities to the same weights (`rounded_weights`), and delta = rowsum(dO * O) is the sum of weight times dP along the row.

A row is the scores of one query. The online softmax keeps, for each row, the running maximum and the running sum of
exp(score - maximum) ("total"), and multiplies earlier sums by a factor when the maximum grows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan

Array = jax.Array
LOG2E, LN2 = math.log2(math.e), math.log(2.0)
"""Kernels take exponentials to base 2: scores are multiplied by LOG2E, and a logarithm to base 2 by LN2 gives a natural one."""


def finite_or_zero(maximum: Array) -> Array:
    """The row maximum (or lse), with 0 in place of -inf (no visible entry yet), so that subtracting it from -inf gives no NaN.
    Other numbers, NaN and +inf stay.
    """
    return jnp.where(jnp.isneginf(maximum), jnp.zeros_like(maximum), maximum)


def exact_distance(scores: Array, reference: Array) -> Array:
    """scores - reference (a row maximum or lse, broadcast to the scores), but exactly 0 where the two are equal; NaN where they
    are the same infinity.

    Compilers fuse a product and the subtraction after it into one operation that does not round the product. The difference of
    a score and its own rounded value is then the rounding error: hundreds for scores beyond 1e9, whose exponential is infinite
    or 0. A score below the reference is below it by more than that error, so it needs no correction.
    """
    nothing = reference - reference  # NaN for an infinite one
    return jnp.where(scores == reference, nothing, scores - reference)


def large_distance(program: Program | None, scores: Array, reference: Array) -> Array:
    """scores - reference, for scores that may be large (analysis/large_scores.py).

    program     the score_mod that computed the scores; None: no score_mod
    reference   a row maximum or lse, broadcast to the scores

    Computed by `exact_distance` if the last operation of the program may be a product of large scores, otherwise by a
    plain subtraction, which costs less.
    """
    return exact_distance(scores, reference) if may_be_large_product(program) else scores - reference


distance = jax.custom_jvp(exact_distance)
"""exact_distance with the derivative of scores - reference, for code that JAX differentiates."""


@distance.defjvp
def _distance_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The jvp rule of `distance`: its value, and the tangent of scores minus that of the reference; `primals` and `tangents`
    are (scores, reference).
    """
    return distance(*primals), tangents[0] - tangents[1]


MAX_WHOLE = 2.0**16
"""A score of at least this magnitude is its own reference, because float32 may not hold a multiple of ln 2 close to it."""


def whole_power(score: Array) -> Array:
    """The reference that the exponentials of a row are relative to, elementwise from the row's largest score: the
    smallest multiple of ln 2 that is not below it, or the score itself if its magnitude is at least MAX_WHOLE or it is
    -inf.
    """
    return jnp.where(jnp.abs(score) < MAX_WHOLE, jnp.ceil(score * LOG2E) * LN2, score)


def round_to(x: Array, dtype: str) -> Array:
    """`x` with its values rounded to those of a floating dtype, still in the dtype of x. A cast to `dtype` and back
    would not do, because XLA may drop such a pair.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def out_and_rounding(out: Array, plan: KernelPlan) -> tuple[Array, Array | None]:
    """The fields `out` and `rounding` of Results: (out in the plan's output dtype, what that rounding took away).

    out   in the score dtype, before rounding

    The second is out minus the rounded out, in the output dtype too; None where the plan does not return it.
    """
    if not plan.returns_rounding:
        return out.astype(plan.out_dtype), None
    rounded = round_to(out, plan.out_dtype)
    return rounded.astype(plan.out_dtype), (out - rounded).astype(plan.out_dtype)


def rounded_up(vector: jax.Array) -> jax.Array:
    """A vector over the rows of a tile, [rows] float32, rounded up to integers; infinities stay."""
    small = jnp.abs(vector) < 2.0**23  # others are integers already
    whole = jnp.where(small, vector.astype(jnp.int32).astype(jnp.float32), vector)
    return jnp.where(whole < vector, whole + 1.0, whole)


def power_below(power: Array, whole: Array) -> Array:
    """power - whole, clipped to -1 .. 0, where `whole` is `power` rounded up to an integer; 0 where `power` is infinite or NaN.

    The difference is clipped because a compiler may fuse a product in `power` with the subtraction. Beside a score of -1e10 the
    difference would then be what rounding took from that product, up to 512, and 2 to that power infinite. The clipped
    difference is as good, because any integer will do as the reference of weights that both passes round alike.
    """
    return jnp.where(jnp.abs(power) < jnp.inf, jnp.clip(power - whole, -1.0, 0.0), 0.0)


def rounded_weights(weights: Array, lse2: Array, dtype: str) -> Array:
    """The weights with the rounding that the forward pass gave them, if its softmax references were multiples of ln 2
    (`whole_power`).

    weights   float32, probabilities times the dropout multiplier
    lse2      lse in base 2, broadcastable to the weights; rows where it is infinite must have weights 0
    dtype     name of the dtype to which the forward pass rounded; the result stays in the dtype of the weights
    """
    fraction = power_below(lse2, jnp.ceil(lse2))
    return round_to(weights * jnp.exp2(fraction), dtype) * jnp.exp2(-fraction)


def online_step(
    maximum: Array, total: Array, scores: Array, whole_powers: bool = False
) -> tuple[Array, Array, Array, Array]:
    """One step of the online softmax: (new maximum, new total, factor for the earlier sums, exp(score - new maximum)).

    maximum, total   [..., 1]: row maximum and row sum before this tile; -inf and 0 before the first
    scores           [..., keys], -inf where masked
    whole_powers     the maximum becomes a multiple of ln 2 (`whole_power`)

    The factor is exp(maximum - new maximum); the caller multiplies what it has accumulated by it. In a row without a visible
    entry the new maximum stays -inf, and the factor and the exponentials are 0.
    """
    largest = scores.max(-1, keepdims=True)
    new = jnp.maximum(maximum, whole_power(largest) if whole_powers else largest)
    base = finite_or_zero(new)
    factor = jnp.exp(maximum - base)
    exponentials = jnp.exp(distance(scores, base))
    return new, total * factor + exponentials.sum(-1, keepdims=True), factor, exponentials


def finalise(maximum: Array, total: Array, accumulated: Array, sinks: Array | None) -> tuple[Array, Array]:
    """(output, lse) of rows after the last tile: accumulated / total, and the logarithm of the softmax denominator, which
    includes the sink. A row without any visible entry has output 0, and its lse is the sink, -inf without one.

    maximum, total   [..., 1]: row maximum, and sum of exp(score - maximum)
    accumulated      [..., E]: sum of exp(score - maximum) * value, with the dropout multiplier of each entry
    sinks            logits that broadcast to maximum, or None

    output is [..., E], lse [..., 1].
    """
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
    """exp(scores - lse), elementwise. An lse of -inf counts as 0, so that a row whose scores are all -inf gets 0 instead of NaN.

    scores   -inf where masked
    lse      broadcastable to the scores
    """
    return jnp.exp(distance(scores, finite_or_zero(lse)))
