"""The warpgroup of a CTA of the decode kernel on mma.sync whose tiles are bytes: quantised caches and few packed rows.

    S^T = K Q^T             bytes widened in registers; keys are rows, packed queries columns
    score, mask             registers (byte_scores.py)
    softmax                 one for each warp, over its own keys: no exchange between warps
    O^T += V^T P^T          bytes widened in registers, P transposed by movmatrix

fragments.py has the layouts, mma_consumer.py the rings. Packed queries are read from global memory, once an item where
registers can hold them, else in every step. At the end of an item the four warps write their sums to shared memory, and
the threads add them and write the partial result of the chunk.
"""

import functools
import math
import typing

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.decode import bytes as decode_bytes
from flexjax.backends.mosaic_gpu.decode.byte_scores import ByteScores
from flexjax.backends.mosaic_gpu.decode.bytes import WarpSoftmax
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.mma_consumer import KeyTile, MmaDecodeConsumer
from flexjax.backends.mosaic_gpu.forward.rows import Programs
from flexjax.backends.mosaic_gpu.forward.setup import present
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.backends.mosaic_gpu.machine.branch import cond
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Scalar, i32, slot_of
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPS

f32 = np.float32
Sums = tuple[jax.Array, WarpSoftmax]  # (O^T [WARPS * value dim, columns] float32, state of the softmax of each warp)
Carry = tuple[tuple[KeyTile, ...], jax.Array, WarpSoftmax]  # (the tiles of this step and the next `stages`, O^T, state)


class MmaByteConsumer(MmaDecodeConsumer, ByteScores):
    """The only warpgroup of a CTA whose key and value slots hold swizzled bytes (`DecodeTile.transposed`)."""

    def compute_item(self, item: DecodeItem) -> None:
        """Runs the steps of a work item, and writes its partial result: the sums of all warps."""
        setup, tile = self.setup, self.tile
        programs = Programs(
            self.at_item(setup.score, self.inputs.score, item), self.at_item(setup.mask, self.inputs.mask, item)
        )
        full = lambda value, rows: registers.splat(f32(value), "tile", (rows, tile.columns))
        start = full(0.0, WARPS * tile.value_dim), WarpSoftmax(full(-math.inf, 64), full(0.0, 64))
        # an item without steps copies nothing and writes sums 0 with references -inf
        if self.inputs.work.begin is None:
            out, state = self._byte_steps(item, programs, start)
        else:
            out, state = cond(item.total > 0, lambda: self._byte_steps(item, programs, start), lambda: start)
        partial, stats = present(self.scratch.other), present(self.scratch.other_stats)
        decode_bytes.write_partials(partial, stats, out, state, tile.used_rows, i32(0))
        self.copies.sync()
        place = (item.b, item.kv_head, item.chunk)
        results = self.outputs.out.at[place], self.outputs.stats.at[place]
        decode_bytes.write_merged(partial, stats, *results, setup.softmax.takes_whole_scores)
        self.copies.sync()  # all threads have read the sums before any of them writes those of the next item

    def _byte_steps(self, item: DecodeItem, programs: Programs, start: Sums) -> Sums:
        """Runs every step of an item that has steps; returns (O^T, state of each warp's softmax)."""
        tiles = self.begin(item)
        held = self._queries(item) if self.tile.holds_queries else None
        step = functools.partial(self._byte_step, item, programs, held)
        return lax.fori_loop(i32(0), item.total, step, (tiles, *start))[1:]

    def _queries(self, item: DecodeItem) -> jax.Array:
        """The packed queries of the item, from global memory to registers."""
        rows = self.inputs.query.at[item.b, item.kv_head, pl.ds(0, self.tile.columns)]
        return decode_bytes.query_fragments(rows)

    def _byte_step(
        self, item: DecodeItem, programs: Programs, held: jax.Array | None, n: Scalar, carry: Carry
    ) -> Carry:
        """S^T, softmax and V^T P^T of step n of the item; begins the copies of later steps."""
        setup, tile, scratch = self.setup, self.tile, self.scratch
        tiles, out, state = carry
        here, slot = tiles[0], slot_of(n, tile.stages)
        stored, dtype = typing.cast(str, tile.stored), setup.plan.dtype
        following = self.key_tile(item, n + tile.stages + 1)
        key_scale, value_scale = self.row_scales(item, here.start)
        # the packed queries, where registers do not hold them
        queries = self._queries(item) if held is None else held
        self.next_values(item, n, tiles)
        s = decode_bytes.byte_scores(scratch.key.at[slot], queries, tile.columns, stored, dtype)
        self.next_keys(item, n, tiles)
        s = self.final_scores(self.scaled(s, key_scale), programs, item, here.number, here.start)
        weights, factor, state = decode_bytes.byte_softmax(s, state, setup.softmax.takes_whole_scores)
        weights = self.scaled(weights, value_scale)
        out = decode_bytes.add_byte_values(scratch.value.at[slot], weights, factor, out, stored, dtype)
        return (*tiles[1:], following), out, state
