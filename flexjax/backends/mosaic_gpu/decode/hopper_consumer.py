"""A consumer of the decode kernel: one of two warpgroups that compute attention for the packed rows of a work item.

    S = Q K^T          WGMMA, from shared memory; 64 rows, of which the packed queries fill `used_rows`
    score, mask        registers (programs/tile_programs.py), on programs of packed rows (ir/fold_heads.py)
    P, rescale         forward/online_softmax.py
    out += P V         WGMMA, P from registers

Tiles of a quantised cache are first widened to 16 bits (hopper_widen.py). Scores are multiplied by the scales of keys
before score_mod, weights by the scales of values after they were added to the row sums.

The two warpgroups compute alternate key tiles, each with a softmax of its own, so one multiplies while the other
computes exponentials. The steps of a warpgroup run one after the other, because loading a tile takes longer than a
step. At the end of an item the second warpgroup hands its sums to the first, which writes the partial result of the
chunk. Rows past `used_rows` are computed like others and not written.
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

from flexjax.backends.mosaic_gpu.decode import rows as decode_rows
from flexjax.backends.mosaic_gpu.decode.consumer import ItemConsumer
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import ROWS, DecodeScratch
from flexjax.backends.mosaic_gpu.decode.hopper_widen import widen
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.scales import scaled_columns
from flexjax.backends.mosaic_gpu.forward.online_softmax import State
from flexjax.backends.mosaic_gpu.forward.rows import Programs
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, accumulator, add_wgmma, arrive_read, i32, load
from flexjax.backends.mosaic_gpu.machine.simulator import only_simulated, ordered

f32 = np.float32
FIRST, SECOND = 0, 1  # numbers of the consumers


class Partial(typing.NamedTuple):
    """What a warpgroup has summed over its steps of a work item."""

    out: jax.Array  # [ROWS, value dim] float32, the sum of P V relative to `top`
    top: jax.Array  # [ROWS] float32, the softmax reference of each row, -inf where nothing is visible
    sums: tuple[jax.Array, ...]  # [ROWS] float32, relative to `top`: of the exponentials, and of expectations


@dataclasses.dataclass(frozen=True)
class DecodeConsumer(ItemConsumer):
    """One of the two consumer warpgroups of a CTA."""

    scratch: DecodeScratch[Ref]

    def run(self) -> None:
        """Releases every slot once, and computes this warpgroup's share of every work item of the CTA."""
        tile, items, scratch = self.setup.tile, self.setup.items, self.scratch
        plgpu.set_max_registers(tile.consumer_registers, action="increase")
        group = lax.axis_index("wg")
        for slot in range(tile.query_slots):
            plgpu.barrier_arrive(scratch.query_free.at[slot])

        @when(group == FIRST)
        def release_slots() -> None:
            # these barriers expect one arrival
            for slot in range(tile.stages):
                plgpu.barrier_arrive(scratch.key_free.at[slot])
                plgpu.barrier_arrive(scratch.value_free.at[slot])
            plgpu.barrier_arrive(scratch.other_free)

        def compute_item(turn: Scalar, first_step: Scalar) -> Scalar:
            item = items.item(self.inputs.work, turn)
            self._compute_item(item, turn, first_step, group)
            return items.next_step(first_step, item)

        lax.fori_loop(i32(0), items.turns(self.inputs.work), compute_item, i32(0))
        only_simulated(lambda: when(group == SECOND)(lambda: plgpu.barrier_wait(scratch.other_free)))

    def _compute_item(self, item: DecodeItem, turn: Scalar, first_step: Scalar, group: Scalar) -> None:
        """Computes this warpgroup's steps of the item; the first warpgroup merges the sums and writes them."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        programs = Programs(
            self.at_rows(setup.score, self.inputs.score, item), self.at_rows(setup.mask, self.inputs.mask, item)
        )
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        plgpu.barrier_wait(scratch.query_full.at[slot])
        out = plgpu.layout_cast(jnp.zeros((ROWS, tile.value_dim), jnp.float32), registers.TILE)

        def step(n: Scalar, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            return self._step(item, programs, scratch.query.at[slot], 2 * n + group, first_step, *carry)

        steps = lax.div(item.total + 1 - group, i32(2))
        out, state = lax.fori_loop(i32(0), steps, step, (out, setup.softmax.start))
        arrive_read(scratch.query_free.at[slot])
        top, *sums = self.statistics(state, programs)
        own = Partial(out, top, tuple(sums))
        when(group == SECOND)(lambda: self._hand_over(own))
        when(group == FIRST)(lambda: self._write(item, own))

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
        """S, softmax and P V of step n of the item; returns `out`, [ROWS, value dim], and the softmax state."""
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
            # accumulators have a class of their own
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))  # pyright: ignore[reportArgumentType]
            # while the product is in flight
            if tile.stored is not None:
                plgpu.barrier_wait(scratch.value_full.at[slot])
                self._widened(scratch.value.at[slot], scratch.wide_value)
            return acc[...]

        s = pl.run_scoped(product, accumulator((ROWS, tile.block_kv)))
        if tile.stored is None:
            arrive_read(scratch.key_free.at[slot])
        if key_scales:
            s = scaled_columns(s, key_scales)
        p, rescale, state = self.softmax(s, programs, state, number, start, item.end)
        out = setup.softmax.rescale(out, rescale)
        weights = scaled_columns(p, value_scales) if value_scales else p
        weights = weights.astype(setup.plan.dtype)
        out, weights, state = ordered((out, weights, state))
        if tile.stored is None:
            values = scratch.value.at[slot]
            plgpu.barrier_wait(scratch.value_full.at[slot])
            if setup.lengths:
                when(item.end - start < tile.block_kv)(lambda: self._clear_past_end(values, item.end - start))
        else:
            values = self._copy(scratch.wide_value)
            # also keeps the next keys from this warpgroup's copy until all its threads have their scores
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.value_free.at[slot])
        out = add_wgmma(out, weights, values)
        if tile.stored is None:
            arrive_read(scratch.value_free.at[slot])
        return out, state

    def _widened(self, stored: Ref, wide: Ref | None) -> Ref:
        """The tile that WGMMA reads: `stored`, or this warpgroup's copy in 16 bits, written here."""
        dtype = self.setup.tile.stored
        if dtype is None:
            return stored
        copy = self._copy(wide)
        widen(stored, copy, dtype, self.setup.plan.dtype)
        return copy

    def _copy(self, wide: Ref | None) -> Ref:
        assert wide is not None
        return wide.at[lax.axis_index("wg")]

    def _clear_past_end(self, values: Ref, rows: Scalar) -> None:
        """Overwrites the rows of a value tile, [block_kv, E] in shared memory, from number `rows` on by zeros."""
        # memory past the length of a batch entry may hold NaN, and 0 times NaN is NaN
        columns = 64 if self.setup.tile.value_dim % 64 == 0 else self.setup.tile.value_dim
        for first in range(0, self.setup.tile.value_dim, columns):
            for row in range(0, self.setup.tile.block_kv, ROWS):
                part = values.at[pl.ds(row, ROWS), pl.ds(first, columns)]
                old = load(part, registers.TILE)
                exists = registers.row_iota(ROWS) + i32(row) < rows
                exists = registers.broadcast_vector(exists, "row", (ROWS, columns))
                part[...] = jnp.where(exists, old, jnp.zeros((), old.dtype))
        plgpu.commit_smem()

    # ----------------------------------------------------------------- the end of an item

    def _hand_over(self, own: Partial) -> None:
        """In the second warpgroup: writes what it has summed to shared memory, once its last sums were read."""
        scratch, tile = self.scratch, self.setup.tile
        plgpu.barrier_wait(scratch.other_free)
        decode_rows.store_rows(scratch.other, own.out, tile.used_rows)
        for n, vector in enumerate((own.top, *own.sums)):
            scratch.other_stats[n] = vector
        plgpu.barrier_arrive(scratch.other_full)

    def _write(self, item: DecodeItem, own: Partial) -> None:
        """In the first warpgroup: adds the sums of the second to its own, and writes the chunk's partial result."""
        scratch, tile, softmax = self.scratch, self.setup.tile, self.setup.softmax
        plgpu.barrier_wait(scratch.other_full)
        other = Partial(
            decode_rows.load_rows(scratch.other, tile.value_dim, tile.used_rows),
            self._read(scratch.other_stats.at[0]),
            tuple(self._read(scratch.other_stats.at[n]) for n in range(1, tile.statistics)),
        )
        other = ordered(other)  # read before the arrival that lets them be overwritten
        plgpu.barrier_arrive(scratch.other_free)
        top = jnp.maximum(own.top, other.top)
        base = jnp.where(top == f32(-math.inf), f32(0), top)
        factors = [softmax.power(part.top - base) for part in (own, other)]
        sums = (x * factors[0] + y * factors[1] for x, y in zip(own.sums, other.sums, strict=True))
        shape = own.out.shape
        spread = [registers.broadcast_vector(factor, "row", shape) for factor in factors]
        place = (item.b, item.kv_head, item.chunk)
        out = own.out * spread[0] + other.out * spread[1]
        decode_rows.store_rows(self.outputs.out.at[place], out, tile.used_rows)
        for n, vector in enumerate((top, *sums)):
            decode_rows.store_row_vector(self.outputs.stats.at[(*place, n)], vector, tile.used_rows)

    def _read(self, vector: Ref) -> jax.Array:
        return load(vector, registers.ROW, optimized=False)
