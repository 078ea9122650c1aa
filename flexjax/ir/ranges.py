"""Ranges of integers over the whole attention matrix, in Python's unbounded integers, which show whether a result can wrap around."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.ir.program import Atom, Linear, range_of_val

Range = tuple[int, int] | None


def is_integer(dtype: str) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.integer)


def fits(bounds: tuple[int, int], dtype: str) -> bool:
    """Whether an integer type represents both bounds; True for other types."""
    if not is_integer(dtype):
        return True
    info = jnp.iinfo(jnp.dtype(dtype))
    return info.min <= bounds[0] and bounds[1] <= info.max


def whole_range_if_narrow(dtype: str) -> Range:
    """The range of an integer type of at most 16 bits; None for wider types, whose range would bound nothing in practice."""
    info = jnp.iinfo(jnp.dtype(dtype))
    return (int(info.min), int(info.max)) if info.bits <= 16 else None


def may_be(atom: Atom, value: int) -> bool:
    """Whether an integer atom may have that value somewhere in the attention matrix."""
    info = jnp.iinfo(jnp.dtype(atom.dtype))
    low, high = range_of_val(atom) or (int(info.min), int(info.max))
    return low <= value <= high


def quotient_may_overflow(numerator: Atom, divisor: Atom) -> bool:
    """Whether the least integer of the type may be divided by -1; the type cannot represent that quotient."""
    return may_be(divisor, -1) and may_be(numerator, int(jnp.iinfo(jnp.dtype(numerator.dtype)).min))


def modular(value: int, dtype: str) -> np.ndarray:
    """The integer modulo 2^bits, in that type; sums and products with it are right modulo 2^bits."""
    bits = jnp.iinfo(jnp.dtype(dtype)).bits
    return np.array(value & ((1 << bits) - 1), np.uint64).astype(jnp.dtype(dtype))


def represents_coefficients(linear: Linear, dtype: str) -> bool:
    """Whether the type represents every coefficient; an unsigned type also takes negatives down to half its range."""
    info = jnp.iinfo(jnp.dtype(dtype))
    low = min(int(info.min), -(1 << (info.bits - 1)))
    numbers = (linear.b, linear.h, linear.q, linear.kv, linear.const, *(c for _, c in linear.uniform))
    return all(low <= c <= int(info.max) for c in numbers)


def compare_ranges(prim: str, a: Range, b: Range) -> bool | None:
    """The result of a comparison of integers in these ranges, None where it may be either."""
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


def range_result(prim: str, inputs: tuple[Atom, ...], dtype: str, params: dict[str, object]) -> Range:
    """The range of an integer result in exact arithmetic, None where unknown; `fits` says whether it can have wrapped around."""
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
    """The range (least, largest) of an operation's integer result, in exact arithmetic; None if no rule gives one.

    prim     name of the operation
    ranges   ranges of its operands; for select_n of the cases alone
    """
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
    if prim == "integer_pow":
        return None
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
