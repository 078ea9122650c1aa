"""The work of a call, counted from its plan and its block lists: blocks, entries, floating-point operations, bytes.

A Call (prepare.py) is a checked call of flex_attention: its plan (everything static about it), its operands (arrays) and the
traced score_mod.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax.block_mask.block_mask import BlockMask
from flexjax.dense import block_mask_of
from flexjax.dispatch import Run
from flexjax.plan.kernel_plan import Operands
from flexjax.plan.residues import known_lists
from flexjax.prepare import Call


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call has to do at least, if all queries and keys exist: lengths do not count.

    visited, total    blocks of the block mask that are visited, and all of them; 1 and 1 without a mask
    has_mask          whether there is a block mask
    forward_flops     floating-point operations of the forward pass: two products over the entries of visited blocks
    backward_flops    of the backward pass: five products, 2.5 times those of the forward pass
    bytes             of query, key, value, the extra features and out, each moved once
    """

    visited: int
    total: int
    has_mask: bool
    forward_flops: float
    bytes: float

    @property
    def backward_flops(self) -> float:
        """Floating-point operations of the backward pass: five products for each two of the forward pass."""
        return 2.5 * self.forward_flops


def work_of(call: Call, run: Run) -> Work | None:
    """Counts the blocks, floating-point operations and bytes of a call (see Work), all batch entries and heads together.

    run   the choice for the forward pass. If it is split by residues, blocks are those of one residue

    Operations are those of the products q . k (extra features included) and p . v over the entries of visited blocks, two for each
    multiplication. Dropout, lengths and the mods do not count.

    None if an array of the block mask is traced (its lists, its origin, or an array that its program captures).
    """
    plan = run.plan
    mask = block_mask_of(plan, with_lists_of(run, call.operands))
    if mask is None:
        visited, total, entries = 1, 1, plan.q_len * plan.kv_len
    elif any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return None
    else:
        counts = [np.asarray(x).sum(dtype=np.int64) for x in (mask.kv_num_blocks, mask.full_kv_num_blocks)]
        visited, total = int(sum(counts)), mask.kv_num_blocks.size * mask.blocks[1]
        entries = _entries(mask)
    flops = 2.0 * plan.batch * plan.q_heads * entries * (plan.head_dim + plan.extra_dim + plan.value_dim)
    read, written = (jnp.dtype(t).itemsize for t in (call.plan.input_dtype, plan.dtype))
    query_side = plan.q_heads * plan.q_len * (read * (plan.head_dim + plan.extra_dim) + written * plan.value_dim)
    key_side = (
        plan.kv_heads * plan.kv_len * (plan.head_dim + plan.value_dim) + plan.extra_heads * plan.kv_len * plan.extra_dim
    )
    moved = plan.batch * (query_side + read * key_side)
    return Work(visited, total, mask is not None, flops, moved)


def with_lists_of(run: Run, operands: Operands) -> Operands:
    """The operands of a call with the block lists that the run visits: those of one residue if it is split by residues."""
    return operands if run.whole is None else operands._replace(lists=known_lists(run.whole))


def _entries(mask: BlockMask) -> float:
    """How many entries of the attention matrix lie in visited blocks, as the mean over the mask's batch entries and heads.

    The parts of blocks past the last query or key are not counted.
    """
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
