"""The programs of a call on one tile: scores after the mod, what is on, what dropout multiplies by."""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_tpu import tile_programs
from flexjax.backends.mosaic_tpu.feeds import Feeds, Geometry
from flexjax.backends.mosaic_tpu.launch import Refs, prefetch_count
from flexjax.backends.mosaic_tpu.separate import Bias, bias_on, separate
from flexjax.backends.mosaic_tpu.tables import EDGE, DenseOrder, ListedOrder, Visit
from flexjax.ir.program import Lit, Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

Part = tuple[int, int, int, int]
"""Row offset, rows, column offset, columns of a part of a tile."""


def split_for(program: Program, plan: KernelPlan) -> tile_programs.Split:
    return tile_programs.split(program, plan.batch, plan.q_heads, plan.q_len, plan.kv_len)


@dataclasses.dataclass
class Modded:
    """Programs of a kernel with their feeds. `score` is score_mod's program, or that of its derivatives.

    wanted_loads   whether the kernel needs derivatives with respect to captured reads
    far            scores may be far out (analysis/large_scores.py): what they are relative to is subtracted before they are scaled to base 2;
                   the other way round, rounding alone may be dozens of powers of two
    separated      the score as c * s + bias, where it is one and nothing else is needed, and is not far out: then `bias` serves,
                   not `scores`
    """

    plan: KernelPlan
    geometry: Geometry
    order: DenseOrder | ListedOrder
    operands: Operands
    score: Program | None
    extra_prefetch: int = 0
    bound_q: bool = False
    wanted_loads: bool = False

    def __post_init__(self) -> None:
        self.large = may_be_large(self.plan.score)
        self.separated = None if self.score is None or self.large else separate(self.score)
        if self.separated is not None and not self._bias_alone():
            self.separated = None
        score = self.score if self.separated is None else self.separated.program
        named = (
            (score, self.operands.score_captures),
            (self.plan.mask, self.operands.mask_captures),
            (self.plan.dropout, self.operands.dropout_captures),
        )
        self._numbers: list[int | None] = []
        self._splits: list[tile_programs.Split] = []
        programs: list[tuple[tile_programs.Split, Sequence[jax.Array]]] = []
        for program, captures in named:
            self._numbers.append(None if program is None else len(programs))
            if program is not None:
                parts = split_for(program, self.plan)
                self._splits.append(parts)
                programs.append((parts, captures))
        self.feeds = Feeds(self.geometry, programs, self.order.where, self.order.prefetch)
        self.feeds.set_prefetched(prefetch_count(self.order, self.extra_prefetch))

    def _bias_alone(self) -> bool:
        """Whether the score is all that is asked of the program: its derivative is the constant c."""
        assert self.score is not None
        assert self.separated is not None
        if len(self.score.results) == 1:
            return True
        slope = self.score.results[1]
        return (
            not self.wanted_loads
            and isinstance(slope, Lit)
            and float(typing.cast(float, slope.value)) == self.separated.scale
        )

    def bias(self, refs: Refs, visit: Visit, part: Part) -> Bias:
        """For a separated score: what is added to it."""
        assert self.separated is not None
        values = self._run(0, refs, visit, part, None)
        assert values is not None
        return bias_on(self.separated, values, self._view(0, refs, visit, part))

    @functools.cached_property
    def gentle(self) -> bool:
        """Whether entries that are off hold finite numbers all the way, so that p = 0 makes every product 0."""
        g = self.geometry
        ragged = g.q_len % g.block_q or g.kv_len % g.block_kv
        finite = self.score is None or tile_programs.stays_finite(self.score)
        return not ragged and finite and self.plan.dropout is None

    def _run(self, which: int, refs: Refs, visit: Visit, part: Part, score: jax.Array | None) -> list[jax.Array] | None:
        number = self._numbers[which]
        if number is None:
            return None
        return tile_programs.run(self._splits[number], self._view(number, refs, visit, part), score)

    def _view(self, number: int, refs: Refs, visit: Visit, part: Part) -> tile_programs.View:
        return self.feeds.view(number, refs.scalars, refs.feeds, (visit.b, visit.h, visit.i, visit.j), part)

    def scores(self, refs: Refs, visit: Visit, part: Part, score: jax.Array) -> list[jax.Array]:
        """Results of the score program: [s'], or [s', ds'/ds, ds'/dload...]; the first of full size."""
        results = self._run(0, refs, visit, part, score)
        if results is None:
            return [score]
        return [jnp.broadcast_to(results[0].astype(jnp.float32), score.shape), *results[1:]]

    def dropout(self, refs: Refs, visit: Visit, part: Part) -> jax.Array | None:
        results = self._run(2, refs, visit, part, None)
        return None if results is None else results[0].astype(jnp.float32)

    def valid(self, refs: Refs, visit: Visit, part: Part) -> jax.Array | None:
        """Which entries of the part are on, for a tile that has to be checked; None if all of them."""
        g = self.geometry
        conditions = []
        masked = self._run(1, refs, visit, part, None)
        bits = self.order.block_bits(visit, part) if isinstance(self.order, ListedOrder) else None
        if masked is not None and bits is None and EDGE in self.order.kinds and self.order.ragged:
            masked = [masked[0] | (visit.kind == np.int32(EDGE))]
        if bits is not None:
            on, full = bits
            conditions.append(on if masked is None else on & (full | masked[0]))
        elif masked is not None:
            conditions.append(masked[0])
        _row0, rows, _col0, cols = part
        view = self._view(0, refs, visit, part)
        if g.kv_len % g.block_kv:
            conditions.append(view.kv < np.int32(g.kv_len))
        if self.bound_q and g.q_len % g.block_q:
            conditions.append(view.q < np.int32(g.q_len))
        if not conditions:
            return None
        conditions = [jnp.broadcast_to(c, (rows, cols)) for c in conditions]
        return functools.reduce(lambda x, y: x & y, conditions)


def keep_rows(values: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Zeroes the rows of a block at or past `length`, what hangs over the end of an array is anything, NaN included."""
    row = start + jax.lax.broadcasted_iota(jnp.int32, (values.shape[0], 1), 0)
    return jnp.where(row < np.int32(length), values, jnp.zeros((), values.dtype))
