"""Which calls the decode kernel on mma.sync runs on a card, and its configuration: tiles, rings, shared memory.

Chunks are those of the kernel for Hopper, so keys are cut at the same positions on every card. The keys of a tile
follow from the head dims and the card's shared memory, never from the batch or the length of the keys.
"""

import dataclasses
import math
import typing

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import COPY_ROWS, ROWS, TILE_BYTES, DecodeTile
from flexjax.backends.mosaic_gpu.forward.mma_tiles import mma_dim
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card, Copying, ring_barriers
from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers, Part, PlainArray, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP, WARPS
from flexjax.plan.kernel_plan import KernelPlan

MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class MmaDecodeTile(DecodeTile):
    """One configuration of the decode kernel on mma.sync.

    A CTA is one warpgroup, which copies and computes. `stages` are any number from 1 on; there is one query slot.
    """

    copying: Copying = "tma"

    groups = 1

    @property
    def copy_rows(self) -> int:
        return COPY_ROWS if self.copying == "tma" else 1

    @property
    def stored_rows(self) -> int:
        """Packed rows of each key head in global memory."""
        # threads read `columns` of a `transposed` tile from global memory
        return self.columns if self.transposed else super().stored_rows

    def resident_ctas(self, card: Card) -> int:
        """How many CTAs with this configuration an SM of the card holds."""
        # of one warpgroup and 255 registers a thread
        return card.ctas(scratch_bytes(mma_decode_scratch(self)), WARPGROUP)


class MmaDecodeScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the decode kernel on mma.sync."""

    query: Part | None  # [ROWS, D]; `transposed` reads queries from global memory
    key: Part  # [stages, block_kv, D]; bytes of a quantised cache, row-major unless `transposed`
    value: Part  # [stages, block_kv, E]
    wide_key: Part | None  # [block_kv, D] the tile of a quantised cache in 16 bits, unless `transposed`
    wide_value: Part | None
    other: Part | None  # [4, used_rows, E] float32, what each warp has summed, where `transposed`
    other_stats: Part | None  # [4, 2, columns] float32, its references and its sums of exponentials
    query_full: Part | None  # the barriers of TMA's copies; None with cp.async
    key_full: Part | None
    value_full: Part | None


def mma_decode_scratch(tile: MmaDecodeTile, dtype: str = "bfloat16") -> MmaDecodeScratch:
    """The shared memory of a CTA with the configuration `tile`; `dtype` is that of the products."""
    ring = None if tile.copying == "cp.async" else Barriers(tile.stages, arrivals=tile.copies)
    straight = tile.transposed
    widens = tile.stored is not None and not straight

    def slots(dim: int) -> SwizzledTiles | PlainArray:
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
    """Why the decode kernel on mma.sync cannot run a plan on a card, in a sentence; None where it can."""
    reason = decode_hopper_tiles.refuses_call(plan)
    if reason is None and not _candidates(plan, card):
        what = f"{plan.cache_dtype or plan.dtype} with head dims {plan.head_dim} and {plan.value_dim}"
        return f"Its tiles of {what} do not fit the shared memory of {card}."
    return reason


def mma_decode_tile(plan: KernelPlan, card: Card) -> MmaDecodeTile:
    """The best configuration of a plan that `mma_decode_refuses` does not refuse."""
    return _candidates(plan, card)[0]


def _candidates(plan: KernelPlan, card: Card) -> list[MmaDecodeTile]:
    """The configurations that fit the card, the expected best first."""
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
                chunk=decode_hopper_tiles.chunk_of(rows, head_dim, value_dim, block_kv),
                stages=stages,
                query_slots=1,
                head_dim=head_dim,
                value_dim=value_dim,
                page_rows=math.gcd(page, block_kv) if page else block_kv,
                stored=stored,
                lazy_rescale=not plan.max_scores,
                straight=not may_be_large_product(plan.score),
                statistics=2 + plan.expectations,
                copying=card.copying,
            )
            whole = not tile.transposed or block_kv % 64 == 0  # each warp has 16 of every 64 keys
            if whole and tile.resident_ctas(card):
                found.append(tile)
    # Two CTAs of an SM: one multiplies while the other does its softmax. Two slots: a tile is copied while another is
    # multiplied. Then come the larger tiles and the longer rings.
    found.sort(key=lambda tile: min(tile.stages, 2) * min(tile.resident_ctas(card), 2), reverse=True)
    return found
