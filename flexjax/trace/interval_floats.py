"""Bounds of numbers once they are rounded to a floating type narrower than float32.

Narrow arithmetic is not the same everywhere: a compiler may keep more digits than the type has, round twice on the way (int32
to float16 to float8_e5m2), or flush what is smaller than the normal numbers. The bounds hold for all of these.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array


class NarrowType(typing.NamedTuple):
    """What rounding to a floating type does, in float32 numbers."""

    mantissa_bits: int
    smallest: float
    largest: float
    signed: bool
    has_infinity: bool
    has_negative_zero: bool


@functools.cache
def narrow_type(dtype: str) -> NarrowType:
    info = jnp.finfo(jnp.dtype(dtype))
    with np.errstate(all="ignore"):
        infinity, zero = np.array([np.inf, -0.0], np.float32).astype(info.dtype).astype(np.float32)
    facts = float(info.min) < 0, bool(np.isinf(infinity)), bool(np.signbit(zero))
    return NarrowType(int(info.nmant), float(info.tiny), float(info.max), *facts)


def narrowed(low: Array, high: Array, dtype: str) -> tuple[Array, Array]:
    """float32 bounds of what lies between float32 `low` and `high`, rounded to `dtype`; NaN, both: it may be NaN or anything.

    Past its largest number a type either has infinities (float16, float8_e5m2) or makes NaN (float8_e4m3fn). Without a
    negative zero (float8_e4m3fnuz), XLA makes NaN of some negative numbers that round to 0. Numbers that are subnormal in
    float32 count as 0, as XLA compares them.
    """
    kind = narrow_type(dtype)
    if not kind.signed:
        nothing = jnp.full(jnp.broadcast_shapes(low.shape, high.shape), jnp.nan, low.dtype)
        return nothing, nothing
    vanishes = (low < 0) & (high > -kind.smallest)
    low, high = -_largest(-low, kind), _largest(high, kind)
    if not kind.has_negative_zero:
        low, high = (jnp.where(vanishes, jnp.nan, e) for e in (low, high))
    if kind.has_infinity:
        return jnp.where(low < -kind.largest, -jnp.inf, low), jnp.where(high > kind.largest, jnp.inf, high)
    # not (inside), so that NaN is not inside
    outside = ~((low >= -kind.largest) & (high <= kind.largest))
    return jnp.where(outside, jnp.nan, low), jnp.where(outside, jnp.nan, high)


def _largest(high: Array, kind: NarrowType) -> Array:
    """The largest number that rounding makes of `high` or of less; as if the exponent had no end."""
    # Another rounding may come before: to float32, or for the smallest types to float16 or bfloat16.
    before = 2.0**-20 if kind.mantissa_bits >= 7 else 2.0**-8
    above = high * jnp.where(high > 0, 1 + before, 1 - before)
    rounded = (lax.reduce_precision(e, 8, kind.mantissa_bits) for e in (high, above))
    found = functools.reduce(jnp.maximum, rounded, high)
    found = jnp.where((high > 0) & (high < kind.smallest), kind.smallest, found)
    return jnp.where((high < 0) & (high > -kind.smallest), 0.0, found).astype(high.dtype)
