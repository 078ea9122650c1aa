"""The work of a call, counted from its plan and its block lists: blocks, entries, floating-point operations, bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax.backends.reference.support import block_mask_of
from flexjax.block_mask.block_mask import BlockMask
from flexjax.call.prepare import PreparedCall
from flexjax.passes.dispatch import Run


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call has to do at least, if all queries and keys exist: lengths do not count."""

    visited: int  # blocks of the block mask; 1 of 1 without a mask
    total: int
    has_mask: bool
    forward_flops: float  # two products over the entries of visited blocks
    bytes: float  # of query, key, value, the extra features and out, each moved once

    @property
    def backward_flops(self) -> float:
        """Five products for each two of the forward pass."""
        return 2.5 * self.forward_flops


def work_of(call: PreparedCall, run: Run) -> Work | None:
    """Counts the work of a call, all batch entries and heads together; None if an array of the block mask is traced.

    run   the choice for the forward pass. If it is split by residues, blocks are those of one residue
    """
    plan = run.plan
    mask = block_mask_of(plan, plan.on_host(call.operands))
    if mask is None:
        visited, total, entries = 1, 1, plan.q_len * plan.kv_len
    elif any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return None
    else:
        counts = [np.asarray(x).sum(dtype=np.int64) for x in (mask.kv_num_blocks, mask.full_kv_num_blocks)]
        visited, total = int(sum(counts)), mask.kv_num_blocks.size * mask.blocks[1]
        entries = _entries(mask)
    # two operations for each multiplication; dropout, lengths and the mods do not count
    flops = 2.0 * plan.batch * plan.q_heads * entries * (plan.head_dim + plan.extra_dim + plan.value_dim)
    read, written = (jnp.dtype(t).itemsize for t in (call.plan.input_dtype, plan.dtype))
    query_side = plan.q_heads * plan.q_len * (read * (plan.head_dim + plan.extra_dim) + written * plan.value_dim)
    key_side = (
        plan.kv_heads * plan.kv_len * (plan.head_dim + plan.value_dim) + plan.extra_heads * plan.kv_len * plan.extra_dim
    )
    moved = plan.batch * (query_side + read * key_side)
    return Work(visited, total, mask is not None, flops, moved)


def _entries(mask: BlockMask) -> float:
    """How many entries of the attention matrix lie in visited blocks, as the mean over batch entries and heads."""
    rows, columns = mask.blocks
    tall, wide = mask.block_size
    heights = np.minimum(tall, mask.q_len - tall * np.arange(rows))
    total = 0
    lists = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    for num, index in ((np.asarray(n, np.int64), np.asarray(i)) for n, i in lists):
        listed = np.arange(index.shape[-1]) < num[..., None]
        at_end = (listed & (index == columns - 1)).any(-1)
        total += ((num * wide - at_end * (columns * wide - mask.kv_len)) * heights).sum()
    return total / max(1, math.prod(mask.kv_num_blocks.shape[:2]))
