"""A warpgroup of the forward kernel on tcgen05 that computes: the softmax of one query tile of 128 rows.

    S                   from tensor memory, written by the product Q K^T (tcgen05_issue.py)
    score, mask, P      as in the other forward kernels (rows.py)
    P                   to tensor memory, over S
    out                 stays in tensor memory, where the tensor cores add P V; rescaled where a reference rose

When S of step n is there, P V of step n - 1 has completed, so `out` may be rescaled without another barrier, until P of
step n is announced. After the last step `out` is divided and written to global memory from registers.
"""

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward.online_softmax import Rescale, State
from flexjax.backends.mosaic_gpu.forward.rows import Phase, Position, QueryRows, programs_at_rows
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, overlaid, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_results import write_rows
from flexjax.backends.mosaic_gpu.machine.tcgen05_tiles import load_tile, store_tile, stored
from flexjax.backends.mosaic_gpu.machine.thread_tiles import rounded_tile

COLUMNS_AT_ONCE = 32  # columns of the output that a thread has in registers while they are rescaled or written


@dataclasses.dataclass(frozen=True)
class SoftmaxRows(QueryRows[Tcgen05ForwardTile]):
    """The rows of one work item that one warpgroup computes."""

    scratch: Tcgen05ForwardScratch[Ref]
    group: Scalar  # number of the warpgroup, and of its query tile in the CTA
    q_start: Scalar  # number of the first row

    @classmethod
    def of(
        cls,
        setup: ForwardSetup[Tcgen05ForwardTile],
        inputs: ForwardInputs[Ref],
        outputs: ForwardOutputs[Ref],
        scratch: Tcgen05ForwardScratch[Ref],
        turn: Scalar,
    ) -> "SoftmaxRows":
        """The rows of this warpgroup in work item number `turn` of this CTA."""
        tile, group = setup.tile, lax.axis_index("wg")
        item = setup.scheduler.item(inputs.mask_rows, setup.scheduler.number(turn))
        q_start = item.q_tile * tile.block_q + group * tile.rows
        programs = programs_at_rows(setup, inputs, item, q_start)
        return cls(setup, inputs, outputs, item, programs, scratch, group, q_start)

    def compute(self) -> None:
        """Computes the softmax of every step of the work item and writes its results."""
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
        """Runs every step of an item that has some; returns the softmax state after the last."""
        unmasked, total = self.item.unmasked, self.item.total
        starts = [self.start(n, phase) for n, phase in ((i32(0), Phase.UNMASKED), (unmasked, Phase.MASKED))]
        step = functools.partial(self._step, phase=Phase.UNMASKED)
        _, state = lax.fori_loop(i32(0), unmasked, step, (starts[0], state))
        if self.setup.has_masked_steps:
            step = functools.partial(self._step, phase=Phase.MASKED)
            _, state = lax.fori_loop(unmasked, total, step, (starts[1], state))
        return state

    def _step(self, n: Scalar, carry: tuple[Scalar, State], phase: Phase) -> tuple[Scalar, State]:
        """The softmax of step n, from S to P in tensor memory, for a carry (first key of the step, softmax state)."""
        setup, scratch, group = self.setup, self.scratch, self.group
        start, state = carry
        step_tile = self.step_tile(start, phase)
        start = self.next_start(n, phase)
        scores, weights = overlaid(scratch.scores_and_weights)
        plgpu.barrier_wait(scratch.scores_full.at[group])
        s = load_tile(scores.at[group])
        p, rescale, state = self.softmax(s, n, step_tile, phase, state)
        store_tile(weights.at[group, :, pl.ds(0, setup.tile.block_kv)], p.astype(setup.plan.dtype))
        if setup.softmax.rescales:
            when((n > 0) & (rescale.needed != 0))(lambda: self._rescale(rescale))
        stored()
        plgpu.barrier_arrive(scratch.weights_full.at[group])
        return start, state

    def _rescale(self, rescale: Rescale) -> None:
        """Rescales the warp's own rows of the output in tensor memory; P V of the step before has completed."""
        for columns in self._columns():
            part = self.scratch.out.at[self.group, :, pl.ds(*columns)]
            out = load_tile(part)
            out = out * registers.broadcast_vector(rescale.factor, "row", out.shape)
            store_tile(part, out)

    def _columns(self) -> list[tuple[int, int]]:
        """The columns of the output, at most COLUMNS_AT_ONCE at a time: (first, how many)."""
        dim = self.setup.tile.value_dim
        return [(first, min(COLUMNS_AT_ONCE, dim - first)) for first in range(0, dim, COLUMNS_AT_ONCE)]

    # ----------------------------------------------------------------- results

    def _write(self, divisor: jax.Array, position: Position) -> None:
        """Writes the existing rows of the output (the simulator all), after P V of the last step has completed."""
        plan, tile = self.setup.plan, self.setup.tile
        whole = plan.q_len % plan.covered(tile.block_q, 1)[0] == 0
        exist = None if whole else plan.q_len - self.q_start
        for columns in self._columns():

            def part(columns: tuple[int, int] = columns) -> jax.Array:
                out = load_tile(self.scratch.out.at[self.group, :, pl.ds(*columns)])
                return out * registers.broadcast_vector(divisor, "row", out.shape)

            zeros = registers.zero_tile((tile.rows, columns[1]))
            out = part() if plan.blocks is None else cond(self.item.total > 0, part, lambda zeros=zeros: zeros)
            for n, target in enumerate((self.outputs.out, self.outputs.rounding)):
                if target is None:
                    continue
                if n:
                    out = out - rounded_tile(out, plan.dtype)
                rows = rows_of(target, plan.layout, position.b, position.h, self.q_start, tile.rows)
                write_rows(out.astype(plan.dtype), rows.at[:, pl.ds(*columns)], exist)
