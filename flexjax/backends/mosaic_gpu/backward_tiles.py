"""Tile sizes and ring depths of the Hopper backward kernels: what fits shared memory and registers, and what options may ask for.

A kernel owns a tile of one axis and visits tiles of the other. KernelOptions set the sizes (None: the largest that fits):

    kernel         owns                              visits
    dQ             block_q_bwd queries: 64, 128      64 or 128 keys, at most block_kv_bwd
    dK/dV          block_kv_bwd keys: 64, 128        64 or 128 queries, at most block_q_bwd
    split dK/dV    64 keys (head dims above 128)     64 queries
    fused          128 keys                          64 queries, or 128 where `fits_128_query_tile`

choose_kernel.py decides which of the kernels run.
"""

import typing

import jax.numpy as jnp

from flexjax.analysis import patterns
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

SMEM_LIMIT = 227 * 1024
"""Bytes of shared memory that one CTA can have on Hopper."""
LARGEST_UNSPLIT_DIM = 128
"""The largest padded head dim at which one warpgroup has registers for both accumulators, dK and dV. Above it the split kernel
gives them to two warpgroups."""
FUSED_KEYS = 128
"""Keys that a CTA of the fused kernel owns."""
SPLIT_KEYS, SPLIT_QUERIES = 64, 64
"""Keys that a CTA of the split dK/dV kernel owns, and queries of a tile that it visits."""


class DenseBiasBytes(typing.NamedTuple):
    """Shared-memory bytes per (query, key) of captured arrays with an element for each (query, key), see pair_bias.py.

    staged            of the staged array, 0 if there is none
    direct_gradients  of all gradients that the dQ kernel writes, together
    batch_entries     how many batch entries a CTA of the dQ kernel takes
    """

    staged: int = 0
    direct_gradients: int = 0
    batch_entries: int = 1


NO_DENSE_BIAS = DenseBiasBytes()


def padded_dim(dim: int) -> int:
    """Head dim rounded up to what WGMMA takes in 2-byte elements: rows of 32, 64 or a multiple of 64 bytes."""
    return 16 if dim <= 16 else -(-dim // 32) * 32


def padded_dims(plan: KernelPlan) -> tuple[int, int]:
    """Padded head dims of keys, extra features included, and of values."""
    return padded_dim(plan.head_dim + plan.extra_dim), padded_dim(plan.value_dim)


def _first_dividing(blocks: BlockLayout | None, axis: str, sizes: tuple[int, ...]) -> int:
    """The first of the tile sizes that divides the mask's block of queries ("q") or keys ("kv")."""
    block = None if blocks is None else (blocks.block_q if axis == "q" else blocks.block_kv)
    return next(size for size in sizes if block is None or block % size == 0)


def _owned_sizes(asked: int | None) -> tuple[int, ...]:
    """Tile sizes to try, best first, for the axis that a kernel owns; `asked` is the option."""
    return (128, 64) if asked is None else (asked,)


def _visited_sizes(asked: int | None, most: int) -> tuple[int, ...]:
    """Tile sizes to try, best first, for the axis that a kernel visits: none above `most` or the option `asked`."""
    return tuple(size for size in (128, 64) if size <= min(most, asked or most))


def refuses(plan: KernelPlan) -> str | None:
    """A sentence that says why no kernel has the tile that block_q_bwd or block_kv_bwd ask for; None if one has."""
    options, blocks = plan.options, plan.blocks
    split = max(padded_dims(plan)) > LARGEST_UNSPLIT_DIM
    key_sizes = (64,) if split else (64, 128)
    for name, asked, choices, block in (
        ("block_q_bwd", options.block_q_bwd, (64, 128), None if blocks is None else blocks.block_q),
        ("block_kv_bwd", options.block_kv_bwd, key_sizes, None if blocks is None else blocks.block_kv),
    ):
        allowed = [n for n in choices if block is None or block % n == 0]
        if asked is None or asked in allowed:
            continue
        why = ""
        if asked in choices:
            why = f", dividing the mask's blocks of {block}"
        elif split and name == "block_kv_bwd":
            why = f" for head dims above {LARGEST_UNSPLIT_DIM}"
        sizes = " or ".join(map(str, allowed))
        return f"The GPU kernels of the backward pass take {name} {sizes}{why}, not {asked}."
    return None


# ------------------------------------------------------------------- dQ


class DqTiles(typing.NamedTuple):
    """Sizes of the dQ kernel.

    rows, groups            queries of one computing warpgroup, and computing warpgroups
    keys                    of a visited tile
    key_slots, value_slots  ring depths
    head_major              launch order: the CTAs of one head are adjacent (`common.tile_and_head`)
    staged_slots            ring depth of the staged array, 0 where the kernel reads the array from global memory
    batch_entries           that one CTA takes, one after the other for each key tile
    """

    rows: int
    groups: int
    keys: int
    key_slots: int
    value_slots: int
    head_major: bool = True
    staged_slots: int = 0
    batch_entries: int = 1


def dq_smem_bytes(tiles: DqTiles, dim: int, value_dim: int, bias: DenseBiasBytes = NO_DENSE_BIAS) -> int:
    """Shared memory of the dQ kernel; dim and value_dim are padded head dims."""
    queries = tiles.rows * tiles.groups
    ring = tiles.keys * (tiles.key_slots * dim + tiles.value_slots * value_dim)
    return (
        2 * (tiles.batch_entries * queries * (dim + value_dim) + ring)
        + queries * tiles.keys * (tiles.staged_slots * bias.staged + bias.direct_gradients)
        + 2048
    )


def _dq_candidates(plan: KernelPlan, bias: DenseBiasBytes) -> list[DqTiles]:
    """Sizes that fit shared memory, the best first: staging an array goes before deeper rings of keys and values."""
    dim, value_dim = padded_dims(plan)
    q_tile = _first_dividing(plan.blocks, "q", _owned_sizes(plan.options.block_q_bwd))
    no_mods = plan.score is None and plan.dropout is None
    most_keys = 128 if dim <= 128 and no_mods else 64
    keys = _first_dividing(plan.blocks, "kv", _visited_sizes(plan.options.block_kv_bwd, most_keys))
    rings = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1)) if bias.staged else ()
    made = [
        DqTiles(64, q_tile // 64, keys, key_slots, value_slots, plan.group == 1, staged, bias.batch_entries)
        for key_slots, value_slots, staged in (*rings, (2, 2, 0), (2, 1, 0), (1, 1, 0))
    ]
    return [tiles for tiles in made if dq_smem_bytes(tiles, dim, value_dim, bias) <= SMEM_LIMIT]


def dq_fits(plan: KernelPlan, bias: DenseBiasBytes) -> bool:
    """Whether the dQ kernel has shared memory for the staged array and the direct gradients."""
    return bool(_dq_candidates(plan, bias))


def dq_tiles(plan: KernelPlan, bias: DenseBiasBytes = NO_DENSE_BIAS) -> DqTiles:
    """The best sizes of the dQ kernel that fit."""
    found = _dq_candidates(plan, bias)
    if found:
        return found[0]
    q_tile = _first_dividing(plan.blocks, "q", _owned_sizes(plan.options.block_q_bwd))
    return DqTiles(64, q_tile // 64, 64, 1, 1, head_major=plan.group == 1)


# ------------------------------------------------------------------- dK and dV


class DkvTiles(typing.NamedTuple):
    """Sizes of the dK/dV kernel.

    rows, groups            keys of one computing warpgroup, and computing warpgroups
    queries                 of a visited tile
    query_slots, out_slots  ring depths of Q and dO
    head_major              launch order: the CTAs of one head are adjacent (`common.tile_and_head`)
    staged_slots            ring depth of the staged array, 0 where the kernel reads the array from global memory
    """

    rows: int
    groups: int
    queries: int
    query_slots: int
    out_slots: int
    head_major: bool = True
    staged_slots: int = 0


def dkv_smem_bytes(tiles: DkvTiles, dim: int, value_dim: int, bias: DenseBiasBytes = NO_DENSE_BIAS) -> int:
    """Shared memory of the dK/dV kernel; dim and value_dim are padded head dims."""
    keys = tiles.rows * tiles.groups
    ring = 2 * tiles.queries * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return 2 * keys * (dim + value_dim) + ring + keys * tiles.queries * tiles.staged_slots * bias.staged + 1024


def dkv_tiles(plan: KernelPlan, bias: DenseBiasBytes = NO_DENSE_BIAS) -> DkvTiles:
    """The best sizes of the dK/dV kernel that fit, for head dims up to 128."""
    keys = _first_dividing(plan.blocks, "kv", _owned_sizes(plan.options.block_kv_bwd))
    dims = max(plan.head_dim + plan.extra_dim, plan.value_dim)
    most_queries = 128 if dims <= 64 and plan.score is None and plan.dropout is None else 64
    queries = _first_dividing(plan.blocks, "q", _visited_sizes(plan.options.block_q_bwd, most_queries))
    staged = (2, 0) if bias.staged else (0,)  # a staged tile shares the slot and barriers of its queries
    made = [DkvTiles(64, keys // 64, queries, 2, 2, plan.group == 1, slots) for slots in staged]
    return next((t for t in made if dkv_smem_bytes(t, *padded_dims(plan), bias) <= SMEM_LIMIT), made[-1])


class SplitDkvTiles(typing.NamedTuple):
    """Ring depths of the split dK/dV kernel: of Q, of dO, and of the P tiles that one warpgroup hands to the other.

    head_major   launch order: the CTAs of one head are adjacent (`common.tile_and_head`)
    """

    query_slots: int
    out_slots: int
    p_slots: int
    head_major: bool = True


def split_dkv_smem_bytes(tiles: SplitDkvTiles, dim: int, value_dim: int) -> int:
    """Shared memory of the split dK/dV kernel; dim and value_dim are padded head dims."""
    ring = 2 * SPLIT_QUERIES * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return 2 * SPLIT_KEYS * (dim + value_dim) + ring + 4 * tiles.p_slots * SPLIT_KEYS * SPLIT_QUERIES + 1024


def split_dkv_tiles(plan: KernelPlan) -> SplitDkvTiles:
    """The deepest rings of the split dK/dV kernel that fit."""
    dim, value_dim = padded_dims(plan)
    head_major = plan.group == 1
    for tiles in (SplitDkvTiles(2, 2, 2, head_major), SplitDkvTiles(2, 2, 1, head_major)):
        if split_dkv_smem_bytes(tiles, dim, value_dim) <= SMEM_LIMIT:
            return tiles
    return SplitDkvTiles(1, 1, 1, head_major)


# ------------------------------------------------------------------- dQ, dK and dV in one kernel


class FusedTiles(typing.NamedTuple):
    """Sizes of the fused kernel.

    queries                           of a visited tile
    query_slots, out_slots, dq_slots  ring depths of Q, dO and finished dQ tiles
    head_major                        launch order: the CTAs of one head are adjacent (`common.tile_and_head`)
    """

    queries: int
    query_slots: int
    out_slots: int
    dq_slots: int
    head_major: bool = True


def fused_smem_bytes(tiles: FusedTiles, dim: int, value_dim: int) -> int:
    """Shared memory of the fused kernel; dim and value_dim are padded head dims."""
    own = 2 * FUSED_KEYS * (dim + value_dim)
    ring = 2 * tiles.queries * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return own + ring + 2 * 2 * FUSED_KEYS * tiles.queries + 4 * tiles.dq_slots * tiles.queries * dim + 1024


def fused_tiles(plan: KernelPlan) -> FusedTiles | None:
    """The largest sizes of the fused kernel that fit; None where the fused kernel cannot run the plan or the options' tile."""
    dim, value_dim = padded_dims(plan)
    blocks, options = plan.blocks, plan.options
    if max(dim, value_dim) > 128 or dim not in (64, 128) or (blocks is not None and blocks.block_kv % FUSED_KEYS):
        return None
    if options.block_kv_bwd not in (None, FUSED_KEYS):
        return None
    for queries in (128, 64) if fits_128_query_tile(plan) else (64,):
        if options.block_q_bwd not in (None, queries) or (blocks is not None and blocks.block_q % queries):
            continue
        for slots in ((2, 2, 2), (2, 2, 1), (2, 1, 1)):
            tiles = FusedTiles(queries, *slots, head_major=plan.group == 1)
            if fused_smem_bytes(tiles, dim, value_dim) <= SMEM_LIMIT:
                return tiles
    return None


def fits_128_query_tile(plan: KernelPlan) -> bool:
    """Whether the fused kernel has registers for tiles of 128 queries: head dims up to 64, no dropout, a small score_mod.

    A small score_mod only adds to the score, and what it loads for one tile stays within the registers: either elements of at
    most four bytes in all for each (query, key), or one vector over the queries, which takes half as many registers.
    """
    score, mask = plan.score, plan.mask
    if max(padded_dims(plan)) > 64 or plan.dropout is not None:
        return False
    if score is not None and not patterns.adds_to_score(score):
        return False
    kind = lambda load: ir.classify_load(load).kind
    added = score.loads if score is not None else ()
    row_vectors = sum(kind(load) == ir.ROW for load in (*added, *(mask.loads if mask is not None else ())))
    dtypes = [load.out.dtype for load in added if kind(load) in (ir.DIAGONAL, ir.TILE)]
    element_bytes = sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
    return element_bytes <= 4 and row_vectors <= (0 if element_bytes else 1)
