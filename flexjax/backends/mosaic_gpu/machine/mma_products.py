"""Products by mma.sync: left operand from shared memory or from registers, right operand from shared memory.

    product_transposed(left, right)          left right^T             scores, dP: both in shared memory, D contiguous
    add_product(total, weights, right)       total + weights right    P V, dQ, dK, dV: `weights` a tile in registers
    add_half(total, weights, right, half)    the same for half of the columns, with `weights` in shared memory

Tiles in registers have the layout of a WGMMA accumulator (registers.py), which is also that of mma.sync when the four
warps of a warpgroup lie along the rows. So whatever evaluates mods on tiles serves both families, and weights that were
computed as a tile are fragments of a left operand as they are:

    mma.m16n8k16    C: rows r, r + 8; columns 2 c, 2 c + 1    A: rows r, r + 8; columns 2 c + 0, 1, 8, 9

    lane l: r = l / 4, c = l % 4. Two neighbouring fragments of C, converted to 16 bits, are one fragment of A.

Fragments come from shared memory by ldmatrix, four 8 x 8 matrices at a time. A warp has 16 rows of every 64; with 128
rows a fragment of the right operand serves two mma.sync; with 64 rows the reads of shared memory take as long as the
products. A product sums over its inner dimension in steps of K = 16: the loads and mma.sync of a step are emitted
together, and ptxas interleaves the steps. No function has a barrier: the caller waits for the operands.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.machine.allocation import swizzled
from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.registers import TILE, lowered
from flexjax.backends.mosaic_gpu.machine.shared_memory import swizzle_bytes
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

K = 16  # length of the sum of one mma.sync with operands of 16 bits
WARPGROUP_ROWS = 64  # rows of a tile that the four warps of a warpgroup compute with one mma.sync each

Fragment = Sequence[ir.Value]
"""The registers of an operand of an mma.sync in a thread: 4 i32 of a left, 2 i32 of a right one, 4 f32 of a sum."""


@device_op
def product_transposed(left: Ref, right: Ref) -> jax.Array:
    """left right^T, [M, N] float32, for left [M, D] and right [N, D] of 16 bits; 64 divides M, 16 divides N and D."""
    (rows, depth), columns = left.shape, right.shape[0]
    dtype = _ptx_dtype(left.dtype)

    @inline_mgpu(
        _swizzled(left), _swizzled(right), returns=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=TILE)
    )
    def multiply(left: ir.Value, right: ir.Value) -> mgpu.FragmentedArray:
        a, b = SharedTile.of(left, depth, _left_lanes(own_rows=True)), SharedTile.of(right, depth, _right_lanes())
        sums = Sums.zero(rows, columns)
        for k in range(0, depth, K):
            lefts = [a.load(m, k) for m in range(0, rows, WARPGROUP_ROWS)]
            for n in range(0, columns, 16):
                found = b.load(n, k)
                sums.add(lefts, [found[:2], found[2:]], n // 8, dtype)
        return sums.tile()

    return multiply(left, right)


@device_op
def add_product(total: jax.Array, weights: jax.Array, right: Ref) -> jax.Array:
    """total + weights right, float32, for weights [M, k] and right [k, N] of 16 bits; 64 divides M, 16 k and N."""
    (rows, depth), columns = weights.shape, right.shape[1]
    dtype = _ptx_dtype(right.dtype)

    @inline_mgpu(
        TILE, TILE, _swizzled(right), returns=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=TILE)
    )
    def multiply(total: mgpu.FragmentedArray, weights: mgpu.FragmentedArray, right: ir.Value) -> mgpu.FragmentedArray:
        b = SharedTile.of(right, columns, _left_lanes(own_rows=False))
        sums = Sums.of(total)
        for k in range(0, depth, K):
            lefts = [_left_fragment(weights, m, k) for m in range(0, rows, WARPGROUP_ROWS)]
            for n in range(0, columns, 16):
                found = b.load(k, n, transposed=True)
                sums.add(lefts, [found[:2], found[2:]], n // 8, dtype)
        return sums.tile()

    return multiply(total, weights, right)


@device_op
def add_half(total: jax.Array, weights: Ref, right: Ref, half: Scalar) -> jax.Array:
    """total + weights right for one half of the columns, in `half_shape`; 64 divides M, 16 divides k, 32 divides N."""
    (rows, depth), columns = weights.shape, right.shape[1]
    dtype, shape = _ptx_dtype(right.dtype), half_shape(rows, columns)
    pairs = warps_in_pairs(rows, columns)
    piece = half_piece(columns) // (2 if pairs else 1)  # neighbouring columns of a warp
    every = swizzle_bytes(columns, 2) // 2  # columns from a piece of a warp to the next one

    @inline_mgpu(
        TILE,
        _swizzled(weights),
        _swizzled(right),
        SCALAR_LAYOUT,
        returns=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE),
    )
    def multiply(
        total: mgpu.FragmentedArray, weights: ir.Value, right: ir.Value, half: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        place = WarpPlace.of(rows, columns, scalar_of(half))
        all_lanes = _left_lanes(own_rows=False)
        a = SharedTile.of(weights, depth, all_lanes._replace(row8=arith.addi(all_lanes.row8, place.row)))
        b = SharedTile.of(right, columns, all_lanes._replace(chunk=arith.addi(all_lanes.chunk, place.chunk)))
        sums = Sums.of(total)
        for k in range(0, depth, K):
            lefts = [a.load(m * place.row_step, k) for m in range(shape[0] // WARPGROUP_ROWS)]
            for n in range(0, shape[1], 16):
                found = b.load(k, n // piece * every + n % piece, transposed=True)
                sums.add(lefts, [found[:2], found[2:]], n // 8, dtype)
        return sums.tile()

    return multiply(total, weights, right, half)


def half_piece(columns: int) -> int:
    """Neighbouring columns of 16 bits of one half, which is half of every swizzled piece (one bit of an address)."""
    return swizzle_bytes(columns, 2) // 4


def warps_in_pairs(rows: int, columns: int) -> bool:
    """Whether each warp has 32 rows and half the columns of a half, which halves its reads of the right operand."""
    return rows == WARPGROUP_ROWS and half_piece(columns) == 32


@device_op
def half_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the tile that holds one warpgroup's half of a gradient, [rows, columns]."""
    if warps_in_pairs(rows, columns):
        # Rows 0 .. 63 and 64 .. 127 are the first and the second 16 rows of each warp.
        return 2 * rows, columns // 4
    return rows, columns // 2


class WarpPlace(typing.NamedTuple):
    """Which part of a gradient, or of one half of it, a warp computes; i32 inside `inline_mgpu`."""

    row: ir.Value  # its first row
    chunk: ir.Value  # its first 8 columns in every piece, counted in 8 columns
    row_step: int  # rows from its first 16 to its next 16

    @classmethod
    def of(cls, rows: int, columns: int, half: ir.Value | None) -> "WarpPlace":
        """The place of the thread's warp in half number `half` of a gradient, [rows, columns]; None: in all columns."""
        c = lambda n: mgpu.c(n, ir.IntegerType.get_signless(32))
        warp = arith.andi(arith.shrui(mgpu.utils.thread_idx(), c(5)), c(3))
        if half is None:
            return cls(arith.muli(warp, c(16)), c(0), WARPGROUP_ROWS)
        chunk = arith.muli(half, c(half_piece(columns) // 8))
        if not warps_in_pairs(rows, columns):
            return cls(arith.muli(warp, c(16)), chunk, WARPGROUP_ROWS)
        chunk = arith.addi(chunk, arith.muli(arith.shrui(warp, c(1)), c(half_piece(columns) // 16)))
        return cls(arith.muli(arith.andi(warp, c(1)), c(32)), chunk, 16)


# ------------------------------------------------------------------- shared memory


def _swizzled(ref: Ref) -> plgpu.RefType:
    """The type by which `inline_mgpu` takes `ref`, which is SwizzledTiles of 16-bit elements."""
    return plgpu.RefType(swizzled(ref.shape[-1], 2))


class Lanes(typing.NamedTuple):
    """Where a lane reads its row of 8 elements for an ldmatrix, from the corner of the 16 x 16 elements on; i32."""

    row8: ir.Value  # offset in rows, a multiple of 8
    inner: ir.Value  # row within the 8
    chunk: ir.Value  # which 8 elements of the row: 0 or 1


def _left_lanes(own_rows: bool) -> Lanes:
    """The lanes of a left operand: matrices (rows 0, chunk 0), (rows 8, chunk 0), (rows 0, chunk 1), (rows 8, chunk 1).

    own_rows   each warp has its own 16 rows; else all read the same, as for a right operand that is read transposed
    """
    c = lambda n: mgpu.c(n, ir.IntegerType.get_signless(32))
    thread = mgpu.utils.thread_idx()
    lane = arith.andi(thread, c(31))
    row8 = arith.andi(lane, c(8))
    if own_rows:
        warp = arith.andi(arith.shrui(thread, c(5)), c(3))
        row8 = arith.addi(row8, arith.muli(warp, c(16)))
    return Lanes(row8, arith.andi(lane, c(7)), arith.shrui(lane, c(4)))


def _right_lanes() -> Lanes:
    """The lanes of a right operand whose sum runs along the row: `_left_lanes` with the middle matrices exchanged."""
    c = lambda n: mgpu.c(n, ir.IntegerType.get_signless(32))
    lane = arith.andi(mgpu.utils.thread_idx(), c(31))
    row8 = arith.shrui(arith.andi(lane, c(16)), c(1))
    return Lanes(row8, arith.andi(lane, c(7)), arith.andi(arith.shrui(lane, c(3)), c(1)))


@dataclasses.dataclass
class SharedTile:
    """A swizzled tile in shared memory, for the ldmatrix of one thread.

    Chunk n of row r, 16 bytes, is stored as chunk n ^ (r % 8) of its piece (with smaller swizzles n ^ (r % 8 / 2) or n
    ^ (r % 8 / 4)). A constant chunk is an XOR with a constant, all else an offset of the instruction.
    """

    columns: int
    lane: ir.Value  # i32 address of the lane's chunk in the first piece
    turned: dict[int, ir.Value]  # chunk within a piece -> pointer to it

    @classmethod
    def of(cls, memory: ir.Value, columns: int, lanes: Lanes) -> "SharedTile":
        """The tile in the memref `memory`, of `columns` elements of 16 bits; emits the lane's part of addresses."""
        i32 = ir.IntegerType.get_signless(32)
        c = lambda n: mgpu.c(n, i32)
        swizzle = swizzle_bytes(columns, 2)
        key = arith.shrui(lanes.inner, c({128: 0, 64: 1, 32: 2}[swizzle]))
        offset = arith.addi(
            arith.muli(lanes.row8, c(2 * columns)),
            arith.addi(arith.muli(lanes.inner, c(swizzle)), arith.muli(arith.xori(lanes.chunk, key), c(16))),
        )
        start = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(memory))
        return cls(columns, arith.addi(start, offset), {})

    def load(self, row: int, column: int, transposed: bool = False) -> Fragment:
        """Emits the ldmatrix of the 16 x 16 elements from (row, column) on; returns its four i32."""
        swizzle = swizzle_bytes(self.columns, 2)
        chunks = swizzle // 16
        piece, chunk = divmod(column // 8, chunks)
        if chunk not in self.turned:
            address = self.lane
            if chunk:
                address = arith.xori(address, mgpu.c(16 * chunk, ir.IntegerType.get_signless(32)))
            self.turned[chunk] = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
        offset = row * 2 * self.columns + piece * 8 * swizzle
        pointer = mgpu.utils.getelementptr(self.turned[chunk], [offset], ir.IntegerType.get_signless(8))
        found = nvvm.ldmatrix(
            pointer,
            num=4,
            layout=nvvm.MMALayout.col if transposed else nvvm.MMALayout.row,
            shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
            elt_type=nvvm.LdStMatrixEltType.B16,
        )
        return [llvm.extractvalue(ir.IntegerType.get_signless(32), found, [n]) for n in range(4)]


# ------------------------------------------------------------------- registers


def _left_fragment(tile: mgpu.FragmentedArray, row: int, column: int) -> Fragment:
    """The left operand of an mma.sync: 64 rows from `row` on and 16 columns from `column` on of a 16-bit tile."""
    rows, columns = tile.shape
    registers = tile.registers.reshape(rows // WARPGROUP_ROWS, columns // 8, 2)
    m, n = row // WARPGROUP_ROWS, column // 8
    i32 = ir.IntegerType.get_signless(32)
    return [mgpu.utils.bitcast(registers[m, n + side, half], i32) for side in (0, 1) for half in (0, 1)]


@dataclasses.dataclass
class Sums:
    """The sums of a product while it is emitted: one thread's float32 registers of a tile."""

    shape: tuple[int, int]
    values: list[list[Fragment]]  # [rows / 64, columns / 8]

    @classmethod
    def zero(cls, rows: int, columns: int) -> "Sums":
        zero: ir.Value = mgpu.c(0.0, ir.F32Type.get())
        values: list[list[Fragment]] = [
            [[zero, zero, zero, zero] for _ in range(columns // 8)] for _ in range(rows // WARPGROUP_ROWS)
        ]
        return cls((rows, columns), values)

    @classmethod
    def of(cls, tile: mgpu.FragmentedArray) -> "Sums":
        """The sums that begin with the elements of a float32 tile."""
        rows, columns = tile.shape
        registers = tile.registers.reshape(rows // WARPGROUP_ROWS, columns // 8, 2)
        take = lambda pair: [vectors.extract(pair, dynamic_position=[], static_position=[n]) for n in range(2)]
        values: list[list[Fragment]] = [
            [take(registers[m, n, 0]) + take(registers[m, n, 1]) for n in range(columns // 8)]
            for m in range(rows // WARPGROUP_ROWS)
        ]
        return cls((rows, columns), values)

    def add(self, lefts: list[Fragment], rights: list[Fragment], column: int, dtype: str) -> None:
        """Adds the products of lefts, one for each 64 rows, with rights, of fragment columns from `column` on."""
        for m, left in enumerate(lefts):
            for n, right in enumerate(rights):
                self.values[m][column + n] = _mma(self.values[m][column + n], left, right, dtype)

    def tile(self) -> mgpu.FragmentedArray:
        layout = lowered(TILE)
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        pairs = []
        for row in self.values:
            for four in row:
                for half in (four[:2], four[2:]):
                    pair = llvm.mlir_undef(pair_type)
                    for n, value in enumerate(half):
                        pair = vectors.insert(value, pair, dynamic_position=[], static_position=[n])
                    pairs.append(pair)
        registers = np.empty(len(pairs), dtype=object)
        registers[:] = pairs
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(self.shape)), _layout=layout, _is_signed=None
        )


def _mma(total: Fragment, left: Fragment, right: Fragment, dtype: str) -> Fragment:
    """Emits one mma.sync: total + left right, for operands of `dtype` as PTX names it."""
    f32 = ir.F32Type.get()
    found = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*left, *right, *total],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
    )
    assert isinstance(found, ir.Value)
    return [llvm.extractvalue(f32, found, [n]) for n in range(4)]


def _ptx_dtype(dtype: jax.typing.DTypeLike) -> str:
    """The dtype of 16 bits as PTX names it; KeyError for others."""
    return {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
