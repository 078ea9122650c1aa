"""Static softmax reference: where the bounds of the scores are known, exponentials need no running maximum.

Softmax does not depend on the number m in p = 2^(s - m). Usually m is the running row maximum, so that no power overflows. Scores
that stay within a known interval, such as those of a soft cap, need none: with m in the middle of the interval no power can
overflow or vanish, and a kernel neither tracks maxima nor rescales its output.

Decided from the plan alone. Nothing here imports Mosaic.
"""

from flexjax.analysis.bounds import bounds
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import KernelPlan

MAX_DISTANCE = 80.0
"""Largest distance of a score from the reference, in powers of two, that needs no running maximum. A sum over 2^20 keys then stays
below 2^100, and its products with values between 2^-46 and 2^27 inside float32."""


def static_reference(plan: KernelPlan) -> float | None:
    """The static softmax reference of a plan: the middle of its score bounds, times log2(e); None for the running
    maximum.

    None where there is no score_mod, where the distance from the middle to a bound exceeds MAX_DISTANCE or is unknown,
    where scores may be too large to scale, where inputs are not bfloat16 (float16 has too short an exponent for the
    probabilities), and where the plan's result includes the row maxima. An integer where both passes round weights alike.
    """
    if plan.score is None or plan.max_scores or plan.float8 or plan.dtype != "bfloat16" or may_be_large(plan.score):
        return None
    ((low, high),) = bounds(plan.score)
    if not (high - low) / 2 * LOG2E <= MAX_DISTANCE:  # also where a bound is infinite or NaN
        return None
    middle = (low + high) / 2 * LOG2E
    return float(round(middle)) if plan.rounds_weights_alike else middle
