"""Gradients of keys and values on Hopper for head dims above 128: one warpgroup accumulates dV, the other dK.

    dV warpgroup   S^T = K Q^T     -> P^T    dV += P^T dO     hands P^T * mod' to the dK warpgroup through shared memory
    dK warpgroup   dP^T = V dO^T   -> dS^T   dK += dS^T Q

An accumulator of 64 keys x 256 takes 128 registers a thread, and one warpgroup has room for one such accumulator. Split this way,
each warpgroup has two of the four products and nothing is computed twice. The ring of P tiles has two slots where these fit, so that
the dV warpgroup may be a tile ahead. Tiles are transposed as in backward_sm90_dkv.py.

P are the probabilities, dS the cotangents of the scores, lse2 and delta the row statistics of the queries; the
formulas are at the top of backward_common.py. Q and dO of the visited tiles come through rings of slots in
shared memory, which a third warpgroup, the copying one, fills by TMA. In all functions, h is a query head, q0 the
first query of a visited tile, `number` the running number of the visit (how many tiles the CTA visited before, over
all heads), and `masked` says whether the mask applies. D and E are the padded head dims of keys and values.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import kernel_parts, partial_sums, tile_visits
from flexjax.backends.mosaic_gpu.backward_common import BackwardCall, Inputs, QueryRings
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import SplitDkvTiles, SplitScratch, split_dkv_scratch
from flexjax.backends.mosaic_gpu.backward_sm90_cta import TileCta
from flexjax.backends.mosaic_gpu.backward_sm90_dkv import Outputs
from flexjax.backends.mosaic_gpu.backward_tile_math import RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import SPLIT_KEYS
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.columns import ctas_of
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, copy_parts, launch, slot_parts, write_parts
from flexjax.backends.mosaic_gpu.partial_sums import PartialSums
from flexjax.backends.mosaic_gpu.tile_visits import KeyTileVisits, VisitLists, owned_key_tile
from flexjax.integers import cdiv

KEYS_ARRIVED, VALUES_ARRIVED, PRODUCTS_DONE = 0, 1, 2
"""The barriers of `SplitScratch.own_full`."""


def backward_dkv_split(
    call: BackwardCall,
    lists: VisitLists[jax.Array],
    tiles: SplitDkvTiles,
) -> Outputs[jax.Array]:
    """Runs the split dK/dV kernel, one CTA for each tile of SPLIT_KEYS keys of each key head (a cluster of CTAs where
    these share the columns): dK, times scale, and dV, in parts in the shapes of the padded keys and values. Nothing is
    staged.

    call    plan, programs and padded arrays of the call
    lists   the block lists of each key block; of a head, CTAs with the most visits start first
    tiles   ring depths of the kernel
    """
    plan, tokens = call.plan, call.tokens
    kv_tiles = cdiv(plan.kv_len, SPLIT_KEYS)
    visits = tile_visits.visits_for(plan, SPLIT_KEYS, tiles.queries, transposed=True)
    order = tile_visits.longest_first(visits, lists, kv_tiles)
    math = TileMath(plan, call.derivative, (SPLIT_KEYS, tiles.queries), "kv", (tiles.queries, SPLIT_KEYS))

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: SplitScratch[Ref]) -> None:
        """The split dK/dV kernel on the Refs `inputs`, `outputs` and `scratch`: runs the calling warpgroup of a CTA; 0 computes
        dV, 1 computes dK, 2 copies.
        """
        clip_rows(plan.options.interpret, aligned=True)
        group = lax.axis_index("wg")
        own = owned_key_tile(plan, visits, inputs.lists, inputs.order, kv_tiles, tiles.head_major, tiles.queries)
        rings = QueryRings(plan, inputs.tokens, scratch, tiles.queries, tiles.query_slots, tiles.out_slots)
        cta = _Cta(math, tiles, own, own.tile * SPLIT_KEYS, rings, scratch, inputs)
        partial_sums.begin(scratch.exchange, cta.interpret)
        when(group == 0)(lambda: cta.compute_dv(outputs.d_value))
        when(group == 1)(lambda: cta.compute_dk(outputs.d_key))
        when(group == 2)(cta.copy)
        partial_sums.end(scratch.exchange, cta.interpret)

    shapes = (kernel_parts.output(x.shape, x.dtype, tokens.key) for x in (tokens.key, tokens.value))
    return launch(
        kernel,
        Inputs(tokens, lists, order, call.captures),
        Outputs(*shapes),
        split_dkv_scratch(plan, tiles),
        name="flexjax_backward_dkv_split",
        programs=kv_tiles * plan.batch * plan.kv_heads,
        warpgroups=3,
        interpret=plan.options.interpret,
        ctas=ctas_of(plan),
    )


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel: warpgroup 0 computes dV, 1 computes dK, 2 copies. In its methods h is a query head, q0
    the first query of a visited tile, and `number` how many tiles the CTA visited before.

    math              how a tile's P and dS are computed
    tiles             ring depths
    own               the key tile that the CTA owns
    kv0               its first key
    rings             of Q and dO
    scratch, inputs   Refs to shared memory and to the operands
    """

    tiles: SplitDkvTiles
    own: KeyTileVisits
    kv0: Scalar
    rings: QueryRings
    scratch: SplitScratch[Ref]
    inputs: Inputs[Ref]

    @property
    def place(self) -> tuple[Scalar, Scalar, Scalar]:
        """(batch entry, key head, first key) of the CTA's keys."""
        return self.own.b, self.own.key_head, self.kv0

    def partial_sums(self, group: int) -> PartialSums:
        """How the tiles of S (`group` 0, the dV warpgroup) or of dP (1, the dK warpgroup) become sums over all columns
        where the CTAs of a cluster share them.
        """
        return PartialSums(self.scratch.exchange, group, self.interpret)

    def own_tile(self, tile: Ref) -> tuple[Ref, ...]:
        """The parts of the CTA's keys or values in shared memory; `tile` is `SplitScratch.key` or `.value`. The slot
        number is hidden from the compiler (`not_hoisted`), so that addresses do not stay in registers from visit to
        visit.
        """
        return slot_parts(tile, common.not_hoisted(jnp.int32(0), self.interpret), self.parts)

    def rows_math(self, h: Scalar) -> RowMath:
        """The RowMath of the CTA's key tile, which computes its P and dS, for query head h."""
        return self.math.at_rows(self.own.b, h, self.kv0, self.inputs.captures)

    def compute_dv(self, d_value: Ref) -> None:
        """The dV warpgroup: computes P of every visit, hands P * mod' to the dK warpgroup, and adds P (with dropout)
        times dO to dV; at the end writes dV over V in shared memory and to `d_value`. It raises its register limit, and
        waits for K before the first visit.
        """
        scratch, products, rings, p_slots = self.scratch, self.products, self.rings, self.tiles.p_slots
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[KEYS_ARRIVED])

        def accumulate(dv_acc: Ref) -> jax.Array:
            """Makes all visits of the CTA, which add P^T dO (P with dropout) to `dv_acc`; returns the sum dV,
            [SPLIT_KEYS, E] float32. In the simulator it also waits until every tile of P was read.
            """

            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                """Adds one visit, as `KeyTileVisits.each` calls it, to dV, and hands P times d mod / d score to the dK
                warpgroup; waits for Q and dO, and frees their slots for its part.

                rows     what `rows_math` returned for the query head h
                q0       first query of the visited tile
                number   running number of the visit, which gives the slots of Q, dO and P
                masked   whether the mask applies
                """
                q_slot, out_slot = rings.slots(number)
                queries, d_out = rings.tiles(q_slot, out_slot)
                p_slot = common.slot_of(number, p_slots)
                tile_math = rows.at_columns(q0, masked)
                own_k = self.own_tile(scratch.key)

                def probabilities(s_acc: Ref) -> tuple[jax.Array, ...]:
                    """The parts of P^T of the tile times the dropout multiplier; waits for Q, and frees its
                    slot. It also writes P^T times d mod / d score, float32, to the ring of P once its slot is free, and
                    signals that.

                    s_acc   accumulator for S^T
                    """
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    products.add(s_acc, own_k, queries, b_t=True)
                    lse2 = rings.statistic(0, q_slot)
                    s = products.read(s_acc)
                    products.release(scratch.query_free.at[q_slot])
                    s = self.partial_sums(0).total(s, number)
                    found = tile_math.probabilities(s, lse2)
                    when(number >= p_slots)(lambda: plgpu.barrier_wait(scratch.p_free.at[p_slot]))
                    scratch.p.at[p_slot][...] = found.factor()
                    plgpu.barrier_arrive(scratch.p_full.at[p_slot])
                    return products.split(found.weights(), scratch.key.dtype)

                weights = products.accumulators(probabilities, self.math.shape)
                plgpu.barrier_wait(scratch.out_full.at[out_slot])
                products.add(dv_acc, weights, d_out)
                products.wait(0)
                products.release(scratch.out_free.at[out_slot])

            total = self.own.each(self.rows_math, step)
            if self.interpret:
                common.wait_until_read(total, (scratch.p_free, p_slots))
            return products.read(dv_acc)

        dv = products.accumulators(accumulate, (SPLIT_KEYS, scratch.value.shape[-1]))
        self.write(dv, scratch.value, d_value, 1)

    def compute_dk(self, d_key: Ref) -> None:
        """The dK warpgroup: dS of every visit from the P that the dV warpgroup hands over, multiplied by Q; at the end
        writes dK times scale over K in shared memory and to `d_key`. It raises its register limit, and waits for V
        before the first visit.
        """
        math, scratch, products, rings = self.math, self.scratch, self.products, self.rings
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(scratch.own_full.at[VALUES_ARRIVED])

        def accumulate(dk_acc: Ref) -> jax.Array:
            """Makes all visits of the CTA, which add dS^T Q to `dk_acc`; returns the sum times scale, dK, [SPLIT_KEYS,
            D] float32.
            """

            def step(rows: RowMath, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
                """Adds one visit, as `KeyTileVisits.each` calls it, to dK; waits for Q, dO and P and frees their slots
                for its part.

                rows     what `rows_math` returned for the query head h; with q0, the first query, it is used for
                         dropout alone
                number   running number of the visit, which gives the slots of Q, dO and P
                masked   not read, because P is 0 where the mask is off
                """
                q_slot, out_slot = rings.slots(number)
                queries, d_out = rings.tiles(q_slot, out_slot)
                p_slot = common.slot_of(number, self.tiles.p_slots)
                own_v = self.own_tile(scratch.value)

                def score_cotangents(dp_acc: Ref) -> tuple[jax.Array, ...]:
                    """The parts of dS^T of the tile: (dP^T - delta) times the tile of the ring of P, where dP^T
                    = V dO^T, times the dropout multiplier if there is dropout. It waits for Q, with which the row
                    statistics come, for dO and for P, and frees the slots of dO and P.

                    dp_acc   accumulator for dP^T; it starts at -delta where `starts_at_minus_delta`
                    """
                    plgpu.barrier_wait(scratch.query_full.at[q_slot])
                    delta = math.broadcast(rings.statistic(1, q_slot), "q")
                    if math.starts_at_minus_delta:
                        products.start(dp_acc, -partial_sums.in_first_cta(scratch.exchange, delta))
                    plgpu.barrier_wait(scratch.out_full.at[out_slot])
                    products.add(dp_acc, own_v, d_out, b_t=True)
                    dp = products.read(dp_acc)
                    products.release(scratch.out_free.at[out_slot])
                    dp = self.partial_sums(1).total(dp, number)
                    if not math.starts_at_minus_delta:
                        dp = dp * rows.at_columns(q0, False).dropout_multiplier() - delta
                    plgpu.barrier_wait(scratch.p_full.at[p_slot])
                    factor = kernel_parts.load(scratch.p.at[p_slot], common.WGMMA)
                    plgpu.barrier_arrive(scratch.p_free.at[p_slot])
                    return products.split(factor * dp, scratch.value.dtype)

                ds = products.accumulators(score_cotangents, math.shape)
                products.add(dk_acc, ds, queries)
                products.wait(0)
                products.release(scratch.query_free.at[q_slot])

            self.own.each(self.rows_math, step)
            return products.read(dk_acc) * math.plan.scale

        dk = products.accumulators(accumulate, (SPLIT_KEYS, scratch.key.shape[-1]))
        self.write(dk, scratch.key, d_key, self.parts)

    def write(self, gradient: jax.Array, tile: Ref, target: Ref, arrivals: int) -> None:
        """Writes the gradient of this warpgroup over `tile` in shared memory (dK over K, or dV over V), and copies it by TMA to its
        place in `target`. Before, it waits until the last products of both computing warpgroups have read K and V. It returns
        when the copy has read the shared memory; the writes to global memory may still be under way.

        gradient   [SPLIT_KEYS, D or E] float32, with the scale applied; split here into parts of the dtype of `tile`
        tile       `SplitScratch.key` for dK or `.value` for dV: [parts, SPLIT_KEYS, D or E] in shared memory
        target     the whole gradient array in global memory, [parts * B, T, M, D or E] in the plan's layout, T being the keys. Only the
                   rows at `place`, the keys and the head of this CTA, are written, once for each part
        arrivals   how often this warpgroup arrives at the barrier PRODUCTS_DONE, which expects parts + 1 arrivals in all: 1 for
                   dV, `parts` for dK
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
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy(self) -> None:
        """The copying warpgroup: lowers its register limit, copies K and V once, then Q, row statistics and dO of every
        visit, each when its slot is free, and waits until all were read.
        """
        scratch, tokens = self.scratch, self.inputs.tokens
        plgpu.set_max_registers(24, action="decrease")
        for source, target, arrived in (
            (tokens.key, scratch.key, scratch.own_full.at[KEYS_ARRIVED]),
            (tokens.value, scratch.value, scratch.own_full.at[VALUES_ARRIVED]),
        ):
            copy_parts(self.math.plan, source, *self.place, slot_parts(target, 0, self.parts), arrived)
            plgpu.barrier_arrive(arrived)

        def step(_: None, h: Scalar, q0: Scalar, number: Scalar, masked: bool) -> None:
            """Starts the copies of Q, row statistics and dO of one visit, as `KeyTileVisits.each` calls it: of the queries
            from `q0` of head `h`, to the slots of the running number `number`, once each is free; `masked` is not read.
            """
            self.rings.fill(self.own.b, h, q0, number)

        self.rings.drain(self.own.each(lambda h: None, step))
