"""How the fused backward kernel writes a tile from the registers of WGMMA to shared memory, where the compiler would move registers first, and
how it zeroes rows of a tile.

A thread holds four registers of each 16 columns of a 16-bit tile, in the order of an operand of WGMMA: rows 0 to 7 and 8 to 15 of the
warp's 16 rows for the first 8 columns, then for the last 8. They are written with one instruction, as they are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.registers import TILE, lowered, positions_of
from flexjax.backends.mosaic_gpu.sm80_products import swizzled
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP

ROWS, PIECE = 64, 64
"""Rows of a tile, and columns of a swizzled piece of 8 rows: 128 bytes of a 16-bit dtype."""
LANES = 32
"""Of a warp."""


def write_operand(tile: jax.Array, target: Ref, interpret: bool) -> None:
    """Writes a tile of a 16-bit dtype to shared memory by stmatrix. Its layout in registers is that of a left operand of WGMMA. The whole
    warpgroup calls it, and fences before WGMMA or TMA reads the tile.

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
        thread = arith.remui(mgpu_utils.thread_idx(), c(WARPGROUP))
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


def zero_rows(tile: jax.Array, kept: Scalar, interpret: bool) -> jax.Array:
    """The tile with zeros from row number `kept` on: one select for each register, which is of one row.

    tile   [ROWS, columns] of a 16-bit dtype, in the layout of a left operand of WGMMA
    kept   may be more than ROWS, or negative
    """
    if interpret:
        index = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
        return jnp.where(index < kept, tile, jnp.zeros((), tile.dtype))

    @inline_mgpu(TILE, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def select(array: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        """One thread's registers of the result."""
        i32 = ir.IntegerType.get_signless(32)
        positions = positions_of(lowered(TILE), tile.shape)
        left = arith.subi(scalar_of(kept), positions.lane[0])
        inside = {
            n: arith.cmpi(arith.CmpIPredicate.sgt, left, mgpu.c(n, i32))
            for n in {at[0] for _, _, at in positions.constants}
        }
        registers = np.empty_like(array.registers)
        for register, item, at in positions.constants:
            if item == 0:
                held = array.registers[register]
                bits = arith.select(inside[at[0]], mgpu_utils.bitcast(held, i32), mgpu.c(0, i32))
                registers[register] = mgpu_utils.bitcast(bits, held.type)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return select(tile, kept)


def _by_position(array: mgpu.FragmentedArray, shape: tuple[int, ...]) -> dict[tuple[int, ...], ir.Value]:
    """The registers that a thread holds of a tile, each two columns, by (row, column) of the first thread's first element."""
    found = {}
    for register, item, position in positions_of(lowered(TILE), shape).constants:
        if item == 0:
            found[position] = array.registers[register]
    return found
