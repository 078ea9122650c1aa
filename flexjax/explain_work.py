"""What `explain` says about the work of a call, and of one that reads a cache: work items, splits, CTAs, and a predicted bandwidth.

The prediction is for the decode kernel on an H200. It reads its keys and values once, each SM at its share of the memory's bandwidth, and
the SM with the most work items is the last:

    time = rounds * bytes of an item / (READ_RATE / SMs) + MERGE_TIME        rounds = items / CTAs, rounded up

With READ_RATE and MERGE_TIME as measured (backends/mosaic_gpu/NOTES_decode.md) it is within 5% of what is measured there.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax.backends.xla.tile_sizes import TileSizes
from flexjax.dense import block_mask_of
from flexjax.dispatch import Run
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.prepare import Call
from flexjax.work import with_lists_of, work_of

READ_RATE = 4.5e12
"""Bytes a second that all SMs of an H200 read together."""
MERGE_TIME = 6e-6
"""Seconds in which the partial results of the splits are merged."""


def describe_split(run: Run) -> list[str]:
    """A line that says how a pass is split by residues of its tokens (plan/residues.py); [] if it is not."""
    if run.whole is None or run.whole.residues is None:
        return []
    modulus, plan = run.whole.residues.modulus, run.plan
    whole = run.whole.q_len % modulus == run.whole.kv_len % modulus == 0
    cost = "without a copy" if plan.layout == "BTNH" and whole else "in copies of the arrays"
    return [
        f"  split by residues: token t is token t // {modulus} of residue t % {modulus}, {modulus} x {run.whole.q_heads} heads of "
        f"{plan.q_len} queries and {plan.kv_len} keys, {cost}"
    ]


def describe_work(call: Call, run: Run) -> str:
    """The section about work: blocks visited, floating-point operations of both passes, and the bytes of query, key, value and out.

    Where an array of the block mask is traced, one line says so in place of these. A call that the decode kernel runs, or whose keys
    are in pages, also gets the lines of `_describe_reads`; the latter call has these lines alone.

    run   the backend of the forward pass, with the plan
    """
    reads = ["  " + line for line in _describe_reads(run, with_lists_of(run, call.operands))]
    if call.plan.page:
        return "\n".join(["work:", *reads])
    work = work_of(call, run)
    if work is None:
        return "\n".join(["work: depends on traced block lists", *reads])
    lines = ["work:"]
    if work.has_mask:
        share = 100 * work.visited / max(work.total, 1)
        which = "" if run.whole is None else " of each residue"
        lines.append(f"  blocks visited{which} {work.visited} of {work.total} ({share:.1f}%)")
    backward = "" if call.plan.float8 else f", backward {work.backward_flops / 1e9:.4g} GFLOP"
    lines.append(f"  forward {work.forward_flops / 1e9:.4g} GFLOP{backward}")
    lines.append(f"  query, key, value and out: {work.bytes / 1e6:.4g} MB")
    return "\n".join([*lines, *reads])


def _describe_reads(run: Run, operands: Operands) -> list[str]:
    """Lines about a call with keys in pages, or one that a decode kernel of mosaic_gpu runs; [] for others.

    run        the backend of the forward pass, with the plan
    operands   the arrays of the call, which may be traced

    What they say depends on what runs the call:

    a decode kernel          its work items, splits and CTAs, then the bytes of keys and values that are read and, on compute capability
                             9.0 or an unknown one, the time and bandwidth predicted for an H200. Without known lengths and lists, only an
                             upper bound of the items, with splits and CTAs
    another GPU kernel       whether it reads the pages in place, gets them gathered or gets the pools widened, then the bytes, if lengths
                             and lists are known
    another backend          the work items of xla's loop, then the bytes, if lengths and lists are known
    """
    plan = run.plan
    kernel = _decode_kernel(run)
    if kernel is None and not plan.page:
        return []
    seen = _visible_keys(plan, operands)
    if kernel is None and run.backend.name == "mosaic_gpu":
        from flexjax.backends.mosaic_gpu import choose_kernel

        read = [] if seen is None else [_bytes_text(_bytes(plan, seen))]
        card, stored = choose_kernel.mma_card(run.target, plan.options), operands.key.shape[0]
        row = plan.kv_heads * (plan.head_dim + plan.value_dim) * jnp.dtype(plan.dtype).itemsize
        if choose_kernel.reads_pages(plan, card):
            return ["the forward kernel reads the pages in place", *read]
        if choose_kernel.widens_pools(plan, stored, card):
            made = stored * plan.page * row
            return [f"the pools are widened to {plan.dtype} for the forward kernel, {made / 1e6:.4g} MB", *read]
        copied = plan.batch * plan.kv_len * row
        text = (
            f"the keys and values of all pages of the table are gathered for the forward kernel, {copied / 1e6:.4g} MB"
        )
        return [text, *read]
    if kernel is None:
        sizes = run.backend.tile_sizes(plan, run.target)
        items = "" if not isinstance(sizes, TileSizes) else (
            f"{_number(sizes.steps, 'work item')} (tile rows), one after the other, {sizes.chunk * sizes.block_kv} keys a step; keys are not split"
        )  # fmt: skip
        return [*([items] if items else []), *([] if seen is None else [_bytes_text(_bytes(plan, seen))])]
    chunk, programs = kernel
    splits = cdiv(plan.kv_len, chunk)
    if seen is None:
        most = plan.batch * plan.kv_heads * splits
        return [
            f"at most {most} work items of {chunk} keys of a key head, {_number(splits, 'split')} of an entry, on {min(most, programs)} CTAs"
        ]
    heads = seen.shape[1]
    padded = np.pad(seen, ((0, 0), (0, 0), (0, splits * chunk - plan.kv_len)))
    by_head = padded.reshape(plan.batch, heads, splits, chunk).any(-1).sum(-1)
    items = int(by_head.sum()) * (plan.kv_heads // heads)
    lines = [
        f"{items} work items of {chunk} keys of a key head, at most {_number(int(by_head.max(initial=0)), 'split')} of an entry, "
        f"on {min(items, programs)} CTAs"
    ]
    read = _bytes(plan, seen)
    if items == 0:
        return lines
    if run.target.capability not in (None, "9.0"):
        return [*lines, _bytes_text(read)]  # READ_RATE is that of an H200
    rounds = cdiv(items, min(items, programs))
    seconds = rounds * (read / items) * programs / READ_RATE + MERGE_TIME
    return [
        *lines,
        f"{_bytes_text(read)}; predicted for an H200: {seconds * 1e3:.3g} ms, {read / seconds / 1e12:.3g} TB/s",
    ]


def _decode_kernel(run: Run) -> tuple[int, int] | None:
    """(keys of a work item, CTAs of a full grid) where a decode kernel of mosaic_gpu, for Hopper or on mma.sync, runs the forward pass;
    None elsewhere. For Hopper the CTAs are those of an H200, one for each SM, whatever the target is.

    run   the choice for the forward pass
    """
    if run.backend.name != "mosaic_gpu":
        return None
    from flexjax.backends.mosaic_gpu import choose_kernel

    card = choose_kernel.mma_card(run.target, run.plan.options)
    if card is not None:
        made = choose_kernel.mma_decode_kernel(run.plan, card)
        return None if made is None else (made.chunk, (run.target.cores or made.programs) * made.resident_ctas(card))
    tile = choose_kernel.decode_kernel(run.plan)
    return None if tile is None else (tile.chunk, tile.programs)


def _visible_keys(plan: KernelPlan, operands: Operands) -> np.ndarray | None:
    """Which keys the forward pass reads: those before the key length in blocks that some query visits, bool [B, 1 or M, S]; without a
    mask and lengths, all.

    M if the lists differ by head: a key head is read for all query heads that share it. None if lengths or block lists are traced.
    """
    mask, lengths = block_mask_of(plan, operands), operands.lengths
    ends = None if lengths is None else lengths.key
    known = jax.tree.leaves((None if mask is None else (mask.kv_num_blocks, mask.kv_indices), ends))
    if any(isinstance(x, core.Tracer) for x in known):
        return None
    seen = np.ones((plan.batch, 1, plan.kv_len), bool)
    if mask is not None:
        blocks = np.zeros((*mask.kv_num_blocks.shape, mask.blocks[1]), bool)
        for num, index in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            index = np.asarray(index)
            listed = np.arange(index.shape[-1]) < np.asarray(num)[..., None]
            *at, place = np.nonzero(listed)
            blocks[(*at, index[(*at, place)])] = True
        by_head = np.any(blocks, axis=2)
        if mask.kv_num_blocks.shape[1] > 1:
            by_head = np.any(np.reshape(by_head, (-1, plan.kv_heads, plan.group, mask.blocks[1])), axis=2)
        of_keys = np.repeat(by_head, mask.block_size[1], -1)[..., : plan.kv_len]
        seen = np.broadcast_to(of_keys, (plan.batch, *of_keys.shape[1:]))
    if ends is not None:
        seen = seen & (np.arange(plan.kv_len) < np.asarray(ends)[:, None, None])
    return seen


def _bytes(plan: KernelPlan, seen: np.ndarray) -> float:
    """How many bytes the keys and values in `seen` (from `_visible_keys`) have, each read once, in the dtype in which they are stored."""
    itemsize = jnp.dtype(plan.cache_dtype or plan.dtype).itemsize
    return float(seen.mean(1).sum()) * plan.kv_heads * (plan.head_dim + plan.value_dim) * itemsize


def _number(count: int, what: str) -> str:
    """The count with its noun, such as "1 split" or "2 splits"; `what` is the singular."""
    return f"{count} {what}{'s' * (count != 1)}"


def _bytes_text(read: float) -> str:
    """A clause on what is read, such as "reads 33.55 MB of keys and values", without a full stop.

    read   bytes of keys and values; shown in MB of 10^6 bytes with 4 digits
    """
    return f"reads {read / 1e6:.4g} MB of keys and values"
