"""A consumer of the forward kernel: one warpgroup that computes attention for 64 of the query tile's rows.

    S = Q K^T           WGMMA, from shared memory
    score, mask         registers (tile_programs.py); the identity costs nothing, its scale is part of the exponential
    P, rescale          online_softmax.py
    out += P V          WGMMA, P from registers

A step is one key tile. Steps come in two orders:

    staggered (`ForwardTile.overlap`)   issue S of step n and P V of step n - 1 together; softmax of n while P V is in flight
    whole                               S, softmax and P V of one step after the other; the other consumer's WGMMAs run meanwhile

Steps that need no mask come first and have a loop of their own, because a branch between in-flight WGMMAs forces a wait. `Phase`
says which steps a function is traced for.
"""

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import kernel_parts, memory, registers, thread_tiles, tile_scheduler
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs, Outputs, present
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardScratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, accumulator, accumulator_from, i32, rows_of
from flexjax.backends.mosaic_gpu.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.tile_programs import TileOrigin, TileProgram
from flexjax.backends.mosaic_gpu.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.tile_values import Scaled
from flexjax.ir import program as ir

f32 = np.float32


class Phase(enum.Enum):
    """Which steps of a work item a function is traced for."""

    UNMASKED = "unmasked"
    MASKED = "masked"
    FIRST = "first"  # step 0, which may be either
    """Step 0 of the staggered order, before its loops: masked or not, by its number."""


class Programs(typing.NamedTuple):
    """The traced programs of the plan at the rows of one query tile; None for those that the plan lacks."""

    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None


class StepTile(typing.NamedTuple):
    """The key tile of one step: its first key, and the programs with the vectors over its keys read."""

    start: Scalar | None
    programs: Programs


class Position(typing.NamedTuple):
    """Where a query tile lies: batch entry, head, number of the query tile."""

    b: Scalar
    h: Scalar
    q_tile: Scalar


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer warpgroup of a CTA."""

    setup: ForwardSetup
    inputs: Inputs[Ref]
    outputs: Outputs[Ref]
    scratch: ForwardScratch[Ref]

    def run(self) -> None:
        """Computes its rows of every work item of this CTA."""
        tile, slots, scratch = self.setup.tile, self.setup.slots, self.scratch
        if tile.groups > 1:
            plgpu.set_max_registers(tile.consumer_registers, action="increase")
        group = lax.axis_index("wg")
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
            QueryTile.of(self, item, turn, first_step, group).compute()
            return first_step + item.total

        self._each_item(compute_item)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _each_item(self, compute_item: Callable[[WorkItem, Scalar, Scalar], Scalar]) -> None:
        """Calls `compute_item` on each work item of this CTA, as `Producer._each_item` does.

        With the dynamic scheduler an item and its queries come together, so this waits for the query slot; otherwise the item does.
        """
        scheduler, tile, mask_rows = self.setup.scheduler, self.setup.tile, self.inputs.mask_rows
        if not tile.dynamic_scheduler:
            own = lambda turn, step: compute_item(scheduler.item(mask_rows, scheduler.number(turn)), turn, step)
            lax.fori_loop(i32(0), scheduler.turns(), own, i32(0))
            return

        def receive(turn: Scalar) -> tuple[Scalar, WorkItem]:
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
class QueryTile:
    """The rows of one work item that one consumer computes.

    turn         number of the work item in this CTA
    first_step   number of its first step, counted over the items of this CTA: the position in the rings of keys and values
    group        the warpgroup
    programs     of the plan, at these rows
    query_slot   slot of the queries in their ring
    queries      the rows in shared memory
    """

    consumer: Consumer
    item: WorkItem
    turn: Scalar
    first_step: Scalar
    group: Scalar
    programs: Programs
    query_slot: Scalar
    queries: Ref

    @classmethod
    def of(cls, consumer: Consumer, item: WorkItem, turn: Scalar, first_step: Scalar, group: Scalar) -> "QueryTile":
        """Computes the row vectors of the programs, and waits for the queries unless `_each_item` has done so."""
        setup, inputs, scratch, tile = consumer.setup, consumer.inputs, consumer.scratch, consumer.setup.tile
        q_start = item.q_tile * tile.block_q + group * tile.rows

        def at_rows(program: ir.Program | None, refs: tuple[Ref, ...]) -> TileProgram | None:
            if program is None:
                return None
            return TileProgram(
                program,
                refs,
                (tile.rows, tile.block_kv),
                batch=item.b,
                head=item.h,
                edge=(setup.plan.q_len, setup.plan.kv_len) if setup.may_overhang else None,
                interpret=setup.interpret,
                origin=TileOrigin.of(setup.plan, inputs.origin),
            ).at_rows(q_start)

        programs = Programs(
            at_rows(setup.plan.score, inputs.score),
            at_rows(setup.plan.mask, inputs.mask),
            at_rows(setup.plan.dropout, inputs.dropout),
        )
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        queries = scratch.query.at[slot, pl.ds(group * tile.rows, tile.rows)]
        if not tile.dynamic_scheduler:
            plgpu.barrier_wait(scratch.query_full.at[slot])
        return cls(consumer, item, turn, first_step, group, programs, slot, queries)

    @property
    def setup(self) -> ForwardSetup:
        return self.consumer.setup

    @property
    def scratch(self) -> ForwardScratch[Ref]:
        return self.consumer.scratch

    def compute(self) -> None:
        """All steps of the item, then its results."""
        setup, tile = self.setup, self.setup.tile
        out = plgpu.layout_cast(jnp.zeros((tile.rows, tile.value_dim), jnp.float32), registers.TILE)
        steps = self._staggered_steps if tile.overlap else self._whole_steps

        def no_steps(out: jax.Array) -> tuple[jax.Array, State, Position]:
            return out, setup.softmax.start, self._release_queries()

        if not tile.overlap:
            setup.ping_pong.begin_tile(self.group, self.turn == 0)
        if setup.plan.blocks is None:
            found = steps(out)
        else:
            found = cond(self.item.total > 0, lambda: steps(out), lambda: no_steps(out))
        if not tile.overlap:
            setup.ping_pong.end_tile(self.group)
        row_part = None
        if self.programs.score is not None and setup.reference is None and not setup.large_scores:
            row_part = self.programs.score.row_part()
        self._finish(row_part, *found)

    # ----------------------------------------------------------------- the two orders of steps

    def _whole_steps(self, out: jax.Array) -> tuple[jax.Array, State, Position]:
        """Every step in the whole order: (out before its division, softmax state, position of the tile)."""
        state = self.setup.softmax.start
        if self.setup.tile.prefetch_key_barrier:  # otherwise each step waits for its own keys
            plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(i32(0))])
        out, state = self._loops(self._whole_step, 0, (out, state))
        return out, state, self._release_queries()

    def _staggered_steps(self, out: jax.Array) -> tuple[jax.Array, State, Position]:
        """Every step in the staggered order: the scores of step 0 before the loop, P V of the last step after it."""
        setup, item = self.setup, self.item
        state = setup.softmax.start
        plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(i32(0))])
        at = self._step_tile(self._start(i32(0), Phase.FIRST), Phase.FIRST)
        setup.ping_pong.wait(self.group)
        s = self._scores_alone(i32(0))
        setup.slots.release("key", self.scratch.key_free, self._key_slot(i32(0)))
        p, _, state = self._softmax(s, i32(0), at, Phase.FIRST, state)
        out, weights, state = self._loops(self._staggered_step, 1, (out, p.astype(setup.plan.dtype), state))
        position = self._release_queries()
        out = self._add_values(out, weights, item.total - 1)
        setup.ping_pong.signal(self.group)
        return out, state, position

    def _loops(self, step: Callable[..., tuple], begin: int, carry: tuple) -> tuple:
        """Runs `step` from step number `begin` on, in a loop over unmasked and one over masked steps; the last carry.

        step   (step number, (first key of its tile, *carry), phase) -> the same for the next step
        """
        first, masked = i32(begin), lax.max(self.item.unmasked, i32(begin))
        starts = [self._start(n, phase) for n, phase in ((first, Phase.UNMASKED), (masked, Phase.MASKED))]
        carry = lax.fori_loop(first, masked, functools.partial(step, phase=Phase.UNMASKED), (starts[0], *carry))
        if self.setup.has_masked_steps:
            carry = (starts[1], *carry[1:])
            carry = lax.fori_loop(masked, self.item.total, functools.partial(step, phase=Phase.MASKED), carry)
        return carry[1:]

    def _whole_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S, softmax and P V of step n."""
        setup = self.setup
        start, out, state = carry
        at = self._step_tile(start, phase)
        start = self._next_start(n, phase)
        self._await_keys(n, prefetch=False)
        s = self._scores_alone(n)
        setup.slots.release("key", self.scratch.key_free, self._key_slot(n))
        p, rescale, state = self._softmax(s, n, at, phase, state)
        out = setup.softmax.rescale(out, rescale)
        weights = p.astype(setup.plan.dtype)
        if not setup.interpret:
            out, weights, state = lax.optimization_barrier((out, weights, state))
        return start, self._add_values(out, weights, n), state

    def _staggered_step(self, n: Scalar, carry: tuple, phase: Phase) -> tuple:
        """S and softmax of step n, P V of step n - 1, whose P is `weights`."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        start, out, weights, state = carry
        key_slot, value_slot = self._key_slot(n), self._value_slot(n - 1)
        at = self._step_tile(start, phase)
        start = self._next_start(n, phase)
        self._await_keys(n, prefetch=False)
        if setup.interpret:
            s = self._scores_alone(n)
            setup.slots.release("key", scratch.key_free, key_slot)
            p, rescale, state = self._softmax(s, n, at, phase, state)
            out = self._add_values(out, weights, n - 1)
            return start, setup.softmax.rescale(out, rescale), p.astype(setup.plan.dtype), state

        def products(refs: tuple) -> None:
            """Issues both WGMMAs and computes the softmax while the second is in flight; results go to `others`."""
            acc, acc_s, *others = refs
            setup.ping_pong.wait(self.group)
            plgpu.wgmma(acc_s, self.queries, scratch.key.at[key_slot].transpose((1, 0)))
            plgpu.barrier_wait(scratch.value_full.at[value_slot])
            plgpu.wgmma(acc, weights, scratch.value.at[value_slot])
            setup.ping_pong.signal(self.group)
            self._await_keys(n + 1, prefetch=True)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc_s, wait_n=1))
            setup.slots.release("key", scratch.key_free, key_slot)
            for ref, value in zip(others, jax.tree.leaves(self._softmax(s, n, at, phase, state)), strict=True):
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
        return start, setup.softmax.rescale(out, rescale), p.astype(setup.plan.dtype), state

    # ----------------------------------------------------------------- parts of a step

    def _key_slot(self, n: Scalar) -> Scalar:
        return kernel_parts.slot_of(self.first_step + n, self.setup.tile.stages)

    def _value_slot(self, n: Scalar) -> Scalar:
        return kernel_parts.slot_of(self.first_step + n, self.setup.tile.value_stages)

    def _await_keys(self, n: Scalar, prefetch: bool) -> None:
        """Waits for the keys of step n at one of two places: before its own WGMMA, or (`prefetch`) behind those of step n - 1.

        `ForwardTile.prefetch_key_barrier` says which of the two calls waits. At the second there may be no step n.
        """
        wait = lambda: plgpu.barrier_wait(self.scratch.key_full.at[self._key_slot(n)])
        if self.setup.tile.prefetch_key_barrier and prefetch:
            when(n < self.item.total)(wait)
        elif not self.setup.tile.prefetch_key_barrier and not prefetch:
            wait()

    def _scores_alone(self, n: Scalar) -> jax.Array:
        """Q K^T of step n, [rows, block_kv] float32, with no other product of this warpgroup in flight."""

        def product(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, self.queries, self.scratch.key.at[self._key_slot(n)].transpose((1, 0)))  # pyright: ignore[reportArgumentType]  # accumulators have a class of their own
            self.setup.ping_pong.signal(self.group)
            self._await_keys(n + 1, prefetch=True)
            return acc[...]

        return pl.run_scoped(product, accumulator((self.setup.tile.rows, self.setup.tile.block_kv)))

    def _softmax(
        self, s: jax.Array, n: Scalar, at: StepTile, phase: Phase, state: State
    ) -> tuple[jax.Array, Rescale, State]:
        """From Q K^T of step n: the weights of the values (dropout included), the rescaling, the softmax state after it."""
        if at.programs.score is not None:
            score = self._with_staged(at.programs.score, n)
            at = at._replace(programs=at.programs._replace(score=score))
        p, rescale, state = self.setup.softmax.step(self._scores(s, n, at, phase), state)
        if at.programs.dropout is not None:
            p = p * at.programs.dropout.tile(p)[0]
        return p, rescale, state

    def _with_staged(self, score: TileProgram, n: Scalar) -> TileProgram:
        """The score program with the staged tile of step n read from its slot, which is released."""
        setup, scratch = self.setup, self.scratch
        if setup.staged is None:
            return score
        slot = kernel_parts.slot_of(self.first_step + n, setup.tile.staged_slots)
        plgpu.barrier_wait(present(scratch.staged_full).at[slot])
        rows = pl.ds(self.group * setup.tile.rows, setup.tile.rows)
        value = memory.load_staged(present(scratch.staged).at[slot, rows], setup.interpret)
        setup.slots.release("staged", scratch.staged_free, slot)
        return score.with_loaded_tile(setup.staged, value)

    def _scores(self, s: jax.Array, n: Scalar, at: StepTile, phase: Phase) -> Scaled:
        """The scores of step n: the score program applied to `s`, the step's Q K^T, and -inf where masked or past the last key.

        at      the key tile of the step
        phase   Phase.UNMASKED leaves out the mask and the check of the last key

        The scale, and parts of the score program that are cheaper to apply later, are fields of Scaled beside its tile, for
        the softmax to apply. With large scores, and with a scale that is not positive, the tile holds the whole score.
        """
        setup, plan, tile = self.setup, self.setup.plan, self.setup.tile
        scores = Scaled(s, plan.scale)
        if at.programs.score is not None and setup.large_scores:
            (s,) = at.programs.score.tile(s, plan.scale)
            scores = Scaled(s, 1.0)
        elif at.programs.score is not None:
            scores = at.programs.score.scaled_tile(s, plan.scale, along=True)
            if scores.along is not None:
                slope = scores.along / f32(scores.factor)
                scores = scores._replace(tile=thread_tiles.add_period_slope(scores.tile, slope, setup.interpret))
        elif plan.scale <= 0:
            scores = Scaled(s * f32(plan.scale), 1.0)
        if phase is Phase.UNMASKED or not setup.has_masked_steps:
            return scores
        s = scores.tile
        if at.programs.mask is not None:
            (on,) = at.programs.mask.tile()
            if phase is Phase.FIRST or setup.full_blocks_may_overhang:  # the step may be of the full list
                on = on | registers.splat(n < self.item.full, "tile", s.shape, setup.interpret)
            s = jnp.where(on, s, f32(-math.inf))
        if setup.keys_may_overhang:
            assert at.start is not None
            inside = registers.column_iota(tile.block_kv) < i32(plan.kv_len) - at.start
            s = jnp.where(registers.stretch(inside, "column", s.shape), s, f32(-math.inf))
        return scores._replace(tile=s)

    def _add_values(self, out: jax.Array, weights: jax.Array, n: Scalar) -> jax.Array:
        """out + P V of step n, [rows, value dim] float32; waits for the values and for the turn, and releases the value slot."""
        setup, scratch = self.setup, self.scratch
        slot = self._value_slot(n)
        plgpu.barrier_wait(scratch.value_full.at[slot])
        setup.ping_pong.wait(self.group)
        values = scratch.value.at[slot]
        if setup.interpret:
            out = out + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        else:
            product = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))
            out = typing.cast(jax.Array, product(accumulator_from(out)))
        setup.slots.release("value", scratch.value_free, slot)
        return out

    # ----------------------------------------------------------------- the key tile of a step

    def _needs_start(self, phase: Phase) -> bool:
        """Whether anything in a step of the phase depends on which keys it visits."""
        masked = phase is not Phase.UNMASKED and self.setup.has_masked_steps
        return masked or self.programs.score is not None or self.programs.dropout is not None

    def _start(self, n: Scalar, phase: Phase) -> Scalar:
        """First key of the tile of step n; 0 where nothing depends on it. Past the last step of the phase: some legal key."""
        if not self._needs_start(phase):
            return i32(0)
        masked = None if self.setup.full_blocks_may_overhang else False
        in_full = {Phase.UNMASKED: True, Phase.MASKED: masked, Phase.FIRST: None}[phase]
        return self.setup.scheduler.kv_start(self.consumer.inputs.mask_rows, self.item, n, in_full)

    def _next_start(self, n: Scalar, phase: Phase) -> Scalar:
        """First key of the tile after step n, read a step ahead so that its address is known before the WGMMAs are issued."""
        return self._start(lax.min(n + 1, self.item.total - 1), phase)

    def _step_tile(self, start: Scalar, phase: Phase) -> StepTile:
        """The key tile that begins at `start`, with the programs' vectors over its keys read."""
        if not self._needs_start(phase):
            return StepTile(None, Programs(None, None, None))
        score, mask, dropout = (None if p is None else p.columns(start).pin() for p in self.programs)
        return StepTile(start, Programs(score, mask if phase is not Phase.UNMASKED else None, dropout))

    # ----------------------------------------------------------------- the end of the tile

    def _release_queries(self) -> Position:
        """Releases the query slot. The position is read from the mailbox again, so that no register holds it during the steps."""
        setup, scratch = self.setup, self.scratch
        at = self.item
        if setup.tile.dynamic_scheduler:
            at = tile_scheduler.get(present(scratch.mailbox), self.query_slot)[1]
        setup.slots.release("query", scratch.query_free, self.query_slot)
        return Position(at.b, at.h, at.q_tile)

    def _finish(self, row_part: jax.Array | None, out: jax.Array, state: State, position: Position) -> None:
        """Adds the sink, divides by the softmax denominator, and writes out, lse and row maxima.

        row_part   [rows], what the softmax left out of the scores of each row; None: nothing
        out        [rows, value dim] float32, the sum of P V relative to the reference
        """
        setup, tile, outputs, softmax = self.setup, self.setup.tile, self.consumer.outputs, self.setup.softmax
        b, h, q_tile = position
        q_start = q_tile * tile.block_q + self.group * tile.rows
        top, total = softmax.finish(state, row_part)
        base = jnp.where(top == f32(-math.inf), f32(0), top)
        shrink = None
        if self.consumer.inputs.sinks is not None:
            sink = softmax.to_reference(self.consumer.inputs.sinks[h])
            joint = jnp.maximum(top, sink)
            joint = jnp.where(jnp.abs(joint) == f32(math.inf), f32(0), joint)
            shrink = softmax.power(top - joint)
            total = total * shrink + softmax.power(sink - joint)
            base = joint
        dead = total == f32(0)
        divisor = jnp.where(dead, f32(0), f32(1) / total)  # a row that row_part hides may have products in `out`
        if shrink is not None:
            divisor = divisor * shrink
        lse = jnp.where(dead, f32(-math.inf), softmax.lse(base, total))
        rows = (b, h, pl.ds(q_start, tile.rows))
        outputs.lse[rows] = lse
        if outputs.max_scores is not None:
            outputs.max_scores[rows] = softmax.to_score(top)
        out = out * registers.stretch(divisor, "row", out.shape)
        self._write(out, rows_of(outputs.out, setup.plan.layout, b, h, q_start, tile.rows))

    def _write(self, out: jax.Array, target: Ref) -> None:
        """Copies `out` to global memory in parts of `out_columns` columns, through this warpgroup's slots in shared memory."""
        setup, tile = self.setup, self.setup.tile
        parts = tile.value_dim // tile.out_columns
        for n in range(parts):
            slot = n % tile.out_slots
            columns = slice(n * tile.out_columns, (n + 1) * tile.out_columns)
            # With an uneven number of parts, TMA may still read the last part of the tile before from the first slot.
            others = 0 if n == 0 and parts % tile.out_slots else tile.out_slots - 1
            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
            self.scratch.out[self.group, slot] = out[:, columns].astype(setup.plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.scratch.out.at[self.group, slot], target.at[:, columns])
