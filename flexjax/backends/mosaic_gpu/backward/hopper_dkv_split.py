"""Gradients of keys and values on Hopper for head dims above 128: one warpgroup accumulates dV, the other dK.

    dV warpgroup   S^T = K Q^T     -> P^T    dV += P^T dO     hands P^T * mod' to the dK warpgroup through shared memory
    dK warpgroup   dP^T = V dO^T   -> dS^T   dK += dS^T Q

An accumulator of 64 keys x 256 takes 128 registers a thread, and one warpgroup has room for one such accumulator. Split
this way, each warpgroup has two of the four products and nothing is computed twice. The ring of P tiles has two slots
where these fit, so that the dV warpgroup may be a tile ahead; beside it is one of what expectations add to dS. Tiles
are transposed as in hopper_dkv.py, whose names apply.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.common import BackwardCall, BackwardOperands, QueryRings
from flexjax.backends.mosaic_gpu.backward.hopper_dkv import HopperDkvOutputs
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import SplitDkvTiles, SplitScratch, split_dkv_scratch
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import SPLIT_KEYS
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath, TileCta, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import KeyTileVisits, VisitLists, owned_key_tile
from flexjax.backends.mosaic_gpu.machine import kernel_parts, partial_sums
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    Ref,
    Scalar,
    arrive_read,
    copy_parts,
    launch,
    slot_parts,
    write_parts,
)
from flexjax.backends.mosaic_gpu.machine.partial_sums import PartialSums
from flexjax.backends.mosaic_gpu.machine.simulator import only_simulated
from flexjax.integers import cdiv

KEYS_ARRIVED, VALUES_ARRIVED, PRODUCTS_DONE = 0, 1, 2  # the barriers of `SplitScratch.own_full`


def backward_dkv_split(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: SplitDkvTiles
) -> HopperDkvOutputs[jax.Array]:
    """dK, times scale, and dV of a call, in parts in the shapes of the padded keys and values.

    A CTA, or a cluster of CTAs that share the columns, for each tile of SPLIT_KEYS keys; nothing is staged.
    """
    plan, tokens = call.plan, call.tokens
    kv_tiles = cdiv(plan.kv_len, SPLIT_KEYS)
    visits = tile_visits.visits_for(plan, SPLIT_KEYS, tiles.queries, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, call.derivative, (SPLIT_KEYS, tiles.queries), "kv", (tiles.queries, SPLIT_KEYS))

    def kernel(inputs: BackwardOperands[Ref], outputs: HopperDkvOutputs[Ref], scratch: SplitScratch[Ref]) -> None:
        clip_rows(aligned=True)
        group = lax.axis_index("wg")
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, tiles.head_major, tiles.queries)
        rings = QueryRings(plan, inputs.tokens, scratch, tiles.queries, tiles.query_slots, tiles.out_slots)
        cta = _Cta(math, tiles, own, own.tile * SPLIT_KEYS, rings, scratch, inputs)
        partial_sums.begin(scratch.exchange)
        when(group == 0)(lambda: cta.compute_dv(outputs.d_value))
        when(group == 1)(lambda: cta.compute_dk(outputs.d_key))
        when(group == 2)(cta.copy)
        partial_sums.end(scratch.exchange)

    shapes = (kernel_parts.output(x.shape, x.dtype, tokens.key) for x in (tokens.key, tokens.value))
    return launch(
        kernel,
        BackwardOperands(tokens, lists, order, call.captures),
        HopperDkvOutputs(*shapes),
        split_dkv_scratch(plan, tiles),
        name="flexjax_backward_dkv_split",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=3,
        ctas=ctas_of(plan),
    )


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel: warpgroup 0 computes dV, 1 computes dK, 2 copies."""

    tiles: SplitDkvTiles
    own: KeyTileVisits
    kv0: Scalar  # its first key
    rings: QueryRings
    scratch: SplitScratch[Ref]
    inputs: BackwardOperands[Ref]

    @property
    def place(self) -> tuple[Scalar, Scalar, Scalar]:
        """(batch entry, key head, first key) of the CTA's keys."""
        return self.own.b, self.own.key_head, self.kv0

    def partial_sums(self, group: int) -> PartialSums:
        """Sums over all columns of the tiles of S (`group` 0, the dV warpgroup) or of dP (1, the dK warpgroup)."""
        return PartialSums(self.scratch.exchange, group)

    def own_tile(self, tile: Ref) -> tuple[Ref, ...]:
        """The parts of the CTA's keys or values in shared memory; `tile` is `SplitScratch.key` or `.value`."""
        # without it, addresses stay in registers from visit to visit
        return slot_parts(tile, common.not_hoisted(jnp.int32(0)), self.parts)

    def rows_math(self, h: Scalar) -> RowMath:
        return self.math.at_rows(self.own.b, h, self.kv0, self.inputs.captures)

    def compute_dv(self, d_value: Ref) -> None:
        """The dV warpgroup: computes P of every visit, hands P * mod' to the dK warpgroup, and adds P^T dO to dV."""
        scratch, products, rings, p_slots = self.scratch, self.products, self.rings, self.tiles.p_slots
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[KEYS_ARRIVED])

        def accumulate(dv_acc: Ref) -> jax.Array:
            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                q_slot, out_slot = rings.slots(number)
                queries, d_out = rings.tiles(q_slot, out_slot)
                p_slot = common.slot_of(number, p_slots)
                tile_math = rows.at_columns(q0, masked)
                own_k = self.own_tile(scratch.key)

                def probabilities(s_acc: Ref) -> tuple[jax.Array, ...]:
                    """The parts of P^T times dropout; also hands P^T * mod' to the dK warpgroup."""
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    products.add(s_acc, own_k, queries, b_t=True)
                    lse2 = rings.statistic(0, q_slot)
                    s = products.read(s_acc)
                    arrive_read(scratch.query_free.at[q_slot])
                    s = self.partial_sums(0).total(s, number)
                    found = tile_math.probabilities(s, lse2)
                    when(number >= p_slots)(lambda: plgpu.barrier_wait(scratch.p_free.at[p_slot]))
                    factor = found.factor()
                    scratch.p.at[p_slot][...] = factor
                    if scratch.beside is not None:
                        scratch.beside.at[p_slot][...] = found.beside_product(factor)
                    plgpu.barrier_arrive(scratch.p_full.at[p_slot])
                    return products.split(found.weights(), scratch.key.dtype)

                weights = products.accumulators(probabilities, self.math.shape)
                plgpu.barrier_wait(scratch.out_full.at[out_slot])
                products.add(dv_acc, weights, d_out)
                products.wait(0)
                arrive_read(scratch.out_free.at[out_slot])

            total = self.own.each(self.rows_math, step)
            only_simulated(lambda: common.wait_until_read(total, (scratch.p_free, p_slots)))
            return products.read(dv_acc)

        dv = products.accumulators(accumulate, (SPLIT_KEYS, scratch.value.shape[-1]))
        self.write(dv, scratch.value, d_value, 1)

    def compute_dk(self, d_key: Ref) -> None:
        """The dK warpgroup: takes the P of every visit that the dV warpgroup hands over, and adds dS^T Q to dK."""
        math, scratch, products, rings = self.math, self.scratch, self.products, self.rings
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[VALUES_ARRIVED])

        def accumulate(dk_acc: Ref) -> jax.Array:
            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                # P is 0 where the mask is off, so `masked` is not read; `rows` and q0 serve dropout alone
                q_slot, out_slot = rings.slots(number)
                queries, d_out = rings.tiles(q_slot, out_slot)
                p_slot = common.slot_of(number, self.tiles.p_slots)
                own_v = self.own_tile(scratch.value)

                def score_cotangents(dp_acc: Ref) -> tuple[jax.Array, ...]:
                    """The parts of dS^T of the tile: (dP^T - delta) times the tile of the ring of P."""
                    # the statistics come with Q
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    delta = math.broadcast(rings.statistic(1, q_slot), "q")
                    if math.starts_at_minus_delta:
                        products.start(dp_acc, -partial_sums.in_first_cta(scratch.exchange, delta))
                    plgpu.barrier_wait(scratch.out_full.at[out_slot])
                    products.add(dp_acc, own_v, d_out, b_t=True)
                    dp = products.read(dp_acc)
                    arrive_read(scratch.out_free.at[out_slot])
                    dp = self.partial_sums(1).total(dp, number)
                    if not math.starts_at_minus_delta:
                        dp = dp * rows.at_columns(q0, False).dropout_multiplier() - delta
                    plgpu.barrier_wait(scratch.p_full.at[p_slot])
                    ds = kernel_parts.load(scratch.p.at[p_slot], common.WGMMA) * dp
                    if scratch.beside is not None:
                        ds = ds + kernel_parts.load(scratch.beside.at[p_slot], common.WGMMA)
                    plgpu.barrier_arrive(scratch.p_free.at[p_slot])
                    return products.split(ds, scratch.value.dtype)

                ds = products.accumulators(score_cotangents, math.shape)
                products.add(dk_acc, ds, queries)
                products.wait(0)
                arrive_read(scratch.query_free.at[q_slot])

            self.own.each(self.rows_math, step)
            return products.read(dk_acc) * math.plan.scale

        dk = products.accumulators(accumulate, (SPLIT_KEYS, scratch.key.shape[-1]))
        self.write(dk, scratch.key, d_key, self.parts)

    def write(self, gradient: jax.Array, tile: Ref, target: Ref, arrivals: int) -> None:
        """Writes dK over K, or dV over V, in shared memory (`tile`), and copies it by TMA to its place in `target`.

        Waits until the last products of both computing warpgroups have read K and V. Of the parts + 1 arrivals that
        PRODUCTS_DONE expects, the dV warpgroup makes one, the dK warpgroup `parts`.
        """
        done = self.scratch.own_full.at[PRODUCTS_DONE]
        for _ in range(arrivals):
            plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        own = slot_parts(tile, 0, self.parts)
        for place, part in zip(own, self.products.split(gradient, tile.dtype), strict=True):
            place[...] = part
        plgpu.commit_smem()
        write_parts(self.math.plan, own, target, *self.place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the writes to global memory may still be under way

    def copy(self) -> None:
        """The copying warpgroup: copies K and V once, then Q, row statistics and dO of every visit."""
        scratch, tokens = self.scratch, self.inputs.tokens
        plgpu.set_max_registers(24, action="decrease")
        for source, target, arrived in (
            (tokens.key, scratch.key, scratch.own_full.at[KEYS_ARRIVED]),
            (tokens.value, scratch.value, scratch.own_full.at[VALUES_ARRIVED]),
        ):
            copy_parts(self.math.plan, source, *self.place, slot_parts(target, 0, self.parts), arrived)
            plgpu.barrier_arrive(arrived)

        def step(_: None, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
            self.rings.fill(self.own.b, h, q0, number)

        self.rings.drain(self.own.each(lambda h: None, step))
