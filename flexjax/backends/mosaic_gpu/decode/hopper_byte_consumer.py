"""A consumer of the decode kernel for quantised caches and few packed rows: `mma.sync` straight from bytes.

    S^T = K Q^T             bytes widened in registers; keys are rows, packed queries columns
    score, mask             registers, by the layout of a WGMMA accumulator (programs/tile_programs.py, row_axis="kv")
    softmax                 one for each warp, over its own keys: no exchange between warps
    O^T += V^T P^T          bytes widened in registers, P transposed by movmatrix

fragments.py has the layouts. Two warpgroups take alternate key tiles, as in hopper_consumer.py. At the end of an item
all eight warps write their sums to shared memory, and the first warpgroup adds them and writes the result.
"""

import math
import typing

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.decode import bytes as decode_bytes
from flexjax.backends.mosaic_gpu.decode.byte_scores import ByteScores
from flexjax.backends.mosaic_gpu.decode.bytes import WarpSoftmax
from flexjax.backends.mosaic_gpu.decode.hopper_consumer import FIRST, SECOND, DecodeConsumer
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.forward.rows import Programs
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Scalar, arrive_read, i32
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPS

f32 = np.float32


class ByteConsumer(DecodeConsumer, ByteScores):
    """One consumer warpgroup of a CTA whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def _compute_item(self, item: DecodeItem, turn: Scalar, first_step: Scalar, group: Scalar) -> None:
        """Computes this warpgroup's steps of the item; the first warpgroup merges the sums and writes them."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        programs = Programs(
            self.at_item(setup.score, self.inputs.score, item), self.at_item(setup.mask, self.inputs.mask, item)
        )
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        plgpu.barrier_wait(scratch.query_full.at[slot])
        read = lambda: decode_bytes.query_fragments(scratch.query.at[slot])
        held = read() if tile.holds_queries else None
        full = lambda value, rows: registers.splat(f32(value), "tile", (rows, tile.columns))
        start = full(0.0, WARPS * tile.value_dim), WarpSoftmax(full(-math.inf, 64), full(0.0, 64))

        def step(n: Scalar, carry: tuple[jax.Array, WarpSoftmax]) -> tuple[jax.Array, WarpSoftmax]:
            return self._byte_step(item, programs, read() if held is None else held, 2 * n + group, first_step, *carry)

        out, state = lax.fori_loop(i32(0), lax.div(item.total + 1 - group, i32(2)), step, start)
        arrive_read(scratch.query_free.at[slot])

        def put() -> None:
            decode_bytes.write_partials(scratch.other, scratch.other_stats, out, state, tile.used_rows, group)

        @when(group == SECOND)
        def _() -> None:
            # until the first warpgroup has read those of the item before
            plgpu.barrier_wait(scratch.other_free)
            put()
            plgpu.barrier_arrive(scratch.other_full)

        @when(group == FIRST)
        def _() -> None:
            put()
            plgpu.commit_smem()
            plgpu.barrier_wait(scratch.other_full)
            place = (item.b, item.kv_head, item.chunk)
            decode_bytes.write_merged(
                scratch.other,
                scratch.other_stats,
                self.outputs.out.at[place],
                self.outputs.stats.at[place],
                setup.softmax.takes_whole_scores,
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
        """S^T, softmax and V^T P^T of step n; returns `out`, [WARPS * value dim, columns], and the state."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        stored, dtype = typing.cast(str, tile.stored), setup.plan.dtype
        slot = kernel_parts.slot_of(first_step + n, tile.stages)
        number = setup.items.tile_number(self.inputs.work, item, n)
        start = setup.items.start(number)
        key_scale, value_scale = self.row_scales(item, start)
        plgpu.barrier_wait(scratch.key_full.at[slot])
        s = decode_bytes.byte_scores(scratch.key.at[slot], queries, tile.columns, stored, dtype)
        arrive_read(scratch.key_free.at[slot])
        s = self.final_scores(self.scaled(s, key_scale), programs, item, number, start)
        weights, factor, state = decode_bytes.byte_softmax(s, state, setup.softmax.takes_whole_scores)
        weights = self.scaled(weights, value_scale)
        plgpu.barrier_wait(scratch.value_full.at[slot])
        out = decode_bytes.add_byte_values(scratch.value.at[slot], weights, factor, out, stored, dtype)
        arrive_read(scratch.value_free.at[slot])
        return out, state
