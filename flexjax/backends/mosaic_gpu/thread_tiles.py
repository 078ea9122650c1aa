"""Arithmetic on a tile by what each thread holds of it, where the compiler would not find the cheap way itself.

A tile is [rows, columns] in the layout of the wgmma accumulator. A thread holds four kinds of element: of two rows, two
neighbouring columns and those that are PERIOD further, and again. So a tile that repeats after PERIOD columns ("narrow", [rows,
PERIOD]) is four numbers a thread, four lanes hold a row, and the largest or the sum of a row begins within a thread.

Lane semantics. In the simulator (`interpret`) plain arithmetic stands in.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxlib.mlir.dialects import math as mlir_math
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.memory import COLUMN, ROW, TILE, assemble, element, places_of, signed

PERIOD = 8
"""Columns after which the registers of a thread repeat; a narrow tile has as many: four numbers a thread."""
LANES_OF_A_ROW = (1, 2)
"""Distances by which the four lanes that hold a row exchange what they have."""


def _by_column(layout: typing.Any, array: typing.Any, shape: tuple[int, int]) -> dict[tuple[int, ...], list[ir.Value]]:
    """The elements of a thread by row and by column modulo PERIOD."""
    found: dict[tuple[int, ...], list[ir.Value]] = {}
    for register, item, (row, column) in places_of(layout, shape).constants:
        value = element(array.registers[register], item)
        found.setdefault((row, column % PERIOD), []).append(value)
    return found


def _folded(
    array: typing.Any, shape: tuple[int, int], join: typing.Callable[..., ir.Value]
) -> dict[tuple[int, ...], ir.Value]:
    """The elements of a thread joined by row and column modulo PERIOD, its four numbers in turn."""
    known = _by_column(TILE.to_mgpu(), array, shape)
    found = {at: values[0] for at, values in known.items()}
    for n in range(1, shape[1] // PERIOD):
        found = {at: join(value, known[at][n]) for at, value in found.items()}
    return found


def repeat_columns(narrow: jax.Array, shape: tuple[int, int], interpret: bool) -> jax.Array:
    """A narrow tile, [rows, PERIOD], over and over; costs nothing."""
    if interpret:
        return jnp.tile(narrow, (1, shape[1] // PERIOD))

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(shape, narrow.dtype, layout=TILE))
    def repeat(_: typing.Any, array: typing.Any) -> typing.Any:
        layout = TILE.to_mgpu()
        known = _by_column(layout, array, (shape[0], PERIOD))
        places = places_of(layout, shape).constants
        items = ((register, item, known[row, column % PERIOD][0]) for register, item, (row, column) in places)
        return assemble(layout, shape, items, signed(narrow.dtype))

    return repeat(narrow)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def affine_tile(
    row: jax.Array, step: typing.Any, shape: tuple[int, int], interpret: bool, period: int = 0
) -> jax.Array:
    """`row[r] + step * c`, int32 or float32, from a row vector; one operation with a constant an element.

    `step` is a number, or for float32 a scalar of the kernel. `period`, a power of two: int32 modulo that. The columns that
    a thread holds are 8 apart, so with a small period most of its elements are one value, computed once.
    """
    floating = jnp.issubdtype(row.dtype, jnp.floating)
    if interpret:
        whole = row[:, None] + jnp.arange(shape[1]).astype(row.dtype)[None, :] * jnp.asarray(step, row.dtype)
        return whole & np.int32(period - 1) if period else whole
    fixed = not isinstance(step, jax.Array)
    splat = plgpu.Layout.WG_SPLAT(())

    def build(_: typing.Any, vector: typing.Any, *rest: typing.Any) -> typing.Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        kind = f32 if floating else i32
        layout = TILE.to_mgpu()
        places = places_of(layout, shape)
        add, mul = (arith.addf, arith.mulf) if floating else (arith.addi, arith.muli)
        slope = mgpu.c(step, kind) if fixed else rest[0].registers.flat[0]
        lane = arith.sitofp(f32, places.lane[1]) if floating else places.lane[1]
        lane = mul(lane, slope)
        # One number for each row that the thread holds, its own columns' offset already in it.
        bases = {}
        for register, item, position in places_of(vector.layout, (shape[0],)).constants:
            value = vector.registers[register]
            if isinstance(value.type, ir.VectorType):
                value = vectors.extract(value, dynamic_position=[], static_position=[item])
            bases[position[0]] = add(value, lane)

        @functools.cache
        def repeated(row: int, offset: int) -> ir.Value:
            return arith.andi(add(bases[row], mgpu.c(offset, kind)), mgpu.c(period - 1, kind))

        def values() -> typing.Iterator[tuple[tuple[int, ...], int, ir.Value]]:
            for register, item, position in places.constants:
                if period:
                    yield register, item, repeated(position[0], step * position[1] % period)
                    continue
                if not position[1]:
                    yield register, item, bases[position[0]]
                    continue
                base = bases[position[0]]
                if fixed:
                    yield register, item, add(base, mgpu.c(step * position[1], kind))
                else:
                    yield register, item, mlir_math.fma(slope, mgpu.c(float(position[1]), kind), base)

        return assemble(layout, shape, values(), None if floating else True)

    arguments = (row,) if fixed else (row, step)
    types = (ROW,) if fixed else (ROW, splat)
    wrap = plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(shape, row.dtype, layout=TILE))
    return wrap(build)(*arguments)


def rising_columns(vector: jax.Array, step: jax.Array, interpret: bool) -> jax.Array:
    """vector[c] + step * c of a float32 column vector; `step` a scalar of the kernel. One operation a column, none for a table of
    its multiples."""
    if interpret:
        return vector + step * jnp.arange(vector.shape[0]).astype(vector.dtype)

    @plgpu.inline_mgpu(
        arg_types=(COLUMN, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(vector.shape, vector.dtype, layout=COLUMN),
    )
    def add(_: typing.Any, array: typing.Any, slope: typing.Any) -> typing.Any:
        f32 = ir.F32Type.get()
        slope = slope.registers.flat[0]
        places = places_of(array.layout, vector.shape)
        mine = arith.mulf(arith.sitofp(f32, places.lane[0]), slope)

        def items() -> typing.Iterator[tuple[tuple[int, ...], int, ir.Value]]:
            for register, item, (column,) in places.constants:
                value = arith.addf(element(array.registers[register], item), mine)
                yield register, item, mlir_math.fma(slope, mgpu.c(float(column), f32), value) if column else value

        return assemble(array.layout, vector.shape, items(), None)

    return add(vector, step)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


PREDICATES = {
    "lt": arith.CmpIPredicate.slt,
    "le": arith.CmpIPredicate.sle,
    "gt": arith.CmpIPredicate.sgt,
    "ge": arith.CmpIPredicate.sge,
    "eq": arith.CmpIPredicate.eq,
    "ne": arith.CmpIPredicate.ne,
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
"""The comparison with its sides exchanged."""


def compared_columns(step: int, name: str, row: jax.Array, shape: tuple[int, int], interpret: bool) -> jax.Array:
    """Whether `step * c` compares so with `row[r]`, int32: at each place of a tile, one comparison with a constant."""
    if interpret:
        columns = step * jnp.arange(shape[1], dtype=jnp.int32)[None, :]
        compare = {"lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge, "eq": lax.eq, "ne": lax.ne}[name]
        return compare(*jnp.broadcast_arrays(columns, row[:, None]))

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=TILE))
    def at_each(_: typing.Any, vector: typing.Any) -> typing.Any:
        i32 = ir.IntegerType.get_signless(32)
        layout = TILE.to_mgpu()
        places = places_of(layout, shape)
        mine = arith.muli(places.lane[1], mgpu.c(step, i32))
        right = {}
        for register, item, at in places_of(vector.layout, shape[:1]).constants:
            right[at[0]] = arith.subi(element(vector.registers[register], item), mine)
        items = (
            (register, item, arith.cmpi(PREDICATES[name], mgpu.c(step * column, i32), right[row]))
            for register, item, (row, column) in places.constants
        )
        return assemble(layout, shape, items, False)

    return at_each(row)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def add_periods(tile: jax.Array, step: jax.Array, interpret: bool) -> jax.Array:
    """tile + step * (c - c % PERIOD) at column c; `step` a scalar of the kernel. One operation an element, none for a table of
    its multiples."""
    if interpret:
        return tile + step * (jnp.arange(tile.shape[1]) // PERIOD * PERIOD).astype(tile.dtype)[None, :]

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE),
    )
    def add(_: typing.Any, array: typing.Any, slope: typing.Any) -> typing.Any:
        layout, f32 = TILE.to_mgpu(), ir.F32Type.get()

        def items() -> typing.Iterator[tuple[tuple[int, ...], int, ir.Value]]:
            for register, item, (_, column) in places_of(layout, tile.shape).constants:
                value = element(array.registers[register], item)
                whole = column // PERIOD * PERIOD
                if whole:
                    value = mlir_math.fma(slope.registers.flat[0], mgpu.c(float(whole), f32), value)
                yield register, item, value

        return assemble(layout, tile.shape, items(), None)

    return add(tile, step)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def largest_by_column(tile: jax.Array, interpret: bool) -> jax.Array:
    """[rows, PERIOD]: the largest of the columns that are PERIOD apart; within a thread."""
    rows, columns = tile.shape
    if interpret:
        return tile.reshape(rows, columns // PERIOD, PERIOD).max(axis=1)
    narrow = (rows, PERIOD)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(narrow, tile.dtype, layout=TILE))
    def largest(_: typing.Any, array: typing.Any) -> typing.Any:
        layout = TILE.to_mgpu()
        found = _folded(array, (rows, columns), arith.maximumf)
        items = ((register, item, found[at]) for register, item, at in places_of(layout, narrow).constants)
        return assemble(layout, narrow, items, None)

    return largest(tile)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def raised(
    largest: jax.Array,
    units: np.float32,
    offset: jax.Array | None,
    base: jax.Array,
    slack: float,
    interpret: bool,
    power: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A reference [rows] that follows the largest of each row of `largest * units + offset`, a narrow tile, where that is more
    than `slack` above `base`; 2 to the power of (`base` less the reference) times `power`; and whether any reference of this
    warp changed (int32). The lanes of a warp that hold a row meet only if so.
    """
    rows = base.shape[0]
    if interpret:
        top = largest.max(axis=1) * units + (np.float32(0) if offset is None else offset)
        top = jnp.where(top > base + np.float32(slack), top, base)
        return top, jnp.exp2((base - top) * np.float32(power)), jnp.int32(1)
    splat = plgpu.Layout.WG_SPLAT(())

    def follow(_: typing.Any, tile: typing.Any, before: typing.Any, *rest: typing.Any) -> typing.Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        mine: dict[int, ir.Value] = {}
        for (row, _), values in _by_column(TILE.to_mgpu(), tile, (rows, PERIOD)).items():
            mine[row] = arith.maximumf(mine[row], values[0]) if row in mine else values[0]
        places = places_of(before.layout, (rows,)).constants
        known = {at[0]: element(before.registers[register], item) for register, item, at in places}
        scaled = {}
        for row, value in mine.items():
            value = arith.mulf(value, mgpu.c(float(units), f32))
            scaled[row] = arith.addf(value, rest[0].registers.flat[0]) if rest else value

        def above(row: int, value: ir.Value) -> ir.Value:
            return arith.cmpf(arith.CmpFPredicate.OGT, value, arith.addf(known[row], mgpu.c(slack, f32)))

        anyone = _any_lane(functools.reduce(arith.ori, (above(row, value) for row, value in scaled.items())))
        branch = scf.IfOp(anyone, [f32] * (2 * len(known)), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            tops, shrinks = [], []
            for row, value in scaled.items():
                for distance in LANES_OF_A_ROW:
                    value = arith.maximumf(value, mgpu.utils.shfl_bfly(value, distance))
                tops.append(arith.select(above(row, value), value, known[row]))
                below = arith.subf(known[row], tops[-1])
                shrinks.append(_power_of_two(below if power == 1.0 else arith.mulf(below, mgpu.c(power, f32))))
            scf.yield_([*tops, *shrinks])
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([*(known[row] for row in scaled), *(mgpu.c(1.0, f32) for _ in scaled)])
        results = list(branch.results)
        vectors_of = []
        for part in (results[: len(scaled)], results[len(scaled) :]):
            of = dict(zip(scaled, part, strict=True))
            items = ((register, item, of[at[0]]) for register, item, at in places)
            vectors_of.append(assemble(before.layout, (rows,), items, None))
        grown = mgpu.FragmentedArray.splat(arith.extui(i32, anyone), (), is_signed=True)
        return *vectors_of, grown

    row = plgpu.ShapeDtypeStruct((rows,), base.dtype, layout=ROW)
    flag = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)
    arguments = (largest, base) if offset is None else (largest, base, offset)
    types = (TILE, ROW) if offset is None else (TILE, ROW, splat)
    return plgpu.inline_mgpu(arg_types=types, return_type=(row, row, flag))(follow)(*arguments)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def sums_of_thread(tile: jax.Array, interpret: bool) -> jax.Array:
    """[rows]: the sum of what a thread holds of each row, so that its lanes differ; `join_lanes` makes it that of the row."""
    if interpret:
        return tile.sum(axis=1)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(tile.shape[:1], tile.dtype, layout=ROW))
    def sums(_: typing.Any, array: typing.Any) -> typing.Any:
        layout = ROW.to_mgpu()
        found: dict[int, ir.Value] = {}
        for (row, _column), value in _folded(array, (tile.shape[0], tile.shape[1]), arith.addf).items():
            found[row] = arith.addf(found[row], value) if row in found else value
        places = places_of(layout, tile.shape[:1]).constants
        return assemble(layout, tile.shape[:1], ((register, item, found[at[0]]) for register, item, at in places), None)

    return sums(tile)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def join_lanes(row: jax.Array, interpret: bool) -> jax.Array:
    """The sum over the lanes that hold a row, of what `sums_of_thread` gave each."""
    if interpret:
        return row

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=ROW))
    def join(_: typing.Any, vector: typing.Any) -> typing.Any:
        def items() -> typing.Iterator[tuple[tuple[int, ...], int, ir.Value]]:
            for register, item, _ in places_of(vector.layout, row.shape).constants:
                value = element(vector.registers[register], item)
                for distance in LANES_OF_A_ROW:
                    value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
                yield register, item, value

        return assemble(vector.layout, row.shape, items(), None)

    return join(row)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def scale_rows(tile: jax.Array, factor: jax.Array, wanted: jax.Array, interpret: bool) -> jax.Array:
    """tile * factor[:, None], skipped by every warp where `wanted` (int32, the same in all its lanes) is 0."""
    if interpret:
        return tile * factor[:, None]

    @plgpu.inline_mgpu(
        arg_types=(TILE, ROW, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE),
    )
    def scale(_: typing.Any, values: typing.Any, factors: typing.Any, flag: typing.Any) -> typing.Any:
        anyone = arith.trunci(ir.IntegerType.get_signless(1), flag.registers.flat[0])
        before = list(values.registers.flat)
        branch = scf.IfOp(anyone, [v.type for v in before], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            inside = values * factors.broadcast_in_dim(values.shape, (0,), values.layout)
            scf.yield_(list(inside.registers.flat))
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(before)
        registers = np.array(list(branch.results), dtype=object).reshape(values.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return scale(tile, factor, wanted)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def _any_lane(mine: ir.Value) -> ir.Value:
    """Whether it holds in any lane of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    voted = llvm.inline_asm(
        i32,
        [arith.extui(i32, mine)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )
    return arith.trunci(ir.IntegerType.get_signless(1), typing.cast(ir.Value, voted))


def _power_of_two(x: ir.Value) -> ir.Value:
    f32 = ir.F32Type.get()
    return typing.cast(ir.Value, llvm.inline_asm(f32, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))
