"""Tile sizes, ring depths and shared memory of the dK/dV kernels: one for head dims up to 128 (64 for float32), the split one above.

The two kernels are backward_sm90_dkv.py and backward_sm90_dkv_split.py. A CTA owns a tile of keys and visits tiles of
queries, whose Q and dO come through *rings*: buffers in shared memory with several slots of one tile each, filled by
a copying warpgroup and read by the computing warpgroups. lse2 and delta are the row statistics (row_statistics.py).
The *staged array* is a captured array, such as a pair bias, whose tiles come through shared memory too
(pair_bias.py).
"""

import typing

from flexjax.backends.mosaic_gpu.backward_tiles import (
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
from flexjax.backends.mosaic_gpu.columns import Exchange, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.float_parts import part_dtype, parts_of
from flexjax.backends.mosaic_gpu.shared_memory import (
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
    """Sizes of the dK/dV kernel.

    rows, groups             keys of one computing warpgroup, and number of computing warpgroups
    queries                  of a visited tile
    query_slots, out_slots   ring depths of Q and dO
    head_major               launch order: the CTAs of one head are adjacent (`tile_visits.tile_and_head`)
    staged_slots             ring depth of the staged array, a captured array whose tiles come through shared memory; 0:
                             the kernel reads it from global memory
    """

    rows: int
    groups: int
    queries: int
    query_slots: int
    out_slots: int
    head_major: bool = True
    staged_slots: int = 0


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the dK/dV kernel; G computing warpgroups, D stands for the padded head dim, E for
    values.

    query, d_out           [slots * parts, queries, D or E] rings
    stats                  [query slots, 2, queries] lse2 and delta of the queries in `query`
    key, value             [G * parts, rows, D or E] the CTA's own keys and values; dK and dV leave through them
    query_full, out_full   [slots] a tile has arrived; `query_full` also counts its statistics and its staged tile
    own_full               [G] the keys and values of a warpgroup have arrived
    query_free, out_free   [slots] all warpgroups have read a tile
    staged                 [query slots, queries, keys] tiles of the staged array, None without one
    """

    query: Part
    d_out: Part
    stats: Part
    key: Part
    value: Part
    query_full: Part
    out_full: Part
    own_full: Part
    query_free: Part
    out_free: Part
    staged: Part | None


def dkv_scratch(plan: KernelPlan, tiles: DkvTiles, bias: DenseBiasTypes) -> Scratch[Description]:
    """The shared memory of a CTA of the dK/dV kernel with these sizes.

    plan    of the call, with extra features joined to the head dim or apart: the result is the same
    tiles   sizes of the kernel
    bias    says which array is staged

    `staged` is None where no array is staged or `tiles.staged_slots` is 0. Barriers of full slots expect one arrival
    for each copy: one copy for each part of an operand (float_parts.py); at `query_full` also one for the statistics
    and, if an array is staged, one for its tile. `own_full` expects one for each part of K and of V. Barriers of free
    slots expect one arrival of each computing warpgroup.
    """
    (dim, value_dim), parts, dtype = padded_dims(plan), parts_of(plan), part_dtype(plan)
    staged = None
    if bias.staged is not None and tiles.staged_slots:
        staged = SwizzledTiles((tiles.staged_slots, tiles.queries, tiles.rows * tiles.groups), bias.staged)
    return Scratch(
        query=SwizzledTiles((tiles.query_slots * parts, tiles.queries, dim), dtype),
        d_out=SwizzledTiles((tiles.out_slots * parts, tiles.queries, value_dim), dtype),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((tiles.groups * parts, tiles.rows, dim), dtype),
        value=SwizzledTiles((tiles.groups * parts, tiles.rows, value_dim), dtype),
        query_full=Barriers(tiles.query_slots, parts + (1 if staged is None else 2)),
        out_full=Barriers(tiles.out_slots, parts),
        own_full=Barriers(tiles.groups, 2 * parts),
        query_free=Barriers(tiles.query_slots, tiles.groups),
        out_free=Barriers(tiles.out_slots, tiles.groups),
        staged=staged,
    )


def dkv_tiles(plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS) -> DkvTiles:
    """The sizes of the dK/dV kernel for head dims up to 128; an array is staged only if its tiles fit shared memory.

    plan   of the call, with extra features joined to the head dim or apart: the result is the same
    bias   says which array is staged

    The CTA owns block_kv_bwd keys, by default 128, or 64 where 128 does not divide the mask's blocks; 64 of them for each
    computing warpgroup. It visits 128 queries for inputs of 16 bits with head dims up to 64 (extra features included) and small
    mods (`computes_little`), otherwise 64; 64 too where block_q_bwd or the mask's blocks ask for it. The rings of Q and dO have
    two slots; so has that of the staged array, or none (staged_slots 0) without such an array or if it does not fit. Launch order
    is head_major unless query heads share key heads. Without staging, sizes are returned whether they fit or not. Raises
    StopIteration for blocks of the mask that no size divides, which `backward_tiles.refuses` finds before.
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
    """Sizes of the split dK/dV kernel.

    query_slots, out_slots   ring depths of Q and dO
    p_slots                  ring depth of the tiles of P that the dV warpgroup hands to the dK warpgroup
    head_major               launch order: the CTAs of one head are adjacent (`tile_visits.tile_and_head`)
    queries                  of a visited tile
    """

    query_slots: int
    out_slots: int
    p_slots: int
    head_major: bool = True
    queries: int = SPLIT_QUERIES


class SplitScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the split dK/dV kernel; D stands for the padded head dim, E for values.

    query, d_out           [slots * parts, queries, D or E] rings
    stats                  [query slots, 2, queries] lse2 and delta of the queries in `query`
    key, value             [parts, SPLIT_KEYS, D or E] the CTA's own keys and values; dK and dV leave through them
    p                      [slots, keys, queries] float32: P^T times the derivative of score_mod
    query_full, out_full   [slots] a tile has arrived; `query_full` also counts its statistics
    own_full               [3] the keys have arrived, the values have, and both warpgroups have made their last
                           product
    query_free, out_free   [slots] both computing warpgroups have read a tile
    p_full, p_free         [slots] a tile of P is written, is read
    exchange               of the partial sums of S (the dV warpgroup) and dP; None where a CTA has all columns
    """

    query: Part
    d_out: Part
    stats: Part
    key: Part
    value: Part
    p: Part
    query_full: Part
    out_full: Part
    own_full: Part
    query_free: Part
    out_free: Part
    p_full: Part
    p_free: Part
    exchange: Exchange[Part] | None = None


def split_dkv_scratch(plan: KernelPlan, tiles: SplitDkvTiles) -> SplitScratch[Description]:
    """The shared memory of a CTA of the split dK/dV kernel with the ring depths of `tiles`, for the padded columns, parts and dtype
    of `plan`.

    Each barrier of `own_full` expects parts + 1 arrivals: those for K and V one of each copy and one of the copying
    warpgroup; the last one an arrival of the dV warpgroup and `parts` of the dK warpgroup. Barriers of full slots
    expect one arrival for each copy: of each part, and at `query_full` also of the statistics. Barriers of free slots
    expect one of each computing warpgroup, those of P one in all.
    """
    (dim, value_dim), parts, dtype = padded_dims(plan), parts_of(plan), part_dtype(plan)
    swizzle = swizzle_for(tiles.queries)
    return SplitScratch(
        query=SwizzledTiles((tiles.query_slots * parts, tiles.queries, dim), dtype, swizzle),
        d_out=SwizzledTiles((tiles.out_slots * parts, tiles.queries, value_dim), dtype, swizzle),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((parts, SPLIT_KEYS, dim), dtype, swizzle),
        value=SwizzledTiles((parts, SPLIT_KEYS, value_dim), dtype, swizzle),
        p=SwizzledTiles((tiles.p_slots, SPLIT_KEYS, tiles.queries), "float32"),
        query_full=Barriers(tiles.query_slots, parts + 1),
        out_full=Barriers(tiles.out_slots, parts),
        own_full=Barriers(3, parts + 1),
        query_free=Barriers(tiles.query_slots, 2),
        out_free=Barriers(tiles.out_slots, 2),
        p_full=Barriers(tiles.p_slots),
        p_free=Barriers(tiles.p_slots),
        exchange=exchange_scratch(ctas_of(plan), 2, (SPLIT_KEYS, tiles.queries), plan.options.interpret),
    )


def split_dkv_tiles(plan: KernelPlan) -> SplitDkvTiles:
    """The sizes of the split dK/dV kernel for a plan (one for which `splits_dkv`): the first of these rows that fits shared memory.

        Q slots   dO slots   P slots   queries of a tile
        2         2          2         SPLIT_QUERIES
        2         2          1         SPLIT_QUERIES
        2         1          1         SPLIT_QUERIES       only where two CTAs share the columns (columns.py)
        1         1          1         SPLIT_QUERIES
        1         1          2         SMALLEST_TILE       only for float32
        1         1          1         SMALLEST_TILE       only for float32

    Launch order is head_major unless query heads share key heads. A row fits at every head dim whose backward pass support.py
    accepts; where none fits, the last one that the plan allows is returned.
    """
    made = [(2, 2, 2, SPLIT_QUERIES), (2, 2, 1, SPLIT_QUERIES)]
    if ctas_of(plan) > 1:
        made += [(2, 1, 1, SPLIT_QUERIES)]
    made += [(1, 1, 1, SPLIT_QUERIES)]
    if parts_of(plan) > 1:
        made += [(1, 1, 2, SMALLEST_TILE), (1, 1, 1, SMALLEST_TILE)]
    head_major = plan.group == 1
    tiles = [SplitDkvTiles(q_slots, out, p_slots, head_major, queries) for q_slots, out, p_slots, queries in made]
    return next((one for one in tiles if fits(split_dkv_scratch(plan, one))), tiles[-1])
