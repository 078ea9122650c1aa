"""A consumer of the forward kernel: one warpgroup that computes attention for 64 of the query tile's rows.

    S = Q K^T           WGMMA, from shared memory
    score, mask         registers (programs/tile_programs.py); without mods only the scale, as part of the exponential
    P, rescale          online_softmax.py, through rows.py
    out += P V          WGMMA, P from registers

A step is one key tile. Steps of a work item (one query tile with the key tiles that it visits, tile_scheduler.py) are
numbered from 0, `n` below; those that need no mask come first. Steps come in two orders:

    staggered (`ForwardTile.overlap`)   issue S of step n and P V of step n - 1; softmax of n while P V is in flight
    whole                               S, softmax, P V of a step in turn; meanwhile the other consumer's WGMMAs run

Unmasked and masked steps have a loop each, because a branch between in-flight WGMMAs forces a wait; `Phase` says which
steps a function is traced for. The producer (hopper_producer.py) fills rings of slots in shared memory with keys,
values and tiles of a staged array (programs/staging.py), in the order of the steps over all work items of the CTA. A
consumer waits until a slot is full and releases it when it has read it.
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

from flexjax.backends.mosaic_gpu.forward import hopper_float8, tile_scheduler
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardScratch, ForwardTile
from flexjax.backends.mosaic_gpu.forward.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.forward.rows import Phase, Position, QueryRows, StepTile, programs_at_rows
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, HopperSetup, present
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.machine import kernel_parts, memory, registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.float_parts import pairs_of, part_dtype
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    Ref,
    Scalar,
    accumulator,
    accumulator_from,
    fence_shared,
    i32,
    rows_of,
    slot_parts,
)
from flexjax.backends.mosaic_gpu.machine.partial_sums import PartialSums, first_cta
from flexjax.backends.mosaic_gpu.machine.simulator import device_op, ordered
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram

f32 = np.float32
Output = tuple[jax.Array, ...]
"""Tiles of the output side by side, [rows, columns] float32; their columns are `ForwardTile.out_widths`."""


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA, with Refs to global memory (inputs, outputs) and to the CTA's shared memory."""

    setup: HopperSetup
    inputs: ForwardInputs[Ref]
    outputs: ForwardOutputs[Ref]
    scratch: ForwardScratch[Ref]

    def run(self) -> None:
        """Computes this warpgroup's rows of every work item of the CTA, and writes the results."""
        tile, slots, scratch = self.setup.tile, self.setup.slots, self.scratch
        if tile.groups > 1:
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
        group = lax.axis_index("wg")
        if tile.sum_columns:
            when(group == 0)(self._write_ones)
        # The producer waits for a release before each use of a slot, the first too.
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
            self.query_tile(item, turn, first_step, group).compute()
            return first_step + item.total

        self._each_item(compute_item)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def query_tile(self, item: WorkItem, turn: Scalar, first_step: Scalar, group: Scalar) -> "QueryTile":
        return QueryTile.of(self, item, turn, first_step, group)

    def _write_ones(self) -> None:
        """Writes the columns of ones beside the float8 values to every slot; no copy overwrites them."""
        tile = self.setup.tile
        for slot in range(tile.value_stages):
            columns = self.scratch.value.at[slot, pl.ds(tile.value_dim, tile.sum_columns)]
            hopper_float8.write_ones(columns)
        fence_shared()

    def _each_item(self, compute_item: Callable[[WorkItem, Scalar, Scalar], Scalar]) -> None:
        """Calls `compute_item`(item, number in this CTA, first step) -> next first step, on each work item."""
        scheduler, tile, mask_rows = self.setup.scheduler, self.setup.tile, self.inputs.mask_rows
        if not tile.dynamic_scheduler:
            own = lambda turn, step: compute_item(scheduler.item(mask_rows, scheduler.number(turn)), turn, step)
            lax.fori_loop(i32(0), scheduler.turns(), own, i32(0))
            return

        def receive(turn: Scalar) -> tuple[Scalar, WorkItem]:
            """(whether there is a work item number `turn`, the item), from the mailbox."""
            slot = kernel_parts.slot_of(turn, tile.query_slots)
            plgpu.barrier_wait(self.scratch.query_full.at[slot])
            return tile_scheduler.get(present(self.scratch.mailbox), slot)

        def one(state: tuple[Scalar, WorkItem, Scalar, Scalar]) -> tuple[Scalar, WorkItem, Scalar, Scalar]:
            _, item, turn, step = state
            step = compute_item(item, turn, step)
            return *receive(turn + 1), turn + 1, step

        more, item = receive(i32(0))
        lax.while_loop(lambda state: state[0], one, (more, item, i32(0), i32(0)))


@dataclasses.dataclass(frozen=True)
class QueryTile(QueryRows[ForwardTile]):
    """The rows of one work item that one consumer computes; in the methods `n` is the number of a step in the item."""

    setup: HopperSetup
    scratch: ForwardScratch[Ref]
    turn: Scalar  # number of the work item in this CTA
    first_step: Scalar  # of its first step over the items of this CTA: the position in the rings of keys and values
    group: Scalar  # number of the warpgroup among the consumers
    query_slot: Scalar  # slot of the queries in their ring
    queries: tuple[Ref, ...]  # [rows, D] for each part (machine/float_parts.py)

    @classmethod
    def of(cls, consumer: Consumer, item: WorkItem, turn: Scalar, first_step: Scalar, group: Scalar) -> "QueryTile":
        """The rows of `item` for warpgroup `group`, once their queries have arrived."""
        setup, inputs, scratch, tile = consumer.setup, consumer.inputs, consumer.scratch, consumer.setup.tile
        q_start = item.q_tile * tile.block_q + group * tile.rows

        programs = programs_at_rows(setup, inputs, item, q_start)
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        queries = slot_parts(scratch.query, slot, tile.parts, pl.ds(group * tile.rows, tile.rows))
        # Consumer._each_item has waited for the mailbox, which comes with the queries.
        if not tile.dynamic_scheduler:
            plgpu.barrier_wait(scratch.query_full.at[slot])
        return cls(setup, inputs, consumer.outputs, item, programs, scratch, turn, first_step, group, slot, queries)

    def compute(self) -> None:
        """Runs all steps of the work item, which may have none, and writes its results."""
        setup, tile = self.setup, self.setup.tile
        out = tuple(registers.zero_tile((tile.rows, columns)) for columns in tile.out_widths)
        steps = self._staggered_steps if tile.overlap else self._whole_steps

        def no_steps(out: Output) -> tuple[Output, State, Position]:
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
        """Runs every step in the whole order; returns (sum of P V, not yet divided by the rowsum, state, position)."""
        state = self.setup.softmax.start
        if self.setup.tile.prefetch_key_barrier:  # otherwise each step waits for its own keys
            plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(i32(0))])
        out, state = self._loops(self._whole_step, 0, (out, state))
        return out, state, self._release_queries()

    def _staggered_steps(self, out: Output) -> tuple[Output, State, Position]:
        """Runs every step in the staggered order; returns the same as `_whole_steps`."""
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
        """Runs `step` from step `begin` on, in a loop over unmasked and one over masked steps.

        step    (step number, (first key of its tile, *carry), phase) -> (first key of the next step's tile, *carry)
        """
        if self.setup.scheduler.in_order and self.setup.has_masked_steps:
            return self._loops_in_order(step, begin, carry)
        first, masked = i32(begin), lax.max(self.item.unmasked, i32(begin))
        starts = [self.start(n, phase) for n, phase in ((first, Phase.UNMASKED), (masked, Phase.MASKED))]
        carry = lax.fori_loop(first, masked, functools.partial(step, phase=Phase.UNMASKED), (starts[0], *carry))
        if self.setup.has_masked_steps:
            carry = (starts[1], *carry[1:])
            carry = lax.fori_loop(masked, self.item.total, functools.partial(step, phase=Phase.MASKED), carry)
        return carry[1:]

    def _loops_in_order(self, step: Callable[..., tuple], begin: int, carry: tuple) -> tuple:
        """`_loops` for steps whose unmasked and masked ones come in runs, by a pair of loops for each pair of runs."""
        scheduler, rows, item = self.setup.scheduler, self.inputs.mask_rows, self.item

        def two_runs(state: tuple) -> tuple:
            n, *carry = state
            for phase in (Phase.UNMASKED, Phase.MASKED):
                end = scheduler.run_end(rows, item, n, phase is Phase.MASKED)
                carry = (self.start(n, phase), *carry)
                _, *carry = lax.fori_loop(n, end, functools.partial(step, phase=phase), carry)
                n = end
            return n, *carry

        return lax.while_loop(lambda state: state[0] < item.total, two_runs, (i32(begin), *carry))[1:]

    def _whole_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S, softmax and P V of step n; carry: (first key of the step's tile, output, softmax state)."""
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
        out, weights, state = ordered((out, weights, state))
        return start, self._add_values(out, weights, n), state

    @device_op
    def _staggered_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S and softmax of step n beside P V of step n - 1; carry: (first key, output, parts of P, state)."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        start, outs, weights, state = carry
        (out,) = outs
        key_slot, value_slot = self._key_slot(n), self._value_slot(n - 1)
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        self._await_keys(n, prefetch=False)

        def products(refs: tuple) -> None:
            """Issues both WGMMAs; refs: accumulators of `out` and S, then what `_softmax_with_staged` returns."""
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

        # The operands' registers are settled here: moves between the two WGMMAs would make the second wait.
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
        return self._slot(n, self.setup.tile.stages)

    def _slot(self, n: Scalar, slots: int) -> Scalar:
        """The slot of step n, counted over the CTA's items, in a ring of `slots` slots."""
        slot = kernel_parts.slot_of(self.first_step + n, slots)
        return kernel_parts.not_hoisted(slot) if slots == 1 else slot

    def _value_slot(self, n: Scalar) -> Scalar:
        return self._slot(n, self.setup.tile.value_stages)

    def _await_keys(self, n: Scalar, prefetch: bool) -> None:
        """Waits for the keys of step n before its WGMMA, or behind the WGMMA of the step before (`prefetch`)."""
        wait = lambda: plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(n)])
        if self.setup.tile.prefetch_key_barrier and prefetch:
            when(n < self.item.total)(wait)
        elif not self.setup.tile.prefetch_key_barrier and not prefetch:
            wait()

    def _scores_alone(self, n: Scalar) -> jax.Array:
        """Q K^T of step n, [rows, block_kv] float32 without scale; ends the turn. The caller releases the key slot."""

        # the keys have arrived, and no other WGMMA of this warpgroup is in flight
        def product(acc: Ref) -> jax.Array:
            self._multiply(acc, self._query_operand(), self._transposed_keys(self._key_slot(n)))
            self.setup.ping_pong.signal(self.group)
            self._await_keys(n + 1, prefetch=True)
            return acc[...]

        return pl.run_scoped(product, accumulator((self.setup.tile.rows, self.setup.tile.block_kv)))

    @property
    def partial_sums(self) -> PartialSums:
        """Adds the partial Q K^T of the two CTAs of a cluster; with one CTA its `total` gives the tile itself."""
        return PartialSums(self.scratch.exchange, self.group)

    def _query_operand(self) -> tuple[Ref, ...]:
        """Refs to the queries, as the operand of the WGMMA that is issued next."""
        tile = self.setup.tile
        if tile.stages > 1 and tile.ctas == 1 and not tile.float8:
            return self.queries
        # The compiler computes the addresses again at each WGMMA, because kept in registers they would spill.
        slot = kernel_parts.not_hoisted(self.query_slot)
        return slot_parts(self.scratch.query, slot, tile.parts, pl.ds(self.group * tile.rows, tile.rows))

    def _transposed_keys(self, slot: Scalar) -> tuple[Ref, ...]:
        """Refs to the keys in a slot, transposed, [D, block_kv] for each part; nothing is moved."""
        return tuple(keys.transpose((1, 0)) for keys in slot_parts(self.scratch.key, slot, self.setup.tile.parts))

    def _values(self, slot: Scalar, columns: object = slice(None)) -> tuple[Ref, ...]:
        """Refs to the values (or a slice of float8 values) in a slot, [block_kv, E] for each part."""
        parts = slot_parts(self.scratch.value, slot, self.setup.tile.parts, columns)
        # Float8 values lie key-major (hopper_float8.py).
        return tuple(x.transpose((1, 0)) for x in parts) if self.setup.tile.float8 else parts

    def _multiply(self, acc: Ref, left: tuple[Ref, ...] | tuple[jax.Array, ...], right: tuple[Ref, ...]) -> None:
        """Issues the WGMMAs of acc += left @ right, for each pair of parts, and does not wait for them."""
        for a, b in pairs_of(self.setup.tile.parts):
            # Accumulators have a class of their own.
            plgpu.wgmma(acc, left[a], right[b])  # pyright: ignore[reportArgumentType]

    def _weights(self, p: jax.Array) -> tuple[jax.Array, ...]:
        """The parts of `p`, [rows, block_kv] float32, in the dtype that WGMMA multiplies."""
        setup = self.setup
        if setup.tile.float8:
            return (hopper_float8.weights(p),)
        return thread_tiles.tile_parts(p, part_dtype(setup.plan), setup.tile.parts)

    def _softmax_with_staged(
        self, s: jax.Array, n: Scalar, step_tile: StepTile, phase: Phase, state: State
    ) -> tuple[jax.Array, Rescale, State]:
        """`softmax` of step n, after the step's tile of the staged array, if there is one, is in registers."""
        if step_tile.programs.score is not None:
            score = self._with_staged(step_tile.programs.score, n)
            step_tile = step_tile._replace(programs=step_tile.programs._replace(score=score))
        return self.softmax(s, n, step_tile, phase, state)

    def _with_staged(self, score: TileProgram, n: Scalar) -> TileProgram:
        """The score program with the values of the staged array for step n; waits for their slot and releases it."""
        setup, scratch = self.setup, self.scratch
        if setup.staged is None:
            return score
        slot = kernel_parts.slot_of(self.first_step + n, setup.tile.staged_slots)
        plgpu.barrier_wait(present(scratch.staged_full).at[slot])
        rows = pl.ds(self.group * setup.tile.rows, setup.tile.rows)
        value = memory.load_staged(present(scratch.staged).at[slot, rows])
        setup.slots.release("staged", scratch.staged_free, slot)
        return score.with_loaded_tile(setup.staged, value)

    def _add_values(self, out: Output, weights: tuple[jax.Array, ...], n: Scalar) -> Output:
        """out + P V of step n, complete; waits for the values and the ping-pong turn, and releases the value slot."""
        setup, scratch = self.setup, self.scratch
        slot = self._value_slot(n)
        plgpu.barrier_wait(scratch.value_full.at[slot])
        setup.ping_pong.wait(self.group)
        made, first = [], 0
        for part in out:
            values = self._values(slot, pl.ds(first, part.shape[1])) if len(out) > 1 else self._values(slot)
            first += part.shape[1]
            made.append(self._added(part, weights, values))
        out = tuple(made)
        setup.slots.release("value", scratch.value_free, slot)
        return out

    @device_op
    def _added(self, out: jax.Array, weights: tuple[jax.Array, ...], values: tuple[Ref, ...]) -> jax.Array:
        """`out` plus the product of the parts of P and of the values."""
        product = pl.run_state(lambda acc: self._multiply(acc, weights, values))
        # WGMMA adds float8 with fewer bits, so the products of the tiles are added in float32 (hopper_float8.py).
        if self.setup.tile.float8:
            zeros = registers.zero_tile((out.shape[0], out.shape[1]))
            return out + typing.cast(jax.Array, product(accumulator_from(zeros)))
        return typing.cast(jax.Array, product(accumulator_from(out)))

    # ----------------------------------------------------------------- the end of the tile

    def _release_queries(self) -> Position:
        """Releases the query slot and returns the position of the query tile."""
        setup, scratch = self.setup, self.scratch
        item = self.item
        # Read again from the mailbox, so that no register holds the position during the steps.
        if setup.tile.dynamic_scheduler:
            item = tile_scheduler.get(present(scratch.mailbox), self.query_slot)[1]
        setup.slots.release("query", scratch.query_free, self.query_slot)
        return Position(item.b, item.h, item.q_tile)

    @property
    def writes_statistics(self) -> Scalar | bool:
        """Whether this CTA writes lse and row maxima, which both CTAs of a cluster know."""
        return first_cta(self.scratch.exchange)

    def _finish(self, row_term: jax.Array | None, out: Output, state: State, position: Position) -> None:
        """Divides `out` by the rowsum, and writes the results; the softmax left `row_term` out of the scores."""
        b, h, q_tile = position
        q_start = q_tile * self.setup.tile.block_q + self.group * self.setup.tile.rows
        tile = self.setup.tile
        if tile.sum_columns:
            values = out[-1].shape[1] - tile.sum_columns
            sums = out[-1][:, values:].max(axis=1)
            state = state._replace(total=thread_tiles.shared_by_lanes(sums))
            out = (*out[:-1], out[-1][:, :values])
        divisor = self.write_statistics(row_term, state, position, q_start)
        out = tuple(x * registers.broadcast_vector(divisor, "row", x.shape) for x in out)
        own = lambda x: rows_of(x, self.setup.plan.layout, b, h, q_start, tile.rows, tile.value_dim)
        targets = [own(x) for x in (self.outputs.out, self.outputs.rounding) if x is not None]
        self._write(out, targets)

    def _write(self, out: Output, targets: Sequence[Ref]) -> None:
        """Copies `out`, and what rounding takes from it, to `targets` through shared memory; does not wait."""
        setup, tile = self.setup, self.setup.tile
        starts = range(0, tile.value_dim, tile.out_columns)
        parts = [(start, which) for start in starts for which in range(len(targets))]
        # Part by part, because what rounding took from a whole tile, beside `out`, spills registers.
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
                    part = part - thread_tiles.rounded_tile(part, setup.plan.dtype)
                if tile.out_over_queries:
                    place[:, first : first + step] = part.astype(setup.plan.dtype)
                else:
                    present(self.scratch.out)[self.group, slot] = part.astype(setup.plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place, targets[which].at[:, start : start + tile.out_columns])
