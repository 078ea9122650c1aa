"""How the mma.sync kernels write tiles: from registers to global memory, without rows that do not exist.

A lane holds two neighbouring columns of 16 bits of every eight. Four lanes that share a row exchange them for eight neighbouring ones of
every 32, so that a store has 16 bytes. Tiles whose columns are no multiple of 32 are stored four bytes at a time.
"""

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.registers import TILE

LANES = 4
"""Lanes that share a row of a tile."""


def write_rows(tile: jax.Array, target: Ref, rows: Scalar | None, interpret: bool) -> None:
    """Writes the calling warpgroup's tile of 16-bit elements from registers to global memory.

    tile     [rows, columns], 16 bits, rows a multiple of 64, columns of 8
    target   [rows, columns] in global memory; it may reach past the end of the array
    rows     how many rows of the tile exist, counted from its first; the others are not written. None: all exist. The
             simulator writes all rows in either case, because its arrays are padded
    """
    if interpret:
        target[...] = tile
        return
    height, width = tile.shape

    def write(tile: mgpu.FragmentedArray, target: ir.Value, *limit: mgpu.FragmentedArray) -> None:
        """Emits the stores of one thread.

        tile     its registers of the tile
        target   memref of the rows in global memory
        limit    how many rows exist, where that is given
        """
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        constant = lambda n: mgpu.c(n, i32)
        strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
        pitch = 2 * strides[0]
        words = tile.registers.reshape(height // 64, width // 8, 2)
        words = [[[mgpu.utils.bitcast(x, i32) for x in pair] for pair in row] for row in words]
        thread = mgpu.utils.thread_idx()
        lane = arith.andi(thread, constant(LANES - 1))
        warp = arith.andi(arith.shrui(thread, constant(5)), constant(3))
        row = arith.addi(arith.muli(warp, constant(16)), arith.andi(arith.shrui(thread, constant(2)), constant(7)))
        wide = width % 32 == 0
        offset = arith.addi(arith.muli(row, constant(pitch)), arith.muli(lane, constant(16 if wide else 4)))
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(target))
        base = mgpu.utils.getelementptr(base, [arith.extui(i64, offset)], ir.IntegerType.get_signless(8))
        for m in range(height // 64):
            for half in range(2):
                first = 64 * m + 8 * half
                own = [words[m][n][half] for n in range(width // 8)]
                stores = []
                for n in range(0, width // 8, LANES if wide else 1):
                    value = own[n] if not wide else _joined(_exchanged(own[n : n + LANES], lane))
                    stores.append((first * pitch + 16 * n, value))
                if limit:
                    exists = arith.cmpi(arith.CmpIPredicate.slt, arith.addi(row, constant(first)), scalar_of(limit[0]))
                    with mgpu.when(exists):
                        _store(base, stores)
                else:
                    _store(base, stores)

    types = (TILE, plgpu.RefType())
    if rows is None:
        inline_mgpu(*types)(write)(tile, target)
    else:
        inline_mgpu(*types, SCALAR_LAYOUT)(write)(tile, target, rows)


def _store(base: ir.Value, stores: list[tuple[int, ir.Value]]) -> None:
    """Emits stores of (bytes after the pointer `base`, value)."""
    for offset, value in stores:
        llvm.store(value, mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8)))


def _exchanged(own: list[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """The transpose over four lanes: lane l gets element l of the lanes 0 to 3, where each lane gives four i32.

    own    this lane's elements
    lane   its number, an i32 from 0 to 3

    In two rounds lanes at distance 1 and 2 exchange the halves that the other is to have.
    """
    values = list(own)
    for distance in (1, 2):
        upper = arith.cmpi(
            arith.CmpIPredicate.ne,
            arith.andi(lane, mgpu.c(distance, lane.type)),
            mgpu.c(0, lane.type),
        )
        for n in range(LANES):
            if n & distance:
                continue
            low, high = values[n], values[n + distance]
            received = mgpu.utils.shfl_bfly(arith.select(upper, low, high), distance)
            values[n] = arith.select(upper, received, low)
            values[n + distance] = arith.select(upper, high, received)
    return values


def _joined(words: list[ir.Value]) -> ir.Value:
    """A vector of four i32, made of `words`."""
    joined = llvm.mlir_undef(ir.VectorType.get((LANES,), words[0].type))
    for n, word in enumerate(words):
        joined = vectors.insert(word, joined, dynamic_position=[], static_position=[n])
    return joined
