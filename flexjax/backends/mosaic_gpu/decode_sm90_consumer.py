"""A consumer of the decode kernel: one of two warpgroups that compute attention for the packed rows of a work item.

    S = Q K^T          WGMMA, from shared memory; 64 rows, of which the packed queries fill `used_rows`
    score, mask        registers (tile_programs.py), on programs of packed rows (ir/fold_heads.py)
    P, rescale         online_softmax.py
    out += P V         WGMMA, P from registers

Tiles of a quantised cache are first widened to 16 bits (decode_widen.py); scores are multiplied by the scales of keys before
score_mod, and weights by the scales of values after they were added to the row sums. With few packed rows
decode_sm90_byte_consumer.py computes instead.

The two warpgroups compute alternate key tiles, each with a softmax of its own, so one multiplies while the other computes
exponentials. The steps of a warpgroup run one after the other, because loading a tile takes longer than a step. At the end of an
item the second warpgroup hands its sums to the first through shared memory; the first adds them to its own and writes the partial
result of the chunk. Rows of the tile past `used_rows` are computed like others and not written.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import decode_rows, kernel_parts, registers
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.decode_consumer import ItemConsumer, Programs
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_scales import scaled_columns
from flexjax.backends.mosaic_gpu.decode_tiles import ROWS, DecodeScratch
from flexjax.backends.mosaic_gpu.decode_widen import widen
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, accumulator, accumulator_from, i32, load
from flexjax.backends.mosaic_gpu.online_softmax import State
from flexjax.backends.mosaic_gpu.tile_scores import scores_of

f32 = np.float32
FIRST, SECOND = 0, 1
"""Numbers of the consumers."""


class Partial(typing.NamedTuple):
    """What a warpgroup has summed over its steps of a work item.

    out     [ROWS, value dim] float32, the sum of P V relative to `top`
    top     [ROWS] float32, the softmax reference of each row (online_softmax.py), -inf where nothing is visible
    total   [ROWS] float32, the sum of the exponentials relative to `top`
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True)
class DecodeConsumer(ItemConsumer):
    """One of the two consumer warpgroups of a CTA: beside the fields of ItemConsumer

    scratch   Refs to the CTA's shared memory
    """

    scratch: DecodeScratch[Ref]

    def run(self) -> None:
        """Raises its register limit, releases every slot once, and computes this warpgroup's share of every work item of the
        CTA.
        """
        tile, items, scratch = self.setup.tile, self.setup.items, self.scratch
        plgpu.set_max_registers(tile.consumer_registers, action="increase")
        group = lax.axis_index("wg")
        for slot in range(tile.query_slots):
            plgpu.barrier_arrive(scratch.query_free.at[slot])

        @when(group == FIRST)
        def release_slots() -> None:
            """Releases every slot of keys and values and the buffer `other`; their barriers expect one arrival."""
            for slot in range(tile.stages):
                plgpu.barrier_arrive(scratch.key_free.at[slot])
                plgpu.barrier_arrive(scratch.value_free.at[slot])
            plgpu.barrier_arrive(scratch.other_free)

        def compute_item(turn: Scalar, first_step: Scalar) -> Scalar:
            """Computes this warpgroup's share of one work item; returns the number of the next item's first step.

            turn         number of the item in this CTA
            first_step   number of its first step, counted over the items of this CTA
            """
            item = items.item(self.inputs.work, turn)
            self._compute_item(item, turn, first_step, group)
            return items.next_step(first_step, item)

        lax.fori_loop(i32(0), items.turns(self.inputs.work), compute_item, i32(0))
        if self.setup.interpret:  # the simulator wants every arrival at a barrier to be waited for
            when(group == SECOND)(lambda: plgpu.barrier_wait(scratch.other_free))

    def _compute_item(self, item: DecodeItem, turn: Scalar, first_step: Scalar, group: Scalar) -> None:
        """Computes this warpgroup's steps of a work item; then the second warpgroup hands its sums to the first, and
        the first writes the partial result. It waits for the queries and releases their slot.

        turn         number of the item in this CTA
        first_step   number of its first step, counted over the items of this CTA
        group        number of this warpgroup, FIRST or SECOND
        """
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        programs = Programs(
            self.at_rows(setup.score, self.inputs.score, item), self.at_rows(setup.mask, self.inputs.mask, item)
        )
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        plgpu.barrier_wait(scratch.query_full.at[slot])
        out = plgpu.layout_cast(jnp.zeros((ROWS, tile.value_dim), jnp.float32), registers.TILE)

        def step(n: Scalar, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            """Step number n of this warpgroup, which is step 2 n + group of the item.

            carry   (out, softmax state) before it; the same after it is returned
            """
            return self._step(item, programs, scratch.query.at[slot], 2 * n + group, first_step, *carry)

        steps = lax.div(item.total + 1 - group, i32(2))
        out, state = lax.fori_loop(i32(0), steps, step, (out, setup.softmax.start))
        self._release(scratch.query_free.at[slot])
        row_term = None
        if programs.score is not None and setup.reference is None and not setup.large_scores:
            row_term = programs.score.row_term()
        own = Partial(out, *setup.softmax.finish(state, row_term))
        when(group == SECOND)(lambda: self._hand_over(own))
        when(group == FIRST)(lambda: self._write(item, own))

    def _release(self, free: Ref) -> None:
        """Arrives at `free`, the barrier of a slot that this warpgroup has read for the last time; the producer waits
        there before it fills the slot again.
        """
        if self.setup.interpret:
            plgpu.commit_smem()  # the simulator's products read the slot as ordinary memory
        plgpu.barrier_arrive(free)

    # ----------------------------------------------------------------- a step

    def _step(
        self,
        item: DecodeItem,
        programs: Programs,
        queries: Ref,
        n: Scalar,
        first_step: Scalar,
        out: jax.Array,
        state: State,
    ) -> tuple[jax.Array, State]:
        """Computes S, softmax and P V of step n of the item; returns `out` and the softmax state after the step. It
        waits for the keys and the values of the step and releases their slots.

        programs     at the rows of the item
        queries      [ROWS, D] in shared memory
        n            number of the step in the item, over both warpgroups
        first_step   number of the item's first step, counted over the items of this CTA
        out          [ROWS, value dim] float32, the sum of P V of the steps before
        state        of the softmax before the step
        """
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        slot = kernel_parts.slot_of(first_step + n, tile.stages)
        number = setup.items.tile_number(self.inputs.work, item, n)
        start = setup.items.start(number)
        programs = programs.at_columns(start)
        key_scales, value_scales = self.scales(item, start)
        plgpu.barrier_wait(scratch.key_full.at[slot])
        keys = self._widened(scratch.key.at[slot], scratch.wide_key)
        if tile.stored is not None:
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.key_free.at[slot])

        def product(acc: Ref) -> jax.Array:
            """Q K^T, [ROWS, block_kv] float32 without scale, from the accumulator `acc`, which is 0 at the start. While
            the product is in flight, a quantised value tile is waited for and widened.
            """
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))  # pyright: ignore[reportArgumentType]  # accumulators have a class of their own
            if tile.stored is not None:
                plgpu.barrier_wait(scratch.value_full.at[slot])
                self._widened(scratch.value.at[slot], scratch.wide_value)
            return acc[...]

        s = pl.run_scoped(product, accumulator((ROWS, tile.block_kv)))
        if tile.stored is None:
            self._release(scratch.key_free.at[slot])
        if key_scales:
            s = scaled_columns(s, key_scales, setup.interpret)
        scores = self.masked(
            scores_of(programs.score, s, setup.plan.scale, setup.large_scores, setup.interpret),
            programs.mask,
            number,
            start,
            item.end,
        )
        p, rescale, state = setup.softmax.step(scores, state)
        out = setup.softmax.rescale(out, rescale)
        weights = scaled_columns(p, value_scales, setup.interpret) if value_scales else p
        weights = weights.astype(setup.plan.dtype)
        if not setup.interpret:
            out, weights, state = lax.optimization_barrier((out, weights, state))
        if tile.stored is None:
            values = scratch.value.at[slot]
            plgpu.barrier_wait(scratch.value_full.at[slot])
            if setup.lengths:
                when(item.end - start < tile.block_kv)(lambda: self._clear_past_end(values, item.end - start))
        else:
            values = self._copy(scratch.wide_value)
            plgpu.commit_smem()  # also keeps the next keys from this warpgroup's copy until all its threads have their scores
            plgpu.barrier_arrive(scratch.value_free.at[slot])
        if setup.interpret:
            out = out + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        else:
            add = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))
            out = typing.cast(jax.Array, add(accumulator_from(out)))
        if tile.stored is None:
            self._release(scratch.value_free.at[slot])
        return out, state

    def _widened(self, stored: Ref, wide: Ref | None) -> Ref:
        """The key or value tile that WGMMA reads: `stored` itself or, for a quantised cache, this warpgroup's copy of it
        in 16 bits, which this writes. The caller calls `plgpu.commit_smem` before the product.

        stored   the slot, which TMA has filled
        wide     [groups, block_kv, dim], where the copies of both warpgroups go; None if the cache is not quantised
        """
        dtype = self.setup.tile.stored
        if dtype is None:
            return stored
        copy = self._copy(wide)
        widen(stored, copy, dtype, self.setup.plan.dtype, self.setup.interpret)
        return copy

    def _copy(self, wide: Ref | None) -> Ref:
        """This warpgroup's part, [block_kv, dim], of `wide`, which is `wide_key` or `wide_value` and not None."""
        assert wide is not None
        return wide.at[lax.axis_index("wg")]

    def _clear_past_end(self, values: Ref, rows: Scalar) -> None:
        """Overwrites the rows of a value tile from number `rows` on by zeros, because memory past the length of a batch
        entry may hold NaN, and 0 times NaN is NaN.

        values   [block_kv, E] in shared memory
        """
        columns = 64 if self.setup.tile.value_dim % 64 == 0 else self.setup.tile.value_dim
        for first in range(0, self.setup.tile.value_dim, columns):
            for row in range(0, self.setup.tile.block_kv, ROWS):
                part = values.at[pl.ds(row, ROWS), pl.ds(first, columns)]
                old = part[...] if self.setup.interpret else load(part, registers.TILE)
                exists = registers.row_iota(ROWS) + i32(row) < rows
                exists = registers.broadcast_vector(exists, "row", (ROWS, columns))
                part[...] = jnp.where(exists, old, jnp.zeros((), old.dtype))
        plgpu.commit_smem()

    # ----------------------------------------------------------------- the end of an item

    def _hand_over(self, own: Partial) -> None:
        """In the second warpgroup: writes what it has summed, `own`, to shared memory, and arrives at `other_full`.
        Before, it waits until the first warpgroup has read the sums of the previous item.
        """
        scratch, tile, interpret = self.scratch, self.setup.tile, self.setup.interpret
        plgpu.barrier_wait(scratch.other_free)
        decode_rows.store_rows(scratch.other, own.out, tile.used_rows, interpret)
        scratch.other_stats[0] = own.top
        scratch.other_stats[1] = own.total
        plgpu.barrier_arrive(scratch.other_full)

    def _write(self, item: DecodeItem, own: Partial) -> None:
        """In the first warpgroup: waits for the sums of the second, adds them to its own (`own`), and writes the partial result of the
        item's chunk to `outputs`. As soon as it has read the sums, it lets the second overwrite them (`other_free`).
        """
        scratch, tile, interpret, softmax = self.scratch, self.setup.tile, self.setup.interpret, self.setup.softmax
        plgpu.barrier_wait(scratch.other_full)
        other = Partial(
            decode_rows.load_rows(scratch.other, tile.value_dim, tile.used_rows, interpret),
            self._read(scratch.other_stats.at[0]),
            self._read(scratch.other_stats.at[1]),
        )
        if not interpret:
            other = lax.optimization_barrier(other)  # read before the arrival that lets them be overwritten
        plgpu.barrier_arrive(scratch.other_free)
        top = jnp.maximum(own.top, other.top)
        base = jnp.where(top == f32(-math.inf), f32(0), top)
        factors = [softmax.power(part.top - base) for part in (own, other)]
        total = own.total * factors[0] + other.total * factors[1]
        shape = own.out.shape
        spread = [registers.broadcast_vector(factor, "row", shape) for factor in factors]
        place = (item.b, item.kv_head, item.chunk)
        out = own.out * spread[0] + other.out * spread[1]
        decode_rows.store_rows(self.outputs.out.at[place], out, tile.used_rows, interpret)
        for n, vector in enumerate((top, total)):
            decode_rows.store_row_vector(self.outputs.stats.at[(*place, n)], vector, tile.used_rows, interpret)

    def _read(self, vector: Ref) -> jax.Array:
        """The row vector, [ROWS] float32, that `vector` refers to in shared memory, in registers."""
        return vector[...] if self.setup.interpret else load(vector, registers.ROW, optimized=False)
