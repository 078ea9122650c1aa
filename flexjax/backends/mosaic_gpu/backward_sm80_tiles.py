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

Where the accumulators of dK and dV do not fit the registers together (`Tiles.joint`), the dK/dV kernel runs once for each.
No size changes a bit of a result: each gradient adds up the visited tokens in the same order, K of sm80_products.py at a time.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward_tiles import padded_dims
from flexjax.backends.mosaic_gpu.shared_memory import Barriers, Description, Part, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.sm80_cards import Card, Copying, meeting_barrier
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP
from flexjax.plan.kernel_plan import KernelPlan

ACCUMULATORS = 128
"""Registers of a thread that the accumulators of gradients may take."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel.

    copying        how tiles come to shared memory
    rows, groups   owned tokens of a warpgroup, and number of warpgroups
    visited        tokens of a visited tile
    slots          of visited tiles, 1 or 2
    split_columns  whether the warpgroups share their rows and split the columns (backward_sm80_split.py); then there are two of them,
                   and one slot
    """

    copying: Copying
    rows: int
    groups: int
    visited: int
    slots: int
    split_columns: bool = False

    @property
    def owned(self) -> int:
        """Owned tokens of a CTA."""
        return self.rows if self.split_columns else self.rows * self.groups

    @property
    def column_groups(self) -> int:
        """Warpgroups that share the columns of a tile of scores or of a gradient."""
        return self.groups if self.split_columns else 1

    @property
    def scored(self) -> int:
        """Visited tokens of which a warpgroup computes the scores."""
        return self.visited // self.column_groups

    def joint(self, plan: KernelPlan) -> bool:
        """Whether one dK/dV kernel computes both gradients: whether the accumulators of both, of the padded head dims of `plan`, take at
        most ACCUMULATORS registers of a thread.
        """
        return self.rows * sum(padded_dims(plan)) <= WARPGROUP * ACCUMULATORS * self.column_groups


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of either kernel. "First" are the operands of the scores (queries or keys), "second" those
    of dP (dO or values); D and E are the padded head dims of queries and values.

    own_first, own_second   [owned, D or E] the CTA's own tokens
    first, second           [slots, visited, D or E] visited tiles
    own_full, full          one barrier: the own tokens have arrived; [slots] barriers: a visited tile has, both its operands or, where
                            warpgroups split the columns, the first. None with cp.async
    meeting                 the barrier that stands for the CTA's in the simulator; None on the device and for one
                            warpgroup
    second_full             [1] barriers: the second operand of the visited tile has arrived. None with cp.async, and where warpgroups
                            have rows of their own
    weights                 [gradients, groups, owned, scored] P and dS in 16 bits, one for each gradient of the kernel, where warpgroups
                            split the columns; else None
    """

    own_first: Part
    own_second: Part
    first: Part
    second: Part
    own_full: Part | None
    full: Part | None
    meeting: Part | None
    second_full: Part | None = None
    weights: Part | None = None


def scratch(plan: KernelPlan, tiles: Tiles, gradients: int = 1) -> Scratch[Description]:
    """The shared memory of a CTA of either kernel with the sizes of `tiles`, for the padded head dims and the dtype of
    `plan`. The barriers of TMA expect an arrival of each warpgroup for each tile, because every warpgroup copies its share.

    gradients   how many gradients the kernel computes: 2 for dK and dV together, else 1
    """
    dim, value_dim = padded_dims(plan)
    by_tma, split = tiles.copying == "tma", tiles.split_columns
    weights = (gradients, tiles.groups, tiles.owned, tiles.scored)
    return Scratch(
        SwizzledTiles((tiles.owned, dim), plan.dtype),
        SwizzledTiles((tiles.owned, value_dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, value_dim), plan.dtype),
        Barriers(1, 2 * tiles.groups) if by_tma else None,
        Barriers(tiles.slots, tiles.groups if split else 2 * tiles.groups) if by_tma else None,
        meeting_barrier(tiles.groups, plan.options.interpret),
        Barriers(tiles.slots, tiles.groups) if by_tma and split else None,
        SwizzledTiles(weights, plan.dtype) if split else None,
    )


SMALL_MEMORY = 99 * 1024
"""Bytes of shared memory of a CTA on 8.6, 8.9 and 12.x, whose tensor cores do half of what those of 8.0 do."""

SPILLING = ("10.0", "10.3")
"""Compute capabilities for which ptxas spills up to 476 bytes a thread of dK/dV kernels that visit 64 tokens at head dims from 65 to 128;
for 9.0, and with 32 visited tokens, it spills up to 28."""


class Size(typing.NamedTuple):
    """The fields of Tiles that do not depend on the card."""

    rows: int
    groups: int
    visited: int
    slots: int
    split_columns: bool = False


def _split(rows: int, visited: int) -> Size:
    """Two warpgroups with the same rows, which split the columns."""
    return Size(rows, 2, visited, 1, True)


DQ_SIZES: dict[int, tuple[Size, ...]] = {
    64: (Size(128, 1, 64, 2), Size(64, 2, 64, 2), Size(64, 1, 64, 2), Size(64, 1, 32, 2)),
    128: (
        Size(128, 1, 32, 2), Size(128, 1, 32, 1), Size(64, 2, 64, 2), Size(64, 2, 32, 2), Size(64, 1, 64, 2), Size(64, 1, 32, 2),
        Size(64, 1, 32, 1),
    ),
    256: (
        _split(128, 64), _split(128, 32), Size(64, 2, 32, 2), _split(64, 64), Size(64, 2, 32, 1), _split(64, 32), Size(64, 1, 32, 2),
        Size(64, 1, 16, 2), Size(64, 1, 32, 1), Size(64, 1, 16, 1),
    ),
}  # fmt: skip
"""Sizes of the dQ kernel for head dims up to so many, the expected best first. NOTES_sm80_backward.md has the clocks behind the order."""
DKV_SIZES: dict[int, tuple[Size, ...]] = {
    64: (Size(128, 1, 32, 2), Size(64, 2, 64, 2), Size(64, 1, 64, 2), Size(64, 1, 32, 2)),
    128: (
        Size(64, 2, 64, 2), Size(64, 2, 32, 2), Size(64, 1, 64, 2), Size(64, 1, 64, 1), Size(64, 1, 32, 2), Size(64, 1, 32, 1),
    ),
    256: (
        _split(64, 64), _split(128, 64), Size(64, 2, 32, 2), Size(64, 2, 32, 1), _split(64, 32), Size(64, 1, 32, 2), Size(64, 1, 16, 2),
        Size(64, 1, 32, 1), Size(64, 1, 16, 1),
    ),
}  # fmt: skip
"""The same of the dK/dV kernel. Above head dim 128 sizes of 64 rows whose warpgroups split the columns compute dK and dV together."""


def dq_candidates(plan: KernelPlan, card: Card) -> tuple[Tiles, ...]:
    """Sizes of the dQ kernel that fit the plan, its block mask, block_q_bwd and the shared memory and registers of the
    card, the expected best first; empty if none fit.
    """
    block = None if plan.blocks is None else plan.blocks.block_q
    return _fitting(plan, card, False, block, plan.options.block_q_bwd)


def dkv_candidates(plan: KernelPlan, card: Card) -> tuple[Tiles, ...]:
    """Sizes of the dK/dV kernel that fit the plan, its block mask, block_kv_bwd and the shared memory and registers of
    the card, the expected best first; empty if none fit.
    """
    block = None if plan.blocks is None else plan.blocks.block_kv
    return _fitting(plan, card, True, block, plan.options.block_kv_bwd)


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


def _fitting(plan: KernelPlan, card: Card, by_key: bool, block: int | None, asked: int | None) -> tuple[Tiles, ...]:
    """The sizes of DKV_SIZES (`by_key`) or DQ_SIZES that fit the plan's head dims and the card, the expected best first; empty if none do.
    Head dims are at most 256: support.py refuses larger ones before.

    by_key  whether the kernel owns keys
    block   tokens of a block of the mask on the owned axis, which the owned tokens must divide; None: there are no
            blocks
    asked   the owned tokens that the options ask for; None: any

    Sizes of which an SM holds at least two warpgroups come first, because one multiplies while the other computes probabilities.
    On the cards with SMALL_MEMORY the tensor cores are slower than shared memory at every size, so 64 rows, which take
    fewer registers, go before 128. On those of SPILLING 32 visited tokens, whose scores take half of the registers, go before 64 in the
    dK/dV kernel at head dims from 65 to 128. Up to 64 the first size has 32; above 128 warpgroups that split the columns spill nothing.
    """
    dim, sizes = max(padded_dims(plan)), DKV_SIZES if by_key else DQ_SIZES
    made = [Tiles(card.copying, *size) for size in sizes[next(most for most in sizes if dim <= most)]]
    able = [t for t in made if (block is None or block % t.owned == 0) and asked in (None, t.owned)]
    bytes_of = lambda t: scratch_bytes(scratch(plan, t, 2 if by_key and t.joint(plan) else 1))
    warpgroups = {t: t.groups * card.ctas(bytes_of(t), WARPGROUP * t.groups) for t in able}
    spills = by_key and 64 < dim <= 128 and card.capability in SPILLING
    small = card.cta_memory <= SMALL_MEMORY
    worse = lambda t: (warpgroups[t] < 2, small and t.rows > 64, spills and t.visited > 32)
    return tuple(sorted((t for t in able if warpgroups[t]), key=worse))
