"""The truth of comparisons, from the intervals of their operands, and of logic, from the truth of its operands.

`apart` says that two operands share neither queries nor keys (`independent` of interval_values.py), so that every
combination of their values occurs at some entry of the block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flexjax.analysis.interval_values import Abstract, Interval, Truth, flag_and, is_nan, unknown
from flexjax.ir.program import Op

Array = jax.Array


def _witnessed(can_true: Array, can_false: Array, x: Interval, y: Interval, apart: bool) -> Truth:
    """Completes the Truth of x < y or x <= y: where operands are apart and attain their ends, what can happen does."""
    seen = flag_and(flag_and(x.attained, y.attained), apart)
    if seen is False:
        no = jnp.zeros((1, 1, 1, 1), bool)
        return Truth(can_true, can_false, no, no)
    if jnp.issubdtype(x.low.dtype, jnp.floating):
        seen = ~(is_nan(x.low) | is_nan(y.low)) & seen
    return Truth(can_true, can_false, *((can_true, can_false) if seen is True else (can_true & seen, can_false & seen)))


def _lt(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low >= y.high), ~(x.high < y.low), x, y, apart)


def _le(x: Interval, y: Interval, apart: bool) -> Truth:
    return _witnessed(~(x.low > y.high), ~(x.high <= y.low), x, y, apart)


def _eq(x: Interval, y: Interval, apart: bool) -> Truth:
    """x == y: certainly true at some entry only in blocks where both intervals attain a common number."""
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


def same(x: Interval) -> Truth:
    """x == x: true, but where x may be NaN, which its ends show."""
    nan, no = is_nan(x.low) | is_nan(x.high), jnp.zeros((1, 1, 1, 1), bool)
    return Truth(~no, nan, ~nan, no)


def _lt_to(x: Interval, y: Interval, apart: bool) -> Truth:
    """x < y in total order, in which -0.0 is less than 0.0: nothing is known where the two meet at 0."""
    no = jnp.zeros((1, 1, 1, 1), bool)
    return Truth(~((x.low > y.high) | (x.low == y.high) & (x.low != 0)), ~(x.high < y.low), no, no)


def _eq_to(x: Interval, y: Interval, apart: bool) -> Truth:
    """ "x and y have the same bits", which two zeros need not have."""
    no = jnp.zeros((1, 1, 1, 1), bool)
    one = (x.low == x.high) & (y.low == y.high) & (x.low == y.low) & (x.low != 0)
    return Truth(~((x.high < y.low) | (y.high < x.low)), ~one, no, no)


def negate(t: Truth) -> Truth:
    return Truth(t.can_false, t.can_true, t.sure_false, t.sure_true)


COMPARISONS: dict[str, Callable[[Interval, Interval, bool], Truth]] = {
    "lt": _lt,
    "le": _le,
    "gt": lambda x, y, apart: _lt(y, x, apart),
    "ge": lambda x, y, apart: _le(y, x, apart),
    "eq": _eq,
    "ne": lambda x, y, apart: negate(_eq(x, y, apart)),
    "lt_to": _lt_to,
    "le_to": lambda x, y, apart: negate(_lt_to(y, x, apart)),
    "eq_to": _eq_to,
}


def both(a: Truth, b: Truth, apart: bool) -> Truth:
    together = (a.sure_true & ~b.can_false) | (b.sure_true & ~a.can_false)
    if apart:
        together = together | (a.sure_true & b.sure_true)
    return Truth(a.can_true & b.can_true, a.can_false | b.can_false, together, a.sure_false | b.sure_false)


def either(a: Truth, b: Truth, apart: bool) -> Truth:
    return negate(both(negate(a), negate(b), apart))


def _differ(a: Truth, b: Truth, apart: bool) -> Truth:
    """a != b: a and not b, or b and not a, which share both, so that fewer outcomes are certain."""
    return either(both(a, negate(b), apart), both(negate(a), b, apart), False)


LOGIC: dict[str, Callable[[Truth, Truth, bool], Truth]] = {
    "and": both,
    "or": either,
    "xor": _differ,
    "ne": _differ,
    "eq": lambda a, b, apart: negate(_differ(a, b, apart)),
    "not": lambda a, _, apart: negate(a),
}
"""By operation: the truth of a result of bools, (x, y, apart) -> Truth; `not` gets its one operand twice."""


def logic(op: Op, args: list[Abstract], apart: bool) -> Abstract:
    """What is known of the result of an operation on bools, or of the conversion of a number or bool to a bool."""
    if op.prim == "convert_element_type":
        (x,) = args
        if isinstance(x, Truth):
            return x
        zero = jnp.zeros((1, 1, 1, 1), x.low.dtype)
        return negate(_eq(x, Interval(zero, zero, True, True), True))
    truths = [a for a in args if isinstance(a, Truth)]
    if len(truths) < len(args):
        return unknown("bool")
    if op.prim in LOGIC:
        return LOGIC[op.prim](truths[0], truths[-1], apart)
    if op.prim == "select_n" and len(args) == 3:
        p, off, on = truths
        return either(both(p, on, False), both(negate(p), off, False), False)
    return unknown("bool")
