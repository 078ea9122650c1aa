"""The programs of a call on a strip of a tile: scores after score_mod, which entries are on, and dropout's multipliers.

Entries that are "on" count: the mask shows them, and they are not past the end of queries or keys.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_tpu import split_program
from flexjax.backends.mosaic_tpu.affine_bias import StripBias, separate_bias, strip_bias
from flexjax.backends.mosaic_tpu.block_sparse_order import BlockSparseOrder
from flexjax.backends.mosaic_tpu.hoisted_operands import HoistedOperands
from flexjax.backends.mosaic_tpu.launch import KernelStep, prefetch_count_after_order
from flexjax.backends.mosaic_tpu.split_program import SplitProgram, split_for
from flexjax.backends.mosaic_tpu.tile_programs import StripView, evaluate_strip
from flexjax.backends.mosaic_tpu.visit_order import EDGE, VisitOrder
from flexjax.ir.program import Lit, Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

SCORE, MASK, DROPOUT = range(3)  # the programs of a kernel


@dataclasses.dataclass
class TileScores:
    """The programs of one kernel, with their hoisted operands."""

    plan: KernelPlan
    order: VisitOrder  # which tile each grid step visits
    operands: Operands
    score: Program | None  # score_mod's program, or that of its derivatives; None: identity
    added_prefetch: int = 0  # scalar-prefetch arrays that the kernel adds before the lengths
    # Entries of queries past the end must be off too; a forward kernel does not write their results.
    check_q_end: bool = False
    wants_load_slopes: bool = False  # derivatives with respect to captured reads

    def __post_init__(self) -> None:
        self.large = may_be_large(self.plan.score)  # too large to scale before the row maximum is subtracted
        # int32 [B] each; the last scalar-prefetch arrays
        self.lengths = tuple(x for x in self.operands.lengths or () if x is not None)
        # the score as c * s + bias; a kernel then calls `bias` in place of `scores`
        whole = self.score is None or self.large or self.plan.weighted or self.plan.expectations > 0
        self.separated = None if whole else separate_bias(typing.cast(Program, self.score))
        if self.separated is not None and not self._needs_only_bias():
            self.separated = None
        score = self.score if self.separated is None else self.separated.program
        programs = {
            SCORE: (score, self.operands.score_captures),
            MASK: (self.plan.mask, self.operands.mask_captures),
            DROPOUT: (self.plan.dropout, self.operands.dropout_captures),
        }
        self._number: dict[int, int] = {}
        self._split: list[SplitProgram] = []
        with_captures: list[tuple[SplitProgram, Sequence[jax.Array]]] = []
        for which, (program, captures) in programs.items():
            if program is not None:
                self._number[which] = len(self._split)
                self._split.append(split_for(program, self.plan))
                with_captures.append((self._split[-1], captures))
        scalars_from_end = prefetch_count_after_order(self.added_prefetch + len(self.lengths))
        self.hoisted = HoistedOperands(
            self.order.geometry, with_captures, self.order.tile_at, scalars_from_end, self.operands.origin
        )

    def _needs_only_bias(self) -> bool:
        """Whether c * s + bias is all that the kernel needs of the score program."""
        assert self.score is not None
        assert self.separated is not None
        if len(self.score.results) == 1:
            return True
        if len(self.score.groups) > 1:
            return False
        slope = self.score.results[1]
        return (
            not self.wants_load_slopes
            and isinstance(slope, Lit)
            and float(typing.cast(float, slope.value)) == self.separated.scale
        )

    @functools.cached_property
    def finite_where_off(self) -> bool:
        """Whether everything that a backward kernel multiplies at entries that are off is finite there.

        Then the products are 0 because p is, and no select after them is needed. Those of a weighted plan have no p.
        """
        if self.plan.weighted:
            return False
        finite = self.score is None or split_program.stays_finite(self.score)
        return not self.order.overhang and finite and self.plan.dropout is None

    @property
    def queries_end(self) -> bool:
        """Whether a tile may have rows of queries that do not exist, or past the end."""
        return bool(self.plan.lengths[0] or self.order.geometry.q_len % self.order.geometry.block_q)

    @property
    def keys_end(self) -> bool:
        """Whether a tile may have rows of keys that do not exist, or past the end."""
        return bool(self.plan.lengths[1] or self.order.geometry.kv_len % self.order.geometry.block_kv)

    def end_of_queries(self, step: KernelStep) -> jax.Array | np.int32:
        """In a kernel: how many queries of the batch entry exist; a numpy int32 without query lengths."""
        refs = step.refs.prefetched[-len(self.lengths) :]
        return refs[0][step.visit.b] if self.plan.lengths[0] else np.int32(self.plan.q_len)

    def end_of_keys(self, step: KernelStep) -> jax.Array | np.int32:
        """In a kernel: how many keys of the batch entry exist; a numpy int32 without key lengths."""
        refs = step.refs.prefetched
        return refs[-1][step.visit.b] if self.plan.lengths[1] else np.int32(self.plan.kv_len)

    def _view(self, number: int, step: KernelStep) -> StripView:
        """The strip of `step`, with the hoisted operands of program `number` of `_split`."""
        refs = step.refs
        return self.hoisted.view(number, refs.scalars, refs.hoisted, step.visit.position, step.strip)

    def _evaluate(self, which: int, step: KernelStep, score: jax.Array | None = None) -> list[jax.Array] | None:
        """The results of a program on the strip of `step`; None if the call has no such program."""
        number = self._number.get(which)
        return None if number is None else evaluate_strip(self._split[number], self._view(number, step), score)

    def bias(self, step: KernelStep) -> StripBias:
        """The bias of a separated score on the strip of `step`."""
        assert self.separated is not None
        values = self._evaluate(SCORE, step)
        assert values is not None
        return strip_bias(self.separated, values, self._view(self._number[SCORE], step))

    def scores(self, step: KernelStep, score: jax.Array) -> list[jax.Array]:
        """[s' (rows, cols)] of scaled scores s, float32, and the other results of the program."""
        results = self._evaluate(SCORE, step, score)
        if results is None:
            return [score]
        return [jnp.broadcast_to(results[0].astype(jnp.float32), score.shape), *results[1:]]

    def dropout(self, step: KernelStep) -> jax.Array | None:
        """0 or 1 / (1 - rate) for each probability, float32, broadcasts to (rows, cols); None without dropout."""
        results = self._evaluate(DROPOUT, step)
        return None if results is None else results[0].astype(jnp.float32)

    def on(self, step: KernelStep) -> jax.Array | None:
        """Which entries of the strip of a checked step count, bool (rows, cols); None if all of them do."""
        conditions = []
        masked = self._evaluate(MASK, step)
        bits = self.order.block_bits(step.visit, step.strip) if isinstance(self.order, BlockSparseOrder) else None
        if masked is not None and bits is None and EDGE in self.order.kinds and self.order.overhang:
            masked = [masked[0] | (step.visit.kind == np.int32(EDGE))]
        if bits is not None:
            on, full = bits
            conditions.append(on if masked is None else on & (full | masked[0]))
        elif masked is not None:
            conditions.append(masked[0])
        view = self._view(0, step)
        if self.keys_end:
            conditions.append(view.kv_rows < self.end_of_keys(step))
        if self.check_q_end and self.queries_end:
            conditions.append(view.q_rows < self.end_of_queries(step))
        if not conditions:
            return None
        conditions = [jnp.broadcast_to(c, (step.strip.rows, step.strip.cols)) for c in conditions]
        return functools.reduce(lambda x, y: x & y, conditions)
