"""What exponentials may be relative to without following the scores: known from the plan, before any kernel is built.

No Mosaic here: tiles.py asks too, where there is no GPU and an older jax.
"""

import math

from flexjax.analysis.bounds import bounds
from flexjax.analysis.large_scores import may_be_large
from flexjax.plan.kernel_plan import KernelPlan

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
WIDEST = 80.0
"""Largest power of two of a score, either way, that needs no running maximum. A sum over 2^20 keys stays below 2^100, and its
products with values between 2^-46 and 2^27 inside float32."""


def fixed_reference(plan: KernelPlan) -> float | None:
    """The middle of the scores, in powers of two, where no score is too far from it for a sum without a maximum.

    float16 has too short an exponent for that.
    """
    if plan.score is None or plan.max_scores or plan.dtype != "bfloat16" or may_be_large(plan.score):
        return None
    ((low, high),) = bounds(plan.score)
    if not (high - low) / 2 * LOG2E <= WIDEST:  # infinite or unknown too
        return None
    return (low + high) / 2 * LOG2E
