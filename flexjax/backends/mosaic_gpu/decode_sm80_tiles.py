"""Which calls the decode kernel on mma.sync runs on a card, and its configuration: tiles, rings, shared memory.

    mma_decode_refuses(plan, card)   why the kernel cannot run a plan on a card, None where it can
    mma_decode_tile(plan, card)      its configuration

Chunks are those of the kernel for Hopper (`decode_tiles.chunk_of`), so keys are cut at the same positions on every card. The keys of a
tile follow from the head dims and the card's shared memory, never from the batch or the length of the keys. Nothing here imports
Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.backends.mosaic_gpu import decode_tiles
from flexjax.backends.mosaic_gpu.decode_tiles import COPY_ROWS, ROWS, TILE_BYTES, DecodeTile
from flexjax.backends.mosaic_gpu.forward_sm80_tiles import mma_dim
from flexjax.backends.mosaic_gpu.shared_memory import Barriers, Part, PlainArray, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.sm80_cards import Card, Copying, ring_barriers
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP, WARPS
from flexjax.plan.kernel_plan import KernelPlan

MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class MmaDecodeTile(DecodeTile):
    """One configuration of the decode kernel on mma.sync: beside the fields of DecodeTile

    copying   how tiles come to shared memory

    A CTA is one warpgroup, which copies and computes. `stages` are slots of the ring of key tiles and of that of value tiles, any number
    from 1 on; there is one query slot.
    """

    copying: Copying = "tma"

    groups = 1

    @property
    def copy_rows(self) -> int:
        """A copy starts at a multiple of this many rows: COPY_ROWS with TMA, 1 with cp.async."""
        return COPY_ROWS if self.copying == "tma" else 1

    @property
    def stored_rows(self) -> int:
        """Packed rows of each key head in global memory: where the tile is `transposed`, the `columns` that threads read; otherwise
        `used_rows`, rounded up to a multiple of 8 if they are more than 8.
        """
        return self.columns if self.transposed else super().stored_rows

    def resident_ctas(self, card: Card) -> int:
        """How many CTAs with this configuration an SM of the card holds, each of one warpgroup and 255 registers a thread; 0 where one
        does not fit the shared memory of a CTA.
        """
        return card.ctas(scratch_bytes(mma_decode_scratch(self)), WARPGROUP)


class MmaDecodeScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the decode kernel on mma.sync, for head dims D and E.

    query         [ROWS, D], the packed queries; None where the tile is `transposed`, which reads them from global memory
    key, value    [stages, block_kv, D] and [stages, block_kv, E], rings of key and value tiles; bytes of a quantised cache, in row-major
                  order unless the tile is `transposed`
    wide_*        [block_kv, D or E], the tile that is multiplied, widened to 16 bits; None but for a quantised cache that is not
                  `transposed`
    other         [4, used_rows, E] float32, what each warp has summed; None where the tile is not `transposed`
    other_stats   [4, 2, columns] float32, its references and its sums of exponentials; None likewise
    *_full        the barriers at which TMA's copies arrive, one for each slot; None with cp.async, `query_full` also where the tile is
                  `transposed`
    """

    query: Part | None
    key: Part
    value: Part
    wide_key: Part | None
    wide_value: Part | None
    other: Part | None
    other_stats: Part | None
    query_full: Part | None
    key_full: Part | None
    value_full: Part | None


def mma_decode_scratch(tile: MmaDecodeTile, dtype: str = "bfloat16") -> MmaDecodeScratch:
    """The shared memory of a CTA with the configuration `tile`, in the descriptions that `kernel_parts.launch` takes.

    dtype   name of the dtype of the products, of 16 bits; its choice does not change the bytes

    The barriers of key and value slots expect one arrival for each part of a tile (`tile.copies`), that of the queries one.
    """
    ring = None if tile.copying == "cp.async" else Barriers(tile.stages, arrivals=tile.copies)
    straight = tile.transposed
    widens = tile.stored is not None and not straight

    def slots(dim: int) -> SwizzledTiles | PlainArray:
        """A ring of key or value tiles with `dim` features: bytes for a quantised cache, in row-major order or, where the tile is
        `transposed`, swizzled; else SwizzledTiles of `dtype`.
        """
        shape = (tile.stages, tile.block_kv, dim)
        return PlainArray(shape, "int8") if widens else SwizzledTiles(shape, "int8" if straight else dtype)

    return MmaDecodeScratch(
        query=None if straight else SwizzledTiles((ROWS, tile.head_dim), dtype),
        key=slots(tile.head_dim),
        value=slots(tile.value_dim),
        wide_key=SwizzledTiles((tile.block_kv, tile.head_dim), dtype) if widens else None,
        wide_value=SwizzledTiles((tile.block_kv, tile.value_dim), dtype) if widens else None,
        other=PlainArray((WARPS, tile.used_rows, tile.value_dim), "float32") if straight else None,
        other_stats=PlainArray((WARPS, 2, tile.columns), "float32") if straight else None,
        query_full=None if straight else ring_barriers(tile.copying, 1, tile.groups),
        key_full=ring,
        value_full=ring,
    )


# ------------------------------------------------------------------- the choice


def mma_decode_refuses(plan: KernelPlan, card: Card) -> str | None:
    """Why the decode kernel on mma.sync cannot run a plan on a card, in a sentence; None where it can: the reasons of
    `decode_tiles.refuses_call`, and tiles that do not fit the card's shared memory. Whether the kernel would be faster than the forward
    kernel is not considered.
    """
    reason = decode_tiles.refuses_call(plan)
    if reason is None and not _candidates(plan, card):
        what = f"{plan.cache_dtype or plan.dtype} with head dims {plan.head_dim} and {plan.value_dim}"
        return f"Its tiles of {what} do not fit the shared memory of compute capability {card.capability}."
    return reason


def mma_decode_tile(plan: KernelPlan, card: Card) -> MmaDecodeTile:
    """The best configuration that fits the card (`_candidates`), for a plan that `mma_decode_refuses` does not refuse; IndexError where
    none fits.
    """
    return _candidates(plan, card)[0]


def _candidates(plan: KernelPlan, card: Card) -> list[MmaDecodeTile]:
    """The configurations that fit the card, the expected best first; empty if none fit. They have 128, 64 or 32 keys a tile and
    MOST_STAGES to 1 slots in each ring: 128 keys only where keys and values of a tile take at most TILE_BYTES, 32 not where the tile is
    `transposed`.

    An SM should hold two CTAs, because one multiplies while the other does its softmax and one begins a work item while the other is in
    the middle of its own; each should have two slots in its rings, so that a tile is copied while another is multiplied. Then come the
    larger tiles and the longer rings.
    """
    head_dim, value_dim = mma_dim(plan.head_dim), mma_dim(plan.value_dim)
    rows, page, stored = plan.q_len * plan.group, plan.page, plan.cache_dtype
    item_bytes = 2 if stored is None else 1
    found: list[MmaDecodeTile] = []
    for block_kv in (128, 64, 32):
        if block_kv == 128 and block_kv * (head_dim + value_dim) * item_bytes > TILE_BYTES:
            continue
        for stages in range(MOST_STAGES, 0, -1):
            tile = MmaDecodeTile(
                used_rows=rows,
                block_kv=block_kv,
                chunk=decode_tiles.chunk_of(rows, head_dim, value_dim, block_kv),
                stages=stages,
                query_slots=1,
                head_dim=head_dim,
                value_dim=value_dim,
                page_rows=math.gcd(page, block_kv) if page else block_kv,
                stored=stored,
                lazy_rescale=not plan.max_scores,
                straight=not may_be_large_product(plan.score),
                copying=card.copying,
            )
            whole = not tile.transposed or block_kv % 64 == 0  # each warp has 16 of every 64 keys
            if whole and tile.resident_ctas(card):
                found.append(tile)
    found.sort(key=lambda tile: min(tile.stages, 2) * min(tile.resident_ctas(card), 2), reverse=True)
    return found
