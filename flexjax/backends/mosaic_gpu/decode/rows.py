"""Stores and loads the first rows of a tile: packed queries fill only some of its 64 rows."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from flexjax.backends.mosaic_gpu.decode.hopper_tiles import ROWS
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, inline_mgpu
from flexjax.backends.mosaic_gpu.machine.registers import ROW, TILE, RegisterIndex, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.registers import element as element_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op


@device_op
def store_rows(target: Ref, tile: jax.Array, rows: int) -> None:
    """Writes the first `rows` rows of a tile, [ROWS, columns] float32, to contiguous global or shared memory."""

    @inline_mgpu(plgpu.RefType(), TILE)
    def store(memory: ir.Value, values: mgpu.FragmentedArray) -> None:
        for inside, pointer, register in _places(memory, values.shape, rows):
            with ir.InsertionPoint(scf.IfOp(inside).then_block):
                llvm.store(typing.cast(ir.Value, values.registers[register]), pointer)
                scf.yield_([])

    store(target, tile)


@device_op
def load_rows(source: Ref, columns: int, rows: int) -> jax.Array:
    """[ROWS, columns] float32 from contiguous shared memory; rows from `rows` on are 0 and not read."""
    shape = (ROWS, columns)

    @inline_mgpu(plgpu.RefType(), returns=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE))
    def load(memory: ir.Value) -> mgpu.FragmentedArray:
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
    """(whether the row is stored, address, index) of each register of one row that a thread holds of a tile."""
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


@device_op
def store_row_vector(target: Ref, vector: jax.Array, rows: int) -> None:
    """Writes the first `rows` elements of a row vector, [ROWS] float32, to global memory."""

    @inline_mgpu(plgpu.RefType(), ROW)
    def store(memory: ir.Value, values: mgpu.FragmentedArray) -> None:
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        element = ir.MemRefType(memory.type).element_type
        positions = positions_of(lowered(ROW), values.shape)
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extui(i64, positions.lane[0])], element)
        for register, item, (row,) in positions.constants:
            number = arith.addi(positions.lane[0], mgpu.c(row, i32))
            inside = arith.cmpi(arith.CmpIPredicate.slt, number, mgpu.c(rows, i32))
            # the four threads of a row store the same number
            with ir.InsertionPoint(scf.IfOp(inside).then_block):
                value = element_of(typing.cast(ir.Value, values.registers[register]), item)
                llvm.store(value, mgpu.utils.getelementptr(base, [row], element))
                scf.yield_([])

    store(target, vector)
