"""Evaluates a traced program (trace.mod_ir) on a tile of scores inside a Mosaic GPU kernel.

Kernels run with **Lane** semantics; a tile is a float32 [rows, cols] array in the layout of the wgmma accumulator, rows a
multiple of 64, cols of 8. `row_axis` says which way it lies: "q" (rows are queries: forward, dq) or "kv" (rows are keys,
columns queries: the transposed scores of a dk/dv kernel).

Longer than other files: one class, whose methods all work on the same slots.

Each value is computed at its own rank and stretched only where ranks meet: what depends on b and h is a scalar, on the
axis of the rows a row vector, on the other a column vector, the rest a tile. Use:

    program = TileProgram(plan.score, refs, (64, 128), batch=b, head=h)       # scalars, once
    program = program.at_rows(q_start)                                        # row vectors, once a row of tiles
    scores, = program.at_cols(kv_start, scores)                               # column vectors and tiles, once a tile

`refs` are the captured arrays passed through `memory.kernel_operand`. `edge=(rows, cols)` gives the extent of the
attention matrix along the tile's axes where a tile may hang over it: indices of loads are then clamped into their arrays.

Inside, floats are float32 (a cast to bfloat16 or float16 rounds, arithmetic on such values does not), integers int32 or
uint32 (narrower ones wrapped after arithmetic), booleans booleans.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.bounds import bounds
from flexjax.backends.mosaic_gpu import memory, registers, thread_tiles
from flexjax.backends.mosaic_gpu.integer_division import power_of_two
from flexjax.backends.mosaic_gpu.tile_ops import (
    apply,
    inner_dtype,
)
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results

SCALAR, ROW, COLUMN, TILE = "scalar", "row", "column", "tile"
NARROW = "narrow"  # a tile that repeats after PERIOD columns (thread_tiles.py), which are what is kept
Value = typing.Any  # a jax array inside the kernel, or a numpy scalar
MAX_EXACT = 1 << 24  # integers up to here are exact in float32
MAX_DIFFERENCE = 1 << 29  # differences and sums of integers up to here are int32, tiles that hang over included


def _harmless(factor: float) -> bool:
    """Whether a number may wait to be multiplied: neither it nor a product with it becomes 0 or infinite in between."""
    return 1e-30 < abs(factor) < 1e30


def _small(atom: ir.Atom) -> bool:
    """Whether it is an int32 of which differences do not overflow."""
    if isinstance(atom, ir.Lit):
        return atom.dtype == "int32" and abs(atom.value) <= MAX_DIFFERENCE
    if atom.dtype != "int32" or atom.low is None or atom.high is None:
        return False
    return max(abs(atom.low), abs(atom.high)) <= MAX_DIFFERENCE


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A value at its rank. Four forms of a float tile wait to be computed until they meet something that needs them:

    `factor` times the tile, and `by`, a narrow tile of positive numbers, times that; a tile to which the row vector `row`, `at`
    and `along` times the number of the column are still to be added; and an affine one, row vector `value` plus `at` plus
    `step` times the number of the column. `at`, `along` and `step` are numbers or scalars; `row`, and `value` of an affine
    tile, are the same on all tiles of a row.

    What is taken apart so is as good as float32 where it is added to a score. Anything else takes `exact`, the tile as the mod
    has it, or a distance of 0 times a number would no longer be 0. Nothing computes it where nothing takes it.
    """

    kind: str
    value: Value
    factor: float = 1.0
    by: Value = None
    row: Value = None
    at: Value = None
    along: Value = None
    step: Value = None
    exact: Value = None


class Scaled(typing.NamedTuple):
    """factor * by * tile + row[:, None] + at + along * columns: `factor` and the narrow tile `by` are positive; `by` may be None,
    `row` and `at` both, `along` too. `row` is the same on all tiles of a row, `at` and `along` are scalars. Columns are counted
    from the first of the tile.

    others   results of the program after the first, as tiles
    """

    tile: jax.Array
    factor: float
    by: jax.Array | None = None
    row: jax.Array | None = None
    at: jax.Array | None = None
    along: jax.Array | None = None
    others: tuple[jax.Array, ...] = ()


class TileProgram:
    """A program on its way through scalars, row vectors and tiles; see the top of the file."""

    def __init__(
        self,
        program: ir.Program,
        refs: Sequence[typing.Any],
        shape: tuple[int, int],
        *,
        batch: Value,
        head: Value,
        row_axis: str = "q",
        edge: tuple[int, int] | None = None,
        results: tuple[int, ...] | None = None,
        interpret: bool = False,
    ) -> None:
        self.program, self.refs, self.shape = program, refs, shape
        self.row_axis, self.edge, self.interpret = row_axis, edge, interpret
        self.wanted = tuple(program.results[i] for i in results) if results is not None else program.results
        self.live = ir.uses(program.steps, self.wanted)
        self.env: dict[int, _Slot] = {
            ir.B: _Slot(SCALAR, jnp.asarray(batch, jnp.int32)),
            ir.H: _Slot(SCALAR, jnp.asarray(head, jnp.int32)),
        }
        self.row_start: Value = None
        self.col_start: Value = None
        self._run(SCALAR)

    # ------------------------------------------------------------- stages

    def at_rows(self, start: Value) -> "TileProgram":
        """The program with its row vectors computed, for the rows from `start`."""
        new = self._copy()
        new.row_start = jnp.asarray(start, jnp.int32)
        row = ir.Q if self.row_axis == "q" else ir.KV
        if row in new.live:
            new.env[row] = _Slot(ROW, registers.row_iota(self.shape[0]) + new.row_start)
        new._run(ROW)
        return new

    def columns(self, start: Value) -> "TileProgram":
        """The program with its column vectors computed, for the columns from `start`: reads that `tile` need not wait for."""
        new = self._copy()
        new.col_start = jnp.asarray(start, jnp.int32)
        column = ir.KV if self.row_axis == "q" else ir.Q
        if column in new.live:
            new.env[column] = _Slot(COLUMN, registers.columns_from(new.col_start, self.shape[1], self.interpret))
        new._run(COLUMN)
        return new

    def scalars(self, atoms: Sequence[ir.Atom]) -> tuple[Value, ...]:
        """Values that depend on batch entry and head alone."""
        return tuple(self._read(a).value for a in atoms)

    def holding(self, load: ir.Load, tile: jax.Array) -> "TileProgram":
        """The program with what a load reads on this tile given from elsewhere."""
        new = self._copy()
        new.env[load.out.id] = _Slot(TILE, tile)
        return new

    def tile(self, score: Value = None, factor: float = 1.0) -> tuple[jax.Array, ...]:
        """The results on the tile at `at_rows` and `columns`, each stretched to a whole tile, of `factor * score`."""
        return tuple(self._as_tile(s) for s in self._results(score, factor))

    def scaled_tile(self, score: Value, factor: float, along: bool = False) -> Scaled:
        """The results of the program on `factor * score`, the first in parts, to be put together where that is cheapest.

        Without `along` there is no such part: it is in the tile.
        """
        slot, *others = self._results(score, factor)
        rest = tuple(map(self._as_tile, others))
        if slot.row is not None and not (along and slot.factor > 0 and slot.by is None):
            slot = _Slot(TILE, self._with_columns(slot), row=slot.row, at=slot.at)
        if slot.kind == TILE and slot.step is None and slot.factor > 0:
            rises = None if slot.along is None else jnp.asarray(slot.along, jnp.float32)
            return Scaled(slot.value, slot.factor, slot.by, slot.row, slot.at, rises, rest)
        return Scaled(self._as_tile(slot), 1.0, None, None, None, None, rest)

    def row_part(self) -> jax.Array | None:
        """`Scaled.row` of every tile. Nothing else of what is traced here is ever used."""
        score = self._stretch(_Slot(SCALAR, jnp.float32(0)), TILE)
        return self.columns(np.int32(0)).scaled_tile(score, 1.0).row

    def at_cols(self, start: Value, score: Value = None) -> tuple[jax.Array, ...]:
        """`columns` and `tile` in one."""
        return self.columns(start).tile(score)

    def _results(self, score: Value, factor: float = 1.0) -> list[_Slot]:
        new = self._copy()
        if score is not None:
            new.env[ir.SCORE] = _Slot(TILE, score, factor)
        new._run(TILE)
        return [new._read(atom) for atom in self.wanted]

    def pin(self) -> "TileProgram":
        """Fixes the reads made so far where they stand: the compiler may not sink them to their first use. Numbers that walk
        along the columns in steps are better computed where they are used."""
        walking = {o.id for step in self.program.steps for o in step.outs if o.linear is not None} | {
            ir.Q,
            ir.KV,
        }
        columns = [i for i, s in self.env.items() if s.kind == COLUMN and i not in walking]
        held = [i for i in columns if self.env[i].value.dtype != jnp.bool_]
        if not held or self.interpret:
            return self
        new = self._copy()
        for i, value in zip(held, lax.optimization_barrier(tuple(self.env[i].value for i in held)), strict=True):
            new.env[i] = _Slot(COLUMN, value)
        return new

    def _copy(self) -> "TileProgram":
        new = object.__new__(TileProgram)
        new.__dict__.update(self.__dict__)
        new.env = dict(self.env)
        return new

    # ------------------------------------------------------------- evaluation

    def _kind(self, axes: ir.Axes) -> str:
        axes = axes - ir.UNIFORM
        if not axes:
            return SCALAR
        if axes == {self.row_axis}:
            return ROW
        return COLUMN if axes in ({"q"}, {"kv"}) else TILE

    def _run(self, stage: str) -> None:
        """Computes every live step whose kind the stage allows and that is not known yet."""
        allowed = {
            SCALAR: {SCALAR},
            ROW: {SCALAR, ROW},
            COLUMN: {SCALAR, ROW, COLUMN},
            TILE: {SCALAR, ROW, COLUMN, TILE},
        }[stage]
        needed = self._needed() if stage in (COLUMN, TILE) else None
        for step in self.program.steps:
            out = step.outs[0]
            if out.id not in self.live or out.id in self.env or self._kind(out.axes) not in allowed:
                continue
            if needed is not None and out.id not in needed:
                continue
            if isinstance(step, ir.Load):
                self.env[out.id] = self._load(step)
            elif isinstance(step, ir.Op):
                self.env[out.id] = self._shortcut(step) or self._operate(step)
            else:
                raise NotImplementedError(f"`{step.name}` has no form on a tile.")

    def _needed(self) -> set[int]:
        """Ids still to compute for the results, leaving out what only feeds shortcuts."""
        needed = {a.id for a in self.wanted if isinstance(a, ir.Val)}
        for step in reversed(self.program.steps):
            if step.outs[0].id not in needed or step.outs[0].id in self.env:
                continue
            if isinstance(step, ir.Op) and self._shortcut_source(step) is not None:
                continue
            if isinstance(step, ir.Load) and self._affine_steps(step) is not None:
                continue
            needed |= {a.id for a in step.inputs if isinstance(a, ir.Val)}
        return needed

    def _read(self, atom: ir.Atom) -> _Slot:
        if isinstance(atom, ir.Val):
            return self.env[atom.id]
        return _Slot(SCALAR, np.asarray(atom.value, inner_dtype(atom.dtype))[()])

    def _stretch(self, slot: _Slot, kind: str) -> Value:
        if slot.exact is not None:
            return slot.exact
        if slot.by is not None:
            return slot.value * thread_tiles.repeat_columns(
                slot.by * np.float32(slot.factor), self.shape, self.interpret
            )
        if slot.factor != 1.0:
            return slot.value * np.float32(slot.factor)
        if slot.kind == kind:
            return slot.value
        narrow = (self.shape[0], thread_tiles.PERIOD)
        if slot.kind == SCALAR:
            size = {ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape, NARROW: narrow}[kind]
            return registers.splat(slot.value, TILE if kind == NARROW else kind, size, self.interpret)
        if slot.kind == NARROW:
            return thread_tiles.repeat_columns(slot.value, self.shape, self.interpret)
        return registers.stretch(slot.value, slot.kind, narrow if kind == NARROW else self.shape)

    def _with_columns(self, slot: _Slot) -> jax.Array:
        """The tile without its row vector."""
        alone = self._stretch(dataclasses.replace(slot, row=None, at=None, along=None, exact=None), TILE)
        if slot.along is None:
            return alone
        return alone + registers.stretch(
            registers.column_iota(self.shape[1], jnp.float32) * slot.along, COLUMN, self.shape
        )

    def _as_tile(self, slot: _Slot) -> jax.Array:
        return self._stretch(slot, TILE)

    def _compared(self, step: ir.Op) -> _Slot | None:
        """A comparison of an integer that walks along the columns with one that does not, by constants: no register holds the
        numbers of the columns. None where it is no such comparison, or one might overflow."""
        if step.prim not in thread_tiles.PREDICATES or self._kind(step.out.axes) != TILE or self.col_start is None:
            return None
        for walking, other in (step.inputs, step.inputs[::-1]):
            if not isinstance(walking, ir.Val) or walking.linear is None or not _small(walking) or not _small(other):
                continue
            linear, kind = walking.linear, self._kind(ir.axes_of(other))
            per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
            if not per_col or kind not in (SCALAR, ROW) or any(i not in self.env for i, _ in linear.uniform):
                continue
            row_start = np.int32(0) if self.row_start is None else self.row_start
            base = self._linear_at(linear, row_start, self.col_start)
            row = self._stretch(self._read(other), ROW) - base
            if per_row:
                row = row - registers.row_iota(self.shape[0]) * np.int32(per_row)
            name = step.prim if walking is step.inputs[0] else thread_tiles.MIRRORED[step.prim]
            return _Slot(TILE, thread_tiles.compare_columns(per_col, name, row, self.shape, self.interpret))
        return None

    def _operate(self, step: ir.Op) -> _Slot:
        compared = self._compared(step)
        if compared is not None:
            return compared
        slots = [self._read(a) for a in step.inputs]
        waiting = self._keep_waiting(step, slots)
        if waiting is not None and waiting.step is None and waiting.row is None:
            return waiting
        if waiting is not None:
            exact = apply(step, [self._as_tile(s) for s in slots], self.edge is not None)
            return dataclasses.replace(waiting, exact=exact)
        kinds = {s.kind for s in slots} - {SCALAR}
        if kinds == {ROW, NARROW}:
            kinds = {NARROW}
        kind = SCALAR if not kinds else kinds.pop() if len(kinds) == 1 else TILE
        args = [self._stretch(s, kind) for s in slots]
        if kind == SCALAR:
            args = [jnp.asarray(a) for a in args]
        return _Slot(kind, apply(step, args, self.edge is not None))

    def _keep_waiting(self, step: ir.Op, slots: list[_Slot]) -> _Slot | None:
        """What a factor or an affine tile becomes without computing it, None where it must be computed."""
        name = step.prim
        if any(s.row is not None for s in slots):
            return None
        if step.out.dtype != "float32" or name not in ("mul", "div", "neg", "add", "sub"):
            return None
        if name == "neg":
            (a,) = slots
            if a.step is not None:
                return _Slot(TILE, -a.value, at=-a.at, step=-a.step)
            return dataclasses.replace(a, factor=-a.factor) if a.kind == TILE else None
        a, b = slots
        if name in ("mul", "div"):
            if name == "mul" and a.kind != TILE:
                a, b, number = b, a, step.inputs[0]
            else:
                number = step.inputs[1]
            waits = name == "mul" and not isinstance(number, ir.Lit) and a.step is None and b.step is None
            if a.kind == TILE and waits:
                if b.kind == NARROW and a.by is None and self._positive(number, abs(a.factor)):
                    return dataclasses.replace(a, by=b.value)
                if a.factor * b.factor == 1.0 or not _harmless(a.factor * b.factor):
                    return None
                other = dataclasses.replace(b, factor=1.0)
                return dataclasses.replace(a, value=a.value * self._as_tile(other), factor=a.factor * b.factor)
            if a.kind != TILE or b.kind != SCALAR:
                return None
            if a.step is not None and name == "mul":
                return _Slot(TILE, a.value * b.value, at=a.at * b.value, step=a.step * b.value)
            if not isinstance(number, ir.Lit) or a.step is not None:
                return None
            factor = float(number.value.real)
            if not _harmless(factor):
                return None
            factor = a.factor * factor if name == "mul" else a.factor / factor
            return dataclasses.replace(a, factor=factor) if _harmless(factor) else None
        sign = -1 if name == "sub" else 1
        if a.step is not None and b.step is not None:
            return _Slot(TILE, a.value + sign * b.value, at=a.at + sign * b.at, step=a.step + sign * b.step)
        if a.step is not None and b.kind == SCALAR:
            return dataclasses.replace(a, at=a.at + sign * b.value)
        if a.step is not None and b.kind == ROW:
            return dataclasses.replace(a, value=a.value + sign * b.value)
        if b.step is not None and a.kind == SCALAR:
            return _Slot(TILE, sign * b.value, at=a.value + sign * b.at, step=sign * b.step)
        if b.step is not None and a.kind == ROW:
            return _Slot(TILE, a.value + sign * b.value, at=sign * b.at, step=sign * b.step)
        if a.step is not None and b.kind == TILE and sign == 1:
            a, b = b, a
        if b.step is not None and a.kind == TILE and a.step is None:
            return dataclasses.replace(a, row=sign * b.value, at=sign * b.at, along=sign * b.step)
        return None

    def _positive(self, atom: ir.Atom, factor: float) -> bool:
        """Whether the number is positive, and stays so in float32 when multiplied by the factor."""
        low, high = bounds(with_results(self.program, (atom,)))[0]
        return low > 0 and _harmless(low) and _harmless(high) and _harmless(low * factor) and _harmless(high * factor)

    # ------------------------------------------------------------- integers that walk affinely

    def _shortcut_source(self, step: ir.Op) -> tuple[ir.Val, int] | None:
        """The affine integer that a tile of this step equals (itself, or what it casts to float32), and the period after
        which it repeats, a power of two; 0 where it does not.
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

    def _shortcut(self, step: ir.Op) -> _Slot | None:
        found = self._shortcut_source(step)
        if found is None or self.col_start is None:
            return None
        source, period = found
        linear = typing.cast(ir.Linear, source.linear)
        per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
        start = self._linear_at(linear, self.row_start, self.col_start)
        row = registers.row_iota(self.shape[0]) * np.int32(per_row)
        if step.out.dtype == "float32":
            first, along = (row + start).astype(jnp.float32), np.float32(per_col)
            exact = thread_tiles.affine_tile(first, along, self.shape, self.interpret)
            return _Slot(TILE, row.astype(jnp.float32), at=start.astype(jnp.float32), step=along, exact=exact)
        row = row + start
        if 0 < period <= thread_tiles.PERIOD:
            narrow = (self.shape[0], thread_tiles.PERIOD)
            return _Slot(NARROW, thread_tiles.affine_tile(row, per_col, narrow, self.interpret, period))
        return _Slot(TILE, thread_tiles.affine_tile(row, per_col, self.shape, self.interpret, period))

    def _linear_at(self, linear: ir.Linear, row: Value, col: Value) -> Value:
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
        """(per row, per column) of each index, None for a fixed one; None where the load must gather or clamp."""
        if self.edge is not None:
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

    def _load(self, load: ir.Load) -> _Slot:
        ref, dtype = self.refs[load.capture], load.out.dtype
        kind = self._kind(frozenset().union(*(ir.axes_of(a) for a in load.index)))
        if kind == SCALAR:
            value = memory.load_scalar(ref, tuple(self._read(a).value for a in load.index))
        else:
            size = {ROW: self.shape[:1], COLUMN: self.shape[1:], TILE: self.shape}[kind]
            steps = self._affine_steps(load)
            if steps is not None:
                row = self.row_start if self.row_start is not None else np.int32(0)
                col = self.col_start if self.col_start is not None else np.int32(0)
                index = tuple(
                    self._read(a).value
                    if s is None
                    else self._linear_at(typing.cast(ir.Linear, typing.cast(ir.Val, a).linear), row, col)
                    for a, s in zip(load.index, steps, strict=True)
                )
                value = memory.load_affine(ref, index, steps, kind, size, self.interpret)
            else:
                value = self._gather(load, kind, size)
        if dtype == "bool":
            value = value != np.zeros((), value.dtype)
        return _Slot(kind, value)

    def _gather(self, load: ir.Load, kind: str, size: tuple[int, ...]) -> jax.Array:
        ref = self.refs[load.capture]
        slots = [self._read(a) for a in load.index]
        moving = tuple(s.kind != SCALAR for s in slots)
        index = []
        for slot, n in zip(slots, ref.shape, strict=True):
            value = slot.value
            if slot.kind != SCALAR:
                if self.edge is not None:
                    value = jnp.minimum(jnp.maximum(value.astype(jnp.int32), np.int32(0)), np.int32(n - 1))
                value = self._stretch(_Slot(slot.kind, value), kind)
            index.append(value)
        return memory.gather(ref, tuple(index), moving, kind, size, self.interpret)
