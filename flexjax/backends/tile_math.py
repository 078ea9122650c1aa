"""The numerics of flash attention on one tile, shared by the backends.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135) with three rules: a
row without any unmasked entry has output 0 and, without a sink, lse -inf; the sink is one more column without a value;
a masked entry adds exactly 0 to every sum, whatever its score is. Scores are natural: their exponentials are to base e.
For each row (the scores of one query) the online softmax keeps the running maximum and the running sum of exp(score -
maximum) ("total").

Rounded weights: a forward pass that multiplies values by bfloat16 weights exp(score - reference) rounds them. Scaling
by a power of two and rounding commute. If the references of a row are multiples of ln 2, whichever they are, the
backward pass can thus round its probabilities to the same weights (`rounded_weights`), and delta = rowsum(dO * O) is
the sum of weight times dP along the row.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan

Array = jax.Array
# Kernels take exponentials to base 2: scores are multiplied by LOG2E, and a logarithm to base 2 by LN2.
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def finite_or_zero(maximum: Array) -> Array:
    """0 in place of -inf (no visible entry yet), so that subtracting it from -inf gives no NaN."""
    return jnp.where(jnp.isneginf(maximum), jnp.zeros_like(maximum), maximum)


def exact_distance(scores: Array, reference: Array) -> Array:
    """scores - reference (a row maximum or lse), exactly 0 where they are equal; NaN for the same infinity."""
    # A compiler may fuse a product with the subtraction after it, without rounding the product. The difference of a
    # score and its own rounded value is then the rounding error: hundreds for scores beyond 1e9, whose exponential is
    # infinite or 0. A score below the reference is below it by more than that error.
    nothing = reference - reference  # NaN for an infinite one
    return jnp.where(scores == reference, nothing, scores - reference)


def large_distance(program: Program | None, scores: Array, reference: Array) -> Array:
    """scores - reference for scores of `program` that may be large; a plain subtraction costs less."""
    return exact_distance(scores, reference) if may_be_large_product(program) else scores - reference


# exact_distance with the derivative of scores - reference, for code that JAX differentiates.
distance = jax.custom_jvp(exact_distance)


@distance.defjvp
def _distance_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return distance(*primals), tangents[0] - tangents[1]


# A score of at least this magnitude is its own reference, because float32 may not hold a multiple of ln 2 close to it.
MAX_WHOLE = 2.0**16


def whole_power(score: Array) -> Array:
    """The smallest multiple of ln 2 that is not below the score, or a score of MAX_WHOLE or more, or -inf, itself."""
    return jnp.where(jnp.abs(score) < MAX_WHOLE, jnp.ceil(score * LOG2E) * LN2, score)


def round_to(x: Array, dtype: str) -> Array:
    """Rounded to the values of a float dtype, in the dtype of x; XLA may drop a cast and its inverse."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def out_and_rounding(out: Array, plan: KernelPlan) -> tuple[Array, Array | None]:
    """(out in the plan's output dtype, what that rounding took away), from out in the score dtype."""
    if not plan.returns_rounding:
        return out.astype(plan.out_dtype), None
    rounded = round_to(out, plan.out_dtype)
    return rounded.astype(plan.out_dtype), (out - rounded).astype(plan.out_dtype)


def rounded_up(vector: jax.Array) -> jax.Array:
    """[rows] float32, rounded up to integers; infinities stay."""
    small = jnp.abs(vector) < 2.0**23  # others are integers already
    whole = jnp.where(small, vector.astype(jnp.int32).astype(jnp.float32), vector)
    return jnp.where(whole < vector, whole + 1.0, whole)


def power_below(power: Array, whole: Array) -> Array:
    """power - `whole`, its ceiling, clipped to -1 .. 0; 0 where `power` is infinite or NaN."""
    # A compiler may fuse a product in `power` with the subtraction. Beside a score of -1e10 the difference would then
    # be what rounding took from that product, up to 512, and 2 to that power infinite. The clipped difference is as
    # good, because any integer will do as the reference of weights that both passes round alike.
    return jnp.where(jnp.abs(power) < jnp.inf, jnp.clip(power - whole, -1.0, 0.0), 0.0)


def rounded_weights(weights: Array, lse2: Array, dtype: str) -> Array:
    """Float32 weights rounded as in a forward pass whose references are multiples of ln 2 (`whole_power`).

    weights   probabilities times the dropout multiplier; 0 in rows where lse2, the lse in base 2, is infinite
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
    """
    largest = scores.max(-1, keepdims=True)
    new = jnp.maximum(maximum, whole_power(largest) if whole_powers else largest)
    base = finite_or_zero(new)
    factor = jnp.exp(maximum - base)
    exponentials = jnp.exp(distance(scores, base))
    return new, total * factor + exponentials.sum(-1, keepdims=True), factor, exponentials


def finalise(maximum: Array, total: Array, accumulated: Array, sinks: Array | None) -> tuple[Array, Array]:
    """(output [..., E], lse [..., 1]) of rows after the last tile; the softmax denominator includes the sink.

    maximum, total   [..., 1]: row maximum, and sum of exp(score - maximum)
    accumulated      [..., E]: sum of exp(score - maximum) * value, with the dropout multiplier of each entry
    sinks            logits that broadcast to maximum, or None
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
    """exp(scores - lse), elementwise; an lse of -inf counts as 0, so that a row of -inf gets 0 instead of NaN."""
    return jnp.exp(distance(scores, finite_or_zero(lse)))


# ------------------------------------------------------------------- bits

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits by which the rounds of threefry2x32 rotate, for groups of four rounds in turn."""


def threefry2x32(key_0: Array, key_1: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """The two uint32 words of the hash threefry2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011).

    A compiler removes what two uses of one hash have in common.
    """
    words = (key_0, key_1, key_0 ^ key_1 ^ np.uint32(0x1BD11BDA))
    x, y = x + words[0], y + words[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits)))
        x, y = x + words[(group + 1) % 3], y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def in_total_order(x: Array) -> Array:
    """int32 numbers with the total order of the float32 x: its bits, turned over below the sign in negative numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


TOTAL_ORDER = {
    "eq_to": lambda x, y: in_total_order(x) == in_total_order(y),
    "le_to": lambda x, y: in_total_order(x) <= in_total_order(y),
    "lt_to": lambda x, y: in_total_order(x) < in_total_order(y),
}
"""Comparisons of float32 in total order, by operation."""
