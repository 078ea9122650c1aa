"""How a warpgroup reads captured arrays into the registers of a tile.

There are three ways to read global memory and one to read shared memory:

- `load_scalar`: one element, the same for the whole tile;
- `load_affine`: each index is a constant plus multiples of the row and the column. The address of every element is a base
  address of the thread plus a constant, and elements of a thread that have one address, as on a diagonal, are loaded once;
- `gather`: indices are arrays in registers, each element has its own address;
- `load_staged`: a tile that TMA has copied to shared memory (staging.py).

Results are float32, int32 or uint32 in the layouts of registers.py. Nothing here checks bounds on the device: callers clamp the
indices of tiles that extend past the end of the attention matrix. In the simulator (`interpret`) the same functions read the whole
array and index its value.
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

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, load, scalar_of
from flexjax.backends.mosaic_gpu.registers import (
    TILE,
    Item,
    assemble,
    is_signed,
    layout_of,
    lowered,
    positions_of,
)

Index = jax.typing.ArrayLike
"""An index of one dimension: a number, a scalar of the kernel, or in `gather` an int32 vector or tile."""


def kernel_operand(array: jax.Array) -> jax.Array:
    """A captured array as kernels take it: booleans as int8, a scalar as [1]."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int8)
    return array.reshape(1) if array.ndim == 0 else array


# ------------------------------------------------------------------- global memory


def load_scalar(ref: Ref, index: tuple[Index, ...]) -> Scalar:
    """ref[index], one element; `index` is () for a captured scalar, which kernels take as [1]."""
    return _widen(ref[index or (0,)])


def gather(
    ref: Ref, index: tuple[Index, ...], moving: tuple[bool, ...], kind: str, shape: tuple[int, ...], interpret: bool
) -> jax.Array:
    """ref[index] at each element of a vector or tile.

    index    an int32 array of `shape` for each dimension that is `moving`, a scalar for every other one
    kind     "row", "column" or "tile", whose layout index arrays and result have
    """
    if interpret:
        return _widen(ref[...][tuple(jnp.broadcast_to(i, shape) for i in index)])
    index_arrays = [jnp.asarray(i) for i, m in zip(index, moving, strict=True) if m]
    part, strides = _part_of_moving(ref, index, moving)
    offset = sum((v * np.int32(s) if s != 1 else v) for v, s in zip(index_arrays, strides, strict=True))
    layout = layout_of(kind)

    @inline_mgpu(plgpu.RefType(), layout, returns=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout))
    def read(memory: ir.Value, offsets: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        # The cast says that addresses are in global memory, which takes fewer registers. `load_affine` does without it, because
        # LLVM would lose their alignment and no longer load two neighbouring elements at once.
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(memory))
        element = ir.MemRefType(memory.type).element_type
        i64 = ir.IntegerType.get_signless(64)

        def read_one(place: ir.Value, _: object) -> ir.Value:
            return _load_element(base, arith.extui(i64, place), element)

        found = offsets.foreach(read_one, create_array=True, is_signed=is_signed(ref.dtype))
        assert found is not None
        return found

    return _widen(read(part, offset))


def load_affine(
    ref: Ref,
    index: tuple[Index, ...],
    steps: tuple[tuple[int, int] | None, ...],
    kind: str,
    shape: tuple[int, ...],
    interpret: bool,
) -> jax.Array:
    """ref at indices that are affine in the row and the column: index + steps[0] * row + steps[1] * column in each dimension.

    index    indices of the first element of the vector or tile, scalars
    steps    for each dimension (change from row to row, from column to column); None: the index is the same everywhere
    kind     "row", "column" or "tile"; a vector uses its own part of the steps
    shape    of the result
    """
    if interpret:
        rows = jnp.arange(shape[0])
        columns = jnp.arange(shape[-1])
        row = {"row": rows, "column": 0, "tile": rows[:, None]}[kind]
        column = {"row": 0, "column": columns, "tile": columns[None, :]}[kind]
        full = [i if s is None else i + s[0] * row + s[1] * column for i, s in zip(index, steps, strict=True)]
        full = [jnp.clip(i, 0, n - 1) for i, n in zip(full, ref.shape, strict=True)]
        return _widen(ref[...][tuple(jnp.broadcast_to(i, shape) for i in full)])
    moving = tuple(s is not None for s in steps)
    part, strides = _part_of_moving(ref, index, moving)
    starts = [jnp.asarray(i, jnp.int32) for i, m in zip(index, moving, strict=True) if m]
    start = sum((i * np.int32(s) for i, s in zip(starts, strides, strict=True)), np.int32(0))
    # Elements of memory from one row of the tile to the next, and from one column to the next.
    walk = [sum(s[d] * stride for s, stride in zip(filter(None, steps), strides, strict=True)) for d in (0, 1)]
    walk = {"row": walk[:1], "column": walk[1:], "tile": walk}[kind]
    layout = layout_of(kind)

    @inline_mgpu(plgpu.RefType(), SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout))
    def read(memory: ir.Value, first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        element = ir.MemRefType(memory.type).element_type
        positions = positions_of(lowered(layout), shape)
        lane = scalar_of(first)
        for part_of_lane, step in zip(positions.lane, walk, strict=True):
            lane = arith.addi(lane, arith.muli(part_of_lane, mgpu.c(step, i32)))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extsi(i64, lane)], element)
        loaded: dict[int, ir.Value] = {}

        def items() -> Iterator[Item]:
            for register, item, position in positions.constants:
                offset = sum(p * s for p, s in zip(position, walk, strict=True))
                if offset not in loaded:
                    loaded[offset] = _load_element(base, offset, element)
                yield register, item, loaded[offset]

        return assemble(lowered(layout), shape, items(), is_signed(ref.dtype))

    return _widen(read(part, start))


def _part_of_moving(ref: Ref, index: tuple[Index, ...], moving: tuple[bool, ...]) -> tuple[Ref, list[int]]:
    """The part of an array that remains when the dimensions that are not moving are indexed, and the stride of each moving
    dimension in elements."""
    shape = ref.shape
    picked = tuple(pl.ds(0, n) if m else i for i, m, n in zip(index, moving, shape, strict=True))
    strides = [math.prod(shape[d + 1 :]) for d, m in enumerate(moving) if m]
    return (ref if all(moving) else ref.at[picked]), strides


def _load_element(base: ir.Value, offset: ir.Value | int, element: ir.Type) -> ir.Value:
    """The element `offset` elements after `base`, in memory that the kernel does not write."""
    pointer = mgpu.utils.getelementptr(base, [offset], element)
    return llvm.load(element, pointer, invariant=True)


# ------------------------------------------------------------------- shared memory


def load_staged(tile: Ref, interpret: bool) -> jax.Array:
    """A tile from shared memory in registers.

    The optimization barrier keeps the reads in front of the arrival at the barrier that releases the slot: TMA may overwrite
    the slot after that.
    """
    if interpret:
        return _widen(tile[...])
    return _widen(lax.optimization_barrier(load(tile, TILE)))


def load_staged_transposed(tile: Ref, interpret: bool) -> jax.Array:
    """The transpose of a tile in shared memory, otherwise like `load_staged`.

    Elements of 16 bits are read by `ldmatrix`, which transposes. Elements of 32 bits are read in pairs along the rows of the
    result, and neighbouring lanes exchange them.
    """
    if interpret:
        return _widen(tile[...].T)
    if jnp.dtype(tile.dtype).itemsize == 2:
        value = load(tile.T, TILE)
    else:
        value = plgpu.layout_cast(load(tile.T, plgpu.Layout.WGMMA_TRANSPOSED), TILE)
    return _widen(lax.optimization_barrier(value))


def _widen(value: jax.Array) -> jax.Array:
    """The value in the dtype that tiles are computed in: float32, int32 or uint32."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    if value.dtype in (jnp.int32, jnp.uint32):
        return value
    return value.astype(jnp.int32)
