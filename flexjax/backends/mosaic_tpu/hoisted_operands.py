"""Passes hoisted values to a kernel: arrays, block specs, and reads of them on a strip of a tile.

A kernel runs several programs (score or its derivative, mask, dropout); `HoistedOperands` holds the operands of all of
them, and hoisted.py computes their values:

    scalars      two SMEM tables by scalar prefetch, float32 and int32, [n, batch * heads]
    rows         [batch or 1, heads or 1, 1, length], blocks along the lanes
    diagonals    [batch or 1, heads or 1, 8, length], skewed windows at 128-aligned starts (diagonals.py)
    tiles        [batch or 1, heads or 1, q_len, kv_len] blocks; a captured array itself as [planes, rows, columns]
    tables       [1, n] whole, for gathers
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu import diagonals, hoisted, split_program
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.split_program import HoistedValue, SplitProgram
from flexjax.backends.mosaic_tpu.tile_programs import Strip, StripView
from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.ir.origin import NOWHERE, Starts
from flexjax.ir.program import Load

ZERO = np.int32(0)

TileAt = Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]
"""(grid indices and prefetched references of an index map) -> batch entry, query head, query tile, key tile."""

Key = tuple[int, int]  # (number of a program in the kernel, id of a value in that program)


@dataclasses.dataclass
class Operand:
    """One array of a kernel with its block spec."""

    array: jax.Array
    spec: pl.BlockSpec


class ScalarTables:
    """Numbers of each batch entry and head as two tables [n, batch * heads], float32 and int32."""

    def __init__(self, geometry: TileGeometry):
        self.shape = (geometry.batch, geometry.heads, 1, 1)
        self._rows: tuple[list[jax.Array], list[jax.Array]] = ([], [])

    def add(self, values: jax.Array, dtype: str) -> tuple[int, int]:
        """Adds a row for a value that broadcasts to [batch, heads, 1, 1]; returns (which table, which row)."""
        table = 0 if dtype == "float32" else 1
        flat = jnp.broadcast_to(values, self.shape).reshape(self.shape[0] * self.shape[1])
        self._rows[table].append(_as_operand_dtype(flat, dtype))
        return table, len(self._rows[table]) - 1

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        # a table without rows is [1, 1]
        floats, ints = self._rows
        return (
            jnp.stack(floats) if floats else jnp.zeros((1, 1), jnp.float32),
            jnp.stack(ints) if ints else jnp.zeros((1, 1), jnp.int32),
        )


class KernelPosition(typing.NamedTuple):
    """Which tile a grid step computes (traced scalars)."""

    b: jax.Array
    h: jax.Array
    q_tile: jax.Array
    kv_tile: jax.Array


class HoistedOperands:
    """The hoisted operands of all programs of one kernel; a program's number is its place in `programs`."""

    def __init__(
        self,
        geometry: TileGeometry,
        programs: Sequence[tuple[SplitProgram, Sequence[jax.Array]]],
        tile_at: TileAt,
        scalars_from_end: int,
        starts: Starts | None = None,
    ):
        """Evaluates the hoisted values of all programs and lays them out as operands.

        scalars_from_end   how many prefetched references there are from the first scalar table on, that one included
        starts             the tables of an origin
        """
        self.geometry = geometry
        self.tile_at = tile_at  # from a grid step to its tile, for index maps
        self._placed = (geometry.origin, starts)
        self.operands: list[Operand] = []  # arrays in VMEM
        self._scalars_from_end = scalars_from_end
        self._operand_of: dict[Key, int] = {}
        self._scalar_of: dict[Key, tuple[int, int]] = {}
        tables = ScalarTables(geometry)
        for number, (split, captures) in enumerate(programs):
            values = self._evaluate(split, captures)
            for value in split.hoisted:
                key = (number, value.val.id)
                if value.axis_class == split_program.UNIFORM:
                    self._scalar_of[key] = tables.add(values[value.val.id], value.dtype)
                elif value.direct_load is not None:
                    self._add(key, self._captured_blocks(split, value.direct_load, captures, tables))
                else:
                    self._add(key, self._operand(value, _as_operand_dtype(values[value.val.id], value.dtype)))
            for load in split.gathers:
                self._add((number, load.out.id), _gather_table(captures[load.capture]))
        self._first_offset = {axis: self._add_offsets(tables, axis) for axis in ("q", "kv")}
        self.scalar_tables = tables.arrays  # the launch prefetches them

    def _add_offsets(self, tables: ScalarTables, axis: str) -> int:
        """Adds an int32 row for each run: position minus row number; returns the first row."""
        layout, starts = self._placed
        if layout is None or starts is None:
            return 0
        table, run = (starts.query, layout.query_run) if axis == "q" else (starts.key, layout.key_run)
        runs = range(table.shape[1])
        rows = [tables.add((table[:, n] - n * run).reshape(-1, 1, 1, 1), "int32")[1] for n in runs]
        return rows[0]

    def _offset(self, scalars: Sequence[jax.Ref], axis: str, row: jax.Array, head: jax.Array) -> jax.Array:
        """In a kernel: position minus row number in the run that contains `row`; `head` is b * heads + h."""
        layout = self._placed[0]
        assert layout is not None
        run, runs = (layout.query_run, layout.query_runs) if axis == "q" else (layout.key_run, layout.key_runs)
        number = np.int32(self._first_offset[axis])
        if runs > 1:
            number = number + jnp.minimum(lax.div(row, np.int32(run)), np.int32(runs - 1))
        return scalars[1][number, head]

    def _add(self, key: Key, operand: Operand) -> None:
        self._operand_of[key] = len(self.operands)
        self.operands.append(operand)

    def _evaluate(self, split: SplitProgram, captures: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """The hoisted values of one program, evaluated by JAX outside of the kernel: id of the value -> its array.

        An array is [b, h, q, kv] with size 1 along the axes that the value does not depend on, or that of
        `hoisted.diagonal_grid`. Values with a `direct_load` are left out, because the kernel reads the arrays.
        """
        g = self.geometry
        found: dict[int, jax.Array] = {}
        whole = hoisted.whole_grid(g.batch, g.heads, g.q_len, g.kv_len, self._placed)
        along_diagonals = hoisted.diagonal_grid(g.batch, g.heads, g.q_len, g.kv_len, self._placed)
        for grid, classes in ((whole, ("uniform", "q", "kv", "tile")), (along_diagonals, ("delta",))):
            values = [v for v in split.hoisted_of(*classes) if v.direct_load is None]
            arrays = hoisted.evaluate(split.program, captures, grid, [v.val for v in values]) if values else []
            found |= {v.val.id: a for v, a in zip(values, arrays, strict=True)}
        return found

    # ------------------------------------------------------------------ operands

    def _operand(self, value: HoistedValue, values: jax.Array) -> Operand:
        """The operand of a value of axis class q, kv, delta or tile from what XLA evaluated."""
        g = self.geometry
        batch, heads = value.leading_sizes(g.batch, g.heads)

        def leading(b: jax.Array, h: jax.Array) -> tuple[jax.Array | np.int32, jax.Array | np.int32]:
            return (b if batch > 1 else ZERO, h if heads > 1 else ZERO)

        if value.axis_class in (split_program.ROW, split_program.COLUMN):
            along_q = value.axis_class == split_program.ROW
            length, block = (g.q_len, g.block_q) if along_q else (g.kv_len, g.block_kv)
            values = jnp.broadcast_to(values.reshape(*values.shape[:2], 1, -1), (batch, heads, 1, length))

            def at_row(*grid: jax.Array) -> tuple:
                b, h, i, j = self.tile_at(*grid)
                return (*leading(b, h), ZERO, i if along_q else j)

            return Operand(values, pl.BlockSpec((None, None, 1, block), at_row))
        if value.axis_class == split_program.DELTA:
            values = jnp.broadcast_to(values[..., 0], (batch, heads, g.q_len + g.kv_len - 1))
            values = diagonals.skewed(g.pad_diagonals(values))

            def at_window(*grid: jax.Array) -> tuple:
                b, h, i, j = self.tile_at(*grid)
                return (*leading(b, h), ZERO, g.window_start(i, j))

            return Operand(values, pl.BlockSpec((None, None, pl.Element(8), pl.Element(g.window)), at_window))
        values = jnp.broadcast_to(values, (batch, heads, g.q_len, g.kv_len))

        def at_tile(*grid: jax.Array) -> tuple:
            b, h, i, j = self.tile_at(*grid)
            return (*leading(b, h), i, j)

        return Operand(values, pl.BlockSpec((None, None, g.block_q, g.block_kv), at_tile))

    def _captured_blocks(
        self, split: SplitProgram, load: Load, captures: Sequence[jax.Array], tables: ScalarTables
    ) -> Operand:
        """The operand of a load that gets blocks of its captured array itself, as [planes, rows, columns].

        The plane of each (b, h), computed from the load's other indices, is a row of the scalar tables, where the index
        map reads it.
        """
        g = self.geometry
        array = captures[load.capture]
        shape = array.shape[:-2]
        grid = hoisted.whole_grid(g.batch, g.heads, 1, 1, NOWHERE)
        plane = jnp.zeros((1, 1, 1, 1), jnp.int32)
        if shape:
            indices = hoisted.evaluate(split.program, captures, grid, load.index[:-2])
            for size, index in zip(shape, indices, strict=True):
                plane = plane * np.int32(size) + index.astype(jnp.int32)
        _, row = tables.add(plane, "int32")
        one_plane = math.prod(shape) == 1

        def at_plane(*grid_and_tables: jax.Array) -> tuple:
            b, h, i, j = self.tile_at(*grid_and_tables)
            ints = grid_and_tables[-self._scalars_from_end + 1]
            return (ZERO if one_plane else ints[row, b * np.int32(g.heads) + h], i, j)

        # a block that is no whole number of vectors has to be all of the array's dimension
        rows = g.q_len if g.block_q % 8 else array.shape[-2]
        columns = g.kv_len if g.block_kv % LANES else array.shape[-1]
        flat = array[..., :rows, :columns].reshape(-1, rows, columns)
        return Operand(flat, pl.BlockSpec((None, g.block_q, g.block_kv), at_plane))

    # ------------------------------------------------------------------ inside the kernel

    def view(
        self, number: int, scalars: Sequence[jax.Ref], refs: Sequence[jax.Ref], at: KernelPosition, strip: Strip
    ) -> StripView:
        """In a kernel: where a strip lies, and functions that read the operands of program `number` on it."""
        g = self.geometry
        b, h = at.b, at.h
        q0, k0 = at.q_tile * np.int32(g.block_q), at.kv_tile * np.int32(g.block_kv)
        q_off, kv_off = (0, strip.col0) if g.q_axis == 0 else (strip.col0, 0)
        q_size, kv_size = (strip.rows, strip.cols) if g.q_axis == 0 else (strip.cols, strip.rows)

        def read(value: HoistedValue) -> jax.Array:
            """A hoisted value on the strip, in a shape that broadcasts to (rows, cols)."""
            key = (number, value.val.id)
            if value.axis_class == split_program.UNIFORM:
                which, row = self._scalar_of[key]
                return scalars[which][row, b * np.int32(g.heads) + h]
            ref = refs[self._operand_of[key]]
            if value.axis_class == split_program.ROW:
                line = ref[:, q_off : q_off + q_size]
                return line if g.q_axis == 1 else _to_sublanes(line)
            if value.axis_class == split_program.COLUMN:
                line = ref[:, kv_off : kv_off + kv_size]
                return line if g.q_axis == 0 else _to_sublanes(line)
            if value.axis_class == split_program.DELTA:
                return diagonals.toeplitz(ref[...], strip.rows, strip.cols, g.tile_rows + strip.col0)
            block = ref[q_off : q_off + q_size, kv_off : kv_off + kv_size]
            return block if g.q_axis == 0 else _transposed(block)

        def table(load: Load) -> jax.Array:
            return refs[self._operand_of[(number, load.out.id)]][...]

        q_row, kv_row = q0 + np.int32(q_off), k0 + np.int32(kv_off)
        q_start, kv_start = q_row, kv_row
        if g.origin is not None:
            head = b * np.int32(g.heads) + h
            q_start = q_row + self._offset(scalars, "q", q0, head)
            kv_start = kv_row + self._offset(scalars, "kv", k0, head)
        return StripView(g.q_axis, q_start, kv_start, q_row, kv_row, b, h, strip.rows, strip.cols, read, table)


def _to_sublanes(line: jax.Array) -> jax.Array:
    """From (1, n) along the lanes to (n, 1) along the sublanes."""
    return line.reshape(line.shape[1], 1)


def _transposed(block: jax.Array) -> jax.Array:
    # Mosaic transposes no bfloat16
    return block.astype(jnp.float32).T if block.dtype == jnp.bfloat16 else block.T


def _as_operand_dtype(values: jax.Array, dtype: str) -> jax.Array:
    """uint32 keeps its bits as int32."""
    if values.dtype == jnp.uint32:
        return lax.bitcast_convert_type(values, jnp.int32)
    return values.astype(dtype)


def _gather_table(array: jax.Array) -> Operand:
    """The whole captured array, flattened to (1, n) of float32 or int32 and padded with 0 to a multiple of 128."""
    flat = array.reshape(1, -1)
    flat = flat.astype("float32" if jnp.issubdtype(array.dtype, jnp.floating) else "int32")
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % LANES)))
    return Operand(flat, pl.BlockSpec(flat.shape, lambda *_: (ZERO, ZERO)))
