"""Converts the 8-bit numbers of a tile of a quantised cache to 16-bit floats within shared memory.

TMA copies a tile as rows of bytes. A warpgroup reads sixteen bytes of a row at a time, widens them in registers and
writes them in the layout of WGMMA: pieces of 8 rows and 64 columns, 1024 bytes, in which 16-byte part n of row r is at
place n XOR r (the 128-byte swizzle). No number is rounded, because 16-bit floats hold all of 8 bits.

Widening is bit arithmetic on two numbers in 32 bits, because converting instructions are slow:

    int8 -> bfloat16      0x4300 | x is 128 + x for x of seven bits; the sign bit, taken apart, says whether to subtract
                          128 or 256
    int8 -> float16       0x6400 | (x ^ 0x80) is 1152 + x
    float8 -> bfloat16    exponent and mantissa moved to where the wider ones are, times 2^120, the difference of the
                          exponents' biases
    float8 -> float16     the same with 2^8

The two patterns of float8_e4m3fn that are no numbers come out as 480 and -480; `append` stores them for NaN alone.
"""

import typing

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.decode import fragments as decode_fragments
from flexjax.backends.mosaic_gpu.decode.bytes import MlirOps
from flexjax.backends.mosaic_gpu.machine.allocation import swizzled
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, inline_mgpu
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP

PIECE = 64  # columns of a swizzled piece of 8 rows: 128 bytes of a 16-bit dtype
SWIZZLE = swizzled(PIECE, 2)


@device_op
def widen(source: Ref, target: Ref, stored: str, dtype: str) -> None:
    """Writes the numbers of `source` as 16-bit floats to `target`, swizzled over 128 bytes.

    `source` is [rows, columns] int8, row-major in shared memory, the bytes of numbers of the dtype `stored`; columns
    are a multiple of 64. A whole warpgroup calls it, and `plgpu.commit_smem` before WGMMA reads `target`.
    """
    rows, columns = source.shape

    @inline_mgpu(plgpu.RefType(), plgpu.RefType(SWIZZLE))
    def copy(narrow: ir.Value, wide: ir.Value) -> None:
        i32, vector, ops = _i32(), ir.VectorType.get((4,), _i32()), MlirOps()
        given, made = mgpu_utils.memref_ptr(narrow), mgpu_utils.memref_ptr(wide)
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(WARPGROUP, i32))
        # eight neighbouring threads take two neighbouring rows, so that they write to different banks of shared memory
        of_eight = arith.remui(thread, mgpu.c(8, i32))
        side, part = arith.divui(of_eight, mgpu.c(4, i32)), arith.remui(of_eight, mgpu.c(4, i32))
        pieces = columns // PIECE
        for n in range(rows * columns // 16 // WARPGROUP):
            group = arith.addi(arith.divui(thread, mgpu.c(8, i32)), mgpu.c(n * WARPGROUP // 8, i32))
            piece = arith.remui(group, mgpu.c(pieces, i32))
            row = _sum(_times(arith.divui(group, mgpu.c(pieces, i32)), 2), side)
            words = llvm.load(vector, _at(given, _sum(_times(row, columns), _times(piece, PIECE), _times(part, 16))))
            pairs = [pair for word in _elements(words) for pair in decode_fragments.widened(ops, word, stored, dtype)]
            inside = arith.remui(row, mgpu.c(8, i32))
            tile = _sum(_times(arith.divui(row, mgpu.c(8, i32)), pieces), piece)
            base = _sum(_times(tile, 1024), _times(inside, 128))
            for half in range(2):
                place = arith.xori(_sum(_times(part, 2), mgpu.c(half, i32)), inside)
                llvm.store(_vector(pairs[4 * half : 4 * half + 4]), _at(made, _sum(base, _times(place, 16))))

    copy(source, target)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _times(x: ir.Value, factor: int) -> ir.Value:
    return arith.muli(x, mgpu.c(factor, _i32()))


def _sum(*terms: ir.Value) -> ir.Value:
    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total


def _at(base: ir.Value, offset: ir.Value) -> ir.Value:
    i64, i8 = (ir.IntegerType.get_signless(n) for n in (64, 8))
    return mgpu_utils.getelementptr(base, [arith.extui(i64, offset)], i8)


def _elements(vector: ir.Value) -> list[ir.Value]:
    return [llvm.extractelement(vector, mgpu.c(n, _i32())) for n in range(4)]


def _vector(elements: typing.Sequence[ir.Value]) -> ir.Value:
    made = llvm.mlir_undef(ir.VectorType.get((4,), _i32()))
    for n, element in enumerate(elements):
        made = llvm.insertelement(made, element, mgpu.c(n, _i32()))
    return made
