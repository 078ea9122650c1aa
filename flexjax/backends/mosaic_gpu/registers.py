"""Which elements of a tile each thread holds in its registers, and tiles and vectors built from that.

A tile is [rows, columns] in the layout of a WGMMA accumulator, rows a multiple of 64, columns of 8. A row vector has
one element for each row and the layout of a tile reduced over its columns, so that it is combined with a tile without
moving data between threads; a column vector has one element for each column. The position (row, column) of an element that a
thread holds is a part that depends on the lane and warp of the thread plus a constant that is known when the kernel
is traced.

Functions of arrays are called inside kernels of Lane semantics; functions of MLIR values inside
`kernel_parts.inline_mgpu`, where a FragmentedArray has the registers that one thread holds of an array. memory.py
reads memory, thread_tiles.py does arithmetic on the elements of a thread.
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

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Scalar, inline_mgpu, scalar_of

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)

RegisterIndex = tuple[int, ...]
"""Index of a register in `FragmentedArray.registers`."""
Item = tuple[RegisterIndex, int, ir.Value]
"""A register, the number of an element in it, and the value of that element."""
Element = tuple[RegisterIndex, int, tuple[int, ...]]
"""A register, the number of an element in it, and the position of that element as the first thread has it."""


def layout_of(kind: str) -> typing.Any:
    """The register layout, a `plgpu.Layout` or one reduced over an axis, of `kind`: a "row" vector (one number for each
    row of a tile), a "column" vector (one for each column) or a "tile".
    """
    return {"row": ROW, "column": COLUMN, "tile": TILE}[kind]


def lowered(layout: typing.Any) -> mgpu.TiledLayout:
    """The layout, one of TILE, ROW and COLUMN, in the class by which Mosaic describes it inside `inline_mgpu`."""
    return layout.to_mgpu()


# ------------------------------------------------------------------- arrays


def row_iota(rows: int) -> jax.Array:
    """The row vector 0 .. rows - 1, int32."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)


def zero_tile(shape: tuple[int, int]) -> jax.Array:
    """A tile of zeros, float32; `shape` is (rows, columns)."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def column_iota(columns: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
    """The column vector 0 .. columns - 1 in `dtype`."""
    numbers = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=COLUMN)
    return numbers.astype(dtype)


def columns_from(start: Scalar, columns: int, interpret: bool) -> jax.Array:
    """The column vector start .. start + columns - 1, int32.

    On the device `start` is added before the constants of a thread, because `column_iota` does not change in a loop
    over tiles and the compiler would keep it in registers beside the sum. The simulator adds `start` to `column_iota`.
    """
    if interpret:
        return column_iota(columns) + start

    @inline_mgpu(SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct((columns,), jnp.int32, layout=COLUMN))
    def count(first: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the column vector first, first + 1, ..., int32; `first` is an i32."""
        i32 = ir.IntegerType.get_signless(32)
        positions = positions_of(lowered(COLUMN), (columns,))
        base = arith.addi(scalar_of(first), positions.lane[0])
        items = ((register, item, arith.addi(base, mgpu.c(at[0], i32))) for register, item, at in positions.constants)
        return assemble(lowered(COLUMN), (columns,), items, True)

    return count(start)


def splat(value: jax.typing.ArrayLike, kind: str, shape: tuple[int, ...], interpret: bool) -> jax.Array:
    """The vector or tile of `shape` whose elements are all the scalar `value`, in the layout of `kind` ("row",
    "column" or "tile").
    """
    full = lax.broadcast(jnp.asarray(value), shape)
    return full if interpret else plgpu.layout_cast(full, layout_of(kind))


def broadcast_vector(value: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """A tile whose every column is a row vector, or whose every row is a column vector; in the dtype of the vector.

    value   row vector [rows] or column vector [columns] of any dtype
    kind    which of the two it is, "row" or "column"
    shape   of the tile, (rows, columns)
    """
    return lax.broadcast_in_dim(value, shape, (0,) if kind == "row" else (1,))


# ------------------------------------------------------------------- MLIR values, inside inline_mgpu


class Positions(typing.NamedTuple):
    """Where the elements that a thread holds lie in an array: `lane` plus the constant of the element, dimension by
    dimension.

    lane        an i32 for each dimension, which differs between the threads of a warpgroup
    constants   for each element that a thread holds: index of its register, number of the element within the
                register, and its position (one int for each dimension) as the first thread has it
    """

    lane: tuple[ir.Value, ...]
    constants: tuple[Element, ...]


def positions_of(layout: mgpu.TiledLayout, shape: tuple[int, ...]) -> Positions:
    """The positions of a thread's elements of an array of `shape` in `layout`, for use inside `inline_mgpu`.

    It emits the instructions that compute `Positions.lane`; the constants are Python ints.
    """
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
    """`Positions.constants` of an array of `shape` in `layout`. A kernel asks for those of few shapes, each about ten times."""
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
    """Element `number` of a register, which is an MLIR vector of elements; the register itself if it is one element."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vectors.extract(register, dynamic_position=[], static_position=[number])


def assemble(
    layout: mgpu.TiledLayout, shape: tuple[int, ...], items: Iterable[Item], signed: bool | None
) -> mgpu.FragmentedArray:
    """The array of `shape` in `layout`, made of the elements that one thread holds. A register that gets only some of
    its elements has undefined others.

    items    (index of a register, number of an element in it, value) for each element of the thread
    signed   what `is_signed` gives for the dtype
    """
    registers: np.ndarray = np.empty(tuple(layout.registers_shape(shape)), dtype=object)
    for index, number, value in items:
        if registers[index] is None:
            registers[index] = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), value.type))
        registers[index] = vectors.insert(value, registers[index], dynamic_position=[], static_position=[number])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def is_signed(dtype: jax.typing.DTypeLike) -> bool | None:
    """Whether an integer dtype is signed, False for bool, None for floats: the form in which FragmentedArray takes
    it.
    """
    dtype = jnp.dtype(dtype)
    return None if jnp.issubdtype(dtype, jnp.floating) else jnp.issubdtype(dtype, jnp.signedinteger)
