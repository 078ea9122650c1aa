"""Atomic additions of float32 numbers to the elements of an array that give the same bits in every order.

Each number becomes a 64-bit integer, a multiple of 2^-k, and an atomic instruction adds the integer to its element.
Integer sums do not depend on the order. k follows from `total`, a bound of the sum of all magnitudes. The sum of all
magnitudes may exceed `total` by up to a factor of four, which leaves room for rounding in `total`:

    k = 60 - e     where total < 2^e

No sum then overflows, and each number is rounded by at most 2^-60 of the total (more where the total is below 2^-66,
because k is at most 126). If `total` is not finite, all sums are NaN, because an integer cannot hold NaN or infinity.

jax has 64-bit integers only where the user enables them, so an array of sums is [size, 2] uint32, low word first. The
simulator has no atomic instructions: there every warpgroup adds to a float32 array of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from flexjax.backends.mosaic_gpu.machine.kernel_parts import SCALAR_LAYOUT, Ref, Scalar, inline_mgpu, scalar_of
from flexjax.backends.mosaic_gpu.machine.registers import TILE, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

LARGEST_POWER = 60
ROWS_OF_A_THREAD = 8
"""A thread holds rows n and n + 8 of a tile, and columns 8 apart. Two of its entries on one diagonal often add to the
same element, and are added to each other first.
"""


def power(total: jax.Array) -> jax.Array:
    """k, an int32 scalar: numbers are rounded to multiples of 2^-k. For a positive total, k = 60 - e for the smallest
    integer e with total < 2^e, but at most 126.

    total   a bound of the sum of all magnitudes, a float32 scalar, not negative. 0 gives 60, because all numbers are
            then 0. If it is
            not finite, k is that of 1, which is 59; `decoded` then makes the sums NaN
    """
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(total), total, 1.0).astype(jnp.float32))
    return jnp.clip(LARGEST_POWER - exponent, -126, 126).astype(jnp.int32)


def _power_of_two(k: jax.Array) -> jax.Array:
    """2^k in float32, exactly, for an int32 k from -126 to 127."""
    return lax.bitcast_convert_type((k + 127) << 23, jnp.float32)


def scale(total: jax.Array) -> jax.Array:
    """The factor by which each number is multiplied before it is rounded to an integer: 2^k with k = `power(total)`,
    exactly, a float32 scalar. Sums of such integers are divided by it again (`decoded`).

    total   a bound of the sum of all magnitudes, a float32 scalar. If it is 0, every number is 0, and the factor is
            2^60; if it is
            not finite, the factor is that of 1, and `decoded` makes the sums NaN
    """
    return _power_of_two(power(total))


def decoded(words: jax.Array, total: jax.Array) -> jax.Array:
    """The sums as float32, [size], from the words of their signed 64-bit integers: each integer times 2^-k with k =
    `power(total)`; NaN where `total` is not finite.

    words   [size, 2] uint32, low word first
    total   the bound for which the numbers were scaled
    """
    low, high = words[:, 0], words[:, 1]
    negative = high >> 31 == 1
    high = jnp.where(negative, ~high + (low == 0), high)
    low = jnp.where(negative, ~low + np.uint32(1), low)
    size = high.astype(jnp.float32) * np.float32(1 << 32) + low.astype(jnp.float32)
    size = size * _power_of_two(-power(total))
    return jnp.where(jnp.isfinite(total), jnp.where(negative, -size, size), jnp.nan)


@device_op
def add(sums: Ref, index: jax.Array, value: jax.Array, factor: Scalar) -> None:
    """Adds value * factor, rounded to the nearest 64-bit integer, to sums[index], inside a kernel; several elements may
    have one index. Indices are not checked.

    sums        [size, 2] uint32 in global memory; in the simulator [size] float32, to which `value` is added without
                the factor
    index       [rows, columns] int32 in the layout of the WGMMA accumulator
    value       [rows, columns] float32 in the same layout
    factor      `scale` of the total
    """

    @inline_mgpu(plgpu.RefType(), TILE, TILE, SCALAR_LAYOUT)
    def scatter(
        memory: ir.Value, indices: mgpu.FragmentedArray, values: mgpu.FragmentedArray, factor: mgpu.FragmentedArray
    ) -> None:
        """Adds the numbers that one thread holds to their elements, as 64-bit integers by atomic instructions.

        memory    the sums
        indices   registers of the element of each number
        values    registers of the numbers
        factor    what multiplies the numbers before they are rounded

        Two numbers of the thread that are 8 rows and 8 columns apart and go to one element are added to each other
        first; zeros are left out.
        """
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        base = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(memory))
        by = scalar_of(factor)
        where, what = {}, {}
        for register, item, at in positions_of(lowered(TILE), values.shape).constants:
            where[at] = element(indices.registers[register], item)
            number = arith.mulf(element(values.registers[register], item), by)
            what[at] = llvm.inline_asm(i64, [number], "cvt.rni.s64.f32 $0, $1;", "=l,f")
        zero = arith.constant(i64, 0)
        n = ROWS_OF_A_THREAD
        for row, column in sorted(where):
            after = (row + n, column + n)
            if row % (2 * n) == 0 and after in where:
                same = arith.cmpi(arith.CmpIPredicate.eq, where[row, column], where[after])
                joined = arith.addi(what[row, column], what[after])
                what[row, column] = arith.select(same, joined, what[row, column])
                what[after] = arith.select(same, zero, what[after])
        for at in sorted(where):
            offset = arith.shli(arith.extui(i64, where[at]), mgpu.c(1, i64))
            pointer = mgpu.utils.getelementptr(base, [offset], i32)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [pointer, what[at]],
                "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p red.relaxed.gpu.global.add.u64 [$0], $1; }",
                "l,l",
                has_side_effects=True,
            )

    scatter(sums, index, value, factor)
