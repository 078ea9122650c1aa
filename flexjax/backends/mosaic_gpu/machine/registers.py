"""Which elements of a tile each thread holds in its registers, and tiles and vectors built from that.

A tile is [rows, columns] in the layout of a WGMMA accumulator, rows a multiple of 64, columns of 8. A row vector has
one element for each row and the layout of a tile reduced over its columns, so that it is combined with a tile without
moving data between threads; a column vector has one element for each column. The position (row, column) of an element
that a thread holds is a part that depends on the lane and warp plus a constant that is known when the kernel is traced.

Functions of arrays are called inside kernels; functions of MLIR values inside `kernel_parts.inline_mgpu`.
"""

import functools
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

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)

RegisterIndex = tuple[int, ...]  # index of a register in `FragmentedArray.registers`
Item = tuple[RegisterIndex, int, ir.Value]  # a register, the number of an element in it, and the value of that element
Element = tuple[RegisterIndex, int, tuple[int, ...]]
"""A register, the number of an element in it, and the position of that element as the first thread has it."""


def layout_of(kind: str) -> typing.Any:
    """The register layout of a "row" vector (one number for each row of a tile), a "column" vector or a "tile"."""
    return {"row": ROW, "column": COLUMN, "tile": TILE}[kind]


def lowered(layout: typing.Any) -> mgpu.TiledLayout:
    """The layout in the class by which Mosaic describes it inside `inline_mgpu`."""
    return layout.to_mgpu()


# ------------------------------------------------------------------- arrays


def row_iota(rows: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)


def zero_tile(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def column_iota(columns: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
    numbers = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLUMN)
    return numbers.astype(dtype)


@device_op
def columns_from(start: Scalar, columns: int) -> jax.Array:
    """The column vector start .. start + columns - 1, int32."""

    @inline_mgpu(SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct((columns,), jnp.int32, layout=COLUMN))
    def count(first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        positions = positions_of(lowered(COLUMN), (columns,))
        # `first` is added before the constants: the compiler would keep numbers that do not change in a loop over tiles
        # in registers, beside the sums.
        base = arith.addi(scalar_of(first), positions.lane[0])
        items = ((register, item, arith.addi(base, mgpu.c(at[0], i32))) for register, item, at in positions.constants)
        return assemble(lowered(COLUMN), (columns,), items, True)

    return count(start)


@device_op
def splat(value: jax.typing.ArrayLike, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """The vector or tile of `shape` whose elements are all `value`, in the layout of `kind`."""
    full = lax.broadcast(jnp.asarray(value), shape)
    return plgpu.layout_cast(full, layout_of(kind))


def broadcast_vector(value: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """A tile whose every column is a "row" vector, or whose every row is a "column" vector."""
    return lax.broadcast_in_dim(value, shape, (0,) if kind == "row" else (1,))


# ------------------------------------------------------------------- MLIR values, inside inline_mgpu


class Positions(typing.NamedTuple):
    """Where the elements that a thread holds lie in an array: `lane` plus the constant of the element."""

    lane: tuple[ir.Value, ...]  # i32 for each dimension, which differ between the threads of a warpgroup
    constants: tuple[Element, ...]  # as the first thread has them


def positions_of(layout: mgpu.TiledLayout, shape: tuple[int, ...]) -> Positions:
    """The positions of a thread's elements of an array of `shape`; emits the instructions that compute `lane`."""
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
    return Positions(tuple(lane), _constants_of(layout, shape))


@functools.cache
def _constants_of(layout: mgpu.TiledLayout, shape: tuple[int, ...]) -> tuple[Element, ...]:
    contiguous = tuple(mgpu.utils.get_contiguous_strides(shape))
    strides = layout.tiling.tile_strides(contiguous)
    constants = []
    for index in np.ndindex(tuple(layout.registers_shape(shape))):
        start = sum(i * s for i, s in zip(index, strides, strict=True))
        for element in range(layout.vector_length):
            position, rest = [], start + element
            for stride in contiguous:
                position.append(rest // stride)
                rest %= stride
            constants.append((index, element, tuple(position)))
    return tuple(constants)


def element(register: ir.Value, number: int) -> ir.Value:
    """Element `number` of a register, which is an MLIR vector of elements or one element."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vectors.extract(register, dynamic_position=[], static_position=[number])


def assemble(
    layout: mgpu.TiledLayout, shape: tuple[int, ...], items: Iterable[Item], signed: bool | None
) -> mgpu.FragmentedArray:
    """The array of `shape` made of one thread's elements, undefined where missing; `signed` is that of `is_signed`."""
    registers: np.ndarray = np.empty(tuple(layout.registers_shape(shape)), dtype=object)
    for index, number, value in items:
        if registers[index] is None:
            registers[index] = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), value.type))
        registers[index] = vectors.insert(value, registers[index], dynamic_position=[], static_position=[number])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def is_signed(dtype: jax.typing.DTypeLike) -> bool | None:
    """Whether an integer dtype is signed, False for bool, None for floats, as FragmentedArray takes it."""
    dtype = jnp.dtype(dtype)
    return None if jnp.issubdtype(dtype, jnp.floating) else jnp.issubdtype(dtype, jnp.signedinteger)
