"""The block lists of the stages of a call whose mask and layout are known, made on the host.

With them a device classifies no blocks (context_stages.py does that for other masks), and the lists are as wide as their longest row.
They are made for masks that are the same for all batch entries and heads, and for sequences of up to MOST_BLOCKS pairs of blocks:
longer ones compute much longer than they classify, and their lists would be large constants of the program.
"""

import typing

import numpy as np

from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, classify_on_host
from flexjax.ir.origin import OriginLayout
from flexjax.parallel.context_layout import ContextLayout
from flexjax.parallel.context_rounds import Rounds
from flexjax.plan.kernel_plan import BlockLayout, BlockLists
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod

MOST_BLOCKS = 1 << 22


class StageLists(typing.NamedTuple):
    """The lists of a stage for every device.

    lists    BlockLists whose arrays have two more dims in front: steps of the ring (1 for other methods), devices
    layout   of the lists of one device
    """

    lists: BlockLists
    layout: BlockLayout


class KnownLists(typing.NamedTuple):
    """The lists of all stages, and the query blocks that the second stage of "neighbours" computes.

    visitors   int32 [devices, blocks] twice: which of its own query blocks visit received keys (past the end: the number of its
               query blocks), and their numbers in the sequence (past the end: -1). None: all blocks
    """

    stages: list[StageLists]
    visitors: tuple[np.ndarray, np.ndarray] | None


def known_lists(mask: TracedMod, layout: ContextLayout, method: str, rounds: Rounds | None) -> KnownLists | None:
    """The lists of each stage; None where devices have to classify blocks. Mask and layout are known."""
    query_blocks, key_blocks = np.asarray(layout.query_blocks), np.asarray(layout.key_blocks)
    reads = any(mask.program.reads(axis) for axis in ("b", "h"))
    if reads or query_blocks.size * key_blocks.size > MOST_BLOCKS:
        return None
    n, everything = layout.devices, np.arange(key_blocks.size, dtype=np.int32)
    if method == "all_to_all":
        stages = [(np.arange(query_blocks.size, dtype=np.int32)[None], everything[None, None])]
    elif method == "all_gather":
        stages = [(query_blocks, np.broadcast_to(everything, (1, n, len(everything))))]
    elif method == "ring":
        visitors = [key_blocks[(np.arange(n) - step) % n] for step in range(n)]
        stages = [(query_blocks, np.stack(visitors))]
    else:
        stages = [(query_blocks, key_blocks[None])]
    visitors = None
    if method == "neighbours" and rounds is not None and rounds.shifts:
        received = np.concatenate([np.asarray(x) for x in rounds.received], 1)
        visitors = _visitors(mask, layout, query_blocks, received)
        stages.append((query_blocks if visitors is None else visitors[1], received[None]))
    return KnownLists([_stage(mask, layout, queries, keys) for queries, keys in stages], visitors)


FEW = 0.75
"""The share of a device's query blocks up to which the others are left out of a stage."""


def _visitors(
    mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """See KnownLists; queries and keys [devices, blocks]: numbers of the devices' query blocks, and of the received key blocks."""
    devices, rows = queries.shape
    each = [np.unique(np.concatenate(_classified(mask, layout, queries[d], keys[d]))[:, 2]) for d in range(devices)]
    most = max(1, *map(len, each))
    if most > FEW * rows:
        return None
    slots, numbers = np.full((devices, most), rows, np.int32), np.full((devices, most), -1, np.int32)
    for device, found in enumerate(each):
        slots[device, : len(found)] = found
        numbers[device, : len(found)] = queries[device, found]
    return slots, numbers


def _stage(mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray) -> StageLists:
    """The lists of one stage; queries [devices, rows] and keys [steps, devices, columns]: numbers of blocks, -1 for none."""
    steps, devices, columns = keys.shape
    rows = queries.shape[1]
    found = [[_classified(mask, layout, queries[d], keys[s, d]) for d in range(devices)] for s in range(steps)]
    flat = [places for of_step in found for places in of_step]
    grid, turned = (1, 1, rows), (1, 1, columns)
    widths, widths_t = (
        [max(transpose.longest_row(turn(places[i]), shape) for places in flat) for i in range(2)]
        for turn, shape in ((lambda x: x, grid), (transpose.transposed_places, turned))
    )

    def stacked(which: int) -> tuple[typing.Any, typing.Any]:
        if not widths[which]:
            return None, None
        made = [[transpose.lists_of_places(p[which], grid, widths[which]) for p in of_step] for of_step in found]
        num, index = (np.stack([np.stack([x[i] for x in of_step]) for of_step in made]) for i in range(2))
        return num, index

    sizes = BlockLayout(1, 1, *layout.block_size, widths[0], widths[1], widths_t[0], widths_t[1])
    return StageLists(BlockLists(*stacked(0), *stacked(1)), sizes)


def _classified(
    mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates [n, 4] of the partial and of the full pairs of blocks with these numbers."""
    real, starts = [], []
    for blocks, size, length in zip((queries, keys), layout.block_size, (layout.q_len, layout.kv_len), strict=True):
        on = (blocks >= 0) & (blocks * size < length)
        real.append(on)
        starts.append(np.where(on, blocks * size, 0)[None].astype(np.int32))
    block_q, block_kv = layout.block_size
    sizes = (len(queries) * block_q, len(keys) * block_kv, block_q, block_kv)
    origin = OriginLayout(1, block_q, len(queries), block_kv, len(keys))
    captures: typing.Any = (*(np.asarray(x) for x in mask.arrays), *starts)
    with eager_without_mesh():
        found = classify_on_host(BlockedMask(mask.program, (1, 1), sizes, origin), captures, None)
    partial, full = (places[real[0][places[:, 2]] & real[1][places[:, 3]]] for places in found)
    return partial, full
