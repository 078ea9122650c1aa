"""Evaluates a traced program (ir/program.py) on tiles of scores inside a Mosaic GPU kernel.

Each value is computed at its own rank and broadcast only where ranks meet: what depends on b and h is a scalar, on the
axis of the tile's rows a row vector, on the other axis a column vector, the rest a tile. Ranks are computed at
different places of a kernel:

    program = TileProgram(plan.score, refs, (64, 128), Place(b, h))     # scalars, once for each head
    program = program.at_rows(q_start)                                  # row vectors, once for each row of tiles
    program = program.at_columns(kv_start)                              # column vectors, once for each tile
    scores, = program.tile(scores)                                      # the tile, once its scores are there

`refs` are the captured arrays passed through `memory.kernel_operand`. `row_axis` is "q" where rows are queries
(forward, dQ) and "kv" where rows are keys (the transposed scores of dK and dV). Values have the dtypes of tile_ops.py
and the layouts of machine/registers.py.

An *affine integer* is an integer value a * q + b * kv + c whose a and b are numbers and whose c depends on batch entry
and head alone (`ir.Linear`). Such values, and loads indexed by them, are computed from the coefficients, without their
operands.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.bounds import bounds
from flexjax.analysis.patterns import run_lengths
from flexjax.backends.mosaic_gpu.machine import memory, registers, thread_tiles
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.machine.simulator import ordered
from flexjax.backends.mosaic_gpu.programs.integer_division import power_of_two
from flexjax.backends.mosaic_gpu.programs.tile_ops import apply, inner_dtype
from flexjax.backends.mosaic_gpu.programs.tile_origin import Place
from flexjax.backends.mosaic_gpu.programs.tile_values import (
    COLUMN,
    NARROW,
    ROW,
    SCALAR,
    TILE,
    Line,
    Scaled,
    TileValue,
    Value,
    deferred_sum,
    difference_fits,
    moderate,
    safe_to_defer,
)
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.ir.evaluate import unit_of
from flexjax.ir.operations import REDUCTIONS
from flexjax.ir.rewrite import with_results

MOST_POWER = 8  # of a tile whose factor is deferred
MAX_EXACT = 1 << 24  # integers up to this size are exact in float32


class TileProgram:
    """A program on a tile, with the values of the steps that are computed already; methods return a new TileProgram."""

    def __init__(
        self,
        program: ir.Program,
        refs: Sequence[Ref],
        shape: tuple[int, int],
        place: Place,
        *,
        row_axis: str = "q",
        overhangs: bool = False,
        results: tuple[int, ...] | None = None,
        used_rows: int | None = None,
        aligned: bool = False,
        alone: bool = False,
    ) -> None:
        """Makes the program for tiles of one head, and computes its scalars.

        shape          (rows, columns) of a tile
        row_axis       "q" or "kv": what the rows of a tile are
        overhangs      whether a tile may extend past the end of the attention matrix: loads then clamp their indices
        results        numbers of the program's results to compute; None: all
        used_rows      how many rows of a tile exist; the others repeat the last, so that they read no other address
        aligned        whether every tile begins at a multiple of its rows and columns
        alone          whether a row's numbers must not depend on which rows are in its tile (plan/invariant.py)
        """
        batch, head, origin = place
        self.program, self.refs, self.shape, self.used_rows = program, refs, shape, used_rows
        self.row_axis, self.overhangs, self.alone = row_axis, overhangs, alone
        self.aligned = aligned and origin is None and used_rows is None
        self.wanted = tuple(program.results[i] for i in results) if results is not None else program.results
        self.live = ir.uses(program.steps, self.wanted)
        self.producers = {step.out.id: step for step in program.steps if isinstance(step, ir.Op)}
        self.bound: ir.Axes = frozenset()
        # The relative error that weights may have; None in other programs. Factors and addends of weights are taken out
        # of powers, exponents and casts: fewer instructions where nothing else is wanted, more tiles to hold where
        # derivatives want the parts as well.
        self.slack: float | None = None
        # id -> the kind of a value that is the same in all rows or in all columns of a tile, though its axes vary there
        self.narrowed: dict[int, str] = self._narrowed() if self.aligned else {}
        # id of a value -> the value on the tile
        self.env: dict[int, TileValue] = {
            ir.B: TileValue(SCALAR, jnp.asarray(batch, jnp.int32)),
            ir.H: TileValue(SCALAR, jnp.asarray(head, jnp.int32)),
        }
        self.origin, self.batch = origin, batch
        # axis -> what `origin` adds to row numbers, for axes of one run
        self.offsets: dict[str, Value] = {}
        if origin is not None:  # that of an axis with one run is the same for all tiles
            self.offsets = {a: origin.offset(a, batch, None) for a in ("q", "kv") if origin.runs(a) == 1}
        # positions of the tile's first row and column, int32 scalars
        self.row_start: Value = None
        self.col_start: Value = None
        self._compute(SCALAR)

    # ------------------------------------------------------------- stages

    def at_rows(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its row vectors computed, for the tiles whose first row in the call's arrays is `start`."""
        new = self._copy()
        new.row_start = self._position(self.row_axis, start)
        row = ir.Q if self.row_axis == "q" else ir.KV
        if row in new.live:
            new.env[row] = TileValue(ROW, self._row_numbers() + new.row_start)
        new._compute(ROW)
        return new

    def _row_numbers(self) -> jax.Array:
        """The numbers of the rows of a tile, int32 [rows], counted from its first."""
        rows = registers.row_iota(self.shape[0])
        return rows if self.used_rows is None else jnp.minimum(rows, np.int32(self.used_rows - 1))

    def at_columns(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its column vectors, for the tile from column `start` of the call's arrays on.

        It is called on what `at_rows` returned, before the kernel waits for the scores, so that loads are done by then.
        """
        new = self._copy()
        new.col_start = self._position("kv" if self.row_axis == "q" else "q", start)
        column = ir.KV if self.row_axis == "q" else ir.Q
        if column in new.live:
            new.env[column] = TileValue(COLUMN, registers.columns_from(new.col_start, self.shape[1]))
        new._compute(COLUMN)
        return new

    def _position(self, axis: str, start: jax.typing.ArrayLike) -> Value:
        """The position of the row of query ("q") or key ("kv") with the number `start`, at which a tile begins."""
        first = jnp.asarray(start, jnp.int32)
        if self.origin is None:
            return first
        offset = self.offsets[axis] if axis in self.offsets else self.origin.offset(axis, self.batch, first)
        return first + offset

    def scalar_values(self, atoms: Sequence[ir.Atom]) -> tuple[Value, ...]:
        """The values of atoms of batch entry and head alone, also those that no wanted result depends on."""
        new = self._copy()
        new.live = self.live | ir.uses(self.program.steps, tuple(atoms))
        new._compute(SCALAR)
        return tuple(new._value_of(a).value for a in atoms)

    def with_loaded_tile(self, load: ir.Load, tile: jax.Array) -> "TileProgram":
        """A copy in which `load` has the values of `tile`, which the kernel has brought to registers (staging.py)."""
        new = self._copy()
        new.env[load.out.id] = TileValue(TILE, tile)
        return new

    def tile(
        self, score: jax.Array | None = None, factor: float = 1.0, slack: float | None = None
    ) -> tuple[jax.Array, ...]:
        """The wanted results as whole tiles, [rows, columns]; the score that the program reads is factor * score."""
        return tuple(self._as_tile(s) for s in self._results(score, factor, slack))

    def scaled_tile(self, score: jax.Array | None, factor: float, keep_column_slope: bool = False) -> Scaled:
        """The wanted results, the modified score first and in the parts of `Scaled`; the program reads factor * score.

        scalar, vector, narrow tile, affine tile   the tile, with factor 1, and no other part
        other tile without a row term              every part; the tile alone if its factor is 0 or below
        other tile with a row term                 every part if `keep_column_slope`, its factor is above 0 and it
                                                   has no narrow factor; otherwise the tile, `row_term` and `offset`
        """
        tile_value, *others = self._results(score, factor)
        rest = tuple(map(self._as_tile, others))
        if tile_value.row_term is not None and not (
            keep_column_slope and tile_value.factor > 0 and tile_value.narrow_factor is None
        ):
            tile_value = TileValue(
                TILE, self._without_row_term(tile_value), row_term=tile_value.row_term, offset=tile_value.offset
            )
        if tile_value.kind == TILE and tile_value.affine_slope is None and tile_value.factor > 0:
            slope = None if tile_value.column_slope is None else jnp.asarray(tile_value.column_slope, jnp.float32)
            return Scaled(
                tile_value.value,
                tile_value.factor,
                tile_value.narrow_factor,
                tile_value.row_term,
                tile_value.offset,
                slope,
                rest,
            )
        return Scaled(self._as_tile(tile_value), 1.0, None, None, None, None, rest)

    def weights_tile(self, score: jax.Array, factor: float, slack: float) -> Scaled:
        """The wanted results, the first in the parts `tile` and `factor` alone; the program reads factor * score.

        The factor is moderate and depends on nothing but the program and `factor`.
        """
        first, *others = self._results(score, factor, slack)
        parts = (first.narrow_factor, first.row_term, first.affine_slope)
        if first.kind != TILE or first.factor < 0 or not moderate(first.factor) or any(x is not None for x in parts):
            first = TileValue(TILE, self._as_tile(first))
        return Scaled(first.value, first.factor, other_results=tuple(map(self._as_tile, others)))

    def row_term(self) -> jax.Array | None:
        """The deferred part of the score that is the same along a row of the attention matrix, [rows]."""
        return self._at_nothing().scaled_tile(self._no_score(), 1.0).row_term

    def weights_factor(self, factor: float) -> float:
        """`Scaled.factor` of every `weights_tile` of scores that are multiplied by `factor`."""
        return self._at_nothing().weights_tile(self._no_score(), factor, 0.0).factor

    def _at_nothing(self) -> "TileProgram":
        """The program at column 0, for what needs no scores: the compiler removes everything else."""
        return self.at_columns(np.int32(0))

    def _no_score(self) -> jax.Array:
        return self._broadcast(TileValue(SCALAR, jnp.float32(0)), TILE)

    def tile_at_columns(self, start: jax.typing.ArrayLike, score: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """The wanted results as whole tiles, [rows, columns], on the tile whose first column is `start`."""
        return self.at_columns(start).tile(score)

    def _results(self, score: jax.Array | None, factor: float = 1.0, slack: float | None = None) -> list[TileValue]:
        """The wanted results on this tile, which may have deferred parts."""
        new = self._copy()
        new.slack = slack
        if score is not None:
            new.env[ir.SCORE] = TileValue(TILE, score, factor)
        new._compute(TILE)
        return [new._value_of(atom) for atom in self.wanted]

    def pin(self) -> "TileProgram":
        """The program whose column vectors are computed here, not where they are used first."""
        # Affine integers are cheaper to compute where they are used.
        affine = {o.id for step in self.program.steps for o in step.outs if o.linear is not None} | {ir.Q, ir.KV}
        columns = [i for i, s in self.env.items() if s.kind == COLUMN and i not in affine]
        held = [i for i in columns if self.env[i].value.dtype != jnp.bool_]
        if not held:
            return self
        new = self._copy()
        for i, value in zip(held, ordered(tuple(self.env[i].value for i in held)), strict=True):
            new.env[i] = TileValue(COLUMN, value)
        return new

    def _copy(self) -> "TileProgram":
        new = object.__new__(TileProgram)
        new.__dict__.update(self.__dict__)
        new.env = dict(self.env)
        return new

    # ------------------------------------------------------------- evaluation

    def _kind(self, axes: ir.Axes) -> str:
        """The kind of a value that depends on these axes, for this `row_axis`; TILE also for delta and score."""
        axes = ir.positions_of(axes) - ir.UNIFORM
        if not axes:
            return SCALAR
        if axes == {self.row_axis}:
            return ROW
        return COLUMN if axes in ({"q"}, {"kv"}) else TILE

    def _narrowed(self) -> dict[int, str]:
        """What `narrowed` is for tiles that begin at multiples of their rows and columns."""
        column_axis = "kv" if self.row_axis == "q" else "q"
        by_row, by_column = (run_lengths(self.program, axis) for axis in (self.row_axis, column_axis))
        found: dict[int, str] = {}
        for out in (out for step in self.program.steps for out in step.outs):
            kind, (rows, columns) = self._kind(out.axes), self.shape
            moves = (
                kind in (ROW, TILE) and by_row[out.id] % rows,
                kind in (COLUMN, TILE) and by_column[out.id] % columns,
            )
            less = (TILE if moves[1] else ROW) if moves[0] else COLUMN if moves[1] else SCALAR
            if less != kind:
                found[out.id] = less
        return found

    def _kind_of(self, atom: ir.Atom) -> str:
        """The kind of the value of an atom on these tiles."""
        found = self.narrowed.get(atom.id) if isinstance(atom, ir.Val) else None
        return found or self._kind(ir.axes_of(atom))

    def _stage(self, out: ir.Val) -> str:
        """The stage at which a value is computed: its kind, and no earlier than the position of its tile is known."""
        kind = self._kind(out.axes)
        return kind if out.id not in self.narrowed or kind == ROW else COLUMN

    def _dividend_of_first(self, step: ir.Step) -> ir.Linear | None:
        """The dividend of a quotient that is the same in all elements of a tile, unlike its dividend; else None."""
        if self.narrowed.get(step.outs[0].id) != SCALAR or not isinstance(step, ir.Op) or not step.inputs:
            return None
        dividend = step.inputs[0]
        return dividend.linear if isinstance(dividend, ir.Val) and self._kind_of(dividend) != SCALAR else None

    def _of_first(self, step: ir.Op) -> TileValue | None:
        """A quotient from the first element of the tile, if `_dividend_of_first` is its dividend; else None."""
        linear = self._dividend_of_first(step)
        if linear is None:
            return None
        first = self._affine_value(linear, self.row_start, self.col_start)
        return TileValue(SCALAR, apply(step, [first, self._value_of(step.inputs[1]).value], self.overhangs))

    def _compute(self, stage: str) -> None:
        """Computes, into `env`, every live step of this stage or an earlier one that is not computed yet."""
        allowed = {
            SCALAR: {SCALAR},
            ROW: {SCALAR, ROW},
            COLUMN: {SCALAR, ROW, COLUMN},
            TILE: {SCALAR, ROW, COLUMN, TILE},
        }[stage]
        needed = self._ids_to_compute() if stage in (COLUMN, TILE) else None
        for step in self.program.steps:
            out = step.outs[0]
            if out.id not in self.live or out.id in self.env or self._stage(out) not in allowed:
                continue
            if needed is not None and out.id not in needed:
                continue
            if ir.loops_of(out.axes) - self.bound:
                continue  # computed by the loop over the index
            if isinstance(step, ir.Op) and step.prim in REDUCTIONS:
                self.env[out.id] = self._loop(step)
            elif isinstance(step, ir.Load):
                self.env[out.id] = self._load(step)
            elif isinstance(step, ir.Op):
                special = self._of_first(step) or self._affine(step) or self._limited(step)
                self.env[out.id] = special or self._operate(step)
            else:
                raise NotImplementedError(f"`{step.name}` has no form on a tile.")

    def _loop(self, step: ir.Op) -> TileValue:
        """The result of a reduction over a loop index, by a loop in the kernel."""
        operand, index = step.inputs
        (axis,), kind, prim = ir.axes_of(index), self._kind(step.out.axes), REDUCTIONS[step.prim]
        size = {SCALAR: (), ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape}[kind]
        # a loop cannot carry bools in registers
        dtype = jnp.dtype("int32") if step.out.dtype == "bool" else jnp.dtype(inner_dtype(step.out.dtype))
        both = dataclasses.replace(
            step,
            prim=prim,
            inputs=tuple(dataclasses.replace(step.out, dtype=dtype.name) for _ in range(2)),
            out=dataclasses.replace(step.out, dtype=dtype.name),
        )
        old = {o.id for s in self.program.steps for o in s.outs if axis in o.axes}

        def one_value(k: jax.Array, total: jax.Array) -> jax.Array:
            new = self._copy()
            new.env = {i: v for i, v in self.env.items() if i not in old}
            new.env[typing.cast(ir.Val, index).id] = TileValue(SCALAR, jnp.asarray(k, jnp.int32))
            new.bound, new.wanted = self.bound | {axis}, (operand,)
            new.live = ir.uses(self.program.steps, new.wanted)
            new._compute(TILE)
            value = jnp.asarray(new._broadcast(new._value_of(operand), kind))
            return apply(both, [total, value.astype(dtype)], self.overhangs)

        unit = np.asarray(unit_of(prim, dtype) if step.out.dtype != "bool" else int(prim == "and"), dtype)[()]
        start = jnp.asarray(unit) if kind == SCALAR else registers.splat(unit, kind, size)
        total = lax.fori_loop(jnp.int32(0), jnp.int32(ir.loop_size(axis)), one_value, start)
        return TileValue(kind, total != np.int32(0) if step.out.dtype == "bool" else total)

    def _ids_to_compute(self) -> set[int]:
        """Ids of the values that have to be computed for the results, those that are computed already included."""
        needed = {a.id for a in self.wanted if isinstance(a, ir.Val)}
        for step in reversed(self.program.steps):
            if step.outs[0].id not in needed or step.outs[0].id in self.env:
                continue
            # `_affine`, `_of_first` and `_load` compute these from coefficients, without their operands.
            if isinstance(step, ir.Op) and self._affine_source(step) is not None:
                continue
            if self._dividend_of_first(step) is not None:
                continue
            inputs = step.inputs
            if isinstance(step, ir.Load) and (steps := self._affine_steps(step)) is not None:
                inputs = [a for a, s in zip(inputs, steps, strict=True) if s is None]
            needed |= {a.id for a in inputs if isinstance(a, ir.Val)}
        return needed

    def _value_of(self, atom: ir.Atom) -> TileValue:
        """The value of an atom: of a literal as a scalar, or of a step that is computed already, else KeyError."""
        if isinstance(atom, ir.Val):
            return self.env[atom.id]
        return TileValue(SCALAR, np.asarray(atom.value, inner_dtype(atom.dtype))[()])

    def _broadcast(self, tile_value: TileValue, kind: str) -> Value:
        """The value as an array of `kind`, of at least its rank, with every deferred operation applied."""
        if tile_value.exact is not None:
            return tile_value.exact
        if tile_value.narrow_factor is not None:
            return tile_value.value * thread_tiles.repeat_columns(
                tile_value.narrow_factor * np.float32(tile_value.factor), self.shape
            )
        if tile_value.factor != 1.0:
            return tile_value.value * np.float32(tile_value.factor)
        if tile_value.kind == kind:
            return tile_value.value
        narrow = (self.shape[0], thread_tiles.PERIOD)
        if tile_value.kind == SCALAR:
            size = {ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape, NARROW: narrow}[kind]
            return registers.splat(tile_value.value, TILE if kind == NARROW else kind, size)
        if tile_value.kind == NARROW:
            return thread_tiles.repeat_columns(tile_value.value, self.shape)
        return registers.broadcast_vector(tile_value.value, tile_value.kind, narrow if kind == NARROW else self.shape)

    def _without_row_term(self, tile_value: TileValue) -> jax.Array:
        """The value as a tile with all deferred parts applied but `row_term` and `offset`."""
        alone = self._broadcast(
            dataclasses.replace(tile_value, row_term=None, offset=None, column_slope=None, exact=None), TILE
        )
        if tile_value.column_slope is None:
            return alone
        return alone + registers.broadcast_vector(
            registers.column_iota(self.shape[1], jnp.float32) * tile_value.column_slope, COLUMN, self.shape
        )

    def _as_tile(self, tile_value: TileValue) -> jax.Array:
        return self._broadcast(tile_value, TILE)

    def _compare_columns(self, step: ir.Op) -> TileValue | None:
        """A comparison of an affine integer with a value that is the same along each row; else None."""
        if step.prim not in thread_tiles.PREDICATES or self._kind(step.out.axes) != TILE or self.col_start is None:
            return None
        for affine, other in (step.inputs, step.inputs[::-1]):
            if (
                not isinstance(affine, ir.Val)
                or affine.linear is None
                or not difference_fits(affine)
                or not difference_fits(other)
            ):
                continue
            linear, kind = affine.linear, self._kind(ir.axes_of(other))
            per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
            if not per_col or kind not in (SCALAR, ROW) or any(i not in self.env for i, _ in linear.uniform):
                continue
            row_start = np.int32(0) if self.row_start is None else self.row_start
            base = self._affine_value(linear, row_start, self.col_start)
            row = self._broadcast(self._value_of(other), ROW) - base
            if per_row:
                row = row - self._row_numbers() * np.int32(per_row)
            name = step.prim if affine is step.inputs[0] else thread_tiles.MIRRORED[step.prim]
            return TileValue(TILE, thread_tiles.compare_columns(per_col, name, row, self.shape))
        return None

    def _operate(self, step: ir.Op) -> TileValue:
        """The result of an operation that is no affine integer: compared, deferred, or computed."""
        compared = self._compare_columns(step)
        if compared is not None:
            return compared
        operands = [self._value_of(a) for a in step.inputs]
        deferred = self._exponential(step) or self._defer(step, operands)
        if deferred is not None and deferred.affine_slope is None and deferred.row_term is None:
            return deferred
        if deferred is not None:
            exact = apply(step, [self._as_tile(s) for s in operands], self.overhangs)
            return dataclasses.replace(deferred, exact=exact)
        kinds = {s.kind for s in operands} - {SCALAR}
        if kinds == {ROW, NARROW}:
            kinds = {NARROW}
        kind = SCALAR if not kinds else kinds.pop() if len(kinds) == 1 else TILE
        args = [self._broadcast(s, kind) for s in operands]
        if kind == SCALAR:
            args = [jnp.asarray(a) for a in args]
        return TileValue(kind, apply(step, args, self.overhangs))

    def _defer(self, step: ir.Op, operands: list[TileValue]) -> TileValue | None:
        """The result of a float operation with deferred parts; None where the operation has to be computed.

        "Tile" here is a value of kind TILE that is not affine. The caller sets `exact` of the result.

            tile * literal, tile / literal, -tile   the tile, with another `factor`
            tile ** whole, max(tile, 0)             that of the tile without its factor, which is moderate
            tile * positive narrow tile or scalar   the tile, with another `narrow_factor`
            tile * another value                    the product of the two, with their factors still deferred
            affine tile * scalar, -affine tile      the affine tile, with each of its parts multiplied
            sum, difference                         what `deferred_sum` gives
        """
        name = step.prim
        if any(s.row_term is not None for s in operands):
            return None
        if step.out.dtype == "float32" and name in ("square", "integer_pow", "max"):
            return self._homogeneous(step, operands)
        if step.out.dtype != "float32" or name not in ("mul", "div", "neg", "add", "sub"):
            return None
        if name == "neg":
            (a,) = operands
            if a.affine_slope is not None:
                return TileValue(TILE, -a.value, offset=-a.offset, affine_slope=-a.affine_slope)
            return dataclasses.replace(a, factor=-a.factor) if a.kind == TILE else None
        a, b = operands
        if name in ("mul", "div"):
            if name == "mul" and a.kind != TILE:
                a, b, number = b, a, step.inputs[0]
            else:
                number = step.inputs[1]
            may_defer = (
                name == "mul" and not isinstance(number, ir.Lit) and a.affine_slope is None and b.affine_slope is None
            )
            if a.kind == TILE and may_defer:
                narrow = b.kind == SCALAR or (b.kind == NARROW and a.narrow_factor is None)
                if narrow and self._is_positive_factor(number, abs(a.factor), b.kind == SCALAR):
                    made = self._broadcast(b, NARROW)
                    return dataclasses.replace(
                        a, narrow_factor=made if a.narrow_factor is None else a.narrow_factor * made
                    )
                if a.factor * b.factor == 1.0 or not safe_to_defer(a.factor * b.factor):
                    return None
                other = dataclasses.replace(b, factor=1.0)
                return dataclasses.replace(a, value=a.value * self._as_tile(other), factor=a.factor * b.factor)
            if a.kind != TILE or b.kind != SCALAR:
                return None
            if a.affine_slope is not None and name == "mul":
                return TileValue(
                    TILE, a.value * b.value, offset=a.offset * b.value, affine_slope=a.affine_slope * b.value
                )
            if not isinstance(number, ir.Lit) or a.affine_slope is not None:
                return None
            factor = float(number.value.real)
            if not safe_to_defer(factor):
                return None
            factor = a.factor * factor if name == "mul" else a.factor / factor
            return dataclasses.replace(a, factor=factor) if safe_to_defer(factor) else None
        return deferred_sum(a, b, -1 if name == "sub" else 1)

    def _homogeneous(self, step: ir.Op, operands: list[TileValue]) -> TileValue | None:
        """A whole power of a tile, or the larger of it and 0, with the factor of the tile deferred; else None."""
        tile = next((s for s in operands if s.kind == TILE), operands[0])
        if (
            self.slack is None
            or tile.factor in (0.0, 1.0)
            or not (tile.affine_slope is None and tile.narrow_factor is None)
        ):
            return None
        power = 1
        if step.prim == "max":
            if tile.factor < 0 or not any(isinstance(a, ir.Lit) and a.value == 0 for a in step.inputs):
                return None
        else:
            power = 2 if step.prim == "square" else typing.cast(int, dict(step.params)["y"])
        factor = tile.factor**power if 0 < power <= MOST_POWER else 0.0
        if not moderate(factor):
            return None
        bare = [dataclasses.replace(s, factor=1.0) if s is tile else s for s in operands]
        value = apply(step, [self._as_tile(s) for s in bare], self.overhangs)
        return TileValue(TILE, value, factor)

    def _exponential(self, step: ir.Op) -> TileValue | None:
        """exp, exp2 or logistic of tile * factor + addend, where one FMA scales and shifts the exponent; else None."""
        if self.slack is None or step.prim not in ("exp", "exp2", "logistic") or step.out.dtype != "float32":
            return None
        line = self._line(step.inputs[0])
        if line is None:
            return None
        logistic = step.prim == "logistic"
        # an addend is the usual -log(keys), which makes nearly all weights small
        small = logistic and line.addend is not None and self.slack >= thread_tiles.SMALL_ERROR
        unit = {"exp": LOG2E, "exp2": 1.0, "logistic": LOG2E if small else -LOG2E}[step.prim]
        factor: Value = np.float32(line.factor * unit)
        if line.scalar is not None:
            factor = line.scalar * factor
        exponent = line.tile * factor
        if line.addend is not None:
            addend = self._broadcast(TileValue(line.kind, line.addend * np.float32(unit)), TILE)
            exponent = exponent + addend
        return TileValue(TILE, thread_tiles.logistic_tile(exponent, small) if logistic else jnp.exp2(exponent))

    def _line(self, atom: ir.Atom) -> "Line | None":
        """A float32 atom as a line of a tile: sums and products with numbers of a row, or of all rows, are undone."""
        if not isinstance(atom, ir.Val) or atom.dtype != "float32":
            return None
        value = self.env.get(atom.id)
        if value is None or value.kind != TILE or value.affine_slope is not None or value.row_term is not None:
            return None
        if value.narrow_factor is not None:
            return None
        step = self.producers.get(atom.id)
        if step is not None and step.prim in ("add", "sub", "mul", "div", "neg"):
            kinds = [self._value_of(a).kind for a in step.inputs]
            at = kinds.index(TILE) if kinds.count(TILE) == 1 else None
            line = None if at is None else self._line(step.inputs[at])
            if at is not None and line is not None:
                other = step.inputs[1 - at] if len(step.inputs) > 1 else None
                made = line.neg() if step.prim == "neg" else self._line_with(step.prim, at, line, other)
                if made is not None:
                    return made
        return Line(value.value, value.factor)

    def _line_with(self, prim: str, at: int, line: "Line", atom: ir.Atom | None) -> "Line | None":
        """The sum, difference, product or quotient of operand number `at`, a line, and the other one; None: no line."""
        assert atom is not None
        other = self._value_of(atom)
        if prim in ("add", "sub"):
            if other.kind not in (SCALAR, ROW) or other.factor != 1.0:
                return None
            sign = -1 if prim == "sub" and at == 0 else 1
            return (line.neg() if prim == "sub" and at == 1 else line).plus(other.kind, other.value * np.float32(sign))
        if isinstance(atom, ir.Lit) and not (prim == "div" and at == 1):
            number = float(atom.value.real)
            number = number if prim == "mul" else 1 / number if number else 0.0
            return line.times(number) if safe_to_defer(line.factor * number) else None
        if prim == "mul" and other.kind == SCALAR and line.scalar is None and line.addend is None:
            return dataclasses.replace(line, scalar=other.value)
        return None

    def _is_positive_factor(self, atom: ir.Atom, factor: float, scalar: bool) -> bool:
        """Whether the atom is positive by its bounds, and multiplying by it may be deferred (`safe_to_defer`)."""
        low, high = bounds(with_results(self.program, (atom,)))[0]
        # An infinite upper bound of a scalar is assumed to be moderate, as in analysis/large_scores.py.
        high = low if scalar and math.isinf(high) else high
        return (
            low > 0
            and safe_to_defer(low)
            and safe_to_defer(high)
            and safe_to_defer(low * factor)
            and safe_to_defer(high * factor)
        )

    # ------------------------------------------------------------- affine integers

    def _affine_source(self, step: ir.Op) -> tuple[ir.Val, int] | None:
        """(affine integer, period) for a step whose tile is computed from an affine integer; None for other steps.

        any operation whose result is an affine integer             (result, 0)
        the cast of an affine integer to float32                    (operand, 0), if differences are exact
        `floormod` of an affine integer by a literal power of two   (operand, that power)
        """
        if self._kind(step.out.axes) != TILE:
            return None
        source: ir.Atom = step.out
        period = 0
        if step.prim == "floormod" and power_of_two(step.inputs[1]) is not None:
            source, period = step.inputs[0], 1 << typing.cast(int, power_of_two(step.inputs[1]))
        elif step.prim == "convert_element_type" and step.out.dtype == "float32":
            source = step.inputs[0]
            bounds = (source.low, source.high) if isinstance(source, ir.Val) else (None, None)
            if None in bounds or max(abs(b) for b in typing.cast(tuple[int, int], bounds)) >= MAX_EXACT // 2:
                return None
        if not isinstance(source, ir.Val) or source.linear is None or source.dtype != "int32":
            return None
        return (source, period) if source.linear.q and source.linear.kv else None

    def _affine(self, step: ir.Op) -> TileValue | None:
        """The result of a step with an `_affine_source`, from its coefficients; None before `at_columns`."""
        found = self._affine_source(step)
        if found is None or self.col_start is None:
            return None
        source, period = found
        linear = typing.cast(ir.Linear, source.linear)
        per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
        start = self._affine_value(linear, self.row_start, self.col_start)
        row = self._row_numbers() * np.int32(per_row)
        if step.out.dtype == "float32":
            first, along = (row + start).astype(jnp.float32), np.float32(per_col)
            exact = thread_tiles.affine_tile(first, along, self.shape)
            if self.alone:
                zero = registers.splat(np.float32(0), ROW, self.shape[:1])
                return TileValue(TILE, zero, offset=first, affine_slope=along, exact=exact)
            return TileValue(
                TILE, row.astype(jnp.float32), offset=start.astype(jnp.float32), affine_slope=along, exact=exact
            )
        row = row + start
        if 0 < period <= thread_tiles.PERIOD:
            narrow = (self.shape[0], thread_tiles.PERIOD)
            return TileValue(NARROW, thread_tiles.affine_tile(row, per_col, narrow, period))
        return TileValue(TILE, thread_tiles.affine_tile(row, per_col, self.shape, period))

    def _limited(self, step: ir.Op) -> TileValue | None:
        """The cast to float32 of the larger or smaller of an affine integer and a literal, from casts of both; else
        None."""
        limit = self.producers.get(step.inputs[0].id) if isinstance(step.inputs[0], ir.Val) else None
        if (
            self.slack is None
            or step.prim != "convert_element_type"
            or limit is None
            or limit.prim not in ("max", "min")
        ):
            return None
        for atom, literal in (limit.inputs, limit.inputs[::-1]):
            if isinstance(literal, ir.Lit) and difference_fits(literal) and abs(literal.value) < MAX_EXACT:
                value = self._affine(dataclasses.replace(step, inputs=(atom,)))
                if value is not None and value.exact is not None:
                    bound = self._as_tile(TileValue(SCALAR, np.float32(literal.value)))
                    return TileValue(TILE, (jnp.maximum if limit.prim == "max" else jnp.minimum)(value.exact, bound))
        return None

    def _affine_value(self, linear: ir.Linear, row: Value, col: Value) -> Value:
        """The affine integer at the entry of the tile with these positions (not numbers), an int32 scalar."""
        q, kv = (row, col) if self.row_axis == "q" else (col, row)
        total: Value = np.int32(linear.const)
        parts = [(linear.q, q), (linear.kv, kv)]
        parts += [(linear.b, self.env[ir.B].value), (linear.h, self.env[ir.H].value)]
        parts += [(c, self.env[i].value) for i, c in linear.uniform]
        for coefficient, value in parts:
            if coefficient:
                value = value if value.dtype == jnp.int32 else value.astype(jnp.int32)
                total = total + (value if coefficient == 1 else value * np.int32(coefficient))
        return total

    # ------------------------------------------------------------- loads

    def _affine_steps(self, load: ir.Load) -> tuple[tuple[int, int] | None, ...] | None:
        """(by row, by column) of each index, None for a constant one; None where the load must be a gather."""
        if self.overhangs:
            return None
        steps: list[tuple[int, int] | None] = []
        for atom in load.index:
            if self._kind_of(atom) == SCALAR:
                steps.append(None)
                continue
            linear = typing.cast(ir.Val, atom).linear
            if linear is None or any(i not in self.env for i, _ in linear.uniform):
                return None
            steps.append((linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q))
        return tuple(steps)

    def _load(self, load: ir.Load) -> TileValue:
        """What a load reads on the current tile, in its inner dtype, by one read, `memory.load_affine` or a gather."""
        ref, dtype = self.refs[load.capture], load.out.dtype
        kind = self._kind_of(load.out)
        if kind == SCALAR:
            value = memory.load_scalar(ref, tuple(self._value_of(a).value for a in load.index))
        else:
            size = {ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape}[kind]
            steps = self._affine_steps(load)
            if steps is not None:
                row = self.row_start if self.row_start is not None else np.int32(0)
                col = self.col_start if self.col_start is not None else np.int32(0)
                index = tuple(
                    self._value_of(a).value
                    if s is None
                    else self._affine_value(typing.cast(ir.Linear, typing.cast(ir.Val, a).linear), row, col)
                    for a, s in zip(load.index, steps, strict=True)
                )
                pairs = kind == TILE and self.aligned and reads_pairs(load, self.row_axis, ref.shape[-1])
                value = memory.load_affine(ref, index, steps, kind, size, self.used_rows, pairs)
            else:
                value = self._gather(load, kind, size)
        if dtype == "bool":
            value = value != np.zeros((), value.dtype)
        return TileValue(kind, value)

    def _gather(self, load: ir.Load, kind: str, size: tuple[int, ...]) -> jax.Array:
        """The load of `kind` and `size` by `memory.gather`; with `overhangs` varying indices are clamped."""
        ref = self.refs[load.capture]
        operands = [self._value_of(a) for a in load.index]
        varies = tuple(s.kind != SCALAR for s in operands)
        index = []
        for tile_value, n in zip(operands, ref.shape, strict=True):
            value = tile_value.value
            if tile_value.kind != SCALAR:
                if self.overhangs:
                    value = jnp.minimum(jnp.maximum(value.astype(jnp.int32), np.int32(0)), np.int32(n - 1))
                value = self._broadcast(TileValue(tile_value.kind, value), kind)
            index.append(value)
        return memory.gather(ref, tuple(index), varies, kind, size)


def reads_pairs(load: ir.Load, row_axis: str, length: int) -> bool:
    """Whether columns 2 n and 2 n + 1 read neighbouring elements, the first at an even place, if tiles begin evenly."""
    atom = load.index[-1]
    last = atom.linear if isinstance(atom, ir.Val) else None
    if last is None or last.uniform or last.b or last.h or last.const % 2 or length % 2:
        return False
    column, slopes = ("kv", (0, 1)) if row_axis == "q" else ("q", (1, 0))
    others = frozenset().union(*(ir.axes_of(a) for a in load.index[:-1]))
    return (last.q, last.kv) == slopes and not others & {column, "delta"}
