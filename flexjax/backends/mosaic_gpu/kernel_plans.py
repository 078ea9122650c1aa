"""The plan of a call as the kernels take it, and its operands.

Block masks may have blocks of any size, keys may lie in pages and sequences may have lengths; kernels visit blocks of their own sizes,
with lengths in the block mask. Whatever chooses a tile or runs a kernel first replaces the plan by that of `kernel_plan`.
"""

import dataclasses

from flexjax.backends.mosaic_gpu import choose_kernel, forward_tiles, sm100_support
from flexjax.plan import lengths_as_mask, mask_blocks, pages
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.lengths import where_exists


def kernel_blocks(plan: KernelPlan, backward: bool = False) -> tuple[int, int]:
    """(queries, keys) of the mask blocks that the kernels of a pass (`backward` or forward) visit; (0, 0) for a plan without a block mask.
    For each axis this is the block size of the mask if it is a multiple of 64, otherwise that of `lengths_blocks`; some forward kernels
    (`choose_kernel.forward_blocks`) and the kernels on tcgen05 (`sm100_support.visited_blocks`) take others.
    """
    if plan.blocks is None:
        return 0, 0
    given = (None if backward else choose_kernel.forward_blocks(plan)) or (plan.blocks.block_q, plan.blocks.block_kv)
    block_q, block_kv = (
        block if block % 64 == 0 else other for block, other in zip(given, lengths_blocks(plan, True), strict=True)
    )
    return sm100_support.visited_blocks(plan, block_q, block_kv, backward)


def lengths_blocks(plan: KernelPlan, backward: bool = False) -> tuple[int, int]:
    """(queries, keys) of the blocks of a plan with lengths and without a block mask, and of an axis whose mask blocks are no multiples of
    64: 64 on an axis of at most 64 tokens (q_len, kv_len), else 128, and for keys in pages always 128, because the bits of a request do
    not depend on the number of its pages. With tcgen05 those of `sm100_support.visited_blocks`, which differ in the `backward` pass.
    """
    block_q, block_kv = (64 if length <= 64 else 128 for length in (plan.q_len, plan.kv_len))
    block_kv = 128 if plan.page else block_kv
    return sm100_support.visited_blocks(plan, block_q, block_kv, backward)


def kernel_plan(plan: KernelPlan, backward: bool = False) -> KernelPlan:
    """The plan that the kernels of a pass (`backward` or forward) run where the decode kernel does not, as if its keys were contiguous:
    with blocks that they can visit (`kernel_blocks`), and with the lengths in its block mask, so that the new plan has no lengths.
    """
    made = mask_blocks.plan_with_blocks(pages.contiguous_plan(plan), *kernel_blocks(plan, backward))
    return lengths_as_mask.plan_as_mask(made, *lengths_blocks(plan, backward))


def forward_candidates(plan: KernelPlan) -> list[tuple[int, int, int]]:
    """(block_q, block_kv, stages) of the tiles of the forward kernel on Hopper that are worth timing for the plan of a call, the one that runs
    first. Where three consumer warpgroups run on mask blocks of their own, their tiles are followed by those of the mask's blocks.
    """
    made = kernel_plan(plan)
    tiles = forward_tiles.forward_candidates(made)
    if plan.blocks is not None and choose_kernel.forward_blocks(plan) is not None and plan.options.block_q is None:
        tiles = tuple(t for t in tiles if (t.block_q, t.block_kv) == choose_kernel.forward_blocks(plan))
        others = dataclasses.replace(plan, options=dataclasses.replace(plan.options, block_q=128))
        tiles += forward_tiles.forward_candidates(kernel_plan(others))
    return list(dict.fromkeys((t.block_q, t.block_kv, t.stages) for t in tiles))


def for_kernels(
    given: KernelPlan, operands: Operands, in_pages: bool = False, backward: bool = False
) -> tuple[KernelPlan, Operands]:
    """(plan, operands) of a call as the kernels of a pass take them: those of `kernel_plan`, with 0 in the slots of queries and keys
    that do not exist, and with block lists of the new plan's blocks.

    given, operands   the plan and the operands of the call
    in_pages          whether the kernel reads the keys in their pages: keys and values stay as they are, only queries get zeros, and the
                      new plan keeps `page`. Otherwise keys in pages are gathered
    backward          whether the pass is the backward pass, whose blocks may differ
    """
    if in_pages:
        queries = None if operands.lengths is None else operands.lengths.query
        plan, operands = given, operands._replace(query=where_exists(operands.query, queries, given))
    else:
        plan, operands = pages.contiguous(given, operands, given.dtype)
        if operands.lengths is not None:
            operands = lengths_as_mask.zeroed(plan, operands)
    plan, operands = mask_blocks.with_blocks(plan, operands, *kernel_blocks(given, backward))
    return lengths_as_mask.as_mask(plan, operands, *lengths_blocks(given, backward))
