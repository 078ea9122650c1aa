"""Bounds of numbers after rounding to a floating type narrower than float32 (float16, bfloat16, the 8-bit floats).

Narrow arithmetic differs between devices: a compiler may keep more digits than the type has, round twice (int32 to
float16 to float8_e5m2), or flush subnormal numbers to 0. The bounds, float32 arrays, hold in all of these cases.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array


class NarrowType(typing.NamedTuple):
    """The properties of a floating type."""

    mantissa_bits: int  # explicit bits
    # smallest normal and largest finite positive number, as float32 numbers
    smallest: float
    largest: float
    signed: bool
    has_infinity: bool
    has_negative_zero: bool


@functools.cache
def narrow_type(dtype: str) -> NarrowType:
    """Looks up the properties of the floating type of that dtype name."""
    info = jnp.finfo(jnp.dtype(dtype))
    with np.errstate(all="ignore"):
        infinity, zero = np.array([np.inf, -0.0], np.float32).astype(info.dtype).astype(np.float32)
    facts = float(info.min) < 0, bool(np.isinf(infinity)), bool(np.signbit(zero))
    return NarrowType(int(info.nmant), float(info.tiny), float(info.max), *facts)


def narrowed(low: Array, high: Array, dtype: str) -> tuple[Array, Array]:
    """(lower, upper) bound, float32, of numbers between `low` and `high` after rounding to the narrow type `dtype`.

    A bound of NaN means that the result may be NaN or any number; types without negative numbers always get NaN. Past
    its largest number a type either has infinities (float16, float8_e5m2) or gives NaN (float8_e4m3fn). In types
    without a negative zero (float8_e4m3fnuz), XLA turns some negative numbers that round to 0 into NaN. Numbers that
    are subnormal in float32 count as 0, because XLA compares them as 0.
    """
    kind = narrow_type(dtype)
    if not kind.signed:
        nothing = jnp.full(jnp.broadcast_shapes(low.shape, high.shape), jnp.nan, low.dtype)
        return nothing, nothing
    vanishes = (low < 0) & (high > -kind.smallest)
    low, high = -_upper_bound(-low, kind), _upper_bound(high, kind)
    if not kind.has_negative_zero:
        low, high = (jnp.where(vanishes, jnp.nan, e) for e in (low, high))
    if kind.has_infinity:
        return jnp.where(low < -kind.largest, -jnp.inf, low), jnp.where(high > kind.largest, jnp.inf, high)
    # negated, so that a NaN bound counts as outside
    outside = ~((low >= -kind.largest) & (high <= kind.largest))
    return jnp.where(outside, jnp.nan, low), jnp.where(outside, jnp.nan, high)


def _upper_bound(high: Array, kind: NarrowType) -> Array:
    """An upper bound of what numbers up to `high` round to with the precision of `kind` and no largest number.

    A positive bound below the smallest normal number becomes that number, a negative one becomes 0, because devices may
    flush such numbers to 0 or not.
    """
    # The number may have been rounded once before: to float32, or for the smallest types to float16 or bfloat16.
    before = 2.0**-20 if kind.mantissa_bits >= 7 else 2.0**-8
    above = high * jnp.where(high > 0, 1 + before, 1 - before)
    rounded = (lax.reduce_precision(e, 8, kind.mantissa_bits) for e in (high, above))
    found = functools.reduce(jnp.maximum, rounded, high)
    found = jnp.where((high > 0) & (high < kind.smallest), kind.smallest, found)
    return jnp.where((high < 0) & (high > -kind.smallest), 0.0, found).astype(high.dtype)
