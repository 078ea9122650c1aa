"""How the fused kernel writes a tile from registers to shared memory, and counts additions to dQ in global memory.

A thread holds four registers of each 16 columns of a 16-bit tile, in the order of an operand of WGMMA: rows 0 to 7 and
8 to 15 of the warp's 16 rows for the first 8 columns, then for the last 8. One instruction writes them as they are; the
compiler would move registers first.
"""

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.mma_products import swizzled
from flexjax.backends.mosaic_gpu.machine.registers import TILE, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP

ROWS, PIECE = 64, 64  # rows of a tile, and columns of a swizzled piece of 8 rows: 128 bytes of a 16-bit dtype
LANES = 32  # of a warp
ONE_WARP = mgpu_utils.ThreadSubset.WARP


@device_op
def write_operand(tile: jax.Array, target: Ref) -> None:
    """The warpgroup writes a 16-bit tile, [ROWS, columns] in WGMMA's left layout, to `target`, swizzled over 128 bytes.

    The columns are a multiple of PIECE. The caller fences before WGMMA or TMA reads the tile.
    """
    shape = tile.shape

    @inline_mgpu(TILE, plgpu.RefType(swizzled(PIECE, 2)))
    def store(array: mgpu.FragmentedArray, memory: ir.Value) -> None:
        i32 = ir.IntegerType.get_signless(32)
        c = lambda n: mgpu.c(n, i32)
        thread = arith.remui(mgpu_utils.thread_idx(), c(WARPGROUP))
        lane, warp = arith.remui(thread, c(LANES)), arith.divui(thread, c(LANES))
        # lane 8 n + r addresses row r of the n-th of the four 8 x 8 matrices of an instruction
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


@device_op
def zero_rows(tile: jax.Array, kept: Scalar) -> jax.Array:
    """The tile, [ROWS, columns] in WGMMA's left layout, with zeros from row number `kept` on."""

    @inline_mgpu(TILE, SCALAR_LAYOUT, returns=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE))
    def select(array: mgpu.FragmentedArray, kept: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        positions = positions_of(lowered(TILE), tile.shape)
        # one select for each register, which is of one row
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
    """A thread's registers of a tile, two columns each, by (row, column) in the first thread."""
    found = {}
    for register, item, position in positions_of(lowered(TILE), shape).constants:
        if item == 0:
            found[position] = array.registers[register]
    return found


# ------------------------------------------------------------------- additions to dQ (machine/dq_order.py)


def wait_for_additions(counts: Ref, index: Scalar, least: Scalar) -> None:
    """The warp waits until counts[index] is at least `least`; then it sees what was written before the counts."""

    @inline_mgpu(plgpu.RefType(), SCALAR_LAYOUT)
    def wait(count: ir.Value, least: mgpu.FragmentedArray) -> None:
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(count))
        semaphore.wait(scalar_of(least), decrement=False, scope=ONE_WARP, memory_scope="gpu")

    wait(counts.at[pl.ds(index, 1)], least)


def signal_addition(counts: Ref, index: Scalar) -> None:
    """In one thread of the warp: adds one to counts[index], after the copies that the warp has waited for."""

    @inline_mgpu(plgpu.RefType())
    def signal(count: ir.Value) -> None:
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(count))
        semaphore.signal(1, mgpu_utils.single_thread_predicate(ONE_WARP), memory_scope="gpu")

    signal(counts.at[pl.ds(index, 1)])
