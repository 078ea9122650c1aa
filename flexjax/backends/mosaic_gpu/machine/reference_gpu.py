"""The GPU that the choice of kernels and tiles assumes, whatever GPU runs them, and how well a call fills it."""

from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

REFERENCE_SMS = 132
"""SMs that the heuristics assume: kernel and tile follow from the plan alone, so every GPU gives the same bits."""


def utilization(plan: KernelPlan, rows: int) -> float:
    """The share, 0 to 1, of the time of REFERENCE_SMS SMs that goes to real queries in a kernel with one CTA an SM."""
    tiles = cdiv(plan.q_len, rows)
    items = plan.batch * plan.q_heads * tiles
    waves = cdiv(items, REFERENCE_SMS)
    return items / max(1, waves * REFERENCE_SMS) * plan.q_len / max(1, rows * tiles)
