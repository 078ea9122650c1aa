"""The warpgroup of the forward kernel on tcgen05 that computes nothing: one warp copies by TMA, one issues products.

A step is one key tile. The warp that issues products runs, for the query tiles t of the CTA,

    S[t] of step 0                                     for every t
    step n:   wait for P[t];  out[t] += P[t] V;  S[t] of step n + 1        t = 0, then t = 1

so that the tensor cores multiply for one query tile while the other's warpgroup computes its softmax. P[t] lies over S[t] in tensor
memory: the product that writes S of step n + 1 comes after the one that reads P of step n from the same thread, and the tensor cores
execute products in that order. tcgen05.commit arrives at a barrier when all products that the thread issued before have completed; so S
of step n + 1 being full also says that `out` has P V of step n.

The copying warp fills rings of slots with keys and values; a slot is free again when the products that read it have completed.
"""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import one_warp, when
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import COPIED_ROWS, Tcgen05ForwardScratch, Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, overlaid, rows_of, slot_of
from flexjax.backends.mosaic_gpu.sm100_tiles import copied_rows
from flexjax.backends.mosaic_gpu.tile_scheduler import WorkItem

COPYING_WARP, PRODUCT_WARP = 0, 1


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
        """Copies and issues the products of the work item of this CTA; nothing for one without visits."""
        if self.setup.tile.groups > 1:
            plgpu.set_max_registers(self.setup.tile.issuing_registers, action="decrease")
        item = self.setup.scheduler.item(self.inputs.mask_rows, lax.axis_index("program"))

        @plgpu.warp_map  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        def by_warp(warp: Scalar) -> None:
            """Each warp its own loop."""
            with one_warp():
                when((warp == COPYING_WARP) & (item.total > 0))(lambda: self._copy(item))
                when((warp == PRODUCT_WARP) & (item.total > 0))(lambda: self._multiply(item))

    # ----------------------------------------------------------------- copies

    def _copy(self, item: WorkItem) -> None:
        """Copies the queries of the item, and keys and values of every step."""
        scratch, stages = self.scratch, self.setup.tile.stages
        self._copy_queries(item)
        for slot in range(stages):
            plgpu.barrier_arrive(scratch.key_free.at[slot])
            plgpu.barrier_arrive(scratch.value_free.at[slot])

        def step(n: Scalar, _: None) -> None:
            """Begins the copies of step n, when their slots are free."""
            self._copy_tile(item, n, self.inputs.key, scratch.key, scratch.key_full, scratch.key_free)
            self._copy_tile(item, n, self.inputs.value, scratch.value, scratch.value_full, scratch.value_free)

        lax.fori_loop(i32(0), item.total, step, None)
        for n in range(stages):  # no arrival at a barrier may come after the end of the CTA
            slot = slot_of(item.total + n, stages)
            plgpu.barrier_wait(scratch.key_free.at[slot])
            plgpu.barrier_wait(scratch.value_free.at[slot])

    def _copy_queries(self, item: WorkItem) -> None:
        """Begins to copy the queries of the CTA, each 16 rows to their lanes (sm100_tiles.py)."""
        plan, tile = self.setup.plan, self.setup.tile
        for group in range(tile.groups):
            for lane, row in copied_rows():
                first = item.q_tile * tile.block_q + group * tile.rows + row
                source = rows_of(self.inputs.query, plan.layout, item.b, item.h, first, COPIED_ROWS)
                target = self.scratch.query.at[pl.ds(group * tile.rows + lane, COPIED_ROWS)]
                plgpu.copy_gmem_to_smem(source, target, self.scratch.query_full.at[group])

    def _copy_tile(self, item: WorkItem, n: Scalar, source: Ref, ring: Ref, full: Ref, free: Ref) -> None:
        """Begins to copy the keys or values of step n, when their slot is free.

        source             the array in global memory
        ring, full, free   the slots in shared memory and their barriers
        """
        plan, tile = self.setup.plan, self.setup.tile
        slot = slot_of(n, tile.stages)
        head = lax.div(item.h, i32(plan.group)) if plan.group > 1 else item.h
        start = self.setup.scheduler.kv_start(self.inputs.mask_rows, item, n)
        plgpu.barrier_wait(free.at[slot])
        plgpu.copy_gmem_to_smem(
            rows_of(source, plan.layout, item.b, head, start, tile.block_kv), ring.at[slot], full.at[slot]
        )

    # ----------------------------------------------------------------- products

    def _multiply(self, item: WorkItem) -> None:
        """Issues the products of every step of the item."""
        scratch, tile = self.scratch, self.setup.tile
        groups, stages = range(tile.groups), tile.stages
        plgpu.barrier_wait(scratch.key_full.at[0])
        for group in groups:
            plgpu.barrier_wait(scratch.query_full.at[group])
            self._multiply_keys(i32(0), group)
        plgpu.tcgen05_commit_arrive(scratch.key_free.at[0])

        def step(n: Scalar, _: None) -> None:
            """P V of step n and S of step n + 1 of every query tile."""
            more = n + 1 < item.total
            slot, next_slot = slot_of(n, stages), slot_of(n + 1, stages)
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

    def _multiply_keys(self, slot: Scalar, group: int) -> None:
        """Issues S = Q K^T of a query tile with the keys in a slot; `scores_full` gets an arrival when it has completed."""
        scratch, tile = self.scratch, self.setup.tile
        scores, _ = overlaid(scratch.scores_and_weights)
        queries = scratch.query.at[pl.ds(group * tile.rows, tile.rows)] if tile.groups > 1 else scratch.query
        keys = scratch.key.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(scores.at[group], queries, keys, accumulate=False)
        plgpu.tcgen05_commit_arrive(scratch.scores_full.at[group])

    def _multiply_values(self, n: Scalar, slot: Scalar, group: int) -> None:
        """Issues out += P V of step n of a query tile with the values in a slot; in step 0 out = P V."""
        scratch = self.scratch
        _, weights = overlaid(scratch.scores_and_weights)
        p = weights.at[group, :, pl.ds(0, self.setup.tile.block_kv)]
        plgpu.tcgen05_mma(scratch.out.at[group], p, scratch.value.at[slot], accumulate=n > 0)
