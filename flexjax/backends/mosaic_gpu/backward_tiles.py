"""Tile sizes of the Hopper backward kernels: the shared-memory model, what the options ask for, and which is chosen.

Which kernels run, and what KernelOptions means to them (None: the largest that fits registers and shared memory):

    kernel         own tile                          walks tiles of
    dQ             block_q_bwd queries: 64, 128      64 or 128 keys, at most block_kv_bwd
    dK/dV          block_kv_bwd keys: 64, 128        64 or 128 queries, at most block_q_bwd
    dK/dV above head dim 128   64 keys               64 queries
    one kernel     128 keys                          64 queries, or 128 (head dims 33 to 64, `fits_128_query_tile`); only where the
                                                     options do not ask for another tile
"""

import typing

import jax.numpy as jnp

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu import dq_order
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

SMEM_LIMIT = 227 * 1024
LARGEST_UNSPLIT_DIM = 128  # largest head dim of the dK/dV kernel that makes both gradients in one warpgroup


class DenseBiasBytes(typing.NamedTuple):
    """Bytes an element of what a kernel keeps of arrays with a number for each query and key (pair_bias.py).

    staged of the array that comes in through shared memory (0: none), written of all whose gradients go out through it;
    entries is how many batch entries a block of the dQ kernel takes together.
    """

    staged: int = 0
    direct_gradients: int = 0
    batch_entries: int = 1


NO_DENSE_BIAS = DenseBiasBytes()


def padded_dim(dim: int) -> int:
    """Head dim as the matrix instructions take it: rows of 32, 64 or a multiple of 64 bytes."""
    return 16 if dim <= 16 else -(-dim // 32) * 32


def padded_dims(plan: KernelPlan) -> tuple[int, int]:
    """Head dims of keys, extra features included, and of values."""
    return padded_dim(plan.head_dim + plan.extra_dim), padded_dim(plan.value_dim)


def first_dividing(blocks: BlockLayout | None, which: str, wanted: tuple[int, ...]) -> int:
    """The first of the wanted tile sizes that divides the block mask's block."""
    block = None if blocks is None else (blocks.block_q if which == "q" else blocks.block_kv)
    return next(t for t in wanted if block is None or block % t == 0)


def _sizes(asked: int | None) -> tuple[int, ...]:
    """Tile sizes to try for the axis that a kernel owns."""
    return (128, 64) if asked is None else (asked,)


def _steps(asked: int | None, most: int) -> tuple[int, ...]:
    """Tile sizes to try for the axis that a kernel walks."""
    return tuple(n for n in (128, 64) if n <= min(most, asked or most))


# ------------------------------------------------------------------- what the options may ask for


def refuses(plan: KernelPlan) -> str | None:
    """Why the tile that the options ask for cannot be had, with what can; None if it can."""
    options, blocks = plan.options, plan.blocks
    wide = max(padded_dims(plan)) > LARGEST_UNSPLIT_DIM
    for name, asked, choices, block in (
        ("block_q_bwd", options.block_q_bwd, (64, 128), None if blocks is None else blocks.block_q),
        (
            "block_kv_bwd",
            options.block_kv_bwd,
            (64,) if wide else (64, 128),
            None if blocks is None else blocks.block_kv,
        ),
    ):
        allowed = [n for n in choices if block is None or block % n == 0]
        if asked is None or asked in allowed:
            continue
        why = ""
        if asked in choices:
            why = f", dividing the mask's blocks of {block}"
        elif wide and name == "block_kv_bwd":
            why = f" for head dims above {LARGEST_UNSPLIT_DIM}"
        listed = " or ".join(map(str, allowed))
        return f"The GPU kernels of the backward pass take {name} {listed}{why}, not {asked}."
    return None


def backward_candidates(plan: KernelPlan) -> tuple[tuple[int, int], ...]:
    """(block_q_bwd, block_kv_bwd) that the options and the block mask allow, what runs by itself first."""
    options, blocks = plan.options, plan.blocks
    fits = lambda n, block: block is None or block % n == 0
    queries = [n for n in (128, 64) if options.block_q_bwd in (None, n) and fits(n, blocks and blocks.block_q)]
    keys = [n for n in (128, 64) if options.block_kv_bwd in (None, n) and fits(n, blocks and blocks.block_kv)]
    if max(padded_dims(plan)) > LARGEST_UNSPLIT_DIM:
        keys = [n for n in keys if n == 64]
    pairs = [(q, kv) for q in queries for kv in keys]
    fused = fused_tiles(plan) if choose_fused(plan) else None
    if fused is not None:
        pairs.sort(key=lambda pair: pair != (fused.queries, FUSED_KEYS))
    return tuple(pairs)


# ------------------------------------------------------------------- dQ


class DqTiles(typing.NamedTuple):
    """Queries of one warpgroup, compute warpgroups, keys of a step, slots for key tiles and for value tiles; launch order;
    slots for tiles of a staged array; batch entries that a block of threads takes together."""

    rows: int
    groups: int
    keys: int
    key_slots: int
    value_slots: int
    head_major: bool = True
    staged_slots: int = 0
    batch_entries: int = 1


def dq_smem_bytes(tiles: DqTiles, dim: int, value_dim: int, bias: DenseBiasBytes = NO_DENSE_BIAS) -> int:
    queries = tiles.rows * tiles.groups
    ring = tiles.keys * (tiles.key_slots * dim + tiles.value_slots * value_dim)
    return (
        2 * (tiles.batch_entries * queries * (dim + value_dim) + ring)
        + queries * tiles.keys * (tiles.staged_slots * bias.staged + bias.direct_gradients)
        + 2048
    )


def _dq_candidates(plan: KernelPlan, bias: DenseBiasBytes) -> list[DqTiles]:
    """Tiles that fit shared memory, the best first: a staged array before deeper rings of keys and values."""
    dim, value_dim = padded_dims(plan)
    q_tile = first_dividing(plan.blocks, "q", _sizes(plan.options.block_q_bwd))
    light = plan.score is None and plan.dropout is None
    widest = 128 if dim <= 128 and light else 64
    keys = first_dividing(plan.blocks, "kv", _steps(plan.options.block_kv_bwd, widest))
    rings = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1)) if bias.staged else ()
    made = [
        DqTiles(64, q_tile // 64, keys, key_slots, value_slots, plan.group == 1, staged, bias.batch_entries)
        for key_slots, value_slots, staged in (*rings, (2, 2, 0), (2, 1, 0), (1, 1, 0))
    ]
    return [tiles for tiles in made if dq_smem_bytes(tiles, dim, value_dim, bias) <= SMEM_LIMIT]


def dq_fits(plan: KernelPlan, bias: DenseBiasBytes) -> bool:
    """Whether there is room for the tiles of gradients that the kernel is to write."""
    return bool(_dq_candidates(plan, bias))


def dq_tiles(plan: KernelPlan, bias: DenseBiasBytes = NO_DENSE_BIAS) -> DqTiles:
    """Largest tiles that fit registers and shared memory."""
    found = _dq_candidates(plan, bias)
    if found:
        return found[0]
    q_tile = first_dividing(plan.blocks, "q", _sizes(plan.options.block_q_bwd))
    return DqTiles(64, q_tile // 64, 64, 1, 1, head_major=plan.group == 1)


# ------------------------------------------------------------------- dK and dV


class DkvTiles(typing.NamedTuple):
    """Keys of one warpgroup, compute warpgroups, queries of a step, slots for query tiles and for d_out; launch order;
    slots for tiles of a staged array."""

    rows: int
    groups: int
    queries: int
    query_slots: int
    out_slots: int
    head_major: bool = True
    staged_slots: int = 0


def dkv_smem_bytes(tiles: DkvTiles, dim: int, value_dim: int, bias: DenseBiasBytes = NO_DENSE_BIAS) -> int:
    keys = tiles.rows * tiles.groups
    ring = 2 * tiles.queries * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return 2 * keys * (dim + value_dim) + ring + keys * tiles.queries * tiles.staged_slots * bias.staged + 1024


def dkv_tiles(plan: KernelPlan, bias: DenseBiasBytes = NO_DENSE_BIAS) -> DkvTiles:
    """Largest tiles that fit registers and shared memory, for head dims up to 128."""
    keys = first_dividing(plan.blocks, "kv", _sizes(plan.options.block_kv_bwd))
    dims = max(plan.head_dim + plan.extra_dim, plan.value_dim)
    narrow = dims <= 64 and plan.score is None and plan.dropout is None
    queries = first_dividing(plan.blocks, "q", _steps(plan.options.block_q_bwd, 128 if narrow else 64))
    staged = (2, 0) if bias.staged else (0,)  # they share the barriers of the queries
    made = [DkvTiles(64, keys // 64, queries, 2, 2, plan.group == 1, slots) for slots in staged]
    return next((t for t in made if dkv_smem_bytes(t, *padded_dims(plan), bias) <= SMEM_LIMIT), made[-1])


SPLIT_KEYS, SPLIT_QUERIES = 64, 64


class SplitDkvTiles(typing.NamedTuple):
    """Slots for query tiles, for d_out tiles and for tiles handed over; launch order."""

    query_slots: int
    out_slots: int
    p_slots: int
    head_major: bool = True


def split_dkv_smem_bytes(tiles: SplitDkvTiles, dim: int, value_dim: int) -> int:
    ring = 2 * SPLIT_QUERIES * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return 2 * SPLIT_KEYS * (dim + value_dim) + ring + 4 * tiles.p_slots * SPLIT_KEYS * SPLIT_QUERIES + 1024


def split_dkv_tiles(plan: KernelPlan) -> SplitDkvTiles:
    dim, value_dim = padded_dims(plan)
    head_major = plan.group == 1
    for tiles in (SplitDkvTiles(2, 2, 2, head_major), SplitDkvTiles(2, 2, 1, head_major)):
        if split_dkv_smem_bytes(tiles, dim, value_dim) <= SMEM_LIMIT:
            return tiles
    return SplitDkvTiles(1, 1, 1, head_major)


# ------------------------------------------------------------------- all three in one kernel

FUSED_KEYS = 128


class FusedTiles(typing.NamedTuple):
    """Queries of a step; slots for query tiles, for d_out tiles and for finished dQ tiles; launch order."""

    queries: int
    query_slots: int
    out_slots: int
    dq_slots: int
    head_major: bool = True


def fused_smem_bytes(tiles: FusedTiles, dim: int, value_dim: int) -> int:
    own = 2 * FUSED_KEYS * (dim + value_dim)
    ring = 2 * tiles.queries * (tiles.query_slots * (dim + 4) + tiles.out_slots * value_dim)
    return own + ring + 2 * 2 * FUSED_KEYS * tiles.queries + 4 * tiles.dq_slots * tiles.queries * dim + 1024


def fused_tiles(plan: KernelPlan) -> FusedTiles | None:
    """Slots that fit, None where this kernel does not apply."""
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
    """Whether tiles of 128 queries fit the registers: nothing but what is added to scores, of arrays with a number for each
    query and key at most four bytes, or else a number for each query, which takes half as much."""
    score, mask = plan.score, plan.mask
    if max(padded_dims(plan)) > 64 or plan.dropout is not None:
        return False
    if score is not None and not patterns.adds_to_score(score):
        return False
    kind = lambda load: ir.classify_load(load).kind
    added = score.loads if score is not None else ()
    rows = sum(kind(load) == ir.ROW for load in (*added, *(mask.loads if mask is not None else ())))
    each = [load.out.dtype for load in added if kind(load) in (ir.DIAGONAL, ir.TILE)]
    held = sum(jnp.dtype(dtype).itemsize for dtype in each)
    return held <= 4 and rows <= (0 if held else 1)


MOST_TICKETS = 1 << 22
"""Pairs of query and key tiles, over all masks of a problem, whose tickets are kept in memory."""
MOST_DELAY, MOST_DELAY_WHERE_TWO_ARE_SLOW = 0.12, 0.35
"""Start-up delay from which two kernels are faster; the second for problems that do not fill the reference GPU once, and for mods
that load numbers of queries and keys, which two kernels evaluate twice."""


def _load_kinds(plan: KernelPlan) -> set[str]:
    """How score_mod's loads walk their arrays."""
    return set() if plan.score is None else {ir.classify_load(load).kind for load in plan.score.loads}


def _tickets_fit(plan: KernelPlan, queries: int) -> bool:
    q_tiles, kv_tiles = -(-plan.q_len // queries), -(-plan.kv_len // FUSED_KEYS)
    masks = plan.blocks.batch * plan.blocks.heads if plan.blocks is not None else 0
    return masks * q_tiles * kv_tiles <= MOST_TICKETS


def _fixed_order_is_fast(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel in a fixed order beats two kernels, by the model of dq_order.py and by measurement."""
    if not _tickets_fit(plan, tiles.queries):
        return False
    if tiles.queries == 64 and plan.score is None and dq_order.is_triangle(plan):
        return False  # two kernels are 4% faster at head dim 128, and as fast with grouped heads; with ALiBi 20% slower
    kv_tiles = -(-plan.kv_len // FUSED_KEYS)
    order = dq_order.order_for(plan, -(-plan.q_len // tiles.queries), kv_tiles)
    two_are_slow = plan.batch * plan.kv_heads * kv_tiles <= dq_order.REFERENCE_SMS or bool(
        _load_kinds(plan) - {ir.SCALAR}
    )
    return order.delay <= (MOST_DELAY_WHERE_TWO_ARE_SLOW if two_are_slow else MOST_DELAY)


def adds_in_order(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel adds to dQ in a fixed order: where it must, and where that is faster than any order."""
    if plan.options.deterministic:
        return True
    return tiles.queries == 128 and dq_order.is_full(plan) and plan.group == 1 and _fixed_order_is_fast(plan, tiles)


def choose_fused(plan: KernelPlan) -> bool:
    """Whether the fused kernel, with five products, beats two kernels with seven; see NOTES_backward.md for the measurements.

    Additions in any order: it does, but for mods that read a number for each pair, which lie across its transposed tiles.
    In a fixed order: where the order of additions costs little.
    """
    if ir.TILE in _load_kinds(plan):
        return False
    if not plan.options.deterministic:
        return True
    fused = fused_tiles(plan)
    return fused is not None and _fixed_order_is_fast(plan, fused)
