"""Ranges of integers over the whole attention matrix, in Python's unbounded integers, which show what can wrap around.

To wrap around is to leave the integer type and continue modulo 2^bits.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.ir.program import Atom, Linear, range_of_val

Range = tuple[int, int] | None  # (lowest, highest), both inclusive; None where unknown


def is_integer(dtype: str) -> bool:
    """Whether the dtype of that name is an integer type; False for bool."""
    return jnp.issubdtype(jnp.dtype(dtype), jnp.integer)


def fits(bounds: tuple[int, int], dtype: str) -> bool:
    """Whether the type represents both ends of the range; True for types that are not integers."""
    if not is_integer(dtype):
        return True
    info = jnp.iinfo(jnp.dtype(dtype))
    return info.min <= bounds[0] and bounds[1] <= info.max


def whole_range_if_narrow(dtype: str) -> Range:
    """The range of an integer type of at most 16 bits; wider types would bound nothing in practice."""
    info = jnp.iinfo(jnp.dtype(dtype))
    return (int(info.min), int(info.max)) if info.bits <= 16 else None


def may_be(atom: Atom, value: int) -> bool:
    """Whether an integer atom may equal `value` somewhere in the attention matrix."""
    info = jnp.iinfo(jnp.dtype(atom.dtype))
    low, high = range_of_val(atom) or (int(info.min), int(info.max))
    return low <= value <= high


def quotient_may_overflow(numerator: Atom, divisor: Atom) -> bool:
    """Whether a division may be of the least integer of its signed type by -1, which the type cannot represent."""
    return may_be(divisor, -1) and may_be(numerator, int(jnp.iinfo(jnp.dtype(numerator.dtype)).min))


def modular(value: int, dtype: str) -> np.ndarray:
    """The integer modulo 2^bits of the type: sums and products with it are right modulo 2^bits."""
    bits = jnp.iinfo(jnp.dtype(dtype)).bits
    return np.array(value & ((1 << bits) - 1), np.uint64).astype(jnp.dtype(dtype))


def represents_coefficients(linear: Linear, dtype: str) -> bool:
    """Whether the integer type represents every coefficient of the linear form."""
    info = jnp.iinfo(jnp.dtype(dtype))
    # an unsigned type counts as representing negative numbers, because arithmetic is modulo 2^bits
    low = min(int(info.min), -(1 << (info.bits - 1)))
    numbers = (linear.b, linear.h, linear.q, linear.kv, linear.const, *(c for _, c in linear.uniform))
    return all(low <= c <= int(info.max) for c in numbers)


def compare_ranges(prim: str, a: Range, b: Range) -> bool | None:
    """The result of the comparison `prim` of integers in the ranges a and b; None where it may be either."""
    if a is None or b is None:
        return None
    if prim in ("gt", "ge"):
        return compare_ranges({"gt": "lt", "ge": "le"}[prim], b, a)
    if prim == "lt":
        return True if a[1] < b[0] else False if a[0] >= b[1] else None
    if prim == "le":
        return True if a[1] <= b[0] else False if a[0] > b[1] else None
    apart = a[1] < b[0] or b[1] < a[0]
    same = a[0] == a[1] == b[0] == b[1]
    if prim == "eq":
        return False if apart else True if same else None
    return True if apart else False if same else None


def range_result(prim: str, inputs: tuple[Atom, ...], dtype: str) -> Range:
    """The range of an operation's integer result in exact arithmetic, perhaps beyond the dtype; None: unknown."""
    if not is_integer(dtype):
        return None
    if prim == "convert_element_type" and inputs[0].dtype == "bool":
        return (0, 1)
    ranges = [range_of_val(a) for a in (inputs[1:] if prim == "select_n" else inputs)]
    if prim in ("max", "min"):  # one bound is all that a clamp of an unknown number needs
        info = jnp.iinfo(jnp.dtype(dtype))
        ranges = [(int(info.min), int(info.max)) if r is None else r for r in ranges]
    if any(r is None for r in ranges):
        return None
    return integer_range(prim, [r for r in ranges if r is not None])


def integer_range(prim: str, ranges: Sequence[tuple[int, int]]) -> Range:
    """The range of an integer result in exact arithmetic, from those of the operands, for select_n of the cases."""
    if prim in ("select_n", "convert_element_type"):
        return (min(r[0] for r in ranges), max(r[1] for r in ranges))
    if prim == "neg":
        return (-ranges[0][1], -ranges[0][0])
    if prim == "abs":
        low, high = ranges[0]
        return (0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high)))
    if prim == "sign":
        low, high = ranges[0]
        return ((low > 0) - (low < 0), (high > 0) - (high < 0))
    if len(ranges) != 2:
        return None
    (a, b), (c, d) = ranges
    if prim == "add":
        return (a + c, b + d)
    if prim == "sub":
        return (a - d, b - c)
    if prim == "mul":
        corners = (a * c, a * d, b * c, b * d)
        return (min(corners), max(corners))
    if prim == "max":
        return (max(a, c), max(b, d))
    if prim == "min":
        return (min(a, c), min(b, d))
    if prim == "floordiv" and c > 0:
        corners = (a // c, a // d, b // c, b // d)
        return (min(corners), max(corners))
    if prim == "floormod" and c > 0:
        return (a % c, b % c) if c == d and a // c == b // c else (0, d - 1)
    if prim == "rem" and c > 0:
        return (0 if a >= 0 else -(d - 1), d - 1 if b > 0 else 0)
    return None
