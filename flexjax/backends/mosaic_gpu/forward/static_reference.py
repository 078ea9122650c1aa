"""Static softmax reference: where the bounds of the scores are known, exponentials need no running maximum.

Softmax does not depend on the number m in p = 2^(s - m). Usually m is the running row maximum, so that no power
overflows. Scores within a known interval, such as those of a soft cap, need none: with m in the middle of the interval
no power overflows or vanishes, and a kernel neither tracks maxima nor rescales its output. Nothing here imports Mosaic.
"""

from flexjax.analysis.bounds import bounds
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import KernelPlan

MAX_DISTANCE = 80.0
"""Largest distance of a score from the reference, in powers of two, that needs no running maximum."""


def static_reference(plan: KernelPlan) -> float | None:
    """The middle of the plan's score bounds, times log2(e); None where a running maximum is needed."""
    # float16 has too short an exponent for the probabilities.
    if (
        plan.score is None
        or (plan.max_scores and not plan.options.invariant)
        or plan.float8
        or plan.dtype != "bfloat16"
        or may_be_large(plan.score)
    ):
        return None
    (low, high), *_ = bounds(plan.score)
    if not (high - low) / 2 * LOG2E <= MAX_DISTANCE:  # also where a bound is infinite or NaN
        return None
    middle = (low + high) / 2 * LOG2E
    return float(round(middle)) if plan.whole_references else middle
