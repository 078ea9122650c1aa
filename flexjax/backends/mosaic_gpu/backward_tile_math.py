"""One tile of the backward pass in registers: probabilities, then the cotangent of the scores.

A tile is [queries, keys] (row_axis "q") or, transposed, [keys, queries] (row_axis "kv"). Formulas are at the top of
backward_sm90_common.py. Programs of a mod are evaluated by tile_programs.py; the identity needs none of it.

    math = TileMath(plan, derivative, shape, row_axis)       # static
    rows = math.at_rows(b, h, row0, captures)                # once a row of tiles: scalars and row vectors of the mods
    tile = rows.at_columns(col0, masked)                     # once a tile, before its scores are there: starts reads
    found = tile.probabilities(s, lse2)                      # once a tile

Where scores may be far out (analysis/large_scores.py) lse is not in powers of two, and is subtracted before the difference is scaled: the
other way round, rounding alone would be dozens of powers of two.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.backward_sm90_common import LOG2E, WGMMA
from flexjax.backends.mosaic_gpu.branch import cond
from flexjax.backends.mosaic_gpu.memory import kernel_operand
from flexjax.backends.mosaic_gpu.thread_tiles import affine_tile, repeat_columns, rising_columns
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan, Operands


class Captures(typing.NamedTuple):
    """Captured arrays of the three programs as the kernels take them (references inside a kernel)."""

    score: tuple[typing.Any, ...]
    mask: tuple[typing.Any, ...]
    dropout: tuple[typing.Any, ...]


def captures_of(operands: Operands) -> Captures:
    groups = (operands.score_captures, operands.mask_captures, operands.dropout_captures)
    return Captures(*(tuple(kernel_operand(a) for a in group) for group in groups))


class Probabilities(typing.NamedTuple):
    """p (0 where off), the derivative of the mod (None: it is 1), the dropout multiplier (None: no dropout).

    `others` are the derivatives with respect to loads that were asked for (None: it is 1).
    """

    p: jax.Array
    slope: jax.Array | None
    keep: jax.Array | None
    others: tuple[jax.Array | None, ...]

    def weights(self) -> jax.Array:
        """What multiplied V in the forward pass."""
        return self.p if self.keep is None else self.p * self.keep

    def factor(self) -> jax.Array:
        """ds = factor * (dP - delta): p times the mod's derivative, 0 wherever p is 0."""
        return self.p if self.slope is None else jnp.where(self.p > 0.0, self.p * self.slope, 0.0)

    def load_factors(self) -> tuple[jax.Array, ...]:
        """The same for the derivatives with respect to loads."""
        return tuple(self.p if other is None else jnp.where(self.p > 0.0, self.p * other, 0.0) for other in self.others)

    def cotangent(self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None) -> jax.Array:
        """factor * (dP - delta); `delta` spread to the tile, None where dp began at -delta."""
        if delta is None:
            return factor * dp
        return factor * ((dp if self.keep is None else dp * self.keep) - delta)


@dataclasses.dataclass(frozen=True)
class TileMath:
    """The mathematics of a tile for one plan. `derivative` is the score program with its derivatives, None: identity.

    covers      queries and keys that a block of threads takes at once, of which `shape` is one warpgroup's part
    gradients   which of the derivatives with respect to loads to compute, instead of that with respect to the score:
                results[2 + i] of `derivative`
    also        the same beside that with respect to the score
    """

    plan: KernelPlan
    derivative: ir.Program | None
    shape: tuple[int, int]
    row_axis: str
    covers: tuple[int, int]
    gradients: tuple[int, ...] = ()
    also: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return self.shape[0 if self.row_axis == "q" else 1]

    @property
    def keys(self) -> int:
        return self.shape[1 if self.row_axis == "q" else 0]

    @property
    def covered(self) -> tuple[int, int]:
        """Queries and keys that are visited together."""
        return self.plan.covered(*self.covers)

    @property
    def overhangs(self) -> bool:
        queries, keys = self.covered
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys)

    @property
    def starts_at_minus_delta(self) -> bool:
        """Whether the product dO V^T may start from -delta instead of 0, which saves the subtraction and its registers."""
        return self.plan.dropout is None

    def _is_one(self, result: int) -> bool:
        slope = None if self.derivative is None else self.derivative.results[result]
        return slope is None or (isinstance(slope, ir.Lit) and slope.value == 1)

    @property
    def slope_is_one(self) -> bool:
        return self._is_one(1)

    @property
    def others(self) -> tuple[int | None, ...]:
        """Results of the program that are the derivatives with respect to loads; None for one that is 1."""
        also = tuple(None if self._is_one(2 + i) else 2 + i for i in self.also)
        return (*(2 + i for i in self.gradients), *also)

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Results of the program that a tile computes after the score."""
        slope = () if self.slope_is_one or self.gradients else (1,)
        return (*slope, *(n for n in self.others if n is not None))

    def at_rows(self, b: jax.Array, h: jax.Array, row0: jax.Array, captures: Captures) -> "RowMath":
        plan = self.plan
        ends = (plan.q_len, plan.kv_len) if self.row_axis == "q" else (plan.kv_len, plan.q_len)

        def program(
            source: ir.Program | None,
            refs: tuple[typing.Any, ...],
            results: tuple[int, ...] | None = None,
        ) -> TileProgram | None:
            if source is None:
                return None
            return TileProgram(
                source,
                refs,
                self.shape,
                batch=b,
                head=h,
                row_axis=self.row_axis,
                edge=ends if self.overhangs else None,
                results=results,
                interpret=plan.options.interpret,
            ).at_rows(row0)

        return RowMath(
            self,
            row0,
            program(self.derivative, captures.score, (0, *self.evaluated)),
            program(plan.mask, captures.mask),
            program(plan.dropout, captures.dropout),
        )

    def rows(self, vector: jax.Array) -> jax.Array:
        """A vector over the rows on the tile."""
        return lax.broadcast_in_dim(vector, self.shape, (0,))

    def broadcast(self, vector: jax.Array, axis: str) -> jax.Array:
        """A vector over queries ("q") or keys ("kv") on the tile."""
        return lax.broadcast_in_dim(vector, self.shape, (int(axis != self.row_axis),))


@dataclasses.dataclass(frozen=True)
class RowMath:
    """TileMath for the rows from `row0` of one head."""

    math: TileMath
    row0: jax.Array
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def at_columns(self, col0: jax.Array, masked: typing.Any) -> "ColumnMath":
        """For the tile whose columns begin at `col0`; starts the reads that the tile needs. `masked` may be traced."""
        at = lambda program: None if program is None else program.columns(col0).pin()
        mask = at(self.mask) if masked is True else self.mask
        return ColumnMath(self, col0, masked, at(self.score), mask, at(self.dropout))


@dataclasses.dataclass(frozen=True)
class ColumnMath:
    """RowMath for the columns from `col0`: one tile."""

    rows: RowMath
    col0: jax.Array
    masked: typing.Any
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def probabilities(self, s: jax.Array, lse2: jax.Array) -> Probabilities:
        """From raw products q . k and the lse of the queries as `row_statistics` gives it (a vector)."""
        math = self.rows.math
        p, rest = self._powers(s, lse2)
        computed = dict(zip(math.evaluated, rest, strict=True))
        p = self._zero_past_the_ends(self._masked_out(p))
        others = tuple(None if n is None else computed[n] for n in math.others)
        return Probabilities(p, computed.get(1), None if self.dropout is None else self.dropout_multiplier(), others)

    def _powers(self, s: jax.Array, lse2: jax.Array) -> tuple[jax.Array, typing.Sequence[jax.Array]]:
        """Probabilities without a mask, and what else the score program computes."""
        math, plan = self.rows.math, self.rows.math.plan
        if self.score is None:
            return jnp.exp2(s * (plan.scale * LOG2E) - math.broadcast(lse2, "q")), ()
        if may_be_large(plan.score):
            score, *rest = self.score.tile(s, plan.scale)
            return jnp.exp2(tile_math.large_distance(plan.score, score, math.broadcast(lse2, "q")) * LOG2E), rest
        score, factor, by, row, at, along, rest = self.score.scaled_tile(s, plan.scale, along=True)
        shift = self._shift(lse2, row, at, along)
        units = factor * LOG2E
        if by is not None:
            units = repeat_columns(by * units, math.shape, plan.options.interpret)
        return jnp.exp2(score * units + shift), rest

    def _shift(
        self, lse2: jax.Array, row: jax.Array | None, at: jax.Array | None, along: jax.Array | None
    ) -> jax.Array:
        """What is added to a tile of scores in powers of two: the parts that `Scaled` keeps aside, less lse2."""
        math, interpret = self.rows.math, self.rows.math.plan.options.interpret
        if row is None or at is None:
            return -math.broadcast(lse2, "q")
        row = (row + at) * LOG2E
        if math.row_axis == "q":
            row = row - lse2
            return math.rows(row) if along is None else affine_tile(row, along * LOG2E, math.shape, interpret)
        columns = -lse2 if along is None else rising_columns(-lse2, along * LOG2E, interpret)
        return math.broadcast(columns, "q") + math.rows(row)

    def with_loaded(self, load: ir.Load, value: jax.Array) -> "ColumnMath":
        """The tile with what a load of the score program reads given from elsewhere."""
        assert self.score is not None
        return dataclasses.replace(self, score=self.score.holding(load, value))

    def dropout_multiplier(self) -> jax.Array:
        """The dropout multiplier of the tile."""
        assert self.dropout is not None
        return self.dropout.tile()[0]

    def _masked_out(self, p: jax.Array) -> jax.Array:
        mask = self.mask
        if mask is None or self.masked is False:
            return p
        if self.masked is True:
            return jnp.where(mask.tile()[0], p, 0.0)
        return cond(self.masked, lambda p: jnp.where(mask.at_cols(self.col0)[0], p, 0.0), lambda p: p, p)

    def _zero_past_the_ends(self, p: jax.Array) -> jax.Array:
        """Zero past the last key; past the last query too where a mod was evaluated there (otherwise lse2 = inf does it)."""
        math, plan = self.rows.math, self.rows.math.plan
        queries, keys = math.covered
        ends = [("kv", plan.kv_len, keys)]
        if self.score is not None:
            ends.append(("q", plan.q_len, queries))
        for axis, end, together in ends:
            if end % together == 0:
                continue
            dim = int(axis != math.row_axis)
            tile = math.shape[dim]
            first = self.col0 if dim else self.rows.row0

            def cut(p: jax.Array, first: jax.Array = first, dim: int = dim, end: int = end) -> jax.Array:
                index = plgpu.broadcasted_iota(jnp.int32, math.shape, dim, layout=WGMMA)
                return jnp.where(index < end - first, p, 0.0)

            p = cond(first + tile > end, cut, lambda p: p, p)
        return p
