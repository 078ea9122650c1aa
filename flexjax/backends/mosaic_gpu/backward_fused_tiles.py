"""Tile sizes, ring depths and shared memory of the fused kernel (backward_sm90_fused.py), and which plans it can run.

A CTA owns FUSED_KEYS keys, and GROUPS computing warpgroups take ROWS of them each. It visits tiles of 64 or 128
queries, whose Q and dO come through *rings*: buffers in shared memory with several slots of one tile each.
"""

import typing

import jax.numpy as jnp

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu import dq_order
from flexjax.backends.mosaic_gpu.backward_tiles import FUSED_KEYS, padded_dims
from flexjax.backends.mosaic_gpu.shared_memory import (
    Barriers,
    Description,
    Part,
    PlainArray,
    SwizzledTiles,
    fits,
)
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

GROUPS, ROWS = 2, 64
"""Computing warpgroups of a CTA, and keys of each."""
DS_SLOTS = 2
"""Slots for tiles of dS^T in shared memory; consecutive visits use different ones."""


class FusedTiles(typing.NamedTuple):
    """Sizes of the fused kernel.

    queries                            of a visited tile
    query_slots, out_slots, dq_slots   ring depths of Q, dO and finished dQ tiles
    heads                              key heads side by side in launch order where additions to dQ are in any order, the longest key
                                       tiles of all of them first; 0: one head after another
    """

    queries: int
    query_slots: int
    out_slots: int
    dq_slots: int
    heads: int = 0

    @property
    def dq_by_queries(self) -> bool:
        """Whether each computing warpgroup makes dQ of half of a tile's queries; otherwise of half of the columns of
        D.
        """
        return self.queries == GROUPS * ROWS

    def dq_columns(self, dim: int) -> int:
        """Number of columns of dQ that one computing warpgroup makes; `dim` is the padded head dim D."""
        return dim if self.dq_by_queries else dim // GROUPS


class Scratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the fused kernel; D stands for the padded head dim, E for values.

    query, d_out           [slots, queries, D or E] rings
    stats                  [query slots, 2, queries] lse2 and delta of the queries in `query`
    key, value             [FUSED_KEYS, D or E] the CTA's own keys and values; dK and dV leave through them
    ds                     [DS_SLOTS, FUSED_KEYS, queries] dS^T of both warpgroups
    dq                     [slots, GROUPS * ROWS, `dq_columns`] finished dQ tiles on their way to memory, float32
    query_full, out_full   [slots] a tile has arrived; `query_full` also counts its statistics
    own_full               the CTA's keys and values have arrived
    query_free, out_free   [slots] both warpgroups have read a tile
    ds_ready               both warpgroups have written their dS^T
    dq_full, dq_free       [slots] a dQ tile is written, is read
    started                the CTA's start number (dq_order.py) is in memory
    """

    query: Part
    d_out: Part
    stats: Part
    key: Part
    value: Part
    ds: Part
    dq: Part
    query_full: Part
    out_full: Part
    own_full: Part
    query_free: Part
    out_free: Part
    ds_ready: Part
    dq_full: Part
    dq_free: Part
    started: Part


def fused_scratch(plan: KernelPlan, tiles: FusedTiles) -> Scratch[Description]:
    """The shared memory of a CTA of the fused kernel with the sizes of `tiles`, for the padded head dims and the dtype of `plan`.

    Q, K and dS^T are swizzled over the bytes of the dQ columns of one computing warpgroup, at most 128, the rest over
    the default. Barriers of copies expect one arrival, or two for Q with its statistics and for K with V; `ds_ready`,
    `dq_full` and the free barriers of Q and dO one of each computing warpgroup; `dq_free` and `started` one.
    """
    dim, value_dim = padded_dims(plan)
    columns = tiles.dq_columns(dim)
    # A warpgroup's columns of K must be whole swizzled tiles, and the operands of one WGMMA want one swizzle.
    swizzle = min(128, 2 * columns)
    return Scratch(
        query=SwizzledTiles((tiles.query_slots, tiles.queries, dim), plan.dtype, swizzle),
        d_out=SwizzledTiles((tiles.out_slots, tiles.queries, value_dim), plan.dtype),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((FUSED_KEYS, dim), plan.dtype, swizzle),
        value=SwizzledTiles((FUSED_KEYS, value_dim), plan.dtype),
        ds=SwizzledTiles((DS_SLOTS, FUSED_KEYS, tiles.queries), plan.dtype, swizzle),
        dq=SwizzledTiles((tiles.dq_slots, GROUPS * ROWS, columns), "float32"),
        query_full=Barriers(tiles.query_slots, 2),
        out_full=Barriers(tiles.out_slots),
        own_full=Barriers(arrivals=2),
        query_free=Barriers(tiles.query_slots, GROUPS),
        out_free=Barriers(tiles.out_slots, GROUPS),
        ds_ready=Barriers(arrivals=GROUPS),
        dq_full=Barriers(tiles.dq_slots, GROUPS),
        dq_free=Barriers(tiles.dq_slots),
        started=Barriers(),
    )


def fused_tiles(plan: KernelPlan) -> FusedTiles | None:
    """The largest sizes of the fused kernel that fit shared memory and the options; None if there are none.

    Tiles of 128 queries come first, where `fits_128_query_tile`, then tiles of 64; for each, two slots of Q, dO and dQ,
    then one slot of dQ, then one of dO and dQ. float32 and loads of an element for each (query, key) are not tested here:
    `fused_choice.fused_is_faster` excludes them. None where no sizes fit, and where

    - the padded head dim of queries and keys is not 64 or 128, or that of values is above 128;
    - the mask's key blocks are not multiples of FUSED_KEYS, or its query blocks of the tile's queries;
    - block_kv_bwd is set and not FUSED_KEYS, or block_q_bwd is set and not the tile's queries.
    """
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
            tiles = FusedTiles(queries, *slots, heads=_heads_side_by_side(plan))
            if fits(fused_scratch(plan, tiles)):
                return tiles
    return None


def _heads_side_by_side(plan: KernelPlan) -> int:
    """`FusedTiles.heads`: `dq_order.heads_side_by_side` for full and causal-like masks where each query head has a key head of its own, else
    0. Documents are 15% slower with several heads side by side, because their key tiles take all of the L2 cache.
    """
    even = dq_order.is_full(plan) or dq_order.is_triangle(plan)
    return dq_order.heads_side_by_side(plan) if even and plan.group == 1 else 0


def fits_128_query_tile(plan: KernelPlan) -> bool:
    """Whether the fused kernel has registers for tiles of 128 queries: padded head dims up to 64, no dropout, mods that
    divide no tile of integers (`patterns.divides_tiles`), and a score_mod that only adds to the score, or none.

    What the mods load must fit too. score_mod may load elements of at most four bytes in all for each (query, key) or
    diagonal; score_mod and mask_mod together may load one vector over the queries, or none beside such elements.
    Scalars, vectors over the keys, and elements that only mask_mod loads do not count.
    """
    score, mask = plan.score, plan.mask
    if max(padded_dims(plan)) > 64 or plan.dropout is not None:
        return False
    if patterns.divides_tiles(score) or patterns.divides_tiles(mask):
        return False
    if score is not None and not patterns.adds_to_score(score):
        return False
    kind = lambda load: ir.classify_load(load).kind
    added = score.loads if score is not None else ()
    row_vectors = sum(kind(load) == ir.ROW for load in (*added, *(mask.loads if mask is not None else ())))
    dtypes = [load.out.dtype for load in added if kind(load) in (ir.DIAGONAL, ir.TILE)]
    element_bytes = sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
    return element_bytes <= 4 and row_vectors <= (0 if element_bytes else 1)
