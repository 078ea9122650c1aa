"""The call that the kernels run in place of a call, and its plan.

Block masks may have blocks of any size, keys may lie in pages and sequences may have lengths; kernels visit blocks of
their own sizes, with lengths in the block mask. What chooses a tile looks at the plan of `kernel_plan`.
"""

import dataclasses
from collections.abc import Callable

from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.family import Family
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.rewrite import Rewrite, Steps, chain, last_plan
from flexjax.rewrites import extra_features, lengths_as_mask, mask_blocks, pages

Rewriting = Callable[[KernelPlan], Rewrite | None]


def kernel_blocks(plan: KernelPlan, family: Family, backward: bool = False) -> tuple[int, int]:
    """(queries, keys) of the mask blocks that the kernels of a pass visit; (0, 0) for a plan without a block mask."""
    if plan.blocks is None:
        return 0, 0
    given, others = (plan.blocks.block_q, plan.blocks.block_kv), lengths_blocks(plan, family, True)
    block_q, block_kv = (n if n % 64 == 0 else other for n, other in zip(given, others, strict=True))
    return family.blocks(plan, block_q, block_kv, backward)


def lengths_blocks(plan: KernelPlan, family: Family, backward: bool = False) -> tuple[int, int]:
    """(queries, keys) of the blocks that stand for lengths where mask blocks are none or no multiples of 64."""
    block_q, block_kv = (64 if length <= 64 else 128 for length in (plan.q_len, plan.kv_len))
    block_kv = 128 if plan.page else block_kv  # the bits of a request do not depend on the number of its pages
    return family.blocks(plan, block_q, block_kv, backward)


def kernel_plan(plan: KernelPlan, family: Family, backward: bool = False) -> KernelPlan:
    """The plan that the kernels of a pass run where the decode kernel does not, as if its keys were contiguous: with
    blocks that they can visit, and with the lengths in its block mask.
    """
    made = pages.contiguous_plan(plan)
    return last_plan(made, chain(made, *_in_blocks(plan, family, backward)))


def forward_steps(plan: KernelPlan, family: Family) -> Steps:
    """The steps to the call that the forward kernel runs; () where the decode kernel runs the plan itself."""
    from flexjax.backends.mosaic_gpu.families import wide_captures  # needs jax 0.11

    if family.decodes(plan):
        return ()
    asked = dataclasses.replace(plan, for_tiles=True)  # what it becomes may look like a call for the decode kernel
    in_pages = chain(asked, _read_in_pages)
    given = last_plan(asked, in_pages)
    in_place = choose_kernel.reads_pages(given)
    gathered = lambda plan: pages.gathered(plan, plan.dtype) if asked.page and not in_place else None
    return (
        *in_pages,
        *chain(given, gathered, *_in_blocks(given, family), wide_captures.rewrite, extra_features.rewrite),
    )


def backward_steps(plan: KernelPlan, family: Family) -> Steps:
    """The steps to the call that the backward kernels run."""
    return chain(plan, *_in_blocks(plan, family, backward=True), extra_features.rewrite)


def _in_blocks(given: KernelPlan, family: Family, backward: bool = False) -> tuple[Rewriting, Rewriting, Rewriting]:
    """To known lists, blocks that the kernels of the pass visit, no lengths; `given`: its keys are not gathered yet."""
    visited, of_lengths = kernel_blocks(given, family, backward), lengths_blocks(given, family, backward)
    return (
        _known_lists,
        lambda plan: mask_blocks.rewrite(plan, *visited),
        lambda plan: lengths_as_mask.rewrite(plan, *of_lengths),
    )


def _known_lists(plan: KernelPlan) -> Rewrite | None:
    if plan.blocks is None or plan.blocks.known is None:
        return None
    return Rewrite(plan, "block mask: its lists are constants, known while the call is traced", plan.on_host)


def _read_in_pages(plan: KernelPlan) -> Rewrite | None:
    """For keys that the forward kernel reads in pages although they have 8 bits, or are contiguous."""
    if choose_kernel.widens_pools(plan):
        return pages.widened_pools(plan)
    if choose_kernel.views_as_pages(plan):
        page = choose_kernel.VIEWED_PAGE
        made = dataclasses.replace(plan, page=page)
        return Rewrite(made, f"lengths: keys are read as pages of {page}, and none past a length")
    return None
