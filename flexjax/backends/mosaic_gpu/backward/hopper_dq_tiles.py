"""Tile sizes, ring depths and shared memory of the dQ kernel (hopper_dq.py).

Two kinds of captured arrays with an element for each (query, key) take shared memory (pair_bias.py). Tiles of the
*staged array* come in through a ring. Gradient tiles of arrays with a *direct gradient* leave through shared memory.
"""

import typing

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import (
    NO_DENSE_BIAS,
    SMALLEST_TILE,
    DenseBiasTypes,
    computes_little,
    first_dividing,
    owned_sizes,
    padded_dims,
    splits_dkv,
    swizzle_for,
    visited_sizes,
)
from flexjax.backends.mosaic_gpu.machine.columns import Exchange, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, parts_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    SHARED_MEMORY,
    Barriers,
    Description,
    Part,
    SwizzledTiles,
    scratch_bytes,
)
from flexjax.plan.kernel_plan import KernelPlan

MARGIN = 1024  # bytes of shared memory that this kernel leaves free


class DqTiles(typing.NamedTuple):
    """Sizes of the dQ kernel."""

    rows: int  # queries of one computing warpgroup
    groups: int  # computing warpgroups
    keys: int  # of a visited tile
    key_slots: int
    value_slots: int
    head_major: bool = True  # launch order: the CTAs of one head are adjacent
    staged_slots: int = 0  # 0: the kernel reads the staged array from global memory
    batch_entries: int = 1  # that one CTA takes, one after the other for each key tile


class StagedRing(typing.NamedTuple, typing.Generic[Part]):
    """A ring of staged tiles in shared memory with its barriers."""

    tiles: Part  # [slots, queries of the CTA, keys]
    full: Part
    free: Part


class DqScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the dQ kernel with G computing warpgroups and N batch entries."""

    query: Part  # [G * N * parts, rows, D] the CTA's own queries; dQ leaves through them
    d_out: Part  # [G * N * parts, rows, E]
    key: Part  # [slots * parts, keys, D]
    value: Part  # [slots * parts, keys, E]
    own_full: Part  # [G] Q and dO of a warpgroup have arrived
    key_full: Part
    value_full: Part
    key_free: Part
    value_free: Part
    staged: StagedRing[Part] | None
    direct_gradients: tuple[Part, ...]  # for each [G, rows, keys], a tile on its way out
    exchange: Exchange[Part] | None = None  # of the partial sums of S and dP; None where a CTA has all columns


def dq_scratch(plan: KernelPlan, tiles: DqTiles, bias: DenseBiasTypes) -> DqScratch[Description]:
    """The shared memory of a CTA of the dQ kernel; `bias` says what is staged and which gradients are direct."""
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
    return DqScratch(
        query=SwizzledTiles((own * parts, tiles.rows, dim), dtype, swizzle),
        d_out=SwizzledTiles((own * parts, tiles.rows, value_dim), dtype, swizzle),
        key=SwizzledTiles((tiles.key_slots * parts, tiles.keys, dim), dtype, swizzle),
        value=SwizzledTiles((tiles.value_slots * parts, tiles.keys, value_dim), dtype, swizzle),
        # full barriers expect one arrival for each copy, free ones one of each computing warpgroup
        own_full=Barriers(tiles.groups, 2 * tiles.batch_entries * parts),
        key_full=Barriers(tiles.key_slots, parts),
        value_full=Barriers(tiles.value_slots, parts),
        key_free=Barriers(tiles.key_slots, tiles.groups),
        value_free=Barriers(tiles.value_slots, tiles.groups),
        staged=staged,
        direct_gradients=tuple(SwizzledTiles((tiles.groups, tiles.rows, tiles.keys), t) for t in bias.direct_gradients),
        exchange=exchange_scratch(ctas_of(plan), tiles.groups, (tiles.rows, tiles.keys)),
    )


def _candidates(plan: KernelPlan, bias: DenseBiasTypes) -> list[DqTiles]:
    """Sizes of the dQ kernel that fit shared memory less MARGIN, the best first."""
    q_tile = first_dividing(plan.blocks, "q", owned_sizes(plan.options.block_q_bwd))
    split = ctas_of(plan) > 1
    most_keys = 128 if padded_dims(plan)[0] <= 128 and computes_little(plan) and not split else 64
    keys = first_dividing(plan.blocks, "kv", visited_sizes(plan.options.block_kv_bwd, most_keys))
    # slots of K, of V, of staged tiles
    rings = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1)) if bias.staged is not None else ()
    sizes = [(q_tile, keys), (q_tile, SMALLEST_TILE)] if split else [(q_tile, keys)]
    if plan.crowded and splits_dkv(plan) and plan.options.block_kv_bwd is None:
        sizes = [(q_tile, SMALLEST_TILE)]  # two groups of derivatives of 64 keys do not fit registers beside dQ
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
    """Whether sizes of the dQ kernel fit with the direct gradients and the batch entries of `bias`, staged or not."""
    return bool(_candidates(plan, bias))


def dq_tiles(plan: KernelPlan, bias: DenseBiasTypes = NO_DENSE_BIAS) -> DqTiles:
    """The best sizes of the dQ kernel that fit; if none do, the smallest rings without a staged array."""
    found = _candidates(plan, bias)
    if found:
        return found[0]
    q_tile = first_dividing(plan.blocks, "q", owned_sizes(plan.options.block_q_bwd))
    return DqTiles(64, q_tile // 64, 64, 1, 1, head_major=plan.group == 1)
