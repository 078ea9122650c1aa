"""When the forward kernel on tcgen05 runs, and which blocks of a mask it visits.

All else of such a call, the backward pass and calls of few queries, runs the kernels on mma.sync, which the same cards have;
sm80_support.py says what both refuse. Nothing here imports Mosaic.
"""

from flexjax.backends.mosaic_gpu.shared_memory import TMEM_LANES
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.types import KernelOptions

CAPABILITIES = ("10.0", "10.3")
"""Compute capabilities with tcgen05."""


def asked_for(options: KernelOptions) -> bool:
    """Whether the options ask for the forward kernel on tcgen05."""
    return options.instruction == "tcgen05"


def forward_blocks(plan: KernelPlan, block_q: int, block_kv: int) -> tuple[int, int]:
    """(queries, keys) of the mask blocks that the forward kernel visits, for a plan whose blocks would be block_q x block_kv otherwise.

    Query tiles of a CTA must divide a block, so a block has 128 queries or, where a CTA has two query tiles, 256. Blocks of a mask from
    user lists stay at 128, because larger ones would look up the class of the old block for each entry. Plans that do not ask for
    tcgen05 keep their blocks.
    """
    if not asked_for(plan.options):
        return block_q, block_kv
    origin, options = plan.origin, plan.options
    queries = 2 * TMEM_LANES
    one_tile = plan.q_len <= TMEM_LANES or (plan.blocks is not None and plan.blocks.from_user_lists)
    if origin is not None and origin.query_runs > 1 and origin.query_run % queries:
        one_tile = True
    if (one_tile and options.block_q is None) or options.block_q == TMEM_LANES:
        queries = TMEM_LANES
    return (block_q if block_q % queries == 0 else queries), block_kv
