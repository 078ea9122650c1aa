"""Tile sizes and shared memory of the backward kernels for mma.sync, and which sizes run on which card.

A CTA has one or two warpgroups and no copying warpgroup. It owns a tile of one axis (dQ: queries, dK/dV: keys) and
visits tiles of the other axis, which lie in *slots* of shared memory: with two, the next tile is copied meanwhile.

Three things bound the sizes:

- registers: 255 a thread hold the accumulators of the gradients and two tiles of scores;

- the bandwidth of shared memory: each warp reads the whole right operand of a product, so larger tiles read less;

- the room in shared memory, which differs between cards (machine/mma_cards.py).

No size changes a bit of a result: each gradient adds up the visited tokens in the same order, K of
machine/mma_products.py at a time.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import padded_dims
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card, Copying, meeting_barrier
from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers, Description, Part, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP
from flexjax.plan.kernel_plan import KernelPlan

ACCUMULATORS = 128  # registers of a thread that the accumulators of gradients may take


@dataclasses.dataclass(frozen=True)
class MmaBackwardTiles:
    """Sizes of one kernel."""

    copying: Copying
    rows: int  # owned tokens of a warpgroup
    groups: int  # warpgroups
    visited: int  # tokens of a visited tile
    slots: int  # of visited tiles, 1 or 2
    split_columns: bool = False  # whether two warpgroups share their rows and split the columns (mma_split.py)

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
        """Whether one dK/dV kernel computes both gradients: whether the accumulators of both fit the registers."""
        return self.rows * sum(padded_dims(plan)) <= WARPGROUP * ACCUMULATORS * self.column_groups


class MmaScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA; "first" are the operands of the scores (Q or K), "second" those of dP (dO or V)."""

    own_first: Part  # [owned, D] the CTA's own tokens
    own_second: Part  # [owned, E]
    first: Part  # [slots, visited, D]
    second: Part  # [slots, visited, E]
    own_full: Part | None  # None with cp.async
    full: Part | None  # [slots] a visited tile, or its first operand, has arrived; None with cp.async
    meeting: Part | None  # stands for the barrier of the CTA in the simulator
    second_full: Part | None = None  # [1] where warpgroups split the columns and copy by TMA
    # [gradients, groups, owned, scored] P and dS in 16 bits, where warpgroups split the columns
    weights: Part | None = None


def scratch(plan: KernelPlan, tiles: MmaBackwardTiles, gradients: int = 1) -> MmaScratch[Description]:
    """The shared memory of a CTA of either kernel; `gradients` is 2 for dK and dV together, else 1."""
    dim, value_dim = padded_dims(plan)
    by_tma, split = tiles.copying == "tma", tiles.split_columns
    weights = (gradients, tiles.groups, tiles.owned, tiles.scored)
    return MmaScratch(
        SwizzledTiles((tiles.owned, dim), plan.dtype),
        SwizzledTiles((tiles.owned, value_dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, dim), plan.dtype),
        SwizzledTiles((tiles.slots, tiles.visited, value_dim), plan.dtype),
        # every warpgroup copies its share of each tile by TMA
        Barriers(1, 2 * tiles.groups) if by_tma else None,
        Barriers(tiles.slots, tiles.groups if split else 2 * tiles.groups) if by_tma else None,
        meeting_barrier(tiles.groups),
        Barriers(tiles.slots, tiles.groups) if by_tma and split else None,
        SwizzledTiles(weights, plan.dtype) if split else None,
    )


SMALLEST_SPLIT_DIM = 32
"""The smallest padded head dim whose columns two warpgroups split: `mma_products.add_half` takes 16 columns at once."""
SMALL_MEMORY = 99 * 1024
"""Bytes of shared memory of a CTA on 8.6, 8.9 and 12.x, whose tensor cores do half of what those of 8.0 do."""


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
        Size(128, 1, 32, 2), Size(128, 1, 32, 1), Size(64, 2, 64, 2), Size(64, 2, 32, 2), Size(64, 1, 64, 2),
        Size(64, 1, 32, 2), Size(64, 1, 32, 1),
    ),
    256: (
        _split(128, 64), _split(128, 32), Size(64, 2, 32, 2), _split(64, 64), Size(64, 2, 32, 1), _split(64, 32),
        Size(64, 1, 32, 2),         Size(64, 1, 16, 2), Size(64, 1, 32, 1), Size(64, 1, 16, 1),
    ),
}  # fmt: skip
"""Sizes of the dQ kernel for head dims up to so many, the expected best first (lab/notes/mma_backward.md)."""
DKV_SIZES: dict[int, tuple[Size, ...]] = {
    64: (Size(128, 1, 32, 2), Size(64, 2, 64, 2), Size(64, 1, 64, 2), Size(64, 1, 32, 2)),
    128: (
        Size(64, 2, 64, 2), Size(64, 2, 32, 2), Size(64, 1, 64, 2), Size(64, 1, 64, 1), Size(64, 1, 32, 2),
        Size(64, 1, 32, 1),
    ),
    256: (
        _split(64, 64), _split(128, 64), Size(64, 2, 32, 2), Size(64, 2, 32, 1), _split(64, 32), Size(64, 1, 32, 2),
        Size(64, 1, 16, 2), Size(64, 1, 32, 1), Size(64, 1, 16, 1),
    ),
}  # fmt: skip
"""The same of the dK/dV kernel; above head dim 128, `_split` sizes of 64 rows compute dK and dV together."""


def dq_candidates(plan: KernelPlan, card: Card) -> tuple[MmaBackwardTiles, ...]:
    """Sizes of the dQ kernel that fit the plan and the card, the expected best first."""
    block = None if plan.blocks is None else plan.blocks.block_q
    return _fitting(plan, card, False, block, plan.options.block_q_bwd)


def dkv_candidates(plan: KernelPlan, card: Card) -> tuple[MmaBackwardTiles, ...]:
    """Sizes of the dK/dV kernel that fit the plan and the card, the expected best first."""
    block = None if plan.blocks is None else plan.blocks.block_kv
    return _fitting(plan, card, True, block, plan.options.block_kv_bwd)


def refuses(plan: KernelPlan, card: Card) -> str | None:
    """A sentence that says that a kernel has no tile for this plan on this card; None if both have one."""
    for name, found in (("block_q_bwd", dq_candidates(plan, card)), ("block_kv_bwd", dkv_candidates(plan, card))):
        if not found:
            return (
                f"The GPU kernels on mma.sync have no backward tile for {name}={getattr(plan.options, name)} and "
                f"head dims {plan.head_dim + plan.extra_dim} and {plan.value_dim} on "
                f"{card}: they take 64 or 128, dividing the mask's blocks."
            )
    return None


def _fitting(
    plan: KernelPlan, card: Card, by_key: bool, block: int | None, asked: int | None
) -> tuple[MmaBackwardTiles, ...]:
    """The sizes of DKV_SIZES (`by_key`) or DQ_SIZES that divide `block` and are `asked`; the best first."""
    dim, sizes = max(padded_dims(plan)), DKV_SIZES if by_key else DQ_SIZES
    made = [MmaBackwardTiles(card.copying, *size) for size in sizes[next(most for most in sizes if dim <= most)]]
    able = [t for t in made if (block is None or block % t.owned == 0) and asked in (None, t.owned)]
    if min(padded_dims(plan)) < SMALLEST_SPLIT_DIM:
        able = [t for t in able if not t.split_columns]
    bytes_of = lambda t: scratch_bytes(scratch(plan, t, 2 if by_key and t.joint(plan) else 1))
    warpgroups = {t: t.groups * card.ctas(bytes_of(t), WARPGROUP * t.groups) for t in able}
    spills = by_key and 64 < dim <= 128 and card.spills
    small = card.cta_memory <= SMALL_MEMORY
    # with SMALL_MEMORY the tensor cores are slower than shared memory, so 64 rows, with fewer registers, go before 128
    # two warpgroups of an SM come first: one multiplies while the other computes probabilities
    few_rows, few_visited = small or plan.crowded, spills or plan.crowded
    worse = lambda t: (warpgroups[t] < 2, few_rows and t.rows > 64, few_visited and t.visited > 32)
    return tuple(sorted((t for t in able if warpgroups[t]), key=worse))
