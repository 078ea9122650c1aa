"""Stores and loads the first rows of a tile, between registers and memory: packed queries fill only some of its 64 rows.

Each thread stores or loads the elements of those of its rows that have a number below `rows`, and skips the others, so that
arrays in memory need only `rows` rows.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from flexjax.backends.mosaic_gpu.decode_tiles import ROWS
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, inline_mgpu
from flexjax.backends.mosaic_gpu.registers import ROW, TILE, RegisterIndex, lowered, positions_of
from flexjax.backends.mosaic_gpu.registers import element as element_of


def store_rows(target: Ref, tile: jax.Array, rows: int, interpret: bool) -> None:
    """Writes the first `rows` rows of a tile to memory.

    target      [rows, columns] float32 in global or shared memory, contiguous
    tile        [ROWS, columns] float32
    interpret   whether the kernel runs in the simulator
    """
    if interpret:
        target[...] = tile[:rows]
        return

    @inline_mgpu(plgpu.RefType(), TILE)
    def store(memory: ir.Value, values: mgpu.FragmentedArray) -> None:
        """Stores one thread's registers of the tile (`values`), a vector of neighbouring columns at once; rows that
        `memory` lacks are skipped.
        """
        for inside, pointer, register in _places(memory, values.shape, rows):
            with ir.InsertionPoint(scf.IfOp(inside).then_block):
                llvm.store(typing.cast(ir.Value, values.registers[register]), pointer)
                scf.yield_([])

    store(target, tile)


def load_rows(source: Ref, columns: int, rows: int, interpret: bool) -> jax.Array:
    """Loads the first rows of a tile from shared memory to the registers of a warpgroup: [ROWS, columns] float32 in the layout of the
    WGMMA accumulator (TILE). Rows from `rows` on are 0 and are not read. The inverse of `store_rows`.

    source      [rows, columns] float32 in shared memory, contiguous; the caller has waited until it is written
    columns     columns of the tile
    rows        how many rows `source` has, a Python int of at most ROWS
    interpret   whether the kernel runs in the simulator
    """
    shape = (ROWS, columns)
    if interpret:
        return jnp.pad(source[...], ((0, ROWS - rows), (0, 0)))

    @inline_mgpu(plgpu.RefType(), returns=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE))
    def load(memory: ir.Value) -> mgpu.FragmentedArray:
        """One thread's registers of the tile, loaded a vector of neighbouring columns at once; 0 for rows that `memory`
        lacks.
        """
        layout = lowered(TILE)
        registers: np.ndarray = np.empty(tuple(layout.registers_shape(shape)), dtype=object)
        vector = ir.VectorType.get((layout.vector_length,), ir.F32Type.get())
        zero = arith.constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.FloatAttr.get(ir.F32Type.get(), 0.0)))
        for inside, pointer, register in _places(memory, shape, rows):
            branch = scf.IfOp(inside, [vector], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_([llvm.load(vector, pointer)])
            with ir.InsertionPoint(typing.cast(typing.Any, branch.else_block)):
                scf.yield_([zero])
            registers[register] = branch.results[0]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)


def _places(memory: ir.Value, shape: tuple[int, ...], rows: int) -> list[tuple[ir.Value, ir.Value, RegisterIndex]]:
    """(whether the row is stored, address, index of the register) of each register that a thread holds of a tile; for
    use inside `inline_mgpu`. A register holds neighbouring elements of one row, and the address is that of its first.

    memory   memref of [rows, columns], contiguous
    shape    (rows, columns) of the tile
    rows     the first rows of the tile that `memory` has
    """
    layout = lowered(TILE)
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    element = ir.MemRefType(memory.type).element_type
    positions = positions_of(layout, shape)
    start = arith.addi(arith.muli(positions.lane[0], mgpu.c(shape[1], i32)), positions.lane[1])
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extui(i64, start)], element)
    inside: dict[int, ir.Value] = {}
    found = []
    for register, item, (row, column) in positions.constants:
        if item:  # the vector of a register is one access
            continue
        if row not in inside:
            number = arith.addi(positions.lane[0], mgpu.c(row, i32))
            inside[row] = arith.cmpi(arith.CmpIPredicate.slt, number, mgpu.c(rows, i32))
        place = mgpu.utils.getelementptr(base, [row * shape[1] + column], element)
        found.append((inside[row], place, register))
    return found


def store_row_vector(target: Ref, vector: jax.Array, rows: int, interpret: bool) -> None:
    """Writes the first `rows` elements of a row vector to global memory.

    target   [rows] float32
    vector   [ROWS] float32, one element for each row
    """
    if interpret:
        target[...] = vector[:rows]
        return

    @inline_mgpu(plgpu.RefType(), ROW)
    def store(memory: ir.Value, values: mgpu.FragmentedArray) -> None:
        """Stores the registers of one thread, `values`, to the rows of `memory` that exist; the four threads of a row store the same
        number.
        """
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        element = ir.MemRefType(memory.type).element_type
        positions = positions_of(lowered(ROW), values.shape)
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extui(i64, positions.lane[0])], element)
        for register, item, (row,) in positions.constants:
            number = arith.addi(positions.lane[0], mgpu.c(row, i32))
            inside = arith.cmpi(arith.CmpIPredicate.slt, number, mgpu.c(rows, i32))
            with ir.InsertionPoint(scf.IfOp(inside).then_block):
                value = element_of(typing.cast(ir.Value, values.registers[register]), item)
                llvm.store(value, mgpu.utils.getelementptr(base, [row], element))
                scf.yield_([])

    store(target, vector)
