"""The forward kernel for Hopper (compute capability 9.0).

One persistent program a multiprocessor takes tiles of queries, longest first. Its last warpgroup copies: queries, then
keys and values of every visited tile, each through its own ring of shared-memory slots. The others compute, 64 rows each:

    scores = Q K^T          tensor cores, from shared memory
    score program, mask     registers; nothing for the identity, whose scale is folded into the exponential
    online softmax          base 2, running maximum and sum per row
    out += P V              tensor cores, P from registers

A step issues Q K^T of its tile and P V of the tile before, and does its softmax while P V and the other warpgroup's
products run; two computing warpgroups take turns at issuing. Keys are copied a step ahead of values. A tile of queries first
walks the blocks of the full list, where no mask is evaluated, then those of the partial list. The softmax is in
online_softmax.py, who takes which tile in forward_walk.py.

Hand-over of slots and turns uses hardware named barriers on the device. The simulator knows neither those nor products
with an operand in registers, so there (`interpret`) ordinary barriers and plain dots stand in, and lengths are padded.
"""

import dataclasses
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

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import memory, staging, thread_tiles, work_queue
from flexjax.backends.mosaic_gpu.bounded_scores import fixed_reference
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.forward_walk import Arrays, Item, Ref, Scalar, Schedule, Shared, Signals, flat, i32
from flexjax.backends.mosaic_gpu.online_softmax import Growth, OnlineSoftmax, Scores, State
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.tiles import ForwardTile
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

f32 = np.float32


EachItem = Callable[[Item, Scalar, Scalar], Scalar]
"""An item, its turn and the number of its first step -> the number of the step after its last."""


class Programs(typing.NamedTuple):
    """The traced programs of the plan at one tile of queries."""

    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None


class Place(typing.NamedTuple):
    """First key of a visited tile, and the programs with what they read of its columns."""

    start: Scalar
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None


def rows_of(ref: Ref, layout: str, b: Scalar, h: Scalar, start: Scalar, size: int) -> Ref:
    rows = pl.ds(start, size)
    return ref.at[b, rows, h] if layout == "BTNH" else ref.at[b, h, rows]


# ------------------------------------------------------------------- the two roles


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The body of the kernel: everything static, and the two roles."""

    plan: KernelPlan
    tile: ForwardTile
    schedule: Schedule
    signals: Signals
    interpret: bool
    staged: ir.Load | None = None  # what of the score program comes through shared memory
    reference: float | None = None  # what the exponentials are relative to, where it need not follow the maximum
    large: bool = False  # scores may be far out (online_softmax.py)

    @property
    def softmax(self) -> OnlineSoftmax:
        tile = self.tile
        slack = tile.slack and not self.plan.max_scores
        shape = tile.rows, tile.block_kv
        program = self.plan.score
        return OnlineSoftmax(shape, slack, self.reference, tile.polynomials, self.interpret, self.large, program)

    def copy(self, arrays: Arrays, shared: Shared) -> None:
        """The copying warpgroup: queries, keys and values of every item in turn."""
        plan, tile, signals = self.plan, self.tile, self.signals
        if tile.groups > 1:
            plgpu.set_max_registers(tile.copy_registers, action="decrease")

        def one_item(item: Item, turn: Scalar, step: Scalar) -> Scalar:
            kv_head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
            q_slot = memory.slot_of(turn, tile.query_slots)
            signals.acquire("query", shared.query_free, q_slot)
            if tile.queue:
                work_queue.put(shared.box, q_slot, item)
            rows = rows_of(arrays.query, plan.layout, item.b, item.h, item.q_tile * tile.block_q, tile.block_q)
            plgpu.copy_gmem_to_smem(rows, shared.query.at[q_slot], shared.query_full.at[q_slot])

            def fetch(n: Scalar, what: str, source: Ref, ring: Ref, full: Ref, free: Ref | None, slots: int) -> None:
                slot = memory.slot_of(step + n, slots)
                start = self.schedule.kv_start(arrays, item, n)
                rows = rows_of(source, plan.layout, item.b, kv_head, start, tile.block_kv)
                signals.acquire(what, free, slot)
                plgpu.copy_gmem_to_smem(rows, ring.at[slot], full.at[slot])

            def keys(n: Scalar) -> None:
                fetch(n, "key", arrays.key, shared.key, shared.key_full, shared.key_free, tile.stages)

            def values(n: Scalar) -> None:
                fetch(n, "value", arrays.value, shared.value, shared.value_full, shared.value_free, tile.value_stages)

            def one_step(n: Scalar, _: None) -> None:
                """Keys go a step ahead: their slots are given back half a step before those of values."""
                when(n + 1 < item.total)(lambda: keys(n + 1))
                if self.staged is not None:
                    self._copy_staged(self.staged, arrays, shared, item, n, step)
                values(n)

            when(item.total > 0)(lambda: keys(i32(0)))
            lax.fori_loop(i32(0), item.total, one_step, None)
            return step + item.total

        turns = self._copy_each(arrays, shared, one_item)
        if self.interpret:  # the simulator insists that every arrival is seen
            for slot in range(tile.queue, tile.query_slots):
                signals.acquire("query", shared.query_free, memory.slot_of(turns + slot, tile.query_slots))
            for slot in range(tile.stages):
                signals.acquire("key", shared.key_free, slot)
            for slot in range(tile.value_stages):
                signals.acquire("value", shared.value_free, slot)
            for slot in range(tile.staged_slots):
                signals.acquire("staged", shared.staged_free, slot)

    def _copy_staged(
        self, load: ir.Load, arrays: Arrays, shared: Shared, item: Item, n: Scalar, first_step: Scalar
    ) -> None:
        """The tile of the captured array at step n of the item, whose first is `first_step`."""
        tile = self.tile
        assert shared.staged is not None
        assert shared.staged_full is not None
        assert self.plan.score is not None
        slot = memory.slot_of(first_step + n, tile.staged_slots)
        start = self.schedule.kv_start(arrays, item, n)
        self.signals.acquire("staged", shared.staged_free, slot)
        leading = TileProgram(
            self.plan.score,
            arrays.score,
            (tile.rows, tile.block_kv),
            batch=item.b,
            head=item.h,
            interpret=self.interpret,
        ).scalars(load.index[:-2])
        rows, columns = pl.ds(item.q_tile * tile.block_q, tile.block_q), pl.ds(start, tile.block_kv)
        source = arrays.score[load.capture].at[(*leading, rows, columns)]
        plgpu.copy_gmem_to_smem(source, shared.staged.at[slot], shared.staged_full.at[slot])

    def _copy_each(self, arrays: Arrays, shared: Shared, one: EachItem) -> Scalar:
        """Runs `one` on every item of this program, as the copying warpgroup; how many there were."""
        schedule, tile = self.schedule, self.tile
        if not tile.queue:
            own = lambda turn, step: one(schedule.item(arrays, schedule.position(turn)), turn, step)
            lax.fori_loop(i32(0), schedule.turns(), own, i32(0))
            return schedule.turns()

        def draw(number: Scalar, turn: Scalar, step: Scalar) -> tuple:
            step = one(schedule.item(arrays, number), turn, step)
            number = work_queue.draw(arrays.drawn, shared.box, number, schedule.programs, self.interpret)
            return number < schedule.items, number, turn + 1, step

        first = (lax.axis_index("program"), i32(0), i32(0))
        _, turns, _ = work_queue.each(draw, jnp.asarray(True), first)
        slot = memory.slot_of(turns, tile.query_slots)
        self.signals.acquire("query", shared.query_free, slot)
        work_queue.put(shared.box, slot, None)
        plgpu.barrier_arrive(shared.query_full.at[slot])
        return turns

    def _compute_each(self, arrays: Arrays, shared: Shared, one: EachItem) -> None:
        """The same as a computing warpgroup. `one` waits for its queries unless they are from the queue."""
        schedule = self.schedule
        if not self.tile.queue:
            own = lambda turn, step: one(schedule.item(arrays, schedule.position(turn)), turn, step)
            lax.fori_loop(i32(0), schedule.turns(), own, i32(0))
            return

        def look(turn: Scalar) -> tuple[Scalar, Item]:
            slot = memory.slot_of(turn, self.tile.query_slots)
            plgpu.barrier_wait(shared.query_full.at[slot])
            return work_queue.get(shared.box, slot, schedule.blank)

        def take(item: Item, turn: Scalar, step: Scalar) -> tuple:
            step = one(item, turn, step)
            return *look(turn + 1), turn + 1, step

        more, item = look(i32(0))
        work_queue.each(take, more, (item, i32(0), i32(0)))

    def compute(self, arrays: Arrays, shared: Shared, outs: tuple[Ref, Ref, Ref | None]) -> None:
        """A computing warpgroup."""
        tile, signals = self.tile, self.signals
        if tile.groups > 1:
            plgpu.set_max_registers(tile.compute_registers, action="increase")
        group = lax.axis_index("wg")
        for slot in range(tile.query_slots):
            signals.release("query", shared.query_free, slot)
        for slot in range(tile.stages):
            signals.release("key", shared.key_free, slot)
        for slot in range(tile.value_stages):
            signals.release("value", shared.value_free, slot)
        for slot in range(tile.staged_slots):
            signals.release("staged", shared.staged_free, slot)
        signals.first_turn(group)

        def one_item(item: Item, turn: Scalar, step: Scalar) -> Scalar:
            self._one_tile(arrays, shared, outs, item, turn, step, group)
            return step + item.total

        self._compute_each(arrays, shared, one_item)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _program(self, program: typing.Any, refs: tuple[Ref, ...], item: Item, q_start: Scalar) -> TileProgram | None:
        if program is None:
            return None
        plan, tile = self.plan, self.tile
        queries, keys = plan.covered(tile.block_q, tile.block_kv)
        hangs = bool(plan.q_len % queries or plan.kv_len % keys)
        made = TileProgram(
            program,
            refs,
            (tile.rows, tile.block_kv),
            batch=item.b,
            head=item.h,
            edge=(plan.q_len, plan.kv_len) if hangs else None,
            interpret=self.interpret,
        )
        return made.at_rows(q_start)

    def _one_tile(
        self,
        arrays: Arrays,
        shared: Shared,
        outs: tuple[Ref, Ref, Ref | None],
        item: Item,
        turn: Scalar,
        first_step: Scalar,
        group: Scalar,
    ) -> None:
        plan, tile, signals = self.plan, self.tile, self.signals
        q_start = item.q_tile * tile.block_q + group * tile.rows
        score = self._program(plan.score, arrays.score, item, q_start)
        mask = self._program(plan.mask, arrays.mask, item, q_start)
        dropout = self._program(plan.dropout, arrays.dropout, item, q_start)
        q_slot = memory.slot_of(turn, tile.query_slots)
        queries = shared.query.at[q_slot, pl.ds(group * tile.rows, tile.rows)]
        if not tile.queue:
            plgpu.barrier_wait(shared.query_full.at[q_slot])

        empty = plgpu.layout_cast(jnp.zeros((tile.rows, tile.value_dim), jnp.float32), memory.TILE)
        programs = Programs(score, mask, dropout)

        def key_slot(n: Scalar) -> Scalar:
            return memory.slot_of(first_step + n, tile.stages)

        def value_slot(n: Scalar) -> Scalar:
            return memory.slot_of(first_step + n, tile.value_stages)

        def next_start(n: Scalar, mode: str) -> Scalar:
            """First key of the step after n, read a step ahead: its address is known before the products are issued."""
            return self._start(arrays, item, lax.min(n + 1, item.total - 1), mode, programs)

        def held(program: TileProgram, n: Scalar) -> TileProgram:
            """The program with its staged tile read."""
            if self.staged is None:
                return program
            assert shared.staged is not None
            assert shared.staged_full is not None
            slot = memory.slot_of(first_step + n, tile.staged_slots)
            plgpu.barrier_wait(shared.staged_full.at[slot])
            value = memory.load_staged(shared.staged.at[slot, pl.ds(group * tile.rows, tile.rows)], self.interpret)
            signals.release("staged", shared.staged_free, slot)
            return program.holding(self.staged, value)

        def softmax(s: jax.Array, n: Scalar, at: Place, mode: str, state: State) -> tuple[jax.Array, Growth, State]:
            if at.score is not None:
                at = at._replace(score=held(at.score, n))
            p, growth, state = self.softmax.step(self._scores(s, item, n, at, mode), state)
            if at.dropout is not None:
                p = p * at.dropout.tile(p)[0]
            return p, growth, state

        def await_keys(n: Scalar, early: bool) -> None:
            """Until the keys of step n are there; `early`, behind the products of the step before, if there is such a step."""
            wait = lambda: plgpu.barrier_wait(shared.key_full.at[key_slot(n)])
            if tile.early and early:
                when(n < item.total)(wait)
            elif not tile.early and not early:
                wait()

        def scores_alone(n: Scalar) -> jax.Array:
            def product(acc: Ref) -> jax.Array:
                plgpu.wgmma(acc, queries, shared.key.at[key_slot(n)].transpose((1, 0)))
                signals.give_turn(group)
                await_keys(n + 1, early=True)
                return acc[...]

            return pl.run_scoped(product, plgpu.ACC((tile.rows, tile.block_kv), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]  # public, but re-exported under its own name

        def add_values(out: jax.Array, weights: jax.Array, n: Scalar) -> jax.Array:
            slot = value_slot(n)
            plgpu.barrier_wait(shared.value_full.at[slot])
            signals.take_turn(group)
            out = self._accumulate(out, weights, shared.value.at[slot])
            signals.release("value", shared.value_free, slot)
            return out

        def whole_step(n: Scalar, carry: tuple, mode: str) -> tuple:
            """Q K^T, softmax and P V of step n, the products of the other warpgroup between."""
            start, out, state = carry
            at = self._place(start, mode, programs)
            start = next_start(n, mode)
            await_keys(n, early=False)
            s = scores_alone(n)
            signals.release("key", shared.key_free, key_slot(n))
            p, growth, state = softmax(s, n, at, mode, state)
            out = self._rescale(out, growth)
            weights = p.astype(plan.dtype)
            if not self.interpret:
                out, weights, state = lax.optimization_barrier((out, weights, state))
            return start, add_values(out, weights, n), state

        def staggered_step(n: Scalar, carry: tuple, mode: str) -> tuple:
            """Q K^T and softmax of step n, P V of the step before."""
            start, out, weights, state = carry
            slot, before = key_slot(n), value_slot(n - 1)
            at = self._place(start, mode, programs)
            start = next_start(n, mode)
            await_keys(n, early=False)
            if self.interpret:
                s = scores_alone(n)
                signals.release("key", shared.key_free, slot)
                p, growth, state = softmax(s, n, at, mode, state)
                out = add_values(out, weights, n - 1)
            else:

                def products(refs: tuple) -> None:
                    acc, acc_s, *others = refs
                    signals.take_turn(group)
                    plgpu.wgmma(acc_s, queries, shared.key.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(shared.value_full.at[before])
                    plgpu.wgmma(acc, weights, shared.value.at[before])
                    signals.give_turn(group)
                    await_keys(n + 1, early=True)
                    s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc_s, wait_n=1))
                    signals.release("key", shared.key_free, slot)
                    for ref, value in zip(others, jax.tree.leaves(softmax(s, n, at, mode, state)), strict=True):
                        ref[...] = value

                # Their registers are settled here: moving them between the two products would serialise these.
                out, weights = lax.optimization_barrier((out, weights))
                zeros = plgpu.layout_cast(jnp.zeros((tile.rows, tile.block_kv), jnp.float32), memory.TILE)
                made, tree = jax.tree.flatten((zeros, self.softmax.no_growth, state))
                held_by_products = (plgpu.ACC.init(out), plgpu.ACC.init(zeros), *made)  # pyright: ignore[reportPrivateImportUsage]  # public, but re-exported under its own name
                out, _, *made = typing.cast(tuple, pl.run_state(products)(held_by_products))
                p, growth, state = jax.tree.unflatten(tree, made)
                # P V reads the registers of `weights` until here: the new ones may not take their place before.
                p = lax.optimization_barrier(p)
                signals.release("value", shared.value_free, before)
            out = self._rescale(out, growth)
            return start, out, p.astype(plan.dtype), state

        def loops(step: typing.Callable[..., tuple], begin: int, carry: tuple) -> tuple:
            first, masked = i32(begin), lax.max(item.plain, i32(begin))
            starts = [self._start(arrays, item, n, m, programs) for n, m in ((first, "plain"), (masked, "masked"))]
            carry = lax.fori_loop(first, masked, functools.partial(step, mode="plain"), (starts[0], *carry))
            if self._has_masked_steps:
                carry = (starts[1], *carry[1:])
                carry = lax.fori_loop(masked, item.total, functools.partial(step, mode="masked"), carry)
            return carry[1:]

        def leave_queries() -> tuple[Scalar, Scalar, Scalar]:
            """Gives the queries back. Where they lie, from the queue once more: nothing is kept in registers until then."""
            at = item if not tile.queue else work_queue.get(shared.box, q_slot, self.schedule.blank)[1]
            signals.release("query", shared.query_free, q_slot)
            return at.b, at.h, at.q_tile

        def all_steps() -> tuple:
            state = self.softmax.start
            if tile.early or tile.overlap:  # else the first step does
                plgpu.barrier_wait(shared.key_full.at[key_slot(i32(0))])
            if not tile.overlap:
                return *loops(whole_step, 0, (empty, state)), leave_queries()
            at = self._place(self._start(arrays, item, i32(0), "first", programs), "first", programs)
            signals.take_turn(group)
            s = scores_alone(i32(0))
            signals.release("key", shared.key_free, key_slot(i32(0)))
            p, _, state = softmax(s, i32(0), at, "first", state)
            out, weights, state = loops(staggered_step, 1, (empty, p.astype(plan.dtype), state))
            place = leave_queries()
            out = add_values(out, weights, item.total - 1)
            signals.give_turn(group)
            return out, state, place

        def no_steps() -> tuple:
            return empty, self.softmax.start, leave_queries()

        if not tile.overlap:
            signals.begin_tile(group, turn == 0)
        carry = all_steps() if plan.blocks is None else cond(item.total > 0, all_steps, no_steps)
        if not tile.overlap:
            signals.end_tile(group)
        common = None
        if score is not None and self.reference is None and not self.large:
            common = score.row_part()
        self._finish(shared, outs, group, arrays.sinks, common, *carry)

    def _needs_start(self, mode: str, programs: Programs) -> bool:
        masked = mode != "plain" and self._has_masked_steps
        return masked or programs.score is not None or programs.dropout is not None

    def _start(self, arrays: Arrays, item: Item, step: Scalar, mode: str, programs: Programs) -> Scalar:
        """First key of the tile of `step`, any legal number past the last step of the mode's list; 0 where none needs it."""
        if not self._needs_start(mode, programs):
            return i32(0)
        which = {"plain": True, "masked": None if self._full_may_hang else False, "first": None}[mode]
        return self.schedule.kv_start(arrays, item, step, which)

    def _place(self, start: Scalar, mode: str, programs: Programs) -> Place:
        """Where a tile lies, with the programs that run on it: their column vectors are read already."""
        if not self._needs_start(mode, programs):
            return Place(None, None, None, None)
        score, mask, dropout = (None if p is None else p.columns(start).pin() for p in programs)
        return Place(start, score, mask if mode != "plain" else None, dropout)

    @property
    def _has_masked_steps(self) -> bool:
        plan = self.plan
        if plan.mask is not None or plan.kv_len % self.tile.block_kv:
            return True
        return plan.blocks is not None and (plan.blocks.partial > 0 or plan.kv_len % plan.blocks.block_kv > 0)

    def _scores(self, s: jax.Array, item: Item, step: Scalar, at: Place, mode: str) -> Scores:
        """What the softmax sees: the score program applied, -inf where the mask is off or past the last key."""
        plan, tile = self.plan, self.tile
        factor, by, row, shift, along = plan.scale, None, None, None, None
        if at.score is not None and self.large:
            (s,), factor = at.score.tile(s, factor), 1.0
        elif at.score is not None:
            s, factor, by, row, shift, along, _ = at.score.scaled_tile(s, factor, along=True)
            if along is not None:
                s = thread_tiles.add_periods(s, along / f32(factor), self.interpret)
        elif factor <= 0:
            s, factor = s * f32(factor), 1.0
        if mode == "plain" or not self._has_masked_steps:
            return Scores(s, factor, by, row, shift, along)
        if at.mask is not None:
            (on,) = at.mask.tile()
            if mode == "first" or self._full_may_hang:
                on = on | memory.splat(step < item.full, "tile", s.shape, self.interpret)
            s = jnp.where(on, s, f32(-math.inf))
        if plan.kv_len % tile.block_kv or (plan.blocks is not None and plan.kv_len % plan.blocks.block_kv):
            inside = memory.column_iota(tile.block_kv) < i32(plan.kv_len) - at.start
            s = jnp.where(memory.stretch(inside, "column", s.shape), s, f32(-math.inf))
        return Scores(s, factor, by, row, shift, along)

    @property
    def _full_may_hang(self) -> bool:
        """Whether blocks of the full list may hang over the end of the keys."""
        blocks = self.plan.blocks
        return blocks is not None and blocks.full > 0 and self.plan.kv_len % blocks.block_kv > 0

    def _rescale(self, out: jax.Array, growth: Growth) -> jax.Array:
        if self.reference is not None:
            return out
        if self.softmax.slack:
            return thread_tiles.scale_rows(out, growth.shrink, growth.any, self.interpret)
        return out * memory.stretch(growth.shrink, "row", out.shape)

    def _accumulate(self, out: jax.Array, weights: jax.Array, values: Ref) -> jax.Array:
        if self.interpret:
            return out + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        added = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))(plgpu.ACC.init(out))  # pyright: ignore[reportPrivateImportUsage]  # public, but re-exported under its own name
        return typing.cast(jax.Array, added)

    def _finish(
        self,
        shared: Shared,
        outs: tuple[Ref, Ref, Ref | None],
        group: Scalar,
        sinks: Ref | None,
        common: jax.Array | None,
        out: jax.Array,
        state: State,
        place: tuple[Scalar, Scalar, Scalar],
    ) -> None:
        """Divides, and writes the tile with its row statistics; `common` is what the running softmax left out of a row."""
        plan, tile = self.plan, self.tile
        out_ref, lse_ref, max_ref = outs
        b, h, q_tile = place
        q_start = q_tile * tile.block_q + group * tile.rows
        top, total = self.softmax.finish(state, common)
        base = jnp.where(top == f32(-math.inf), f32(0), top)
        if sinks is not None:
            sink = self.softmax.to_reference(sinks[h])
            joint = jnp.maximum(top, sink)
            joint = jnp.where(jnp.abs(joint) == f32(math.inf), f32(0), joint)
            shrink = self.softmax.power(top - joint)
            total = total * shrink + self.softmax.power(sink - joint)
            base = joint
        dead = total == f32(0)
        divisor = jnp.where(
            dead, f32(0), f32(1) / total
        )  # of a row that was switched off at the end there are products
        if sinks is not None:
            divisor = divisor * shrink
        lse = jnp.where(dead, f32(-math.inf), self.softmax.lse(base, total))
        rows = (b, h, pl.ds(q_start, tile.rows))
        lse_ref[rows] = lse
        if max_ref is not None:
            max_ref[rows] = self.softmax.to_score(top)
        out = out * memory.stretch(divisor, "row", out.shape)
        target = rows_of(out_ref, plan.layout, b, h, q_start, tile.rows)
        parts = tile.value_dim // tile.out_columns
        for n in range(parts):
            slot = n % tile.out_slots
            columns = slice(n * tile.out_columns, (n + 1) * tile.out_columns)
            # With an uneven number of parts the last one of the tile before may still be read from the first slot.
            others = 0 if n == 0 and parts % tile.out_slots else tile.out_slots - 1
            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
            shared.out[group, slot] = out[:, columns].astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared.out.at[group, slot], target.at[:, columns])


# ------------------------------------------------------------------- the call


def simulator() -> typing.Any:
    return plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11


def _padded(x: jax.Array, layout: str, length: int, dim: int) -> jax.Array:
    axis = 1 if layout == "BTNH" else 2
    widths = [(0, 0)] * 4
    widths[axis], widths[3] = (0, length - x.shape[axis]), (0, dim - x.shape[3])
    return jnp.pad(x, widths) if any(w != (0, 0) for w in widths) else x


def _padded_tiles(x: jax.Array, q_length: int, kv_length: int) -> jax.Array:
    """A staged array for the simulator, which does not fill in what lies past the end."""
    widths = [(0, 0)] * (x.ndim - 2) + [(0, max(0, q_length - x.shape[-2])), (0, max(0, kv_length - x.shape[-1]))]
    return jnp.pad(x, widths)


def _matrix_memory(shape: tuple[int, ...], dtype: str) -> typing.Any:
    """Shared memory as the matrix instructions want it: rows of 8, swizzled."""
    row_bytes = shape[-1] * 2
    swizzle = next(s for s in (128, 64, 32) if row_bytes % s == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]  # jax 0.11: concrete, whatever its base class says
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


def _scratch(tile: ForwardTile, dtype: str, staged_dtype: str | None, interpret: bool) -> Shared:
    def free(slots: int) -> typing.Any:
        return plgpu.Barrier(num_arrivals=tile.groups, num_barriers=slots) if interpret else None

    return Shared(
        query=_matrix_memory((tile.query_slots, tile.block_q, tile.head_dim), dtype),
        key=_matrix_memory((tile.stages, tile.block_kv, tile.head_dim), dtype),
        value=_matrix_memory((tile.value_stages, tile.block_kv, tile.value_dim), dtype),
        out=_matrix_memory((tile.groups, tile.out_slots, tile.rows, tile.out_columns), dtype),
        query_full=plgpu.Barrier(num_barriers=tile.query_slots),
        key_full=plgpu.Barrier(num_barriers=tile.stages),
        value_full=plgpu.Barrier(num_barriers=tile.value_stages),
        query_free=free(tile.query_slots),
        key_free=free(tile.stages),
        value_free=free(tile.value_stages),
        staged=memory.staged_memory(tile.staged_slots, (tile.block_q, tile.block_kv), staged_dtype)
        if staged_dtype
        else None,
        staged_full=plgpu.Barrier(num_barriers=tile.staged_slots) if staged_dtype else None,
        staged_free=free(tile.staged_slots) if staged_dtype else None,
        box=work_queue.memory(tile.query_slots) if tile.queue else None,
    )


def _joined(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    """Extra features ride along in the head dim."""
    if not plan.extra_dim or operands.query_extra is None or operands.key_extra is None:
        return plan, operands
    axis = 2 if plan.layout == "BTNH" else 1
    repeated = jnp.repeat(operands.key_extra, plan.kv_heads // plan.extra_heads, axis=axis)
    query = jnp.concatenate([operands.query, operands.query_extra.astype(plan.dtype)], axis=-1)
    key = jnp.concatenate([operands.key, repeated.astype(plan.dtype)], axis=-1)
    joined = dataclasses.replace(plan, head_dim=plan.head_dim + plan.extra_dim, extra_dim=0, extra_heads=0)
    return joined, operands._replace(query=query, key=key, query_extra=None, key_extra=None)


def forward(plan: KernelPlan, operands: Operands, tile: ForwardTile) -> Results:
    """Runs the kernel. `support.refuses(plan)` has answered None; `tile` is for the head dim with the extra features."""
    assert tile.fits, tile
    plan, operands = _joined(plan, operands)
    interpret = plan.options.interpret
    schedule = Schedule(plan, tile)
    staged = staging.staged_load(plan.score) if tile.staged_slots and plan.score is not None else None
    reference, large = fixed_reference(plan), may_be_large(plan.score)
    kernel = Kernel(plan, tile, schedule, Signals(tile, interpret), interpret, staged, reference, large)
    q_padded = schedule.q_tiles * tile.block_q
    # The copy engine wants lengths in multiples of 8 rows; it fills what lies past the end with zeros itself.
    q_length = q_padded if interpret else -(-plan.q_len // 8) * 8
    kv_unit = 8
    if interpret:
        kv_unit = tile.block_kv if plan.blocks is None else plan.blocks.block_kv
    kv_length = -(-plan.kv_len // kv_unit) * kv_unit
    operand = functools.partial(jax.tree.map, memory.kernel_operand)
    arrays = Arrays(
        _padded(operands.query, plan.layout, q_length, tile.head_dim),
        _padded(operands.key, plan.layout, kv_length, tile.head_dim),
        _padded(operands.value, plan.layout, kv_length, tile.value_dim),
        operands.sinks,
        schedule.order(operands.lists),
        flat(operands.lists),
        tuple(
            _padded_tiles(x, q_length, kv_length) if interpret and staged is not None and n == staged.capture else x
            for n, x in enumerate(operand(operands.score_captures))
        ),
        operand(operands.mask_captures if plan.mask is not None else ()),
        operand(operands.dropout_captures),
    )
    out_shape = (*arrays.query.shape[:3], tile.value_dim)
    stats = memory.output((plan.batch, plan.q_heads, q_padded), jnp.float32, arrays.query)

    def body(arrays: Arrays, *rest: typing.Any) -> None:
        *outs, shared = rest
        outs = (*outs, None) if len(outs) == 2 else tuple(outs)
        role = lax.axis_index("wg")
        when(role < tile.groups)(lambda: kernel.compute(arrays, shared, outs))
        when(role == tile.groups)(lambda: kernel.copy(arrays, shared))

    staged_dtype = plan.score.captures[staged.capture].dtype if staged is not None and plan.score is not None else None
    scratch = _scratch(tile, plan.dtype, staged_dtype, interpret)
    run = pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(body, *refs), scratch, collective_axes="wg"),
        out_type=[memory.output(out_shape, plan.dtype, arrays.query), stats] + [stats] * plan.max_scores,
        mesh=plgpu.Mesh(
            grid=(schedule.programs,), grid_names=("program",), num_threads=tile.groups + 1, thread_name="wg"
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # a row lies within a warp
        ),
        interpret=simulator() if interpret else False,
        name="flexjax_forward",
    )
    if tile.queue and not interpret:
        arrays = arrays._replace(drawn=jax.new_ref(work_queue.counter(schedule.programs)))
    results = typing.cast(Callable[[Arrays], list[jax.Array]], run)(arrays)
    out, lse, *rest = results
    return Results(_trim_out(out, plan), _trim_stats(lse, plan), _trim_stats(rest[0], plan) if rest else None)


def _trim_out(out: jax.Array, plan: KernelPlan) -> jax.Array:
    lengths = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    return out[:, : lengths[0], : lengths[1], : plan.value_dim]


def _trim_stats(x: jax.Array, plan: KernelPlan) -> jax.Array:
    x = x[:, :, : plan.q_len]
    return jnp.swapaxes(x, 1, 2) if plan.layout == "BTNH" else x
