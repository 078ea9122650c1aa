"""The warpgroup of the forward kernel on tcgen05 that computes nothing: one warp copies by TMA, one issues products.

A step is one key tile. The warp that issues products runs, for the query tiles t of the CTA,

    S[t] of step 0                                     for every t
    step n:   wait for P[t];  out[t] += P[t] V;  S[t] of step n + 1        t = 0, then t = 1

so that the tensor cores multiply for one query tile while the other's warpgroup computes its softmax. P[t] lies over S[t] in tensor
memory: the product that writes S of step n + 1 comes after the one that reads P of step n from the same thread, and the tensor cores
execute products in that order. tcgen05.commit arrives at a barrier when all products that the thread issued before have completed; so S
of step n + 1 being full also says that `out` has P V of step n.

The copying warp fills rings of slots with keys and values; a slot is free again when the products that read it have completed. In a
persistent grid both warps go on with the next work item: its first S are computed while the other warpgroups write results.
"""

import dataclasses
from collections.abc import Callable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import one_warp, when
from flexjax.backends.mosaic_gpu.forward_pages import PagedTile
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import COPIED_ROWS, Tcgen05ForwardScratch, Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, overlaid, rows_of, slot_of
from flexjax.backends.mosaic_gpu.sm100_tiles import copied_rows
from flexjax.backends.mosaic_gpu.tile_scheduler import WorkItem

COPYING_WARP, PRODUCT_WARP = 0, 1


def each_item(
    setup: ForwardSetup[Tcgen05ForwardTile], inputs: Inputs[Ref], run: Callable[[WorkItem, Scalar], None]
) -> Scalar:
    """Calls `run` on each work item of this CTA that has visits; returns how many steps all have together. Both warps call it, and so go
    through the same items in the same order.

    run   (item, number of its first step, counted over the items of the CTA) -> nothing
    """
    scheduler = setup.scheduler

    def one(turn: Scalar, first_step: Scalar) -> Scalar:
        """Runs item number `turn` of the CTA if it has visits; returns the number of the first step of the next item.

        first_step   number of its first step, counted over the items of the CTA
        """
        item = scheduler.item(inputs.mask_rows, scheduler.number(turn))
        when(item.total > 0)(lambda: run(item, first_step))
        return first_step + item.total

    if not setup.tile.persistent:
        return one(i32(0), i32(0))
    return lax.fori_loop(i32(0), scheduler.turns(), one, i32(0))


@dataclasses.dataclass(frozen=True)
class IssuingWarps:
    """The warpgroup that copies and issues products.

    setup     what is known before the kernel is traced
    inputs    Refs to global memory
    scratch   Refs to the CTA's shared and tensor memory
    """

    setup: ForwardSetup[Tcgen05ForwardTile]
    inputs: Inputs[Ref]
    scratch: Tcgen05ForwardScratch[Ref]

    def run(self) -> None:
        """Copies for the work items of this CTA in one warp and issues their products in another, side by side; nothing for an item without
        visits. With two query tiles it lowers its register limit first.
        """
        if self.setup.tile.groups > 1:
            plgpu.set_max_registers(self.setup.tile.issuing_registers, action="decrease")

        @plgpu.warp_map  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        def by_warp(warp: Scalar) -> None:
            """Runs the loop of the copying or of the product warp, in one thread; the other warps do nothing."""
            with one_warp():
                when(warp == COPYING_WARP)(self._copy_items)
                when(warp == PRODUCT_WARP)(self._multiply_items)

    # ----------------------------------------------------------------- copies

    def _copy_items(self) -> None:
        """In the copying warp: frees every slot once, copies what each work item of the CTA reads, and waits until all slots are free
        again, because no arrival at a barrier may come after the end of the CTA.
        """
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
        """In the copying warp: begins the copies of the queries of the item, and of the keys and values of every step, each once its slot
        is free.

        first_step   number of its first step, counted over the items of the CTA
        """
        scratch = self.scratch
        if scratch.query_free is not None:
            plgpu.barrier_wait(scratch.query_free.at[0])
        self._copy_queries(item)

        def step(n: Scalar, _: None) -> None:
            """Begins the copies of the keys and values of step n, each once its slot is free; the loop carries nothing."""
            slot = slot_of(first_step + n, self.setup.tile.stages)
            self._copy_tile(item, n, slot, "key")
            self._copy_tile(item, n, slot, "value")

        lax.fori_loop(i32(0), item.total, step, None)

    def _copy_queries(self, item: WorkItem) -> None:
        """Begins to copy the queries of the item's query tiles, each 16 rows to their lanes (sm100_tiles.py), and does not wait; the slot
        must be free.
        """
        plan, tile = self.setup.plan, self.setup.tile
        for group in range(tile.groups):
            for lane, row in copied_rows():
                first = item.q_tile * tile.block_q + group * tile.rows + row
                source = rows_of(self.inputs.query, plan.layout, item.b, item.h, first, COPIED_ROWS)
                target = self.scratch.query.at[pl.ds(group * tile.rows + lane, COPIED_ROWS)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch.query_full.at[group])

    def _copy_tile(self, item: WorkItem, n: Scalar, slot: Scalar, name: str) -> None:
        """Begins to copy the keys or values of step n of the item to `slot`, once the slot is free.

        name   of the ring: "key" or "value"
        """
        plan, tile, inputs, scratch = self.setup.plan, self.setup.tile, self.inputs, self.scratch
        source, ring, full, free = {
            "key": (inputs.key, scratch.key, scratch.key_full, scratch.key_free),
            "value": (inputs.value, scratch.value, scratch.value_full, scratch.value_free),
        }[name]
        head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
        start = self.setup.scheduler.kv_start(self.inputs.mask_rows, item, n)
        plgpu.barrier_wait(free.at[slot])
        if inputs.pages is not None:
            paged = PagedTile(plan, tile.page_rows, self.setup.stored_pages, item.b, head, start)
            last_page = inputs.pages.values if name == "value" else None
            paged.copy(inputs.pages, source, last_page, ring.at[slot], full.at[slot])
            return
        plgpu.copy_gmem_to_smem(
            rows_of(source, plan.layout, item.b, head, start, tile.block_kv), ring.at[slot], full.at[slot]
        )

    # ----------------------------------------------------------------- products

    def _multiply_items(self) -> None:
        """In the product warp: issues the products of every work item of the CTA that has visits."""
        each_item(self.setup, self.inputs, self._multiply)

    def _multiply(self, item: WorkItem, first_step: Scalar) -> None:
        """In the product warp: issues the products of every step of the item, in the order at the top of this file. It waits for queries,
        keys, values and P, and not for the products; tcgen05.commit frees slots, and announces S and the finished `out`, when they have
        completed.

        first_step   number of its first step, counted over the items of the CTA
        """
        scratch, tile = self.scratch, self.setup.tile
        groups, stages = range(tile.groups), tile.stages
        first = slot_of(first_step, stages)
        plgpu.barrier_wait(scratch.key_full.at[first])
        for group in groups:
            plgpu.barrier_wait(scratch.query_full.at[group])
            self._multiply_keys(first, group)
        plgpu.tcgen05_commit_arrive(scratch.key_free.at[first])

        def step(n: Scalar, _: None) -> None:
            """Issues P V of step n and S of step n + 1, if the item has it, of every query tile, once values, keys and P are there.
            tcgen05.commit then frees the slots, and after the last step announces `out`; the loop carries nothing.
            """
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
        """Issues S = Q K^T of query tile `group` with the keys in `slot` of their ring; queries and keys must have arrived. `scores_full`
        of the tile gets an arrival when the product has completed.
        """
        scratch, tile = self.scratch, self.setup.tile
        scores, _ = overlaid(scratch.scores_and_weights)
        queries = scratch.query.at[pl.ds(group * tile.rows, tile.rows)] if tile.groups > 1 else scratch.query
        keys = scratch.key.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(scores.at[group], queries, keys, accumulate=False)
        plgpu.tcgen05_commit_arrive(scratch.scores_full.at[group])

    def _multiply_values(self, n: Scalar, slot: Scalar, group: int) -> None:
        """Issues out += P V of step n of query tile `group` with the values in `slot` of their ring; in step 0 out = P V. P must be there
        (`weights_full`), and the values must have arrived.
        """
        scratch = self.scratch
        _, weights = overlaid(scratch.scores_and_weights)
        p = weights.at[group, :, pl.ds(0, self.setup.tile.block_kv)]
        plgpu.tcgen05_mma(scratch.out.at[group], p, scratch.value.at[slot], accumulate=n > 0)
