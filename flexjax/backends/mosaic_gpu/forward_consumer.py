"""A consumer of the forward kernel: one warpgroup that computes attention for 64 of the query tile's rows.

    S = Q K^T           WGMMA, from shared memory
    score, mask         registers (tile_programs.py); the identity costs nothing, its scale is part of the exponential
    P, rescale          online_softmax.py
    out += P V          WGMMA, P from registers

A step is one key tile. Steps of a work item (one query tile with the key tiles that it visits, tile_scheduler.py) are
numbered from 0, `n` in the functions below; those that need no mask come first. Steps come in two orders:

    staggered (`ForwardTile.overlap`)   issue S of step n and P V of step n - 1 together; softmax of n while P V is in flight
    whole                               S, softmax and P V of one step after the other; the other consumer's WGMMAs run meanwhile

Steps without a mask and steps with one have a loop each, because a branch between in-flight WGMMAs forces a wait.
`Phase` says which steps a function is traced for. The producer (forward_producer.py) fills rings of slots in shared
memory with keys, values and tiles of a staged array (staging.py), in the order of the steps over all work items of
the CTA; a consumer waits until a slot is full and releases it when it has read it. `state` is what the online softmax
keeps between steps.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import float8_products, kernel_parts, memory, registers, thread_tiles, tile_scheduler
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.float_parts import pairs_of, part_dtype
from flexjax.backends.mosaic_gpu.forward_rows import Phase, Position, QueryRows, StepTile, programs_at_rows
from flexjax.backends.mosaic_gpu.forward_setup import HopperSetup, Inputs, Outputs, present
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardScratch, ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import (
    Ref,
    Scalar,
    accumulator,
    accumulator_from,
    fence_shared,
    i32,
    rows_of,
    slot_parts,
)
from flexjax.backends.mosaic_gpu.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.partial_sums import PartialSums, first_cta
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.tile_scheduler import WorkItem

f32 = np.float32
Output = tuple[jax.Array, ...]
"""The tiles of the output, [rows, columns] float32 side by side, of the columns that `ForwardTile.out_widths` says: one, or several of float8."""


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA.

    setup             what is known before the kernel is traced
    inputs, outputs   Refs to global memory
    scratch           Refs to the CTA's shared memory
    """

    setup: HopperSetup
    inputs: Inputs[Ref]
    outputs: Outputs[Ref]
    scratch: ForwardScratch[Ref]

    def run(self) -> None:
        """Computes this warpgroup's rows of every work item of the CTA, and writes the results to `outputs`.

        At first it raises its register limit, if there are several consumers, and releases every slot of every ring, so
        that the producer finds all of them free. At the end it waits until shared memory was read by its last copies.
        """
        tile, slots, scratch = self.setup.tile, self.setup.slots, self.scratch
        if tile.groups > 1:
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
        group = lax.axis_index("wg")
        if tile.sum_columns:
            when(group == 0)(self._write_ones)
        for slot in range(tile.query_slots):
            slots.release("query", scratch.query_free, slot)
        for slot in range(tile.stages):
            slots.release("key", scratch.key_free, slot)
        for slot in range(tile.value_stages):
            slots.release("value", scratch.value_free, slot)
        for slot in range(tile.staged_slots):
            slots.release("staged", scratch.staged_free, slot)
        self.setup.ping_pong.begin(group)

        def compute_item(item: WorkItem, turn: Scalar, first_step: Scalar) -> Scalar:
            """Computes this warpgroup's rows of one work item; returns the number of the first step of the CTA's next
            item.

            turn         number of the item in this CTA
            first_step   number of the item's first step, counted over the items of the CTA
            """
            QueryTile.of(self, item, turn, first_step, group).compute()
            return first_step + item.total

        self._each_item(compute_item)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _write_ones(self) -> None:
        """Writes the columns of ones beside the float8 values to every slot, where no copy comes. What releases the slots is after it, so
        that no values are multiplied before.
        """
        tile = self.setup.tile
        for slot in range(tile.value_stages):
            columns = self.scratch.value.at[slot, pl.ds(tile.value_dim, tile.sum_columns)]
            float8_products.write_ones(columns, self.setup.interpret)
        fence_shared(self.setup.interpret)

    def _each_item(self, compute_item: Callable[[WorkItem, Scalar, Scalar], Scalar]) -> None:
        """Calls `compute_item` on each work item of this CTA, in the order in which the producer copies for them.

        compute_item   (item, number of the item in this CTA, number of its first step in this CTA) -> number of the
                       step after its last

        With the dynamic scheduler an item comes through the mailbox together with its queries, so this waits for the
        query slot; otherwise `QueryTile.of` waits for it.
        """
        scheduler, tile, mask_rows = self.setup.scheduler, self.setup.tile, self.inputs.mask_rows
        if not tile.dynamic_scheduler:
            own = lambda turn, step: compute_item(scheduler.item(mask_rows, scheduler.number(turn)), turn, step)
            lax.fori_loop(i32(0), scheduler.turns(), own, i32(0))
            return

        def receive(turn: Scalar) -> tuple[Scalar, WorkItem]:
            """(whether there is a work item number `turn`, the item) from the mailbox, once its query slot is full."""
            slot = kernel_parts.slot_of(turn, tile.query_slots)
            plgpu.barrier_wait(self.scratch.query_full.at[slot])
            return tile_scheduler.get(present(self.scratch.mailbox), slot)

        def one(state: tuple[Scalar, WorkItem, Scalar, Scalar]) -> tuple[Scalar, WorkItem, Scalar, Scalar]:
            """Computes the item of the loop's state and receives the next.

            state   (whether there is an item, the item, its number in this CTA, number of its first step)
            """
            _, item, turn, step = state
            step = compute_item(item, turn, step)
            return *receive(turn + 1), turn + 1, step

        more, item = receive(i32(0))
        lax.while_loop(lambda state: state[0], one, (more, item, i32(0), i32(0)))


@dataclasses.dataclass(frozen=True)
class QueryTile(QueryRows[ForwardTile]):
    """The rows of one work item (one query tile with the key tiles that it visits) that one consumer computes. A step
    is one key tile; in the methods `n` is the number of a step in the item, from 0, unmasked steps first. Beside the
    fields of QueryRows

    scratch      Refs to the CTA's shared memory
    turn         number of the work item in this CTA
    first_step   number of its first step, counted over the items of this CTA: the position in the rings of keys and
                 values
    group        number of the warpgroup among the consumers
    query_slot   slot of the queries in their ring
    queries      [rows, D] for each part (float_parts.py), the rows in shared memory
    """

    setup: HopperSetup
    scratch: ForwardScratch[Ref]
    turn: Scalar
    first_step: Scalar
    group: Scalar
    query_slot: Scalar
    queries: tuple[Ref, ...]

    @classmethod
    def of(cls, consumer: Consumer, item: WorkItem, turn: Scalar, first_step: Scalar, group: Scalar) -> "QueryTile":
        """The rows of `item` that warpgroup `group` computes, with the row vectors of the programs computed.

        turn         number of the item in this CTA
        first_step   number of its first step, counted over the items of this CTA

        It waits for the queries, unless the dynamic scheduler runs: then `Consumer._each_item` has done so.
        """
        setup, inputs, scratch, tile = consumer.setup, consumer.inputs, consumer.scratch, consumer.setup.tile
        q_start = item.q_tile * tile.block_q + group * tile.rows

        programs = programs_at_rows(setup, inputs, item, q_start)
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        queries = slot_parts(scratch.query, slot, tile.parts, pl.ds(group * tile.rows, tile.rows))
        if not tile.dynamic_scheduler:
            plgpu.barrier_wait(scratch.query_full.at[slot])
        return cls(setup, inputs, consumer.outputs, item, programs, scratch, turn, first_step, group, slot, queries)

    def compute(self) -> None:
        """Runs all steps of the work item, in the order that `ForwardTile.overlap` says, and writes its results
        (`_finish`).

        An item without visits, which only a block mask has, gets the results of rows without visible keys. The row term
        of the score is computed after the steps; there is none with a static reference or large scores.
        """
        setup, tile = self.setup, self.setup.tile
        out = tuple(registers.zero_tile((tile.rows, columns)) for columns in tile.out_widths)
        steps = self._staggered_steps if tile.overlap else self._whole_steps

        def no_steps(out: Output) -> tuple[Output, State, Position]:
            """For a work item whose block lists are empty: releases the queries and returns (`out` as it is, the
            softmax state before the first tile, position of the tile).
            """
            return out, setup.softmax.start, self._release_queries()

        if not tile.overlap:
            setup.ping_pong.begin_tile(self.group, self.turn == 0)
        if setup.plan.blocks is None:
            found = steps(out)
        else:
            found = cond(self.item.total > 0, lambda: steps(out), lambda: no_steps(out))
        if not tile.overlap:
            setup.ping_pong.end_tile(self.group)
        self._finish(self.row_term, *found)

    # ----------------------------------------------------------------- the two orders of steps

    def _whole_steps(self, out: Output) -> tuple[Output, State, Position]:
        """Runs every step in the whole order, and releases the queries.

        out   the tiles of the output, zeros

        Returns (`out` plus P V of every step, not yet divided by the softmax denominator; softmax state; position of
        the query tile).
        """
        state = self.setup.softmax.start
        if self.setup.tile.prefetch_key_barrier:  # otherwise each step waits for its own keys
            plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(i32(0))])
        out, state = self._loops(self._whole_step, 0, (out, state))
        return out, state, self._release_queries()

    def _staggered_steps(self, out: Output) -> tuple[Output, State, Position]:
        """Runs every step in the staggered order: S of step 0 before the loop, P V of the last step after it; releases
        the queries before that last product.

        out   the tiles of the output, zeros

        Returns (`out` plus P V of every step, not yet divided by the softmax denominator; softmax state; position of
        the query tile).
        """
        setup, item = self.setup, self.item
        state = setup.softmax.start
        plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(i32(0))])
        step_tile = self.step_tile(self.start(i32(0), Phase.FIRST), Phase.FIRST)
        setup.ping_pong.wait(self.group)
        s = self._scores_alone(i32(0))
        setup.slots.release("key", self.scratch.key_free, self._key_slot(i32(0)))
        s = self.partial_sums.total(s, 0)
        p, _, state = self._softmax_with_staged(s, i32(0), step_tile, Phase.FIRST, state)
        out, weights, state = self._loops(self._staggered_step, 1, (out, self._weights(p), state))
        position = self._release_queries()
        out = self._add_values(out, weights, item.total - 1)
        setup.ping_pong.signal(self.group)
        return out, state, position

    def _loops(self, step: Callable[..., tuple], begin: int, carry: tuple) -> tuple:
        """Runs `step` for the steps from `begin` on, in a loop over unmasked and one over masked steps; returns the last carry, without
        the first key. There is no second loop where no step of the kernel needs a mask.

        step    (step number, (first key of its tile, *carry), phase) -> (first key of the next step's tile, *carry)
        begin   number of the first step to run, 0 or 1
        carry   what the first step gets beside the first key of its tile
        """
        first, masked = i32(begin), lax.max(self.item.unmasked, i32(begin))
        starts = [self.start(n, phase) for n, phase in ((first, Phase.UNMASKED), (masked, Phase.MASKED))]
        carry = lax.fori_loop(first, masked, functools.partial(step, phase=Phase.UNMASKED), (starts[0], *carry))
        if self.setup.has_masked_steps:
            carry = (starts[1], *carry[1:])
            carry = lax.fori_loop(masked, self.item.total, functools.partial(step, phase=Phase.MASKED), carry)
        return carry[1:]

    def _whole_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S, softmax and P V of step n; waits for its keys and values and releases their slots. `out` is rescaled
        before P V is added.

        carry   (first key of step n, tiles of the output, softmax state) before the step; (first key of step
                n + 1, out, softmax state) after it is returned
        phase   which steps this is traced for
        """
        setup = self.setup
        start, out, state = carry
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        self._await_keys(n, prefetch=False)
        s = self._scores_alone(n)
        setup.slots.release("key", self.scratch.key_free, self._key_slot(n))
        s = self.partial_sums.total(s, n)
        p, rescale, state = self._softmax_with_staged(s, n, step_tile, phase, state)
        out = tuple(setup.softmax.rescale(x, rescale) for x in out)
        weights = self._weights(p)
        if not setup.interpret:
            out, weights, state = lax.optimization_barrier((out, weights, state))
        return start, self._add_values(out, weights, n), state

    def _staggered_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S and softmax of step n, and P V of step n - 1; waits for the keys and values of these and releases their
        slots. The simulator computes them one after the other.

        carry   (first key of step n, tiles of the output, the parts of P of step n - 1, softmax state) before
                the step; (first key of step n + 1, out, the parts of P of step n, softmax state) after it is returned
        phase   which steps this is traced for

        `out` is rescaled by the softmax of step n after P V of step n - 1 is added.
        """
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        start, outs, weights, state = carry
        (out,) = outs
        key_slot, value_slot = self._key_slot(n), self._value_slot(n - 1)
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        self._await_keys(n, prefetch=False)
        if setup.interpret:
            s = self._scores_alone(n)
            setup.slots.release("key", scratch.key_free, key_slot)
            s = self.partial_sums.total(s, n)
            p, rescale, state = self._softmax_with_staged(s, n, step_tile, phase, state)
            (out,) = self._add_values(outs, weights, n - 1)
            return start, (setup.softmax.rescale(out, rescale),), self._weights(p), state

        def products(refs: tuple) -> None:
            """Issues both WGMMAs and computes the softmax of step n while P V of step n - 1 is in flight.

            refs   accumulators of `out` and of S, then Refs to which it writes the results of `_softmax_with_staged`
            """
            acc, acc_s, *others = refs
            setup.ping_pong.wait(self.group)
            self._multiply(acc_s, self._query_operand(), self._transposed_keys(key_slot))
            plgpu.barrier_wait(scratch.value_full.at[value_slot])
            self._multiply(acc, weights, self._values(value_slot))
            setup.ping_pong.signal(self.group)
            self._await_keys(n + 1, prefetch=True)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc_s, wait_n=len(pairs_of(tile.parts))))
            setup.slots.release("key", scratch.key_free, key_slot)
            s = self.partial_sums.total(s, n)
            for ref, value in zip(
                others, jax.tree.leaves(self._softmax_with_staged(s, n, step_tile, phase, state)), strict=True
            ):
                ref[...] = value

        # The operands' registers are settled here: moving them between the two WGMMAs would make the second wait for the first.
        out, weights = lax.optimization_barrier((out, weights))
        zeros = plgpu.layout_cast(jnp.zeros((tile.rows, tile.block_kv), jnp.float32), registers.TILE)
        results, tree = jax.tree.flatten((zeros, setup.softmax.no_rescale, state))
        refs = (accumulator_from(out), accumulator_from(zeros), *results)
        out, _, *results = typing.cast(tuple, pl.run_state(products)(refs))
        p, rescale, state = jax.tree.unflatten(tree, results)
        # P V reads the registers of `weights` until here: those of the next P must be others.
        p = lax.optimization_barrier(p)
        setup.slots.release("value", scratch.value_free, value_slot)
        return start, (setup.softmax.rescale(out, rescale),), self._weights(p), state

    # ----------------------------------------------------------------- parts of a step

    def _key_slot(self, n: Scalar) -> Scalar:
        """The slot of the key ring that holds the keys of step n."""
        return self._slot(n, self.setup.tile.stages)

    def _slot(self, n: Scalar, slots: int) -> Scalar:
        """The slot that step n of this work item uses of a ring of `slots` slots; steps are counted on from those of
        the CTA's earlier items.
        """
        slot = kernel_parts.slot_of(self.first_step + n, slots)
        return kernel_parts.not_hoisted(slot, self.setup.interpret) if slots == 1 else slot

    def _value_slot(self, n: Scalar) -> Scalar:
        """The slot of the value ring that holds the values of step n."""
        return self._slot(n, self.setup.tile.value_stages)

    def _await_keys(self, n: Scalar, prefetch: bool) -> None:
        """Waits for the keys of step n at one of two places: before its own WGMMA (`prefetch` False), or behind those
        of step n - 1 (True).

        Each step calls it at both places; `ForwardTile.prefetch_key_barrier` says which call waits. At the second
        there may be no step n, and then nothing is waited for.
        """
        wait = lambda: plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(n)])
        if self.setup.tile.prefetch_key_barrier and prefetch:
            when(n < self.item.total)(wait)
        elif not self.setup.tile.prefetch_key_barrier and not prefetch:
            wait()

    def _scores_alone(self, n: Scalar) -> jax.Array:
        """Computes Q K^T of step n, [rows, block_kv] float32 without scale, and waits until the WGMMAs have completed. No
        other WGMMA of this warpgroup may be in flight.

        The keys of step n must have arrived, and the warpgroup must have the ping-pong turn. Between issuing the WGMMAs and waiting for
        them, this method ends the turn and, with `prefetch_key_barrier`, waits for the keys of step n + 1. The caller releases
        the key slot.
        """

        def product(acc: Ref) -> jax.Array:
            """Issues the WGMMAs into the accumulator `acc`, ends the turn, waits for them, and returns `acc`'s value."""
            self._multiply(acc, self._query_operand(), self._transposed_keys(self._key_slot(n)))
            self.setup.ping_pong.signal(self.group)
            self._await_keys(n + 1, prefetch=True)
            return acc[...]

        return pl.run_scoped(product, accumulator((self.setup.tile.rows, self.setup.tile.block_kv)))

    @property
    def partial_sums(self) -> PartialSums:
        """What adds the partial Q K^T of the two CTAs of a cluster; with one CTA its `total` gives the tile itself."""
        return PartialSums(self.scratch.exchange, self.group, self.setup.interpret)

    def _query_operand(self) -> tuple[Ref, ...]:
        """The queries as an operand of the WGMMA that is issued next: the Refs of `queries`, or Refs to the same shared memory whose
        addresses the compiler computes anew at each WGMMA.

        With one slot of keys, or columns split over a cluster, the addresses are made anew, because kept in registers they
        would spill (`kernel_parts.not_hoisted`).
        """
        tile = self.setup.tile
        if tile.stages > 1 and tile.ctas == 1 and not tile.float8:
            return self.queries
        slot = kernel_parts.not_hoisted(self.query_slot, self.setup.interpret)
        return slot_parts(self.scratch.query, slot, tile.parts, pl.ds(self.group * tile.rows, tile.rows))

    def _transposed_keys(self, slot: Scalar) -> tuple[Ref, ...]:
        """Refs to the keys in slot `slot` of the key ring, transposed, [D, block_kv] for each part; nothing is moved."""
        return tuple(keys.transpose((1, 0)) for keys in slot_parts(self.scratch.key, slot, self.setup.tile.parts))

    def _values(self, slot: Scalar, columns: object = slice(None)) -> tuple[Ref, ...]:
        """Refs to the values in slot `slot` of the value ring, [block_kv, E] for each part; nothing is moved. Those of float8 lie
        key-major, with their keys in the order of the weights (float8_products.py).

        columns   of float8 values alone: a slice of them
        """
        parts = slot_parts(self.scratch.value, slot, self.setup.tile.parts, columns)
        return tuple(x.transpose((1, 0)) for x in parts) if self.setup.tile.float8 else parts

    def _multiply(self, acc: Ref, left: tuple[Ref, ...] | tuple[jax.Array, ...], right: tuple[Ref, ...]) -> None:
        """Issues the WGMMAs of acc += left @ right for operands in parts, one for each pair of `pairs_of`, and does not wait for them.
        Until the caller has waited, `acc` must not be read, and slots and registers of the operands must not be overwritten.

        acc     accumulator, [rows, columns] float32
        left    the parts of the left operand [rows, k]: all in shared memory (queries), or all in registers (P; not in the simulator)
        right   the parts of the right operand [k, columns] in shared memory; keys are transposed by the caller (`_transposed_keys`)
        """
        for a, b in pairs_of(self.setup.tile.parts):
            plgpu.wgmma(acc, left[a], right[b])  # pyright: ignore[reportArgumentType]  # accumulators have a class of their own

    def _weights(self, p: jax.Array) -> tuple[jax.Array, ...]:
        """The parts of `p`, [rows, block_kv] float32, in the dtype that WGMMA multiplies: one part for inputs of 16 and 8
        bits, two for float32.
        """
        setup = self.setup
        if setup.tile.float8:
            return (float8_products.weights(p, setup.interpret),)
        return thread_tiles.tile_parts(p, part_dtype(setup.plan), setup.tile.parts, setup.interpret)

    def _softmax_with_staged(
        self, s: jax.Array, n: Scalar, step_tile: StepTile, phase: Phase, state: State
    ) -> tuple[jax.Array, Rescale, State]:
        """`softmax` of step n, with the same arguments and result (P, rescaling, state): `s` is Q K^T, `step_tile` the key tile of the
        step, `phase` which steps this is traced for, `state` that before the step. Before it, waits for the step's tile of the staged
        array, reads the tile to registers and releases its slot. Nothing is waited for if no array is staged.
        """
        if step_tile.programs.score is not None:
            score = self._with_staged(step_tile.programs.score, n)
            step_tile = step_tile._replace(programs=step_tile.programs._replace(score=score))
        return self.softmax(s, n, step_tile, phase, state)

    def _with_staged(self, score: TileProgram, n: Scalar) -> TileProgram:
        """The score program with the values of the staged array for step n, read from their slot, which is then
        released; `score` itself if nothing is staged. It waits until the tile is there.
        """
        setup, scratch = self.setup, self.scratch
        if setup.staged is None:
            return score
        slot = kernel_parts.slot_of(self.first_step + n, setup.tile.staged_slots)
        plgpu.barrier_wait(present(scratch.staged_full).at[slot])
        rows = pl.ds(self.group * setup.tile.rows, setup.tile.rows)
        value = memory.load_staged(present(scratch.staged).at[slot, rows], setup.interpret)
        setup.slots.release("staged", scratch.staged_free, slot)
        return score.with_loaded_tile(setup.staged, value)

    def _add_values(self, out: Output, weights: tuple[jax.Array, ...], n: Scalar) -> Output:
        """Computes out + P V of step n, and waits until the WGMMAs have completed. Products of float8 are added to `out` tile by tile, in
        float32, because WGMMA adds them with fewer bits (float8_products.py).

        out       the tiles of the output
        weights   the parts of P, each [rows, block_kv]

        It waits for the values and for the warpgroup's ping-pong turn, and releases the value slot. It does not end the turn.
        """
        setup, scratch = self.setup, self.scratch
        slot = self._value_slot(n)
        plgpu.barrier_wait(scratch.value_full.at[slot])
        setup.ping_pong.wait(self.group)
        made, first = [], 0
        for part in out:
            values = self._values(slot, pl.ds(first, part.shape[1])) if len(out) > 1 else self._values(slot)
            first += part.shape[1]
            if setup.interpret:
                for a, b in pairs_of(setup.tile.parts):
                    part = part + jnp.dot(weights[a].astype(jnp.float32), values[b][...].astype(jnp.float32))
            else:
                product = pl.run_state(lambda acc, values=values: self._multiply(acc, weights, values))
                if setup.tile.float8:
                    zeros = registers.zero_tile((part.shape[0], part.shape[1]))
                    part = part + typing.cast(jax.Array, product(accumulator_from(zeros)))
                else:
                    part = typing.cast(jax.Array, product(accumulator_from(part)))
            made.append(part)
        out = tuple(made)
        setup.slots.release("value", scratch.value_free, slot)
        return out

    # ----------------------------------------------------------------- the end of the tile

    def _release_queries(self) -> Position:
        """Releases the query slot and returns the position of the query tile.

        With the dynamic scheduler the position is read from the mailbox again before the release, so that no register
        holds it during the steps; otherwise it is that of the item.
        """
        setup, scratch = self.setup, self.scratch
        item = self.item
        if setup.tile.dynamic_scheduler:
            item = tile_scheduler.get(present(scratch.mailbox), self.query_slot)[1]
        setup.slots.release("query", scratch.query_free, self.query_slot)
        return Position(item.b, item.h, item.q_tile)

    @property
    def writes_statistics(self) -> Scalar | bool:
        """Whether this CTA writes lse and row maxima: both CTAs of a cluster know them, and the first writes them."""
        return first_cta(self.scratch.exchange)

    def _finish(self, row_term: jax.Array | None, out: Output, state: State, position: Position) -> None:
        """Divides `out` by the softmax denominator, and writes out, lse and, if wanted, row maxima to global memory.

        row_term   [rows], what the softmax left out of the scores of each row; None: nothing
        out        the tiles of the output, the sum of P V relative to the softmax reference
        state      after the last step
        position   of the query tile
        """
        b, h, q_tile = position
        q_start = q_tile * self.setup.tile.block_q + self.group * self.setup.tile.rows
        tile = self.setup.tile
        if tile.sum_columns:
            values = out[-1].shape[1] - tile.sum_columns
            sums = out[-1][:, values:].max(axis=1)
            state = state._replace(total=thread_tiles.shared_by_lanes(sums, self.setup.interpret))
            out = (*out[:-1], out[-1][:, :values])
        divisor = self.write_statistics(row_term, state, position, q_start)
        out = tuple(x * registers.broadcast_vector(divisor, "row", x.shape) for x in out)
        own = lambda x: rows_of(x, self.setup.plan.layout, b, h, q_start, tile.rows, tile.value_dim)
        targets = [own(x) for x in (self.outputs.out, self.outputs.rounding) if x is not None]
        self._write(out, targets)

    def _write(self, out: Output, targets: Sequence[Ref]) -> None:
        """Copies `out` to global memory, in parts of `out_columns` columns, through this warpgroup's slots in shared
        memory (with `out_over_queries` through the memory of its queries). The last copies are started and not waited
        for.

        out       the tiles of the output, with the columns of the values
        targets   Refs to these rows in global memory: of the result `out` and, if the plan wants it, of what rounding
                  took from it, `rounding`; both in the plan's dtype

        What rounding took is computed part by part, because a whole tile of it beside `out` spills registers.
        """
        setup, tile = self.setup, self.setup.tile
        starts = range(0, tile.value_dim, tile.out_columns)
        parts = [(start, which) for start in starts for which in range(len(targets))]
        step = math.gcd(tile.out_columns, 64) if tile.out_over_queries else tile.out_columns
        for n, (start, which) in enumerate(parts):
            slot = n % tile.out_slots
            # With an uneven number of parts, TMA may still read the last part of the tile before from the first slot.
            others = 0 if n == 0 and len(parts) % tile.out_slots else tile.out_slots - 1
            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
            place = self.queries[0] if tile.out_over_queries else present(self.scratch.out).at[self.group, slot]
            for first in range(0, tile.out_columns, step):
                tile_of, at = divmod(start + first, out[0].shape[1])
                part = out[tile_of][:, at : at + step]
                if which:
                    part = part - thread_tiles.rounded_tile(part, setup.plan.dtype, setup.interpret)
                if tile.out_over_queries:
                    place[:, first : first + step] = part.astype(setup.plan.dtype)
                else:
                    present(self.scratch.out)[self.group, slot] = part.astype(setup.plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place, targets[which].at[:, start : start + tile.out_columns])
