"""Tile sizes, ring depths and shared memory of the dK/dV kernel and, for large head dims, of the split one.

The kernels are hopper_dkv.py and hopper_dkv_split.py. The *staged array* is a captured array, such as a pair bias,
whose tiles come through shared memory (pair_bias.py).
"""

import typing

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import (
    NO_DENSE_BIAS,
    SMALLEST_TILE,
    SPLIT_KEYS,
    SPLIT_QUERIES,
    DenseBiasTypes,
    computes_little,
    first_dividing,
    owned_sizes,
    padded_dims,
    swizzle_for,
    visited_sizes,
)
from flexjax.backends.mosaic_gpu.machine.columns import Exchange, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, parts_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    Barriers,
    Description,
    Part,
    PlainArray,
    SwizzledTiles,
    fits,
)
from flexjax.plan.kernel_plan import KernelPlan

# ------------------------------------------------------------------- head dims up to 128


class DkvTiles(typing.NamedTuple):
    """Sizes of the dK/dV kernel."""

    rows: int  # keys of one computing warpgroup
    groups: int  # computing warpgroups
    queries: int  # of a visited tile
    query_slots: int
    out_slots: int
    head_major: bool = True  # launch order: the CTAs of one head are adjacent
    staged_slots: int = 0  # 0: the kernel reads the staged array from global memory


class DkvScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the dK/dV kernel with G computing warpgroups."""

    query: Part  # [slots * parts, queries, D]
    d_out: Part  # [slots * parts, queries, E]
    stats: Part  # [query slots, 2, queries] lse2 and delta of the queries in `query`
    key: Part  # [G * parts, rows, D] the CTA's own keys; dK leaves through them
    value: Part  # [G * parts, rows, E], dV leaves through them
    query_full: Part  # also counts the statistics and the staged tile
    out_full: Part
    own_full: Part  # [G] the keys and values of a warpgroup have arrived
    query_free: Part
    out_free: Part
    staged: Part | None  # [query slots, queries, keys] tiles of the staged array


def dkv_scratch(plan: KernelPlan, tiles: DkvTiles, bias: DenseBiasTypes) -> DkvScratch[Description]:
    """The shared memory of a CTA of the dK/dV kernel; `bias` says which array is staged."""
    (dim, value_dim), parts, dtype = padded_dims(plan), parts_of(plan), part_dtype(plan)
    staged = None
    if bias.staged is not None and tiles.staged_slots:
        staged = SwizzledTiles((tiles.staged_slots, tiles.queries, tiles.rows * tiles.groups), bias.staged)
    return DkvScratch(
        query=SwizzledTiles((tiles.query_slots * parts, tiles.queries, dim), dtype),
        d_out=SwizzledTiles((tiles.out_slots * parts, tiles.queries, value_dim), dtype),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((tiles.groups * parts, tiles.rows, dim), dtype),
        value=SwizzledTiles((tiles.groups * parts, tiles.rows, value_dim), dtype),
        # full barriers expect one arrival for each copy, free ones one of each computing warpgroup
        query_full=Barriers(tiles.query_slots, parts + (1 if staged is None else 2)),
        out_full=Barriers(tiles.out_slots, parts),
        own_full=Barriers(tiles.groups, 2 * parts),
        query_free=Barriers(tiles.query_slots, tiles.groups),
        out_free=Barriers(tiles.out_slots, tiles.groups),
        staged=staged,
    )


def dkv_tiles(plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS) -> DkvTiles:
    """The sizes of the dK/dV kernel for head dims up to 128; an array is staged only if its tiles fit shared memory.

    Without staging, sizes are returned whether they fit or not. Raises StopIteration for blocks of the mask that no
    size divides, which `hopper_tiles.refuses` finds before.
    """
    keys = first_dividing(plan.blocks, "kv", owned_sizes(plan.options.block_kv_bwd))
    dims = max(plan.head_dim + plan.extra_dim, plan.value_dim)
    most_queries = 128 if dims <= 64 and computes_little(plan) else 64
    queries = first_dividing(plan.blocks, "q", visited_sizes(plan.options.block_q_bwd, most_queries))
    staged = (0,) if bias.staged is None else (2, 0)  # a staged tile shares the slot and barriers of its queries
    made = [DkvTiles(64, keys // 64, queries, 2, 2, plan.group == 1, slots) for slots in staged]
    return next((tiles for tiles in made if fits(dkv_scratch(plan, tiles, bias))), made[-1])


# ------------------------------------------------------------------- head dims above 128


class SplitDkvTiles(typing.NamedTuple):
    """Sizes of the split dK/dV kernel."""

    query_slots: int
    out_slots: int
    p_slots: int  # ring depth of the tiles of P that the dV warpgroup hands over
    head_major: bool = True  # launch order: the CTAs of one head are adjacent
    queries: int = SPLIT_QUERIES


class SplitScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the split dK/dV kernel."""

    query: Part  # [slots * parts, queries, D]
    d_out: Part  # [slots * parts, queries, E]
    stats: Part  # [query slots, 2, queries] lse2 and delta of the queries in `query`
    key: Part  # [parts, SPLIT_KEYS, D] the CTA's own keys; dK leaves through them
    value: Part  # [parts, SPLIT_KEYS, E], dV leaves through them
    p: Part  # [slots, keys, queries] float32: P^T times the derivative of score_mod
    beside: Part | None  # likewise: what expectations add to dS^T
    query_full: Part  # also counts the statistics
    out_full: Part
    own_full: Part  # [3] keys arrived, values arrived, both warpgroups made their last product
    query_free: Part
    out_free: Part
    p_full: Part
    p_free: Part
    exchange: Exchange[Part] | None = None  # of the partial sums of S and dP; None where a CTA has all columns


def split_dkv_scratch(plan: KernelPlan, tiles: SplitDkvTiles) -> SplitScratch[Description]:
    """The shared memory of a CTA of the split dK/dV kernel with the ring depths of `tiles`."""
    (dim, value_dim), parts, dtype = padded_dims(plan), parts_of(plan), part_dtype(plan)
    swizzle = swizzle_for(tiles.queries)
    handed = SwizzledTiles((tiles.p_slots, SPLIT_KEYS, tiles.queries), "float32")
    return SplitScratch(
        query=SwizzledTiles((tiles.query_slots * parts, tiles.queries, dim), dtype, swizzle),
        d_out=SwizzledTiles((tiles.out_slots * parts, tiles.queries, value_dim), dtype, swizzle),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((parts, SPLIT_KEYS, dim), dtype, swizzle),
        value=SwizzledTiles((parts, SPLIT_KEYS, value_dim), dtype, swizzle),
        p=handed,
        beside=handed if plan.crowded else None,
        # full barriers expect one arrival for each copy
        query_full=Barriers(tiles.query_slots, parts + 1),
        out_full=Barriers(tiles.out_slots, parts),
        # K and V: of each copy and the copying warpgroup; products: one of the dV warpgroup, `parts` of the dK one
        own_full=Barriers(3, parts + 1),
        query_free=Barriers(tiles.query_slots, 2),
        out_free=Barriers(tiles.out_slots, 2),
        p_full=Barriers(tiles.p_slots),
        p_free=Barriers(tiles.p_slots),
        exchange=exchange_scratch(ctas_of(plan), 2, (SPLIT_KEYS, tiles.queries)),
    )


def split_dkv_tiles(plan: KernelPlan) -> SplitDkvTiles:
    """The first sizes of the split dK/dV kernel that fit shared memory; the last ones where none fit."""
    made = [(2, 2, 2, SPLIT_QUERIES), (2, 2, 1, SPLIT_QUERIES)]  # slots of Q, of dO, of P; queries of a tile
    if ctas_of(plan) > 1:
        made += [(2, 1, 1, SPLIT_QUERIES)]
    made += [(1, 1, 1, SPLIT_QUERIES)]
    if parts_of(plan) > 1:
        made += [(1, 1, 2, SMALLEST_TILE), (1, 1, 1, SMALLEST_TILE)]
    head_major = plan.group == 1
    tiles = [SplitDkvTiles(q_slots, out, p_slots, head_major, queries) for q_slots, out, p_slots, queries in made]
    return next((one for one in tiles if fits(split_dkv_scratch(plan, one))), tiles[-1])
