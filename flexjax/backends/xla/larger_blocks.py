"""Larger mask blocks for accelerators: few large steps instead of many small ones.

On a GPU or TPU every step of a loop costs the launch of its operations, and a loop whose length is data costs a round trip to the
host for each step. A block of 128 x 128 is too little work for that. So the xla backend does one of two things there:

    one step      a call with at most ONE_STEP scores drops its block lists and computes the whole score matrix at once, masked by
                  the mask program
    larger blocks  other calls merge blocks of their block mask into blocks of LARGE (queries, keys), or of MEDIUM where every
                  query sees few keys, as in a short window, and most of a larger block would be empty

On a CPU the blocks of the block mask stay as they are: steps cost little there, and a small tile stays in the cache.
"""

import dataclasses

from flexjax.backends.target import Target
from flexjax.backends.xla.tile_sizes import ONE_STEP, largest_divisor, scores_of
from flexjax.plan import mask_blocks
from flexjax.plan.kernel_plan import KernelPlan, Operands

LARGE, MEDIUM = (2048, 2048), (512, 512)
"""The size of the larger blocks, (queries, keys), rounded down to whole mask blocks. On an H200, both passes, bfloat16, 16 heads of
128: causal of 4096 tokens takes 3.8 ms in blocks of 2048, 4.1 of 1024, 5.8 of 512; a window of 512 in 16384 17.8, 19.7 and 17.4."""
FEW_KEYS = 1024
"""The larger blocks are MEDIUM where the visited blocks of each row of blocks have at most this many keys."""


def plan_on_larger_blocks(plan: KernelPlan, target: Target, backward: bool = False) -> KernelPlan:
    """The plan that a pass computes on the target: with larger mask blocks; with none, if one of these would cover the whole
    attention matrix and keys are not in pages; the plan itself on a CPU, without a block mask, and where a user's one block is the
    whole attention matrix.

    backward   whether the options of the backward pass count, block_q_bwd and block_kv_bwd, or those of the forward pass. Options
               that set a tile also bound the size of the larger blocks
    """
    if plan.blocks is None or target.platform == "cpu":
        return plan
    size = _block_size(plan, backward)
    made = mask_blocks.plan_with_blocks(plan, *size)
    # lists of a user whose one block has that size already say what no program says
    listed = made.blocks is not None and made.blocks.from_user_lists
    return dataclasses.replace(made, blocks=None) if _in_one_step(plan, size) and not listed else made


def on_larger_blocks(
    plan: KernelPlan, operands: Operands, target: Target, backward: bool = False
) -> tuple[KernelPlan, Operands]:
    """The plan of `plan_on_larger_blocks`, and the operands for it: with its block lists, and None where it has none. The
    arguments themselves if the plan stays as it is.

    backward   whether the tile options of the backward pass count, or those of the forward pass
    """
    made = plan_on_larger_blocks(plan, target, backward)
    if made is plan:
        return plan, operands
    _, found = mask_blocks.with_blocks(plan, operands, *_block_size(plan, backward))
    return made, found if made.blocks is not None else found._replace(lists=None)


def _block_size(plan: KernelPlan, backward: bool) -> tuple[int, int]:
    """(queries, keys) of the larger blocks of a plan that has a block mask.

    backward   which options count: block_q_bwd and block_kv_bwd, or block_q and block_kv

    One step computes calls of at most ONE_STEP scores without such an option, without pages and without several runs: the size is then
    that of the whole score matrix. Other calls take LARGE or MEDIUM; an option replaces its number of queries and may lower its number
    of keys. That size is rounded down to whole mask blocks, but to no less than one, and so that whole blocks make up a run.
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
        """Tokens of a larger block along one axis: the most whole mask blocks, at least one, that have at most `most`
        tokens together and whose number divides that of a run of the origin.

        block   tokens of a mask block
        run     tokens of a run; None: there is one run, which need not be divided
        """
        count = max(1, most // block)
        return block * (count if run is None else largest_divisor(run // block, count))

    return (
        merged(blocks.block_q, asked_q or queries, origin.query_run if origin and origin.query_runs > 1 else None),
        merged(
            blocks.block_kv, min(asked_kv or keys, keys), origin.key_run if origin and origin.key_runs > 1 else None
        ),
    )


def _in_one_step(plan: KernelPlan, size: tuple[int, int]) -> bool:
    """Whether a block of `size` (queries, keys) is the whole score matrix, so that no list is needed. False with keys in
    pages, whose tiles must not depend on the number of requests and pages.
    """
    return size[0] >= plan.q_len and size[1] >= plan.kv_len and not plan.page
