"""All three gradients in one kernel on Hopper: the dK/dV kernel with a fifth product for dQ.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ_tile = dS K, added to dQ in memory

A kernel for dQ and one for dK and dV need seven products a tile, this one five. In exchange, every [queries, D] tile of
dQ is added to float32 memory once for each tile of keys. Four warpgroups:

    0, 1   compute, each for 64 of the 128 keys
    2      copies tiles of Q and dO in
    3      adds dQ tiles to memory by TMA, which takes no time from the others

dQ sums over all keys of the CTA, so both computing warpgroups write their dS^T to shared memory, meet at a barrier, and
each makes one half of dQ: 64 of 128 queries, or of 64 queries one half of the columns.

Where registers allow (`fits_128_query_tile`), a tile has 128 queries, so that barriers and loop overhead are paid half
as often. Scores, dP, dK and dV then take 192 of 232 registers. So row statistics are read only when they are needed,
and the dV product is issued after dS is there.

The barrier keeps the two computing warpgroups in step, so the tensor cores idle while both compute probabilities.
Therefore dQ may be *late*: its product is issued one visit later, beside the next scores (`dq_is_late`). With score_mod
or dropout, registers do not suffice. Beside the late product, and where a tile takes long (`by_runs`), tiles with and
without a mask have loops of their own, because a branch between in-flight WGMMAs forces a wait.

Additions to dQ are in any order, each when its tile is ready, or in a fixed order (machine/dq_order.py): a start number
from an atomic counter says which key tile a CTA owns, and a CTA waits at a query tile until as many CTAs have added to
it as its place in the order says. No CTA waits for a CTA that may not have started.

In all functions, h is a query head, `q_tile` the number of a visited query tile, `number` the running number of the
visit over all heads. D and E are the padded head dims of keys and values; the formulas are at the top of common.py.
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

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.common import BackwardCall, Captures, Products, QueryRings, Tokens
from flexjax.backends.mosaic_gpu.backward.hopper_fused_setup import FusedSetup, gather_dq, spread_shape, sum_shares
from flexjax.backends.mosaic_gpu.backward.hopper_fused_stores import (
    signal_addition,
    wait_for_additions,
    write_operand,
    zero_rows,
)
from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import DS_SLOTS, GROUPS, ROWS, FusedScratch, fused_scratch
from flexjax.backends.mosaic_gpu.backward.hopper_fused_visits import OwnKeys, QueryVisits, query_visits
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import VisitLists
from flexjax.backends.mosaic_gpu.machine import atomic_counter, branch, dq_order, kernel_parts
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.dq_order import DqOrder
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, arrive_read, launch, rows_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.machine.simulator import device_op, only_simulated
from flexjax.integers import cdiv, round_up

COMPUTE_REGISTERS, COPY_REGISTERS = 232, 24
"""Registers of a thread of the computing warpgroups, and of the others; they fill the register file."""


class FusedInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the kernel; it also writes the last two."""

    tokens: Tokens[Part]
    visits: QueryVisits[Part]
    captures: Captures[Part]
    d_query: Part  # [dQ tiles * GROUPS * ROWS, columns] float32, see `FusedSetup.dq_tiles`
    counts: Part  # [dQ tiles + 1 + CTAs]: additions to each dQ tile, CTAs started, start number of each


class FusedOutputs(typing.NamedTuple, typing.Generic[Part]):
    """dK and dV, in the shapes of the padded keys and values, with `FusedKernel.shares` times the key heads."""

    d_key: Part
    d_value: Part


def backward_fused(
    call: BackwardCall, lists: VisitLists[jax.Array], chosen: FusedKernel
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV) by the fused kernel, dQ and dK times scale, in the shapes of the padded queries, keys and values.

    The grid has one CTA for each tile of FUSED_KEYS keys of each key head, or `FusedKernel.shares` CTAs, each for a
    part of the query heads. dQ is summed in float32 in memory.
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

    def kernel(inputs: FusedInputs[Ref], outputs: FusedOutputs[Ref], scratch: FusedScratch[Ref]) -> None:
        clip_rows(aligned=True)
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        cta = _Cta(setup, inputs, scratch, program)
        when(group < GROUPS)(lambda: _ComputingWarpgroup(cta, group).run(outputs))
        when(group == GROUPS)(cta.copy_in)
        when(group == GROUPS + 1)(cta.add_dq)

    if math.starts_at_minus_delta:  # -delta in memory, so that no thread changes a sign
        tokens = tokens._replace(stats=tokens.stats * np.array([[1.0], [-1.0]], np.float32))
    dq_shape = (setup.dq_tiles * GROUPS * ROWS, tiles.dq_columns(tokens.query.shape[-1]))
    dq_sum = jax.new_ref((lax.empty if first_stores(chosen) else jnp.zeros)(dq_shape, jnp.float32))
    ctas = kv_tiles * plan.batch * plan.kv_heads
    counts = jax.new_ref(jnp.zeros((setup.dq_tiles + 1 + ctas,), jnp.int32))
    d_key, d_value = launch(
        kernel,
        FusedInputs[typing.Any](tokens, visits, call.captures, dq_sum, counts),
        FusedOutputs(
            *(kernel_parts.output(spread_shape(plan, x.shape), x.dtype, tokens.key) for x in (tokens.key, tokens.value))
        ),
        fused_scratch(plan, tiles),
        name="flexjax_backward_fused",
        programs=ctas,
        warpgroups=GROUPS + 2,
    )
    dq_tiles = jax.freeze(dq_sum).reshape(setup.dq_tiles, GROUPS * ROWS, dq_shape[1])
    if first_stores(chosen):  # a tile that no CTA visited was never written
        dq_tiles = jnp.where(jax.freeze(counts)[: setup.dq_tiles, None, None] > 0, dq_tiles, 0.0)
    d_key, d_value = (sum_shares(plan, x, chosen.shares) for x in (d_key, d_value))
    return gather_dq(plan, setup.sums, tiles.queries, dq_tiles, tokens.query), d_key, d_value


# ------------------------------------------------------------------- the copying and the adding warpgroup


@device_op
def first_stores(chosen: FusedKernel) -> bool:
    """Whether the first addition to a tile of dQ is a store."""
    return chosen.ordered


@dataclasses.dataclass(frozen=True)
class _Cta:
    """One CTA inside the kernel, the one with number `program`."""

    setup: FusedSetup
    inputs: FusedInputs[Ref]
    scratch: FusedScratch[Ref]
    program: Scalar

    @property
    def rings(self) -> QueryRings:
        tiles, plan = self.setup.tiles, self.setup.plan
        sizes = (tiles.queries, tiles.query_slots, tiles.out_slots)
        return QueryRings(plan, self.inputs.tokens, self.scratch, *sizes)

    def claim(self, takes_start_number: bool = False) -> OwnKeys:
        """What this CTA owns, by its start number where additions have a fixed order, else by its number in the grid.

        The copying warpgroup alone `takes_start_number`; the others wait at a barrier until it is in memory. Each
        warpgroup calls this in its own branch, because a barrier before the branches spills registers.
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
            start = self.start_number(takes_start_number)
            head, tile, rank = dq_order.assignment_of(start, order, setup.kv_tiles, heads)
        b, key_head = lax.div(head, jnp.int32(plan.kv_heads)), lax.rem(head, jnp.int32(plan.kv_heads))
        mask_b = b if setup.visits.lists_by_batch else zero
        launch_order = self.inputs.visits.launch_order
        # with block lists, the first CTAs of a head own the key tiles with the most visits
        if launch_order is not None:
            tile = launch_order[mask_b, key_head * plan.group if setup.visits.lists_by_head else 0, tile]
        return OwnKeys(b, key_head, mask_b, tile, rank)

    @device_op
    def start_number(self, takes: bool) -> Scalar:
        """How many CTAs started before this one; the simulator takes the number of the CTA in the grid."""
        counts, started = self.inputs.counts, self.setup.dq_tiles
        word = counts.at[pl.ds(started + 1 + self.program, 1)]
        if takes:
            atomic_counter.take_start(counts.at[pl.ds(started, 1)], word)
            plgpu.barrier_arrive(self.scratch.started)
        plgpu.barrier_wait(self.scratch.started)
        return atomic_counter.read_start(word)

    def copy_in(self) -> None:
        """The copying warpgroup: takes the start number, copies K and V, then Q, statistics and dO of every visit."""
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
            self.rings.fill(own.b, h, q_tile * setup.tiles.queries, number)

        self.rings.drain(setup.visits.each(self.inputs.visits, own, lambda h: None, step))

    def add_dq(self) -> None:
        """The adding warpgroup: adds the dQ tile of every visit to memory, and frees its slot."""
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        # each slot has a warp, so that additions overlap: in a fixed order one takes longer than a visit
        self.add_by_warps(self.claim())

    @device_op
    def add_by_warps(self, own: OwnKeys) -> None:
        def add(warp: Scalar) -> None:
            self.add_tiles(own, warp)
            plgpu.wait_smem_to_gmem(0)

        def one_warp(warp: Scalar) -> None:
            with branch.one_warp():
                when(warp < self.setup.tiles.dq_slots)(lambda: add(warp))

        plgpu.warp_map(one_warp)

    def add_tiles(self, own: OwnKeys, warp: Scalar | None) -> None:
        """Adds dQ tiles to memory: those of slot `warp`, or all of them in the simulator (None)."""
        setup, scratch, slots = self.setup, self.scratch, self.setup.tiles.dq_slots
        mine = lambda slot: True if warp is None else slot == warp
        # tile n + 1 is dQ of visit n; tile 0 belongs to no visit
        if setup.dq_is_late:

            def drop_first() -> None:
                plgpu.barrier_wait(scratch.dq_full.at[0])
                plgpu.barrier_arrive(scratch.dq_free.at[0])

            # the computing warpgroups wait for a free slot before every tile, also the first
            for slot in range(slots):
                when(mine(slot))(functools.partial(plgpu.barrier_arrive, scratch.dq_free.at[slot]))
            when(mine(0))(drop_first)

        def step(_: None, h: Scalar, q_tile: Scalar, number: Scalar, masked: bool | Scalar) -> None:
            slot = common.slot_of(number + int(setup.dq_is_late), slots)
            when(mine(slot))(lambda: self.add_dq_tile(own, h, q_tile, slot))

        setup.visits.each(self.inputs.visits, own, lambda h: None, step)

    @device_op
    def add_dq_tile(self, own: OwnKeys, h: Scalar, q_tile: Scalar, slot: Scalar) -> None:
        """Waits until `slot` is full, adds its dQ tile to query tile `q_tile` of head h in memory, and frees the slot.

        In a fixed order the warp first waits until as many CTAs as its ticket says have added to the query tile.
        """
        setup, scratch = self.setup, self.scratch
        sums, number, target = setup.sums, *self.dq_place(own, h, q_tile)
        plgpu.barrier_wait(scratch.dq_full.at[slot])
        if setup.order is None:
            plgpu.copy_smem_to_gmem(scratch.dq.at[slot], target, reduction_op="add")
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch.dq_free.at[slot])
            return
        # without a block mask every key tile visits all queries, so the rank gives the ticket
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

    def dq_place(self, own: OwnKeys, h: Scalar, q_tile: Scalar) -> tuple[Scalar, Ref]:
        """(number of the sum that a dQ tile is added to, its rows in memory)."""
        setup, plan = self.setup, self.setup.plan
        sum_number = (own.b * plan.q_heads + h) * setup.sums + lax.rem(own.rank, jnp.int32(setup.sums))
        number = sum_number * setup.q_tiles + q_tile
        return number, self.inputs.d_query.at[pl.ds(number * (GROUPS * ROWS), GROUPS * ROWS)]


# ------------------------------------------------------------------- a computing warpgroup


@dataclasses.dataclass(frozen=True)
class _ComputingWarpgroup:
    """A computing warpgroup, 0 or 1: dK and dV of its 64 keys, and its half of every dQ tile."""

    cta: _Cta
    group: Scalar

    @property
    def setup(self) -> FusedSetup:
        return self.cta.setup

    @property
    def scratch(self) -> FusedScratch[Ref]:
        return self.cta.scratch

    @property
    def math(self) -> TileMath:
        return self.cta.setup.math

    @property
    def products(self) -> Products:
        return Products()

    @property
    def dq_part(self) -> tuple[int, int]:
        """(rows, columns) of the half of a dQ tile that this warpgroup makes."""
        return ROWS, self.setup.tiles.dq_columns(self.scratch.key.shape[-1])

    def run(self, outputs: FusedOutputs[Ref]) -> None:
        """Makes all visits, then writes dK and dV over K and V in shared memory and from there to `outputs`."""
        setup, scratch, math = self.setup, self.scratch, self.math
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        own = self.cta.claim()
        kv0 = own.tile * FUSED_KEYS + self.group * ROWS
        mine = pl.ds(self.group * ROWS, ROWS)
        own_k, own_v = scratch.key.at[mine], scratch.value.at[mine]
        plgpu.barrier_wait(scratch.own_full)

        def accumulate(dk_acc: Ref, dv_acc: Ref) -> tuple[jax.Array, jax.Array]:
            def step(rows: RowMath, h: Scalar, q_tile: Scalar, number: Scalar, masked: bool | Scalar) -> None:
                self.visit(rows, q_tile, number, masked, dk_acc, dv_acc)

            if setup.dq_is_late:
                plgpu.barrier_arrive(scratch.ds_ready)  # for the first visit, which finds no visit before it
            begin = lambda h: math.at_rows(own.b, h, kv0, self.cta.inputs.captures)
            total = setup.visits.each(self.cta.inputs.visits, own, begin, step, by_runs=setup.by_runs)
            # no later visit hands over the last visit's dQ
            if setup.dq_is_late:
                self.finish_late_dq(total)
            slots = setup.tiles.dq_slots
            only_simulated(lambda: common.wait_until_read(total + setup.dq_is_late * slots, (scratch.dq_free, slots)))
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
        """Adds query tile `q_tile` to dK and dV, and hands over dQ of this or, where dQ is late, the last visit."""
        setup, scratch, products, late = self.setup, self.scratch, self.products, self.setup.dq_is_late
        q_slot, out_slot = self.cta.rings.slots(number)
        ds_slot = common.slot_of(number, DS_SLOTS)
        q_now = scratch.query.at[q_slot]
        tile = rows.at_columns(q_tile * setup.tiles.queries, masked)
        mine = pl.ds(common.not_hoisted(self.group) * ROWS, ROWS)

        def start_scores(s_acc: Ref) -> None:
            products.add(s_acc, scratch.key.at[mine], q_now, b_t=True)

        def cotangents(s_acc: Ref, dp_acc: Ref, **rest: typing.Any) -> jax.Array:
            """dS^T of the visit; the product into s_acc must have been started."""
            own_v, slots = scratch.value.at[mine], (q_slot, out_slot)
            write = functools.partial(self.write_ds, ds_slot=ds_slot)
            return self.score_cotangents(tile, s_acc, dp_acc, dv_acc, own_v, slots, write, **rest)

        def together(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            # before S^T starts, because the compiler waits for S^T otherwise (C7517)
            products.start(dp_acc, self.math.broadcast(self.start_of_dp(q_slot), "q"))
            start_scores(s_acc)
            return cotangents(s_acc, dp_acc, started=True)

        def one_by_one(s_acc: Ref, dp_acc: Ref) -> jax.Array:
            start_scores(s_acc)
            return cotangents(s_acc, dp_acc)

        def beside_late_dq(s_acc: Ref, dq_acc: Ref | None = None) -> jax.Array:
            """dS^T of the visit; hands over dQ of the visit before while S^T is in flight (the first visit: tile 0)."""
            start_scores(s_acc)
            plgpu.barrier_wait(scratch.ds_ready)

            def last_dq(dq_acc: Ref) -> jax.Array:
                self.start_dq(dq_acc, 1 - ds_slot)
                return products.read(dq_acc)

            # an accumulator made after the wait costs no instruction for its zeros
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
        arrive_read(scratch.out_free.at[out_slot])
        if late:
            arrive_read(scratch.query_free.at[q_slot])
            return
        plgpu.barrier_wait(scratch.ds_ready)

        def own_dq(dq_acc: Ref) -> jax.Array:
            self.start_dq(dq_acc, ds_slot)
            products.wait(1)
            arrive_read(scratch.query_free.at[q_slot])
            return products.read(dq_acc)

        self.hand_over_dq(products.accumulators(own_dq, self.dq_part), number)

    def write_ds(self, ds: jax.Array, ds_slot: Scalar) -> None:
        """Writes dS^T of this warpgroup, [ROWS, queries] in 16 bits, to slot `ds_slot` of shared memory."""
        mine = pl.ds(common.not_hoisted(self.group) * ROWS, ROWS)
        target = self.scratch.ds.at[ds_slot, mine]
        if self.setup.tiles.dq_by_queries:
            write_operand(ds, target)
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
        """dS^T of one visit, [ROWS, queries] in the dtype of the operands, also written to shared memory by `write`.

        S^T is in flight into `s_acc`; `dp_acc` is -delta already where `started`, else 0; `slots` are those of Q and
        dO. Calls `beside` while the product for dP^T is in flight. At the return the product for dV is in flight, and
        `ds` is not yet fenced.
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
        # at once, because other CTAs wait for what it hands over
        if beside is not None and setup.order is not None:
            beside()
        lse2 = None if large_tile else rings.statistic(0, q_slot)
        s = products.read(s_acc, 1)
        found = tile.probabilities(s, rings.statistic(0, q_slot) if lse2 is None else lse2)
        weights, factor = found.weights().astype(dtype), found.factor()
        # late, because it fences, and a fence waits for the stores before it
        if beside is not None and setup.order is None:
            beside()
        add_to_dv = lambda: products.add(dv_acc, weights, out_now)
        if not large_tile:
            add_to_dv()
        dp = products.read(dp_acc, 0 if large_tile else 1)
        ds = found.cotangent(factor, dp, delta).astype(dtype)
        kept = math.kept_rows(tile.rows.row0)
        if kept is not None:  # dQ is a sum over the rows
            ds = zero_rows(ds, kept)
        if not setup.writes_ds_first:
            if large_tile:
                add_to_dv()
            write(ds)
            return ds
        write(ds)
        add_to_dv()
        return ds

    def start_of_dp(self, q_slot: Scalar) -> jax.Array:
        """-delta, [queries] float32 along columns, where the accumulator of dP^T starts."""
        return self.cta.rings.statistic(1, q_slot)

    def start_dq(self, dq_acc: Ref, ds_slot: Scalar) -> None:
        """Starts dS K for this warpgroup's half of a dQ tile, with dS^T of both in slot `ds_slot`."""
        share = common.not_hoisted(self.group)
        if self.setup.tiles.dq_by_queries:
            half = self.scratch.ds.at[ds_slot, :, pl.ds(share * ROWS, ROWS)]
            self.products.add(dq_acc, half, self.scratch.key, a_t=True)
        else:
            columns = self.dq_part[1]
            half = self.scratch.key.at[:, pl.ds(share * columns, columns)]
            self.products.add(dq_acc, self.scratch.ds.at[ds_slot], half, a_t=True)

    def hand_over_dq(self, dq: jax.Array, number: Scalar) -> None:
        self.write_dq(dq, number)
        self.publish(self.scratch.dq_full.at[self.dq_slot(number)])

    def dq_slot(self, number: Scalar) -> Scalar:
        return common.slot_of(number, self.setup.tiles.dq_slots)

    def write_dq(self, dq: jax.Array, number: Scalar) -> None:
        """Writes the half of a dQ tile, of the shape `dq_part`, float32, to shared memory once its slot is free."""
        scratch, slots = self.scratch, self.setup.tiles.dq_slots
        slot = self.dq_slot(number)
        if self.setup.dq_is_late:  # a branch beside in-flight products costs registers: all slots are freed at first
            plgpu.barrier_wait(scratch.dq_free.at[slot])
        else:
            when(number >= slots)(lambda: plgpu.barrier_wait(scratch.dq_free.at[slot]))
        scratch.dq.at[slot, pl.ds(self.group * ROWS, ROWS)][...] = dq

    def publish(self, barrier: Ref) -> None:
        """Makes what this warpgroup wrote to shared memory visible to TMA and WGMMA, and arrives at `barrier`."""
        # no thread waits for the others, because each arrives at the barrier after its own fence
        kernel_parts.fence_shared()
        plgpu.barrier_arrive(barrier)

    def finish_late_dq(self, total: Scalar) -> None:
        """Computes and hands over dQ of the last visit, where dQ is late; without visits that is tile 0."""

        def last(dq_acc: Ref) -> jax.Array:
            plgpu.barrier_wait(self.scratch.ds_ready)
            self.start_dq(dq_acc, common.slot_of(total + 1, DS_SLOTS))
            return self.products.read(dq_acc)

        self.hand_over_dq(self.products.accumulators(last, self.dq_part), total)
