"""Gradients of keys and values on Hopper for head dims up to 128: a CTA owns keys and visits tiles of queries.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q        (four products a tile)

Keys are the rows of a tile, so P^T and dS^T leave the accumulators in the registers in which the next product takes its
left operand, and the row statistics lie along columns. The query heads that share a key head are visited one after
another into the same accumulators, which makes the sum over the group free and gives the sum one order.

In all functions, h is a query head, q0 the first query of a visited tile, kv0 the first key of a warpgroup or CTA,
`number` the running number of a visit over all heads, `group` the number of a computing warpgroup. D and E are the
padded head dims of keys and values; the formulas are at the top of common.py.
"""

import dataclasses
import typing

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.common import BackwardCall, BackwardOperands, QueryRings
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import DkvScratch, DkvTiles, dkv_scratch
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.backward.pair_bias_tiles import Staging, staging_for
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath, TileCta, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import KeyTileVisits, VisitLists, owned_key_tile
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    Ref,
    Scalar,
    arrive_read,
    copy_parts,
    launch,
    slot_parts,
    write_parts,
)
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.integers import cdiv


class HopperDkvOutputs(typing.NamedTuple, typing.Generic[Part]):
    """dK and dV in parts (machine/float_parts.py), in the shapes of the padded keys and values."""

    d_key: Part
    d_value: Part


def backward_dkv(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: DkvTiles, bias: DenseBiasPlan
) -> HopperDkvOutputs[jax.Array]:
    """dK, times scale, and dV of a call, in parts in the shapes of the padded keys and values.

    The grid has one CTA for each key tile of each key head; of a head, CTAs with the most visits start first.
    """
    plan, tokens = call.plan, call.tokens
    kv_tile = tiles.rows * tiles.groups
    kv_tiles = cdiv(plan.kv_len, kv_tile)
    visits = tile_visits.visits_for(plan, kv_tile, tiles.queries, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, call.derivative, (tiles.rows, tiles.queries), "kv", (tiles.queries, kv_tile))
    staging = staging_for(plan, call.derivative, bias, tiles.staged_slots, (tiles.queries, kv_tile), tiles.groups, True)

    def kernel(inputs: BackwardOperands[Ref], outputs: HopperDkvOutputs[Ref], scratch: DkvScratch[Ref]) -> None:
        clip_rows(aligned=True)
        group = lax.axis_index("wg")
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, tiles.head_major, tiles.queries)
        rings = QueryRings(plan, inputs.tokens, scratch, tiles.queries, tiles.query_slots, tiles.out_slots)
        cta = _Cta(math, tiles, staging, own, rings, scratch, inputs)
        when(group < tiles.groups)(lambda: cta.compute(group, outputs))
        when(group == tiles.groups)(cta.copy)

    shapes = (kernel_parts.output(x.shape, x.dtype, tokens.key) for x in (tokens.key, tokens.value))
    return launch(
        kernel,
        BackwardOperands(tokens, lists, order, call.captures),
        HopperDkvOutputs(*shapes),
        dkv_scratch(plan, tiles, bias.types),
        name="flexjax_backward_dkv",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=tiles.groups + 1,
    )


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel: warpgroups 0 .. G - 1 compute, each on 64 of its keys, the last one copies."""

    tiles: DkvTiles
    staging: Staging | None
    own: KeyTileVisits
    rings: QueryRings
    scratch: DkvScratch[Ref]
    inputs: BackwardOperands[Ref]

    def compute(self, group: Scalar, outputs: HopperDkvOutputs[Ref]) -> None:
        """What computing warpgroup `group` does: dK and dV of its keys, which it writes over its K and V."""
        tiles, scratch, products, tokens, plan = (
            self.tiles, self.scratch, self.products, self.inputs.tokens, self.math.plan,
        )  # fmt: skip
        common.raise_register_limit(tiles.groups)
        kv0 = self.own.tile * (tiles.rows * tiles.groups) + group * tiles.rows
        own_k, own_v = (slot_parts(ring, group, self.parts) for ring in (scratch.key, scratch.value))
        place = self.own.b, self.own.key_head, kv0
        copy_parts(plan, tokens.key, *place, own_k, scratch.own_full.at[group])
        copy_parts(plan, tokens.value, *place, own_v, scratch.own_full.at[group])
        plgpu.barrier_wait(scratch.own_full.at[group])

        def accumulate(dk_acc: Ref, dv_acc: Ref) -> tuple[jax.Array, jax.Array]:
            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                self.visit(rows, q0, number, masked, group, dk_acc, dv_acc)

            self.own.each(lambda h: self.math.at_rows(self.own.b, h, kv0, self.inputs.captures), step)
            return products.read(dk_acc) * self.math.plan.scale, products.read(dv_acc)

        dim, value_dim = own_k[0].shape[-1], own_v[0].shape[-1]
        dk, dv = products.accumulators(accumulate, (tiles.rows, dim), (tiles.rows, value_dim))
        for own, gradient in ((own_k, dk), (own_v, dv)):
            for target, part in zip(own, products.split(gradient, own[0].dtype), strict=True):
                target[...] = part
        plgpu.commit_smem()
        write_parts(plan, own_k, outputs.d_key, *place)
        write_parts(plan, own_v, outputs.d_value, *place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def visit(
        self, rows: RowMath, q0: Scalar, number: Scalar, masked: bool, group: Scalar, dk_acc: Ref, dv_acc: Ref
    ) -> None:
        """Adds the tile of the queries from q0 to dK and dV; waits for its Q and dO, and frees their slots."""
        math, scratch, products = self.math, self.scratch, self.products
        q_slot, out_slot = self.rings.slots(number)
        q_tile, out_tile = self.rings.tiles(q_slot, out_slot)
        dtype = q_tile[0].dtype
        tile_math = rows.at_columns(q0, masked)
        here = common.not_hoisted(group)
        own_k, own_v = (slot_parts(ring, here, self.parts) for ring in (scratch.key, scratch.value))

        def score_cotangents(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            """dS^T of the tile, [rows, queries] float32; the product for dV is still in flight at the return."""
            plgpu.barrier_wait(scratch.query_full.at[q_slot])
            products.add(s_acc, own_k, q_tile, b_t=True)
            delta = math.broadcast(self.rings.statistic(1, q_slot), "q")
            if math.starts_at_minus_delta:
                products.start(dp_acc, -delta)
            plgpu.barrier_wait(scratch.out_full.at[out_slot])
            products.add(dp_acc, own_v, out_tile, b_t=True)
            lse2 = self.rings.statistic(0, q_slot)
            s = products.read(s_acc, 1)
            tile = tile_math
            if self.staging is not None and scratch.staged is not None:
                tile = self.staging.read_staged(tile, scratch.staged, q_slot, group)
            found = tile.probabilities(s, lse2)
            weights, factor = products.split(found.weights(), dtype), found.factor()
            products.add(dv_acc, weights, out_tile)
            dp = products.read(dp_acc, 1)
            return found.cotangent(factor, dp, None if math.starts_at_minus_delta else delta)

        ds = products.accumulators(score_cotangents, math.shape, math.shape)
        products.add(dk_acc, products.split(ds, dtype), q_tile)
        products.wait(1)
        arrive_read(scratch.out_free.at[out_slot])
        products.wait(0)
        arrive_read(scratch.query_free.at[q_slot])

    def copy(self) -> None:
        """What the copying warpgroup does: it fills the rings for every visit, and waits until all were read."""
        tiles, staging, scratch = self.tiles, self.staging, self.scratch
        common.lower_register_limit(tiles.groups)

        def begin(h: Scalar) -> Ref | None:
            """A Ref to the [query, key] matrix, in global memory, of the staged array that query head h reads."""
            return None if staging is None else staging.source(self.inputs.captures, self.own.b, h)

        def step(source: Ref | None, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
            def fetch_staged(q_slot: Scalar) -> None:
                if staging is not None and source is not None and scratch.staged is not None:
                    kv0 = self.own.tile * (tiles.rows * tiles.groups)
                    staging.fetch(scratch.staged.at[q_slot], source, q0, kv0, scratch.query_full.at[q_slot])

            self.rings.fill(self.own.b, h, q0, number, fetch_staged)

        self.rings.drain(self.own.each(begin, step))
