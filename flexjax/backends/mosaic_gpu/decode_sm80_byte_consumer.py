"""The warpgroup of a CTA of the decode kernel on mma.sync whose tiles are bytes: quantised caches and few packed rows.

    S^T = K Q^T             bytes widened in registers; keys are rows, packed queries columns
    score, mask             registers (decode_byte_scores.py)
    softmax                 one for each warp, over its own keys: no exchange between warps
    O^T += V^T P^T          bytes widened in registers, P transposed by movmatrix

The products are those of the kernel for Hopper (decode_fragments.py has the layouts), the rings and their copies those of
decode_sm80_consumer.py. Packed queries are read from global memory, once an item where registers can hold them, else in every step. At the
end of an item the four warps write their sums to shared memory, and the threads add them and write the partial result of the chunk.
"""

import functools
import math
import typing

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu import decode_bytes, registers
from flexjax.backends.mosaic_gpu.branch import cond
from flexjax.backends.mosaic_gpu.decode_byte_scores import ByteScores
from flexjax.backends.mosaic_gpu.decode_bytes import WarpSoftmax
from flexjax.backends.mosaic_gpu.decode_consumer import Programs
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_sm80_consumer import KeyTile, MmaDecodeConsumer
from flexjax.backends.mosaic_gpu.forward_setup import present
from flexjax.backends.mosaic_gpu.kernel_parts import Scalar, i32, slot_of
from flexjax.backends.mosaic_gpu.warpgroup import WARPS

f32 = np.float32
Sums = tuple[jax.Array, WarpSoftmax]
"""(O^T [WARPS * value dim, columns] float32, state of the softmax of each warp)."""
Carry = tuple[tuple[KeyTile, ...], jax.Array, WarpSoftmax]
"""(the tiles of this step and the next `stages`, O^T, state)."""


class MmaByteConsumer(MmaDecodeConsumer, ByteScores):
    """The only warpgroup of a CTA whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def compute_item(self, item: DecodeItem) -> None:
        """Runs the steps of a work item and writes its partial result to `outputs`: the warps write their sums to shared memory, all meet,
        and the threads merge them. An item without steps copies nothing and writes sums 0 with references -inf.
        """
        setup, tile, interpret = self.setup, self.tile, self.setup.interpret
        programs = Programs(
            self.at_item(setup.score, self.inputs.score, item), self.at_item(setup.mask, self.inputs.mask, item)
        )
        full = lambda value, rows: registers.splat(f32(value), "tile", (rows, tile.columns), interpret)
        start = full(0.0, WARPS * tile.value_dim), WarpSoftmax(full(-math.inf, 64), full(0.0, 64))
        if self.inputs.work.begin is None:
            out, state = self._byte_steps(item, programs, start)
        else:
            out, state = cond(item.total > 0, lambda: self._byte_steps(item, programs, start), lambda: start)
        partial, stats = present(self.scratch.other), present(self.scratch.other_stats)
        decode_bytes.write_partials(partial, stats, out, state, tile.used_rows, i32(0), interpret)
        self.copies.sync()
        place = (item.b, item.kv_head, item.chunk)
        results = self.outputs.out.at[place], self.outputs.stats.at[place]
        decode_bytes.write_merged(partial, stats, *results, setup.large_scores, interpret)
        self.copies.sync()  # all threads have read the sums before any of them writes those of the next item

    def _byte_steps(self, item: DecodeItem, programs: Programs, start: Sums) -> Sums:
        """Begins the copies of an item, and runs every step; returns (O^T, state of each warp's softmax) after the last. For an item
        without steps no keys and values are copied, and `start` is returned.

        programs   of `at_item`
        start      the sums and the state before the first step
        """
        tiles = self.begin(item)
        held = self._queries(item) if self.tile.holds_queries else None
        step = functools.partial(self._byte_step, item, programs, held)
        return lax.fori_loop(i32(0), item.total, step, (tiles, *start))[1:]

    def _queries(self, item: DecodeItem) -> jax.Array:
        """The packed queries of the item, read from global memory to registers, as `decode_bytes.byte_scores` takes them."""
        rows = self.inputs.query.at[item.b, item.kv_head, pl.ds(0, self.tile.columns)]
        return decode_bytes.query_fragments(rows, self.setup.interpret)

    def _byte_step(
        self, item: DecodeItem, programs: Programs, held: jax.Array | None, n: Scalar, carry: Carry
    ) -> Carry:
        """S^T, softmax and V^T P^T of step n of the item; waits for its keys and values, and begins the copies of later steps.

        programs   of `at_item`
        held       the packed queries; None: they are read here
        carry      before the step; the same for step n + 1 is returned
        """
        setup, tile, scratch, interpret = self.setup, self.tile, self.scratch, self.setup.interpret
        tiles, out, state = carry
        here, slot = tiles[0], slot_of(n, tile.stages)
        stored, dtype = typing.cast(str, tile.stored), setup.plan.dtype
        following = self.key_tile(item, n + tile.stages + 1)
        key_scale, value_scale = self.row_scales(item, here.start)
        queries = self._queries(item) if held is None else held
        self.next_values(item, n, tiles)
        s = decode_bytes.byte_scores(scratch.key.at[slot], queries, tile.columns, stored, dtype, interpret)
        self.next_keys(item, n, tiles)
        s = self.final_scores(self.scaled(s, key_scale), programs, item, here.number, here.start)
        weights, factor, state = decode_bytes.byte_softmax(s, state, setup.large_scores, interpret)
        weights = self.scaled(weights, value_scale)
        out = decode_bytes.add_byte_values(scratch.value.at[slot], weights, factor, out, stored, dtype, interpret)
        return (*tiles[1:], following), out, state
