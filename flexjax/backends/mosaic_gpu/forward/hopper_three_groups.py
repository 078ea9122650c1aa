"""When the forward kernel has three consumer warpgroups instead of two, and which mask blocks it then visits.

At head dims up to 64 three consumers with the softmax beside P V compute scores faster than two (SPEED). A tile of 192
queries visits more hidden entries at the edges of a mask, so it pays where its visited blocks have hardly more entries
than those of 128 queries: causal and prefix masks and wide windows, not narrow ones (lab/logs/hopper.md). 160 registers
a thread hold a second loop, for masked steps, only if the mask captures nothing and nothing else changes scores.

With float8 the softmax does not run beside P V, which leaves registers for any program, at head dims up to 128.
"""

import functools

from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.reference_gpu import utilization
from flexjax.block_mask.classify import BlockedMask, classify_on_host
from flexjax.ir.program import classify_load
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.known_lists import MOST_BLOCKS
from flexjax.trace.lift_numpy import eager_without_mesh

SPEED, SPEED_UNDER_MASK = 1.12, 1.16
"""Measured speed of three groups relative to two per visited entry, without and with a mask (lab/logs/hopper.md)."""
FLOAT8_SPEED = 1.12  # the same for products of float8 at head dim 128, full and causal
BLOCK = (192, 128)  # (queries, keys) of the mask blocks that three consumer warpgroups visit


def three_groups_are_faster(plan: KernelPlan, size: int, staged_dtype: str | None) -> bool:
    """Whether three consumer warpgroups are expected to beat two, by `utilization` and the entries that they visit."""
    if parts_of(plan) > 1 or size != _largest_dim(plan) or staged_dtype is not None:
        return False
    if plan.float8:
        # Two groups are faster with a load for each query and key.
        if plan.score is not None and any(classify_load(x).kind in ("diagonal", "tile") for x in plan.score.loads):
            return False
    elif plan.dropout is not None or (plan.kv_len % 128 and plan.score is not None):
        return False  # the last tile needs a second loop, which 160 registers may not hold
    if plan.mask is None:
        return _speed(plan) * utilization(plan, 192) > utilization(plan, 128)
    if not under_mask(plan):
        return False
    assert plan.blocks is not None
    heads, lengths = (plan.blocks.batch, plan.blocks.heads), (plan.q_len, plan.kv_len)
    tall, square = (_visited(BlockedMask(plan.mask, heads, (*lengths, rows, BLOCK[1]))) for rows in (BLOCK[0], 128))
    if tall is None or square is None:
        return False
    return _speed(plan) * square * utilization(plan, 192) > tall * utilization(plan, 128)


def mask_blocks(plan: KernelPlan) -> tuple[int, int] | None:
    """BLOCK where three consumer warpgroups run under the plan's mask_mod; None: the mask's own blocks are visited."""
    columns = _largest_dim(plan)
    small = max(plan.head_dim + plan.extra_dim, plan.value_dim) <= columns
    if not small or not under_mask(plan):
        return None
    return BLOCK if plan.options.block_q == BLOCK[0] or three_groups_are_faster(plan, columns, None) else None


def under_mask(plan: KernelPlan) -> bool:
    """Whether three consumer warpgroups may run under the plan's mask_mod, as far as head dims do not decide."""
    mask, blocks, options = plan.mask, plan.blocks, plan.options
    if mask is None or blocks is None or mask.loads or blocks.from_user_lists:
        return False
    if options.block_q not in (None, BLOCK[0]) or options.block_kv not in (None, BLOCK[1]) or options.instruction:
        return False
    if options.num_stages not in (None, 2, 3):  # more slots have no named barriers beside three groups
        return False
    plain = plan.float8 or (plan.score is None and plan.dropout is None)
    return plain and plan.origin is None and plan.page == 0 and not plan.partial and not any(plan.lengths)


def _largest_dim(plan: KernelPlan) -> int:
    """The larger head dim, rounded up to a key of hopper_tiles.RINGS, at which three consumer warpgroups may run."""
    return 128 if plan.float8 else 64


def _speed(plan: KernelPlan) -> float:
    return FLOAT8_SPEED if plan.float8 else SPEED if plan.mask is None else SPEED_UNDER_MASK


@functools.lru_cache(maxsize=512)
def _visited(mask: BlockedMask) -> int | None:
    """An estimate of the entries of the visited blocks, undecided ones too; None for more than MOST_BLOCKS blocks."""
    rows, columns = mask.counts
    if mask.heads[0] * mask.heads[1] * rows * columns > MOST_BLOCKS:
        return None
    with eager_without_mesh():
        partial, full = classify_on_host(mask, (), False)
    return (len(partial) + len(full)) * mask.sizes[2] * mask.sizes[3]
