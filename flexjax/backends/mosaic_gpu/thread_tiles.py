"""Arithmetic on the WGMMA fragments of a tile, where the compiler does not generate good code by itself.

A tile, [rows, columns] in the layout of a WGMMA accumulator, is spread over the threads of a warpgroup. A row belongs
to four neighbouring lanes, and a thread holds elements of two rows (8 apart) for each 64 rows. In a row it holds two
neighbouring columns, the two that are PERIOD further, and so on:

    column       0 1 2 3 4 5 6 7 | 8 9 ...
    lane of row  0 0 1 1 2 2 3 3 | 0 0 ...

So a value that depends on the column modulo PERIOD is two numbers for each row of a thread. A *narrow* tile, [rows,
PERIOD], holds such values once. Reductions over a row begin within a thread and end by exchanging between four lanes.

Kernels have Lane semantics. In the simulator (`interpret`) the functions do the same with jax.numpy. Functions that
`inline_mgpu` decorates are traced once and run in every thread: their FragmentedArrays hold the registers of one
thread.

The file is longer than others because each function has its code twice, for the registers and for the simulator.
"""

import functools
import typing
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxlib.mlir.dialects import math as mlir_math

from flexjax.backends import tile_math
from flexjax.backends.mosaic_gpu import row_scales
from flexjax.backends.mosaic_gpu.exponential import exp2_by_instruction
from flexjax.backends.mosaic_gpu.kernel_parts import (
    SCALAR_INT,
    SCALAR_LAYOUT,
    Scalar,
    inline_mgpu,
    scalar_of,
    splat_int,
)
from flexjax.backends.mosaic_gpu.registers import (
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

PERIOD = 8
"""Columns after which the columns that a thread holds repeat; a narrow tile has as many."""
LANES_OF_ROW = 4
"""Lanes that hold a row of a tile."""
LANE_DISTANCES = (1, 2)
"""Exchanging with the lanes at these distances (XOR of lane numbers) reduces over the four lanes that hold a row."""


def _elements_by_column(array: mgpu.FragmentedArray, shape: tuple[int, int]) -> dict[tuple[int, ...], list[ir.Value]]:
    """The elements that a thread holds of a tile: (row, column modulo PERIOD) -> its elements there, by rising
    column, one for each PERIOD columns.

    array   the thread's registers of the tile
    shape   (rows, columns) of the tile

    Rows and columns are positions as the first thread has them (`registers.Positions`).
    """
    found: dict[tuple[int, ...], list[ir.Value]] = {}
    for register, item, (row, column) in positions_of(lowered(TILE), shape).constants:
        value = element(array.registers[register], item)
        found.setdefault((row, column % PERIOD), []).append(value)
    return found


def _reduced_by_column(
    array: mgpu.FragmentedArray, shape: tuple[int, int], combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> dict[tuple[int, ...], ir.Value]:
    """Reduces what a thread holds of a tile over the columns that are equal modulo PERIOD: (row, column modulo
    PERIOD) -> result.

    array     the thread's registers of the tile
    shape     (rows, columns) of the tile
    combine   emits the reduction of two elements, such as their sum

    The instructions of the reductions are interleaved, one element of each at a time, so that they overlap.
    """
    known = _elements_by_column(array, shape)
    found = {at: values[0] for at, values in known.items()}
    for n in range(1, shape[1] // PERIOD):
        found = {at: combine(value, known[at][n]) for at, value in found.items()}
    return found


def repeat_columns(narrow: jax.Array, shape: tuple[int, int], interpret: bool) -> jax.Array:
    """The tile of `shape` [rows, columns] whose column c is column c % PERIOD of a narrow tile, [rows, PERIOD].

    It emits no instruction, because each thread has the elements already.
    """
    if interpret:
        return jnp.tile(narrow, (1, shape[1] // PERIOD))

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(shape, narrow.dtype, layout=TILE))
    def repeat(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the tile that repeats a narrow tile, from its registers of the narrow tile
        (`array`).
        """
        layout = lowered(TILE)
        known = _elements_by_column(array, (shape[0], PERIOD))
        positions = positions_of(layout, shape).constants
        items = ((register, item, known[row, column % PERIOD][0]) for register, item, (row, column) in positions)
        return assemble(layout, shape, items, is_signed(narrow.dtype))

    return repeat(narrow)


def affine_tile(
    row: jax.Array, step: float | np.float32 | Scalar, shape: tuple[int, int], interpret: bool, period: int = 0
) -> jax.Array:
    """The tile row[r] + step * c at row r and column c, modulo `period`: one addition or FMA with a constant for each element, and the
    modulo.

    row      [rows], int32 or float32
    step     a Python or numpy number; for float32 also a scalar of the kernel
    shape    (rows, columns) of the result
    period   for int32 alone, a power of two: the result is taken modulo this number, 0 .. period - 1. Columns of a thread are 8 apart, so
             with a small period most elements of a thread are equal, and each distinct one is computed once. 0: no modulo
    """
    floating = jnp.issubdtype(row.dtype, jnp.floating)
    if interpret:
        whole = row[:, None] + jnp.arange(shape[1]).astype(row.dtype)[None, :] * jnp.asarray(step, row.dtype)
        return whole & np.int32(period - 1) if period else whole
    number = None if isinstance(step, jax.Array) else typing.cast(float, step)

    def build(vector: mgpu.FragmentedArray, *rest: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the tile row[r] + step * c, modulo `period` where it is not 0.

        vector   registers of `row`
        rest     `step`, where it is a scalar of the kernel
        """
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

        @functools.cache
        def repeated(row: int, offset: int) -> ir.Value:
            """bases[row] + offset, modulo the period, as an i32; emitted once for each pair of arguments.

            row      row of the element, as the first thread has it; bases[row] is row[r] plus the lane's part of step
                     * c
            offset   the constant part of step * c, modulo the period
            """
            return arith.andi(add(bases[row], mgpu.c(offset, kind)), mgpu.c(period - 1, kind))

        def values() -> Iterator[Item]:
            """Yields, for each element of the tile that the thread holds, (its register, its index in the register,
            row[r] + step * c, modulo `period` where it is not 0), where r and c are its row and column.
            """
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


def add_column_slope(vector: jax.Array, step: jax.Array, interpret: bool) -> jax.Array:
    """The column vector vector[c] + step * c, [columns] float32.

    vector   [columns] float32
    step     a scalar of the kernel

    It takes an addition and at most one FMA for each element of a thread. A product of `step` with `column_iota` would hold the column
    numbers in registers.
    """
    if interpret:
        return vector + step * jnp.arange(vector.shape[0]).astype(vector.dtype)

    @inline_mgpu(COLUMN, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(vector.shape, vector.dtype, layout=COLUMN))
    def add(array: mgpu.FragmentedArray, slope: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of vector[c] + step * c.

        array   registers of the column vector
        slope   `step`, a scalar of the kernel
        """
        f32 = ir.F32Type.get()
        multiplier = scalar_of(slope)
        positions = positions_of(lowered(COLUMN), vector.shape)
        mine = arith.mulf(arith.sitofp(f32, positions.lane[0]), multiplier)

        def items() -> Iterator[Item]:
            """Yields, for each element of the column vector that the thread holds, (its register, its index in the
            register, vector[c] + step * c), where c is the column of the element.
            """
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
"""name -> the comparison that gives the same with left and right exchanged."""


def compare_columns(step: int, name: str, row: jax.Array, shape: tuple[int, int], interpret: bool) -> jax.Array:
    """The boolean tile `step * c <name> row[r]` at row r and column c, where <name> is a key of PREDICATES, such as
    "lt".

    step    a Python int
    row     [rows] int32; row[r] - step * c must not overflow
    shape   (rows, columns) of the result

    It takes one signed comparison with a constant for each element, and no register for column numbers, because the
    lane's part of step * c is subtracted from the row.
    """
    if interpret:
        columns = step * jnp.arange(shape[1], dtype=jnp.int32)[None, :]
        compare = {"lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge, "eq": lax.eq, "ne": lax.ne}[name]
        return compare(*jnp.broadcast_arrays(columns, row[:, None]))

    @inline_mgpu(ROW, returns=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=TILE))
    def at_each(vector: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the boolean tile `step * c <name> row[r]`.

        vector   registers of `row`
        """
        i32 = ir.IntegerType.get_signless(32)
        layout = lowered(TILE)
        positions = positions_of(layout, shape)
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


def add_period_slope(tile: jax.Array, step: jax.Array, interpret: bool) -> jax.Array:
    """The tile plus step * (c - c % PERIOD) at column c: the part of a slope step * c that is the same for PERIOD
    neighbouring columns.

    tile   [rows, columns] float32
    step   a scalar of the kernel

    It takes one FMA with a constant for each element, and no register for multiples of `step`.
    """
    if interpret:
        return tile + step * (jnp.arange(tile.shape[1]) // PERIOD * PERIOD).astype(tile.dtype)[None, :]

    @inline_mgpu(TILE, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def add(array: mgpu.FragmentedArray, slope: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the tile plus step * (c - c % PERIOD).

        array   registers of the tile
        slope   `step`, a scalar of the kernel
        """
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            """Yields, for each element of the tile that the thread holds, (its register, its index in the register, its
            new value): the element at row r and column c plus step * (c - c % PERIOD).
            """
            for register, item, (_, column) in positions_of(layout, tile.shape).constants:
                value = element(array.registers[register], item)
                whole = column // PERIOD * PERIOD
                if whole:
                    value = mlir_math.fma(scalar_of(slope), mgpu.c(float(whole), f32), value)
                yield register, item, value

        return assemble(layout, tile.shape, items(), None)

    return add(tile, step)


def maximum_by_column(tile: jax.Array, interpret: bool) -> jax.Array:
    """The narrow tile [rows, PERIOD] of maxima over the columns that are equal modulo PERIOD: column n of the result is the maximum of
    columns n, n + PERIOD, .... A thread computes its elements alone, without an exchange; NaN where an element is NaN.
    """
    rows, columns = tile.shape
    if interpret:
        return tile.reshape(rows, columns // PERIOD, PERIOD).max(axis=1)
    narrow = (rows, PERIOD)

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(narrow, tile.dtype, layout=TILE))
    def largest(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the narrow tile of maxima over equal columns modulo PERIOD, from its registers of
        the tile (`array`).
        """
        layout = lowered(TILE)
        found = _reduced_by_column(array, (rows, columns), arith.maximumf)
        items = ((register, item, found[at]) for register, item, at in positions_of(layout, narrow).constants)
        return assemble(layout, narrow, items, None)

    return largest(tile)


def follow_maximum(
    maximum: jax.Array,
    factor: np.float32,
    offset: jax.Array | None,
    base: jax.Array,
    threshold: float,
    interpret: bool,
    powers_of_two: float = 1.0,
    whole: bool = False,
    row_scaled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax reference of each row after a tile: raised to the row maximum where that exceeds the reference
    before by more than the threshold, else unchanged.

    maximum         [rows, PERIOD] float32: maxima as `maximum_by_column` gives them
    factor          multiplies `maximum`, which gives the unit of references
    offset          scalar that is added to the product; None: nothing
    base            [rows] float32, the reference before
    threshold       in the unit of references
    powers_of_two   powers of two in one unit of a reference
    whole           a reference that rises becomes `whole_power` of the maximum
    row_scaled      references are scores, and exponentials are relative to the `row_scale` of their row (row_scales.py)

    Returns the reference [rows], the rescaling factor 2^((base - reference) * powers_of_two) [rows], 1 where the
    reference is unchanged, and an int32 that is 1 in warps where any reference rose (always 1 in the simulator). Lanes
    exchange maxima only in such warps. Where rows are scaled, the factor takes the excesses of both references into account, and the
    difference of maximum and reference, which is exact where it is small, is compared with the threshold: a float32 may not hold
    reference + threshold.
    """
    rows = base.shape[0]
    if interpret:
        top = maximum.max(axis=1) * factor + (np.float32(0) if offset is None else offset)
        above_base = top - base > np.float32(threshold) if row_scaled else top > base + np.float32(threshold)
        top = jnp.where(above_base, whole_power(top, powers_of_two) if whole else top, base)
        if row_scaled:
            return top, row_scales.rescaling(base, top, interpret, whole), jnp.int32(1)
        return top, jnp.exp2((base - top) * np.float32(powers_of_two)), jnp.int32(1)

    def follow(
        tile: mgpu.FragmentedArray, before: mgpu.FragmentedArray, *rest: mgpu.FragmentedArray
    ) -> tuple[mgpu.FragmentedArray, ...]:
        """What `follow_maximum` returns, for one thread: its registers of the new references and of the rescaling
        factors, and whether any reference of its warp rose.

        tile     registers of the narrow tile of maxima
        before   registers of the references before
        rest     the offset that is added to the scaled maxima, where there is one
        """
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
            """Whether `value`, a maximum in the unit of references, exceeds the reference of row `row` by more than
            the threshold: an i1.
            """
            if row_scaled:
                distance = arith.subf(value, known[row])
                return arith.cmpf(arith.CmpFPredicate.OGT, distance, mgpu.c(threshold, f32))
            return arith.cmpf(arith.CmpFPredicate.OGT, value, arith.addf(known[row], mgpu.c(threshold, f32)))

        def raised(value: ir.Value) -> ir.Value:
            """`whole_power` of `value`, a maximum in the unit of references; an f32."""
            if powers_of_two == 1.0:
                return mlir_math.ceil(value)
            up = mlir_math.ceil(arith.mulf(value, mgpu.c(powers_of_two, f32)))
            up = arith.mulf(up, mgpu.c(1 / powers_of_two, f32))
            small = arith.cmpf(arith.CmpFPredicate.OLT, mlir_math.absf(value), mgpu.c(tile_math.MAX_WHOLE, f32))
            return arith.select(small, up, value)

        def power(before: ir.Value, now: ir.Value) -> ir.Value:
            """The power of two by which the reference falls short of `now`, the one after the tile, where it was `before`; an f32."""
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
    """Softmax references, [rows] float32, rounded up to a whole number of powers of two. Infinities and NaN stay as they are.

    reference       the references of the rows, in registers or in the simulator
    powers_of_two   powers of two in one unit of a reference. 1: references are rounded up to integers. log2(e), where
                    references are scores: to multiples of ln 2, except that references of a magnitude of at least
                    tile_math.MAX_WHOLE stay as they are
    """
    if powers_of_two == 1.0:
        return tile_math.rounded_up(reference)
    whole = tile_math.rounded_up(reference * np.float32(powers_of_two)) * np.float32(1 / powers_of_two)
    return jnp.where(jnp.abs(reference) < np.float32(tile_math.MAX_WHOLE), whole, reference)


def rounded_tile(tile: jax.Array, dtype: str, interpret: bool) -> jax.Array:
    """A tile, [rows, columns] float32, with its values rounded to those of `dtype`, a float dtype of 16 bits; the
    result is float32.
    """
    return tile_math.round_to(tile, dtype) if interpret else tile.astype(dtype).astype(jnp.float32)


def bfloat16_tile(tile: jax.Array, interpret: bool) -> jax.Array:
    """`rounded_tile` for bfloat16, by an instruction for each element: it converts the element and 0 to the upper and the lower half of
    a word, and that word is the rounded element in float32. The compiler would convert there and back, at a fraction of that rate.
    """
    if interpret:
        return tile_math.round_to(tile, "bfloat16")

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def rounded(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the rounded tile, from its registers of the tile (`array`)."""
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            """Yields, for each element that the thread holds, (its register, its index in the register, its rounded value)."""
            for register, item, _ in positions_of(layout, tile.shape).constants:
                operands = [element(array.registers[register], item), mgpu.c(0.0, f32)]
                word = llvm.inline_asm(f32, operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=f,f,f")
                yield register, item, typing.cast(ir.Value, word)

        return assemble(layout, tile.shape, items(), None)

    return rounded(tile)


def tile_parts(tile: jax.Array, dtype: jax.typing.DTypeLike, parts: int, interpret: bool) -> tuple[jax.Array, ...]:
    """A tile, [rows, columns] float32, as `parts` tiles of `dtype`, the largest first, whose sum approximates it (float_parts.py); with
    one part the tile converted to `dtype`.
    """
    found = []
    for _ in range(parts - 1):
        part = rounded_tile(tile, np.dtype(dtype).name, interpret)
        found.append(part.astype(dtype))
        tile = tile - part
    return (*found, tile.astype(dtype))


def partial_row_sums(tile: jax.Array, interpret: bool, fuse: bool = False) -> jax.Array:
    """[rows]: the sum of the elements that a thread holds of each row of a tile; in the simulator the sum of the whole
    row.

    fuse   whether the compiler may fuse the additions with multiplications that made the elements

    The four lanes of a row have different numbers, although the layout says that they agree. `sum_lanes` adds them
    up.
    """
    if interpret:
        return tile.sum(axis=1)

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(tile.shape[:1], tile.dtype, layout=ROW))
    def sums(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's sums, row by row, of the elements that it holds of the tile (`array`)."""
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


def sum_lanes(row: jax.Array, interpret: bool) -> jax.Array:
    """[rows]: the sum of each row of a tile, from `partial_row_sums`: the numbers of the four lanes that hold a row
    are added, and all four get the sum. The simulator returns `row`, which has whole sums there.
    """
    if interpret:
        return row

    @inline_mgpu(ROW, returns=plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=ROW))
    def join(vector: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the row sums: the numbers of the four lanes of a row are exchanged and added.

        vector   registers of the sums of each lane
        """

        def items() -> Iterator[Item]:
            """Yields, for each row that the thread holds, (register, index in the register, sum over the four lanes of the
            row). Every lane executes the exchange.
            """
            for register, item, _ in positions_of(lowered(ROW), row.shape).constants:
                value = element(vector.registers[register], item)
                for distance in LANE_DISTANCES:
                    value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
                yield register, item, value

        return assemble(lowered(ROW), row.shape, items(), None)

    return join(row)


def shared_by_lanes(row: jax.Array, interpret: bool) -> jax.Array:
    """[rows]: what `sum_lanes` makes `row` of, where all four lanes that hold a row have its number: a quarter of it."""
    return row if interpret else row * np.float32(1 / LANES_OF_ROW)


def scale_rows(tile: jax.Array, factor: jax.Array, needed: jax.Array, interpret: bool) -> jax.Array:
    """tile * factor[:, None], [rows, columns]. Warps in which `needed` is 0 skip the product and keep their part of
    the tile; the simulator multiplies always.

    factor   [rows], 1 in such warps
    needed   int32, the same in all lanes of a warp, as `follow_maximum` returns it
    """
    if interpret:
        return tile * factor[:, None]

    @inline_mgpu(TILE, ROW, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def scale(
        values: mgpu.FragmentedArray, factors: mgpu.FragmentedArray, flag: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        """One thread's registers of the tile times a factor for each row; as they were, in warps whose flag is 0.

        values    registers of the tile
        factors   registers of the row vector of factors
        flag      `needed`, an i32 that is the same in all lanes of the warp
        """
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
    """Whether `condition` is true in any lane of the warp, the same i1 in all its lanes.

    condition   an i1, this thread's own

    All 32 lanes must reach it together, so it may not be inside of a branch that lanes of one warp take differently.
    """
    i32 = ir.IntegerType.get_signless(32)
    voted = llvm.inline_asm(
        i32,
        [arith.extui(i32, condition)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )
    return arith.trunci(ir.IntegerType.get_signless(1), typing.cast(ir.Value, voted))


def hide(tile: jax.Array, visible: jax.Array, interpret: bool) -> jax.Array:
    """The tile with -inf where it is not visible: one select for each element, whatever `visible` was computed from.

    tile      [rows, columns] float32
    visible   [rows, columns] bool

    A select that LLVM sees becomes one for each conjunct of `visible`, and then the conjuncts of an element take an instruction each beside
    their comparisons. Left as it is, a comparison and the conjunction with those before it are one instruction of the machine.
    """
    if interpret:
        return jnp.where(visible, tile, np.float32(-np.inf))

    @inline_mgpu(TILE, TILE, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def select(values: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the result, from those of both arguments."""
        layout, f32 = lowered(TILE), ir.F32Type.get()

        def items() -> Iterator[Item]:
            """Yields, for each element that the thread holds, (its register, its index in the register, the value or -inf)."""
            for register, item, _ in positions_of(layout, tile.shape).constants:
                given = [element(x.registers[register], item) for x in (values, kept)]
                yield (
                    register,
                    item,
                    typing.cast(ir.Value, llvm.inline_asm(f32, given, "selp.f32 $0, $1, 0fFF800000, $2;", "=f,f,b")),
                )

        return assemble(layout, tile.shape, items(), None)

    return select(tile, visible)
