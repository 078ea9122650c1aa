"""2^x of a tile of scores, for a share of the elements as a polynomial instead of the `ex2` instruction.

An SM computes 16 exponentials (or tanh) a clock and 128 multiplications. Where exponentials bound a kernel, it computes
a share of them by FMAs, as FlashAttention-4 does on Blackwell:

    2^x = 2^n * 2^r     n = round(x), by adding and subtracting 1.5 * 2^23;  r = x - n in [-1/2, 1/2]
    2^r = 1 + r (c1 + r (c2 + r (c3 + r c4)))         relative error 2.9e-6
    2^n                 n added to the exponent bits

x is clamped to -127 from below, where the result is exactly 0. NaN gives NaN or a number near 1e38.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import vector as vectors

from flexjax.backends.mosaic_gpu.machine.kernel_parts import inline_mgpu
from flexjax.backends.mosaic_gpu.machine.registers import TILE
from flexjax.backends.mosaic_gpu.machine.simulator import device_op

COEFFICIENTS = (0.6931242346763611, 0.24024099111557007, 0.05590631067752838, 0.00958279613405466)
"""c1 to c4: the float32 polynomial with value 1 at 0 whose largest relative error on [-1/2, 1/2] is smallest."""
ROUNDING_SHIFT = 1.5 * 2.0**23  # a float32 this large has no bits below 1, so adding it rounds x to an integer
LOWEST = -127.0  # from here on down the polynomial gives exactly 0
MANTISSA_BITS = 23  # bits of a float32 below its exponent
GROUP = 8  # shares are counted in eighths


@device_op
def exp2_tile(x: jax.Array, share: int) -> jax.Array:
    """2^x for x up to 127; of every eight registers of a thread, the first `share` by the polynomial."""
    if not share:
        return jnp.exp2(x)

    @inline_mgpu(TILE, returns=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE))
    def powers(tile: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        out = np.empty_like(tile.registers)
        for number, (index, register) in enumerate(np.ndenumerate(tile.registers)):
            power_of_two = _exp2_by_polynomial if number % GROUP < share else exp2_by_instruction
            for element in range(ir.VectorType(register.type).shape[0]):
                value = vectors.extract(register, dynamic_position=[], static_position=[element])
                register = vectors.insert(power_of_two(value), register, dynamic_position=[], static_position=[element])
            out[index] = register
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return powers(x)


def exp2_polynomial(x: jax.Array) -> jax.Array:
    """`_exp2_by_polynomial` in jax.numpy, for the simulator and tests, without FMAs."""
    x = jnp.maximum(x, np.float32(LOWEST))
    shifted = lax.optimization_barrier(x + np.float32(ROUNDING_SHIFT))  # XLA would cancel the two additions
    r = x - (shifted - np.float32(ROUNDING_SHIFT))
    value = jnp.full_like(r, COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], 1.0):
        value = value * r + np.float32(c)
    bits = lax.bitcast_convert_type(value, jnp.int32) + (lax.bitcast_convert_type(shifted, jnp.int32) << MANTISSA_BITS)
    return lax.bitcast_convert_type(bits, jnp.float32)


def exp2_by_instruction(x: ir.Value) -> ir.Value:
    """2^x of an f32 by the `ex2` instruction, which flushes denormals to 0; inside `inline_mgpu`."""
    return typing.cast(ir.Value, llvm.inline_asm(x.type, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


def _exp2_by_polynomial(x: ir.Value) -> ir.Value:
    """2^x of an f32 up to 127 by the polynomial at the top of this file; inside `inline_mgpu`."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    number = lambda value: mgpu.c(float(value), f32)
    x = arith.maximumf(x, number(LOWEST))
    shifted = arith.addf(x, number(ROUNDING_SHIFT))
    r = arith.subf(x, arith.subf(shifted, number(ROUNDING_SHIFT)))
    value = number(COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], 1.0):
        value = typing.cast(ir.Value, llvm.intr_fma(value, r, number(c)))
    power = arith.shli(arith.bitcast(i32, shifted), mgpu.c(MANTISSA_BITS, i32))
    return arith.bitcast(f32, arith.addi(arith.bitcast(i32, value), power))
