"""Tile sizes, ring depths and shared memory of the dQ kernel (backward_sm90_dq.py).

A CTA owns a tile of queries and visits tiles of keys, which come through *rings*: buffers in shared memory with
several slots of one tile each, filled by a copying warpgroup and read by the computing warpgroups. Two kinds of
captured arrays with an element for each (query, key) take shared memory (pair_bias.py): the *staged array*, whose
tiles come in through a ring, and arrays with a *direct gradient*, whose gradient tiles leave through shared memory.
"""

import typing

from flexjax.backends.mosaic_gpu.backward_tiles import (
    NO_DENSE_BIAS,
    SMALLEST_TILE,
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
    SHARED_MEMORY,
    Barriers,
    Description,
    Part,
    SwizzledTiles,
    scratch_bytes,
)
from flexjax.plan.kernel_plan import KernelPlan

MARGIN = 1024
"""Bytes of shared memory that this kernel leaves free."""


class DqTiles(typing.NamedTuple):
    """Sizes of the dQ kernel.

    rows, groups             queries of one computing warpgroup, and number of computing warpgroups
    keys                     of a visited tile
    key_slots, value_slots   ring depths
    head_major               launch order: the CTAs of one head are adjacent (`tile_visits.tile_and_head`)
    staged_slots             ring depth of the staged array, a captured array whose tiles come through shared memory; 0:
                             the kernel reads it from global memory
    batch_entries            that one CTA takes, one after the other for each key tile
    """

    rows: int
    groups: int
    keys: int
    key_slots: int
    value_slots: int
    head_major: bool = True
    staged_slots: int = 0
    batch_entries: int = 1


class StagedRing(typing.NamedTuple, typing.Generic[Part]):
    """A ring of staged tiles in shared memory with its barriers.

    tiles   [slots, queries of the CTA, keys]
    full    one barrier a slot: the copy into it has arrived
    free    one barrier a slot: all computing warpgroups have read it
    """

    tiles: Part
    full: Part
    free: Part


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the dQ kernel; G computing warpgroups, N batch entries, D stands for the padded head
    dim, E for values.

    query, d_out           [G * N * parts, rows, D or E] the CTA's own queries and their dO; dQ leaves through `query`
    key, value             [slots * parts, keys, D or E] rings
    own_full               [G] Q and dO of a warpgroup have arrived
    key_full, value_full   [slots] a tile has arrived
    key_free, value_free   [slots] all warpgroups have read a tile
    staged                 ring of the staged array, None without one
    direct_gradients       for each direct gradient [G, rows, keys], a tile on its way out
    exchange               of the partial sums of S and dP; None where a CTA has all columns
    """

    query: Part
    d_out: Part
    key: Part
    value: Part
    own_full: Part
    key_full: Part
    value_full: Part
    key_free: Part
    value_free: Part
    staged: StagedRing[Part] | None
    direct_gradients: tuple[Part, ...]
    exchange: Exchange[Part] | None = None


def dq_scratch(plan: KernelPlan, tiles: DqTiles, bias: DenseBiasTypes) -> Scratch[Description]:
    """The shared memory of a CTA of the dQ kernel with these sizes.

    plan    of the call, with extra features joined to the head dim or apart: the result is the same
    tiles   sizes of the kernel
    bias    says which array is staged and which direct gradients leave through shared memory

    `staged` is None where no array is staged or `tiles.staged_slots` is 0. Barriers of full slots expect one arrival
    for each copy: of each part of K or V (float_parts.py), of a staged tile one. Those of free slots expect one of each
    computing warpgroup. `own_full` expects two copies, Q and dO, for each batch entry and part.
    """
    (dim, value_dim), parts, dtype = padded_dims(plan), parts_of(plan), part_dtype(plan)
    swizzle = swizzle_for(tiles.keys)
    own, q_tile = tiles.groups * tiles.batch_entries, tiles.rows * tiles.groups
    staged = None
    if bias.staged is not None and tiles.staged_slots:
        staged = StagedRing[Description](
            SwizzledTiles((tiles.staged_slots, q_tile, tiles.keys), bias.staged),
            Barriers(tiles.staged_slots),
            Barriers(tiles.staged_slots, tiles.groups),
        )
    return Scratch(
        query=SwizzledTiles((own * parts, tiles.rows, dim), dtype, swizzle),
        d_out=SwizzledTiles((own * parts, tiles.rows, value_dim), dtype, swizzle),
        key=SwizzledTiles((tiles.key_slots * parts, tiles.keys, dim), dtype, swizzle),
        value=SwizzledTiles((tiles.value_slots * parts, tiles.keys, value_dim), dtype, swizzle),
        own_full=Barriers(tiles.groups, 2 * tiles.batch_entries * parts),
        key_full=Barriers(tiles.key_slots, parts),
        value_full=Barriers(tiles.value_slots, parts),
        key_free=Barriers(tiles.key_slots, tiles.groups),
        value_free=Barriers(tiles.value_slots, tiles.groups),
        staged=staged,
        direct_gradients=tuple(SwizzledTiles((tiles.groups, tiles.rows, tiles.keys), t) for t in bias.direct_gradients),
        exchange=exchange_scratch(ctas_of(plan), tiles.groups, (tiles.rows, tiles.keys), plan.options.interpret),
    )


def _candidates(plan: KernelPlan, bias: DenseBiasTypes) -> list[DqTiles]:
    """Sizes of the dQ kernel that fit shared memory less MARGIN, the best first; empty if none fit.

    plan   of the call, with extra features joined to the head dim or apart: the result is the same
    bias   dtypes of the staged array and of the direct gradients, and how many batch entries a CTA takes

    The CTA owns q queries: block_q_bwd, by default 128, or 64 where 128 does not divide the mask's blocks. It visits k keys:
    128 for inputs of 16 bits with a padded head dim of queries and keys up to 128 and small mods (`computes_little`), otherwise
    64; 64 too where block_kv_bwd or the mask's blocks ask for it, and where two CTAs share the columns. The sizes, in this order:

        16 bits   (q, k); where two CTAs share the columns then (q, SMALLEST_TILE)
        float32   (q, k), (64, k), (q, SMALLEST_TILE), (64, SMALLEST_TILE); if block_q_bwd is set, only those with q

    For each size the ring depths (keys, values, staged array) are, in this order, (2, 2, 2), (2, 2, 1), (2, 1, 1) and (1, 1, 1)
    if an array is staged, then (2, 2, 0), (2, 1, 0) and (1, 1, 0), by which it is not.
    """
    q_tile = first_dividing(plan.blocks, "q", owned_sizes(plan.options.block_q_bwd))
    split = ctas_of(plan) > 1
    most_keys = 128 if padded_dims(plan)[0] <= 128 and computes_little(plan) and not split else 64
    keys = first_dividing(plan.blocks, "kv", visited_sizes(plan.options.block_kv_bwd, most_keys))
    rings = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1)) if bias.staged is not None else ()
    sizes = [(q_tile, keys), (q_tile, SMALLEST_TILE)] if split else [(q_tile, keys)]
    if parts_of(plan) > 1:
        queries = (q_tile,) if plan.options.block_q_bwd is not None or q_tile == 64 else (q_tile, 64)
        sizes = [(n, m) for m in (keys, SMALLEST_TILE) for n in queries]
    made = [
        DqTiles(64, n // 64, m, key_slots, value_slots, plan.group == 1, staged, bias.batch_entries)
        for n, m in sizes
        for key_slots, value_slots, staged in (*rings, (2, 2, 0), (2, 1, 0), (1, 1, 0))
    ]
    return [tiles for tiles in made if scratch_bytes(dq_scratch(plan, tiles, bias)) + MARGIN <= SHARED_MEMORY]


def dq_fits(plan: KernelPlan, bias: DenseBiasTypes) -> bool:
    """Whether the dQ kernel has sizes that fit shared memory with the direct gradients and the batch entries of `bias`,
    with the array of `bias` staged or, where that leaves no room, read from global memory. By this pair_bias.py decides
    how many gradients are direct, and support.py refuses plans (with NO_DENSE_BIAS).

    plan   of the call, with extra features joined to the head dim or apart: the result is the same
    """
    return bool(_candidates(plan, bias))


def dq_tiles(plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS) -> DqTiles:
    """The best sizes of the dQ kernel that fit shared memory (`_candidates`). If none fit: the owned queries of
    `_candidates`, 64 keys, rings of one slot, one batch entry and no staged array.

    plan   of the call, with extra features joined to the head dim or apart: the result is the same
    bias   dtypes of the staged array and of the direct gradients, and how many batch entries a CTA takes
    """
    found = _candidates(plan, bias)
    if found:
        return found[0]
    q_tile = first_dividing(plan.blocks, "q", owned_sizes(plan.options.block_q_bwd))
    return DqTiles(64, q_tile // 64, 64, 1, 1, head_major=plan.group == 1)
