"""A warpgroup of the forward kernel on tcgen05 that computes: the softmax of one query tile of 128 rows.

    S          from tensor memory, written by the product Q K^T (forward_sm100_issue.py)
    score, mask, P      as in the other forward kernels (forward_rows.py)
    P          to tensor memory, over S
    out        stays in tensor memory, where the tensor cores add P V; multiplied by the rescaling factor here, only in warps where
               a reference rose (`lazy_rescale`)

When S of step n is there, P V of step n - 1 has completed, so `out` may be rescaled without another barrier, until P of step n is
announced. After the last step `out` is divided and written to global memory from registers.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import registers
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.forward_rows import Phase, Position, QueryRows, programs_at_rows
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, overlaid, rows_of
from flexjax.backends.mosaic_gpu.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.sm80_results import write_rows
from flexjax.backends.mosaic_gpu.sm100_tiles import load_tile, store_tile, stored
from flexjax.backends.mosaic_gpu.thread_tiles import rounded_tile

COLUMNS_AT_ONCE = 32
"""Columns of the output that a thread has in registers while they are rescaled or written."""


@dataclasses.dataclass(frozen=True)
class SoftmaxRows(QueryRows[Tcgen05ForwardTile]):
    """The rows of one work item that one warpgroup computes: beside the fields of QueryRows

    scratch   Refs to the CTA's shared and tensor memory
    group     number of the warpgroup, and of its query tile in the CTA
    q_start   number of the first row
    """

    scratch: Tcgen05ForwardScratch[Ref]
    group: Scalar
    q_start: Scalar

    @classmethod
    def of(
        cls,
        setup: ForwardSetup[Tcgen05ForwardTile],
        inputs: Inputs[Ref],
        outputs: Outputs[Ref],
        scratch: Tcgen05ForwardScratch[Ref],
        turn: Scalar,
    ) -> "SoftmaxRows":
        """The rows of this warpgroup in the work item that is number `turn` of this CTA, with the row vectors of the programs computed."""
        tile, group = setup.tile, lax.axis_index("wg")
        item = setup.scheduler.item(inputs.mask_rows, setup.scheduler.number(turn))
        q_start = item.q_tile * tile.block_q + group * tile.rows
        programs = programs_at_rows(setup, inputs, item, q_start)
        return cls(setup, inputs, outputs, item, programs, scratch, group, q_start)

    def compute(self) -> None:
        """Computes the softmax of every step of the work item and writes its results. An item without visits, which only a
        block mask has, gets the results of rows without visible keys.
        """
        start = self.setup.softmax.start
        visits = self.item.total > 0
        state = (
            self._steps(start)
            if self.setup.plan.blocks is None
            else cond(visits, lambda: self._steps(start), lambda: start)
        )
        position = Position(self.item.b, self.item.h, self.item.q_tile)
        divisor = self.write_statistics(self.row_term, state, position, self.q_start)
        when(visits)(lambda: plgpu.barrier_wait(self.scratch.out_full.at[self.group]))
        self._write(divisor, position)

    # ----------------------------------------------------------------- the steps

    def _steps(self, state: State) -> State:
        """Runs every step of an item that has some, the unmasked ones first; returns the softmax state after the last.

        state   before the first step
        """
        unmasked, total = self.item.unmasked, self.item.total
        starts = [self.start(n, phase) for n, phase in ((i32(0), Phase.UNMASKED), (unmasked, Phase.MASKED))]
        step = functools.partial(self._step, phase=Phase.UNMASKED)
        _, state = lax.fori_loop(i32(0), unmasked, step, (starts[0], state))
        if self.setup.has_masked_steps:
            step = functools.partial(self._step, phase=Phase.MASKED)
            _, state = lax.fori_loop(unmasked, total, step, (starts[1], state))
        return state

    def _step(self, n: Scalar, carry: tuple[Scalar, State], phase: Phase) -> tuple[Scalar, State]:
        """The softmax of step n: waits for S, takes it from tensor memory, writes P over it, rescales the output where a reference rose,
        and announces P to the warp that issues products (`weights_full`).

        carry   (first key of step n, softmax state); (first key of step n + 1, state after the step) is returned
        phase   which steps this is traced for
        """
        setup, scratch, group = self.setup, self.scratch, self.group
        start, state = carry
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        scores, weights = overlaid(scratch.scores_and_weights)
        plgpu.barrier_wait(scratch.scores_full.at[group])
        s = load_tile(scores.at[group], setup.interpret)
        p, rescale, state = self.softmax(s, n, step_tile, phase, state)
        store_tile(weights.at[group, :, pl.ds(0, setup.tile.block_kv)], p.astype(setup.plan.dtype), setup.interpret)
        if setup.reference is None:
            when((n > 0) & (rescale.needed != 0))(lambda: self._rescale(rescale))
        stored(setup.interpret)
        plgpu.barrier_arrive(scratch.weights_full.at[group])
        return start, state

    def _rescale(self, rescale: Rescale) -> None:
        """Multiplies the rows of the output in tensor memory by their factors. A warp changes only its own rows, so warps without a risen
        reference need not call it. P V of the step before must have completed.

        rescale   that the softmax returned for this step
        """
        for columns in self._columns():
            part = self.scratch.out.at[self.group, :, pl.ds(*columns)]
            out = load_tile(part, self.setup.interpret)
            out = out * registers.broadcast_vector(rescale.factor, "row", out.shape)
            store_tile(part, out, self.setup.interpret)

    def _columns(self) -> list[tuple[int, int]]:
        """The columns of the output, at most COLUMNS_AT_ONCE at a time: (first, how many)."""
        dim = self.setup.tile.value_dim
        return [(first, min(COLUMNS_AT_ONCE, dim - first)) for first in range(0, dim, COLUMNS_AT_ONCE)]

    # ----------------------------------------------------------------- results

    def _write(self, divisor: jax.Array, position: Position) -> None:
        """Writes the rows of the output that exist (the simulator all rows), and, if wanted, what rounding took, to global memory in the
        plan's dtype; zeros for an item without visits. P V of the last step must have completed.

        divisor    [rows], which the output is multiplied by
        position   of the work item's query tile
        """
        plan, tile, interpret = self.setup.plan, self.setup.tile, self.setup.interpret
        whole = plan.q_len % plan.covered(tile.block_q, 1)[0] == 0
        exist = None if whole else plan.q_len - self.q_start
        for columns in self._columns():

            def part(columns: tuple[int, int] = columns) -> jax.Array:
                """Columns (first, how many) of the output, [rows, how many] float32, from tensor memory, times the divisor."""
                out = load_tile(self.scratch.out.at[self.group, :, pl.ds(*columns)], interpret)
                return out * registers.broadcast_vector(divisor, "row", out.shape)

            zeros = registers.zero_tile((tile.rows, columns[1]))
            out = part() if plan.blocks is None else cond(self.item.total > 0, part, lambda zeros=zeros: zeros)
            for n, target in enumerate((self.outputs.out, self.outputs.rounding)):
                if target is None:
                    continue
                if n:
                    out = out - rounded_tile(out, plan.dtype, interpret)
                rows = rows_of(target, plan.layout, position.b, position.h, self.q_start, tile.rows)
                write_rows(out.astype(plan.dtype), rows.at[:, pl.ds(*columns)], exist, interpret)
