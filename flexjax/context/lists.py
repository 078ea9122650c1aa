"""The block lists of the stages of a call whose mask and layout are known, made on the host.

With them a device classifies no blocks, and the lists are as wide as their longest row. They are made for masks that
are the same for all batch entries and heads, and for up to MOST_BLOCKS pairs of blocks. Longer sequences compute much
longer than they classify, and their lists would be large constants of the program.
"""

import typing

import numpy as np

from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, classify_on_host
from flexjax.context.context_parallel import Visitors
from flexjax.context.layout import ContextLayout
from flexjax.context.rounds import Rounds
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import BlockLayout, BlockLists
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod

MOST_BLOCKS = 1 << 22


class StageLists(typing.NamedTuple):
    """The lists of a stage for every device."""

    lists: BlockLists  # arrays have two more dims in front: steps of the ring (1 for other methods), devices
    layout: BlockLayout  # of one device


class KnownLists(typing.NamedTuple):
    stages: list[StageLists]
    # query blocks that the second stage of "neighbours" computes; None: all, or another method
    visitors: Visitors | None


def known_lists(mask: TracedMod, layout: ContextLayout, method: str, rounds: Rounds | None) -> KnownLists | None:
    """The block lists of a call whose arrays are all known; None if the mask reads b or h, or for too many blocks."""
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
        visitors = _visitors(mask, layout, rounds)
        if visitors is None:
            stages.append((query_blocks, received[None]))
        else:
            queries, keys = (np.asarray(x) for x in (visitors.query_blocks, visitors.key_blocks))
            others = np.where(np.isin(query_blocks, queries), -1, query_blocks)
            stages = [(others, key_blocks[None]), (queries, np.concatenate([received, keys], 1)[None])]
    return KnownLists([_stage(mask, layout, queries, keys) for queries, keys in stages], visitors)


FEW = 0.5  # largest share of a device's query blocks that visit received keys as a stage of their own


def _visitors(mask: TracedMod, layout: ContextLayout, rounds: Rounds) -> Visitors | None:
    """The Visitors of "neighbours"; None if on some device more than FEW of the query blocks visit received keys."""
    query_blocks, key_blocks = np.asarray(layout.query_blocks), np.asarray(layout.key_blocks)
    (devices, rows), own = query_blocks.shape, key_blocks.shape[1]
    received = [np.asarray(x) for x in rounds.received]
    visits = lambda queries, keys: np.concatenate(_classified(mask, layout, queries, keys))
    every = [np.concatenate([x[d] for x in received]) for d in range(devices)]
    queries = [np.unique(visits(query_blocks[d], every[d])[:, 2]) for d in range(devices)]
    if max(map(len, queries)) > FEW * rows:
        return None
    keys = [np.unique(visits(query_blocks[d, queries[d]], key_blocks[d])[:, 3]) for d in range(devices)]
    # what each round brings back: gradients of the blocks that were sent, without the padding of the message
    sent = []
    for shift, send, of_round in zip(rounds.shifts, rounds.send, received, strict=True):
        real = np.roll(of_round >= 0, -shift, 0)
        sent.append(np.where(real, np.asarray(send), own))
    added = [keys, *([x[x < own] for x in of_round] for of_round in sent)]
    changed = [np.unique(np.concatenate([x[d] for x in added])) for d in range(devices)]
    most = max(map(len, changed))
    places = [_padded([np.searchsorted(changed[d], keys[d]) for d in range(devices)], most)]
    for of_round in sent:
        at = [np.searchsorted(changed[d], of_round[d]) for d in range(devices)]
        places.append(np.where(of_round < own, np.stack(at), most).astype(np.int32))
    number = lambda blocks, slots: _padded([blocks[d, slots[d]] for d in range(devices)], -1)
    return Visitors(
        queries=_padded(queries, rows),
        query_blocks=number(query_blocks, queries),
        keys=_padded(keys, own),
        key_blocks=number(key_blocks, keys),
        changed=_padded(changed, own),
        places=tuple(places),
    )


def _padded(rows: list[np.ndarray], last: int) -> np.ndarray:
    """int32 [rows, width]: the rows, padded with `last` to the length of the longest, which is at least 1."""
    found = np.full((len(rows), max(1, *map(len, rows))), last, np.int32)
    for row, numbers in zip(found, rows, strict=True):
        row[: len(numbers)] = numbers
    return found


def _stage(mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray) -> StageLists:
    """The lists of one stage for every device, from numbers of blocks in the sequence, -1 for none.

    queries   int32 [devices, rows]
    keys      int32 [steps, devices, columns], for each step of the ring (1 for other methods)
    """
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
        """(numbers, indices) of the partial (`which` 0) or full lists of all steps and devices, or None."""
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
    """(partial, full): coordinates [n, 4], (0, 0, index in `queries`, index in `keys`), of these pairs of blocks.

    queries, keys   int32: numbers of blocks in the sequence; -1, or a number past the end, stands for no block
    """
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
