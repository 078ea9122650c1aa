"""Sizes, shared and tensor memory of the backward kernel on tcgen05, and which plans it runs.

A CTA owns a tile of 128 tokens of one axis and visits tiles of 128 tokens of the other, in two halves: each of two warpgroups computes P
and dS of one half. Tensor memory holds, for head dims D and E up to 128,

    S of both halves 128 columns     dP of both halves 128 columns     sums of the owned tokens' gradients D and E columns

**Pairs of CTAs** (`KernelOptions(cta_pairs=True)`, cta_group::2): two CTAs of a cluster own 256 neighbouring keys and share each
instruction of the dK/dV kernel, 256 rows high. Each has its own 128 rows of the left operand and of the sums, and brings half of the right
operand. That is half of the visited rows where they are contracted over the head dim, and half of the columns where they are contracted
over tokens, so a tile lies twice in halves: in as many bytes as once.

    S, dP of half g        rows 64 g + 32 c .. 64 g + 32 c + 31 of the visited tile, all columns       c = 0, 1: the CTA of the pair
    dV, dK                 all rows, columns c D / 2 .. (c + 1) D / 2 - 1

At head dim 64 shared memory is not the bound, so pairs would only wait longer for each other (bench/NOTES_model.md).

Nothing here imports Mosaic.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.backward_tiles import padded_dims
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import COPIED_ROWS
from flexjax.backends.mosaic_gpu.shared_memory import (
    TMEM_LANES,
    Barriers,
    Description,
    OverlaidTensorTiles,
    Part,
    SwizzledTiles,
    TensorTiles,
    fits,
)
from flexjax.plan.kernel_plan import KernelPlan

LARGEST_DIM = 128
"""The largest padded head dim: sums of two gradients and the scores then fill tensor memory."""
TILE = TMEM_LANES
"""Tokens of an owned and of a visited tile."""
HALVES = 2
"""Warpgroups that compute, each on one half of a visited tile."""
PAIR = 2
"""CTAs of a pair."""
PAIRED_DIM = 128
"""The padded head dims, of keys and of values, at which pairs pay."""


@dataclasses.dataclass(frozen=True)
class Tcgen05Tiles:
    """Sizes of the kernel.

    slots   of visited tiles, 2 or more: S of the next visit is computed while a slot is still read for this one
    pairs   whether two CTAs share each instruction of the dK/dV kernel
    """

    slots: int
    pairs: bool = False

    owned = visited = TILE
    half = TILE // HALVES
    """Visited tokens that one warpgroup computes on."""
    computing_registers, issuing_registers = 224, 64

    @property
    def ctas(self) -> int:
        """CTAs of a cluster of the dK/dV kernel, which visit the same tiles: 2 with `pairs`, else 1."""
        return PAIR if self.pairs else 1


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared and tensor memory of a CTA. "First" are the operands of the scores (queries or keys), "second" those of dP (dO or values).

    own_first, own_second   [128, D or E] the CTA's own tokens, rows in the order of sm100_tiles.py
    first, second           [slots, 128, D or E] visited tiles; in a pair this CTA's rows of them, [slots, 2, 32, D or E] for the halves
    columns                 in a pair this CTA's columns of first and second, [slots, 128, D / 2] and [slots, 128, E / 2]; else None
    scores                  tensor memory: a pair of S, [2, 128, 64] float32 for the halves, and over it P, [2, 128, 128] of which the first
                            half is used
    cotangents              the same for dP and dS
    sum_first, sum_second   tensor memory: [1, 128, D] and [1, 128, E] float32, sums of the gradients of the own tokens; sum_second is None
                            in a kernel that computes only the first
    own_full                TMA: the own tokens have arrived
    own_ready               warpgroup 0 of each CTA of a pair: the own tokens of both have arrived; None without pairs
    full                    [slots] TMA: both tiles of a visit have arrived; in a pair those of both CTAs, at the barrier of the first
    free                    [slots] tcgen05.commit: the products that read a slot have completed
    scores_full             [2] tcgen05.commit: S of a half is there
    weights_full            [2] a warpgroup: P of its half is there; None without sum_second
    cotangents_full         [2] tcgen05.commit: dP of a half is there
    differences_full        [2] a warpgroup: dS of its half is there, and S of it was read
    sums_full               tcgen05.commit: all products have completed

    In a pair a commit arrives in both CTAs, and warpgroups arrive in the first one, whose warp issues the products of both.
    """

    own_first: Part
    own_second: Part
    first: Part
    second: Part
    columns: tuple[Part, Part] | None
    scores: Part
    cotangents: Part
    sum_first: Part
    sum_second: Part | None
    own_full: Part
    own_ready: Part | None
    full: Part
    free: Part
    scores_full: Part
    weights_full: Part | None
    cotangents_full: Part
    differences_full: Part
    sums_full: Part


def scratch(plan: KernelPlan, tiles: Tcgen05Tiles, both: bool) -> Scratch[Description]:
    """The shared and tensor memory of a CTA.

    plan    of the call, with extra features joined to the head dim
    tiles   sizes of the kernel
    both    True for the dK/dV kernel, which sums two gradients; False for dQ: `sum_second` and `weights_full` are None

    `own_full` expects one arrival for each 16 rows of each own array. `full` expects one for each tile of a visit; in a pair three for
    each, of the rows of both halves and of the columns. All others expect one, those with `pair` one of each CTA. The simulator does not
    know cta_group::2: there each CTA of a pair has whole tiles, and products of its own on the same visits.
    """
    dim, value_dim = padded_dims(plan)
    pair = tiles.pairs and not plan.options.interpret
    by_commit, halves = Barriers(HALVES, tcgen05=True), Barriers(HALVES, tcgen05=True, pair=pair)
    tile = OverlaidTensorTiles(
        TensorTiles((HALVES, TILE, tiles.half), "float32", pair),
        TensorTiles((HALVES, TILE, 2 * tiles.half), plan.dtype, pair),
    )
    visited = (HALVES, tiles.half // PAIR) if pair else (TILE,)
    columns = lambda dim: SwizzledTiles((tiles.slots, TILE, dim // PAIR), plan.dtype)
    return Scratch[Description](
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
        full=Barriers(tiles.slots, arrivals=2 * (HALVES + 1) if pair else 2),
        free=Barriers(tiles.slots, tcgen05=True),
        scores_full=by_commit,
        weights_full=halves if both else None,
        cotangents_full=by_commit,
        differences_full=halves,
        sums_full=Barriers(1, tcgen05=True),
    )


def backward_tiles(plan: KernelPlan) -> Tcgen05Tiles | None:
    """The sizes of the kernel for a plan that asks for tcgen05: three slots, or two where three do not fit shared memory. None where the
    kernels on mma.sync run its backward pass: above head dim LARGEST_DIM, for mask blocks that are no multiples of 128, where the
    options ask for tiles other than 128, and where two slots do not fit either. `pairs` where `in_pairs` and the mask's blocks are
    multiples of 256 keys.

    plan   with the blocks that the kernels visit (`sm100_support.visited_blocks` with backward=True). That its options ask for tcgen05
           is tested by the caller
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
    """Whether the options ask for pairs of CTAs (`cta_pairs`) and the dK/dV kernel on tcgen05 of this plan can have them, apart from the
    blocks of its mask, which the caller tests: the padded head dims are both PAIRED_DIM, and runs of keys of an origin, if it has
    several, are multiples of 256 keys.
    """
    origin = plan.origin
    runs = origin is None or origin.tile_fits(1, PAIR * TILE)
    return plan.options.cta_pairs and runs and padded_dims(plan) == (PAIRED_DIM, PAIRED_DIM)
