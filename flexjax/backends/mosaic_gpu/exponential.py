"""Powers of two of a tile, part of them as polynomials.

The unit for exponentials (and for tanh) takes 16 numbers a clock; the units for multiplication take 128. Where exponentials
bound a kernel, some of them are better multiplied out, as FlashAttention-4 does on Blackwell:

    2^x = 2^n * 2^r     n = round(x), by adding and subtracting 1.5 * 2^23;  r = x - n in [-1/2, 1/2]
    2^r = 1 + r (c1 + r (c2 + r (c3 + r c4)))         relative error 2.9e-6
    2^n                 n added to the exponent bits

x is cut off at -127, which gives exactly 0: what a mask switched off stays off. NaN gives a number of the order of 1e38, or NaN:
never one that looks like a weight.
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

from flexjax.backends.mosaic_gpu.memory import TILE

# Least largest relative error on [-1/2, 1/2] with the value 1 at 0, in float32.
COEFFICIENTS = (0.6931242346763611, 0.24024099111557007, 0.05590631067752838, 0.00958279613405466)
ROUNDS = 1.5 * 2.0**23
"""A float32 this large has no bits below 1."""
LOWEST = -127.0
MANTISSA = 23
GROUP = 8
"""Shares are counted in eighths."""


def exp2_tile(x: jax.Array, share: int, interpret: bool) -> jax.Array:
    """2**x of a float32 tile [rows, columns]; of every eight pairs of numbers that a thread holds, `share` by polynomial."""
    if not share:
        return jnp.exp2(x)
    if interpret:
        chosen = jnp.arange(x.shape[1]) // 2 % GROUP < share
        return jnp.where(chosen[None, :], polynomial(x), jnp.exp2(x))

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE))
    def powers(_: typing.Any, tile: typing.Any) -> typing.Any:
        out = np.empty_like(tile.registers)
        for number, (index, register) in enumerate(np.ndenumerate(tile.registers)):
            one = _by_polynomial if number % GROUP < share else _by_unit
            for element in range(ir.VectorType(register.type).shape[0]):
                value = vectors.extract(register, dynamic_position=[], static_position=[element])
                register = vectors.insert(one(value), register, dynamic_position=[], static_position=[element])
            out[index] = register
        return mgpu.FragmentedArray(_registers=out, _layout=tile.layout, _is_signed=None)

    return powers(x)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def polynomial(x: jax.Array) -> jax.Array:
    """2**x for float32 x up to 127, as the kernel computes it."""
    x = jnp.maximum(x, np.float32(LOWEST))
    shifted = lax.optimization_barrier(x + np.float32(ROUNDS))  # XLA would cancel the two additions
    r = x - (shifted - np.float32(ROUNDS))
    value = jnp.full_like(r, COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], 1.0):
        value = value * r + np.float32(c)
    bits = lax.bitcast_convert_type(value, jnp.int32) + (lax.bitcast_convert_type(shifted, jnp.int32) << MANTISSA)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _by_unit(x: ir.Value) -> ir.Value:
    return typing.cast(ir.Value, llvm.inline_asm(x.type, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


def _by_polynomial(x: ir.Value) -> ir.Value:
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    number = lambda value: mgpu.c(float(value), f32)
    x = arith.maximumf(x, number(LOWEST))
    shifted = arith.addf(x, number(ROUNDS))
    r = arith.subf(x, arith.subf(shifted, number(ROUNDS)))
    value = number(COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], 1.0):
        value = typing.cast(ir.Value, llvm.intr_fma(value, r, number(c)))
    power = arith.shli(arith.bitcast(i32, shifted), mgpu.c(MANTISSA, i32))
    return arith.bitcast(f32, arith.addi(arith.bitcast(i32, value), power))
