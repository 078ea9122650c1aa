"""Evaluates a traced program (ir/program.py) on tiles of scores inside a Mosaic GPU kernel.

Each value is computed at its own rank and broadcast only where ranks meet: what depends on b and h is a scalar, on the axis of the
tile's rows a row vector, on the other axis a column vector, the rest a tile. Ranks are computed at different places of a kernel:

    program = TileProgram(plan.score, refs, (64, 128), batch=b, head=h)       # scalars, once for each head
    program = program.at_rows(q_start)                                        # row vectors, once for each row of tiles
    scores, = program.at_cols(kv_start, scores)                               # column vectors and tiles, once for each tile

`refs` are the captured arrays passed through `memory.kernel_operand`. `row_axis` is "q" where rows are queries (forward, dQ) and "kv"
where rows are keys (the transposed scores of dK and dV). Values have the dtypes of tile_ops.py and the layouts of registers.py.

program_support.py says which programs run here, tile_ops.py computes one operation, tile_values.py holds deferred operations.
The file is longer than others because the methods of its one class work on the same table of values.
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
from flexjax.backends.mosaic_gpu.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.tile_ops import (
    apply,
    inner_dtype,
)
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
from flexjax.ir.origin import OriginLayout
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan

MAX_EXACT = 1 << 24
"""Integers up to this size are exact in float32."""


@dataclasses.dataclass(frozen=True)
class TileOrigin:
    """Where the rows of query and key lie in the whole problem (ir/origin.py), inside a kernel.

    query, key   [rows, runs] int32 in global memory: the positions at which runs begin
    """

    layout: OriginLayout
    query: Ref
    key: Ref

    @classmethod
    def of(cls, plan: KernelPlan, refs: Sequence[Ref]) -> "TileOrigin | None":
        """The origin of the plan with its two tables, None without one."""
        return None if plan.origin is None else cls(plan.origin, *refs)

    def offset(self, axis: str, batch: jax.typing.ArrayLike, start: jax.typing.ArrayLike | None) -> Value:
        """What to add to the numbers of the rows of a tile to get positions.

        axis    "q" or "kv"
        start   number of the first row of the tile; None where the axis has one run, for any tile
        """
        table, run = (
            (self.query, self.layout.query_run) if axis == "q" else (self.key, self.layout.key_run)
        )
        entry = batch if self.layout.rows > 1 else 0
        if start is None:
            return table[entry, 0]
        # a tile that lies past the end counts on from the last run
        number = jnp.minimum(lax.div(jnp.asarray(start, jnp.int32), np.int32(run)), np.int32(table.shape[1] - 1))
        return table[entry, number] - number * np.int32(run)

    def runs(self, axis: str) -> int:
        return self.layout.query_runs if axis == "q" else self.layout.key_runs


class TileProgram:
    """A program and the values of its steps that are computed so far; methods return a new one. See the top of this file.

    program         the traced program
    refs            its captured arrays
    shape           (rows, columns) of a tile
    batch, head     batch entry and query head
    row_axis        "q" or "kv": what the rows are
    edge            (rows, columns) of the attention matrix where a tile may extend past its end: loads then clamp their indices;
                    None where no tile does
    results         numbers of the results to compute; None: all
    origin          where rows and columns lie in the whole problem, whose positions the program reads; None: they count from 0
    """

    def __init__(
        self,
        program: ir.Program,
        refs: Sequence[Ref],
        shape: tuple[int, int],
        *,
        batch: jax.typing.ArrayLike,
        head: jax.typing.ArrayLike,
        row_axis: str = "q",
        edge: tuple[int, int] | None = None,
        results: tuple[int, ...] | None = None,
        interpret: bool = False,
        origin: TileOrigin | None = None,
    ) -> None:
        self.program, self.refs, self.shape = program, refs, shape
        self.row_axis, self.edge, self.interpret = row_axis, edge, interpret
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
        self._run(SCALAR)

    # ------------------------------------------------------------- stages

    def at_rows(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its row vectors computed, for the rows from `start`."""
        new = self._copy()
        new.row_start = self._position(self.row_axis, start)
        row = ir.Q if self.row_axis == "q" else ir.KV
        if row in new.live:
            new.env[row] = TileValue(ROW, registers.row_iota(self.shape[0]) + new.row_start)
        new._run(ROW)
        return new

    def columns(self, start: jax.typing.ArrayLike) -> "TileProgram":
        """The program with its column vectors computed, for the columns from `start`.

        A kernel calls this before it waits for the scores, so that `tile` finds the loads done.
        """
        new = self._copy()
        new.col_start = self._position("kv" if self.row_axis == "q" else "q", start)
        column = ir.KV if self.row_axis == "q" else ir.Q
        if column in new.live:
            new.env[column] = TileValue(COLUMN, registers.columns_from(new.col_start, self.shape[1], self.interpret))
        new._run(COLUMN)
        return new

    def _position(self, axis: str, start: jax.typing.ArrayLike) -> Value:
        """The position of the row of query ("q") or key ("kv") with the number `start`, at which a tile begins."""
        first = jnp.asarray(start, jnp.int32)
        if self.origin is None:
            return first
        offset = self.offsets[axis] if axis in self.offsets else self.origin.offset(axis, self.batch, first)
        return first + offset

    def scalars(self, atoms: Sequence[ir.Atom]) -> tuple[Value, ...]:
        """Values that depend on batch entry and head alone."""
        return tuple(self._read(a).value for a in atoms)

    def with_loaded_tile(self, load: ir.Load, tile: jax.Array) -> "TileProgram":
        """The program with the values of one load on this tile given, [rows, columns]; the load is then not computed."""
        new = self._copy()
        new.env[load.out.id] = TileValue(TILE, tile)
        return new

    def tile(self, score: jax.Array | None = None, factor: float = 1.0) -> tuple[jax.Array, ...]:
        """The results on the tile that `at_rows` and `columns` chose, each as a whole tile, where the program's score is factor * score."""
        return tuple(self._as_tile(s) for s in self._results(score, factor))

    def scaled_tile(self, score: jax.Array | None, factor: float, along: bool = False) -> Scaled:
        """Like `tile`, with the first result in the parts of `Scaled`.

        along   whether the caller can take the part `along`; otherwise it is added to the tile
        """
        slot, *others = self._results(score, factor)
        rest = tuple(map(self._as_tile, others))
        if slot.row is not None and not (along and slot.factor > 0 and slot.by is None):
            slot = TileValue(TILE, self._without_row(slot), row=slot.row, at=slot.at)
        if slot.kind == TILE and slot.step is None and slot.factor > 0:
            rises = None if slot.along is None else jnp.asarray(slot.along, jnp.float32)
            return Scaled(slot.value, slot.factor, slot.by, slot.row, slot.at, rises, rest)
        return Scaled(self._as_tile(slot), 1.0, None, None, None, None, rest)

    def row_part(self) -> jax.Array | None:
        """`Scaled.row`, which is the same for every tile of the row; the compiler removes everything else that is computed here."""
        score = self._stretch(TileValue(SCALAR, jnp.float32(0)), TILE)
        return self.columns(np.int32(0)).scaled_tile(score, 1.0).row

    def at_cols(self, start: jax.typing.ArrayLike, score: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """`columns` and `tile` in one."""
        return self.columns(start).tile(score)

    def _results(self, score: jax.Array | None, factor: float = 1.0) -> list[TileValue]:
        new = self._copy()
        if score is not None:
            new.env[ir.SCORE] = TileValue(TILE, score, factor)
        new._run(TILE)
        return [new._read(atom) for atom in self.wanted]

    def pin(self) -> "TileProgram":
        """The program whose column vectors are computed at this point: the compiler may not move their loads down to the first use.

        Affine integers are left out, because they are cheaper to compute where they are used.
        """
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
            new.env[i] = TileValue(COLUMN, value)
        return new

    def _copy(self) -> "TileProgram":
        """A copy with a table of values of its own."""
        new = object.__new__(TileProgram)
        new.__dict__.update(self.__dict__)
        new.env = dict(self.env)
        return new

    # ------------------------------------------------------------- evaluation

    def _kind(self, axes: ir.Axes) -> str:
        """The kind (tile_values.py) of a value that depends on these axes."""
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
                self.env[out.id] = self._affine(step) or self._operate(step)
            else:
                raise NotImplementedError(f"`{step.name}` has no form on a tile.")

    def _needed(self) -> set[int]:
        """Ids of the values still to compute for the results, without operands of steps that `_affine` and affine loads compute directly."""
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

    def _read(self, atom: ir.Atom) -> TileValue:
        """The value of an atom that is a literal or computed already."""
        if isinstance(atom, ir.Val):
            return self.env[atom.id]
        return TileValue(SCALAR, np.asarray(atom.value, inner_dtype(atom.dtype))[()])

    def _stretch(self, slot: TileValue, kind: str) -> Value:
        """The value broadcast to `kind`, with deferred factors computed; `exact` where the value has deferred terms."""
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

    def _without_row(self, slot: TileValue) -> jax.Array:
        """The tile value * factor + along * c, without the terms `row` and `at`."""
        alone = self._stretch(dataclasses.replace(slot, row=None, at=None, along=None, exact=None), TILE)
        if slot.along is None:
            return alone
        return alone + registers.stretch(
            registers.column_iota(self.shape[1], jnp.float32) * slot.along, COLUMN, self.shape
        )

    def _as_tile(self, slot: TileValue) -> jax.Array:
        """The value as a whole tile, with deferred operations computed."""
        return self._stretch(slot, TILE)

    def _compare_columns(self, step: ir.Op) -> TileValue | None:
        """A comparison of an affine integer with one that is the same along the row, by `thread_tiles.compare_columns`, which holds no
        column numbers in registers. None where the step is no such comparison or a difference might overflow."""
        if step.prim not in thread_tiles.PREDICATES or self._kind(step.out.axes) != TILE or self.col_start is None:
            return None
        for walking, other in (step.inputs, step.inputs[::-1]):
            if (
                not isinstance(walking, ir.Val)
                or walking.linear is None
                or not difference_fits(walking)
                or not difference_fits(other)
            ):
                continue
            linear, kind = walking.linear, self._kind(ir.axes_of(other))
            per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
            if not per_col or kind not in (SCALAR, ROW) or any(i not in self.env for i, _ in linear.uniform):
                continue
            row_start = np.int32(0) if self.row_start is None else self.row_start
            base = self._affine_value(linear, row_start, self.col_start)
            row = self._stretch(self._read(other), ROW) - base
            if per_row:
                row = row - registers.row_iota(self.shape[0]) * np.int32(per_row)
            name = step.prim if walking is step.inputs[0] else thread_tiles.MIRRORED[step.prim]
            return TileValue(TILE, thread_tiles.compare_columns(per_col, name, row, self.shape, self.interpret))
        return None

    def _operate(self, step: ir.Op) -> TileValue:
        """The result of one operation, deferred or as `tile_ops.apply` computes it at the rank of its operands."""
        compared = self._compare_columns(step)
        if compared is not None:
            return compared
        slots = [self._read(a) for a in step.inputs]
        waiting = self._defer(step, slots)
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
        return TileValue(kind, apply(step, args, self.edge is not None))

    def _defer(self, step: ir.Op, slots: list[TileValue]) -> TileValue | None:
        """The result of a float operation as a TileValue with deferred operations; None where the operation must be computed."""
        name = step.prim
        if any(s.row is not None for s in slots):
            return None
        if step.out.dtype != "float32" or name not in ("mul", "div", "neg", "add", "sub"):
            return None
        if name == "neg":
            (a,) = slots
            if a.step is not None:
                return TileValue(TILE, -a.value, at=-a.at, step=-a.step)
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
                if a.factor * b.factor == 1.0 or not safe_to_defer(a.factor * b.factor):
                    return None
                other = dataclasses.replace(b, factor=1.0)
                return dataclasses.replace(a, value=a.value * self._as_tile(other), factor=a.factor * b.factor)
            if a.kind != TILE or b.kind != SCALAR:
                return None
            if a.step is not None and name == "mul":
                return TileValue(TILE, a.value * b.value, at=a.at * b.value, step=a.step * b.value)
            if not isinstance(number, ir.Lit) or a.step is not None:
                return None
            factor = float(number.value.real)
            if not safe_to_defer(factor):
                return None
            factor = a.factor * factor if name == "mul" else a.factor / factor
            return dataclasses.replace(a, factor=factor) if safe_to_defer(factor) else None
        return deferred_sum(a, b, -1 if name == "sub" else 1)

    def _positive(self, atom: ir.Atom, factor: float) -> bool:
        """Whether the atom is positive for all (q, kv), and it and its product with `factor` are safe to defer."""
        low, high = bounds(with_results(self.program, (atom,)))[0]
        return (
            low > 0
            and safe_to_defer(low)
            and safe_to_defer(high)
            and safe_to_defer(low * factor)
            and safe_to_defer(high * factor)
        )

    # ------------------------------------------------------------- integers that walk affinely

    def _affine_source(self, step: ir.Op) -> tuple[ir.Val, int] | None:
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

    def _affine(self, step: ir.Op) -> TileValue | None:
        """The result of a step that equals an affine integer (`_affine_source`), from its coefficients without its operands; None
        for every other step. A period up to PERIOD gives a narrow tile, a cast to float32 an affine tile.
        """
        found = self._affine_source(step)
        if found is None or self.col_start is None:
            return None
        source, period = found
        linear = typing.cast(ir.Linear, source.linear)
        per_row, per_col = (linear.q, linear.kv) if self.row_axis == "q" else (linear.kv, linear.q)
        start = self._affine_value(linear, self.row_start, self.col_start)
        row = registers.row_iota(self.shape[0]) * np.int32(per_row)
        if step.out.dtype == "float32":
            first, along = (row + start).astype(jnp.float32), np.float32(per_col)
            exact = thread_tiles.affine_tile(first, along, self.shape, self.interpret)
            return TileValue(TILE, row.astype(jnp.float32), at=start.astype(jnp.float32), step=along, exact=exact)
        row = row + start
        if 0 < period <= thread_tiles.PERIOD:
            narrow = (self.shape[0], thread_tiles.PERIOD)
            return TileValue(NARROW, thread_tiles.affine_tile(row, per_col, narrow, self.interpret, period))
        return TileValue(TILE, thread_tiles.affine_tile(row, per_col, self.shape, self.interpret, period))

    def _affine_value(self, linear: ir.Linear, row: Value, col: Value) -> Value:
        """The affine integer at the tile's row number `row` and column number `col` of the attention matrix, int32."""
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

    def _load(self, load: ir.Load) -> TileValue:
        """What a load reads for the current tile, at the rank of its indices."""
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
                    else self._affine_value(typing.cast(ir.Linear, typing.cast(ir.Val, a).linear), row, col)
                    for a, s in zip(load.index, steps, strict=True)
                )
                value = memory.load_affine(ref, index, steps, kind, size, self.interpret)
            else:
                value = self._gather(load, kind, size)
        if dtype == "bool":
            value = value != np.zeros((), value.dtype)
        return TileValue(kind, value)

    def _gather(self, load: ir.Load, kind: str, size: tuple[int, ...]) -> jax.Array:
        """The load by `memory.gather`, for indices that are no affine integers or must be clamped."""
        ref = self.refs[load.capture]
        slots = [self._read(a) for a in load.index]
        moving = tuple(s.kind != SCALAR for s in slots)
        index = []
        for slot, n in zip(slots, ref.shape, strict=True):
            value = slot.value
            if slot.kind != SCALAR:
                if self.edge is not None:
                    value = jnp.minimum(jnp.maximum(value.astype(jnp.int32), np.int32(0)), np.int32(n - 1))
                value = self._stretch(TileValue(slot.kind, value), kind)
            index.append(value)
        return memory.gather(ref, tuple(index), moving, kind, size, self.interpret)
