"""Integer division and remainder in Mosaic GPU kernels, with jax's results where the hardware's are undefined.

The undefined cases are division by 0 and of the least integer by -1. Selects for them are emitted only if the ranges of the operands
allow the case; a literal divisor other than 0 and -1 needs none. Operands are int32 or uint32 scalars, vectors or tiles. Narrower
integers are computed in int32, and tile_ops.py wraps the result.
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
    """A lower bound of the atom's value: a literal's value, 0 for unsigned integers, else the bound that the traced
    program knows; -inf if none is known.
    """
    if isinstance(atom, ir.Lit):
        return typing.cast(float, atom.value)
    if atom.dtype.startswith("u"):
        return 0
    return -math.inf if atom.low is None else atom.low


def integer_division(name: str, step: ir.Op, a: Value, b: Value, overhangs: bool) -> Value:
    """Quotient or remainder of a by b, in jax's rounding: "div" and "rem" toward zero, "floordiv" and "floormod"
    toward minus infinity.

    name        one of those four
    step        the operation, for dtypes and ranges of its operands
    a, b        values of the two operands, int32 or uint32, of one shape
    overhangs   whether the tile may extend past the end of the attention matrix, where the ranges do not hold; a
                divisor of 0 that the ranges exclude then gives a number without meaning

    A division by 0 gives what `_by_zero` says; the least int32 divided by -1 gives itself, remainder 0. By a literal
    power of two, floor operations and operands that are never negative take a shift or a bit mask.
    """
    left, right = step.inputs
    remainder = name in ("rem", "floormod")
    never_negative = _low(left) >= 0 and _low(right) > 0
    if never_negative or a.dtype == jnp.uint32 or name.startswith("floor"):
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
    """jax's result of dividing `a` by 0, where the hardware's result is undefined: "rem" gives a, "floormod" 0, "div" and any unsigned
    quotient -1 (all bits set), a signed "floordiv" -1 for a = 0 and -2 otherwise. Results that do not depend on a are numpy scalars, in
    the dtype of a.

    name    of the operation: "div", "rem", "floordiv" or "floormod"
    dtype   of the operand in the program, such as "uint8"
    a       the numerators, int32 or uint32
    """
    if name == "rem":
        return a
    if name == "floormod":
        return np.zeros((), a.dtype)
    if name == "div" or dtype.startswith("u"):
        return np.asarray(-1, np.int32).astype(a.dtype)
    return (a == 0).astype(jnp.int32) - np.int32(2)


def _defined_division(name: str, never_negative: bool, a: Value, b: Value) -> Value:
    """Quotient or remainder of a by b, where b is not 0 and nothing overflows.

    name             "div" or "rem", which round toward zero, "floordiv" or "floormod", toward minus infinity
    never_negative   whether a is at least 0 and b above 0; such numbers are divided as uint32, which is faster
    """
    remainder = name in ("rem", "floormod")
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
