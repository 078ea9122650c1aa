"""The producer of the decode kernel: one warpgroup that copies packed queries, keys and values by TMA.

It fills rings in shared memory: a query slot for each work item, and a slot of keys and one of values for each key tile
that the item visits. It starts on the next work item while the consumers still compute, so memory is read while they
merge and write. A tile of a cache in pages is copied in `DecodeTile.copies` parts, each from one page of the table; all
parts arrive at the barrier of one slot.
"""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.decode.hopper_tiles import DecodeScratch
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.setup import DecodeInputs, DecodeSetup
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, rows_of
from flexjax.backends.mosaic_gpu.machine.simulator import only_simulated


@dataclasses.dataclass(frozen=True)
class DecodeProducer:
    """The producer warpgroup of one CTA."""

    setup: DecodeSetup
    inputs: DecodeInputs[Ref]
    scratch: DecodeScratch[Ref]

    def run(self) -> None:
        """Copies what every work item of this CTA reads."""
        tile, items, scratch = self.setup.tile, self.setup.items, self.scratch
        plgpu.set_max_registers(tile.producer_registers, action="decrease")
        turns = items.turns(self.inputs.work)
        lax.fori_loop(i32(0), turns, self._copy_item, i32(0))

        def drain() -> None:
            for slot in range(tile.query_slots):
                plgpu.barrier_wait(scratch.query_free.at[slot])
            for slot in range(tile.stages):
                plgpu.barrier_wait(scratch.key_free.at[slot])
                plgpu.barrier_wait(scratch.value_free.at[slot])

        only_simulated(drain)

    def _copy_item(self, turn: Scalar, first_step: Scalar) -> Scalar:
        """Starts the copies of work item `turn`, once slots are free; returns the next item's first step."""
        setup, tile, inputs, scratch = self.setup, self.setup.tile, self.inputs, self.scratch
        item = setup.items.item(inputs.work, turn)
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        plgpu.barrier_wait(scratch.query_free.at[slot])
        rows = inputs.query.at[
            item.b, item.kv_head, pl.ds(item.total * 0, tile.query_rows)
        ]  # rows past the end come as zeros
        plgpu.copy_gmem_to_smem(rows, scratch.query.at[slot], scratch.query_full.at[slot])

        def copy_step(n: Scalar, _: None) -> None:
            slot = kernel_parts.slot_of(first_step + n, tile.stages)
            start = setup.items.start(setup.items.tile_number(inputs.work, item, n))
            plgpu.barrier_wait(scratch.key_free.at[slot])
            self._copy_tile(inputs.key, scratch.key.at[slot], scratch.key_full.at[slot], item, start)
            plgpu.barrier_wait(scratch.value_free.at[slot])
            self._copy_tile(inputs.value, scratch.value.at[slot], scratch.value_full.at[slot], item, start)

        lax.fori_loop(i32(0), item.total, copy_step, None)
        return setup.items.next_step(first_step, item)

    def _copy_tile(self, source: Ref, target: Ref, full: Ref, item: DecodeItem, start: Scalar) -> None:
        """Starts the copies of a tile into a free slot: one, or one for each part of `page_rows` keys."""
        setup, tile = self.setup, self.setup.tile
        if not setup.page:
            rows = rows_of(source, setup.plan.layout, item.b, item.kv_head, start, tile.block_kv)
            plgpu.copy_gmem_to_smem(rows, target, full)
            return
        assert self.inputs.pages is not None
        for n in range(tile.copies):
            # A part past the last key copies the tile's first part instead: its own page need not exist, and memory
            # that was never written could hold NaN.
            key = start + i32(n * tile.page_rows)
            key = lax.select(key < item.end, key, start) if n else key
            number, row = lax.div(key, i32(setup.page)), lax.rem(key, i32(setup.page))
            page = self.inputs.pages[item.b, number]
            # For a number that is not in the cache, a page past the end of the array is read, where TMA gives zeros.
            page = lax.select((page >= 0) & (page < setup.stored_pages), page, i32(setup.stored_pages))
            rows = rows_of(source, "BTNH", page, item.kv_head, row, tile.page_rows)
            plgpu.copy_gmem_to_smem(rows, target.at[pl.ds(n * tile.page_rows, tile.page_rows)], full)
