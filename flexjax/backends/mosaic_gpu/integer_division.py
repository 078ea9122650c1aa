"""Integer division in Mosaic GPU kernels (scalars, vectors, tiles), with jax's results where the hardware's are
undefined.

The undefined cases are division by 0 and of the least integer by -1. Each needs selects, which are emitted only if the
ranges of the operands allow the case: a literal divisor other than 0 and -1 needs none. Integers are int32 or uint32;
narrower ones are computed in int32, and the caller wraps the result.
"""

import math
import typing

import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.ir import program as ir
from flexjax.ir.ranges import may_be, quotient_may_overflow

Value = typing.Any  # a jax array inside the kernel, or a numpy scalar


def power_of_two(atom: ir.Atom) -> int | None:
    if isinstance(atom, ir.Lit) and isinstance(atom.value, int) and atom.value > 0:
        return atom.value.bit_length() - 1 if atom.value & (atom.value - 1) == 0 else None
    return None


def _low(atom: ir.Atom) -> float:
    if isinstance(atom, ir.Lit):
        return typing.cast(float, atom.value)
    if atom.dtype.startswith("u"):
        return 0
    return -math.inf if atom.low is None else atom.low


def integer_division(name: str, step: ir.Op, a: Value, b: Value, hang: bool) -> Value:
    """div and rem (toward zero), floordiv and floormod (toward minus infinity).

    hang   whether the tile may extend past the edge of the matrix
    """
    left, right = step.inputs
    remainder = name in ("rem", "floormod")
    known = _low(left) >= 0 and _low(right) > 0
    if known or a.dtype == jnp.uint32 or name.startswith("floor"):
        bits = power_of_two(right)
        if bits is not None and (known or name.startswith("floor")):
            if remainder:
                return a & np.asarray((1 << bits) - 1, a.dtype)
            shift = lax.shift_right_logical if a.dtype == jnp.uint32 else lax.shift_right_arithmetic
            return shift(a, jnp.full_like(a, bits))
    by_zero = may_be(right, 0)
    overflows = left.dtype == "int32" and quotient_may_overflow(left, right)  # narrower types are computed in int32
    divisor = b
    if by_zero or hang:  # past the edge of the matrix a divisor that depends on the position may become 0
        b = jnp.where(b == 0, np.ones((), b.dtype), b)
    if overflows:
        b = jnp.where(divisor == -1, np.ones((), b.dtype), b)
    out = _division(name, known, a, b)
    if overflows:  # int32 negation maps the least integer to itself
        out = jnp.where(divisor == -1, np.zeros((), out.dtype) if remainder else -a, out)
    return jnp.where(divisor == 0, _by_zero(name, left.dtype, a), out) if by_zero else out


def _by_zero(name: str, dtype: str, a: Value) -> Value:
    """jax's result of division by 0, where the hardware's result is undefined."""
    if name == "rem":
        return a
    if name == "floormod":
        return np.zeros((), a.dtype)
    if name == "div" or dtype.startswith("u"):
        return np.asarray(-1, np.int32).astype(a.dtype)
    return (a == 0).astype(jnp.int32) - np.int32(2)


def _division(name: str, known: bool, a: Value, b: Value) -> Value:
    """The quotient or the remainder, in the defined cases; `known`: neither number is negative."""
    remainder = name in ("rem", "floormod")
    if known and a.dtype == jnp.int32:
        a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
        return (lax.rem(a, b) if remainder else lax.div(a, b)).astype(jnp.int32)
    if a.dtype == jnp.uint32 or not name.startswith("floor"):
        return lax.rem(a, b) if remainder else lax.div(a, b)
    rest = lax.rem(a, b)
    zero = np.int32(0)
    off = (rest != zero) & ((rest < zero) ^ (b < zero))
    if remainder:
        return jnp.where(off, rest + b, rest)
    return lax.div(a, b) - off.astype(jnp.int32)
