"""Larger mask blocks for accelerators: few large steps instead of many small ones.

On a GPU or TPU every step of a loop costs the launch of its operations, and a loop whose length is data costs a round
trip to the host for each step. A block of 128 x 128 is too little work for that. So xla does one of two things:

    one step       a call with at most ONE_STEP scores drops its block lists: the whole score matrix at once, masked by
                   the mask program
    larger blocks  other calls merge blocks of their block mask into blocks of LARGE (queries, keys), or of MEDIUM where
                   every query sees few keys, as in a short window, and most of a larger block would be empty

On a CPU the blocks of the block mask stay as they are: steps cost little there, and a small tile stays in the cache.
"""

import dataclasses

from flexjax.backends.target import Target
from flexjax.backends.xla.tile_sizes import ONE_STEP, largest_divisor, scores_of
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.rewrite import Rewrite
from flexjax.rewrites import mask_blocks

# (queries, keys), rounded down to whole mask blocks. On an H200, both passes, bfloat16, 16 heads of 128: causal of 4096
# tokens takes 3.8 ms in blocks of 2048, 4.1 of 1024, 5.8 of 512; a window of 512 in 16384 17.8, 19.7 and 17.4.
LARGE, MEDIUM = (2048, 2048), (512, 512)
FEW_KEYS = 1024  # keys of the visited blocks of each row of blocks, at most, for MEDIUM


def rewrite(plan: KernelPlan, target: Target, backward: bool = False) -> Rewrite | None:
    """The call with larger mask blocks, or none where one covers the whole matrix; None where nothing is gained.

    Options that set a tile of the pass also bound the size of the larger blocks.
    """
    if plan.blocks is None or target.platform == "cpu":
        return None
    size = _block_size(plan, backward)
    step = mask_blocks.rewrite(plan, *size)
    # lists of a user whose one block has that size already say what no program says
    listed = step is None and plan.blocks.from_user_lists
    if not _in_one_step(plan, size) or listed:
        return step
    made = plan if step is None else step.plan
    operands = lambda given: (given if step is None else step.operands(given))._replace(lists=None)
    return Rewrite(
        dataclasses.replace(made, blocks=None), "block mask: one step computes all scores, without lists", operands
    )


def _block_size(plan: KernelPlan, backward: bool) -> tuple[int, int]:
    """(queries, keys) of the larger blocks of a plan that has a block mask.

    Calls of at most ONE_STEP scores take one step: the whole score matrix. Others take LARGE or MEDIUM; an option of
    the pass replaces the number of queries and may lower the number of keys. Blocks are whole mask blocks of a run.
    """
    blocks, options, origin = plan.blocks, plan.options, plan.origin
    assert blocks is not None
    asked_q = options.block_q_bwd if backward else options.block_q
    asked_kv = options.block_kv_bwd if backward else options.block_kv
    one_run = origin is None or origin.single
    if asked_q is None and asked_kv is None and one_run and not plan.page and scores_of(plan) <= ONE_STEP:
        return max(plan.q_len, 1), max(plan.kv_len, 1)

    few = (blocks.partial + blocks.full) * blocks.block_kv <= FEW_KEYS
    queries, keys = MEDIUM if few else LARGE

    def merged(block: int, most: int, run: int | None) -> int:
        """Tokens of the most whole mask blocks within `most` tokens whose number divides that of a run."""
        count = max(1, most // block)
        return block * (count if run is None else largest_divisor(run // block, count))

    return (
        merged(blocks.block_q, asked_q or queries, origin.query_run if origin and origin.query_runs > 1 else None),
        merged(
            blocks.block_kv, min(asked_kv or keys, keys), origin.key_run if origin and origin.key_runs > 1 else None
        ),
    )


def _in_one_step(plan: KernelPlan, size: tuple[int, int]) -> bool:
    """Whether a block of `size` (queries, keys) is the whole score matrix, so that no list is needed."""
    # Tiles of keys in pages must not depend on the number of requests and pages.
    return size[0] >= plan.q_len and size[1] >= plan.kv_len and not plan.page
