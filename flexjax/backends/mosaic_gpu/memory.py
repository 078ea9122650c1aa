"""How a warpgroup reads captured arrays into the registers of a tile.

A tile is [rows, cols] in the layout of the wgmma accumulator. Every thread knows which elements it holds as
`lane part + constant`, so an array that the program walks affinely (row, column, tile and diagonal loads, whatever the
strides) costs one base address a row and constant offsets after that; two elements of one diagonal are one load. All
other reads gather by an array of indices. Nothing here checks bounds: callers clamp where a tile hangs over.

Lane semantics. In the simulator (`interpret`) the same functions read the whole array and index its value.
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
Ref = typing.Any


def layout_of(kind: str) -> typing.Any:
    """Register layout of a "row" vector (one number a row), a "column" vector or a "tile"."""
    return {"row": ROW, "column": COLUMN, "tile": TILE}[kind]


def kernel_operand(array: jax.Array) -> jax.Array:
    """A captured array as a kernel takes it: booleans as int8, a scalar as [1]."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int8)
    return array.reshape(1) if array.ndim == 0 else array


def output(shape: tuple[int, ...], dtype: typing.Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel returns. Inside shard_map it differs from shard to shard as `like`, one of its operands, does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def row_iota(rows: int, dtype: typing.Any = jnp.int32) -> jax.Array:
    return plgpu.broadcasted_iota(dtype, (rows,), 0, layout=ROW)


def column_iota(cols: int, dtype: typing.Any = jnp.int32) -> jax.Array:
    numbers = plgpu.broadcasted_iota(jnp.int32, (cols,), 0, layout=COLUMN)
    return numbers.astype(dtype)


def splat(value: typing.Any, kind: str, shape: tuple[int, ...], interpret: bool) -> jax.Array:
    """A scalar at the rank of `kind`."""
    full = lax.broadcast(jnp.asarray(value), shape)
    return full if interpret else plgpu.layout_cast(full, layout_of(kind))


def stretch(value: jax.Array, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """A row or column vector as a tile."""
    return lax.broadcast_in_dim(value, shape, (0,) if kind == "row" else (1,))


class Places(typing.NamedTuple):
    """Where the elements of a thread's registers lie: lane part (i32 values) plus constants per register element."""

    lane: tuple[ir.Value, ...]
    constants: list[tuple[tuple[int, ...], int, tuple[int, ...]]]  # register index, element in it, position


def places_of(layout: typing.Any, shape: tuple[int, ...]) -> Places:
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
    return Places(tuple(lane), constants)


def assemble(layout: typing.Any, shape: tuple[int, ...], items: typing.Any, signed: bool | None) -> typing.Any:
    """A FragmentedArray from an iterable of (register index, element, value)."""
    registers = typing.cast(typing.Any, np.empty(tuple(layout.registers_shape(shape)), dtype=object))
    for index, element, value in items:
        if registers[index] is None:
            registers[index] = llvm.mlir_undef(ir.VectorType.get((layout.vector_length,), value.type))
        registers[index] = vectors.insert(value, registers[index], dynamic_position=[], static_position=[element])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def signed(dtype: typing.Any) -> bool | None:
    """Of integers and booleans, None for floats."""
    dtype = jnp.dtype(dtype)
    return None if jnp.issubdtype(dtype, jnp.floating) else jnp.issubdtype(dtype, jnp.signedinteger)


def _element_load(base: ir.Value, offset: ir.Value | int, element: ir.Type) -> ir.Value:
    pointer = mgpu.utils.getelementptr(base, [offset], element)
    return llvm.load(element, pointer, invariant=True)


def _widen(value: jax.Array) -> jax.Array:
    """To the type that tiles compute in: float32, int32 or uint32."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    if value.dtype in (jnp.int32, jnp.uint32):
        return value
    return value.astype(jnp.int32)


def _remaining(ref: Ref, index: tuple[typing.Any, ...], moving: tuple[bool, ...]) -> tuple[Ref, list[int]]:
    """The part of the array that the moving dimensions span, and the stride of each in elements."""
    shape = ref.shape
    picked = tuple(pl.ds(0, n) if m else i for i, m, n in zip(index, moving, shape, strict=True))
    strides = [math.prod(shape[d + 1 :]) for d, m in enumerate(moving) if m]
    return (ref if all(moving) else ref.at[picked]), strides


def columns_from(start: jax.Array, columns: int, interpret: bool) -> jax.Array:
    """int32 [columns], `start` and up. The start goes in first: numbers of the columns without it do not change in a loop, and
    would be kept in registers beside."""
    if interpret:
        return column_iota(columns) + start

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()),),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.int32, layout=COLUMN),
    )
    def count(_: typing.Any, first: typing.Any) -> typing.Any:
        i32 = ir.IntegerType.get_signless(32)
        places = places_of(COLUMN.to_mgpu(), (columns,))
        base = arith.addi(first.registers.flat[0], places.lane[0])
        items = ((register, item, arith.addi(base, mgpu.c(at[0], i32))) for register, item, at in places.constants)
        return assemble(COLUMN.to_mgpu(), (columns,), items, True)

    return count(start)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def load_scalar(ref: Ref, index: tuple[typing.Any, ...]) -> jax.Array:
    return _widen(ref[index or (0,)])


def gather(
    ref: Ref, index: tuple[jax.Array, ...], moving: tuple[bool, ...], kind: str, shape: tuple[int, ...], interpret: bool
) -> jax.Array:
    """ref[index], where the moving index arrays have `shape` (that of `kind`) and the others are scalars."""
    vectors = [i for i, m in zip(index, moving, strict=True) if m]
    if interpret:
        return _widen(ref[...][tuple(jnp.broadcast_to(i, shape) for i in index)])
    part, strides = _remaining(ref, index, moving)
    offset = sum((v * np.int32(s) if s != 1 else v) for v, s in zip(vectors, strides, strict=True))
    layout = layout_of(kind)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout)
    )
    def read(_: typing.Any, memory: ir.Value, offsets: typing.Any) -> typing.Any:
        # Known to be global memory, addresses take fewer registers; but what is known of their alignment is lost, by which
        # `load_affine` reads two numbers at once.
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(memory))
        element = ir.MemRefType(memory.type).element_type
        i64 = ir.IntegerType.get_signless(64)

        def load(place: ir.Value, _: typing.Any) -> ir.Value:
            return _element_load(base, arith.extui(i64, place), element)

        return offsets.foreach(load, create_array=True, is_signed=signed(ref.dtype))

    return _widen(read(part, offset))  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def load_affine(
    ref: Ref,
    index: tuple[jax.Array, ...],
    steps: tuple[tuple[int, int] | None, ...],
    kind: str,
    shape: tuple[int, ...],
    interpret: bool,
) -> jax.Array:
    """ref at `index` (scalars: the indices of the tile's first element) moving by `steps` (per row, per column)."""
    if interpret:
        rows = jnp.arange(shape[0])
        cols = jnp.arange(shape[-1])
        row = {"row": rows, "column": 0, "tile": rows[:, None]}[kind]
        col = {"row": 0, "column": cols, "tile": cols[None, :]}[kind]
        full = [i if s is None else i + s[0] * row + s[1] * col for i, s in zip(index, steps, strict=True)]
        full = [jnp.clip(i, 0, n - 1) for i, n in zip(full, ref.shape, strict=True)]
        return _widen(ref[...][tuple(jnp.broadcast_to(i, shape) for i in full)])
    moving = tuple(s is not None for s in steps)
    part, strides = _remaining(ref, index, moving)
    starts = [jnp.asarray(i, jnp.int32) for i, m in zip(index, moving, strict=True) if m]
    start = sum((i * np.int32(s) for i, s in zip(starts, strides, strict=True)), np.int32(0))
    walk = [sum(s[d] * stride for s, stride in zip(filter(None, steps), strides, strict=True)) for d in (0, 1)]
    walk = {"row": walk[:1], "column": walk[1:], "tile": walk}[kind]
    layout = layout_of(kind)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
    )
    def read(_: typing.Any, memory: ir.Value, first: typing.Any) -> typing.Any:
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        element = ir.MemRefType(memory.type).element_type
        places = places_of(layout.to_mgpu(), shape)
        lane = first.registers.flat[0]
        for part_of_lane, step in zip(places.lane, walk, strict=True):
            lane = arith.addi(lane, arith.muli(part_of_lane, mgpu.c(step, i32)))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.extsi(i64, lane)], element)
        known: dict[int, ir.Value] = {}

        def values() -> typing.Iterator[tuple[tuple[int, ...], int, ir.Value]]:
            for register, item, position in places.constants:
                offset = sum(p * s for p, s in zip(position, walk, strict=True))
                if offset not in known:
                    known[offset] = _element_load(base, offset, element)
                yield register, item, known[offset]

        return assemble(layout.to_mgpu(), shape, values(), signed(ref.dtype))

    return _widen(read(part, start))  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def element(register: typing.Any, item: int) -> ir.Value:
    if not isinstance(register.type, ir.VectorType):
        return register
    return vectors.extract(register, dynamic_position=[], static_position=[item])


def slot_of(number: jax.Array, slots: int) -> jax.Array:
    """Of a ring of slots, that of what comes as `number`, which is not negative."""
    return number & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(number, jnp.int32(slots))


def staged_memory(slots: int, shape: tuple[int, int], dtype: typing.Any) -> typing.Any:
    """Shared memory for `slots` tiles of a captured array, swizzled as the layout of the scores reads it best."""
    wide = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, wide)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]  # jax 0.11: concrete, whatever its base class says
    return plgpu.SMEM((slots, *shape), jnp.dtype(dtype), transforms=transforms)


def load_staged(tile: Ref, interpret: bool) -> jax.Array:
    """A tile out of shared memory. The reads stand before whatever is done next: a barrier that gives the slot back is passed
    in their order, and the copy that refills it begins after that."""
    if interpret:
        return _widen(tile[...])
    value = plgpu.load(tile, layout=TILE)  # pyright: ignore[reportCallIssue]  # jax 0.11: the index is part of the reference
    return _widen(lax.optimization_barrier(value))


def load_staged_transposed(tile: Ref, interpret: bool) -> jax.Array:
    """The transpose of a tile in shared memory, read like `load_staged`: 16 bits a number by the matrix load that transposes,
    32 bits in pairs along the rows of the result, which neighbouring lanes exchange."""
    if interpret:
        return _widen(tile[...].T)
    if jnp.dtype(tile.dtype).itemsize == 2:
        value = plgpu.load(tile.T, layout=TILE)  # pyright: ignore[reportCallIssue]  # jax 0.11: the index is part of the reference
    else:
        value = plgpu.load(tile.T, layout=plgpu.Layout.WGMMA_TRANSPOSED)  # pyright: ignore[reportCallIssue]  # jax 0.11: the index is part of the reference
        value = plgpu.layout_cast(value, TILE)
    return _widen(lax.optimization_barrier(value))
