"""One tile of the backward pass in registers: its scores, and from them its probabilities P.

A tile is [queries, keys] (row_axis "q") or, transposed, [keys, queries] (row_axis "kv"). The formulas are at the top of
common.py. programs/tile_programs.py evaluates the programs of the mods; without mods none of it is needed.

    math = TileMath(plan, derivative, shape, row_axis, ...)  # static
    rows = math.at_rows(b, h, row0, captures)                # once a row of tiles: scalars and row vectors of the mods
    tile = rows.at_columns(col0, masked)                     # once a tile, before its scores exist: starts loads
    found = tile.probabilities(s, lse2)                      # once a tile; probabilities.py goes on to dS

row0 and col0 are the numbers of the first row and column of the tile in the attention matrix: queries or keys, by
row_axis. "Mod" is score_mod and "load" one of its reads of a captured array.

Where scores may be too large to scale before the maximum is subtracted (analysis/large_scores.py), lse is not in base
2, and lse is subtracted before the difference is scaled: else rounding alone would change exponents by dozens.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.bounds import finite_results
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.backward.common import WGMMA, Captures, Products
from flexjax.backends.mosaic_gpu.backward.probabilities import Probabilities, WeightReference, weight_reference
from flexjax.backends.mosaic_gpu.machine import registers, row_scales
from flexjax.backends.mosaic_gpu.machine.branch import cond
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.thread_tiles import (
    add_column_slope,
    affine_tile,
    bfloat16_tile,
    repeat_columns,
)
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place, TileOrigin
from flexjax.backends.mosaic_gpu.programs.tile_programs import TileProgram
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileMath:
    """How one kernel computes P and dS of its tiles; known at compile time."""

    plan: KernelPlan
    derivative: ir.Program | None  # results are the score, d score, then d load n at 2 + n; None: identity
    shape: tuple[int, int]  # of one warpgroup's tile
    row_axis: str  # "q": tiles are [queries, keys]; "kv": transposed, [keys, queries]
    cta_tile: tuple[int, int]  # (queries, keys) that a CTA takes at once, of which `shape` is one warpgroup's part
    loads_only: tuple[int, ...] = ()  # loads whose d mod / d load is computed instead of d mod / d score
    loads_too: tuple[int, ...] = ()  # loads whose d mod / d load is computed beside d mod / d score

    @property
    def queries(self) -> int:
        return self.shape[0 if self.row_axis == "q" else 1]

    @property
    def keys(self) -> int:
        return self.shape[1 if self.row_axis == "q" else 0]

    @property
    def visited_together(self) -> tuple[int, int]:
        """(queries, keys) visited as a whole: the tile of a CTA, or a block of the mask where that is larger."""
        return self.plan.covered(*self.cta_tile)

    @property
    def overhangs(self) -> bool:
        """Whether some visited tile contains positions past the last query or key; loads then clamp their indices."""
        queries, keys = self.visited_together
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys)

    def kept_rows(self, row0: Scalar) -> Scalar | None:
        """How many rows of the tile from key `row0` on are keys, at most; None where all rows of all tiles are."""
        assert self.row_axis == "kv"
        return None if self.plan.kv_len % self.visited_together[1] == 0 else jnp.int32(self.plan.kv_len) - row0

    @property
    def starts_at_minus_delta(self) -> bool:
        """Whether the accumulator of dP starts from -delta, which saves the subtraction and its registers."""
        # where `rounds_weights`, dP and delta have different factors
        return self.plan.dropout is None and not self.rounds_weights

    @property
    def rounds_weights(self) -> bool:
        """Whether cotangents of loads take the weights that the forward pass rounded (`Probabilities.rounded`)."""
        return bool(self.loads_only or self.loads_too) and self.plan.rounds_weights_alike and not self._beside

    def _is_one(self, result: int) -> bool:
        """Whether the derivative program's result number `result` is the constant 1; True without a program."""
        slope = None if self.derivative is None else self.derivative.results[result]
        return slope is None or (isinstance(slope, ir.Lit) and slope.value == 1)

    @property
    def slope_is_one(self) -> bool:
        return self._is_one(1)

    @property
    def load_results(self) -> tuple[int | None, ...]:
        """For each load asked for, the program's result d mod / d load; None where it is the constant 1."""
        return tuple(None if self._is_one(2 + i) else 2 + i for i in (*self.loads_only, *self.loads_too))

    @functools.cached_property
    def loads_finite(self) -> tuple[bool, ...]:
        """For each load asked for, whether d mod / d load is known to be finite in all entries of all tiles."""
        if self.derivative is None:
            return ()
        finite = finite_results(self.derivative)
        return tuple(finite[2 + i] and not self.overhangs for i in (*self.loads_only, *self.loads_too))

    @property
    def _beside(self) -> int | None:
        """The number of the first result of the derivative program's second group; None without one."""
        if self.derivative is None:
            return None
        width = 2 + len(self.derivative.gradients)
        # a program of a tangent has one result more than a group
        return width if len(self.derivative.results) >= 2 * width else None

    @property
    def beside_results(self) -> tuple[int | None, ...]:
        """The program's results fbar, d fbar / d score and d fbar / d load for each load asked for; None where it is 0,
        or not needed; () without expectations.
        """
        first = self._beside
        if first is None or self.derivative is None:
            return ()
        results = self.derivative.results
        nonzero = lambda n: None if isinstance(results[n], ir.Lit) and results[n].value == 0 else n
        score = None if self.loads_only else nonzero(first + 1)
        return (first, score, *(nonzero(first + 2 + i) for i in (*self.loads_only, *self.loads_too)))

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Numbers of the derivative program's results that a tile computes after the score."""
        slope = () if self.slope_is_one or self.loads_only else (1,)
        return (*slope, *(n for n in (*self.load_results, *self.beside_results) if n is not None))

    def at_rows(self, b: Scalar, h: Scalar, row0: Scalar, captures: Captures[Ref]) -> "RowMath":
        """The tiles of head (b, h) from row `row0` on, with the scalars and row vectors of the mods computed."""
        plan = self.plan

        def program(
            source: ir.Program | None, refs: tuple[Ref, ...], results: tuple[int, ...] | None = None
        ) -> TileProgram | None:
            if source is None:
                return None
            return TileProgram(
                source,
                refs,
                self.shape,
                Place(b, h, TileOrigin.of(plan, captures.origin)),
                row_axis=self.row_axis,
                overhangs=self.overhangs,
                results=results,
                aligned=True,
            ).at_rows(row0)

        return RowMath(
            self,
            row0,
            program(self.derivative, captures.score, (0, *self.evaluated)),
            program(plan.mask, captures.mask),
            program(plan.dropout, captures.dropout),
        )

    def broadcast_rows(self, vector: jax.Array) -> jax.Array:
        """A vector over the rows of a tile, [rows], broadcast to [rows, columns]."""
        return lax.broadcast_in_dim(vector, self.shape, (0,))

    def broadcast(self, vector: jax.Array, axis: str) -> jax.Array:
        """A vector over queries (`axis` "q") or keys ("kv"), broadcast along the other axis to [rows, columns]."""
        return lax.broadcast_in_dim(vector, self.shape, (int(axis != self.row_axis),))


@dataclasses.dataclass(frozen=True)
class RowMath:
    """The tiles of one head whose rows begin at `row0`; the programs have their row vectors computed."""

    math: TileMath
    row0: Scalar
    score: TileProgram | None  # the derivative program
    mask: TileProgram | None
    dropout: TileProgram | None

    def weight_reference(self, lse2: jax.Array) -> WeightReference | None:
        """The reference of the exponentials of the queries with this lse2, [rows], where `TileMath.rounds_weights`."""
        math = self.math
        if not math.rounds_weights:
            return None
        assert math.row_axis == "q"
        return weight_reference(math.plan, lse2)

    def at_columns(self, col0: Scalar, masked: bool | Scalar) -> "ColumnMath":
        """The tile from column `col0` on; starts its loads; `masked` is a scalar in loops over both kinds."""
        at = lambda program: None if program is None else program.at_columns(col0).pin()
        # with a scalar, `probabilities` computes the column vectors of the mask in a branch
        mask = at(self.mask) if masked is True else self.mask
        return ColumnMath(self, col0, masked, at(self.score), mask, at(self.dropout))


@dataclasses.dataclass(frozen=True)
class ColumnMath:
    """One tile: the rows of `RowMath`, and the columns from `col0`; the programs have their column vectors computed."""

    rows: RowMath
    col0: Scalar
    masked: bool | Scalar  # whether the mask applies; a scalar where one loop visits both kinds of tiles
    score: TileProgram | None
    mask: TileProgram | None  # with column vectors only if `masked` is the bool True
    dropout: TileProgram | None

    def probabilities(self, s: jax.Array, lse2: jax.Array, reference: WeightReference | None = None) -> Probabilities:
        """The probabilities of the tile, without dropout, and the derivatives of score_mod.

        `s` is q . k without scale, in the shape of the tile, float32; `lse2` a vector over the queries
        (row_statistics.py). p is 0 where the mask is off and past the ends. Where the passes round weights alike, p is
        relative to `reference`.
        """
        math, scale = self.rows.math, None
        reference = self.rows.weight_reference(lse2) if reference is None else reference
        if reference is not None:
            lse2, scale = reference
        p, rest = self._exponentials(s, lse2)
        computed = dict(zip(math.evaluated, rest, strict=True))
        if math.plan.weighted:
            return self._weights(p, computed)
        p = self._zero_past_the_ends(self._masked_out(p))
        slopes = tuple(None if n is None else computed[n] for n in math.load_results)
        # fbar may be NaN where p is 0
        whole = (self.mask is None or self.masked is False) and not math.overhangs
        kept = (lambda x: x) if whole else (lambda x: jnp.where(p > 0.0, x, 0.0))
        dropout = None if self.dropout is None else self.dropout_multiplier()
        rounded = None
        if reference is not None:
            rounded = bfloat16_tile(p if dropout is None else p * dropout)
        made = Probabilities(p, computed.get(1), dropout, slopes, math.loads_finite, rounded, scale)
        return self._with_beside(made, computed, kept)

    def _with_beside(
        self, made: Probabilities, computed: dict[int, jax.Array], kept: Callable[[jax.Array], jax.Array]
    ) -> Probabilities:
        """With fbar and its derivatives from what is `computed`, if there are expectations; `kept` hides entries."""
        results = self.rows.math.beside_results
        if not results:
            return made
        value, beside, *loads = (None if n is None else kept(computed[n]) for n in results)
        return made._replace(value=value, beside=beside, load_beside=tuple(loads))

    def _weights(self, weights: jax.Array, computed: dict[int, jax.Array]) -> Probabilities:
        """The weights of a weighted plan and their derivatives `computed`, each 0 where the entry is hidden."""
        math = self.rows.math
        kept = lambda x: self._zero_past_the_ends(self._masked_out(x))
        slope = lambda n: kept(registers.splat(np.float32(1), "tile", math.shape) if n is None else computed[n])
        made = Probabilities(
            p=kept(weights),
            slope=None if math.loads_only else slope(None if math.slope_is_one else 1),
            dropout=None if self.dropout is None else self.dropout_multiplier(),
            load_slopes=tuple(map(slope, math.load_results)),
            load_finite=math.loads_finite,
            weighted=True,
        )
        return self._with_beside(made, computed, kept)

    def _exponentials(self, s: jax.Array, lse2: jax.Array) -> tuple[jax.Array, typing.Sequence[jax.Array]]:
        """(exp(mod(s) - lse) without the mask, the results `TileMath.evaluated`), each in the shape of the tile; of a
        weighted plan mod(s) in place of the exponential.
        """
        math, plan = self.rows.math, self.rows.math.plan
        if self.score is None:
            return jnp.exp2(s * (plan.scale * LOG2E) - math.broadcast(lse2, "q")), ()
        if plan.weighted:
            weights, *rest = self.score.tile(s, plan.scale)
            return weights, rest
        if may_be_large(plan.score):
            score, *rest = self.score.tile(s, plan.scale)
            if math.rounds_weights:  # by the operations of the forward kernel
                scale = row_scales.row_scale(lse2, True)
                return jnp.exp2(row_scales.exponent(score, scale)), rest
            return jnp.exp2(tile_math.large_distance(plan.score, score, math.broadcast(lse2, "q")) * LOG2E), rest
        # what the program keeps apart from the tile of scores is applied in the exponent
        score, factor, narrow_factor, row_term, offset, column_slope, rest = self.score.scaled_tile(
            s, plan.scale, keep_column_slope=True
        )
        shift = self._shift(lse2, row_term, offset, column_slope)
        units = factor * LOG2E
        if narrow_factor is not None:
            units = repeat_columns(narrow_factor * units, math.shape)
        return jnp.exp2(score * units + shift), rest

    def _shift(
        self, lse2: jax.Array, row_term: jax.Array | None, offset: jax.Array | None, column_slope: jax.Array | None
    ) -> jax.Array:
        """The addend of scaled scores: (row_term + offset + column_slope * c) * log2(e) - lse2 at column c."""
        math = self.rows.math
        if row_term is None or offset is None:
            return -math.broadcast(lse2, "q")
        row = (row_term + offset) * LOG2E
        if math.row_axis == "q":
            row = row - lse2
            return (
                math.broadcast_rows(row) if column_slope is None else affine_tile(row, column_slope * LOG2E, math.shape)
            )
        columns = -lse2 if column_slope is None else add_column_slope(-lse2, column_slope * LOG2E)
        return math.broadcast(columns, "q") + math.broadcast_rows(row)

    def with_loaded(self, load: ir.Load, value: jax.Array) -> "ColumnMath":
        """The tile with the values that `load` reads given as `value`, [rows, columns], such as a staged tile."""
        assert self.score is not None
        return dataclasses.replace(self, score=self.score.with_loaded_tile(load, value))

    def dropout_multiplier(self) -> jax.Array:
        """The dropout multiplier of each entry of the tile, [rows, columns] float32: 0, or 1 / (1 - rate)."""
        assert self.dropout is not None
        return self.dropout.tile()[0]

    def _masked_out(self, p: jax.Array) -> jax.Array:
        """p with zeros where the mask is off."""
        mask = self.mask
        if mask is None or self.masked is False:
            return p
        if self.masked is True:
            return jnp.where(mask.tile()[0], p, 0.0)
        return cond(self.masked, lambda p: jnp.where(mask.tile_at_columns(self.col0)[0], p, 0.0), lambda p: p, p)

    def _zero_past_the_ends(self, p: jax.Array) -> jax.Array:
        """p with zeros past the last key where rows are queries, and past the last query if there is a score_mod."""
        math, plan = self.rows.math, self.rows.math.plan
        queries, keys = math.visited_together
        # rows that are keys past the end reach only rows of dK and dV that are not kept (dQ: `kept_rows`)
        ends = [("kv", plan.kv_len, keys)] if math.row_axis == "q" else []
        if self.score is not None:
            ends.append(("q", plan.q_len, queries))  # score_mod may have made NaN of lse2 = inf
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


@dataclasses.dataclass(frozen=True)
class TileCta:
    """What the CTAs of the backward kernels on Hopper share: how they compute tiles and their products."""

    math: TileMath

    @property
    def parts(self) -> int:
        return parts_of(self.math.plan)

    @property
    def products(self) -> Products:
        return Products(self.parts)
