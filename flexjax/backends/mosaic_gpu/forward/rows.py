"""What the consumers of all forward kernels share: the scores, softmax and results of the rows of one query tile. Those
of decode kernels share its `Programs`.

A kernel multiplies (by WGMMA: hopper_consumer.py; by mma.sync: mma_rows.py; by tcgen05: tcgen05_rows.py) and decides
when; `QueryRows` says what happens between the products of a step and after the last step. A step is one key tile.
Steps of a work item (one query tile with the key tiles that it visits, tile_scheduler.py) are numbered from 0, `n`
below; those that need no mask come first.
"""

import dataclasses
import enum
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.forward.online_softmax import Rescale, Softmax, State
from flexjax.backends.mosaic_gpu.forward.setup import AnyTile, ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import PACKED, WorkItem
from flexjax.backends.mosaic_gpu.forward.tile_scores import scores_of
from flexjax.backends.mosaic_gpu.machine import registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place, TileOrigin
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.backends.mosaic_gpu.programs.tile_values import Scaled
from flexjax.ir import program as ir
from flexjax.ir.cheaper_comparisons import with_cheaper_comparisons

f32 = np.float32


class Phase(enum.Enum):
    """Which steps of a work item a function is traced for."""

    UNMASKED = "unmasked"  # steps that need no mask
    MASKED = "masked"  # steps that need the mask or the check of the last key
    FIRST = "first"  # step 0 of the staggered order, before its loops: masked or not, by its number


class Programs(typing.NamedTuple):
    """The traced programs of score_mod, mask_mod and dropout at the rows of one query tile; None for a missing one."""

    score: TileProgram | None = None
    mask: TileProgram | None = None
    dropout: TileProgram | None = None

    def at_columns(self, start: Scalar) -> "Programs":
        """The programs with the column vectors of the tile from key `start` on computed here (`TileProgram.pin`)."""
        return Programs(*(None if p is None else p.at_columns(start).pin() for p in self))

    def row_term(self, softmax: Softmax) -> jax.Array | None:
        """What the softmax leaves out of the scores of each row, [rows], computed after the steps; None: nothing."""
        return None if self.score is None or not softmax.leaves_row_term else self.score.row_term()


def program_at_rows(
    program: ir.Program | None,
    refs: tuple[Ref, ...],
    shape: tuple[int, int],
    place: Place,
    start: Scalar,
    *,
    overhangs: bool,
    used_rows: int | None = None,
    aligned: bool = False,
    alone: bool = False,
) -> TileProgram | None:
    """A mod on tiles of `shape`, scalars and row vectors computed for the rows from `start` on; None without one."""
    if program is None:
        return None
    made = TileProgram(
        program, refs, shape, place, overhangs=overhangs, used_rows=used_rows, aligned=aligned, alone=alone
    )
    return made.at_rows(start)


class StepTile(typing.NamedTuple):
    """The key tile of one step."""

    start: Scalar | None  # number of its first key; None where nothing in the step depends on its keys
    programs: Programs  # with the vectors over its keys computed; all None where `start` is
    end: Scalar | None = None  # the key after the last one of the tile's document; None: that of the call


class Position(typing.NamedTuple):
    """Where a query tile lies: batch entry, query head, number of the query tile within the head."""

    b: Scalar
    h: Scalar
    q_tile: Scalar


def programs_at_rows(
    setup: ForwardSetup[AnyTile], inputs: ForwardInputs[Ref], item: WorkItem, q_start: Scalar
) -> Programs:
    """The plan's programs with scalars and row vectors computed for `item` and the rows from `q_start` on."""
    tile, mask = setup.tile, setup.plan.mask

    def at_rows(program: ir.Program | None, refs: tuple[Ref, ...]) -> TileProgram | None:
        place = Place(item.b, item.h, TileOrigin.of(setup.plan, inputs.origin))
        shape, overhangs, alone = (tile.rows, tile.block_kv), setup.may_overhang, setup.plan.options.invariant
        return program_at_rows(
            program, refs, shape, place, q_start, overhangs=overhangs, aligned=not alone, alone=alone
        )

    return Programs(
        at_rows(setup.plan.score, inputs.score),
        at_rows(None if mask is None else with_cheaper_comparisons(mask, "kv"), inputs.mask),
        at_rows(setup.plan.dropout, inputs.dropout),
    )


@dataclasses.dataclass(frozen=True)
class QueryRows(typing.Generic[AnyTile]):
    """The rows of one work item that one warpgroup computes; in the methods `n` is the number of a step in the item."""

    setup: ForwardSetup[AnyTile]
    inputs: ForwardInputs[Ref]
    outputs: ForwardOutputs[Ref]
    item: WorkItem
    programs: Programs

    @property
    def row_term(self) -> jax.Array | None:
        return self.programs.row_term(self.setup.softmax)

    @property
    def weights_factor(self) -> float:
        """The factor of all weights of a weighted plan that the steps leave out; 1 for others."""
        program = self.programs.score if self.setup.keeps_factor else None
        return 1.0 if program is None else program.weights_factor(self.setup.plan.scale)

    # ----------------------------------------------------------------- between the products of a step

    def softmax(
        self, s: jax.Array, n: Scalar, step_tile: StepTile, phase: Phase, state: State
    ) -> tuple[jax.Array, Rescale, State]:
        """(P [rows, block_kv] float32, the rescaling of the earlier sums, the state after the step) for step n.

        P is not yet divided by its sum, and times the dropout multiplier; the sum in the state is without dropout.
        """
        softmax, before = self.setup.softmax, state
        scores = self._scores(s, n, step_tile, phase)
        p, rescale, state = softmax.step(scores, before)
        if softmax.functions:
            masked = phase is not Phase.UNMASKED and self.setup.has_masked_steps
            state = state._replace(sums=softmax.sums_after(p, scores.other_results, before, rescale, masked))
        if step_tile.programs.dropout is not None:
            p = p * step_tile.programs.dropout.tile(p)[0]
        return p, rescale, state

    def _scores(self, s: jax.Array, n: Scalar, step_tile: StepTile, phase: Phase) -> Scaled:
        """The scores of Q K^T `s`, hidden where masked or past the last key."""
        setup, plan, tile = self.setup, self.setup.plan, self.setup.tile
        program, whole = step_tile.programs.score, setup.softmax.takes_whole_scores
        scores = scores_of(program, s, plan.scale, whole, setup.slack, setup.keeps_factor)
        if phase is Phase.UNMASKED or not setup.has_masked_steps:
            return scores
        s = scores.tile
        if step_tile.programs.mask is not None:
            (on,) = step_tile.programs.mask.tile()
            # The step may be of the full list; in order, the whole of its mask is right for that too.
            if not setup.scheduler.in_order and (phase is Phase.FIRST or setup.full_blocks_may_overhang):
                on = on | registers.splat(n < self.item.full, "tile", s.shape)
            if step_tile.end is not None and step_tile.start is not None:
                count = registers.splat(step_tile.end - step_tile.start, "row", (tile.rows,))
                on = on & thread_tiles.compare_columns(1, "lt", count, (tile.rows, tile.block_kv))
            s = thread_tiles.hide(s, on, setup.softmax.hidden)
        if setup.keys_may_overhang:
            assert step_tile.start is not None
            inside = registers.column_iota(tile.block_kv) < i32(plan.kv_len) - step_tile.start
            s = jnp.where(registers.broadcast_vector(inside, "column", s.shape), s, f32(setup.softmax.hidden))
        return scores._replace(tile=s)

    @property
    def step_factor(self) -> TileProgram | None:
        """The factor of each probability of a step; None where there is none, or it is the same for a whole head."""
        return None if self.setup.plan.factor_is_uniform else self.programs.dropout

    def _uniform_factor(self) -> jax.Array | None:
        """The factor of all probabilities of these rows, a scalar, where it is the same for a whole head; else None."""
        plan, program = self.setup.plan, self.programs.dropout
        if program is None or plan.dropout is None or not self.setup.plan.factor_is_uniform:
            return None
        return program.scalar_values(plan.dropout.results)[0]

    # ----------------------------------------------------------------- the key tile of a step

    def needs_start(self, phase: Phase) -> bool:
        """Whether anything in a step of the phase depends on which keys it visits."""
        masked = phase is not Phase.UNMASKED and self.setup.has_masked_steps
        return masked or any(p is not None for p in (self.programs.score, self.step_factor))

    def start(self, n: Scalar, phase: Phase) -> Scalar:
        """Number of the first key of step n, for a step past the phase some readable one; 0 if nothing needs it. With
        documents it is `packed`.
        """
        if not self.needs_start(phase):
            return i32(0)
        if self.setup.plan.documents:
            return self.setup.scheduler.packed_start(self.inputs.mask_rows, self.item, n)
        masked = None if self.setup.full_blocks_may_overhang else False
        in_full = {Phase.UNMASKED: True, Phase.MASKED: masked, Phase.FIRST: None}[phase]
        return self.setup.scheduler.kv_start(self.inputs.mask_rows, self.item, n, in_full)

    def next_start(self, n: Scalar, phase: Phase) -> Scalar:
        """`start` of step n + 1, or of the item's last step if there is no step n + 1."""
        # Read a step ahead, so that the address is known before the products are issued.
        return self.start(lax.min(n + 1, self.item.total - 1), phase)

    def step_tile(self, start: Scalar, phase: Phase) -> StepTile:
        """The key tile from key `start` on, with column vectors computed in the programs of the phase."""
        if not self.needs_start(phase):
            return StepTile(None, Programs())
        end = None
        if self.setup.plan.documents:
            start, count = lax.div(start, i32(PACKED)), lax.rem(start, i32(PACKED))
            end = start + count
        programs = self.programs._replace(dropout=self.step_factor).at_columns(start)
        return StepTile(start, programs._replace(mask=None) if phase is Phase.UNMASKED else programs, end)

    # ----------------------------------------------------------------- after the last step

    @property
    def writes_statistics(self) -> Scalar | bool:
        """Whether this CTA writes lse and row maxima: of the CTAs of a cluster one does (hopper_consumer.py)."""
        return True

    def write_statistics(
        self, row_term: jax.Array | None, state: State, position: Position, q_start: Scalar
    ) -> jax.Array:
        """Adds the sink to the rowsum, writes the statistics of rows, and returns the factor of out, [rows].

        Rows past the last query are written too. lse includes the sink, row maxima do not. A row without visible keys
        gets out 0; its lse is the sink, or -inf without sinks, and its maximum -inf. Of a weighted plan lse is the
        total.
        """
        tile, outputs, softmax = self.setup.tile, self.outputs, self.setup.softmax
        b, h, _ = position
        top, total = softmax.finish(state, row_term)
        base = jnp.where(top == f32(-math.inf), f32(0), top)
        shrink = None
        if self.inputs.sinks is not None:
            sink = softmax.to_reference(self.inputs.sinks[h])
            joint = jnp.maximum(top, sink)
            joint = jnp.where(jnp.abs(joint) == f32(math.inf), f32(0), joint)
            shrink = softmax.power(top - joint)
            total = total * shrink + softmax.power(sink - joint)
            base = joint
        dead = total == f32(0)
        divisor = softmax.out_factor(total, dead)
        divisor = softmax.no_rescale.factor if divisor is None else divisor
        if self.weights_factor != 1.0:
            total, divisor = total * f32(self.weights_factor), divisor * f32(self.weights_factor)
        for factor in (shrink, softmax.unit(state)):  # `out` and `sums` are not relative to `base`
            divisor = divisor if factor is None else divisor * factor
        sums = tuple(thread_tiles.sum_lanes(x) * divisor for x in state.sums)
        uniform = self._uniform_factor()
        divisor = divisor if uniform is None else divisor * uniform
        lse = softmax.statistic(base, total, dead)
        rows = (b, h, pl.ds(q_start, tile.rows))

        @when(self.writes_statistics)
        def write_rows() -> None:
            outputs.lse[rows] = lse
            if outputs.max_scores is not None:
                outputs.max_scores[rows] = softmax.to_score(softmax.largest(state, row_term, top))
            for target, value in zip(outputs.expectations, sums, strict=True):
                target[rows] = value

        return divisor
