"""Truth of comparisons and of logic, from intervals and from truth."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flexjax.analysis.interval_values import Abstract, Interval, Truth, flag_and, is_nan, unknown
from flexjax.ir.program import Op

Array = jax.Array


def _witnessed(can_true: Array, can_false: Array, x: Interval, y: Interval, apart: bool) -> Truth:
    """Where both ends of both sides occur independently, what can happen does."""
    seen = flag_and(flag_and(x.attained, y.attained), apart)
    if seen is False:
        no = jnp.zeros((1, 1, 1, 1), bool)
        return Truth(can_true, can_false, no, no)
    known = ~(is_nan(x.low) | is_nan(y.low)) & seen
    return Truth(can_true, can_false, can_true & known, can_false & known)


def _lt(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low >= y.high), ~(x.high < y.low), x, y, apart)


def _le(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low > y.high), ~(x.high <= y.low), x, y, apart)


def _eq(x: Interval, y: Interval, apart: bool) -> Truth:
    can_true = ~((x.high < y.low) | (y.high < x.low))
    can_false = ~((x.low == x.high) & (y.low == y.high) & (x.low == y.low))
    found = _witnessed(can_true, can_false, x, y, apart)
    if not apart or x.attained is False or y.attained is False:
        return found
    inside = lambda p, i: (p >= i.low) & (p <= i.high)
    meet = (x.low == y.low) | (x.high == y.high) | (x.low == y.high) | (x.high == y.low)
    meet = meet | flag_and(x.contiguous, inside(y.low, x) | inside(y.high, x))
    meet = meet | flag_and(y.contiguous, inside(x.low, y) | inside(x.high, y))
    meet = meet | flag_and(flag_and(x.contiguous, y.contiguous), can_true)
    return found._replace(sure_true=found.sure_true & meet)


def negate(t: Truth) -> Truth:
    return Truth(t.can_false, t.can_true, t.sure_false, t.sure_true)


COMPARISONS: dict[str, Callable[[Interval, Interval, bool], Truth]] = {
    "lt": _lt,
    "le": _le,
    "gt": lambda x, y, apart: _lt(y, x, apart),
    "ge": lambda x, y, apart: _le(y, x, apart),
    "eq": _eq,
    "ne": lambda x, y, apart: negate(_eq(x, y, apart)),
}


def both(a: Truth, b: Truth, apart: bool) -> Truth:
    """a and b."""
    together = (a.sure_true & ~b.can_false) | (b.sure_true & ~a.can_false)
    if apart:
        together = together | (a.sure_true & b.sure_true)
    return Truth(a.can_true & b.can_true, a.can_false | b.can_false, together, a.sure_false | b.sure_false)


def either(a: Truth, b: Truth, apart: bool) -> Truth:
    """a or b."""
    return negate(both(negate(a), negate(b), apart))


def logic(op: Op, args: list[typing.Any], apart: bool) -> Abstract:
    if op.prim == "convert_element_type":
        (x,) = args
        if isinstance(x, Truth):
            return x
        zero = jnp.zeros((1, 1, 1, 1), x.low.dtype)
        return negate(_eq(x, Interval(zero, zero, True, True), True))
    if not all(isinstance(a, Truth) for a in args):
        return unknown("bool")
    if op.prim == "not":
        return negate(args[0])
    if op.prim == "and":
        return both(args[0], args[1], apart)
    if op.prim == "or":
        return either(args[0], args[1], apart)
    if op.prim in ("xor", "ne", "eq"):
        x, y = args
        differ = either(both(x, negate(y), apart), both(negate(x), y, apart), False)
        return differ if op.prim != "eq" else negate(differ)
    if op.prim == "select_n" and len(args) == 3:
        p, off, on = args
        return either(both(p, on, False), both(negate(p), off, False), False)
    return unknown("bool")
