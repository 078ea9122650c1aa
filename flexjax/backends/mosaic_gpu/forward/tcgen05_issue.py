"""The warpgroup of the forward kernel on tcgen05 that computes nothing: one warp copies by TMA, one issues products.

A step is one key tile. The warp that issues products runs, for the query tiles t of the CTA,

    S[t] of step 0                                     for every t
    step n:   wait for P[t];  out[t] += P[t] V;  S[t] of step n + 1        t = 0, then t = 1

so that the tensor cores multiply for one query tile while the other's warpgroup computes its softmax. P[t] lies over
S[t] in tensor memory: the product that writes S of step n + 1 comes after the one that reads P of step n from the same
thread, and the tensor cores execute products in that order. tcgen05.commit arrives at a barrier when all products that
the thread issued before have completed; so S of step n + 1 being full also says that `out` has P V of step n.

The copying warp fills rings of slots with keys and values; a slot is free again when the products that read it have
completed. In a persistent grid both warps go on with the next work item: its first S are computed while the other
warpgroups write results.
"""

import dataclasses
from collections.abc import Callable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward.pages import PagedTile
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.machine.branch import one_warp, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, overlaid, rows_of, slot_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import COPIED_ROWS
from flexjax.backends.mosaic_gpu.machine.tcgen05_tiles import copied_rows

COPYING_WARP, PRODUCT_WARP = 0, 1


def each_item(
    setup: ForwardSetup[Tcgen05ForwardTile], inputs: ForwardInputs[Ref], run: Callable[[WorkItem, Scalar], None]
) -> Scalar:
    """Calls `run`(item, its first step) on each item of this CTA that has visits; returns the sum of their steps."""
    scheduler = setup.scheduler

    def one(turn: Scalar, first_step: Scalar) -> Scalar:
        item = scheduler.item(inputs.mask_rows, scheduler.number(turn))
        when(item.total > 0)(lambda: run(item, first_step))
        return first_step + item.total

    if not setup.tile.persistent:
        return one(i32(0), i32(0))
    return lax.fori_loop(i32(0), scheduler.turns(), one, i32(0))


@dataclasses.dataclass(frozen=True)
class IssuingWarps:
    """The warpgroup that copies and issues products."""

    setup: ForwardSetup[Tcgen05ForwardTile]
    inputs: ForwardInputs[Ref]
    scratch: Tcgen05ForwardScratch[Ref]

    def run(self) -> None:
        """Copies for the work items of this CTA in one warp and issues their products in another, side by side."""
        if self.setup.tile.groups > 1:
            plgpu.set_max_registers(self.setup.tile.issuing_registers, action="decrease")

        @plgpu.warp_map  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        def by_warp(warp: Scalar) -> None:
            with one_warp():
                when(warp == COPYING_WARP)(self._copy_items)
                when(warp == PRODUCT_WARP)(self._multiply_items)

    # ----------------------------------------------------------------- copies

    def _copy_items(self) -> None:
        """In the copying warp: frees every slot once, copies for each work item, and waits until all slots are free."""
        scratch, stages = self.scratch, self.setup.tile.stages
        if scratch.query_free is not None:
            plgpu.barrier_arrive(scratch.query_free.at[0])
        for slot in range(stages):
            plgpu.barrier_arrive(scratch.key_free.at[slot])
            plgpu.barrier_arrive(scratch.value_free.at[slot])
        steps = each_item(self.setup, self.inputs, self._copy)
        for n in range(stages):  # no arrival at a barrier may come after the end of the CTA
            slot = slot_of(steps + n, stages)
            plgpu.barrier_wait(scratch.key_free.at[slot])
            plgpu.barrier_wait(scratch.value_free.at[slot])
        if scratch.query_free is not None:
            plgpu.barrier_wait(scratch.query_free.at[0])

    def _copy(self, item: WorkItem, first_step: Scalar) -> None:
        """In the copying warp: begins the copies of the item's queries, and of the keys and values of every step."""
        scratch = self.scratch
        if scratch.query_free is not None:
            plgpu.barrier_wait(scratch.query_free.at[0])
        self._copy_queries(item)

        def step(n: Scalar, _: None) -> None:
            slot = slot_of(first_step + n, self.setup.tile.stages)
            self._copy_tile(item, n, slot, "key")
            self._copy_tile(item, n, slot, "value")

        lax.fori_loop(i32(0), item.total, step, None)

    def _copy_queries(self, item: WorkItem) -> None:
        """Begins to copy the item's queries to the free slot, 16 rows at a time (machine/tcgen05_tiles.py)."""
        plan, tile = self.setup.plan, self.setup.tile
        for group in range(tile.groups):
            for lane, row in copied_rows():
                first = item.q_tile * tile.block_q + group * tile.rows + row
                source = rows_of(self.inputs.query, plan.layout, item.b, item.h, first, COPIED_ROWS)
                target = self.scratch.query.at[pl.ds(group * tile.rows + lane, COPIED_ROWS)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch.query_full.at[group])

    def _copy_tile(self, item: WorkItem, n: Scalar, slot: Scalar, name: str) -> None:
        """Begins to copy the keys or values (`name`) of step n of the item to `slot`, once the slot is free."""
        plan, tile, inputs, scratch = self.setup.plan, self.setup.tile, self.inputs, self.scratch
        source, ring, full, free = {
            "key": (inputs.key, scratch.key, scratch.key_full, scratch.key_free),
            "value": (inputs.value, scratch.value, scratch.value_full, scratch.value_free),
        }[name]
        head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
        start = self.setup.scheduler.kv_start(self.inputs.mask_rows, item, n)
        plgpu.barrier_wait(free.at[slot])
        if inputs.pages is not None:
            paged = PagedTile(plan, tile.page_rows, item.b, head, start)
            last_page = inputs.pages.values if name == "value" else None
            paged.copy(inputs.pages, source, last_page, ring.at[slot], full.at[slot])
            return
        plgpu.copy_gmem_to_smem(
            rows_of(source, plan.layout, item.b, head, start, tile.block_kv), ring.at[slot], full.at[slot]
        )

    # ----------------------------------------------------------------- products

    def _multiply_items(self) -> None:
        each_item(self.setup, self.inputs, self._multiply)

    def _multiply(self, item: WorkItem, first_step: Scalar) -> None:
        """In the product warp: issues the products of every step of the item; does not wait for them."""
        scratch, tile = self.scratch, self.setup.tile
        groups, stages = range(tile.groups), tile.stages
        first = slot_of(first_step, stages)
        plgpu.barrier_wait(scratch.key_full.at[first])
        for group in groups:
            plgpu.barrier_wait(scratch.query_full.at[group])
            self._multiply_keys(first, group)
        plgpu.tcgen05_commit_arrive(scratch.key_free.at[first])

        def step(n: Scalar, _: None) -> None:
            """Issues P V of step n and S of step n + 1 of every query tile; tcgen05.commit frees the slots."""
            more = n + 1 < item.total
            slot, next_slot = slot_of(first_step + n, stages), slot_of(first_step + n + 1, stages)
            plgpu.barrier_wait(scratch.value_full.at[slot])
            when(more)(lambda: plgpu.barrier_wait(scratch.key_full.at[next_slot]))
            for group in groups:
                plgpu.barrier_wait(scratch.weights_full.at[group])
                self._multiply_values(n, slot, group)
                when(more)(lambda group=group: self._multiply_keys(next_slot, group))
                when(~more)(lambda group=group: plgpu.tcgen05_commit_arrive(scratch.out_full.at[group]))
            plgpu.tcgen05_commit_arrive(scratch.value_free.at[slot])
            when(more)(lambda: plgpu.tcgen05_commit_arrive(scratch.key_free.at[next_slot]))

        lax.fori_loop(i32(0), item.total, step, None)
        if scratch.query_free is not None:
            plgpu.tcgen05_commit_arrive(scratch.query_free.at[0])

    def _multiply_keys(self, slot: Scalar, group: int) -> None:
        """Issues S = Q K^T of query tile `group` with the keys in `slot`; both must have arrived."""
        scratch, tile = self.scratch, self.setup.tile
        scores, _ = overlaid(scratch.scores_and_weights)
        queries = scratch.query.at[pl.ds(group * tile.rows, tile.rows)] if tile.groups > 1 else scratch.query
        keys = scratch.key.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(scores.at[group], queries, keys, accumulate=False)
        plgpu.tcgen05_commit_arrive(scratch.scores_full.at[group])

    def _multiply_values(self, n: Scalar, slot: Scalar, group: int) -> None:
        """Issues out += P V of step n (in step 0 out = P V) of query tile `group`; P and the values must be there."""
        scratch = self.scratch
        _, weights = overlaid(scratch.scores_and_weights)
        p = weights.at[group, :, pl.ds(0, self.setup.tile.block_kv)]
        plgpu.tcgen05_mma(scratch.out.at[group], p, scratch.value.at[slot], accumulate=n > 0)
