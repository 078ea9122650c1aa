"""The scale of a row of scores that may be large: one FMA scales a score to base 2 and subtracts the softmax reference.

    x = a s - h      h = a m, rounded to float32      p = 2^x

m is the reference of the row, a score. The factor a is log2(e) where |m| <= MODERATE. An FMA rounds once, so x is a s -
h up to one rounding of the difference, however large s and h are. Rounding h moves all exponents of the row by the same
number,

    excess = a m - h      at most 8, and exact as an FMA of m itself

so exponentials are relative to 2^h, not to e^m. Whoever compares references adds the excess: a sum relative to the
reference m is multiplied by 2^((a' m - h') - (a m - h)) where m' becomes the reference, and by 2^-excess where e^m is
to be the unit.

Beyond MODERATE the excess would be larger than exponents may be. There the factor is a power of two and the excess 0:
scores are multiples of 16, so that a score below m has weight 2^-32 or less in place of e^-16 or less, nothing beside
the weight 1 of m in float32. From HUGE on the factor is 1, because 2 m may overflow.

Where both passes round weights alike, references are multiples of ln 2 (`whole`). Then h is the integer next to a m, so
that exponents relative to two references differ by an integer.

A kernel must not leave the FMA to the compiler: a product that is rounded before the subtraction is off by up to 8.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from flexjax.backends.mosaic_gpu.machine.kernel_parts import inline_mgpu
from flexjax.backends.mosaic_gpu.machine.registers import ROW, TILE, Item, assemble, element, lowered, positions_of
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.backends.tile_math import LOG2E, MAX_WHOLE, rounded_up

MODERATE = 2.0**27  # largest magnitude of a reference whose row is scaled by log2(e)
HUGE = 2.0**100  # from this magnitude of a reference on, the factor of its row is 1
UPPER_BITS = ~0xFFF  # the sign, the exponent and the upper 12 bits of the significand of a float32


class RowScale(typing.NamedTuple):
    """Factor a and shift h of each row, [rows] float32; inside `inline_mgpu` those of one row, f32."""

    factor: typing.Any
    shift: typing.Any


def row_scale(reference: jax.Array, whole: bool = False) -> RowScale:
    """The scale of each row from its reference, [rows] float32; `whole` references are multiples of ln 2."""
    size = jnp.abs(reference)
    large = jnp.where(size < np.float32(HUGE), np.float32(2), np.float32(1))
    factor = jnp.where(size <= np.float32(MODERATE), np.float32(LOG2E), large)
    shift = reference * factor
    if whole:
        shift = jnp.where(size < np.float32(MAX_WHOLE), rounded_up(shift - np.float32(0.5)), shift)
    return RowScale(factor, shift)


def row_scale_of(reference: ir.Value, whole: bool = False) -> RowScale:
    """`row_scale` of one row inside `inline_mgpu`."""
    number = lambda value: mgpu.c(value, reference.type)
    size = mlir_math.absf(reference)
    large = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, size, number(HUGE)), number(2.0), number(1.0))
    moderate = arith.cmpf(arith.CmpFPredicate.OLE, size, number(MODERATE))
    factor = arith.select(moderate, number(LOG2E), large)
    shift = arith.mulf(reference, factor)
    if whole:
        integer = mlir_math.ceil(arith.subf(shift, number(0.5)))
        small = arith.cmpf(arith.CmpFPredicate.OLT, size, number(MAX_WHOLE))
        shift = arith.select(small, integer, shift)
    return RowScale(factor, shift)


@device_op
def exponent(scores: jax.Array, scale: RowScale) -> jax.Array:
    """a s - h by one FMA an element, for a tile or row vector of scores."""
    layout = TILE if scores.ndim == 2 else ROW

    @inline_mgpu(layout, ROW, ROW, returns=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=layout))
    def scaled(values: mgpu.FragmentedArray, *rows: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        positions = positions_of(lowered(ROW), scores.shape[:1]).constants
        of = {at[0]: [element(vector.registers[register], item) for vector in rows] for register, item, at in positions}
        of = {row: RowScale(factor, arith.negf(shift)) for row, (factor, shift) in of.items()}

        def items() -> typing.Iterator[Item]:
            for register, item, at in positions_of(lowered(layout), scores.shape).constants:
                scale = of[at[0]]
                value = element(values.registers[register], item)
                yield register, item, mlir_math.fma(value, scale.factor, scale.shift)

        return assemble(lowered(layout), scores.shape, items(), None)

    return scaled(scores, *scale)


def exponent_of(score: ir.Value, scale: RowScale) -> ir.Value:
    """a s - h of one score inside `inline_mgpu`."""
    return mlir_math.fma(score, scale.factor, arith.negf(scale.shift))


def excess(reference: jax.Array, whole: bool = False) -> jax.Array:
    """a m - h of each row, from its reference, [rows] float32; NaN for an infinite one."""
    return exponent(reference, row_scale(reference, whole))


def rescaling(before: jax.Array, now: jax.Array, whole: bool = False) -> jax.Array:
    """The factor of sums relative to the reference `before`, [rows], where `now`, [rows], becomes the reference."""
    return jnp.exp2(exponent(before, row_scale(now, whole)) - excess(before, whole))


def fused(s: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """s * factor - shift in jax.numpy, near the shift with the rounding of an FMA and elsewhere within a few."""
    upper = lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & np.int32(UPPER_BITS), jnp.float32
    )
    # The four products of the halves of both significands are exact, and so is the difference of the largest and the
    # shift where these are close.
    s_high, factor_high = upper(s), upper(factor)
    s_low, factor_low = s - s_high, factor - factor_high
    x = s_high * factor_high - shift + s_high * factor_low + s_low * factor_high + s_low * factor_low
    return jnp.where(jnp.isfinite(s), x, s * factor - shift)
