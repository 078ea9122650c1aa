"""Which calls on float8 the kernels for Hopper multiply as float8; for others the same call in bfloat16 is asked for
(rewrites/float8.py, from passes/dispatch.py).

Nothing here imports Mosaic.
"""

from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.forward.hopper_float8_tiles import FLOAT8_COLUMNS
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan
from flexjax.rewrites.float8 import in_16_bits

SMALL_DIM = 64  # the largest head dim at which bfloat16 is as fast
OUT_COLUMNS = 64
"""Columns of the part of an output that leaves in one copy, of which the tiles of the output have whole parts."""


def refuses(plan: KernelPlan) -> str | None:
    """Why the kernel for Hopper does not multiply the float8 operands of a plan, in a sentence; None if it does."""
    if choose_kernel.decode_kernel(in_16_bits(plan)) is not None:
        return f"The decode kernel, for few queries, does not multiply {FLOAT8}."
    dims = plan.head_dim + plan.extra_dim, plan.value_dim
    if max(dims) <= SMALL_DIM:
        return f"At head dims up to {SMALL_DIM} products of {FLOAT8} are not faster than those of bfloat16."
    if ctas_of(plan) > 1:
        return f"Head dims {plan.head_dim} and {plan.value_dim} take two CTAs, which do not multiply {FLOAT8}."
    if plan.value_dim > FLOAT8_COLUMNS and plan.value_dim % OUT_COLUMNS:
        return (
            f"The head dim of value is {plan.value_dim}; above {FLOAT8_COLUMNS} the products of "
            f"{FLOAT8} take multiples of {OUT_COLUMNS}."
        )
    if plan.dropout is not None and not plan.factor_is_uniform:
        return f"Scales of blocks of values would multiply softmax weights before these are rounded to {FLOAT8}."
    if plan.max_scores:
        return f"The kernel that multiplies {FLOAT8} does not return max_scores."
    return None
