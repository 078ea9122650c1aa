"""One tile of the backward pass in registers: its scores, and from them its probabilities P.

A tile is [queries, keys] (row_axis "q") or, transposed, [keys, queries] (row_axis "kv"). The formulas are at the top
of backward_common.py. tile_programs.py evaluates the programs of the mods; without mods none of it is needed.

    math = TileMath(plan, derivative, shape, row_axis, ...)  # static
    rows = math.at_rows(b, h, row0, captures)                # once a row of tiles: scalars and row vectors of the mods
    tile = rows.at_columns(col0, masked)                     # once a tile, before its scores exist: starts loads
    found = tile.probabilities(s, lse2)                      # once a tile; backward_probabilities.py goes on to dS

row0 and col0 are the numbers of the first row and column of the tile in the attention matrix: queries or keys, by
row_axis. Below, "mod" is score_mod and "load" one of its reads of a captured array.

Where scores may be too large to scale before the maximum is subtracted (analysis/large_scores.py), lse is not in base
2, and lse is subtracted before the difference is scaled: the other way round, rounding alone would change exponents
by dozens.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.bounds import finite_results
from flexjax.analysis.large_scores import may_be_large
from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu import row_scales
from flexjax.backends.mosaic_gpu.backward_common import WGMMA, Captures
from flexjax.backends.mosaic_gpu.backward_probabilities import Probabilities, WeightReference, weight_reference
from flexjax.backends.mosaic_gpu.branch import cond
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.thread_tiles import (
    add_column_slope,
    affine_tile,
    bfloat16_tile,
    repeat_columns,
)
from flexjax.backends.mosaic_gpu.tile_origin import Place, TileOrigin
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileMath:
    """How one kernel computes P and dS of its tiles; known at compile time. "mod" is score_mod, a "load" one of its
    reads of a captured array.

    plan         of the call, with extra features joined to the head dim
    derivative   score_mod's program with its derivatives: results are the score, d score, then d load n at 2 + n; None:
                 identity
    shape        of one warpgroup's tile
    row_axis     "q": tiles are [queries, keys]; "kv": transposed, [keys, queries]
    cta_tile     (queries, keys) that a CTA takes at once, of which `shape` is one warpgroup's part
    loads_only   numbers of loads: compute d mod / d load for these instead of d mod / d score
    loads_too    numbers of loads: compute d mod / d load for these beside d mod / d score
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
        """Queries of one warpgroup's tile."""
        return self.shape[0 if self.row_axis == "q" else 1]

    @property
    def keys(self) -> int:
        """Keys of one warpgroup's tile."""
        return self.shape[1 if self.row_axis == "q" else 0]

    @property
    def visited_together(self) -> tuple[int, int]:
        """(queries, keys) that a kernel visits as a whole: the tile of a CTA, or a block of the mask where that is
        larger.
        """
        return self.plan.covered(*self.cta_tile)

    @property
    def overhangs(self) -> bool:
        """Whether some visited tile contains positions past the last query or key: whether the query or the key length is no
        multiple of `visited_together`.

        A kernel visits whole mask blocks, so with blocks larger than the CTA's tile, tiles may lie wholly past an end
        even if the length is a multiple of the tile. Where this is True, loads of the programs clamp their indices.
        """
        queries, keys = self.visited_together
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys)

    def kept_rows(self, row0: Scalar) -> Scalar | None:
        """How many rows of the tile whose first row is key number `row0` are keys, at most; None where all rows of all tiles are. Only where
        rows are keys.
        """
        assert self.row_axis == "kv"
        return None if self.plan.kv_len % self.visited_together[1] == 0 else jnp.int32(self.plan.kv_len) - row0

    @property
    def starts_at_minus_delta(self) -> bool:
        """Whether the accumulator of dP starts from -delta instead of 0, which saves the subtraction and its registers.
        It does without dropout, unless `rounds_weights`: then dP and delta have different factors.
        """
        return self.plan.dropout is None and not self.rounds_weights

    @property
    def rounds_weights(self) -> bool:
        """Whether cotangents of loads take the weights that the forward pass rounded (`Probabilities.rounded`): if some
        loads are asked for and the plan's passes round weights alike.
        """
        return bool(self.loads_only or self.loads_too) and self.plan.rounds_weights_alike

    def _is_one(self, result: int) -> bool:
        """Whether the derivative program's result number `result` is the constant 1; True without a program."""
        slope = None if self.derivative is None else self.derivative.results[result]
        return slope is None or (isinstance(slope, ir.Lit) and slope.value == 1)

    @property
    def slope_is_one(self) -> bool:
        """Whether d mod / d score is the constant 1."""
        return self._is_one(1)

    @property
    def load_results(self) -> tuple[int | None, ...]:
        """For each load that was asked for, the number of the program's result that is d mod / d load: first the loads of
        `loads_only`, then those of `loads_too`.

        A load has None in place of a number where d mod / d load is the constant 1.
        """
        return tuple(None if self._is_one(2 + i) else 2 + i for i in (*self.loads_only, *self.loads_too))

    @functools.cached_property
    def loads_finite(self) -> tuple[bool, ...]:
        """For each load that was asked for, whether d mod / d load is known to be finite in all entries of all tiles: what
        `finite_results` says of positions that exist, if tiles have no others.
        """
        if self.derivative is None:
            return ()
        finite = finite_results(self.derivative)
        return tuple(finite[2 + i] and not self.overhangs for i in (*self.loads_only, *self.loads_too))

    @property
    def evaluated(self) -> tuple[int, ...]:
        """Numbers of the derivative program's results that a tile computes after the score: 1 (d mod / d score), unless it is the
        constant 1 or there are `loads_only`; then the numbers in `load_results`.
        """
        slope = () if self.slope_is_one or self.loads_only else (1,)
        return (*slope, *(n for n in self.load_results if n is not None))

    def at_rows(self, b: Scalar, h: Scalar, row0: Scalar, captures: Captures[Ref]) -> "RowMath":
        """The tiles of head (b, h) whose rows begin at `row0`, with the scalars and row vectors of the mods computed,
        which all these tiles share.

        row0       number of the first row in the attention matrix: a query or, if row_axis is "kv", a key
        captures   captured arrays, Refs, and the tables of an origin
        """
        plan = self.plan

        def program(
            source: ir.Program | None,
            refs: tuple[Ref, ...],
            results: tuple[int, ...] | None = None,
        ) -> TileProgram | None:
            """One mod's program with its scalars and row vectors computed for this row of tiles; None without the mod.

            source    the program; None: the plan has no such mod
            refs      its captured arrays
            results   numbers of the program's results that are needed; None: all
            """
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
                even_columns=True,
                interpret=plan.options.interpret,
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
        """A vector over queries (`axis` "q") or keys ("kv"), broadcast along the other axis to the tile, [rows,
        columns].
        """
        return lax.broadcast_in_dim(vector, self.shape, (int(axis != self.row_axis),))


@dataclasses.dataclass(frozen=True)
class RowMath:
    """The tiles of one head whose rows begin at `row0`.

    math                   the kernel's TileMath
    score, mask, dropout   programs with their row vectors computed; None where the plan has no such mod. `score` is
                           the derivative program
    """

    math: TileMath
    row0: Scalar
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def weight_reference(self, lse2: jax.Array) -> WeightReference | None:
        """The reference of the exponentials where cotangents of loads take rounded weights (`TileMath.rounds_weights`), else None. Only
        for tiles whose rows are queries.

        lse2   of row_statistics.py, a vector over the queries (lse where scores may be large); where it is +inf the reference is too
        """
        math = self.math
        if not math.rounds_weights:
            return None
        assert math.row_axis == "q"
        return weight_reference(math.plan, lse2)

    def at_columns(self, col0: Scalar, masked: bool | Scalar) -> "ColumnMath":
        """The tile whose columns begin at `col0`, with the column vectors of its programs computed, which starts their loads.

        col0     number of the first column in the attention matrix: a key or, if row_axis is "kv", a query
        masked   whether the mask applies, as a bool or, where one loop visits both kinds of tiles, as a scalar

        The column vectors of the mask are computed here only if `masked` is True. With a scalar `probabilities` computes them in a
        branch; with False nothing does.
        """
        at = lambda program: None if program is None else program.at_columns(col0).pin()
        mask = at(self.mask) if masked is True else self.mask
        return ColumnMath(self, col0, masked, at(self.score), mask, at(self.dropout))


@dataclasses.dataclass(frozen=True)
class ColumnMath:
    """One tile: the rows of `RowMath`, and the columns from `col0`.

    masked                 whether the mask applies, a bool or, where one loop visits both kinds of tiles, a scalar
    score, mask, dropout   the programs with their column vectors computed; those of `mask` only if `masked` is the bool
                           True
    """

    rows: RowMath
    col0: Scalar
    masked: bool | Scalar
    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None

    def probabilities(self, s: jax.Array, lse2: jax.Array, reference: WeightReference | None = None) -> Probabilities:
        """The probabilities of the tile and the derivatives of score_mod: p is 0 where the mask is off and past the
        ends, and is not multiplied by dropout; derivatives that `TileMath.evaluated` leaves out are None. Where the passes
        round weights alike, p is relative to a reference that makes it the weight of the forward kernel, up to a whole power of
        two.

        s           q . k, the product without scale, in the shape of the tile, float32
        lse2        of row_statistics.py, a vector over the queries
        reference   `RowMath.weight_reference` of lse2, if the caller has it already
        """
        math, scale = self.rows.math, None
        reference = self.rows.weight_reference(lse2) if reference is None else reference
        if reference is not None:
            lse2, scale = reference
        p, rest = self._exponentials(s, lse2)
        computed = dict(zip(math.evaluated, rest, strict=True))
        p = self._zero_past_the_ends(self._masked_out(p))
        slopes = tuple(None if n is None else computed[n] for n in math.load_results)
        dropout = None if self.dropout is None else self.dropout_multiplier()
        rounded = None
        if reference is not None:
            rounded = bfloat16_tile(p if dropout is None else p * dropout, math.plan.options.interpret)
        return Probabilities(p, computed.get(1), dropout, slopes, math.loads_finite, rounded, scale)

    def _exponentials(self, s: jax.Array, lse2: jax.Array) -> tuple[jax.Array, typing.Sequence[jax.Array]]:
        """(exp(mod(s) - lse) without the mask, the results `TileMath.evaluated` of the derivative program), each in
        the shape of the tile; not yet 0 past the ends.

        s      q . k, the product without scale, float32
        lse2   of row_statistics.py, a vector over the queries

        Without a score_mod the scale is part of the exponent, and there are no results. Where scores may be large, lse2
        is lse, subtracted before the scaling by log2(e). Otherwise the factors, row term and slope that the program keeps apart
        from the tile of scores (`TileProgram.scaled_tile`) are applied in the exponent.
        """
        math, plan = self.rows.math, self.rows.math.plan
        if self.score is None:
            return jnp.exp2(s * (plan.scale * LOG2E) - math.broadcast(lse2, "q")), ()
        if may_be_large(plan.score):
            score, *rest = self.score.tile(s, plan.scale)
            if math.rounds_weights:  # by the operations of the forward kernel
                scale = row_scales.row_scale(lse2, True)
                return jnp.exp2(row_scales.exponent(score, scale, plan.options.interpret)), rest
            return jnp.exp2(tile_math.large_distance(plan.score, score, math.broadcast(lse2, "q")) * LOG2E), rest
        score, factor, narrow_factor, row_term, offset, column_slope, rest = self.score.scaled_tile(
            s, plan.scale, keep_column_slope=True
        )
        shift = self._shift(lse2, row_term, offset, column_slope)
        units = factor * LOG2E
        if narrow_factor is not None:
            units = repeat_columns(narrow_factor * units, math.shape, plan.options.interpret)
        return jnp.exp2(score * units + shift), rest

    def _shift(
        self,
        lse2: jax.Array,
        row_term: jax.Array | None,
        offset: jax.Array | None,
        column_slope: jax.Array | None,
    ) -> jax.Array:
        """What is added to the scaled scores in the exponent: (row_term + offset + column_slope * c) * log2(e) - lse2 at
        column c, broadcast to the tile.

        lse2           of row_statistics.py, a vector over the queries
        row_term       [rows], the part of the scores that is the same along a row; None: 0, and `offset` and
                       `column_slope` are not read either
        offset         scalar, a part of all scores of the tile
        column_slope   scalar, by which the scores grow from column to column; None: 0
        """
        math, interpret = self.rows.math, self.rows.math.plan.options.interpret
        if row_term is None or offset is None:
            return -math.broadcast(lse2, "q")
        row = (row_term + offset) * LOG2E
        if math.row_axis == "q":
            row = row - lse2
            return (
                math.broadcast_rows(row)
                if column_slope is None
                else affine_tile(row, column_slope * LOG2E, math.shape, interpret)
            )
        columns = -lse2 if column_slope is None else add_column_slope(-lse2, column_slope * LOG2E, interpret)
        return math.broadcast(columns, "q") + math.broadcast_rows(row)

    def with_loaded(self, load: ir.Load, value: jax.Array) -> "ColumnMath":
        """The tile with the values that `load` reads given as `value`, [rows, columns], such as a staged tile; the
        program then does not load them. Only where there is a score_mod.
        """
        assert self.score is not None
        return dataclasses.replace(self, score=self.score.with_loaded_tile(load, value))

    def dropout_multiplier(self) -> jax.Array:
        """The dropout multiplier of each entry of the tile, [rows, columns] float32: 0, or 1 / (1 - rate). Only where
        the plan has dropout.
        """
        assert self.dropout is not None
        return self.dropout.tile()[0]

    def _masked_out(self, p: jax.Array) -> jax.Array:
        """p, in the shape of the tile, with zeros where the mask is off; p itself without a mask_mod, or where `masked`
        is False.

        With a scalar `masked` the mask is computed in a branch, its column vectors too.
        """
        mask = self.mask
        if mask is None or self.masked is False:
            return p
        if self.masked is True:
            return jnp.where(mask.tile()[0], p, 0.0)
        return cond(self.masked, lambda p: jnp.where(mask.tile_at_columns(self.col0)[0], p, 0.0), lambda p: p, p)

    def _zero_past_the_ends(self, p: jax.Array) -> jax.Array:
        """p, in the shape of the tile, with zeros past the last key where rows are queries, and, if there is a score_mod, past the last
        query too, because the score_mod may have made NaN of lse2 = inf there.

        Nothing is done along an axis whose length is a multiple of the visited tiles and mask blocks; along others a
        branch in the kernel zeroes only tiles that reach past the end. Where rows are keys, those past the last one are undefined and may be
        infinite or NaN. They reach only the same rows of dK and dV, which are not kept, and a kernel that makes dQ of them zeroes dS
        (`kept_rows`).
        """
        math, plan = self.rows.math, self.rows.math.plan
        queries, keys = math.visited_together
        ends = [("kv", plan.kv_len, keys)] if math.row_axis == "q" else []
        if self.score is not None:
            ends.append(("q", plan.q_len, queries))
        for axis, end, together in ends:
            if end % together == 0:
                continue
            dim = int(axis != math.row_axis)
            tile = math.shape[dim]
            first = self.col0 if dim else self.rows.row0

            def cut(p: jax.Array, first: jax.Array = first, dim: int = dim, end: int = end) -> jax.Array:
                """p, in the shape of the tile, with zeros at the positions along dimension `dim` whose number is
                `end` or more.

                first   number of the tile's first position along `dim`
                """
                index = plgpu.broadcasted_iota(jnp.int32, math.shape, dim, layout=WGMMA)
                return jnp.where(index < end - first, p, 0.0)

            p = cond(first + tile > end, cut, lambda p: p, p)
        return p
