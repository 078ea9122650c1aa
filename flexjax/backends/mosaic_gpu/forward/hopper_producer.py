"""The producer of the forward kernel: a warpgroup that copies queries, keys and values into rings by TMA.

For each work item (one query tile with the key tiles that it visits, tile_scheduler.py) it fills a query slot, and for
each step (one key tile) a key slot and a value slot. Keys are copied one step ahead of values, because consumers
release a key slot half a step before the value slot. A slot is written only after every consumer has released it
(hopper_barriers.py). A tile of keys in pages is copied in parts (pages.py).
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward import tile_scheduler
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardScratch
from flexjax.backends.mosaic_gpu.forward.pages import PagedTile
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, HopperSetup, present
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.machine import kernel_parts
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, copy_parts, i32, slot_parts
from flexjax.backends.mosaic_gpu.machine.simulator import only_simulated
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram


@dataclasses.dataclass(frozen=True)
class Producer:
    """The producer warpgroup of one CTA; `n` counts the steps of a work item from 0."""

    setup: HopperSetup
    inputs: ForwardInputs[Ref]
    scratch: ForwardScratch[Ref]

    def run(self) -> None:
        """Copies the queries, keys, values and staged tiles of every work item of this CTA to the rings."""
        tile, slots, scratch = self.setup.tile, self.setup.slots, self.scratch
        if tile.groups > 1:
            plgpu.set_max_registers(tile.producer_registers, action="decrease")
        turns = self._each_item(self._copy_item)

        def drain() -> None:
            for slot in range(tile.dynamic_scheduler, tile.query_slots):
                slots.acquire("query", scratch.query_free, kernel_parts.slot_of(turns + slot, tile.query_slots))
            for slot in range(tile.stages):
                slots.acquire("key", scratch.key_free, slot)
            for slot in range(tile.value_stages):
                slots.acquire("value", scratch.value_free, slot)
            for slot in range(tile.staged_slots):
                slots.acquire("staged", scratch.staged_free, slot)

        only_simulated(drain)

    def _each_item(self, copy_item: Callable[[WorkItem, Scalar, Scalar], Scalar]) -> Scalar:
        """Calls `copy_item`(item, number in this CTA, first step) -> next first step, on each; returns how many."""
        scheduler, tile, mask_rows = self.setup.scheduler, self.setup.tile, self.inputs.mask_rows
        if not tile.dynamic_scheduler:
            own = lambda turn, step: copy_item(scheduler.item(mask_rows, scheduler.number(turn)), turn, step)
            lax.fori_loop(i32(0), scheduler.turns(), own, i32(0))
            return scheduler.turns()
        mailbox = present(self.scratch.mailbox)

        def one(state: tuple[Scalar, Scalar, Scalar, Scalar]) -> tuple[Scalar, Scalar, Scalar, Scalar]:
            """Copies an item; state: (whether there is one, its number in the call and in the CTA, its first step)."""
            _, number, turn, step = state
            step = copy_item(scheduler.item(mask_rows, number), turn, step)
            number = tile_scheduler.next_number(self.inputs.counter, mailbox, number, scheduler.programs)
            return number < scheduler.items, number, turn + 1, step

        first = (jnp.asarray(True), lax.axis_index("program"), i32(0), i32(0))
        _, _, turns, _ = lax.while_loop(lambda state: state[0], one, first)
        slot = kernel_parts.slot_of(turns, tile.query_slots)
        self.setup.slots.acquire("query", self.scratch.query_free, slot)
        tile_scheduler.put(mailbox, slot, None)  # no more items
        for _ in range(tile.query_parts):
            plgpu.barrier_arrive(self.scratch.query_full.at[slot])
        return turns

    def _copy_item(self, item: WorkItem, turn: Scalar, first_step: Scalar) -> Scalar:
        """Copies for work item `turn` of the CTA; returns the number of the step after its last."""
        plan, tile, slots = self.setup.plan, self.setup.tile, self.setup.slots
        inputs, scratch = self.inputs, self.scratch
        kv_head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
        q_slot = kernel_parts.slot_of(turn, tile.query_slots)
        slots.acquire("query", scratch.query_free, q_slot)
        if tile.dynamic_scheduler:
            tile_scheduler.put(present(scratch.mailbox), q_slot, item)
        copy_parts(
            self.setup.plan, inputs.query, item.b, item.h, item.q_tile * tile.block_q,
            slot_parts(scratch.query, q_slot, tile.query_parts), scratch.query_full.at[q_slot],
        )  # fmt: skip

        def copy_tile(n: Scalar, name: str, source: Ref, ring: Ref, full: Ref, free: Ref | None, count: int) -> None:
            """Starts the copy of the keys or values (`name`) of step n of the item, once its slot is free."""
            slot = kernel_parts.slot_of(first_step + n, count)
            start = self.setup.scheduler.kv_start(inputs.mask_rows, item, n)
            slots.acquire(name, free, slot)
            if inputs.pages is not None:
                paged = PagedTile(plan, tile.page_rows, item.b, kv_head, start)
                last_page = inputs.pages.values if name == "value" else None
                paged.copy(inputs.pages, source, last_page, ring.at[slot], full.at[slot])
                return
            if tile.float8 and name == "value":
                values = source.at[item.b, kv_head, :, pl.ds(start, tile.block_kv)]
                plgpu.copy_gmem_to_smem(values, ring.at[slot, pl.ds(0, tile.value_dim)], full.at[slot])
                return
            parts = tile.key_parts if name == "key" else tile.value_parts
            copy_parts(plan, source, item.b, kv_head, start, slot_parts(ring, slot, parts), full.at[slot])

        def copy_keys(n: Scalar) -> None:
            copy_tile(n, "key", inputs.key, scratch.key, scratch.key_full, scratch.key_free, tile.stages)

        def copy_step(n: Scalar, _: None) -> None:
            when(n + 1 < item.total)(lambda: copy_keys(n + 1))
            if self.setup.staged is not None:
                self._copy_staged(item, n, first_step)
            copy_tile(
                n, "value", inputs.value, scratch.value, scratch.value_full, scratch.value_free, tile.value_stages
            )

        when(item.total > 0)(lambda: copy_keys(i32(0)))
        lax.fori_loop(i32(0), item.total, copy_step, None)
        return first_step + item.total

    def _copy_staged(self, item: WorkItem, n: Scalar, first_step: Scalar) -> None:
        """Starts the copy of the staged array's tile for step n: the item's queries and the step's keys."""
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        assert setup.staged is not None
        assert setup.plan.score is not None
        slot = kernel_parts.slot_of(first_step + n, tile.staged_slots)
        start = setup.scheduler.kv_start(self.inputs.mask_rows, item, n)
        setup.slots.acquire("staged", scratch.staged_free, slot)
        leading = TileProgram(
            setup.plan.score, self.inputs.score, (tile.rows, tile.block_kv), Place(item.b, item.h)
        ).scalar_values(setup.staged.index[:-2])
        rows, columns = pl.ds(item.q_tile * tile.block_q, tile.block_q), pl.ds(start, tile.block_kv)
        source = self.inputs.score[setup.staged.capture].at[(*leading, rows, columns)]
        target, full = present(scratch.staged), present(scratch.staged_full)
        plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])
