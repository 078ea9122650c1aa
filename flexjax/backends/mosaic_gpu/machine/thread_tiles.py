"""Arithmetic on the WGMMA fragments of a tile, where the compiler does not generate good code by itself.

A tile, [rows, columns] in the layout of a WGMMA accumulator, is spread over the threads of a warpgroup. A row belongs
to four neighbouring lanes, and a thread holds elements of two rows (8 apart) for each 64 rows. In a row it holds two
neighbouring columns, the two that are PERIOD further, and so on:

    column       0 1 2 3 4 5 6 7 | 8 9 ...
    lane of row  0 0 1 1 2 2 3 3 | 0 0 ...

So a value that depends on the column modulo PERIOD is two numbers for each row of a thread. A *narrow* tile, [rows,
PERIOD], holds such values once. Reductions over a row begin within a thread and end by exchanging between four lanes.
"""

import functools
import math
import typing
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxlib.mlir.dialects import math as mlir_math

from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu.machine import row_scales
from flexjax.backends.mosaic_gpu.machine.exponential import exp2_by_instruction
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    SCALAR_INT,
    SCALAR_LAYOUT,
    Scalar,
    inline_mgpu,
    scalar_of,
    splat_int,
)
from flexjax.backends.mosaic_gpu.machine.registers import (
    COLUMN,
    ROW,
    TILE,
    Item,
    assemble,
    element,
    is_signed,
    lowered,
    positions_of,
)
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

PERIOD = 8  # columns after which the columns that a thread holds repeat; a narrow tile has as many
LANES_OF_ROW = 4  # lanes that hold a row of a tile
MOST_POWER = 2.0**60  # the product of two such, with 1 added to each, is a normal number and so is its reciprocal
SMALL_ERROR = 2.0**-12  # of z - z^2 beside z / (1 + z), relative, for z up to
SMALL_POWER = 2.0**-6
LANE_DISTANCES = (1, 2)  # exchanging with the lanes at these XOR distances reduces over the four lanes that hold a row


def _elements_by_column(array: mgpu.FragmentedArray, shape: tuple[int, int]) -> dict[tuple[int, ...], list[ir.Value]]:
    """(row, column modulo PERIOD), as the first thread has them -> a thread's elements there, by rising column."""
    found: dict[tuple[int, ...], list[ir.Value]] = {}
    for register, item, (row, column) in positions_of(lowered(TILE), shape).constants:
        value = element(array.registers[register], item)
        found.setdefault((row, column % PERIOD), []).append(value)
    return found


def _reduced_by_column(
    array: mgpu.FragmentedArray, shape: tuple[int, int], combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> dict[tuple[int, ...], ir.Value]:
    """What a thread holds of a tile, reduced over columns modulo PERIOD: (row, column modulo PERIOD) -> result."""
    known = _elements_by_column(array, shape)
    found = {at: values[0] for at, values in known.items()}
    # Interleaved, one element of each reduction at a time, so that they overlap.
    for n in range(1, shape[1] // PERIOD):
        found = {at: combine(value, known[at][n]) for at, value in found.items()}
    return found


@device_op
def repeat_columns(narrow: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The tile whose column c is column c % PERIOD of a narrow tile; it emits no instruction."""

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(shape, narrow.dtype, layout=TILE))
    def repeat(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = lowered(TILE)
        known = _elements_by_column(array, (shape[0], PERIOD))
        positions = positions_of(layout, shape).constants
        items = ((register, item, known[row, column % PERIOD][0]) for register, item, (row, column) in positions)
        return assemble(layout, shape, items, is_signed(narrow.dtype))

    return repeat(narrow)


@device_op
def affine_tile(
    row: jax.Array, step: float | np.float32 | Scalar, shape: tuple[int, int], period: int = 0
) -> jax.Array:
    """The tile row[r] + step * c at row r and column c; int32 modulo `period`, a power of two (0: no modulo)."""
    floating = jnp.issubdtype(row.dtype, jnp.floating)
    number = None if isinstance(step, jax.Array) else typing.cast(float, step)

    def build(vector: mgpu.FragmentedArray, *rest: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        kind = f32 if floating else i32
        layout = lowered(TILE)
        positions = positions_of(layout, shape)
        add, mul = (arith.addf, arith.mulf) if floating else (arith.addi, arith.muli)
        slope = scalar_of(rest[0]) if number is None else mgpu.c(number, kind)
        lane = arith.sitofp(f32, positions.lane[1]) if floating else positions.lane[1]
        lane = mul(lane, slope)
        # For each row of the thread: row[r] plus the lane's part of step * c.
        bases = {}
        for register, item, at in positions_of(lowered(ROW), (shape[0],)).constants:
            bases[at[0]] = add(element(vector.registers[register], item), lane)
        # Columns of a thread are 8 apart, so with a small period most elements of a thread are equal.

        @functools.cache
        def repeated(row: int, offset: int) -> ir.Value:
            """bases[row] + offset, modulo the period, emitted once for each pair of arguments."""
            return arith.andi(add(bases[row], mgpu.c(offset, kind)), mgpu.c(period - 1, kind))

        def values() -> Iterator[Item]:
            for register, item, position in positions.constants:
                row, column = position
                if period:
                    assert number is not None
                    yield register, item, repeated(row, int(number * column % period))
                elif not column:
                    yield register, item, bases[row]
                elif number is None:
                    yield register, item, mlir_math.fma(slope, mgpu.c(float(column), kind), bases[row])
                else:
                    yield register, item, add(bases[row], mgpu.c(number * column, kind))

        return assemble(layout, shape, values(), None if floating else True)

    returns = plgpu.ShapeDtypeStruct(shape, row.dtype, layout=TILE)
    if number is not None:
        return inline_mgpu(ROW, returns=returns)(build)(row)
    return inline_mgpu(ROW, SCALAR_LAYOUT, returns=returns)(build)(row, step)


@device_op
def add_column_slope(vector: jax.Array, step: jax.Array) -> jax.Array:
    """The column vector vector[c] + step * c, [columns] float32."""

    @inline_mgpu(COLUMN, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(vector.shape, vector.dtype, layout=COLUMN))
    def add(array: mgpu.FragmentedArray, slope: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        f32 = ir.F32Type.get()
        multiplier = scalar_of(slope)
        positions = positions_of(lowered(COLUMN), vector.shape)
        # A product with `column_iota` would hold the column numbers in registers.
        mine = arith.mulf(arith.sitofp(f32, positions.lane[0]), multiplier)

        def items() -> Iterator[Item]:
            for register, item, (column,) in positions.constants:
                value = arith.addf(element(array.registers[register], item), mine)
                yield register, item, mlir_math.fma(multiplier, mgpu.c(float(column), f32), value) if column else value

        return assemble(lowered(COLUMN), vector.shape, items(), None)

    return add(vector, step)


PREDICATES = {
    "lt": arith.CmpIPredicate.slt,
    "le": arith.CmpIPredicate.sle,
    "gt": arith.CmpIPredicate.sgt,
    "ge": arith.CmpIPredicate.sge,
    "eq": arith.CmpIPredicate.eq,
    "ne": arith.CmpIPredicate.ne,
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


@device_op
def compare_columns(step: int, name: str, row: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The boolean tile `step * c <name> row[r]`, for `name` in PREDICATES; row[r] - step * c must not overflow."""

    @inline_mgpu(ROW, returns=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=TILE))
    def at_each(vector: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        layout = lowered(TILE)
        positions = positions_of(layout, shape)
        # One comparison with a constant for each element, because the lane's part of step * c is subtracted from the
        # row.
        mine = arith.muli(positions.lane[1], mgpu.c(step, i32))
        right = {}
        for register, item, at in positions_of(lowered(ROW), shape[:1]).constants:
            right[at[0]] = arith.subi(element(vector.registers[register], item), mine)
        items = (
            (register, item, arith.cmpi(PREDICATES[name], mgpu.c(step * column, i32), right[row]))
            for register, item, (row, column) in positions.constants
        )
        return assemble(layout, shape, items, False)

    return at_each(row)


@device_op
def times(row: jax.Array, factor: np.float32) -> jax.Array:
    """[rows] float32: row * factor, which the compiler merges with no sum: it is rounded wherever it is used."""

    @inline_mgpu(ROW, returns=plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=ROW))
    def scaled(vector: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        number, places = mgpu.c(float(factor), ir.F32Type.get()), positions_of(lowered(ROW), row.shape).constants
        items = (
            (register, item, arith.mulf(element(vector.registers[register], item), number))
            for register, item, _ in places
        )
        return assemble(lowered(ROW), row.shape, items, None)

    return scaled(row)


@device_op
def add_period_slope(tile: jax.Array, step: jax.Array) -> jax.Array:
    """The tile plus step * (c - c % PERIOD) at column c, by one FMA with a constant for each element."""

    @inline_mgpu(TILE, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def add(array: mgpu.FragmentedArray, slope: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            for register, item, (_, column) in positions_of(layout, tile.shape).constants:
                value = element(array.registers[register], item)
                whole = column // PERIOD * PERIOD
                if whole:
                    value = mlir_math.fma(scalar_of(slope), mgpu.c(float(whole), f32), value)
                yield register, item, value

        return assemble(layout, tile.shape, items(), None)

    return add(tile, step)


@device_op
def maximum_by_column(tile: jax.Array) -> jax.Array:
    """The narrow tile of maxima over the columns that are equal modulo PERIOD; NaN where an element is NaN."""
    rows, columns = tile.shape
    narrow = (rows, PERIOD)

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(narrow, tile.dtype, layout=TILE))
    def largest(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = lowered(TILE)
        found = _reduced_by_column(array, (rows, columns), arith.maximumf)
        items = ((register, item, found[at]) for register, item, at in positions_of(layout, narrow).constants)
        return assemble(layout, narrow, items, None)

    return largest(tile)


@device_op
def follow_maximum(
    maximum: jax.Array,
    factor: np.float32,
    offset: jax.Array | None,
    base: jax.Array,
    threshold: float,
    powers_of_two: float = 1.0,
    whole: bool = False,
    row_scaled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax reference of each row after a tile, raised to a maximum that exceeds it by more than `threshold`.

    maximum         [rows, PERIOD] float32: maxima as `maximum_by_column` gives them
    factor          multiplies `maximum`, which gives the unit of references; then `offset` is added
    base            [rows] float32, the reference before
    powers_of_two   powers of two in one unit of a reference
    whole           a reference that rises becomes `whole_power` of the maximum
    row_scaled      references are scores, and exponentials are relative to the `row_scale` of their row

    Returns (reference [rows], rescaling factor [rows], int32 that is 1 in warps where any reference rose).
    """
    rows = base.shape[0]

    def follow(
        tile: mgpu.FragmentedArray, before: mgpu.FragmentedArray, *rest: mgpu.FragmentedArray
    ) -> tuple[mgpu.FragmentedArray, ...]:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        mine: dict[int, ir.Value] = {}
        for (row, _), values in _elements_by_column(tile, (rows, PERIOD)).items():
            mine[row] = arith.maximumf(mine[row], values[0]) if row in mine else values[0]
        positions = positions_of(lowered(ROW), (rows,)).constants
        known = {at[0]: element(before.registers[register], item) for register, item, at in positions}
        scaled = {}
        for row, value in mine.items():
            value = arith.mulf(value, mgpu.c(float(factor), f32))
            scaled[row] = arith.addf(value, scalar_of(rest[0])) if rest else value

        def above(row: int, value: ir.Value) -> ir.Value:
            """Whether `value` exceeds the reference of row `row` by more than the threshold."""
            if row_scaled:
                # A difference is exact where it is small; a float32 may not hold reference + threshold.
                distance = arith.subf(value, known[row])
                return arith.cmpf(arith.CmpFPredicate.OGT, distance, mgpu.c(threshold, f32))
            return arith.cmpf(arith.CmpFPredicate.OGT, value, arith.addf(known[row], mgpu.c(threshold, f32)))

        def raised(value: ir.Value) -> ir.Value:
            """`whole_power` of an f32."""
            if powers_of_two == 1.0:
                return mlir_math.ceil(value)
            up = mlir_math.ceil(arith.mulf(value, mgpu.c(powers_of_two, f32)))
            up = arith.mulf(up, mgpu.c(1 / powers_of_two, f32))
            small = arith.cmpf(arith.CmpFPredicate.OLT, mlir_math.absf(value), mgpu.c(tile_math.MAX_WHOLE, f32))
            return arith.select(small, up, value)

        def power(before: ir.Value, now: ir.Value) -> ir.Value:
            """How many powers of two the reference `before` falls short of `now`."""
            if row_scaled:
                scales = row_scales.row_scale_of(now, whole), row_scales.row_scale_of(before, whole)
                return arith.subf(*(row_scales.exponent_of(before, scale) for scale in scales))
            below = arith.subf(before, now)
            return below if powers_of_two == 1.0 else arith.mulf(below, mgpu.c(powers_of_two, f32))

        anyone = _any_lane(functools.reduce(arith.ori, (above(row, value) for row, value in scaled.items())))
        branch = scf.IfOp(anyone, [f32] * (2 * len(known)), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            tops, shrinks = [], []
            for row, value in scaled.items():
                for distance in LANE_DISTANCES:
                    value = arith.maximumf(value, mgpu.utils.shfl_bfly(value, distance))
                tops.append(arith.select(above(row, value), raised(value) if whole else value, known[row]))
                shrinks.append(exp2_by_instruction(power(known[row], tops[-1])))
            scf.yield_([*tops, *shrinks])
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([*(known[row] for row in scaled), *(mgpu.c(1.0, f32) for _ in scaled)])
        results = list(branch.results)
        vectors_of = []
        for part in (results[: len(scaled)], results[len(scaled) :]):
            of = dict(zip(scaled, part, strict=True))
            items = ((register, item, of[at[0]]) for register, item, at in positions)
            vectors_of.append(assemble(lowered(ROW), (rows,), items, None))
        grown = splat_int(arith.extui(i32, anyone))
        return *vectors_of, grown

    row = plgpu.ShapeDtypeStruct((rows,), base.dtype, layout=ROW)
    operands = (maximum, base) if offset is None else (maximum, base, offset)
    layouts = (TILE, ROW) if offset is None else (TILE, ROW, SCALAR_LAYOUT)
    top, rescale, changed = inline_mgpu(*layouts, returns=(row, row, SCALAR_INT))(follow)(*operands)
    return top, rescale, changed


def whole_power(reference: jax.Array, powers_of_two: float) -> jax.Array:
    """Softmax references rounded up to a whole number of powers of two, of which a unit has `powers_of_two`."""
    if powers_of_two == 1.0:
        return tile_math.rounded_up(reference)
    whole = tile_math.rounded_up(reference * np.float32(powers_of_two)) * np.float32(1 / powers_of_two)
    return jnp.where(jnp.abs(reference) < np.float32(tile_math.MAX_WHOLE), whole, reference)


@device_op
def logistic_tile(exponents: jax.Array, small: bool) -> jax.Array:
    """1 / (1 + z) for z = 2^exponents; with `small` z / (1 + z), within 2^-12.

    An SM computes 16 exponentials, roots or reciprocals a clock and 128 products. So where a warp votes that its powers
    allow it, two elements have one reciprocal, and small ones z - z^2.
    """

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(exponents.shape, exponents.dtype, layout=TILE))
    def logistic(tile: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout, f32, i32 = lowered(TILE), ir.F32Type.get(), ir.IntegerType.get_signless(32)
        places = [(register, item) for register, item, _ in positions_of(layout, exponents.shape).constants]
        powers = [exp2_by_instruction(element(tile.registers[register], item)) for register, item in places]
        # as integers, whose largest of three is one instruction, and NaN the largest of all
        largest = functools.reduce(arith.maxsi, (arith.bitcast(i32, z) for z in powers))
        bound = mgpu.c(int(np.float32(SMALL_POWER if small else MOST_POWER).view(np.int32)), i32)
        beyond = _any_lane(arith.cmpi(arith.CmpIPredicate.sgt, largest, bound))
        branch = scf.IfOp(beyond, [f32 for _ in powers], has_else=True)
        plus_one = lambda x: arith.addf(x, mgpu.c(1.0, f32))
        with ir.InsertionPoint(branch.then_block):
            most = mgpu.c(MOST_POWER, f32)  # beside which 1 is nothing
            finite = [arith.minimumf(z, most) if small else z for z in powers]
            inverse = [_reciprocal(plus_one(z)) for z in finite]
            scf.yield_([arith.mulf(z, r) for z, r in zip(finite, inverse, strict=True)] if small else inverse)
        assert branch.else_block is not None
        with ir.InsertionPoint(branch.else_block):
            if small:
                found = [typing.cast(ir.Value, llvm.intr_fma(arith.negf(z), z, z)) for z in powers]
            else:
                found = _reciprocals([plus_one(z) for z in powers])
            scf.yield_(found)
        items = ((*place, value) for place, value in zip(places, branch.results, strict=True))
        return assemble(layout, exponents.shape, items, None)

    return logistic(exponents)


def _reciprocals(values: list[ir.Value]) -> list[ir.Value]:
    """1 / x of each of an even number of values, of which no product of two overflows; inside `inline_mgpu`."""
    pairs = zip(values[::2], values[1::2], strict=True)
    products = ((a, b, _reciprocal(arith.mulf(a, b))) for a, b in pairs)
    return [arith.mulf(both, x) for a, b, both in products for x in (b, a)]


def _reciprocal(x: ir.Value) -> ir.Value:
    """1 / x of an f32 by the instruction, which flushes denormals to 0; inside `inline_mgpu`."""
    return typing.cast(ir.Value, llvm.inline_asm(x.type, [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f"))


@device_op
def rounded_tile(tile: jax.Array, dtype: str) -> jax.Array:
    """A tile, float32, with its values rounded to those of `dtype`, a float dtype of 16 bits."""
    return tile.astype(dtype).astype(jnp.float32)


@device_op
def bfloat16_tile(tile: jax.Array) -> jax.Array:
    """`rounded_tile` for bfloat16, by one instruction for each element."""

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def rounded(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            for register, item, _ in positions_of(layout, tile.shape).constants:
                operands = [element(array.registers[register], item), mgpu.c(0.0, f32)]
                # The element and 0 become the upper and lower half of a word, which is the rounded element in float32.
                word = llvm.inline_asm(f32, operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=f,f,f")
                yield register, item, typing.cast(ir.Value, word)

        return assemble(layout, tile.shape, items(), None)

    return rounded(tile)


def tile_parts(tile: jax.Array, dtype: jax.typing.DTypeLike, parts: int) -> tuple[jax.Array, ...]:
    """A float32 tile as `parts` tiles of `dtype`, the largest first, whose sum approximates it (float_parts.py)."""
    found = []
    for _ in range(parts - 1):
        part = rounded_tile(tile, np.dtype(dtype).name)
        found.append(part.astype(dtype))
        tile = tile - part
    return (*found, tile.astype(dtype))


@device_op
def partial_row_sums(tile: jax.Array, fuse: bool = False) -> jax.Array:
    """[rows]: a thread's sums of each row, which its four lanes add by `sum_lanes`; `fuse` allows FMAs."""

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(tile.shape[:1], tile.dtype, layout=ROW))
    def sums(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = lowered(ROW)
        add = functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract) if fuse else arith.addf
        found: dict[int, ir.Value] = {}
        for (row, _column), value in _reduced_by_column(array, (tile.shape[0], tile.shape[1]), add).items():
            found[row] = add(found[row], value) if row in found else value
        positions = positions_of(layout, tile.shape[:1]).constants
        return assemble(
            layout, tile.shape[:1], ((register, item, found[at[0]]) for register, item, at in positions), None
        )

    return sums(tile)


@device_op
def sum_lanes(row: jax.Array) -> jax.Array:
    """[rows]: the sum of each row of a tile, in all four lanes that hold it, from `partial_row_sums`."""

    @inline_mgpu(ROW, returns=plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=ROW))
    def join(vector: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        def items() -> Iterator[Item]:
            for register, item, _ in positions_of(lowered(ROW), row.shape).constants:
                value = element(vector.registers[register], item)
                for distance in LANE_DISTANCES:
                    value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
                yield register, item, value

        return assemble(lowered(ROW), row.shape, items(), None)

    return join(row)


@device_op
def shared_by_lanes(row: jax.Array) -> jax.Array:
    """[rows]: a quarter of `row`, which `sum_lanes` makes `row` again where all four lanes have it."""
    return row * np.float32(1 / LANES_OF_ROW)


@device_op
def scale_rows(tile: jax.Array, factor: jax.Array, needed: jax.Array) -> jax.Array:
    """tile * factor[:, None]; warps in which `needed` (`follow_maximum`) is 0 skip the product, and have factors 1."""

    @inline_mgpu(TILE, ROW, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def scale(
        values: mgpu.FragmentedArray, factors: mgpu.FragmentedArray, flag: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        anyone = arith.trunci(ir.IntegerType.get_signless(1), scalar_of(flag))
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

    return scale(tile, factor, needed)


def _any_lane(condition: ir.Value) -> ir.Value:
    """Whether `condition` is true in any lane of the warp; all 32 lanes must reach it together."""
    i32 = ir.IntegerType.get_signless(32)
    voted = llvm.inline_asm(
        i32,
        [arith.extui(i32, condition)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )
    return arith.trunci(ir.IntegerType.get_signless(1), typing.cast(ir.Value, voted))


@device_op
def hide(tile: jax.Array, visible: jax.Array, hidden: float = -math.inf) -> jax.Array:
    """The tile with `hidden` where it is not visible."""
    bits = np.float32(hidden).view(np.uint32)

    @inline_mgpu(TILE, TILE, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def select(values: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            for register, item, _ in positions_of(layout, tile.shape).constants:
                given = [element(x.registers[register], item) for x in (values, kept)]
                # A select that LLVM sees becomes one for each conjunct of `visible`, and each takes an instruction
                # beside its comparison. Left as it is, a comparison and the conjunction with those before it are one
                # instruction.
                chosen = llvm.inline_asm(f32, given, f"selp.f32 $0, $1, 0f{bits:08X}, $2;", "=f,f,b")
                yield register, item, typing.cast(ir.Value, chosen)

        return assemble(layout, tile.shape, items(), None)

    return select(tile, visible)
