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
    visiting = _on_axis(_classified(mask, layout, query_blocks, np.concatenate(received, 1)), 2, (devices, rows))
    if np.count_nonzero(visiting, 1).max() > FEW * rows:
        return None
    queries = _listed(visiting, rows)
    numbers = _taken(query_blocks, queries, -1)
    visited = _on_axis(_classified(mask, layout, numbers, key_blocks), 3, (devices, own))
    keys = _listed(visited, own)
    # what each round brings back: gradients of the blocks that were sent, without the padding of the message
    sent = []
    for shift, send, of_round in zip(rounds.shifts, rounds.send, received, strict=True):
        real = np.roll(of_round >= 0, -shift, 0)
        sent.append(np.where(real, np.asarray(send), own))
    changes = np.pad(visited, ((0, 0), (0, 1)))
    for of_round in sent:
        changes[np.arange(devices)[:, None], of_round] = True
    changes = changes[:, :own]
    changed = _listed(changes, own)
    place = np.cumsum(changes, 1) - 1
    return Visitors(
        queries=queries,
        query_blocks=numbers,
        keys=keys,
        key_blocks=_taken(key_blocks, keys, -1),
        changed=changed,
        places=tuple(_taken(place, slots, changed.shape[1]) for slots in (keys, *sent)),
    )


def _on_axis(pairs: tuple[np.ndarray, np.ndarray], axis: int, shape: tuple[int, int]) -> np.ndarray:
    """bool [devices, blocks], of `shape`: the query blocks (axis 2) or key blocks (axis 3) that are in `pairs`."""
    flags = np.zeros(shape, bool)
    for places in pairs:
        flags[places[:, 0], places[:, axis]] = True
    return flags


def _listed(flags: np.ndarray, last: int) -> np.ndarray:
    """int32 [rows, width]: the columns at which each row is True, padded with `last` to the longest row, at least 1."""
    num, index = (np.asarray(x) for x in transpose.lists_of(flags))  # pyright: ignore[reportArgumentType]
    width = max(1, int(num.max()))
    return np.where(np.arange(width) < num[:, None], index[:, :width], last).astype(np.int32)


def _taken(x: np.ndarray, slots: np.ndarray, last: int) -> np.ndarray:
    """int32 [rows, n]: the entries of each row of x, [rows, columns], at `slots`; `last` at the slot past the end."""
    return np.take_along_axis(np.pad(x, ((0, 0), (0, 1)), constant_values=last), slots, 1).astype(np.int32)


def _stage(mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray) -> StageLists:
    """The lists of one stage for every device, from numbers of blocks in the sequence, -1 for none.

    queries   int32 [devices, rows]
    keys      int32 [steps, devices, columns], for each step of the ring (1 for other methods)
    """
    steps, devices, columns = keys.shape
    rows, entries = queries.shape[1], steps * devices
    found = _classified(mask, layout, np.tile(queries, (steps, 1)), keys.reshape(entries, columns))
    grid, turned = (entries, 1, rows), (entries, 1, columns)
    widths = [transpose.longest_row(places, grid) for places in found]
    widths_t = [transpose.longest_row(transpose.transposed_places(places), turned) for places in found]

    def stacked(which: int) -> tuple[typing.Any, typing.Any]:
        """(numbers, indices) of the partial (`which` 0) or full lists of all steps and devices, or None."""
        if not widths[which]:
            return None, None
        num, index = transpose.lists_of_places(found[which], grid, widths[which])
        return tuple(x.reshape(steps, devices, 1, *x.shape[1:]) for x in (num, index))  # type: ignore[return-value]

    sizes = BlockLayout(1, 1, *layout.block_size, widths[0], widths[1], widths_t[0], widths_t[1])
    return StageLists(BlockLists(*stacked(0), *stacked(1)), sizes)


def _classified(
    mask: TracedMod, layout: ContextLayout, queries: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full): coordinates [n, 4], (entry, 0, index in its queries, index in its keys), of pairs of blocks.

    queries, keys   int32 [entries, blocks], an entry for each device (and step): numbers of blocks in the sequence; -1,
                    or a number past the end, stands for no block
    """
    real, starts = [], []
    for blocks, size, length in zip((queries, keys), layout.block_size, (layout.q_len, layout.kv_len), strict=True):
        on = (blocks >= 0) & (blocks * size < length)
        real.append(on)
        starts.append(np.where(on, blocks * size, 0).astype(np.int32))
    (entries, rows), columns, (block_q, block_kv) = queries.shape, keys.shape[1], layout.block_size
    sizes = (rows * block_q, columns * block_kv, block_q, block_kv)
    # the mask reads no b, so that all entries are the batch of one classification
    origin = OriginLayout(entries, block_q, rows, block_kv, columns)
    captures: typing.Any = (*(np.asarray(x) for x in mask.arrays), *starts)
    with eager_without_mesh():
        found = classify_on_host(BlockedMask(mask.program, (entries, 1), sizes, origin), captures, None)
    partial, full = (
        places[real[0][places[:, 0], places[:, 2]] & real[1][places[:, 0], places[:, 3]]] for places in found
    )
    return partial, full
