"""When the kernels on tcgen05 run, and which blocks of a mask they visit.

The rest of a call with `instruction="tcgen05"` runs on mma.sync, which the same cards have: calls of few queries, the backward pass of large head
dims (backward_sm100_tiles.py), and gradients of captured arrays, except those that the dQ kernel on tcgen05 writes itself (pair_bias.py).
sm80_support.py says what both refuse. Nothing here imports Mosaic.
"""

from flexjax.backends.mosaic_gpu.backward_sm100_tiles import (
    LARGEST_DIM,
    PAIR,
    TILE,
    Tcgen05Tiles,
    backward_tiles,
    in_pairs,
)
from flexjax.backends.mosaic_gpu.backward_tiles import padded_dims
from flexjax.backends.mosaic_gpu.shared_memory import TMEM_LANES
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.types import KernelOptions

CAPABILITIES = ("10.0", "10.3")
"""Compute capabilities with tcgen05."""


def asked_for(options: KernelOptions) -> bool:
    """Whether the options ask for the kernels on tcgen05."""
    return options.instruction == "tcgen05"


def backward_kernel(plan: KernelPlan) -> Tcgen05Tiles | None:
    """The sizes of the backward kernel on tcgen05; None where the options do not ask for it, or where mma.sync runs the backward pass.

    plan   with the blocks of `visited_blocks` for the backward pass
    """
    return backward_tiles(plan) if asked_for(plan.options) else None


def visited_blocks(plan: KernelPlan, block_q: int, block_kv: int, backward: bool) -> tuple[int, int]:
    """The sizes (queries, keys) of the mask blocks that the kernels of one pass visit.

    plan                the call
    block_q, block_kv   the sizes that the kernels on mma.sync would visit: multiples of 64, of the block mask or, for a plan with
                        lengths, of the blocks that stand for them
    backward            whether the pass is the backward pass

    A plan whose options do not ask for tcgen05 keeps both sizes. Otherwise:

    forward    block_kv stays. block_q stays if it is a multiple of the queries of a CTA (`_forward_blocks`: 256, or 128 where a CTA has
               one query tile), and is that number if it is not. The same for few queries, although the decode kernel reads the blocks of
               the plan itself
    backward   each size stays if it is a multiple of 128, and is 128 if it is not. For keys both numbers are 256 where CTAs form pairs
               (`in_pairs`) and the block mask does not come from user lists. Both sizes stay for padded head dims above LARGEST_DIM,
               which run on mma.sync
    """
    if not asked_for(plan.options):
        return block_q, block_kv
    if not backward:
        return _forward_blocks(plan, block_q, block_kv)
    if max(padded_dims(plan)) > LARGEST_DIM:
        return block_q, block_kv
    whole_tiles = lambda block, tile: block if block % tile == 0 else tile
    pairs = in_pairs(plan) and not (plan.blocks is not None and plan.blocks.from_user_lists)
    return whole_tiles(block_q, TILE), whole_tiles(block_kv, PAIR * TILE if pairs else TILE)


def _forward_blocks(plan: KernelPlan, block_q: int, block_kv: int) -> tuple[int, int]:
    """`visited_blocks` of the forward pass: block_kv as it is, and block_q as it is if it is a multiple of the queries of a CTA, else
    these.

    A CTA has 256 queries, two query tiles, or 128, one tile, where the options set block_q=128. Where the options set no block_q it has 128
    also for at most 128 queries, for a block mask from user lists, because larger blocks would look up the class of the old block for each
    entry, and for several runs of queries that are no multiples of 256 long.
    """
    origin, options = plan.origin, plan.options
    queries = 2 * TMEM_LANES
    one_tile = plan.q_len <= TMEM_LANES or (plan.blocks is not None and plan.blocks.from_user_lists)
    if origin is not None and origin.query_runs > 1 and origin.query_run % queries:
        one_tile = True
    if (one_tile and options.block_q is None) or options.block_q == TMEM_LANES:
        queries = TMEM_LANES
    return (block_q if block_q % queries == 0 else queries), block_kv
