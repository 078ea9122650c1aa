"""Tile sizes and shared memory of the backward kernels for mma.sync, and which sizes run on which card.

A CTA has one or two warpgroups and no copying warpgroup. It owns a tile of one axis, of which each warpgroup has `rows` tokens, and
visits tiles of the other axis, which lie in *slots* of shared memory: with two slots the next tile is copied while one is computed.

    kernel     owns                   visits
    dQ         queries and dO         keys and values
    dK/dV      keys and values        queries and dO

Three things bound the sizes:

- registers: 255 a thread hold the accumulators of the gradients and two tiles of scores;
- the bandwidth of shared memory: each warp reads the whole right operand of a product, so larger tiles of scores read less;
- the room in shared memory, which differs between cards (sm80_cards.py).

Above head dim LARGEST_JOINT_DIM the accumulators of dK and dV do not fit the registers together, and the dK/dV kernel runs once for each.
No size changes a bit of a result: each gradient adds up the visited tokens in the same order, K of sm80_products.py at a time.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward_tiles import padded_dims
from flexjax.backends.mosaic_gpu.shared_memory import Barriers, Description, Part, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.sm80_cards import WARPGROUP, Card, Copying, meeting_barrier
from flexjax.plan.kernel_plan import KernelPlan

LARGEST_JOINT_DIM = 128
"""The largest padded head dim at which one dK/dV kernel computes both gradients."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    copying        how tiles come to shared memory
    rows, groups   owned tokens of a warpgroup, and number of warpgroups
    visited        tokens of a visited tile
    slots          of visited tiles, 1 or 2
    """

    copying: Copying
    rows: int
    groups: int
    visited: int
    slots: int

    @property
    def owned(self) -> int:
        """Owned tokens of a CTA."""
        return self.rows * self.groups


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of either kernel. "First" are the operands of the scores (queries or keys), "second" those
    of dP (dO or values); D and E are the padded head dims of queries and values.

    own_first, own_second   [owned, D or E] the CTA's own tokens
    first, second           [slots, visited, D or E] visited tiles
    own_full, full          one barrier: the own tokens have arrived; [slots] barriers: a visited tile has. None with
                            cp.async
    meeting                 the barrier that stands for the CTA's in the simulator; None on the device and for one
                            warpgroup
    """

    own_first: Part
    own_second: Part
    first: Part
    second: Part
    own_full: Part | None
    full: Part | None
    meeting: Part | None


def scratch(plan: KernelPlan, tiles: Tiles) -> Scratch[Description]:
    """The shared memory of a CTA of either kernel with the sizes of `tiles`, for the padded head dims and the dtype of
    `plan`. The barriers of TMA expect two arrivals of each warpgroup, because every warpgroup copies its share of both
    tiles of a slot.
    """
    dim, value_dim = padded_dims(plan)
    arrivals = 2 * tiles.groups
    by_tma = tiles.copying == "tma"
    return Scratch(
        SwizzledTiles((tiles.owned, dim), plan.dtype),
        SwizzledTiles((tiles.owned, value_dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, value_dim), plan.dtype),
        Barriers(1, arrivals) if by_tma else None,
        Barriers(tiles.slots, arrivals) if by_tma else None,
        meeting_barrier(tiles.groups, plan.options.interpret),
    )


SMALL_MEMORY = 99 * 1024
"""Bytes of shared memory of a CTA on 8.6, 8.9 and 12.x, whose tensor cores do half of what those of 8.0 do."""
Size = tuple[int, int, int, int]
"""(rows, groups, visited, slots) of Tiles."""
DQ_SIZES: dict[int, tuple[Size, ...]] = {
    64: ((128, 1, 64, 2), (64, 2, 64, 2), (64, 1, 64, 2), (64, 1, 32, 2)),
    128: ((128, 1, 32, 2), (128, 1, 32, 1), (64, 2, 64, 2), (64, 2, 32, 2), (64, 1, 64, 2), (64, 1, 32, 2), (64, 1, 32, 1)),
    256: ((64, 2, 32, 2), (64, 2, 32, 1), (64, 1, 32, 2), (64, 1, 16, 2), (64, 1, 32, 1), (64, 1, 16, 1)),
}  # fmt: skip
"""Sizes of the dQ kernel for head dims up to so many, the expected best first. NOTES_sm80_backward.md has the clocks behind the order."""
DKV_SIZES: dict[int, tuple[Size, ...]] = {
    64: ((128, 1, 32, 2), (64, 2, 64, 2), (64, 1, 64, 2), (64, 1, 32, 2)),
    128: ((64, 2, 64, 2), (64, 2, 32, 2), (64, 1, 64, 2), (64, 1, 64, 1), (64, 1, 32, 2), (64, 1, 32, 1)),
    256: DQ_SIZES[256],
}
"""The same of the dK/dV kernel."""


def dq_candidates(plan: KernelPlan, card: Card) -> tuple[Tiles, ...]:
    """Sizes of the dQ kernel that fit the plan, its block mask, block_q_bwd and the shared memory and registers of the
    card, the expected best first; empty if none fit.
    """
    block = None if plan.blocks is None else plan.blocks.block_q
    return _fitting(plan, card, DQ_SIZES, block, plan.options.block_q_bwd)


def dkv_candidates(plan: KernelPlan, card: Card) -> tuple[Tiles, ...]:
    """Sizes of the dK/dV kernel that fit the plan, its block mask, block_kv_bwd and the shared memory and registers of
    the card, the expected best first; empty if none fit.
    """
    block = None if plan.blocks is None else plan.blocks.block_kv
    return _fitting(plan, card, DKV_SIZES, block, plan.options.block_kv_bwd)


def refuses(plan: KernelPlan, card: Card) -> str | None:
    """A sentence that says that the dQ kernel or, if that has a tile, the dK/dV kernel has no tile for this plan on this
    card: none that has the head dims, divides the mask's blocks and is the block_q_bwd (dQ) or block_kv_bwd (dK/dV) of
    the options, if these are set; None if both have one.
    """
    for name, found in (("block_q_bwd", dq_candidates(plan, card)), ("block_kv_bwd", dkv_candidates(plan, card))):
        if not found:
            return (
                f"The GPU kernels on mma.sync have no backward tile for {name}={getattr(plan.options, name)} and head dims "
                f"{plan.head_dim + plan.extra_dim} and {plan.value_dim} on compute capability {card.capability}: they take 64 or 128, "
                "dividing the mask's blocks."
            )
    return None


def _fitting(
    plan: KernelPlan, card: Card, sizes: dict[int, tuple[Size, ...]], block: int | None, asked: int | None
) -> tuple[Tiles, ...]:
    """The sizes among `sizes` that fit the plan's head dims and the card, the expected best first; empty if none do.
    Head dims are at most 256: support.py refuses larger ones before.

    sizes   largest padded head dim -> (rows, groups, visited, slots) of each candidate
    block   tokens of a block of the mask on the owned axis, which the owned tokens must divide; None: there are no
            blocks
    asked   the owned tokens that the options ask for; None: any

    Sizes of which an SM holds at least two warpgroups come first, because one multiplies while the other computes probabilities.
    On the cards with SMALL_MEMORY the tensor cores are slower than shared memory at every size, so 64 rows, which take
    fewer registers, go before 128.
    """
    dim = max(padded_dims(plan))
    made = [Tiles(card.copying, *size) for size in sizes[next(most for most in sizes if dim <= most)]]
    able = [t for t in made if (block is None or block % t.owned == 0) and asked in (None, t.owned)]
    warpgroups = {t: t.groups * card.ctas(scratch_bytes(scratch(plan, t)), WARPGROUP * t.groups) for t in able}
    worse = lambda t: (warpgroups[t] < 2, t.rows > 64 and card.cta_memory <= SMALL_MEMORY)
    return tuple(sorted((t for t in able if warpgroups[t]), key=worse))
