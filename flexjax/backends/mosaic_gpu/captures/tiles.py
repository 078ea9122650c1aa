"""Tile sizes, ring depths and shared memory of the kernel that sums gradients of captured arrays (kernel.py), for
Hopper (hopper.py) and for mma.sync (mma.py).

A tile of scores has 64 or 128 queries and as many keys; a computing warpgroup has ROWS of the queries, and keys come
in slots of ROWS, on mma.sync of `keys_of_part`. A *ring* is a buffer in shared memory with several slots, filled by a
copying warpgroup, on mma.sync by the computing ones. The *staged array* is a captured array, such as a pair bias, whose
tiles come through shared memory (backward/pair_bias.py); only the kernel for Hopper stages one.
"""

import functools
import typing
from collections.abc import Callable

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import padded_dim
from flexjax.backends.mosaic_gpu.machine.columns import Exchange, columns_of, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, parts_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card, Copying, meeting_barrier
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    Barriers,
    Description,
    Part,
    PlainArray,
    SwizzledTiles,
    fits,
    scratch_bytes,
)
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

ROWS = 64  # queries of a computing warpgroup, and keys of a slot on Hopper


def _dims(plan: KernelPlan) -> tuple[int, int]:
    """(columns of queries and keys, columns of values) of a CTA, padded, without extra features."""
    ctas = ctas_of(plan)
    return padded_dim(columns_of(plan.head_dim, ctas)), padded_dim(columns_of(plan.value_dim, ctas))


def warpgroups_for(plan: KernelPlan) -> int:
    """Computing warpgroups of 64 queries: two where 128 x 128 tiles fit and divide the mask's blocks, else one."""
    dims = sum(_dims(plan)) * parts_of(plan)
    blocks = plan.blocks
    divide = blocks is None or (blocks.block_q % 128 == 0 and blocks.block_kv % 128 == 0)
    return 2 if divide and dims <= 256 else 1


def fits_one_slot(plan: KernelPlan) -> bool:
    """Whether the kernel for Hopper fits shared memory with the smallest rings; `plan` has no extra features."""
    groups, dims = warpgroups_for(plan), _dims(plan)
    rings = RingDepths(1, groups, False)
    return fits(capture_scratch(groups, rings, dims, part_dtype(plan), None, parts_of(plan), ctas_of(plan)))


def keys_of_part(plan: KernelPlan) -> int:
    """Keys of a part in the kernel for mma.sync: half of ROWS where a part of ROWS would not fit the smallest card."""
    return ROWS if padded_dim(plan.head_dim) + padded_dim(plan.value_dim) <= 256 else ROWS // 2


class RingDepths(typing.NamedTuple):
    """Slots of the rings: tiles of Q and dO, tiles of 64 keys and values; and whether each slot of Q also has a tile of
    the staged array.
    """

    queries: int
    keys: int
    staged: bool


class CaptureScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the kernel for Hopper; a tile is [groups * ROWS, groups * ROWS], D and E are the padded
    columns of a CTA of keys and of values.

    query, d_out           [query slots * parts, queries of a tile, D or E]
    key, value             [key slots * parts, ROWS, D or E]
    query_full, key_full   [slots] a tile has arrived; `query_full` also counts dO and the staged tile, `key_full` the
                           values
    query_free, key_free   [slots] all computing warpgroups have read a tile
    staged                 [query slots, tile] tiles of the staged array, None without one
    exchange               of the partial sums of S and dP; None where a CTA has all columns
    private                sums by element (`private_sums`); None where the kernel has none
    """

    query: Part
    key: Part
    value: Part
    d_out: Part
    query_full: Part
    key_full: Part
    query_free: Part
    key_free: Part
    staged: Part | None
    exchange: Exchange[Part] | None = None
    private: Part | None = None


def capture_scratch(
    groups: int,
    rings: RingDepths,
    dims: tuple[int, int],
    dtype: str,
    staged_dtype: str | None,
    parts: int = 1,
    ctas: int = 1,
    private: PlainArray | None = None,
) -> CaptureScratch[Description]:
    """The shared memory of a CTA of the kernel for Hopper.

    dims           padded columns of a CTA, of keys and of values
    staged_dtype   of the array to stage; used only if `rings.staged`
    parts          of an operand (machine/float_parts.py)
    ctas           that share the columns (machine/columns.py)
    private        sums by element (`private_sums`)

    Full slots expect one arrival for each copy, free slots one of each computing warpgroup.
    """
    dim, value_dim = dims
    tile = groups * ROWS
    staged = None
    if rings.staged and staged_dtype is not None:
        staged = SwizzledTiles((rings.queries, tile, tile), staged_dtype)
    return CaptureScratch(
        query=SwizzledTiles((rings.queries * parts, tile, dim), dtype),
        key=SwizzledTiles((rings.keys * parts, ROWS, dim), dtype),
        value=SwizzledTiles((rings.keys * parts, ROWS, value_dim), dtype),
        d_out=SwizzledTiles((rings.queries * parts, tile, value_dim), dtype),
        query_full=Barriers(rings.queries, 2 * parts + (0 if staged is None else 1)),
        key_full=Barriers(rings.keys, 2 * parts),
        query_free=Barriers(rings.queries, groups),
        key_free=Barriers(rings.keys, groups),
        staged=staged,
        exchange=exchange_scratch(ctas, groups, (ROWS, ROWS)),
        private=private,
    )


def ring_depths(
    groups: int,
    dims: tuple[int, int],
    dtype: str,
    staged_dtype: str | None,
    parts: int = 1,
    ctas: int = 1,
    private: PlainArray | None = None,
) -> RingDepths:
    """The deepest rings that fit shared memory; staging an array comes before deeper rings. Else the smallest."""
    depths = [(2, 2 * groups), (2, groups), (1, groups)]
    if private is not None:  # it has long between the products of one part and those of the next
        depths.append((1, 1))
    choices = [
        RingDepths(queries, keys, staged)
        for staged in ((False,) if staged_dtype is None else (True, False))
        for queries, keys in depths
    ]
    scratch = lambda rings: capture_scratch(groups, rings, dims, dtype, staged_dtype, parts, ctas, private)
    fit = (rings for rings in choices if fits(scratch(rings)))
    return next(fit, choices[-1])


def private_sums(plan: KernelPlan, elements: int) -> PlainArray | None:
    """`most_copies` on Hopper."""
    groups, dims, sizes = warpgroups_for(plan), _dims(plan), (parts_of(plan), ctas_of(plan))
    scratch = functools.partial(capture_scratch, groups, RingDepths(1, 1, False), dims, part_dtype(plan), None, *sizes)
    return most_copies(plan, elements, lambda made: fits(scratch(made)))


COPIES = (128, 64, 32, 16)  # copies of the private sums that a warpgroup may have, the most first


def most_copies(plan: KernelPlan, elements: int, has_room: Callable[[PlainArray], bool]) -> PlainArray | None:
    """The sums of a CTA (private_sums.py), [groups, rows, copies], for a head that reads so many elements, with the
    most copies for which there is shared memory beside the smallest rings; None if there is none.
    """
    rows = cdiv(elements, ROWS) * ROWS
    choices = (PlainArray((warpgroups_for(plan), rows, copies), "float32") for copies in COPIES)
    return next(filter(has_room, choices), None)


# ------------------------------------------------------------------- mma.sync


class MmaSlots(typing.NamedTuple):
    """Slots of the kernel for mma.sync: of Q and dO of a tile, and of K and V of a part; 1 or 2."""

    queries: int
    keys: int


class MmaScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the kernel for mma.sync, with G warpgroups; a tile has G * ROWS queries, a part
    `keys_of_part` keys; D and E are the padded head dims of keys and values.

    query, d_out           [query slots, queries of a tile, D or E]
    key, value             [key slots, keys of a part, D or E]
    query_full, key_full   [slots] both tiles of a slot have arrived; None with cp.async
    meeting                the simulator's barrier of the CTA; None on the device and for one warpgroup
    private                as in CaptureScratch
    """

    query: Part
    d_out: Part
    key: Part
    value: Part
    query_full: Part | None
    key_full: Part | None
    meeting: Part | None
    private: Part | None


def mma_scratch(
    plan: KernelPlan, slots: MmaSlots, copying: Copying, private: PlainArray | None
) -> MmaScratch[Description]:
    """The shared memory of a CTA of the kernel for mma.sync."""
    groups, keys = warpgroups_for(plan), keys_of_part(plan)
    dim, value_dim, by_tma = padded_dim(plan.head_dim), padded_dim(plan.value_dim), copying == "tma"
    # every warpgroup copies its share of each of the two tiles of a slot
    full = lambda count: Barriers(count, 2 * groups) if by_tma else None
    return MmaScratch(
        query=SwizzledTiles((slots.queries, groups * ROWS, dim), plan.dtype),
        d_out=SwizzledTiles((slots.queries, groups * ROWS, value_dim), plan.dtype),
        key=SwizzledTiles((slots.keys, keys, dim), plan.dtype),
        value=SwizzledTiles((slots.keys, keys, value_dim), plan.dtype),
        query_full=full(slots.queries),
        key_full=full(slots.keys),
        meeting=meeting_barrier(groups),
        private=private,
    )


def mma_slots(plan: KernelPlan, card: Card, private: PlainArray | None) -> MmaSlots:
    """The most slots of the kernel for mma.sync that fit the card; one of both kinds if none fit."""
    choices = (MmaSlots(2, 2), MmaSlots(1, 2), MmaSlots(1, 1))
    fit = (n for n in choices if scratch_bytes(mma_scratch(plan, n, card.copying, private)) <= card.cta_memory)
    return next(fit, choices[-1])


def mma_private_sums(plan: KernelPlan, elements: int, card: Card) -> PlainArray | None:
    """`most_copies` on a card."""
    scratch = functools.partial(mma_scratch, plan, MmaSlots(1, 1), card.copying)
    return most_copies(plan, elements, lambda made: scratch_bytes(scratch(made)) <= card.cta_memory)
