"""How a warpgroup reads captured arrays into the registers of a tile.

There are three ways to read global memory and one to read shared memory:

- `load_scalar`: one element, the same for the whole tile;
- `load_affine`: each index is a constant plus multiples of the row and the column. The address of every element is a
  base address of the thread plus a constant, and elements of a thread at one address are loaded once;
- `gather`: indices are arrays in registers, each element has its own address;
- `load_staged`: a tile that TMA has copied to shared memory (programs/staging.py).

Results are float32, int32 or uint32 in the layouts of registers.py. Nothing here checks bounds on the device: callers
clamp the indices of tiles that extend past the end of the attention matrix.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, load, scalar_of
from flexjax.backends.mosaic_gpu.machine.registers import (
    TILE,
    Item,
    Positions,
    assemble,
    is_signed,
    layout_of,
    lowered,
    positions_of,
)
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

Index = jax.typing.ArrayLike
"""An index of one dimension: a number, a scalar of the kernel, or in `gather` an int32 vector or tile."""


def kernel_operand(array: jax.Array) -> jax.Array:
    """A captured array in the form in which kernels take it: booleans as int8, a scalar as shape [1]."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int8)
    return array.reshape(1) if array.ndim == 0 else array


# ------------------------------------------------------------------- global memory


def load_scalar(ref: Ref, index: tuple[Index, ...]) -> Scalar:
    """The element ref[index] of an array in global memory, in bounds; () for a captured scalar."""
    return in_compute_dtype(ref[index or (0,)])


@device_op
def gather(
    ref: Ref, index: tuple[Index, ...], varies: tuple[bool, ...], kind: str, shape: tuple[int, ...]
) -> jax.Array:
    """The vector or tile of `shape` whose elements are ref[index], in global memory; each has an address of its own.

    index    for each dimension an int32 array of `shape` where `varies` is true, otherwise a scalar; in bounds
    """
    index_arrays = [jnp.asarray(i) for i, m in zip(index, varies, strict=True) if m]
    part, strides = _varying_part(ref, index, varies)
    offset = sum((v * np.int32(s) if s != 1 else v) for v, s in zip(index_arrays, strides, strict=True))
    layout = layout_of(kind)

    @inline_mgpu(plgpu.RefType(), layout, returns=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout))
    def read(memory: ir.Value, offsets: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        # The cast says that addresses are in global memory, which takes fewer registers. `load_affine` does without it,
        # because LLVM would lose their alignment and no longer load two neighbouring elements at once.
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(memory))
        element = ir.MemRefType(memory.type).element_type
        i64 = ir.IntegerType.get_signless(64)

        def read_one(place: ir.Value, _: object) -> ir.Value:
            return _load_element(base, arith.extui(i64, place), element)

        found = offsets.foreach(read_one, create_array=True, is_signed=is_signed(ref.dtype))
        assert found is not None
        return found

    return in_compute_dtype(read(part, offset))


@device_op
def load_affine(
    ref: Ref,
    index: tuple[Index, ...],
    steps: tuple[tuple[int, int] | None, ...],
    kind: str,
    shape: tuple[int, ...],
    used_rows: int | None = None,
    pairs: bool = False,
) -> jax.Array:
    """The vector or tile whose element at row r and column c is ref[index + by_row * r + by_column * c].

    index       for each dimension of the array: the index at row 0 and column 0, a scalar
    steps       for each dimension: (by_row, by_column); None where the index is the same for all elements
    used_rows   rows from this number on read what the row before it reads; None: every row reads its own elements
    pairs       columns 2 n and 2 n + 1 are neighbours, the first at an even place: one load reads both, for half of L1
    """
    varies = tuple(s is not None for s in steps)
    part, strides = _varying_part(ref, index, varies)
    starts = [jnp.asarray(i, jnp.int32) for i, m in zip(index, varies, strict=True) if m]
    start = sum((i * np.int32(s) for i, s in zip(starts, strides, strict=True)), np.int32(0))
    # Elements of memory from one row of the tile to the next, and from one column to the next.
    elements_per_step = [
        sum(s[d] * stride for s, stride in zip(filter(None, steps), strides, strict=True)) for d in (0, 1)
    ]
    elements_per_step = {"row": elements_per_step[:1], "column": elements_per_step[1:], "tile": elements_per_step}[kind]
    layout = layout_of(kind)

    @inline_mgpu(plgpu.RefType(), SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout))
    def read(memory: ir.Value, first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        element = ir.MemRefType(memory.type).element_type
        positions = positions_of(lowered(layout), shape)
        if used_rows is not None and kind != "column":
            found = _items_of_used_rows(memory, scalar_of(first), positions, elements_per_step, used_rows)
            return assemble(lowered(layout), shape, found, is_signed(ref.dtype))
        lane = scalar_of(first)
        for part_of_lane, step in zip(positions.lane, elements_per_step, strict=True):
            lane = arith.addi(lane, arith.muli(part_of_lane, mgpu.c(step, i32)))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extsi(i64, lane)], element)
        loaded: dict[int, ir.Value] = {}
        if pairs:
            found = _pairs(base, positions, elements_per_step, element)
            return assemble(lowered(layout), shape, found, is_signed(ref.dtype))

        def items() -> Iterator[Item]:
            for register, item, position in positions.constants:
                offset = sum(p * s for p, s in zip(position, elements_per_step, strict=True))
                if offset not in loaded:
                    loaded[offset] = _load_element(base, offset, element)
                yield register, item, loaded[offset]

        return assemble(lowered(layout), shape, items(), is_signed(ref.dtype))

    return in_compute_dtype(read(part, start))


def _pairs(base: ir.Value, positions: Positions, elements_per_step: list[int], element: ir.Type) -> Iterator[Item]:
    """`load_affine` with `pairs`: (register, number of the element in it, loaded value) of each element of a thread."""
    vector, i32 = ir.VectorType.get((2,), element), ir.IntegerType.get_signless(32)
    bytes_of_pair = 2 * mgpu.utils.bytewidth(element)
    base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), base)
    loaded: dict[tuple[int, ...], ir.Value] = {}
    for register, item, position in positions.constants:
        if item == 0:
            offset = sum(p * s for p, s in zip(position, elements_per_step, strict=True))
            place = mgpu.utils.getelementptr(base, [offset], element)
            loaded[register] = llvm.load(vector, place, alignment=bytes_of_pair, invariant=True)
        yield register, item, llvm.extractelement(loaded[register], mgpu.c(item, i32))


def _items_of_used_rows(
    memory: ir.Value, first: ir.Value, positions: Positions, elements_per_step: list[int], used_rows: int
) -> Iterator[Item]:
    """`load_affine` with `used_rows`: (register, number of the element in it, loaded value) of each element."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    element = ir.MemRefType(memory.type).element_type
    by_row, by_column = elements_per_step[0], elements_per_step[1] if len(elements_per_step) > 1 else 0
    lanes = list(positions.lane)
    # One base address for each row of the thread.
    bases: dict[int, ir.Value] = {}
    loaded: dict[tuple[int, int], ir.Value] = {}
    for register, item, position in positions.constants:
        row, column = [*position, 0][:2]
        if row not in bases:
            number = arith.minsi(arith.addi(lanes[0], mgpu.c(row, i32)), mgpu.c(used_rows - 1, i32))
            lane = arith.addi(first, arith.muli(number, mgpu.c(by_row, i32)))
            if len(lanes) > 1:
                lane = arith.addi(lane, arith.muli(lanes[1], mgpu.c(by_column, i32)))
            bases[row] = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extsi(i64, lane)], element)
        at = (row, column * by_column)
        if at not in loaded:
            loaded[at] = _load_element(bases[row], at[1], element)
        yield register, item, loaded[at]


def _varying_part(ref: Ref, index: tuple[Index, ...], varies: tuple[bool, ...]) -> tuple[Ref, list[int]]:
    """(`ref` indexed in the dimensions that do not vary, the strides of the others in elements of the whole array)."""
    shape = ref.shape
    picked = tuple(pl.ds(0, n) if m else i for i, m, n in zip(index, varies, shape, strict=True))
    strides = [math.prod(shape[d + 1 :]) for d, m in enumerate(varies) if m]
    return (ref if all(varies) else ref.at[picked]), strides


def _load_element(base: ir.Value, offset: ir.Value | int, element: ir.Type) -> ir.Value:
    """Emits the load of the element `offset` elements after `base`; the compiler may move or repeat it."""
    pointer = mgpu.utils.getelementptr(base, [offset], element)
    return llvm.load(element, pointer, invariant=True)


# ------------------------------------------------------------------- shared memory


@device_op
def load_staged(tile: Ref) -> jax.Array:
    """A tile of a captured array, read from its slot in shared memory, after the copy has arrived."""
    # The barrier keeps the reads before the release of the slot, which TMA may then overwrite.
    return in_compute_dtype(lax.optimization_barrier(load(tile, TILE)))


@device_op
def load_staged_transposed(tile: Ref) -> jax.Array:
    """The transpose of a tile of a captured array, read from its slot in shared memory, after the copy has arrived."""
    # `ldmatrix` transposes elements of 16 bits. Those of 32 bits are read in pairs along the rows of the result, and
    # neighbouring lanes exchange them.
    if jnp.dtype(tile.dtype).itemsize == 2:
        value = load(tile.T, TILE)
    else:
        value = plgpu.layout_cast(load(tile.T, plgpu.Layout.WGMMA_TRANSPOSED), TILE)
    return in_compute_dtype(lax.optimization_barrier(value))


def in_compute_dtype(value: jax.Array) -> jax.Array:
    """The value in the dtype that tiles are computed in: float32, uint32 or int32."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    if value.dtype in (jnp.int32, jnp.uint32):
        return value
    return value.astype(jnp.int32)
