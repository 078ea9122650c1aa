"""All three gradients in one kernel on Hopper: the dK/dV kernel with a fifth product for dQ.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ_tile = dS K, added to dQ in memory

A kernel for dQ and one for dK and dV need seven products a tile, this one five. In exchange, every [queries, D] tile of dQ is added
to float32 memory once for each tile of keys. Four warpgroups:

    0, 1   compute, each for 64 of the 128 keys
    2      copies tiles of Q and dO in
    3      adds dQ tiles to memory by TMA, which takes no time from the others

dQ sums over all keys of the CTA, so both computing warpgroups write their dS^T to shared memory, meet at a barrier, and each
makes one half of dQ: 64 of 128 queries, or of 64 queries one half of the columns.

Where registers allow (`fits_128_query_tile`: head dims 33 to 64), a tile has 128 queries, so that barriers and loop overhead are
paid half as often. Scores, dP, dK and dV then take 192 of 232 registers. So row statistics are read only when they are needed, the dV
product is issued after dS is there, because earlier P would be held twice in registers, in float32 for dS and in bfloat16 for the
product, and dS is written to shared memory from the registers that the dK product reads (backward_fused_stores.py).

The barrier keeps the two computing warpgroups in step, so the tensor cores idle while both compute probabilities. Therefore the
product for dQ is issued one visit later, beside the next scores, if there is neither score_mod nor dropout (`dq_is_late`); with either,
registers do not suffice. Beside the late product, tiles with and without a mask have loops of their own, because a branch
between in-flight WGMMAs forces a wait. Where dQ is not late, S^T and dP^T start one right after the other.

Order of the additions (dq_order.py). In any order, each dQ tile is added when it is ready. In a fixed order, a start number from an
atomic counter says which key tile a CTA owns, and a CTA waits at a query tile until as many CTAs have added to it as its place in
the order says. No CTA waits for a CTA that may not have started.

P are the probabilities, dS the cotangents of the scores, lse2 and delta the row statistics of the queries; the
formulas are at the top of backward_common.py. In all functions, h is a query head, `q_tile` the number of a
visited query tile, `number` the running number of the visit (how many tiles the CTA visited before, over all heads),
which gives the slots of the rings, and `masked` says whether the mask applies. D and E are the padded head dims of
keys and values.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import atomic_counter, branch, dq_order, kernel_parts, tile_visits
from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu.backward_common import BackwardCall, Captures, Products, QueryRings, Tokens
from flexjax.backends.mosaic_gpu.backward_fused_counts import signal_addition, wait_for_additions
from flexjax.backends.mosaic_gpu.backward_fused_results import gather_dq, spread_shape, sum_shares
from flexjax.backends.mosaic_gpu.backward_fused_setup import FusedSetup
from flexjax.backends.mosaic_gpu.backward_fused_stores import write_operand, zero_rows
from flexjax.backends.mosaic_gpu.backward_fused_tiles import DS_SLOTS, GROUPS, ROWS, Scratch, fused_scratch
from flexjax.backends.mosaic_gpu.backward_fused_visits import OwnKeys, QueryVisits, query_visits
from flexjax.backends.mosaic_gpu.backward_tile_math import ColumnMath, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.choose_kernel import FusedKernel
from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.dq_order import DqOrder
from flexjax.backends.mosaic_gpu.kernel_parts import (
    Ref,
    Scalar,
    launch,
    rows_of,
)
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.tile_visits import VisitLists
from flexjax.integers import cdiv, round_up

COMPUTE_REGISTERS, COPY_REGISTERS = 232, 24
"""Registers of a thread of the computing warpgroups, and of the copying and adding ones; twice each fill the register file."""


class Inputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the kernel; it also writes the last two.

    tokens, visits, captures   arrays over tokens, visits of each key tile, captured arrays
    d_query                    [dQ tiles * GROUPS * ROWS, columns] float32, see `FusedSetup.dq_tiles`
    counts                     [dQ tiles + 1 + CTAs] int32: additions to each dQ tile, CTAs that have started, the
                               start number of each CTA
    """

    tokens: Tokens[Part]
    visits: QueryVisits[Part]
    captures: Captures[Part]
    d_query: Part
    counts: Part


class Outputs(typing.NamedTuple, typing.Generic[Part]):
    """dK and dV, in the shapes of the padded keys and values, with `FusedKernel.shares` times the key heads."""

    d_key: Part
    d_value: Part


def backward_fused(
    call: BackwardCall,
    lists: VisitLists[jax.Array],
    chosen: FusedKernel,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV), dQ and dK times scale, in the shapes and dtypes of the padded queries, keys and values, by the fused
    kernel: one CTA for each tile of FUSED_KEYS keys of each key head, or `FusedKernel.shares` CTAs, each for a part of the query heads.

    call     plan, programs and padded arrays of the call
    lists    the block lists of each key block
    chosen   sizes of the kernel, and whether its additions to dQ have a fixed order (dq_order.py) or any

    dQ is summed in float32 in memory that starts at zero; in a fixed order on the device the memory starts undefined,
    the first addition to a tile is a store, and tiles that no CTA visits are set to zero afterwards.
    """
    plan, tokens, tiles = chosen.spread(call.plan), call.tokens, chosen.tiles
    kv_tiles, q_tiles = cdiv(plan.kv_len, FUSED_KEYS), cdiv(plan.q_len, tiles.queries)
    if plan.blocks is not None:
        per_block = plan.blocks.block_q // tiles.queries
        q_tiles = round_up(q_tiles, per_block)
    order = dq_order.order_for(plan, q_tiles, kv_tiles) if chosen.ordered else None
    visits = query_visits(plan, lists, kv_tiles, q_tiles, tiles.queries, order)
    math = TileMath(plan, call.derivative, (ROWS, tiles.queries), "kv", (tiles.queries, FUSED_KEYS))
    setup = FusedSetup(plan, math, tiles, order, kv_tiles, q_tiles, chosen.shares)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]) -> None:
        """The fused kernel on the Refs `inputs`, `outputs` and `scratch`: runs the calling warpgroup of a CTA, a computing
        one, the copying one, or the one that adds dQ tiles to memory.
        """
        clip_rows(plan.options.interpret, aligned=True)
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        cta = _Cta(setup, inputs, scratch, program)
        when(group < GROUPS)(lambda: _ComputingWarpgroup(cta, group).run(outputs))
        when(group == GROUPS)(cta.copy_in)
        when(group == GROUPS + 1)(cta.add_dq)

    if math.starts_at_minus_delta:  # -delta in memory, so that no thread changes a sign
        tokens = tokens._replace(stats=tokens.stats * np.array([[1.0], [-1.0]], np.float32))
    dq_shape = (setup.dq_tiles * GROUPS * ROWS, tiles.dq_columns(tokens.query.shape[-1]))
    first_stores = chosen.ordered and not setup.simulated  # the first addition to a tile is a store
    dq_sum = jax.new_ref((lax.empty if first_stores else jnp.zeros)(dq_shape, jnp.float32))
    ctas = kv_tiles * plan.batch * plan.kv_heads
    counts = jax.new_ref(jnp.zeros((setup.dq_tiles + 1 + ctas,), jnp.int32))
    d_key, d_value = launch(
        kernel,
        Inputs[typing.Any](tokens, visits, call.captures, dq_sum, counts),
        Outputs(
            *(kernel_parts.output(spread_shape(plan, x.shape), x.dtype, tokens.key) for x in (tokens.key, tokens.value))
        ),
        fused_scratch(plan, tiles),
        name="flexjax_backward_fused",
        programs=ctas,
        warpgroups=GROUPS + 2,
        interpret=setup.simulated,
    )
    dq_tiles = jax.freeze(dq_sum).reshape(setup.dq_tiles, GROUPS * ROWS, dq_shape[1])
    if first_stores:  # a tile that no CTA visited was never written
        dq_tiles = jnp.where(jax.freeze(counts)[: setup.dq_tiles, None, None] > 0, dq_tiles, 0.0)
    d_key, d_value = (sum_shares(plan, x, chosen.shares) for x in (d_key, d_value))
    return gather_dq(plan, setup.sums, tiles.queries, dq_tiles, tokens.query), d_key, d_value


# ------------------------------------------------------------------- the copying and the adding warpgroup


@dataclasses.dataclass(frozen=True)
class _Cta:
    """One CTA inside the kernel, the one with number `program`. In its methods h is a query head, `q_tile` the number
    of a visited query tile; the running number of a visit, how many tiles the CTA visited before, gives its slots.

    setup             what is known of the kernel at compile time
    inputs, scratch   Refs to operands and shared memory
    """

    setup: FusedSetup
    inputs: Inputs[Ref]
    scratch: Scratch[Ref]
    program: Scalar

    @property
    def rings(self) -> QueryRings:
        """The rings of Q and dO."""
        tiles, plan = self.setup.tiles, self.setup.plan
        sizes = (tiles.queries, tiles.query_slots, tiles.out_slots)
        return QueryRings(plan, self.inputs.tokens, self.scratch, *sizes)

    def claim(self, takes_start_number: bool = False) -> OwnKeys:
        """What this CTA owns. Each warpgroup calls it in its own branch, because a barrier before the branches spills
        registers.

        takes_start_number   True in the copying warpgroup alone: it takes the CTA's start number from the counter

        Where additions to dQ have a fixed order, the CTA's start number determines what the CTA owns, and all
        warpgroups wait at a barrier until it is in memory; the simulator takes the number of the CTA in the grid
        instead. Otherwise the number of the CTA in the grid determines it; with block lists, the first CTAs of a head
        own the key tiles with the most visits.
        """
        setup, plan, order = self.setup, self.setup.plan, self.setup.order
        zero, heads = jnp.int32(0), plan.batch * plan.kv_heads
        if order is None:
            if setup.tiles.heads:
                side_by_side = DqOrder(setup.tiles.heads, 1, downward=True, delay=0.0)
                head, tile, _ = dq_order.assignment_of(self.program, side_by_side, setup.kv_tiles, heads)
            else:
                tile, head = tile_visits.tile_and_head(self.program, setup.kv_tiles, heads, head_major=True)
            rank = zero
        else:
            start = self.program
            if not setup.simulated:
                counts, started = self.inputs.counts, setup.dq_tiles
                word = counts.at[pl.ds(started + 1 + self.program, 1)]
                if takes_start_number:
                    atomic_counter.take_start(counts.at[pl.ds(started, 1)], word)
                    plgpu.barrier_arrive(self.scratch.started)
                plgpu.barrier_wait(self.scratch.started)
                start = atomic_counter.read_start(word)
            head, tile, rank = dq_order.assignment_of(start, order, setup.kv_tiles, heads)
        b, key_head = lax.div(head, jnp.int32(plan.kv_heads)), lax.rem(head, jnp.int32(plan.kv_heads))
        mask_b = b if setup.visits.lists_by_batch else zero
        launch_order = self.inputs.visits.launch_order
        if launch_order is not None:
            tile = launch_order[mask_b, key_head * plan.group if setup.visits.lists_by_head else 0, tile]
        return OwnKeys(b, key_head, mask_b, tile, rank)

    def copy_in(self) -> None:
        """The copying warpgroup: lowers its register limit, takes the start number (`claim`), and copies K and V once,
        then Q, row statistics and dO of every visit; then waits until all slots were read.
        """
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        own, setup, tokens, scratch = (
            self.claim(takes_start_number=True),
            self.setup,
            self.inputs.tokens,
            self.scratch,
        )
        key_head = lax.div(own.key_head, jnp.int32(setup.shares))
        rows = functools.partial(
            rows_of, layout=setup.plan.layout, b=own.b, h=key_head, start=own.tile * FUSED_KEYS, size=FUSED_KEYS
        )
        plgpu.copy_gmem_to_smem(rows(tokens.key), scratch.key, scratch.own_full)
        plgpu.copy_gmem_to_smem(rows(tokens.value), scratch.value, scratch.own_full)

        def step(_: None, h: Scalar, q_tile: Scalar, number: Scalar, masked: bool | Scalar) -> None:
            """Starts the copies of Q, row statistics and dO of one visit, as `FusedVisits.each` calls it: of query tile
            `q_tile` of head `h`, to the slots of the running number `number`, once each is free; `masked` is not read.
            """
            self.rings.fill(own.b, h, q_tile * setup.tiles.queries, number)

        self.rings.drain(setup.visits.each(self.inputs.visits, own, lambda h: None, step))

    def add_dq(self) -> None:
        """The adding warpgroup: adds the dQ tile of every visit to memory, and frees its slot. It lowers its register limit, and waits at
        the end until its additions are done.

        Each slot has a warp of its own, so that the additions of consecutive tiles overlap. In a fixed order one addition takes longer than a
        visit: the wait for the ticket, the addition, its end and the signal come one after the other, and each takes a round trip to the L2 cache.
        """
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        own, setup = self.claim(), self.setup
        if setup.simulated:
            self.add_tiles(own, None)
            return

        def one_warp(warp: Scalar) -> None:
            """Adds the tiles of slot `warp`, the number of the calling warp in its warpgroup; nothing where no slot has that number."""
            with branch.one_warp():
                when(warp < setup.tiles.dq_slots)(lambda: self.add_tiles(own, warp))

        plgpu.warp_map(one_warp)

    def add_tiles(self, own: OwnKeys, warp: Scalar | None) -> None:
        """Adds dQ tiles to memory and frees their slots, in the calling warp or warpgroup; returns once they are added.

        own    what the CTA owns
        warp   the slot whose tiles the calling warp adds; None: the calling warpgroup adds all tiles, in the simulator

        Where dQ is late (`FusedSetup.dq_is_late`), tile n + 1 is dQ of visit n. Tile 0 belongs to no visit: it is waited for and not added.
        All slots are freed at the start, because the computing warpgroups then wait for a free slot before every tile, also the first.
        """
        setup, scratch, slots = self.setup, self.scratch, self.setup.tiles.dq_slots
        mine = lambda slot: True if warp is None else slot == warp
        if setup.dq_is_late:

            def drop_first() -> None:
                """Frees slot 0 once tile 0 is there."""
                plgpu.barrier_wait(scratch.dq_full.at[0])
                plgpu.barrier_arrive(scratch.dq_free.at[0])

            for slot in range(slots):
                when(mine(slot))(functools.partial(plgpu.barrier_arrive, scratch.dq_free.at[slot]))
            when(mine(0))(drop_first)

        def step(_: None, h: Scalar, q_tile: Scalar, number: Scalar, masked: bool | Scalar) -> None:
            """Adds the dQ tile of one visit to query tile `q_tile` of head `h` in memory (`add_dq_tile`), as
            `FusedVisits.each` calls it. The tile is in the slot of the running number `number` or, where dQ is late, of
            the next one; `masked` is not read.
            """
            slot = common.slot_of(number + int(setup.dq_is_late), slots)
            when(mine(slot))(lambda: self.add_dq_tile(own, h, q_tile, slot))

        setup.visits.each(self.inputs.visits, own, lambda h: None, step)
        if not setup.simulated:
            plgpu.wait_smem_to_gmem(0)

    def add_dq_tile(self, own: OwnKeys, h: Scalar, q_tile: Scalar, slot: Scalar) -> None:
        """Adds one dQ tile to memory, in a warp of the adding warpgroup: waits until slot `slot` is full,
        adds the tile to query tile `q_tile` of head h, and frees the slot.

        own   what the CTA owns; the tile is added to partial sum rank % sums of the head

        In any order TMA adds the tile at once. In a fixed order the warp waits until as many CTAs as its ticket says
        have added to the query tile, then adds (ticket 0 stores instead) and counts its own addition. The ticket comes from
        `visits.tickets`; without a block mask these are None and the ticket is rank // sums, because every key tile visits
        all queries. The simulator adds at once in either case, and counts nothing.
        """
        setup, plan, scratch = self.setup, self.setup.plan, self.scratch
        sums = setup.sums
        sum_number = (own.b * plan.q_heads + h) * sums + lax.rem(own.rank, jnp.int32(sums))
        number = sum_number * setup.q_tiles + q_tile
        target = self.inputs.d_query.at[pl.ds(number * (GROUPS * ROWS), GROUPS * ROWS)]
        plgpu.barrier_wait(scratch.dq_full.at[slot])
        if setup.simulated:
            target[...] = target[...] + scratch.dq[slot]
            plgpu.barrier_arrive(scratch.dq_free.at[slot])
            return
        if setup.order is None:
            plgpu.copy_smem_to_gmem(scratch.dq.at[slot], target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch.dq_free.at[slot])
            return
        ticket = lax.div(own.rank, jnp.int32(sums))
        tickets = self.inputs.visits.tickets
        if tickets is not None:
            ticket = tickets[own.mask_b, h if setup.visits.lists_by_head else jnp.int32(0), own.tile, q_tile]
        wait_for_additions(self.inputs.counts, number, ticket)
        # memory holds nothing before the first addition, which is a store
        when(ticket == 0)(lambda: plgpu.copy_smem_to_gmem(scratch.dq.at[slot], target))
        when(ticket != 0)(lambda: plgpu.copy_smem_to_gmem(scratch.dq.at[slot], target, reduction_op="add"))
        plgpu.wait_smem_to_gmem(0)
        signal_addition(self.inputs.counts, number)
        plgpu.barrier_arrive(scratch.dq_free.at[slot])


# ------------------------------------------------------------------- a computing warpgroup


@dataclasses.dataclass(frozen=True)
class _ComputingWarpgroup:
    """Computing warpgroup `group`, 0 or 1, of the CTA `cta`: dK and dV of its 64 keys, and its half of every dQ tile.
    "Late" dQ is the product for dQ of a visit that is issued one visit later (`FusedSetup.dq_is_late`).
    """

    cta: _Cta
    group: Scalar

    @property
    def setup(self) -> FusedSetup:
        """What is known of the kernel at compile time."""
        return self.cta.setup

    @property
    def scratch(self) -> Scratch[Ref]:
        """The shared memory of the CTA."""
        return self.cta.scratch

    @property
    def math(self) -> TileMath:
        """How a tile's P and dS are computed."""
        return self.cta.setup.math

    @property
    def products(self) -> Products:
        """How products of tiles are computed: by WGMMA, or by dots in the simulator."""
        return Products(self.setup.simulated)

    @property
    def dq_part(self) -> tuple[int, int]:
        """(rows, columns) of the half of a dQ tile that this warpgroup makes.

        Of 128 queries it is 64 of them; of 64 queries it is half of the columns of D.
        """
        return ROWS, self.setup.tiles.dq_columns(self.scratch.key.shape[-1])

    def run(self, outputs: Outputs[Ref]) -> None:
        """All of the warpgroup's work: it raises its register limit, waits for K and V, makes all visits, and waits for
        the other computing warpgroup's last product; then it writes dK and dV over K and V in shared memory and from
        there to `outputs`.
        """
        setup, scratch, math = self.setup, self.scratch, self.math
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        own = self.cta.claim()
        kv0 = own.tile * FUSED_KEYS + self.group * ROWS
        mine = pl.ds(self.group * ROWS, ROWS)
        own_k, own_v = scratch.key.at[mine], scratch.value.at[mine]
        plgpu.barrier_wait(scratch.own_full)

        def accumulate(dk_acc: Ref, dv_acc: Ref) -> tuple[jax.Array, jax.Array]:
            """Makes all visits of the CTA, which add to the accumulators; returns (dK times scale, dV) of the keys of this
            warpgroup, [ROWS, D] and [ROWS, E] float32: ROWS (64) of the key tile's FUSED_KEYS keys, from key `kv0` on.

            dk_acc, dv_acc   accumulators of dK without scale and of dV, 0 at the start

            Where dQ is late, it also hands over the last visit's dQ, which no later visit does.
            """

            def step(rows: RowMath, h: Scalar, q_tile: Scalar, number: Scalar, masked: bool | Scalar) -> None:
                """Adds one visit to dK and dV and hands over a dQ tile, as `FusedVisits.each` calls it. `rows` is the
                RowMath of this warpgroup's keys for head h; the other arguments are those of `visit`.
                """
                self.visit(rows, q_tile, number, masked, dk_acc, dv_acc)

            if setup.dq_is_late:
                plgpu.barrier_arrive(scratch.ds_ready)  # for the first visit, which finds no visit before it
            begin = lambda h: math.at_rows(own.b, h, kv0, self.cta.inputs.captures)
            total = setup.visits.each(self.cta.inputs.visits, own, begin, step, by_runs=setup.dq_is_late)
            if setup.dq_is_late:
                self.finish_late_dq(total)
            if setup.simulated:  # the simulator wants every barrier observed to the end
                slots = setup.tiles.dq_slots
                common.wait_until_read(total + setup.dq_is_late * slots, (scratch.dq_free, slots))
            return self.products.read(dk_acc) * setup.plan.scale, self.products.read(dv_acc)

        dim, value_dim = scratch.key.shape[-1], scratch.value.shape[-1]
        dk, dv = self.products.accumulators(accumulate, (ROWS, dim), (ROWS, value_dim))
        plgpu.barrier_arrive(scratch.ds_ready)  # the other warpgroup reads all keys in its last product
        plgpu.barrier_wait(scratch.ds_ready)
        own_k[...] = dk.astype(scratch.key.dtype)
        own_v[...] = dv.astype(scratch.key.dtype)
        plgpu.commit_smem()
        rows = functools.partial(rows_of, layout=setup.plan.layout, b=own.b, h=own.key_head, start=kv0, size=ROWS)
        plgpu.copy_smem_to_gmem(own_k, rows(outputs.d_key))
        plgpu.copy_smem_to_gmem(own_v, rows(outputs.d_value))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def visit(
        self, rows: RowMath, q_tile: Scalar, number: Scalar, masked: bool | Scalar, dk_acc: Ref, dv_acc: Ref
    ) -> None:
        """Adds query tile `q_tile` to dK and dV, and hands over dQ of this visit, or of the visit before where dQ is
        late.

        rows             P and dS of this warpgroup's keys, for the query head of the visit
        number           running number of the visit, which gives the slots
        masked           whether the mask applies
        dk_acc, dv_acc   accumulators, [ROWS, D] and [ROWS, E] float32

        It waits for Q and dO of the visit and frees their slots, and writes dS^T to shared memory. Where dQ is not late
        it waits for the dS^T of the other warpgroup.
        """
        setup, scratch, products, late = self.setup, self.scratch, self.products, self.setup.dq_is_late
        q_slot, out_slot = self.cta.rings.slots(number)
        ds_slot = common.slot_of(number, DS_SLOTS)
        q_now = scratch.query.at[q_slot]
        tile = rows.at_columns(q_tile * setup.tiles.queries, masked)
        mine = pl.ds(common.not_hoisted(self.group, setup.simulated) * ROWS, ROWS)

        def start_scores(s_acc: Ref) -> None:
            """Starts the product S^T = K Q^T into the accumulator `s_acc`, 0 at the start; Q must have arrived."""
            products.add(s_acc, scratch.key.at[mine], q_now, b_t=True)

        def cotangents(s_acc: Ref, dp_acc: Ref, **rest: typing.Any) -> jax.Array:
            """dS^T of the visit, also written to shared memory (`score_cotangents`); the product into s_acc must have been started.

            s_acc, dp_acc   accumulators for S^T and dP^T
            rest            `started` and `beside` of `score_cotangents`
            """
            own_v, slots = scratch.value.at[mine], (q_slot, out_slot)
            write = functools.partial(self.write_ds, ds_slot=ds_slot)
            return self.score_cotangents(tile, s_acc, dp_acc, dv_acc, own_v, slots, write, **rest)

        def together(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            """dS^T of the visit where S^T and dP^T start together: sets the accumulator of dP^T to -delta before S^T starts, because the
            compiler waits for S^T otherwise (C7517).

            s_acc, dp_acc   accumulators for S^T and dP^T, 0 at the start
            """
            products.start(dp_acc, self.math.broadcast(self.start_of_dp(q_slot), "q"))
            start_scores(s_acc)
            return cotangents(s_acc, dp_acc, started=True)

        def one_by_one(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            """dS^T of the visit where dQ is not late and dP^T starts from 0: starts S^T, then dP^T.

            s_acc, dp_acc   accumulators for S^T and dP^T, 0 at the start
            """
            start_scores(s_acc)
            return cotangents(s_acc, dp_acc)

        def beside_late_dq(s_acc: Ref, dq_acc: Ref | None = None) -> jax.Array:
            """dS^T of the visit where dQ is late: starts S^T, and while that product is in flight waits for dS^T of both warpgroups of the
            visit before, computes dQ of that visit and writes it. With tiles of 128 queries it is handed over beside dP^T, else before.
            The first visit hands over tile 0, whose numbers `_Cta.add_dq` drops.

            s_acc, dq_acc   accumulators for S^T and dQ, 0 at the start; dq_acc None: that of dQ is made after the wait, so that its zeros
                            cost no instruction
            """
            start_scores(s_acc)
            plgpu.barrier_wait(scratch.ds_ready)

            def last_dq(dq_acc: Ref) -> jax.Array:
                """This warpgroup's half of dQ of the visit before, of which `dq_acc` is the accumulator, 0 at the start."""
                self.start_dq(dq_acc, 1 - ds_slot)
                return products.read(dq_acc)

            dq = products.accumulators(last_dq, self.dq_part) if dq_acc is None else last_dq(dq_acc)
            self.write_dq(dq, number)
            publish = functools.partial(self.publish, scratch.dq_full.at[self.dq_slot(number)])
            if not setup.tiles.dq_by_queries:
                publish()
            body = functools.partial(cotangents, s_acc, beside=publish if setup.tiles.dq_by_queries else None)
            return products.accumulators(body, self.math.shape)

        plgpu.barrier_wait(scratch.query_full.at[q_slot])
        if late:
            shapes = (
                () if setup.tiles.dq_by_queries else (self.dq_part,)
            )  # registers are scarce at 64 queries and head dim 128
            ds = products.accumulators(beside_late_dq, self.math.shape, *shapes)
        else:
            body = together if setup.starts_together else one_by_one
            ds = products.accumulators(body, self.math.shape, self.math.shape)
        self.publish(scratch.ds_ready)
        products.add(dk_acc, ds, q_now)
        products.wait(0 if late else 1)
        products.release(scratch.out_free.at[out_slot])
        if late:
            products.release(scratch.query_free.at[q_slot])
            return
        plgpu.barrier_wait(scratch.ds_ready)

        def own_dq(dq_acc: Ref) -> jax.Array:
            """This warpgroup's half of dQ of the visit without scale, of the shape `dq_part`, float32; frees the slot
            of Q once dK's product has read it.

            dq_acc   its accumulator, 0 at the start
            """
            self.start_dq(dq_acc, ds_slot)
            products.wait(1)
            products.release(scratch.query_free.at[q_slot])
            return products.read(dq_acc)

        self.hand_over_dq(products.accumulators(own_dq, self.dq_part), number)

    def write_ds(self, ds: jax.Array, ds_slot: Scalar) -> None:
        """Writes dS^T of this warpgroup, [ROWS, queries] in the dtype of the operands, to slot `ds_slot` of shared memory."""
        mine = pl.ds(common.not_hoisted(self.group, self.setup.simulated) * ROWS, ROWS)
        target = self.scratch.ds.at[ds_slot, mine]
        if self.setup.tiles.dq_by_queries:
            write_operand(ds, target, self.setup.simulated)
        else:
            target[...] = ds

    def score_cotangents(
        self,
        tile: ColumnMath,
        s_acc: Ref,
        dp_acc: Ref,
        dv_acc: Ref,
        own_v: Ref,
        slots: tuple[Scalar, Scalar],
        write: Callable[[jax.Array], None],
        started: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> jax.Array:
        """Computes dP^T = V dO^T, once dO has arrived, and from it and S^T dS^T of one visit, [ROWS, queries] in the
        dtype of the operands; also writes it to shared memory and starts the product for dV.

        tile             the visited tile, which gives P and dS from its scores
        s_acc            accumulator into which the product S^T is started already
        dp_acc, dv_acc   accumulators for dP^T and dV
        own_v            this warpgroup's values in shared memory
        slots            (slot of Q and its statistics, slot of dO)
        write            writes dS^T to shared memory; the caller fences it
        started          whether dp_acc is -delta already; otherwise it is 0
        beside           called while the product for dP^T is in flight. In any order that is after P^T is computed, because it fences, and
                         a fence waits for the stores before it. In a fixed order it is at once: other CTAs wait for what it hands over

        With tiles of 128 queries, whose registers are scarce, lse2 is read after S^T, and the product for dV starts after dS^T is computed
        (`FusedSetup.writes_ds_first`: after it is written); otherwise both come earlier. The product for dV is in flight at the return.
        """
        setup, scratch, math, products = self.setup, self.scratch, self.math, self.products
        (q_slot, out_slot), rings, dtype = slots, self.cta.rings, self.scratch.key.dtype
        out_now = scratch.d_out.at[out_slot]
        large_tile = setup.tiles.dq_by_queries  # registers are scarce: lse2 late, and the product for dV after dS
        delta = None
        if math.starts_at_minus_delta:
            if not started:
                products.start(dp_acc, math.broadcast(self.start_of_dp(q_slot), "q"))
        else:
            delta = math.broadcast(rings.statistic(1, q_slot), "q")
        plgpu.barrier_wait(scratch.out_full.at[out_slot])
        products.add(dp_acc, own_v, out_now, b_t=True)
        if beside is not None and setup.order is not None:
            beside()
        lse2 = None if large_tile else rings.statistic(0, q_slot)
        s = products.read(s_acc, 1)
        found = tile.probabilities(s, rings.statistic(0, q_slot) if lse2 is None else lse2)
        weights, factor = found.weights().astype(dtype), found.factor()
        if beside is not None and setup.order is None:
            beside()
        add_to_dv = lambda: products.add(dv_acc, weights, out_now)
        if not large_tile:
            add_to_dv()
        dp = products.read(dp_acc, 0 if large_tile else 1)
        ds = found.cotangent(factor, dp, delta).astype(dtype)
        kept = math.kept_rows(tile.rows.row0)
        if kept is not None:  # dQ is a sum over the rows
            ds = zero_rows(ds, kept, setup.simulated)
        if not setup.writes_ds_first:
            if large_tile:
                add_to_dv()
            write(ds)
            return ds
        write(ds)
        add_to_dv()
        return ds

    def start_of_dp(self, q_slot: Scalar) -> jax.Array:
        """-delta of the queries in slot `q_slot`, [queries] float32, a vector along the columns of a transposed tile: where the accumulator
        of dP^T starts (`TileMath.starts_at_minus_delta`).
        """
        return self.cta.rings.statistic(1, q_slot)

    def start_dq(self, dq_acc: Ref, ds_slot: Scalar) -> None:
        """Starts the product dS K, without scale, for this warpgroup's half of a dQ tile: half of the queries
        (`dq_by_queries`) or of the columns of D. dS^T of both warpgroups is in slot `ds_slot` of shared memory.

        dq_acc   its accumulator, of the shape `dq_part`
        """
        share = common.not_hoisted(self.group, self.setup.simulated)
        if self.setup.tiles.dq_by_queries:
            half = self.scratch.ds.at[ds_slot, :, pl.ds(share * ROWS, ROWS)]
            self.products.add(dq_acc, half, self.scratch.key, a_t=True)
        else:
            columns = self.dq_part[1]
            half = self.scratch.key.at[:, pl.ds(share * columns, columns)]
            self.products.add(dq_acc, self.scratch.ds.at[ds_slot], half, a_t=True)

    def hand_over_dq(self, dq: jax.Array, number: Scalar) -> None:
        """Writes the half of a dQ tile to shared memory (`write_dq`), and tells the adding warpgroup."""
        self.write_dq(dq, number)
        self.publish(self.scratch.dq_full.at[self.dq_slot(number)])

    def dq_slot(self, number: Scalar) -> Scalar:
        """The slot of the dQ tile with the running number `number`."""
        return common.slot_of(number, self.setup.tiles.dq_slots)

    def write_dq(self, dq: jax.Array, number: Scalar) -> None:
        """Writes the half of a dQ tile to shared memory once its slot is free.

        dq       of the shape `dq_part`, float32
        number   running number of the dQ tile, which gives its slot. Where dQ is late every call waits for the slot;
                 otherwise the first calls, one for each slot, do not wait
        """
        scratch, slots = self.scratch, self.setup.tiles.dq_slots
        slot = self.dq_slot(number)
        if self.setup.dq_is_late:  # a branch beside in-flight products costs registers: all slots are freed at first
            plgpu.barrier_wait(scratch.dq_free.at[slot])
        else:
            when(number >= slots)(lambda: plgpu.barrier_wait(scratch.dq_free.at[slot]))
        scratch.dq.at[slot, pl.ds(self.group * ROWS, ROWS)][...] = dq

    def publish(self, barrier: Ref) -> None:
        """Makes what this warpgroup wrote to shared memory visible to TMA and WGMMA, and arrives at `barrier`. No thread waits for the
        others, because each arrives at the barrier after its own fence.
        """
        kernel_parts.fence_shared(self.setup.simulated)
        plgpu.barrier_arrive(barrier)

    def finish_late_dq(self, total: Scalar) -> None:
        """Computes and hands over dQ of the last visit; called after all visits where dQ is late, because there each
        visit hands over dQ of the visit before. It waits for dS^T of both warpgroups.

        total   number of visits. Where it is 0, the tile that is handed over is tile 0, whose numbers `_Cta.add_dq`
                drops
        """

        def last(dq_acc: Ref) -> jax.Array:
            """This warpgroup's half of dQ of the last visit without scale, of the shape `dq_part`, float32; waits for
            dS^T of both warpgroups.

            dq_acc   its accumulator, 0 at the start
            """
            plgpu.barrier_wait(self.scratch.ds_ready)
            self.start_dq(dq_acc, common.slot_of(total + 1, DS_SLOTS))
            return self.products.read(dq_acc)

        self.hand_over_dq(self.products.accumulators(last, self.dq_part), total)
