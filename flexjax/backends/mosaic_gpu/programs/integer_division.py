"""Integer division and remainder in Mosaic GPU kernels, with jax's results where the hardware's are undefined.

The undefined cases are division by 0 and of the least integer by -1. Selects for them are emitted only if the ranges of
the operands allow the case. Operands are int32 or uint32; narrower integers are computed in int32, and tile_ops.py
wraps the result.
"""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.ir import program as ir
from flexjax.ir.ranges import may_be, quotient_may_overflow

Value = jax.Array
"""An array or scalar inside a kernel; a literal operand is a numpy scalar, which has the same operators."""


def power_of_two(atom: ir.Atom) -> int | None:
    """n if the atom is the literal integer 2^n, otherwise None."""
    if isinstance(atom, ir.Lit) and isinstance(atom.value, int) and atom.value > 0:
        return atom.value.bit_length() - 1 if atom.value & (atom.value - 1) == 0 else None
    return None


def _low(atom: ir.Atom) -> float:
    """A lower bound of the atom's value, as far as literal, dtype or traced program tell; else -inf."""
    if isinstance(atom, ir.Lit):
        return typing.cast(float, atom.value)
    if atom.dtype.startswith("u"):
        return 0
    return -math.inf if atom.low is None else atom.low


def integer_division(name: str, step: ir.Op, a: Value, b: Value, overhangs: bool) -> Value:
    """Quotient or remainder: "div" and "rem" round toward zero, "floordiv" and "floormod" toward minus infinity.

    A division by 0 gives what `_by_zero` says; the least int32 divided by -1 gives itself, remainder 0.
    """
    left, right = step.inputs
    remainder = name in ("rem", "floormod")
    never_negative = _low(left) >= 0 and _low(right) > 0
    if never_negative or a.dtype == jnp.uint32 or name.startswith("floor"):
        # A power of two takes a shift or a bit mask.
        bits = power_of_two(right)
        if bits is not None and (never_negative or name.startswith("floor")):
            if remainder:
                return a & np.asarray((1 << bits) - 1, a.dtype)
            shift = lax.shift_right_logical if a.dtype == jnp.uint32 else lax.shift_right_arithmetic
            return shift(a, jnp.full_like(a, bits))
    by_zero = may_be(right, 0)
    overflows = left.dtype == "int32" and quotient_may_overflow(left, right)  # narrower types are computed in int32
    divisor = b
    if by_zero or overhangs:  # ranges hold inside the attention matrix; past its end a divisor may become 0
        b = jnp.where(b == 0, np.ones((), b.dtype), b)
    if overflows:
        b = jnp.where(divisor == -1, np.ones((), b.dtype), b)
    out = _defined_division(name, never_negative, a, b)
    if overflows:  # int32 negation maps the least integer to itself
        out = jnp.where(divisor == -1, np.zeros((), out.dtype) if remainder else -a, out)
    return jnp.where(divisor == 0, _by_zero(name, left.dtype, a), out) if by_zero else out


def _by_zero(name: str, dtype: str, a: Value) -> Value | np.ndarray:
    """jax's result of dividing `a` by 0, where `dtype` is that of the operand in the program, such as "uint8"."""
    if name == "rem":
        return a
    if name == "floormod":
        return np.zeros((), a.dtype)
    if name == "div" or dtype.startswith("u"):
        return np.asarray(-1, np.int32).astype(a.dtype)
    return (a == 0).astype(jnp.int32) - np.int32(2)


def _defined_division(name: str, never_negative: bool, a: Value, b: Value) -> Value:
    """Quotient or remainder of a by b, where b is not 0 and nothing overflows."""
    remainder = name in ("rem", "floormod")
    # Division as uint32 is faster.
    if never_negative and a.dtype == jnp.int32:
        a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
        return (lax.rem(a, b) if remainder else lax.div(a, b)).astype(jnp.int32)
    if a.dtype == jnp.uint32 or not name.startswith("floor"):
        return lax.rem(a, b) if remainder else lax.div(a, b)
    rest = lax.rem(a, b)
    zero = np.int32(0)
    rounded_up = (rest != zero) & ((rest < zero) ^ (b < zero))
    if remainder:
        return jnp.where(rounded_up, rest + b, rest)
    return lax.div(a, b) - rounded_up.astype(jnp.int32)
