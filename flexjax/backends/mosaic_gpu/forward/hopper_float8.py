"""The products of float8 in the forward kernel for Hopper: their operands, of which the weights are one.

    S = Q K^T     both operands from shared memory, as for 16 bits: [tokens, head dim]
    O = P V       P from registers, V from shared memory as [value dim, keys]: WGMMA transposes no operands of 8 bits

A thread holds other columns of an accumulator (S) than of a left operand of 8 bits (P). Of every 16 keys the first
thread of a row has

    keys 0 1 8 9      of S
    columns 0 1 2 3   of P

and likewise the other three. So a thread puts its four numbers into one word, and `key_major`, which makes V key-major,
also permutes V's keys among 16 into the order of P's columns. Nothing moves between threads.

Tiles of V may have columns of ones (`ForwardTile.sum_columns`), in which P V sums the rounded weights. Dividing by
these sums cancels the rounding of a weight that dominates its row, and no thread adds weights.

WGMMA adds products of float8 with about 14 bits and cuts off the rest: thousands of weights that add to one number lose
percents of it. So it adds those of one tile of keys, and the tiles are added in float32.

Weights are rounded to float8, whose largest number is 448 and whose smallest normal number is 2^-6. References of the
softmax therefore lie LIFT powers of two below the maximum (online_softmax.py): the largest weight of a row is between
2^LIFT and 448, because a reference rises where a maximum exceeds it by more than RISE.
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.machine.allocation import swizzled
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, inline_mgpu, pad
from flexjax.backends.mosaic_gpu.machine.registers import TILE, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP
from flexjax.plan.kernel_plan import FLOAT8

LIFT = 7.0  # powers of two from the reference of a row up to its maximum
RISE = math.log2(float(jnp.finfo(jnp.float8_e4m3fn).max)) - LIFT
"""Powers of two by which a maximum may exceed the one that the reference follows; weights stay at most 448."""
GROUP = 16  # keys among which the order of P's columns differs from that of S's
WORD = (0, 1, 8, 9)  # the keys, counted from the first, whose weights a thread puts into a word
TILE_KEYS = 128
"""Keys of the longest row of V in shared memory that is swizzled as a whole; V's keys are a multiple."""
FOUR_ONES = 0x38383838  # four times 1 in float8
BYTES = plgpu.Layout.WGMMA_8BIT  # the registers of a left operand of 8 bits


def key_major(value: jax.Array, layout: str) -> jax.Array:
    """Values [B, S, M, E] or [B, M, S, E] as the kernel reads them, [B, M, E, S rounded up to TILE_KEYS].

    Key 16 a + 8 u + 2 j + w is at place 16 a + 4 j + 2 u + w, for u and w below 2 and j below 4.
    """
    tokens = 1 if layout == "BTNH" else 2
    missing = -value.shape[tokens] % TILE_KEYS
    if missing:  # apart from what follows: XLA's transposition of a padded array takes many times as long
        value = lax.optimization_barrier(pad(value, layout, value.shape[tokens] + missing, value.shape[3]))
    value = value if layout == "BNTH" else jnp.swapaxes(value, 1, 2)
    batch, heads, keys, dim = value.shape
    value = value.reshape(batch, heads, keys // GROUP, 2, 4, 2, dim)
    return value.transpose(0, 1, 6, 2, 4, 3, 5).reshape(batch, heads, dim, keys)


@device_op
def write_ones(target: Ref) -> None:
    """Writes ones to `target`, [8, keys] float8 in shared memory; the whole warpgroup calls it, then fences."""
    rows, keys = target.shape

    @inline_mgpu(plgpu.RefType(swizzled(keys, 1)))
    def fill(memory: ir.Value) -> None:
        i32 = ir.IntegerType.get_signless(32)
        base, thread = mgpu_utils.memref_ptr(memory), arith.remui(mgpu_utils.thread_idx(), mgpu.c(WARPGROUP, i32))
        # The bytes are contiguous and all the same, so the swizzle does not matter.
        for first in range(0, rows * keys // 4, WARPGROUP):
            word = arith.addi(thread, mgpu.c(first, i32))
            llvm.store(mgpu.c(FOUR_ONES, i32), mgpu_utils.getelementptr(base, [word], i32))

    fill(target)


@device_op
def weights(p: jax.Array) -> jax.Array:
    """Weights [rows, keys] float32, at most 448, as the left operand of P V, in the order of `key_major`."""

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(p.shape, jnp.dtype(FLOAT8), layout=BYTES))
    def convert(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        layout = lowered(BYTES)
        word, four = ir.IntegerType.get_signless(32), ir.VectorType.get((len(WORD),), ir.Float8E4M3FNType.get())
        found = {
            at: element(array.registers[register], item)
            for register, item, at in positions_of(lowered(TILE), p.shape).constants
        }
        registers = np.empty(tuple(layout.registers_shape(p.shape)), dtype=object)
        for register, item, (row, column) in positions_of(layout, p.shape).constants:
            if item:
                continue
            packed = llvm.inline_asm(
                word,
                [found[row, column + key] for key in WORD],
                "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
                "mov.b32 $0, {lo, hi}; }",
                "=r,f,f,f,f",
            )
            registers[register] = mgpu_utils.bitcast(typing.cast(ir.Value, packed), four)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(p)
