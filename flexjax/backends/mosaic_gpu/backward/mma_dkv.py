"""Gradients of keys and values by mma.sync: a CTA owns a tile of keys and visits tiles of queries.

    S^T = K Q^T     dV += P^T dO     dP^T = V dO^T     dK += dS^T Q        (four products a tile)

Keys are the rows of a tile, so P^T and dS^T leave the accumulators in the registers in which the next product takes its
left operand. The query heads that share a key head are visited one after another into the same accumulators, which
makes the sum over the group free and gives the sum one order. Where the accumulators do not fit
(`MmaBackwardTiles.joint`) the kernel runs twice: once for dV, without dP^T, and once for dK.

Each warpgroup has `rows` keys of its own, or shares them and splits the columns (mma_split.py). All share the visited
tiles. The formulas are at the top of common.py.
"""

import dataclasses
import typing

import jax

from flexjax.backends.mosaic_gpu.backward import tile_visits
from flexjax.backends.mosaic_gpu.backward.common import ALONG_COLUMNS, BackwardCall, BackwardOperands, statistics_of
from flexjax.backends.mosaic_gpu.backward.mma_split import SplitTiles
from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles, MmaScratch, scratch
from flexjax.backends.mosaic_gpu.backward.mma_visits import VisitedTiles, VisitingCta, VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists, owned_key_tile
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, launch, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_products import add_product, product_transposed
from flexjax.backends.mosaic_gpu.machine.mma_results import write_rows
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.integers import cdiv


class MmaDkvOutputs(typing.NamedTuple, typing.Generic[Part]):
    """dK and dV in the shapes of the padded keys and values; None for one that is not computed."""

    d_key: Part | None
    d_value: Part | None


class Sums(typing.NamedTuple):
    """The accumulators, [rows, D] and [rows, E] float32; None for a gradient that is not computed."""

    dk: jax.Array | None
    dv: jax.Array | None


def backward_dkv(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: MmaBackwardTiles, *, key: bool, value: bool
) -> MmaDkvOutputs[jax.Array]:
    """Runs the dK/dV kernel: dK, times scale, and dV, padded; None for one not asked for.

    The grid has one CTA for each key tile of each key head; of a head, CTAs with the most visits start first. What lies
    past the ends is undefined.
    """
    plan, tokens = call.plan, call.tokens
    kv_tiles = cdiv(plan.kv_len, tiles.owned)
    visits = tile_visits.visits_for(plan, tiles.owned, tiles.visited, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, call.derivative, (tiles.rows, tiles.scored), "kv", (tiles.visited, tiles.owned))

    def kernel(inputs: BackwardOperands[Ref], outputs: MmaDkvOutputs[Ref], scratch: MmaScratch[Ref]) -> None:
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, plan.group == 1, tiles.visited)
        may_be_masked = plan.mask is not None or plan.blocks is not None
        first_head = own.key_head * plan.group
        sequence = VisitSequence(
            visits, inputs.lists, own.b, first_head, plan.group, own.tile, tiles.visited, may_be_masked
        )
        arrays = inputs.tokens.query, inputs.tokens.d_out
        visited = (
            SplitTiles(plan, tiles, scratch, arrays, plan.q_len, sequence, scores_first=not key)
            if tiles.split_columns
            else VisitedTiles(plan, tiles, scratch, arrays, plan.q_len, sequence)
        )
        _Cta(math, visited, inputs, outputs, own.key_head).compute()

    shape = lambda x, wanted: kernel_parts.output(x.shape, x.dtype, tokens.key) if wanted else None
    return launch(
        kernel,
        BackwardOperands(tokens, lists, order, call.captures),
        MmaDkvOutputs(shape(tokens.key, key), shape(tokens.value, value)),
        scratch(plan, tiles, key + value),
        name="flexjax_backward_dkv" if key and value else "flexjax_backward_dk" if key else "flexjax_backward_dv",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=tiles.groups,
    )


@dataclasses.dataclass(frozen=True)
class _Cta(VisitingCta):
    """A CTA that owns a tile of keys, as one of its warpgroups sees it."""

    outputs: MmaDkvOutputs[Ref]
    key_head: Scalar  # of the keys

    def compute(self) -> None:
        """What each warpgroup does: copies its share of the tiles, makes all visits, writes dK and dV of its keys."""
        plan, tokens, sequence, rows = self.plan, self.inputs.tokens, self.sequence, self.tiles.rows
        kv0, scratch = self.group_start, self.visited.scratch
        self.visited.begin((tokens.key, tokens.value), self.key_head, self.own_start, plan.kv_len, sequence.first())
        zero = lambda output, own: None if output is None else self.zero_gradient(own)
        sums = Sums(zero(self.outputs.d_key, scratch.own_first), zero(self.outputs.d_value, scratch.own_second))

        def begin(head: Scalar) -> RowMath:
            return self.math.at_rows(sequence.b, sequence.first_head + head, kv0, self.inputs.captures)

        found = sequence.each(begin, self.add_visit, sums)
        scaled = None if found.dk is None else found.dk * plan.scale
        for output, gradient in ((self.outputs.d_key, scaled), (self.outputs.d_value, found.dv)):
            if output is not None and gradient is not None:
                target = rows_of(output, plan.layout, sequence.b, self.key_head, kv0, rows)
                write_rows(gradient.astype(target.dtype), target, plan.kv_len - kv0, self.half)

    def add_visit(self, rows: RowMath, visit: VisitNow, sums: Sums) -> Sums:
        """Returns the sums with dV and dK of one visit added; sums that are None stay None."""
        head = self.sequence.first_head + visit.head
        visited, start = self.visited, self.first_scored(visit.start)
        tile = rows.at_columns(start, visit.masked)
        statistics = lambda: statistics_of(
            self.inputs.tokens, self.sequence.b, head, start, self.tiles.scored, ALONG_COLUMNS
        )
        if isinstance(visited, SplitTiles):
            return self.add_split(visited, tile, visit, *statistics(), sums)
        q_tile, out_tile = visited.arrive(visit)
        lse2, delta = statistics()
        own_key, own_value = visited.own()
        s = product_transposed(own_key, q_tile)
        found = tile.probabilities(s, lse2)
        dk, dv = sums
        if dv is not None:
            dv = add_product(dv, found.weights().astype(out_tile.dtype), out_tile)
        if dk is not None:
            factor = found.factor()
            dp = product_transposed(own_value, out_tile)
            ds = found.cotangent(factor, dp, self.math.broadcast(delta, "q"))
            dk = add_product(dk, ds.astype(q_tile.dtype), q_tile)
        visited.leave(visit)
        return Sums(dk, dv)

    def add_split(
        self, visited: SplitTiles, tile: ColumnMath, visit: VisitNow, lse2: jax.Array, delta: jax.Array, sums: Sums
    ) -> Sums:
        """`add_visit` where warpgroups split the columns: scores of half of the queries, half of the sums' columns."""
        own_key, own_value = visited.own()
        dk, dv = sums
        dp = None if dk is None else visited.product(own_value, first=False)
        found = tile.probabilities(visited.product(own_key, first=True), lse2)
        if dv is not None:
            visited.write_weights(0, found.weights())
        if dp is None:
            visited.wait(False, 0)
            visited.release(True, visit)
        else:
            ds = found.cotangent(found.factor(), dp, self.math.broadcast(delta, "q"))
            visited.write_weights(int(dv is not None), ds)
            visited.release(False if dv is None else None, visit)
        if dv is not None:
            dv = visited.add_gradient(dv, 0, first=False)
            visited.release(False, visit)
        if dk is not None:
            dk = visited.add_gradient(dk, int(dv is not None), first=True)
            visited.release(True, visit)
        return Sums(dk, dv)
