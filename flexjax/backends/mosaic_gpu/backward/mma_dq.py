"""Gradient of the queries by mma.sync: a CTA owns a tile of queries and visits tiles of keys.

    S = Q K^T      dP = dO V^T      dQ += dS K        (three products a tile; accumulators: S, dP, dQ)

Each warpgroup has `rows` queries of its own, or shares them and splits the columns (mma_split.py). All share the
visited tiles. The formulas are at the top of common.py. A *direct gradient* is the gradient of a captured array with an
element for each (query, key), which this kernel writes itself (pair_bias.py).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward import tile_visits
from flexjax.backends.mosaic_gpu.backward.common import (
    ALONG_ROWS,
    BackwardCall,
    BackwardOperands,
    DqOutputs,
    statistics_of,
)
from flexjax.backends.mosaic_gpu.backward.mma_split import SplitTiles
from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles, MmaScratch, scratch
from flexjax.backends.mosaic_gpu.backward.mma_visits import VisitedTiles, VisitingCta, VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward.pair_bias import DirectGradient
from flexjax.backends.mosaic_gpu.backward.pair_bias_tiles import skipped_blocks
from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, launch, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_products import add_product, product_transposed
from flexjax.backends.mosaic_gpu.machine.mma_results import write_rows
from flexjax.backends.mosaic_gpu.machine.registers import zero_tile
from flexjax.integers import cdiv


def backward_dq(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: MmaBackwardTiles, gradients: tuple[DirectGradient, ...]
) -> DqOutputs[jax.Array]:
    """Runs the dQ kernel: dQ, times scale, padded, and the direct gradients (`whole_tiles`).

    The grid has one CTA for each query tile of each query head; of a head, CTAs with the most visits start first. What
    lies past the ends is undefined.
    """
    plan, tokens = call.plan, call.tokens
    q_tiles = cdiv(plan.q_len, tiles.owned)
    visits = tile_visits.visits_for(plan, tiles.owned, tiles.visited, transposed=False)
    order = tile_visits.longest_first(visits, lists, q_tiles)
    loads = tuple(one.load_number for one in gradients)
    shape = (tiles.rows, tiles.scored)
    math = TileMath(plan, call.derivative, shape, "q", (tiles.owned, tiles.visited), loads_too=loads)
    skipped = skipped_blocks(plan, lists) if gradients else VisitLists()
    heads = plan.batch * plan.q_heads

    def kernel(inputs: BackwardOperands[Ref], outputs: DqOutputs[Ref], scratch: MmaScratch[Ref]) -> None:
        program = lax.axis_index("program")
        rank, head = tile_visits.tile_and_head(program, q_tiles, heads, plan.group == 1)
        b, h = lax.div(head, jnp.int32(plan.q_heads)), lax.rem(head, jnp.int32(plan.q_heads))
        tile = visits.in_order(inputs.order, b, h, rank)
        may_be_masked = plan.mask is not None or plan.blocks is not None
        sequence = VisitSequence(visits, inputs.lists, b, h, 1, tile, tiles.visited, may_be_masked, kv_group=plan.group)
        arrays = inputs.tokens.key, inputs.tokens.value
        kind = SplitTiles if tiles.split_columns else VisitedTiles
        visited = kind(plan, tiles, scratch, arrays, plan.kv_len, sequence)
        _Cta(math, visited, inputs, outputs, gradients).compute()

    return launch(
        kernel,
        BackwardOperands(tokens, lists, order, call.captures, skipped),
        DqOutputs(
            kernel_parts.output(tokens.query.shape, tokens.query.dtype, tokens.query),
            tuple(kernel_parts.output(one.whole_tiles(plan), one.dtype, tokens.query) for one in gradients),
        ),
        scratch(plan, tiles),
        name="flexjax_backward_dq",
        programs=q_tiles * heads,
        warpgroups=tiles.groups,
    )


@dataclasses.dataclass(frozen=True)
class _Cta(VisitingCta):
    """A CTA that owns a tile of queries, as one of its warpgroups sees it."""

    outputs: DqOutputs[Ref]
    gradients: tuple[DirectGradient, ...]

    def compute(self) -> None:
        """What each warpgroup does: it copies its share of the tiles, makes all visits, and writes its gradients."""
        plan, tokens, sequence, q0 = self.plan, self.inputs.tokens, self.sequence, self.group_start
        b, h, size = sequence.b, sequence.first_head, self.tiles.rows
        lse2, delta = statistics_of(self.inputs.tokens, b, h, q0, size, ALONG_ROWS)
        self.visited.begin((tokens.query, tokens.d_out), h, self.own_start, plan.q_len, sequence.first())

        def step(rows: RowMath, visit: VisitNow, dq: jax.Array) -> jax.Array:
            return self.add_visit(rows, visit, dq, lse2, delta)

        rows = lambda _: self.math.at_rows(b, h, q0, self.inputs.captures)
        dq = sequence.each(rows, step, self.zero_gradient(self.visited.scratch.own_first))
        self.write_zeros()
        target = rows_of(self.outputs.d_query, plan.layout, b, h, q0, size)
        write_rows((dq * plan.scale).astype(target.dtype), target, plan.q_len - q0, self.half)

    def add_visit(self, rows: RowMath, visit: VisitNow, dq: jax.Array, lse2: jax.Array, delta: jax.Array) -> jax.Array:
        """Makes one visit: writes direct gradients, and returns `dq`, [rows, D] float32, with dS K added."""
        visited, start = self.visited, self.first_scored(visit.start)
        tile = rows.at_columns(start, visit.masked)
        if isinstance(visited, SplitTiles):
            own_query, own_out = visited.own()
            dp = visited.product(own_out, first=False)
            s = visited.product(own_query, first=True)
            visited.write_weights(0, self.cotangent(tile, s, lambda: dp, lse2, delta))
            visited.release(False, visit)
            dq = visited.add_gradient(dq, 0, first=True)
            visited.release(True, visit)
            return dq
        keys, values = visited.arrive(visit)
        own_query, own_out = visited.own()
        s = product_transposed(own_query, keys)
        ds = self.cotangent(tile, s, lambda: product_transposed(own_out, values), lse2, delta)
        dq = add_product(dq, ds.astype(keys.dtype), keys)
        visited.leave(visit)
        return dq

    def cotangent(
        self, tile: ColumnMath, s: jax.Array, dp: Callable[[], jax.Array], lse2: jax.Array, delta: jax.Array
    ) -> jax.Array:
        """dS of a tile of scores `s`, [rows, scored] float32; writes direct gradients; calls `dp` after P."""
        found = tile.probabilities(s, lse2)
        factor = found.factor()
        ds, gradients = found.cotangents(factor, *found.scaled(dp(), self.math.broadcast(delta, "q")))
        for one, output, g in zip(self.gradients, self.outputs.direct_gradients, gradients, strict=True):
            self.gradient_tile(one, output, tile.col0)[...] = g.astype(one.dtype)
        return ds

    def gradient_tile(self, one: DirectGradient, output: Ref, kv0: Scalar) -> Ref:
        """A Ref to the part of a direct gradient at this warpgroup's queries and the keys from kv0."""
        return one.tile(output, self.sequence.b, self.sequence.first_head, self.group_start, kv0, self.math.shape)

    def write_zeros(self) -> None:
        """Writes zeros to the tiles of this warpgroup's direct gradients that the block mask skips."""
        skipped, sequence = self.inputs.skipped, self.sequence
        own = skipped, sequence.b, sequence.first_head, sequence.tile
        if not self.gradients or skipped.full_num is None:
            return
        count = sequence.visits.counts(*own).unmasked

        @pl.loop(0, count)
        def one_tile(i: Scalar) -> None:
            kv0 = self.first_scored(sequence.visits.tile(*own, i, False) * self.tiles.visited)
            for one, output in zip(self.gradients, self.outputs.direct_gradients, strict=True):
                self.gradient_tile(one, output, kv0)[...] = zero_tile(self.math.shape).astype(one.dtype)
