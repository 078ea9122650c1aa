"""What `explain` says about the work of a call: blocks, operations, and work items of decode kernels.

The prediction is for the decode kernel on an H200. It reads its keys and values once, each SM at its share of the
memory's bandwidth, and the SM with the most work items is the last:

    time = rounds * bytes of an item / (READ_RATE / SMs) + MERGE_TIME        rounds = items / CTAs, rounded up

It is within 5% of what is measured there (lab/notes/decode.md).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax.backends.base import WorkItems
from flexjax.backends.reference.support import block_mask_of
from flexjax.call.prepare import PreparedCall
from flexjax.integers import cdiv
from flexjax.look.work import work_of
from flexjax.passes.dispatch import Run
from flexjax.plan.kernel_plan import KernelPlan, Operands

READ_RATE = 4.5e12  # bytes a second that all SMs of an H200 read together
MERGE_TIME = 6e-6  # seconds in which the partial results of the splits are merged


def describe_work(call: PreparedCall, run: Run) -> str:
    """The section about work: blocks visited, operations of both passes, bytes of query, key, value and out.

    A call with keys in pages has the lines of `_describe_reads` alone; one that the decode kernel runs has them too.
    """
    reads = ["  " + line for line in _describe_reads(run, run.plan.on_host(call.operands))]
    if call.plan.page:
        return "\n".join(["work:", *reads])
    work = work_of(call, run)
    if work is None:
        return "\n".join(["work: depends on traced block lists", *reads])
    lines = ["work:"]
    if work.has_mask:
        share = 100 * work.visited / max(work.total, 1)
        which = "" if run.plan.residues == call.plan.residues else " of each residue"
        lines.append(f"  blocks visited{which} {work.visited} of {work.total} ({share:.1f}%)")
    backward = "" if call.plan.float8 else f", backward {work.backward_flops / 1e9:.4g} GFLOP"
    lines.append(f"  forward {work.forward_flops / 1e9:.4g} GFLOP{backward}")
    lines.append(f"  query, key, value and out: {work.bytes / 1e6:.4g} MB")
    return "\n".join([*lines, *reads])


def _describe_reads(run: Run, operands: Operands) -> list[str]:
    """Lines about a call with keys in pages, or of few queries where the backend divides its keys; [] for others.

    They say what `Backend.reads` says, the bytes that are read and, where an H200's rates hold, the time and bandwidth
    predicted for one. Bytes need known lengths and lists.
    """
    plan = run.plan
    items = run.backend.reads(plan, run.target)
    if items is None and not plan.page:
        return []
    seen = _visible_keys(plan, operands)
    if not isinstance(items, WorkItems):
        read = [] if seen is None else [_bytes_text(_bytes(plan, seen))]
        return read if items is None else [items, *read]
    chunk, programs = items.chunk, items.ctas
    splits = cdiv(plan.kv_len, chunk)
    if seen is None:
        most = plan.batch * plan.kv_heads * splits
        return [
            f"at most {most} work items of {chunk} keys of a key head, {_number(splits, 'split')} of an entry, on "
            f"{min(most, programs)} CTAs"
        ]
    heads = seen.shape[1]
    padded = np.pad(seen, ((0, 0), (0, 0), (0, splits * chunk - plan.kv_len)))
    by_head = padded.reshape(plan.batch, heads, splits, chunk).any(-1).sum(-1)
    count = int(by_head.sum()) * (plan.kv_heads // heads)
    lines = [
        f"{count} work items of {chunk} keys of a key head, at most {_number(int(by_head.max(initial=0)), 'split')} "
        f"of an entry, on {min(count, programs)} CTAs"
    ]
    read = _bytes(plan, seen)
    if count == 0:
        return lines
    if not items.as_on_h200:
        return [*lines, _bytes_text(read)]
    rounds = cdiv(count, min(count, programs))
    seconds = rounds * (read / count) * programs / READ_RATE + MERGE_TIME
    return [
        *lines,
        f"{_bytes_text(read)}; predicted for an H200: {seconds * 1e3:.3g} ms, {read / seconds / 1e12:.3g} TB/s",
    ]


def _visible_keys(plan: KernelPlan, operands: Operands) -> np.ndarray | None:
    """bool [B, 1 or M, S]: the keys before the key length in blocks that some query visits; None if that is traced."""
    mask, lengths = block_mask_of(plan, operands), operands.lengths
    ends = None if lengths is None else lengths.key
    known = jax.tree.leaves((None if mask is None else (mask.kv_num_blocks, mask.kv_indices), ends))
    if any(isinstance(x, core.Tracer) for x in known):
        return None
    seen = np.ones((plan.batch, 1, plan.kv_len), bool)
    if mask is not None:
        blocks = np.zeros((*mask.kv_num_blocks.shape, mask.blocks[1]), bool)
        for num, index in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
            index = np.asarray(index)
            listed = np.arange(index.shape[-1]) < np.asarray(num)[..., None]
            *at, place = np.nonzero(listed)
            blocks[(*at, index[(*at, place)])] = True
        by_head = np.any(blocks, axis=2)
        # M if the lists differ by head: a key head is read for all query heads that share it
        if mask.kv_num_blocks.shape[1] > 1:
            by_head = np.any(np.reshape(by_head, (-1, plan.kv_heads, plan.group, mask.blocks[1])), axis=2)
        of_keys = np.repeat(by_head, mask.block_size[1], -1)[..., : plan.kv_len]
        seen = np.broadcast_to(of_keys, (plan.batch, *of_keys.shape[1:]))
    if ends is not None:
        seen = seen & (np.arange(plan.kv_len) < np.asarray(ends)[:, None, None])
    return seen


def _bytes(plan: KernelPlan, seen: np.ndarray) -> float:
    """The bytes of the keys and values in `seen`, each read once, in the dtype in which they are stored."""
    itemsize = jnp.dtype(plan.cache_dtype or plan.dtype).itemsize
    return float(seen.mean(1).sum()) * plan.kv_heads * (plan.head_dim + plan.value_dim) * itemsize


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _bytes_text(read: float) -> str:
    """A clause on the bytes that are read, such as "reads 33.55 MB of keys and values"."""
    return f"reads {read / 1e6:.4g} MB of keys and values"
