"""Gradients of keys and values on Hopper for head dims up to 128: a CTA owns a tile of keys and visits tiles of queries.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q        (four products a tile)

Keys are the rows of a tile, so P^T and dS^T leave the accumulators in the registers in which the next product takes its
left operand, and the row statistics of the queries lie along columns. The query heads that share a key head are visited
one after another into the same accumulators, which makes the sum over the group free and gives the sum one order.

Warpgroups 0 .. G - 1 compute, each on 64 keys of its own; the last warpgroup copies. Tiles of a pair bias are staged with the
tiles of queries and read transposed (pair_bias_tiles.py).

P are the probabilities, dS the cotangents of the scores, lse2 and delta the row statistics of the queries; the
formulas are at the top of backward_common.py. Q and dO of the visited tiles come through rings of slots in
shared memory, which the copying warpgroup fills by TMA. In all functions, h is a query head, q0 the first query of a
visited tile, kv0 the first key of a warpgroup or CTA, `number` the running number of a visit (how many tiles the CTA
visited before, over all heads), and `group` the number of a computing warpgroup. D and E are the padded head dims of
keys and values.
"""

import dataclasses
import typing

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import kernel_parts, tile_visits
from flexjax.backends.mosaic_gpu.backward_common import BackwardCall, Inputs, QueryRings
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import DkvTiles, Scratch, dkv_scratch
from flexjax.backends.mosaic_gpu.backward_sm90_cta import TileCta
from flexjax.backends.mosaic_gpu.backward_tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, copy_parts, launch, slot_parts, write_parts
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.pair_bias_tiles import Staging, staging_for
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.tile_visits import KeyTileVisits, VisitLists, owned_key_tile
from flexjax.integers import cdiv


class Outputs(typing.NamedTuple, typing.Generic[Part]):
    """dK and dV in parts (float_parts.py), in the shapes of the padded keys and values."""

    d_key: Part
    d_value: Part


def backward_dkv(
    call: BackwardCall,
    lists: VisitLists[jax.Array],
    tiles: DkvTiles,
    bias: DenseBiasPlan,
) -> Outputs[jax.Array]:
    """Runs the dK/dV kernel, one CTA for each key tile of each key head: dK, times scale, and dV, in parts in the
    shapes of the padded keys and values.

    call    plan, programs and padded arrays of the call
    lists   the block lists of each key block; of a head, CTAs with the most visits start first
    tiles   sizes of the kernel
    bias    which captured array is staged, if `tiles` has slots for it
    """
    plan, tokens = call.plan, call.tokens
    kv_tile = tiles.rows * tiles.groups
    kv_tiles = cdiv(plan.kv_len, kv_tile)
    visits = tile_visits.visits_for(plan, kv_tile, tiles.queries, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, call.derivative, (tiles.rows, tiles.queries), "kv", (tiles.queries, kv_tile))
    staging = staging_for(plan, call.derivative, bias, tiles.staged_slots, (tiles.queries, kv_tile), tiles.groups, True)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None:
        """The dK/dV kernel on the Refs `inputs`, `outputs` and `scratch`: runs the calling warpgroup of a CTA, a computing one
        or, as the last of them, the copying one.
        """
        clip_rows(plan.options.interpret, aligned=True)
        group = lax.axis_index("wg")
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, tiles.head_major, tiles.queries)
        rings = QueryRings(plan, inputs.tokens, scratch, tiles.queries, tiles.query_slots, tiles.out_slots)
        cta = _Cta(math, tiles, staging, own, rings, scratch, inputs)
        when(group < tiles.groups)(lambda: cta.compute(group, outputs))
        when(group == tiles.groups)(cta.copy)

    shapes = (kernel_parts.output(x.shape, x.dtype, tokens.key) for x in (tokens.key, tokens.value))
    return launch(
        kernel,
        Inputs(tokens, lists, order, call.captures),
        Outputs(*shapes),
        dkv_scratch(plan, tiles, bias.types),
        name="flexjax_backward_dkv",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=tiles.groups + 1,
        interpret=plan.options.interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel: warpgroups 0 .. G - 1 compute, each on 64 of its keys, the last one copies. In its
    methods h is a query head, q0 the first query of a visited tile, kv0 the first key of a warpgroup or CTA, `number`
    how many tiles the CTA visited before, and `group` the number of a computing warpgroup.

    math              how a tile's P and dS are computed
    tiles             sizes of the kernel
    staging           of a pair bias; None: none is staged
    own               the key tile that the CTA owns
    rings             of Q and dO
    scratch, inputs   Refs to shared memory and to the operands
    """

    tiles: DkvTiles
    staging: Staging | None
    own: KeyTileVisits
    rings: QueryRings
    scratch: Scratch[Ref]
    inputs: Inputs[Ref]

    def compute(self, group: Scalar, outputs: Outputs[Ref]) -> None:
        """What computing warpgroup `group` does: it computes dK (times scale) and dV of its keys.

        With two computing warpgroups it raises its register limit. It copies its K and V to shared memory by TMA and
        waits for them, makes all visits, overwrites K and V there by dK and dV, in parts of the dtypes of K and V, and
        copies these to `outputs` by TMA.
        """
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
            """Makes all visits, which add to the accumulators; returns (dK times scale, dV), [rows, D] and [rows, E]
            float32.

            dk_acc, dv_acc   accumulators of dK without scale and of dV, 0 at the start
            """

            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                """Adds one visit (`visit`), as `KeyTileVisits.each` calls it, to dK and dV: of the queries from `q0` of query
                head `h`. `rows` is the RowMath of the warpgroup's keys for h, `number` how many visits came before, and
                `masked` whether the mask applies.
                """
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
        """Adds the tile of the queries from q0 to dK and dV of warpgroup `group`.

        rows             P and dS of this key tile's rows, for the query head of the visit
        number           visits of this CTA before this one; it gives the ring slots
        masked           whether the mask applies
        dk_acc, dv_acc   accumulators, [rows, D] and [rows, E] float32

        It waits for Q and dO of the visit and frees their slots.
        """
        math, scratch, products = self.math, self.scratch, self.products
        q_slot, out_slot = self.rings.slots(number)
        q_tile, out_tile = self.rings.tiles(q_slot, out_slot)
        dtype = q_tile[0].dtype
        tile_math = rows.at_columns(q0, masked)
        here = common.not_hoisted(group, math.plan.options.interpret)
        own_k, own_v = (slot_parts(ring, here, self.parts) for ring in (scratch.key, scratch.value))

        def score_cotangents(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            """Computes S^T and dP^T, and from them dS^T of the tile, [rows, queries] float32. It waits for Q and dO,
            and also starts the product for dV, which is still in flight at the return. Values of a staged array are
            read from shared memory, those of other captured arrays by the tile's program.

            s_acc, dp_acc   accumulators for S^T and dP^T, 0 at the start
            """
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
        products.release(scratch.out_free.at[out_slot])
        products.wait(0)
        products.release(scratch.query_free.at[q_slot])

    def copy(self) -> None:
        """The copying warpgroup: lowers its register limit if two compute, fills the rings with Q, row statistics, dO
        and, if an array is staged, its tile of every visit, and waits until all were read.
        """
        tiles, staging, scratch = self.tiles, self.staging, self.scratch
        common.lower_register_limit(tiles.groups)

        def begin(h: Scalar) -> Ref | None:
            """A Ref to the [query, key] matrix, in global memory, of the staged array that query head h reads; None
            where nothing is staged.
            """
            return None if staging is None else staging.source(self.inputs.captures, self.own.b, h)

        def step(source: Ref | None, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
            """Starts the copies of Q, row statistics, dO and, if a pair bias is staged, its tile, for one visit, as
            `KeyTileVisits.each` calls it: of the queries from `q0` of head `h`, to the slots of the running number
            `number`, once each is free. `source` is what `begin` returned; `masked` is not read.
            """

            def fetch_staged(q_slot: Scalar) -> None:
                """Starts the copy of the staged tile, which arrives at the barrier of slot `q_slot` of Q."""
                if staging is not None and source is not None and scratch.staged is not None:
                    kv0 = self.own.tile * (tiles.rows * tiles.groups)
                    staging.fetch(scratch.staged.at[q_slot], source, q0, kv0, scratch.query_full.at[q_slot])

            self.rings.fill(self.own.b, h, q0, number, fetch_staged)

        self.rings.drain(self.own.each(begin, step))
