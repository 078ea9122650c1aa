"""How the mma.sync kernels write tiles: from registers to global memory, without rows that do not exist.

A lane holds two neighbouring columns of 16 bits of every eight. Four lanes that share a row exchange them for eight
neighbouring ones of every 32, so that a store has 16 bytes. Tiles of other columns are stored four bytes at a time.
"""

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.mma_products import WarpPlace
from flexjax.backends.mosaic_gpu.machine.registers import TILE
from flexjax.backends.mosaic_gpu.machine.shared_memory import swizzle_bytes
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

LANES = 4  # lanes that share a row of a tile


@device_op
def write_rows(tile: jax.Array, target: Ref, rows: Scalar | None, half: Scalar | None = None) -> None:
    """Writes the warpgroup's tile of 16-bit elements, [rows, columns], from registers to `target` in global memory.

    rows   how many rows of the tile exist, the only ones to be written. None: all
    half   which half of the columns of `target` the tile is (`mma_products.half_piece`), 0 or 1; None: all of them
    """
    (height, width), (target_rows, target_columns) = tile.shape, target.shape
    pieces = 1 if half is None else 2 * target_columns // swizzle_bytes(target_columns, 2)
    piece, every = width // pieces, target_columns // pieces  # columns of a warp in each piece, and of all warps

    def write(tile: mgpu.FragmentedArray, target: ir.Value, *scalars: mgpu.FragmentedArray) -> None:
        """Emits the stores of one thread; `scalars` are how many rows exist and which half, where they are given."""
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        constant = lambda n: mgpu.c(n, i32)
        strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
        pitch = 2 * strides[0]
        words = tile.registers.reshape(height // 64, width // 8, 2)
        words = [[[mgpu.utils.bitcast(x, i32) for x in pair] for pair in row] for row in words]
        thread = mgpu.utils.thread_idx()
        lane = arith.andi(thread, constant(LANES - 1))
        place = WarpPlace.of(target_rows, target_columns, None if half is None else scalar_of(scalars[-1]))
        row = arith.addi(place.row, arith.andi(arith.shrui(thread, constant(2)), constant(7)))
        wide = piece % 32 == 0
        offset = arith.addi(arith.muli(row, constant(pitch)), arith.muli(lane, constant(16 if wide else 4)))
        offset = arith.addi(offset, arith.muli(place.chunk, constant(16)))
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(target))
        base = mgpu.utils.getelementptr(base, [arith.extui(i64, offset)], ir.IntegerType.get_signless(8))
        for m in range(height // 64):
            for side in range(2):
                first = place.row_step * m + 8 * side
                own = [words[m][n][side] for n in range(width // 8)]
                stores = []
                for n in range(0, width // 8, LANES if wide else 1):
                    value = own[n] if not wide else _joined(_exchanged(own[n : n + LANES], lane))
                    column = 8 * n // piece * every + 8 * n % piece
                    stores.append((first * pitch + 2 * column, value))
                if rows is not None:
                    exists = arith.cmpi(
                        arith.CmpIPredicate.slt, arith.addi(row, constant(first)), scalar_of(scalars[0])
                    )
                    with mgpu.when(exists):
                        _store(base, stores)
                else:
                    _store(base, stores)

    scalars = [x for x in (rows, half) if x is not None]
    inline_mgpu(TILE, plgpu.RefType(), *[SCALAR_LAYOUT] * len(scalars))(write)(tile, target, *scalars)


def _store(base: ir.Value, stores: list[tuple[int, ir.Value]]) -> None:
    for offset, value in stores:
        llvm.store(value, mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8)))


def _exchanged(own: list[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """The transpose over four lanes: lane l gets element l of the lanes 0 to 3, where each lane gives four i32."""
    values = list(own)
    # In two rounds lanes at distance 1 and 2 exchange the halves that the other is to have.
    for distance in (1, 2):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, mgpu.c(distance, lane.type)), mgpu.c(0, lane.type))
        for n in range(LANES):
            if n & distance:
                continue
            low, high = values[n], values[n + distance]
            received = mgpu.utils.shfl_bfly(arith.select(upper, low, high), distance)
            values[n] = arith.select(upper, received, low)
            values[n + distance] = arith.select(upper, high, received)
    return values


def _joined(words: list[ir.Value]) -> ir.Value:
    joined = llvm.mlir_undef(ir.VectorType.get((LANES,), words[0].type))
    for n, word in enumerate(words):
        joined = vectors.insert(word, joined, dynamic_position=[], static_position=[n])
    return joined
