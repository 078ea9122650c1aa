"""Tile sizes, ring depths and shared memory of the fused kernel (hopper_fused.py), and which plans it can run.

A CTA owns FUSED_KEYS keys, and GROUPS computing warpgroups take ROWS of them each.
"""

import typing

import jax.numpy as jnp

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import FUSED_KEYS, padded_dims
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    Barriers,
    Description,
    Part,
    PlainArray,
    SwizzledTiles,
    fits,
)
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

GROUPS, ROWS = 2, 64  # computing warpgroups of a CTA, and keys of each
DS_SLOTS = 2  # slots for tiles of dS^T in shared memory; consecutive visits use different ones


class FusedTiles(typing.NamedTuple):
    """Sizes of the fused kernel."""

    queries: int  # of a visited tile
    query_slots: int
    out_slots: int
    dq_slots: int  # of finished dQ tiles
    # key heads side by side in launch order where additions to dQ are in any order; 0: one head after another
    heads: int = 0

    @property
    def dq_by_queries(self) -> bool:
        """Whether each computing warpgroup makes dQ of half of a tile's queries, not of half of D."""
        return self.queries == GROUPS * ROWS

    def dq_columns(self, dim: int) -> int:
        """Number of columns of dQ that one computing warpgroup makes; `dim` is the padded head dim D."""
        return dim if self.dq_by_queries else dim // GROUPS


class FusedScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the fused kernel."""

    query: Part  # [slots, queries, D]
    d_out: Part  # [slots, queries, E]
    stats: Part  # [query slots, 2, queries] lse2 and delta of the queries in `query`
    key: Part  # [FUSED_KEYS, D] the CTA's own keys; dK leaves through them
    value: Part  # [FUSED_KEYS, E], dV leaves through them
    ds: Part  # [DS_SLOTS, FUSED_KEYS, queries] dS^T of both warpgroups
    dq: Part  # [slots, GROUPS * ROWS, `dq_columns`] finished dQ tiles on their way to memory
    query_full: Part  # also counts the statistics
    out_full: Part
    own_full: Part  # keys and values
    query_free: Part
    out_free: Part
    ds_ready: Part  # both warpgroups have written their dS^T
    dq_full: Part
    dq_free: Part
    started: Part  # the CTA's start number (machine/dq_order.py) is in memory


def fused_scratch(plan: KernelPlan, tiles: FusedTiles) -> FusedScratch[Description]:
    """The shared memory of a CTA of the fused kernel with the sizes of `tiles`."""
    dim, value_dim = padded_dims(plan)
    columns = tiles.dq_columns(dim)
    # A warpgroup's columns of K must be whole swizzled tiles, and the operands of one WGMMA want one swizzle.
    swizzle = min(128, 2 * columns)
    return FusedScratch(
        query=SwizzledTiles((tiles.query_slots, tiles.queries, dim), plan.dtype, swizzle),
        d_out=SwizzledTiles((tiles.out_slots, tiles.queries, value_dim), plan.dtype),
        stats=PlainArray((tiles.query_slots, 2, tiles.queries), "float32"),
        key=SwizzledTiles((FUSED_KEYS, dim), plan.dtype, swizzle),
        value=SwizzledTiles((FUSED_KEYS, value_dim), plan.dtype),
        ds=SwizzledTiles((DS_SLOTS, FUSED_KEYS, tiles.queries), plan.dtype, swizzle),
        dq=SwizzledTiles((tiles.dq_slots, GROUPS * ROWS, columns), "float32"),
        # two copies: Q with its statistics, and K with V
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

    `hopper_fused_choice.fused_is_faster` excludes float32 and loads of an element for each (query, key).
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
    """`FusedTiles.heads` of a plan."""
    # documents are 15% slower side by side, because their key tiles take all of the L2 cache
    even = dq_order.is_full(plan) or dq_order.is_triangle(plan)
    return dq_order.heads_side_by_side(plan) if even and plan.group == 1 else 0


def fits_128_query_tile(plan: KernelPlan) -> bool:
    """Whether the fused kernel has registers for tiles of 128 queries."""
    score, mask = plan.score, plan.mask
    if max(padded_dims(plan)) > 64 or plan.dropout is not None:
        return False
    if patterns.fills_registers(score) or patterns.fills_registers(mask):
        return False
    if score is not None and not patterns.adds_to_score(score):
        return False
    # scalars, vectors over the keys, and elements that only mask_mod loads take few registers and do not count
    kind = lambda load: ir.classify_load(load).kind
    added = score.loads if score is not None else ()
    row_vectors = sum(kind(load) == ir.ROW for load in (*added, *(mask.loads if mask is not None else ())))
    dtypes = [load.out.dtype for load in added if kind(load) in (ir.DIAGONAL, ir.TILE)]
    element_bytes = sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
    return element_bytes <= 4 and row_vectors <= (0 if element_bytes else 1)
