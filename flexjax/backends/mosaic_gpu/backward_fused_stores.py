"""How the fused backward kernel writes tiles from the registers of WGMMA to shared memory, where the compiler would move registers first.

A thread holds four registers of each 16 columns of a 16-bit tile, in the order of an operand of WGMMA: rows 0 to 7 and 8 to 15 of the
warp's 16 rows for the first 8 columns, then for the last 8. Of a float32 accumulator it holds four of each 8 columns: two columns of its
first row, then of its second. Both functions write these four registers with one instruction, as they are.

Used by backward_sm90_fused.py with the choices `backward_ds_operand` and `backward_dq_fragments` of untimed.py.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from flexjax.backends.mosaic_gpu.kernel_parts import Ref, inline_mgpu
from flexjax.backends.mosaic_gpu.registers import TILE, lowered, positions_of
from flexjax.backends.mosaic_gpu.sm80_products import swizzled

ROWS, PIECE = 64, 64
"""Rows of a tile, and columns of a swizzled piece of 8 rows: 128 bytes of a 16-bit dtype."""
LANES, THREADS = 32, 128
"""Of a warp, and of a warpgroup."""


def write_operand(tile: jax.Array, target: Ref, interpret: bool) -> None:
    """Writes a tile of a 16-bit dtype to shared memory by stmatrix, from the registers of a left operand of WGMMA in their order.

    tile     [ROWS, columns], columns a multiple of PIECE
    target   [ROWS, columns] in shared memory, swizzled over 128 bytes
    """
    if interpret:
        target[...] = tile
        return
    shape = tile.shape

    @inline_mgpu(TILE, plgpu.RefType(swizzled(PIECE, 2)))
    def store(array: mgpu.FragmentedArray, memory: ir.Value) -> None:
        """Stores the registers of one thread. Lane 8 n + r of a warp addresses row r of the n-th of the four 8 x 8 matrices of an
        instruction: rows 8 (n % 2) and columns 8 (n // 2) on.
        """
        i32 = ir.IntegerType.get_signless(32)
        c = lambda n: mgpu.c(n, i32)
        thread = arith.remui(mgpu_utils.thread_idx(), c(THREADS))
        lane, warp = arith.remui(thread, c(LANES)), arith.divui(thread, c(LANES))
        row, matrix = arith.remui(lane, c(8)), arith.divui(lane, c(8))
        below, right = arith.remui(matrix, c(2)), arith.divui(matrix, c(2))
        group = arith.addi(arith.muli(warp, c(2)), below)  # of 8 rows
        pieces = shape[1] // PIECE
        start = arith.addi(arith.muli(group, c(pieces * 8 * 128)), arith.muli(row, c(128)))
        start = arith.addi(start, arith.muli(arith.xori(right, row), c(16)))
        registers = _by_position(array, shape)
        base = mgpu_utils.memref_ptr(memory)
        for pair in range(PIECE // 16):  # of the 16-byte parts of a row of a piece
            first = arith.xori(start, c(pair * 32))
            for piece in range(pieces):
                column = piece * PIECE + pair * 16
                four = [registers[n, column + m] for m in (0, 8) for n in (0, 8)]
                place = arith.addi(first, c(piece * 8 * 128))
                nvvm.stmatrix(
                    mgpu_utils.getelementptr(base, [place], ir.IntegerType.get_signless(8)),
                    [mgpu_utils.bitcast(register, i32) for register in four],
                    nvvm.MMALayout.row,
                    ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
                    nvvm.LdStMatrixEltType.B16,
                )

    store(tile, target)


def write_fragments(tile: jax.Array, target: Ref, interpret: bool) -> None:
    """Writes a float32 accumulator to shared memory in the order of its registers (`in_fragments`), 16 bytes a thread at once.

    tile     [ROWS, columns]
    target   [ROWS, columns] in shared memory in row-major order, whose numbers are written in another order
    """
    if interpret:
        target[...] = in_fragments(tile)
        return
    shape = tile.shape

    @inline_mgpu(TILE, plgpu.RefType())
    def store(array: mgpu.FragmentedArray, memory: ir.Value) -> None:
        """Stores the registers of one thread: those of columns 8 n to 8 n + 7 as its 16 bytes of the n-th 2048."""
        i32 = ir.IntegerType.get_signless(32)
        f32 = ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(THREADS, i32))
        registers = _by_position(array, shape)
        base = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(memory), [arith.muli(thread, mgpu.c(4, i32))], f32)
        vector = ir.VectorType.get((4,), f32)
        for column in range(0, shape[1], 8):
            four = llvm.mlir_undef(vector)
            for n in range(4):
                pair = registers[8 * (n // 2), column]
                item = llvm.extractelement(pair, mgpu.c(n % 2, i32))
                four = llvm.insertelement(four, item, mgpu.c(n, i32))
            llvm.store(four, mgpu_utils.getelementptr(base, [column // 8 * THREADS * 4], f32))

    store(tile, target)


def in_fragments(tile: jax.Array) -> jax.Array:
    """A tile as `write_fragments` writes it: its numbers by groups of 8 columns, then warps of 16 rows, rows and pairs of columns of a
    thread, and the two rows and two columns of a thread, in the shape of the tile, [ROWS, columns].
    """
    parts = tile.reshape(ROWS // 16, 2, 8, -1, 4, 2)  # warp, row of a thread, row of a warp, group, pair, column
    return parts.transpose(3, 0, 2, 4, 1, 5).reshape(tile.shape)


def from_fragments(tiles: jax.Array) -> jax.Array:
    """The inverse of `in_fragments`, for tiles [..., GROUPS * ROWS, columns], each ROWS rows of which are one tile."""
    lead, (rows, columns) = tiles.shape[:-2], tiles.shape[-2:]
    parts = tiles.reshape(*lead, rows // ROWS, columns // 8, ROWS // 16, 8, 4, 2, 2)
    n = len(lead) + 1
    order = (*range(n), n + 1, n + 4, n + 2, n, n + 3, n + 5)
    return jnp.transpose(parts, order).reshape(tiles.shape)


def _by_position(array: mgpu.FragmentedArray, shape: tuple[int, ...]) -> dict[tuple[int, ...], ir.Value]:
    """The registers that a thread holds of a tile, each two columns, by (row, column) of the first thread's first element."""
    found = {}
    for register, item, position in positions_of(lowered(TILE), shape).constants:
        if item == 0:
            found[position] = array.registers[register]
    return found
