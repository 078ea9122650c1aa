"""Evaluates a traced program (ir/program.py) on tiles of scores inside a Mosaic GPU kernel.

Each value is computed at its own rank and broadcast only where ranks meet: what depends on b and h is a scalar, on
the axis of the tile's rows a row vector, on the other axis a column vector, the rest a tile. Ranks are computed at
different places of a kernel:

    program = TileProgram(plan.score, refs, (64, 128), Place(b, h))            # scalars, once for each head
    program = program.at_rows(q_start)                                        # row vectors, once for each row of tiles
    program = program.at_columns(kv_start)                                    # column vectors, once for each tile
    scores, = program.tile(scores)                                            # the tile, once its scores are there

`refs` are the captured arrays passed through `memory.kernel_operand`. `row_axis` is "q" where rows are queries
(forward, dQ) and "kv" where rows are keys (the transposed scores of dK and dV). Values have the dtypes of tile_ops.py
and the layouts of registers.py. The *kind* of a value is its rank: SCALAR, ROW, COLUMN, TILE, or NARROW for a tile
that repeats after PERIOD columns.

An *affine integer* is an integer value a * q + b * kv + c whose a and b are numbers and whose c depends on batch
entry and head alone (`ir.Linear`). Such values, and loads indexed by them, are computed from the coefficients,
without their operands.

program_support.py says which programs run here, tile_ops.py computes one operation, tile_values.py holds deferred operations,
tile_origin.py says where tiles lie. The file is longer than others because the methods of its one class work on one table of values.
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
from flexjax.backends.mosaic_gpu import memory, registers, thread_tiles
from flexjax.backends.mosaic_gpu.integer_division import power_of_two
from flexjax.backends.mosaic_gpu.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.tile_ops import apply, inner_dtype
from flexjax.backends.mosaic_gpu.tile_origin import Place
from flexjax.backends.mosaic_gpu.tile_values import (
    COLUMN,
    NARROW,
    ROW,
    SCALAR,
    TILE,
    Scaled,
    TileValue,
    Value,
    deferred_sum,
    difference_fits,
    safe_to_defer,
)
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results

MAX_EXACT = 1 << 24
"""Integers up to this size are exact in float32."""


class TileProgram:
    """A program on a tile, with the values of the steps that are computed already; methods return a new TileProgram.

    The fields are those of `__init__` except `place` and `results`, and

    wanted                 atoms of the results to compute
    live                   ids of the values that these results depend on
    env                    id of a value -> the value on the tile, for the steps that are computed
    row_start, col_start   positions of the tile's first row and column, int32 scalars; None until `at_rows` and `at_columns` set them.
                           Without an origin they are the numbers of row and column
    origin                 where rows and columns lie in the whole problem, whose positions the program reads; None: positions count from
                           0
    batch, offsets         number of the batch entry; axis -> what `origin` adds to row numbers, for axes of one run

    The kind of a value is SCALAR, ROW (one number for each row), COLUMN, TILE, or NARROW (a tile that repeats after PERIOD columns). An
    affine integer is a * q + b * kv + c with numbers a and b, and c the same for a whole head.
    """

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
        even_columns: bool = False,
        interpret: bool = False,
    ) -> None:
        """Makes the program for tiles of one head, and computes its scalars, which depend on batch entry and head alone.

        program        the traced program
        refs           its captured arrays, in the order of `program.captures`
        shape          (rows, columns) of a tile
        place          of the tiles
        row_axis       "q" or "kv": what the rows of a tile are
        overhangs      whether a tile may extend past the end of the attention matrix: loads then clamp their indices to the array
        results        numbers of the program's results to compute; None: all
        used_rows      how many rows of a tile exist; the others are given the number of the last that exists, so that they read no other
                       address. None: all
        even_columns   whether the first column of every tile has an even number
        interpret      whether the kernel runs in the simulator
        """
        batch, head, origin = place
        self.program, self.refs, self.shape, self.used_rows = program, refs, shape, used_rows
        self.row_axis, self.overhangs, self.even_columns, self.interpret = row_axis, overhangs, even_columns, interpret
        self.wanted = tuple(program.results[i] for i in results) if results is not None else program.results
        self.live = ir.uses(program.steps, self.wanted)
        self.env: dict[int, TileValue] = {
            ir.B: TileValue(SCALAR, jnp.asarray(batch, jnp.int32)),
            ir.H: TileValue(SCALAR, jnp.asarray(head, jnp.int32)),
        }
        self.origin, self.batch = origin, batch
        self.offsets: dict[str, Value] = {}
        if origin is not None:  # that of an axis with one run is the same for all tiles
            self.offsets = {a: origin.offset(a, batch, None) for a in ("q", "kv") if origin.runs(a) == 1}
        self.row_start: Value = None
        self.col_start: Value = None
        self._compute(SCALAR)

    # ------------------------------------------------------------- stages

    def at_rows(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its row vectors computed, for the tiles whose first row has the number `start`, counted from
        0 in the arrays of the call. With an origin the program reads the positions of these rows.
        """
        new = self._copy()
        new.row_start = self._position(self.row_axis, start)
        row = ir.Q if self.row_axis == "q" else ir.KV
        if row in new.live:
            new.env[row] = TileValue(ROW, self._row_numbers() + new.row_start)
        new._compute(ROW)
        return new

    def _row_numbers(self) -> jax.Array:
        """The numbers of the rows of a tile, int32 [rows], counted from its first: 0, 1, ...; from `used_rows` on all used_rows - 1."""
        rows = registers.row_iota(self.shape[0])
        return rows if self.used_rows is None else jnp.minimum(rows, np.int32(self.used_rows - 1))

    def at_columns(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its column vectors computed, for the tile whose first column has the number `start`, counted from 0 in the
        arrays of the call. It is called on what `at_rows` returned, for each tile anew, because values that are computed already are
        kept.

        A kernel calls this before it waits for the scores, so that the loads of column vectors are done when `tile` needs them.
        """
        new = self._copy()
        new.col_start = self._position("kv" if self.row_axis == "q" else "q", start)
        column = ir.KV if self.row_axis == "q" else ir.Q
        if column in new.live:
            new.env[column] = TileValue(COLUMN, registers.columns_from(new.col_start, self.shape[1], self.interpret))
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
        """The values of these atoms, scalars that depend on batch entry and head alone; a literal's is a numpy scalar. Raises
        KeyError for an atom that no wanted result depends on, because it is not computed.
        """
        return tuple(self._value_of(a).value for a in atoms)

    def with_loaded_tile(self, load: ir.Load, tile: jax.Array) -> "TileProgram":
        """A copy of the program in which `load` has the values of `tile`, which the kernel itself has brought to registers (staging.py).

        load   a load of the program that depends on both q and kv
        tile   what it reads on the tile that `at_rows` and `at_columns` chose, [rows, columns], with rows along `row_axis`, in the dtype of
               `tile_ops.inner_dtype`; given for each tile anew, before `tile` or `scaled_tile`
        """
        new = self._copy()
        new.env[load.out.id] = TileValue(TILE, tile)
        return new

    def tile(self, score: jax.Array | None = None, factor: float = 1.0) -> tuple[jax.Array, ...]:
        """The wanted results on the tile that `at_rows` and `at_columns` chose, each as a whole tile [rows, columns].

        score    [rows, columns] float32; the score that the program reads is factor * score. None for a program without a score
        factor   a number, such as the plan's scale
        """
        return tuple(self._as_tile(s) for s in self._results(score, factor))

    def scaled_tile(self, score: jax.Array | None, factor: float, keep_column_slope: bool = False) -> Scaled:
        """The wanted results on the tile that `at_rows` and `at_columns` chose. The first wanted result must be the
        modified score; it is returned in the parts of `Scaled`. The others are `Scaled.other_results`.

        score               [rows, columns] float32; the score that the program reads is factor * score. None for a
                            program that does not read the score
        factor              a number, such as the plan's scale
        keep_column_slope   False: if the score has a row term, `Scaled.column_slope` is None

        Which parts are returned depends on the value of the modified score:

            scalar, vector, narrow tile, affine tile       the tile, with factor 1, and no other part
            other tile without a row term                  every part; the tile alone if its factor is 0 or below
            other tile with a row term                     every part if `keep_column_slope` is set, its factor is
                                                           above 0 and it has no narrow factor. Otherwise the tile,
                                                           `row_term` and `offset`: all else is applied to the tile
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

    def row_term(self) -> jax.Array | None:
        """The part of the score that is the same along a row of the attention matrix and is deferred
        (`Scaled.row_term`), [rows]; None where the score has none.

        It is computed without scores, after the last tile; the compiler removes everything else that is computed here.
        """
        score = self._broadcast(TileValue(SCALAR, jnp.float32(0)), TILE)
        return self.at_columns(np.int32(0)).scaled_tile(score, 1.0).row_term

    def tile_at_columns(self, start: jax.typing.ArrayLike, score: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """The wanted results, each as a whole tile [rows, columns], on the tile whose rows `at_rows` chose and whose
        first column has the number `start`.

        score   [rows, columns] float32, the score that the program reads; None for a program without a score
        """
        return self.at_columns(start).tile(score)

    def _results(self, score: jax.Array | None, factor: float = 1.0) -> list[TileValue]:
        """The wanted results on this tile as TileValues, which may have deferred parts.

        score    [rows, columns] float32; the score that the program reads is factor * score. None for a program without a score
        factor   a number, such as the plan's scale
        """
        new = self._copy()
        if score is not None:
            new.env[ir.SCORE] = TileValue(TILE, score, factor)
        new._compute(TILE)
        return [new._value_of(atom) for atom in self.wanted]

    def pin(self) -> "TileProgram":
        """The program whose column vectors are computed at this point of the kernel: the compiler may not move their loads down to the
        first use. Called after `at_columns`.

        Affine integers and booleans are left out, integers because they are cheaper to compute where they are used. The program itself is
        returned if no vector is left, and in the simulator.
        """
        affine = {o.id for step in self.program.steps for o in step.outs if o.linear is not None} | {
            ir.Q,
            ir.KV,
        }
        columns = [i for i, s in self.env.items() if s.kind == COLUMN and i not in affine]
        held = [i for i in columns if self.env[i].value.dtype != jnp.bool_]
        if not held or self.interpret:
            return self
        new = self._copy()
        for i, value in zip(held, lax.optimization_barrier(tuple(self.env[i].value for i in held)), strict=True):
            new.env[i] = TileValue(COLUMN, value)
        return new

    def _copy(self) -> "TileProgram":
        """A copy with a table of values (`env`) of its own."""
        new = object.__new__(TileProgram)
        new.__dict__.update(self.__dict__)
        new.env = dict(self.env)
        return new

    # ------------------------------------------------------------- evaluation

    def _kind(self, axes: ir.Axes) -> str:
        """The kind of a value that depends on these axes, on tiles with this `row_axis`; b and h do not count.

        SCALAR without axes, ROW for the axis of the rows alone, COLUMN for the other of q and kv alone, else TILE (also
        for delta and score).
        """
        axes = axes - ir.UNIFORM
        if not axes:
            return SCALAR
        if axes == {self.row_axis}:
            return ROW
        return COLUMN if axes in ({"q"}, {"kv"}) else TILE

    def _compute(self, stage: str) -> None:
        """Computes, into `env`, every live step that is not computed yet and whose stage is this one or an earlier one.

        stage   SCALAR, ROW, COLUMN or TILE, in this order; a step's stage is the kind of its axes (`_kind`), TILE for narrow tiles

        In the last two stages, steps whose result nothing reads any more are left out (`_ids_to_compute`). Raises
        NotImplementedError for a `Call`, which program_support.py refuses.
        """
        allowed = {
            SCALAR: {SCALAR},
            ROW: {SCALAR, ROW},
            COLUMN: {SCALAR, ROW, COLUMN},
            TILE: {SCALAR, ROW, COLUMN, TILE},
        }[stage]
        needed = self._ids_to_compute() if stage in (COLUMN, TILE) else None
        for step in self.program.steps:
            out = step.outs[0]
            if out.id not in self.live or out.id in self.env or self._kind(out.axes) not in allowed:
                continue
            if needed is not None and out.id not in needed:
                continue
            if isinstance(step, ir.Load):
                self.env[out.id] = self._load(step)
            elif isinstance(step, ir.Op):
                self.env[out.id] = self._affine(step) or self._operate(step)
            else:
                raise NotImplementedError(f"`{step.name}` has no form on a tile.")

    def _ids_to_compute(self) -> set[int]:
        """Ids of the values that have to be computed for the results, those that are computed already included.

        Left out are operands of values that are computed already, and operands that only affine integers and affine
        loads have, because `_affine` and `_load` compute those from coefficients.
        """
        needed = {a.id for a in self.wanted if isinstance(a, ir.Val)}
        for step in reversed(self.program.steps):
            if step.outs[0].id not in needed or step.outs[0].id in self.env:
                continue
            if isinstance(step, ir.Op) and self._affine_source(step) is not None:
                continue
            if isinstance(step, ir.Load) and self._affine_steps(step) is not None:
                continue
            needed |= {a.id for a in step.inputs if isinstance(a, ir.Val)}
        return needed

    def _value_of(self, atom: ir.Atom) -> TileValue:
        """The value of an atom: of a literal as a scalar, or of a step that is computed already; KeyError for one that is not."""
        if isinstance(atom, ir.Val):
            return self.env[atom.id]
        return TileValue(SCALAR, np.asarray(atom.value, inner_dtype(atom.dtype))[()])

    def _broadcast(self, tile_value: TileValue, kind: str) -> Value:
        """`tile_value` as an array of `kind`, with every deferred operation applied; `exact`, the tile as the mod
        computes it, where the value has one.

        kind   SCALAR, ROW, COLUMN, NARROW or TILE, at least the rank of the value; TILE for a value with deferred parts
        """
        if tile_value.exact is not None:
            return tile_value.exact
        if tile_value.narrow_factor is not None:
            return tile_value.value * thread_tiles.repeat_columns(
                tile_value.narrow_factor * np.float32(tile_value.factor), self.shape, self.interpret
            )
        if tile_value.factor != 1.0:
            return tile_value.value * np.float32(tile_value.factor)
        if tile_value.kind == kind:
            return tile_value.value
        narrow = (self.shape[0], thread_tiles.PERIOD)
        if tile_value.kind == SCALAR:
            size = {ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape, NARROW: narrow}[kind]
            return registers.splat(tile_value.value, TILE if kind == NARROW else kind, size, self.interpret)
        if tile_value.kind == NARROW:
            return thread_tiles.repeat_columns(tile_value.value, self.shape, self.interpret)
        return registers.broadcast_vector(tile_value.value, tile_value.kind, narrow if kind == NARROW else self.shape)

    def _without_row_term(self, tile_value: TileValue) -> jax.Array:
        """`tile_value` as a tile, [rows, columns], with all deferred parts applied but `row_term` and `offset`: value *
        factor * narrow_factor + column_slope * c.
        """
        alone = self._broadcast(
            dataclasses.replace(tile_value, row_term=None, offset=None, column_slope=None, exact=None), TILE
        )
        if tile_value.column_slope is None:
            return alone
        return alone + registers.broadcast_vector(
            registers.column_iota(self.shape[1], jnp.float32) * tile_value.column_slope, COLUMN, self.shape
        )

    def _as_tile(self, tile_value: TileValue) -> jax.Array:
        """`tile_value` as a whole tile [rows, columns], with every deferred operation applied."""
        return self._broadcast(tile_value, TILE)

    def _compare_columns(self, step: ir.Op) -> TileValue | None:
        """The result of a comparison of an affine integer, which changes from column to column, with a scalar or a
        value that is the same along each row; None for any other step, before `at_columns`, and where a difference of
        the two might overflow int32 or a scalar that the affine integer needs is not computed.

        `thread_tiles.compare_columns` compares multiples of the column number with one number for each row, so no
        register holds column numbers. Either operand may be the affine integer.
        """
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
            return TileValue(TILE, thread_tiles.compare_columns(per_col, name, row, self.shape, self.interpret))
        return None

    def _operate(self, step: ir.Op) -> TileValue:
        """The value of the result of `step`, an operation that is not computed as an affine integer (`_compute` asks `_affine` before).

        A comparison that `_compare_columns` takes is computed there. Where `_defer` can, the result has deferred parts; one with an affine
        slope or a row term also has `exact`, the tile computed from whole operands. Any other result is computed at one kind: SCALAR if all
        operands are, else the one kind of the other operands, NARROW for ROW and NARROW, and TILE for any other mix.
        """
        compared = self._compare_columns(step)
        if compared is not None:
            return compared
        operands = [self._value_of(a) for a in step.inputs]
        deferred = self._defer(step, operands)
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
        """Expresses the result of a float operation as a TileValue with deferred parts; None where the operation has to be computed.

        step       the operation
        operands   the values of its inputs, in order

        "Tile" here is a value of kind TILE that is not affine. The results are

            tile * literal, literal * tile, tile / literal   the tile, with `factor` multiplied or divided by the literal
            -tile                                            the tile, with `factor` negated
            tile * narrow tile that is positive by its       the tile, with the narrow tile as its `narrow_factor`, if it has none yet
            bounds
            tile * scalar that is positive by its bounds     the tile, with the scalar in its `narrow_factor`
            tile * any other value that is neither a         the product of the two, computed here, while the product of their
            literal nor affine                               constant factors stays deferred; None if that is 1
            affine tile * scalar, -affine tile               the affine tile, with each of its parts multiplied
            sum, difference                                  what `deferred_sum` gives

        All other operations give None; so do results other than float32, operands with a `row_term`, and constant factors, or products of
        them, that are not `safe_to_defer`. The operands of a product may come in either order. The caller sets `exact` of the result.
        """
        name = step.prim
        if any(s.row_term is not None for s in operands):
            return None
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

    def _is_positive_factor(self, atom: ir.Atom, factor: float, scalar: bool) -> bool:
        """Whether the atom, by its bounds, is positive for every query and key, and multiplying by it may be
        deferred: both bounds, and their products with `factor`, are `safe_to_defer`.

        factor   positive number
        scalar   whether the atom is a scalar. Its upper bound may then be infinite: it is assumed to be moderate, as in
                 analysis/large_scores.py
        """
        low, high = bounds(with_results(self.program, (atom,)))[0]
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

        The step is one of

            any operation whose result is an affine integer             (result, 0)
            the cast of an affine integer to float32                    (operand, 0)
            `floormod` of an affine integer by a literal power of two   (operand, that power)

        The affine integer is an int32 that depends on q and on kv. A cast counts only if its operand is known to stay
        below MAX_EXACT / 2 in size, so that differences of two of its values are exact in float32 too.
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
        """The result of a step for which `_affine_source` gives an affine integer, computed from its coefficients
        without the step's operands; None for other steps, and before `at_columns`.

        A cast to float32 gives an affine tile, with `exact`; a period up to PERIOD a narrow tile; all else, also a
        larger period, an int32 tile.
        """
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
            exact = thread_tiles.affine_tile(first, along, self.shape, self.interpret)
            return TileValue(
                TILE, row.astype(jnp.float32), offset=start.astype(jnp.float32), affine_slope=along, exact=exact
            )
        row = row + start
        if 0 < period <= thread_tiles.PERIOD:
            narrow = (self.shape[0], thread_tiles.PERIOD)
            return TileValue(NARROW, thread_tiles.affine_tile(row, per_col, narrow, self.interpret, period))
        return TileValue(TILE, thread_tiles.affine_tile(row, per_col, self.shape, self.interpret, period))

    def _affine_value(self, linear: ir.Linear, row: Value, col: Value) -> Value:
        """The affine integer `linear` at one entry, an int32 scalar.

        row, col   the positions (of query and key, or of key and query, by `row_axis`) of a row and a column of the
                   tile; not their numbers, which differ from the positions with an origin

        The values of b, h and of the uniform terms of `linear` must be in `env`.
        """
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
        """For each index of a load: (change from row to row, change from column to column), None for an index that is the same on the tile.

        None instead of the tuple where some index is no affine integer or needs a scalar that is not computed, or where indices must be
        clamped because tiles extend past the end of the attention matrix (`overhangs`); the load is then a gather.
        """
        if self.overhangs:
            return None
        steps: list[tuple[int, int] | None] = []
        for atom in load.index:
            if not ir.axes_of(atom) - ir.UNIFORM:
                steps.append(None)
                continue
            linear = typing.cast(ir.Val, atom).linear
            if linear is None or any(i not in self.env for i, _ in linear.uniform):
                return None
            steps.append((linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q))
        return tuple(steps)

    def _load(self, load: ir.Load) -> TileValue:
        """What a load reads on the current tile, as float32, int32, uint32 or bool (tile_ops.py, `inner_dtype`); its kind
        is that of the axes of its indices together.

        A scalar is one read. A vector or tile whose indices are affine integers or scalars is read by `memory.load_affine`, without the
        values of those affine integers; any other by `_gather`, from the values of its indices. Indices are in bounds, except where tiles
        extend past the end of the attention matrix (`overhangs`): there every vector or tile is a gather, which clamps its indices.
        """
        ref, dtype = self.refs[load.capture], load.out.dtype
        kind = self._kind(frozenset().union(*(ir.axes_of(a) for a in load.index)))
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
                even = self.even_columns and self.origin is None and self.used_rows is None
                pairs = kind == TILE and even and reads_pairs(load, self.row_axis, ref.shape[-1])
                value = memory.load_affine(ref, index, steps, kind, size, self.interpret, self.used_rows, pairs)
            else:
                value = self._gather(load, kind, size)
        if dtype == "bool":
            value = value != np.zeros((), value.dtype)
        return TileValue(kind, value)

    def _gather(self, load: ir.Load, kind: str, size: tuple[int, ...]) -> jax.Array:
        """The load by `memory.gather`, for indices that are no affine integers or must be clamped to the array.

        kind   ROW, COLUMN or TILE, of the axes of the indices together
        size   shape of the result

        Indices that differ between elements are clamped only with `overhangs`; scalars never.
        """
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
        return memory.gather(ref, tuple(index), varies, kind, size, self.interpret)


def reads_pairs(load: ir.Load, row_axis: str, length: int) -> bool:
    """Whether columns 2 n and 2 n + 1 of every tile whose first column is even read neighbouring elements of the array of `load`, the first
    at an even place, so that one load instruction can read both: the last index is the number of the column plus an even number, no other
    index depends on it, and rows of the array have an even length.

    row_axis   "q" or "kv": what the rows of a tile are
    length     of the array's last dimension
    """
    atom = load.index[-1]
    last = atom.linear if isinstance(atom, ir.Val) else None
    if last is None or last.uniform or last.b or last.h or last.const % 2 or length % 2:
        return False
    column, slopes = ("kv", (0, 1)) if row_axis == "q" else ("q", (1, 0))
    others = frozenset().union(*(ir.axes_of(a) for a in load.index[:-1]))
    return (last.q, last.kv) == slopes and not others & {column, "delta"}
