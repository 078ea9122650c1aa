"""Gradients of keys and values on Hopper for head dims above 128: one warpgroup accumulates dV, the other dK.

    dV warpgroup   S^T = K Q^T     -> P^T    dV += P^T dO     hands P^T * mod' to the dK warpgroup through shared memory
    dK warpgroup   dP^T = V dO^T   -> dS^T   dK += dS^T Q

An accumulator of 64 keys x 256 takes 128 registers a thread, and one warpgroup has room for one such accumulator. Split this way,
each warpgroup has two of the four products and nothing is computed twice. The ring of P tiles has two slots, so that
the dV warpgroup may be a tile ahead. Tiles are transposed as in backward_sm90_dkv.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import kernel_parts, tile_visits
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import SplitDkvTiles, SplitScratch, split_dkv_scratch
from flexjax.backends.mosaic_gpu.backward_sm90_common import Captures, Inputs, Products, QueryRings, Tokens
from flexjax.backends.mosaic_gpu.backward_sm90_dkv import Outputs
from flexjax.backends.mosaic_gpu.backward_tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import SPLIT_KEYS, SPLIT_QUERIES
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, launch, rows_of
from flexjax.backends.mosaic_gpu.tile_visits import KeyTileVisits, VisitLists, owned_key_tile
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

KEYS_ARRIVED, VALUES_ARRIVED, PRODUCTS_DONE = 0, 1, 2
"""The barriers of `SplitScratch.own_full`."""


def backward_dkv_split(
    plan: KernelPlan,
    derivative: ir.Program | None,
    tokens: Tokens[jax.Array],
    lists: VisitLists[jax.Array],
    captures: Captures[jax.Array],
    tiles: SplitDkvTiles,
) -> Outputs[jax.Array]:
    """dK and dV in the shapes of `tokens.key` and `tokens.value`.

    derivative   score_mod with its derivative, None for the identity
    lists        of each key block
    """
    kv_tiles = -(-plan.kv_len // SPLIT_KEYS)
    visits = tile_visits.visits_for(plan, SPLIT_KEYS, SPLIT_QUERIES, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, derivative, (SPLIT_KEYS, SPLIT_QUERIES), "kv", (SPLIT_QUERIES, SPLIT_KEYS))

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: SplitScratch[Ref]) -> None:
        group = lax.axis_index("wg")
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, tiles.head_major, SPLIT_QUERIES)
        rings = QueryRings(plan.layout, inputs.tokens, scratch, SPLIT_QUERIES, tiles.query_slots, tiles.out_slots)
        cta = _Cta(math, tiles, own, own.tile * SPLIT_KEYS, rings, scratch, inputs)
        when(group == 0)(lambda: cta.compute_dv(outputs.d_value))
        when(group == 1)(lambda: cta.compute_dk(outputs.d_key))
        when(group == 2)(cta.copy)

    shapes = (kernel_parts.output(x.shape, x.dtype, tokens.key) for x in (tokens.key, tokens.value))
    return launch(
        kernel,
        Inputs(tokens, lists, order, captures),
        Outputs(*shapes),
        split_dkv_scratch(plan, tiles),
        name="flexjax_backward_dkv_split",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=3,
        interpret=plan.options.interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
    """One CTA inside the kernel; kv0 is its first key."""

    math: TileMath
    tiles: SplitDkvTiles
    own: KeyTileVisits
    kv0: Scalar
    rings: QueryRings
    scratch: SplitScratch[Ref]
    inputs: Inputs[Ref]

    @property
    def interpret(self) -> bool:
        return self.math.plan.options.interpret

    @property
    def products(self) -> Products:
        return Products(self.interpret)

    def rows_of(self, ref: Ref) -> Ref:
        """The CTA's keys of an array over keys."""
        return rows_of(ref, self.math.plan.layout, self.own.b, self.own.key_head, self.kv0, SPLIT_KEYS)

    def rows_math(self, h: Scalar) -> RowMath:
        return self.math.at_rows(self.own.b, h, self.kv0, self.inputs.captures)

    def compute_dv(self, d_value: Ref) -> None:
        """The dV warpgroup: P of every visit, handed over and multiplied by dO."""
        scratch, products, rings, p_slots = self.scratch, self.products, self.rings, self.tiles.p_slots
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[KEYS_ARRIVED])

        def accumulate(dv_acc: Ref) -> jax.Array:
            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                q_slot, out_slot = rings.slots(number)
                p_slot = common.slot_of(number, p_slots)
                tile_math = rows.at_columns(q0, masked)
                own_k = scratch.key.at[common.not_hoisted(jnp.int32(0), self.interpret)]

                def probabilities(s_acc: Ref) -> jax.Array:
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    products.add(s_acc, own_k, scratch.query.at[q_slot], b_t=True)
                    lse2 = rings.statistic(0, q_slot)
                    s = products.read(s_acc)
                    products.release(scratch.query_free.at[q_slot])
                    found = tile_math.probabilities(s, lse2)
                    when(number >= p_slots)(lambda: plgpu.barrier_wait(scratch.p_free.at[p_slot]))
                    scratch.p.at[p_slot][...] = found.factor()
                    plgpu.barrier_arrive(scratch.p_full.at[p_slot])
                    return found.weights().astype(own_k.dtype)

                weights = products.accumulators(probabilities, self.math.shape)
                plgpu.barrier_wait(scratch.out_full.at[out_slot])
                products.add(dv_acc, weights, scratch.d_out.at[out_slot])
                products.wait(0)
                products.release(scratch.out_free.at[out_slot])

            total = self.own.each(self.rows_math, step)
            if self.interpret:
                common.wait_until_read(total, (scratch.p_free, p_slots))
            return products.read(dv_acc)

        own_v = scratch.value.at[0]
        dv = products.accumulators(accumulate, (SPLIT_KEYS, own_v.shape[-1]))
        self.write(dv, own_v, d_value)

    def compute_dk(self, d_key: Ref) -> None:
        """The dK warpgroup: dS of every visit from the handed-over P, multiplied by Q."""
        math, scratch, products, rings = self.math, self.scratch, self.products, self.rings
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[VALUES_ARRIVED])

        def accumulate(dk_acc: Ref) -> jax.Array:
            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                q_slot, out_slot = rings.slots(number)
                p_slot = common.slot_of(number, self.tiles.p_slots)
                own_v = scratch.value.at[common.not_hoisted(jnp.int32(0), self.interpret)]

                def score_cotangents(dp_acc: Ref) -> jax.Array:
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    delta = math.broadcast(rings.statistic(1, q_slot), "q")
                    if math.starts_at_minus_delta:
                        products.start(dp_acc, -delta)
                    plgpu.barrier_wait(scratch.out_full.at[out_slot])
                    products.add(dp_acc, own_v, scratch.d_out.at[out_slot], b_t=True)
                    dp = products.read(dp_acc)
                    products.release(scratch.out_free.at[out_slot])
                    if not math.starts_at_minus_delta:
                        dp = dp * rows.at_columns(q0, False).dropout_multiplier() - delta
                    plgpu.barrier_wait(scratch.p_full.at[p_slot])
                    factor = kernel_parts.load(scratch.p.at[p_slot], common.WGMMA)
                    plgpu.barrier_arrive(scratch.p_free.at[p_slot])
                    return (factor * dp).astype(own_v.dtype)

                ds = products.accumulators(score_cotangents, math.shape)
                products.add(dk_acc, ds, scratch.query.at[q_slot])
                products.wait(0)
                products.release(scratch.query_free.at[q_slot])

            self.own.each(self.rows_math, step)
            return products.read(dk_acc) * math.plan.scale

        own_k = scratch.key.at[0]
        dk = products.accumulators(accumulate, (SPLIT_KEYS, own_k.shape[-1]))
        self.write(dk, own_k, d_key)

    def write(self, gradient: jax.Array, tile: Ref, target: Ref) -> None:
        """Writes dK over K, or dV over V, in shared memory, once the other warpgroup's last product has read it; and copies it
        to `target`."""
        done = self.scratch.own_full.at[PRODUCTS_DONE]
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        tile[...] = gradient.astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, self.rows_of(target))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """The copying warpgroup: K and V once, then the queries of every visit."""
        scratch, tokens = self.scratch, self.inputs.tokens
        plgpu.set_max_registers(24, action="decrease")
        for source, target, arrived in (
            (tokens.key, scratch.key, scratch.own_full.at[KEYS_ARRIVED]),
            (tokens.value, scratch.value, scratch.own_full.at[VALUES_ARRIVED]),
        ):
            plgpu.copy_gmem_to_smem(self.rows_of(source), target.at[0], arrived)
            plgpu.barrier_arrive(arrived)

        def step(_: None, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
            self.rings.fill(self.own.b, h, q0, number)

        self.rings.drain(self.own.each(lambda h: None, step))
