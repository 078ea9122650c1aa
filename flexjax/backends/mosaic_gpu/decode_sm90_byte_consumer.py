"""A consumer of the decode kernel for quantised caches and few packed rows: products on `mma.sync`, straight from bytes.

    S^T = K Q^T             bytes widened in registers; keys are rows, packed queries columns
    score, mask             registers, by the layout of a WGMMA accumulator (tile_programs.py, row_axis="kv")
    softmax                 one for each warp, over its own keys: no exchange between warps
    O^T += V^T P^T          bytes widened in registers, P transposed by movmatrix

decode_fragments.py has the layouts, NOTES_decode.md the clocks. Two warpgroups take alternate key tiles, as in decode_sm90_consumer.py.
At the end of an item all eight warps write their sums to shared memory, and the first warpgroup adds them and writes the partial result
of the chunk.
"""

import math
import typing

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import decode_bytes, kernel_parts, registers
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.decode_byte_scores import ByteScores
from flexjax.backends.mosaic_gpu.decode_bytes import WarpSoftmax
from flexjax.backends.mosaic_gpu.decode_consumer import Programs
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_sm90_consumer import FIRST, SECOND, DecodeConsumer
from flexjax.backends.mosaic_gpu.kernel_parts import Scalar, i32
from flexjax.backends.mosaic_gpu.warpgroup import WARPS

f32 = np.float32


class ByteConsumer(DecodeConsumer, ByteScores):
    """One consumer warpgroup of a CTA whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def _compute_item(self, item: DecodeItem, turn: Scalar, first_step: Scalar, group: Scalar) -> None:
        """Computes the steps of this warpgroup; then both warpgroups write their sums to shared memory, and the first merges them and
        writes the partial result. It waits for the queries and releases their slot.

        turn         number of the item in this CTA
        first_step   number of its first step, counted over the items of this CTA
        group        number of this warpgroup, FIRST or SECOND
        """
        setup, tile, scratch, interpret = self.setup, self.setup.tile, self.scratch, self.setup.interpret
        programs = Programs(
            self.at_item(setup.score, self.inputs.score, item), self.at_item(setup.mask, self.inputs.mask, item)
        )
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        plgpu.barrier_wait(scratch.query_full.at[slot])
        read = lambda: decode_bytes.query_fragments(scratch.query.at[slot], interpret)
        held = read() if tile.holds_queries else None
        full = lambda value, rows: registers.splat(f32(value), "tile", (rows, tile.columns), interpret)
        start = full(0.0, WARPS * tile.value_dim), WarpSoftmax(full(-math.inf, 64), full(0.0, 64))

        def step(n: Scalar, carry: tuple[jax.Array, WarpSoftmax]) -> tuple[jax.Array, WarpSoftmax]:
            """Step number n of this warpgroup, which is step 2 n + group of the item.

            carry   (O^T, state of each warp's softmax) before it; the same after it is returned
            """
            return self._byte_step(item, programs, read() if held is None else held, 2 * n + group, first_step, *carry)

        out, state = lax.fori_loop(i32(0), lax.div(item.total + 1 - group, i32(2)), step, start)
        self._release(scratch.query_free.at[slot])

        def put() -> None:
            """Writes the sums of this warpgroup's warps to `scratch.other` and `scratch.other_stats` (`write_partials`)."""
            decode_bytes.write_partials(
                scratch.other, scratch.other_stats, out, state, tile.used_rows, group, interpret
            )

        @when(group == SECOND)
        def _() -> None:
            """In the second warpgroup: hands its sums over, once the first has read those of the item before."""
            plgpu.barrier_wait(scratch.other_free)
            put()
            plgpu.barrier_arrive(scratch.other_full)

        @when(group == FIRST)
        def _() -> None:
            """In the first warpgroup: writes its sums, waits for those of the second, and merges all of them into the partial result."""
            put()
            plgpu.commit_smem()
            plgpu.barrier_wait(scratch.other_full)
            place = (item.b, item.kv_head, item.chunk)
            decode_bytes.write_merged(
                scratch.other,
                scratch.other_stats,
                self.outputs.out.at[place],
                self.outputs.stats.at[place],
                setup.large_scores,
                interpret,
            )
            plgpu.barrier_arrive(scratch.other_free)
            plgpu.commit_smem()  # all threads have read the sums before any of them writes those of the next item

    def _byte_step(
        self,
        item: DecodeItem,
        programs: Programs,
        queries: jax.Array,
        n: Scalar,
        first_step: Scalar,
        out: jax.Array,
        state: WarpSoftmax,
    ) -> tuple[jax.Array, WarpSoftmax]:
        """S^T, softmax and V^T P^T of step n of the item; returns `out` and the state of the softmax after it. It waits for the keys and
        the values of the step and releases their slots.

        programs     of `at_item`
        queries      of `decode_bytes.query_fragments`
        n            number of the step in the item, over both warpgroups
        first_step   number of the item's first step, counted over the items of this CTA
        out          [WARPS * value dim, columns] float32, the sums so far
        state        of each warp's softmax before the step
        """
        setup, tile, scratch, interpret = self.setup, self.setup.tile, self.scratch, self.setup.interpret
        stored, dtype = typing.cast(str, tile.stored), setup.plan.dtype
        slot = kernel_parts.slot_of(first_step + n, tile.stages)
        number = setup.items.tile_number(self.inputs.work, item, n)
        start = setup.items.start(number)
        key_scale, value_scale = self.row_scales(item, start)
        plgpu.barrier_wait(scratch.key_full.at[slot])
        s = decode_bytes.byte_scores(scratch.key.at[slot], queries, tile.columns, stored, dtype, interpret)
        self._release(scratch.key_free.at[slot])
        s = self.final_scores(self.scaled(s, key_scale), programs, item, number, start)
        weights, factor, state = decode_bytes.byte_softmax(s, state, setup.large_scores, interpret)
        weights = self.scaled(weights, value_scale)
        plgpu.barrier_wait(scratch.value_full.at[slot])
        out = decode_bytes.add_byte_values(scratch.value.at[slot], weights, factor, out, stored, dtype, interpret)
        self._release(scratch.value_free.at[slot])
        return out, state
