"""Sizes, shared and tensor memory of the backward kernel on tcgen05, and which plans it runs.

A CTA owns a tile of 128 tokens of one axis and visits tiles of 128 tokens of the other, in two halves: each of two warpgroups computes P
and dS of one half. Tensor memory holds, for head dims D and E up to 128,

    S of both halves 128 columns     dP of both halves 128 columns     sums of the owned tokens' gradients D and E columns

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


@dataclasses.dataclass(frozen=True)
class Tcgen05Tiles:
    """Sizes of the kernel.

    slots   of visited tiles, 2 or more: S of the next visit is computed while a slot is still read for this one
    """

    slots: int

    owned = visited = TILE
    half = TILE // HALVES
    """Visited tokens that one warpgroup computes on."""
    computing_registers, issuing_registers = 224, 64


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared and tensor memory of a CTA. "First" are the operands of the scores (queries or keys), "second" those of dP (dO or values).

    own_first, own_second   [128, D or E] the CTA's own tokens, rows in the order of sm100_tiles.py
    first, second           [slots, 128, D or E] visited tiles
    scores                  tensor memory: a pair of S, [2, 128, 64] float32 for the halves, and over it P, [2, 128, 128] of which the first
                            half is used
    cotangents              the same for dP and dS
    sum_first, sum_second   tensor memory: [1, 128, D] and [1, 128, E] float32, sums of the gradients of the own tokens; sum_second is None
                            in a kernel that computes only the first
    own_full                TMA: the own tokens have arrived
    full                    [slots] TMA: a visited tile has
    free                    [slots] tcgen05.commit: the products that read a slot have completed
    scores_full             [2] tcgen05.commit: S of a half is there
    weights_full            [2] a warpgroup: P of its half is there; None without sum_second
    cotangents_full         [2] tcgen05.commit: dP of a half is there
    differences_full        [2] a warpgroup: dS of its half is there, and S of it was read
    sums_full               tcgen05.commit: all products have completed
    """

    own_first: Part
    own_second: Part
    first: Part
    second: Part
    scores: Part
    cotangents: Part
    sum_first: Part
    sum_second: Part | None
    own_full: Part
    full: Part
    free: Part
    scores_full: Part
    weights_full: Part | None
    cotangents_full: Part
    differences_full: Part
    sums_full: Part


def scratch(plan: KernelPlan, tiles: Tcgen05Tiles, both: bool) -> Scratch[Description]:
    """The shared and tensor memory of a CTA.

    both   whether the kernel computes two gradients, of keys and values, or one
    """
    dim, value_dim = padded_dims(plan)
    halves = Barriers(HALVES, tcgen05=True)
    tile = OverlaidTensorTiles(
        TensorTiles((HALVES, TILE, tiles.half), "float32"), TensorTiles((HALVES, TILE, 2 * tiles.half), plan.dtype)
    )
    return Scratch[Description](
        own_first=SwizzledTiles((TILE, dim), plan.dtype),
        own_second=SwizzledTiles((TILE, value_dim), plan.dtype),
        first=SwizzledTiles((tiles.slots, TILE, dim), plan.dtype),
        second=SwizzledTiles((tiles.slots, TILE, value_dim), plan.dtype),
        scores=tile,
        cotangents=tile,
        sum_first=TensorTiles((1, TILE, dim), "float32"),
        sum_second=TensorTiles((1, TILE, value_dim), "float32") if both else None,
        own_full=Barriers(1, arrivals=2 * TILE // COPIED_ROWS),
        full=Barriers(tiles.slots, arrivals=2),
        free=Barriers(tiles.slots, tcgen05=True),
        scores_full=halves,
        weights_full=halves if both else None,
        cotangents_full=halves,
        differences_full=halves,
        sums_full=Barriers(1, tcgen05=True),
    )


def backward_tiles(plan: KernelPlan) -> Tcgen05Tiles | None:
    """The sizes of the kernel for a plan that asks for tcgen05; None where the kernels on mma.sync run its backward pass: above head dim
    LARGEST_DIM, for mask blocks that are no multiples of 128, and where the options ask for tiles other than 128.

    plan   with the blocks of `sm100_support.visited_blocks` for the backward pass
    """
    options, blocks = plan.options, plan.blocks
    asked = {options.block_q_bwd, options.block_kv_bwd}
    if max(padded_dims(plan)) > LARGEST_DIM or not asked <= {None, TILE}:
        return None
    if blocks is not None and (blocks.block_q % TILE or blocks.block_kv % TILE):
        return None
    return next((tiles for tiles in map(Tcgen05Tiles, (3, 2)) if fits(scratch(plan, tiles, both=True))), None)
