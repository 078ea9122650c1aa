"""One tile of the backward pass in registers: its probabilities P, then the cotangent dS of its scores.

A tile is [queries, keys] (row_axis "q") or, transposed, [keys, queries] (row_axis "kv"). The formulas are at the top of
backward_sm90_common.py. tile_programs.py evaluates the programs of the mods; without mods none of it is needed.

    math = TileMath(plan, derivative, shape, row_axis, ...)  # static
    rows = math.at_rows(b, h, row0, captures)                # once a row of tiles: scalars and row vectors of the mods
    tile = rows.at_columns(col0, masked)                     # once a tile, before its scores exist: starts loads
    found = tile.probabilities(s, lse2)                      # once a tile

Where scores may be too large to scale before the maximum is subtracted (analysis/large_scores.py), lse is not in base 2, and lse is
subtracted before the difference is scaled: the other way round, rounding alone would change exponents by dozens.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.backward_sm90_common import LOG2E, WGMMA, Captures
from flexjax.backends.mosaic_gpu.branch import cond
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.thread_tiles import add_column_slope, affine_tile, repeat_columns
from flexjax.backends.mosaic_gpu.tile_programs import TileOrigin, TileProgram
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


class Probabilities(typing.NamedTuple):
    """What the gradients of one tile need, each in the shape of the tile.

    p            probabilities, 0 where the mask is off
    slope        d mod / d score, None where it is 1
    dropout      the dropout multiplier, None without dropout
    load_slopes  d mod / d load for each load that `TileMath` was asked for, None where it is 1
    """

    p: jax.Array
    slope: jax.Array | None
    dropout: jax.Array | None
    load_slopes: tuple[jax.Array | None, ...]

    def weights(self) -> jax.Array:
        """What multiplies V in the forward pass: p times the dropout multiplier."""
        return self.p if self.dropout is None else self.p * self.dropout

    def factor(self) -> jax.Array:
        """p * d mod / d score, and 0 wherever p is 0: ds = factor * (dP - delta)."""
        return self.p if self.slope is None else jnp.where(self.p > 0.0, self.p * self.slope, 0.0)

    def load_factors(self) -> tuple[jax.Array, ...]:
        """p * d mod / d load, and 0 wherever p is 0, for each load."""
        slopes = self.load_slopes
        return tuple(self.p if slope is None else jnp.where(self.p > 0.0, self.p * slope, 0.0) for slope in slopes)

    def cotangent(self, factor: jax.Array, dp: jax.Array, delta: jax.Array | None) -> jax.Array:
        """factor * (dP - delta), where dp = dO V^T.

        delta   broadcast to the tile; None where dp already contains -delta (`TileMath.starts_at_minus_delta`)
        """
        if delta is None:
            return factor * dp
        return factor * ((dp if self.dropout is None else dp * self.dropout) - delta)


@dataclasses.dataclass(frozen=True)
class TileMath:
    """How one kernel computes P and dS of its tiles; known at compile time.

    derivative   score_mod's program with its derivatives: results are the score, d score, then d load n at 2 + n; None: identity
    shape        of one warpgroup's tile
    row_axis     "q", or "kv" for transposed tiles
    cta_tile     (queries, keys) that a CTA takes at once, of which `shape` is one warpgroup's part
    loads_only   compute d mod / d load for these loads instead of d mod / d score
    loads_too    compute d mod / d load for these loads beside d mod / d score
    """

    plan: KernelPlan
    derivative: ir.Program | None
    shape: tuple[int, int]
    row_axis: str
    cta_tile: tuple[int, int]
    loads_only: tuple[int, ...] = ()
    loads_too: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return self.shape[0 if self.row_axis == "q" else 1]

    @property
    def keys(self) -> int:
        return self.shape[1 if self.row_axis == "q" else 0]

    @property
    def visited_together(self) -> tuple[int, int]:
        """Queries and keys that are visited together: those of a CTA, or of a larger block of the mask."""
        return self.plan.covered(*self.cta_tile)

    @property
    def overhangs(self) -> bool:
        """Whether tiles may contain positions past the last query or key."""
        queries, keys = self.visited_together
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys)

    @property
    def starts_at_minus_delta(self) -> bool:
        """Whether the accumulator of dP starts from -delta instead of 0, which saves the subtraction and its registers."""
        return self.plan.dropout is None

    def _is_one(self, result: int) -> bool:
        """Whether this result of the derivative program is the constant 1."""
        slope = None if self.derivative is None else self.derivative.results[result]
        return slope is None or (isinstance(slope, ir.Lit) and slope.value == 1)

    @property
    def slope_is_one(self) -> bool:
        """Whether d mod / d score is the constant 1."""
        return self._is_one(1)

    @property
    def load_results(self) -> tuple[int | None, ...]:
        """For each load that was asked for, the result of the program that is d mod / d load; None where that is 1."""
        too = tuple(None if self._is_one(2 + i) else 2 + i for i in self.loads_too)
        return (*(2 + i for i in self.loads_only), *too)

    @property
    def evaluated(self) -> tuple[int, ...]:
        """The results of the derivative program that a tile computes after the score."""
        slope = () if self.slope_is_one or self.loads_only else (1,)
        return (*slope, *(n for n in self.load_results if n is not None))

    def at_rows(self, b: Scalar, h: Scalar, row0: Scalar, captures: Captures[Ref]) -> "RowMath":
        """The row of tiles of batch entry b and head h that begins at row `row0`, with its part of the mods evaluated.

        That part is the scalars and row vectors, which all tiles of the row share. Rows are queries or, if row_axis is "kv", keys.
        """
        plan = self.plan
        ends = (plan.q_len, plan.kv_len) if self.row_axis == "q" else (plan.kv_len, plan.q_len)

        def program(
            source: ir.Program | None,
            refs: tuple[Ref, ...],
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
                origin=TileOrigin.of(plan, captures.origin),
            ).at_rows(row0)

        return RowMath(
            self,
            row0,
            program(self.derivative, captures.score, (0, *self.evaluated)),
            program(plan.mask, captures.mask),
            program(plan.dropout, captures.dropout),
        )

    def broadcast_rows(self, vector: jax.Array) -> jax.Array:
        """A vector over the rows of a tile, broadcast to the tile."""
        return lax.broadcast_in_dim(vector, self.shape, (0,))

    def broadcast(self, vector: jax.Array, axis: str) -> jax.Array:
        """A vector over queries ("q") or keys ("kv"), broadcast to the tile."""
        return lax.broadcast_in_dim(vector, self.shape, (int(axis != self.row_axis),))


@dataclasses.dataclass(frozen=True)
class RowMath:
    """The tiles of one head whose rows begin at `row0`; a program is None where the plan has no such mod."""

    math: TileMath
    row0: Scalar
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def at_columns(self, col0: Scalar, masked: bool | Scalar) -> "ColumnMath":
        """The tile whose columns begin at `col0`; starts the loads that it needs.

        masked   whether the mask applies, as a bool or, where one loop visits both kinds of tiles, as a scalar
        """
        at = lambda program: None if program is None else program.columns(col0).pin()
        mask = at(self.mask) if masked is True else self.mask
        return ColumnMath(self, col0, masked, at(self.score), mask, at(self.dropout))


@dataclasses.dataclass(frozen=True)
class ColumnMath:
    """One tile: the rows of `RowMath`, and the columns from `col0`."""

    rows: RowMath
    col0: Scalar
    masked: bool | Scalar
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def probabilities(self, s: jax.Array, lse2: jax.Array) -> Probabilities:
        """From s = q . k, the product without scale, and lse2 of row_statistics.py, a vector over the queries."""
        math = self.rows.math
        p, rest = self._exponentials(s, lse2)
        computed = dict(zip(math.evaluated, rest, strict=True))
        p = self._zero_past_the_ends(self._masked_out(p))
        slopes = tuple(None if n is None else computed[n] for n in math.load_results)
        return Probabilities(p, computed.get(1), None if self.dropout is None else self.dropout_multiplier(), slopes)

    def _exponentials(self, s: jax.Array, lse2: jax.Array) -> tuple[jax.Array, typing.Sequence[jax.Array]]:
        """exp(mod(s) - lse) without the mask, and the results `TileMath.evaluated` of the derivative program."""
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
        """The part of the exponent that is not a product with the score: row + at + along * column - lse2, broadcast to the
        tile, with the parts from `TileProgram.scaled_tile` in base 2."""
        math, interpret = self.rows.math, self.rows.math.plan.options.interpret
        if row is None or at is None:
            return -math.broadcast(lse2, "q")
        row = (row + at) * LOG2E
        if math.row_axis == "q":
            row = row - lse2
            return math.broadcast_rows(row) if along is None else affine_tile(row, along * LOG2E, math.shape, interpret)
        columns = -lse2 if along is None else add_column_slope(-lse2, along * LOG2E, interpret)
        return math.broadcast(columns, "q") + math.broadcast_rows(row)

    def with_loaded(self, load: ir.Load, value: jax.Array) -> "ColumnMath":
        """The tile with the values of one load given, [rows, columns]; the program then does not load them."""
        assert self.score is not None
        return dataclasses.replace(self, score=self.score.with_loaded_tile(load, value))

    def dropout_multiplier(self) -> jax.Array:
        """The dropout multiplier of each entry of the tile: 0, or 1 / (1 - rate)."""
        assert self.dropout is not None
        return self.dropout.tile()[0]

    def _masked_out(self, p: jax.Array) -> jax.Array:
        """p with zeros where the mask is off."""
        mask = self.mask
        if mask is None or self.masked is False:
            return p
        if self.masked is True:
            return jnp.where(mask.tile()[0], p, 0.0)
        return cond(self.masked, lambda p: jnp.where(mask.at_cols(self.col0)[0], p, 0.0), lambda p: p, p)

    def _zero_past_the_ends(self, p: jax.Array) -> jax.Array:
        """p with zeros past the last key, and past the last query where a score_mod may have made NaN of lse2 = inf."""
        math, plan = self.rows.math, self.rows.math.plan
        queries, keys = math.visited_together
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
