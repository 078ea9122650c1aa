"""Sizes, shared and tensor memory of the backward kernel on tcgen05, and which plans it runs.

A CTA owns a tile of 128 tokens of one axis and visits tiles of 128 tokens of the other, in two halves: each of two
warpgroups computes P and dS of one half. Tensor memory holds, for head dims D and E up to 128,

    S of both halves: 128 columns    dP of both halves: 128 columns    sums of the owned gradients: D and E columns

**Pairs of CTAs** (`KernelOptions(cta_pairs=True)`, cta_group::2): two CTAs of a cluster own 256 neighbouring keys and
share each instruction of the dK/dV kernel, 256 rows high. Each has its own 128 rows of the left operand and of the
sums, and brings half of the right operand. That is half of the visited rows where they are contracted over the head
dim, and half of the columns where they are contracted over tokens, so a tile lies twice in halves: in as many bytes as
once.

    S, dP of half g    rows 64 g + 32 c .. 64 g + 32 c + 31 of the visited tile, all columns     c: the CTA, 0 or 1
    dV, dK             all rows, columns c D / 2 .. (c + 1) D / 2 - 1

At head dim 64 shared memory is not the bound, so pairs would only wait longer for each other (lab/notes/card_model.md).
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import padded_dims
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    COPIED_ROWS,
    TMEM_LANES,
    Barriers,
    Description,
    OverlaidTensorTiles,
    Part,
    SwizzledTiles,
    TensorTiles,
    fits,
)
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.plan.kernel_plan import KernelPlan

LARGEST_DIM = 128  # the largest padded head dim: sums of two gradients and the scores then fill tensor memory
TILE = TMEM_LANES  # tokens of an owned and of a visited tile
HALVES = 2  # warpgroups that compute, each on one half of a visited tile
PAIR = 2  # CTAs of a pair
PAIRED_DIM = 128  # the padded head dims, of keys and of values, at which pairs pay


@dataclasses.dataclass(frozen=True)
class Tcgen05Tiles:
    """Sizes of the kernel."""

    slots: int  # of visited tiles, 2 or more: S of the next visit is computed while a slot is still read for this one
    pairs: bool = False  # whether two CTAs share each instruction of the dK/dV kernel

    owned = visited = TILE
    half = TILE // HALVES  # visited tokens that one warpgroup computes on
    computing_registers, issuing_registers = 224, 64

    @property
    def ctas(self) -> int:
        """CTAs of a cluster of the dK/dV kernel, which visit the same tiles."""
        return PAIR if self.pairs else 1


class Tcgen05Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Memory of a CTA; "first" are the operands of the scores (Q or K), "second" those of dP (dO or V).

    In a pair a commit arrives in both CTAs, and warpgroups arrive in the first one, which issues all products.
    """

    own_first: Part  # [128, D], rows in the order of machine/tcgen05_tiles.py
    own_second: Part  # [128, E]
    first: Part  # [slots, 128, D]; in a pair this CTA's rows, [slots, 2, 32, D] for the halves
    second: Part  # the same with E
    columns: tuple[Part, Part] | None  # in a pair this CTA's columns of first and second, [slots, 128, D / 2 or E / 2]
    # tensor memory: S, [2, 128, 64] float32 for the halves, and over it P, the first half of [2, 128, 128]
    scores: Part
    cotangents: Part  # the same for dP and dS
    sum_first: Part  # tensor memory: [1, 128, D] float32
    sum_second: Part | None  # [1, 128, E], of dV
    own_full: Part  # TMA: the own tokens have arrived
    own_ready: Part | None  # warpgroup 0 of each CTA of a pair: the own tokens of both have arrived
    full: Part  # [slots] TMA: both tiles of a visit have arrived
    free: Part  # [slots] tcgen05.commit: the products that read a slot have completed
    scores_full: Part  # [2] tcgen05.commit: S of a half is there
    weights_full: Part | None  # [2] a warpgroup: P of its half is there
    cotangents_full: Part  # [2] tcgen05.commit: dP of a half is there
    differences_full: Part  # [2] a warpgroup: dS of its half is there, and S of it was read
    sums_full: Part  # tcgen05.commit: all products have completed


@device_op
def shares_products(tiles: Tcgen05Tiles) -> bool:
    """Whether the two CTAs of a cluster issue products together."""
    return tiles.pairs


def scratch(plan: KernelPlan, tiles: Tcgen05Tiles, both: bool) -> Tcgen05Scratch[Description]:
    """The shared and tensor memory of a CTA; `both` for the dK/dV kernel, which sums two gradients."""
    dim, value_dim = padded_dims(plan)
    pair = shares_products(tiles)
    by_commit, halves = Barriers(HALVES, tcgen05=True), Barriers(HALVES, tcgen05=True, pair=pair)
    tile = OverlaidTensorTiles(
        TensorTiles((HALVES, TILE, tiles.half), "float32", pair),
        TensorTiles((HALVES, TILE, 2 * tiles.half), plan.dtype, pair),
    )
    visited = (HALVES, tiles.half // PAIR) if pair else (TILE,)
    columns = lambda dim: SwizzledTiles((tiles.slots, TILE, dim // PAIR), plan.dtype)
    return Tcgen05Scratch[Description](
        own_first=SwizzledTiles((TILE, dim), plan.dtype),
        own_second=SwizzledTiles((TILE, value_dim), plan.dtype),
        first=SwizzledTiles((tiles.slots, *visited, dim), plan.dtype),
        second=SwizzledTiles((tiles.slots, *visited, value_dim), plan.dtype),
        columns=(columns(dim), columns(value_dim)) if pair else None,
        scores=tile,
        cotangents=tile,
        sum_first=TensorTiles((1, TILE, dim), "float32", pair),
        sum_second=TensorTiles((1, TILE, value_dim), "float32", pair) if both else None,
        own_full=Barriers(1, arrivals=2 * TILE // COPIED_ROWS),
        own_ready=Barriers(1, pair=True) if pair else None,
        # in a pair three for each tile: of the rows of both halves and of the columns
        full=Barriers(tiles.slots, arrivals=2 * (HALVES + 1) if pair else 2),
        free=Barriers(tiles.slots, tcgen05=True),
        scores_full=by_commit,
        weights_full=halves if both else None,
        cotangents_full=by_commit,
        differences_full=halves,
        sums_full=Barriers(1, tcgen05=True),
    )


def backward_tiles(plan: KernelPlan) -> Tcgen05Tiles | None:
    """The sizes of the kernel for a plan that asks for tcgen05; None where mma.sync runs its backward pass.

    The plan has the blocks that the kernels visit (`Tcgen05.blocks`).
    """
    options, blocks = plan.options, plan.blocks
    asked = {options.block_q_bwd, options.block_kv_bwd}
    if max(padded_dims(plan)) > LARGEST_DIM or not asked <= {None, TILE}:
        return None
    if blocks is not None and (blocks.block_q % TILE or blocks.block_kv % TILE):
        return None
    pairs = in_pairs(plan) and (blocks is None or blocks.block_kv % (PAIR * TILE) == 0)
    each = (Tcgen05Tiles(slots, pairs) for slots in (3, 2))
    return next((tiles for tiles in each if fits(scratch(plan, tiles, both=True))), None)


def in_pairs(plan: KernelPlan) -> bool:
    """Whether the options ask for pairs of CTAs and the plan can have them, apart from the blocks of its mask."""
    origin = plan.origin
    runs = origin is None or origin.tile_fits(1, PAIR * TILE)
    return plan.options.cta_pairs and runs and padded_dims(plan) == (PAIRED_DIM, PAIRED_DIM)
