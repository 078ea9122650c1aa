"""Which elements of a tile each thread holds in its registers, and tiles and vectors built from that.

A tile is [rows, columns] in the layout of a WGMMA accumulator, rows a multiple of 64, columns of 8. A row vector has one element
for each row and the layout of a reduced tile, so that it meets the tile without moving data between threads; a column vector has
one for each column. A position of a register is a part that depends on the lane plus a constant, known when the kernel is traced.

Functions of arrays are called inside kernels of Lane semantics; functions of MLIR values inside `kernel_parts.inline_mgpu`.
Reading memory is memory.py's, arithmetic on the elements of a thread thread_tiles.py's.
"""

import typing
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Scalar, inline_mgpu, scalar_of

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)

RegisterIndex = tuple[int, ...]
"""Index of a register in `FragmentedArray.registers`."""
Item = tuple[RegisterIndex, int, ir.Value]
"""A register, the number of an element in it, and the value of that element."""


def layout_of(kind: str) -> typing.Any:
    """Register layout of a "row" vector (one number for each row), a "column" vector or a "tile"."""
    return {"row": ROW, "column": COLUMN, "tile": TILE}[kind]


def lowered(layout: typing.Any) -> mgpu.TiledLayout:
    """The layout, one of TILE, ROW and COLUMN, as Mosaic describes it inside `inline_mgpu`."""
    return layout.to_mgpu()


# ------------------------------------------------------------------- arrays


def row_iota(rows: int) -> jax.Array:
    """The row vector 0 .. rows - 1, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)


def column_iota(columns: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
    """The column vector 0 .. columns - 1."""
    numbers = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLUMN)
    return numbers.astype(dtype)


def columns_from(start: Scalar, columns: int, interpret: bool) -> jax.Array:
    """The column vector start .. start + columns - 1, int32.

    `start` is added before the constants of a thread, because `column_iota` does not change in a loop over tiles and the compiler
    would keep it in registers beside the sum.
    """
    if interpret:
        return column_iota(columns) + start

    @inline_mgpu(SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct((columns,), jnp.int32, layout=COLUMN))
    def count(first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        positions = positions_of(lowered(COLUMN), (columns,))
        base = arith.addi(scalar_of(first), positions.lane[0])
        items = ((register, item, arith.addi(base, mgpu.c(at[0], i32))) for register, item, at in positions.constants)
        return assemble(lowered(COLUMN), (columns,), items, True)

    return count(start)


def splat(value: jax.typing.ArrayLike, kind: str, shape: tuple[int, ...], interpret: bool) -> jax.Array:
    """The vector or tile of `shape` whose elements are all `value`, in the layout of `kind` ("row", "column" or "tile")."""
    full = lax.broadcast(jnp.asarray(value), shape)
    return full if interpret else plgpu.layout_cast(full, layout_of(kind))


def stretch(value: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """The tile of `shape` whose columns ("row" vectors) or rows ("column" vectors) are all `value`."""
    return lax.broadcast_in_dim(value, shape, (0,) if kind == "row" else (1,))


# ------------------------------------------------------------------- MLIR values, inside inline_mgpu


class Positions(typing.NamedTuple):
    """Where the elements that a thread holds lie in an array: `lane` plus the position in `constants`, dimension by dimension.

    lane        i32 for each dimension, different from lane to lane
    constants   (register, number of the element in it, position) of each element, positions as for lane 0 of warp 0
    """

    lane: tuple[ir.Value, ...]
    constants: list[tuple[RegisterIndex, int, tuple[int, ...]]]


def positions_of(layout: mgpu.TiledLayout, shape: tuple[int, ...]) -> Positions:
    """The positions of a thread's elements of an array of `shape` in `layout`."""
    i32 = ir.IntegerType.get_signless(32)
    contiguous = tuple(mgpu.utils.get_contiguous_strides(shape))
    strides = layout.tiling.tile_strides(contiguous)
    moving = [mgpu.c(s, i32) for s in strides[-layout.tiled_tiling_rank :]]
    flat = arith.addi(
        mgpu.utils.dyn_dot(layout.warp_indices(), moving), mgpu.utils.dyn_dot(layout.lane_indices(), moving)
    )
    lane = []
    for stride in contiguous:
        lane.append(arith.divui(flat, mgpu.c(stride, i32)))
        flat = arith.remui(flat, mgpu.c(stride, i32))
    constants = []
    for index in np.ndindex(tuple(layout.registers_shape(shape))):
        start = sum(i * s for i, s in zip(index, strides, strict=True))
        for element in range(layout.vector_length):
            position, rest = [], start + element
            for stride in contiguous:
                position.append(rest // stride)
                rest %= stride
            constants.append((index, element, tuple(position)))
    return Positions(tuple(lane), constants)


def element(register: ir.Value, number: int) -> ir.Value:
    """An element of a register, which is a vector of elements or one element."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vectors.extract(register, dynamic_position=[], static_position=[number])


def assemble(
    layout: mgpu.TiledLayout, shape: tuple[int, ...], items: Iterable[Item], signed: bool | None
) -> mgpu.FragmentedArray:
    """The array of `shape` in `layout` with these elements. `signed` is as `is_signed` gives it."""
    registers: np.ndarray = np.empty(tuple(layout.registers_shape(shape)), dtype=object)
    for index, number, value in items:
        if registers[index] is None:
            registers[index] = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), value.type))
        registers[index] = vectors.insert(value, registers[index], dynamic_position=[], static_position=[number])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def is_signed(dtype: jax.typing.DTypeLike) -> bool | None:
    """Whether an integer dtype is signed, False for bool, None for floats: what FragmentedArray asks for."""
    dtype = jnp.dtype(dtype)
    return None if jnp.issubdtype(dtype, jnp.floating) else jnp.issubdtype(dtype, jnp.signedinteger)
