"""The interval of an operation's result, from the intervals of its operands: one rule an operation, and rounding.

A rule is a function (Op, what is known of the operands) -> Interval of the result in each block, None if it cannot give
one. `rounded` then widens the interval of a float for rounding, and `unless_wrapped` that of an integer for overflow.
The flags `attained` and `contiguous` are those of interval_values.py. Ends of NaN mean "anything", so such an interval
decides nothing.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.interval_floats import narrowed
from flexjax.analysis.interval_functions import ABSOLUTE, FUNCTIONS, INEXACT, corners, error_of_power, size_of
from flexjax.analysis.interval_values import Abstract, Interval, Truth, flag_and, flag_or, unknown, wide_type, widened
from flexjax.ir import program as ir
from flexjax.ir.program import Lit, Op, Val

Array = jax.Array

KEEPS_NARROW = frozenset({"max", "min", "neg", "abs", "floor", "ceil", "sign", "select_n"})
"""Operations whose result a floating type narrower than float32 represents exactly if it represents the operands."""


def rounded(op: Op, args: list[Abstract], found: Interval, products: set[int]) -> Interval:
    """Widens the interval of a floating result for the rounding of any device; both ends are NaN where a NaN can occur.

    `products` are the ids of products, which a compiler may fuse with an addition (FMA), so that they are not rounded.
    """
    low, high, attained, _ = found
    if op.prim in INEXACT:
        floor = ABSOLUTE.get(op.prim, 0.0) + jnp.finfo(low.dtype).tiny
        share = max(INEXACT[op.prim], 8 * float(jnp.finfo(jnp.dtype(op.out.dtype)).eps))
        if op.prim in ("sin", "cos"):  # of a rounded operand, whose periods are taken off
            floor = floor + share * size_of(typing.cast(Interval, args[0])).astype(low.dtype)
        if op.prim == "pow":  # exp(y log(x))
            floor = floor + error_of_power(*typing.cast(list[Interval], args)).astype(low.dtype) * jnp.abs(high)
        low, high, attained = low - share * jnp.abs(low) - floor, high + share * jnp.abs(high) + floor, False
    if op.prim in ("add", "sub") and any(isinstance(a, Val) and a.id in products for a in op.inputs):
        slack = (
            2 * jnp.finfo(low.dtype).eps * sum(size_of(a).astype(low.dtype) for a in args if isinstance(a, Interval))
        )
        slack = jnp.where(jnp.isfinite(slack), slack, 0)
        low, high, attained = low - slack, high + slack, False
    power = abs(typing.cast(int, dict(op.params).get("y", 0)))
    if power > 2:  # the order in which several factors are multiplied, and so the rounding, is not specified
        eps = power * float(jnp.finfo(jnp.dtype(op.out.dtype)).eps)
        low, high, attained = low - eps * jnp.abs(low), high + eps * jnp.abs(high), False
    if jnp.finfo(jnp.dtype(op.out.dtype)).bits < 32 and op.prim not in KEEPS_NARROW:
        low, high = narrowed(low, high, op.out.dtype)
        attained = False
    nan = jnp.isnan(low) | jnp.isnan(high) | _makes_nan(op.prim, args)
    return Interval(jnp.where(nan, jnp.nan, low), jnp.where(nan, jnp.nan, high), attained)


def _makes_nan(prim: str, args: list[Abstract]) -> Array:
    """Marks the blocks in which an operation may make a NaN out of numbers: inf - inf, 0 * inf, inf / inf.

    0 / 0 is left out, because `_div` gives NaN for it.
    """
    no = jnp.zeros((1, 1, 1, 1), bool)
    if prim not in ("add", "sub", "mul", "div") or not all(isinstance(a, Interval) for a in args):
        return no
    x, y = typing.cast(list[Interval], args)
    if prim in ("add", "sub"):
        up, down = (y.high == jnp.inf, y.low == -jnp.inf) if prim == "add" else (y.low == -jnp.inf, y.high == jnp.inf)
        return ((x.low == -jnp.inf) & up) | ((x.high == jnp.inf) & down)
    endless = lambda i: jnp.isinf(i.low) | jnp.isinf(i.high)
    if prim == "div":
        return endless(x) & endless(y)
    holds_zero = lambda i: (i.low <= 0) & (i.high >= 0)
    return (holds_zero(x) & endless(y)) | (endless(x) & holds_zero(y))


def unless_wrapped(op: Op, args: list[Abstract], found: Interval) -> Interval:
    """Replaces an integer's interval by the whole range of its type in blocks where the arithmetic may wrap around."""
    dtype = jnp.dtype(op.out.dtype)
    if op.prim not in ("add", "sub", "mul", "neg", "abs", "integer_pow", "square"):
        return found
    if op.out.low is not None and dtype.itemsize >= 4:
        return found  # the builder has shown that it fits; types of 16 bits have a range anyway
    operands = [a for a in args if isinstance(a, Interval)]
    sizes = [size_of(a) for a in operands]
    size = sum(sizes, jnp.zeros((1, 1, 1, 1), jnp.float32))
    if op.prim == "mul":
        size = sizes[0] * sizes[1]
    if op.prim in ("integer_pow", "square"):
        size = sizes[0] ** (abs(typing.cast(int, dict(op.params).get("y", 2))))
    wraps = size >= float(jnp.iinfo(dtype).max) * 0.999
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        if op.prim == "neg":
            wraps = wraps | (operands[0].high > 0)
        if op.prim == "sub":
            wraps = wraps | (operands[0].low < operands[1].high)
    return widened(found, wraps)


def _add(op: Op, args: list[Interval]) -> Interval:
    """x + y, with a flag where both have it: intervals.py drops the flags of operands that share queries or keys."""
    x, y = args
    return Interval(
        x.low + y.low, x.high + y.high, flag_and(x.attained, y.attained), flag_and(x.contiguous, y.contiguous)
    )


def _sub(op: Op, args: list[Interval]) -> Interval:
    x, y = args
    return Interval(
        x.low - y.high, x.high - y.low, flag_and(x.attained, y.attained), flag_and(x.contiguous, y.contiguous)
    )


def _mul(op: Op, args: list[Interval]) -> Interval:
    """x * y: between the least and the greatest product of ends; a value times itself is `_square`."""
    x, y = args
    if op.inputs[0] == op.inputs[1]:
        return _square(op, [x])
    return Interval(*corners(jnp.multiply, x, y), flag_and(x.attained, y.attained))


def _square(op: Op, args: list[Interval]) -> Interval:
    return _power(args[0], 2)


def _power(x: Interval, y: int) -> Interval:
    """x ** y for an integer y of at least 0."""
    a, b = lax.integer_pow(x.low, y), lax.integer_pow(x.high, y)
    if y % 2:
        return Interval(a, b, x.attained)
    low = jnp.where((x.low <= 0) & (x.high >= 0), jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b))


def _neg(op: Op, args: list[Interval]) -> Interval:
    return Interval(-args[0].high, -args[0].low, args[0].attained, args[0].contiguous)


def _abs(op: Op, args: list[Interval]) -> Interval:
    """abs(x): starts at 0 in blocks where the interval of x contains 0, else at the lesser magnitude of its ends."""
    (x,) = args
    a, b = jnp.abs(x.low), jnp.abs(x.high)
    crosses = (x.low <= 0) & (x.high >= 0)
    low = jnp.where(crosses, jnp.zeros_like(a), jnp.minimum(a, b))
    return Interval(low, jnp.maximum(a, b), flag_or(x.contiguous, flag_and(x.attained, ~crosses)), x.contiguous)


def _extremum(pick: Callable[[Array, Array], Array]) -> Callable:
    """The rule of `max` or `min`; `pick` is jnp.maximum or jnp.minimum."""

    def rule(op: Op, args: list[Interval]) -> Interval:
        x, y = args
        return Interval(
            pick(x.low, y.low),
            pick(x.high, y.high),
            flag_and(x.attained, y.attained),
            flag_and(x.contiguous, y.contiguous),
        )

    return rule


def _floordiv(op: Op, args: list[Interval]) -> Interval | None:
    """x // y of integers, by the quotients of the ends; None for the least integer as a literal divisor."""
    x, y = args
    if isinstance(op.inputs[1], Lit) and op.inputs[1].value < 0:  # x // -d is (-x) // d
        if jnp.iinfo(x.low.dtype).min == op.inputs[1].value:
            return None
        safe = x.low > jnp.iinfo(x.low.dtype).min
        x, y = Interval(-x.high, -x.low, x.attained, x.contiguous), Interval(-y.high, -y.low, True, True)
        low, high = jnp.floor_divide(x.low, y.low), jnp.floor_divide(x.high, y.low)
        return widened(Interval(low, high, x.attained, x.contiguous), ~safe)
    if _counts(op):
        low, high = (lax.div(jnp.maximum(end, 0), y.low) for end in x[:2])
        return Interval(low, high, x.attained, x.contiguous)
    low, high = corners(jnp.floor_divide, x, Interval(jnp.maximum(y.low, 1), jnp.maximum(y.high, 1)))
    if isinstance(op.inputs[1], Lit) and op.inputs[1].value > 0:
        return Interval(low, high, x.attained, x.contiguous)
    unsigned = jnp.issubdtype(x.low.dtype, jnp.unsignedinteger)
    if not unsigned:  # a number by 0 is -1 or -2
        low, high = jnp.where(y.low == 0, jnp.minimum(low, -2), low), jnp.where(y.low == 0, jnp.maximum(high, -1), high)
    single = (y.low == y.high) & (y.low > 0)
    found = Interval(low, high, flag_and(x.attained, single), flag_and(x.contiguous, single))
    return widened(found, y.low == 0 if unsigned else y.low < 0)


def _counts(op: Op) -> bool:
    """Whether op divides a number of at least 0 by a positive literal; rounding down takes eight operations an end."""
    x, y = op.inputs
    return isinstance(x, Val) and x.low is not None and x.low >= 0 and isinstance(y, Lit) and y.value > 0


def _floormod(op: Op, args: list[Interval]) -> Interval:
    """x % y of integers; a negative literal y exchanges the signs of both."""
    x, y = args
    if isinstance(op.inputs[1], Lit) and -(2**30) < op.inputs[1].value < 0:  # x % -d is -((-x) % d)
        negated = Interval(-x.high, -x.low, x.attained, x.contiguous)
        found = _remainder(negated, Interval(-y.high, -y.low))
        info = jnp.iinfo(x.low.dtype)
        return widened(Interval(-found.high, -found.low, *found[2:]), x.low <= info.min)
    if not _counts(op):
        return _remainder(x, y)
    low, high = (jnp.maximum(end, 0) for end in x[:2])
    period, last = lax.div(low, y.low) * y.low, y.low - 1
    same, whole = high - period <= last, high - low >= last  # as in `_remainder`
    exact = flag_and(x.contiguous, same | whole)
    ends = jnp.where(same, low - period, 0), jnp.where(same, high - period, last)
    return Interval(*ends, flag_or(exact, flag_and(x.attained, same)), exact)


def _remainder(x: Interval, y: Interval) -> Interval:
    """x % y of integers: exact where y is one number and x within one of its periods, else 0..y - 1.

    x % 0 is 0. In blocks where y may be negative it is the whole range of the type.
    """
    modulus = jnp.maximum(y.low, 1)
    same = (y.low == y.high) & (jnp.floor_divide(x.low, modulus) == jnp.floor_divide(x.high, modulus))
    low = jnp.where(same, jnp.mod(x.low, modulus), 0)
    high = jnp.where(same, jnp.mod(x.high, modulus), jnp.maximum(y.high, 1) - 1)
    # Within one period the ends are those of x; over a whole period of consecutive integers every remainder occurs.
    width = x.high - x.low
    whole = (y.low == y.high) & (
        (width < 0) | (width >= modulus - 1)
    )  # width < 0: the difference wrapped around, so it is larger than any modulus
    exact = flag_and(x.contiguous, same | whole)
    return widened(Interval(low, high, flag_or(exact, flag_and(x.attained, same)), exact), y.low < 0)


def _div(op: Op, args: list[Interval]) -> Interval | None:
    """x / y of floats: anything (NaN) where y may be 0; None for integers."""
    x, y = args
    if jnp.issubdtype(x.low.dtype, jnp.integer):
        return None
    crosses = ~((y.low > 0) | (y.high < 0))
    low, high = corners(jnp.divide, x, y)
    return Interval(jnp.where(crosses, jnp.nan, low), jnp.where(crosses, jnp.nan, high))


def _integer_pow(op: Op, args: list[Interval]) -> Interval | None:
    """x ** y for the static integer y of the operation; None for negative powers of integers."""
    y = typing.cast(int, dict(op.params)["y"])
    if y >= 0:
        return _power(args[0], y)
    if jnp.issubdtype(args[0].low.dtype, jnp.integer):
        return None
    below = _power(args[0], -y)
    positive = (below.low >= jnp.finfo(below.low.dtype).tiny) | (below.high <= -jnp.finfo(below.low.dtype).tiny)
    low, high = (jnp.where(positive, 1 / e, jnp.nan) for e in (below.high, below.low))
    slack = 4 * (2 - y) * float(jnp.finfo(low.dtype).eps)  # a device may take the reciprocal first
    return Interval(low - slack * jnp.abs(low), high + slack * jnp.abs(high))


def _convert(op: Op, args: list[Abstract]) -> Interval | None:
    """A conversion to an integer or a float: the whole range of an integer type where the operand may not fit."""
    (x,) = args
    dtype = jnp.dtype(op.out.dtype)
    if isinstance(x, Truth):
        kept = wide_type(op.out.dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        seen = x.sure_true & x.sure_false | (~x.can_true) | (~x.can_false)
        return Interval((~x.can_false).astype(kept), x.can_true.astype(kept), seen, seen)
    old = x.low.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        wide = wide_type(op.out.dtype)
        return Interval(x.low.astype(wide), x.high.astype(wide), x.attained)
    if jnp.issubdtype(old, jnp.floating):
        info = jnp.iinfo(dtype)
        inside = (x.low > float(info.min)) & (x.high < float(info.max) * 0.999)
        whole = typing.cast(Interval, unknown(op.out.dtype))
        ends = (jnp.where(inside, e, 0).astype(dtype) for e in (x.low, x.high))
        return Interval(*(jnp.where(inside, e, w) for e, w in zip(ends, (whole.low, whole.high), strict=True)))
    if range_known(op.out) and range_known(op.inputs[0]) and dtype.itemsize >= 4:
        return Interval(x.low.astype(dtype), x.high.astype(dtype), x.attained, x.contiguous)
    return widened(Interval(x.low.astype(dtype), x.high.astype(dtype), x.attained, x.contiguous), ~_fits(x, dtype))


def _fits(x: Interval, dtype: jnp.dtype) -> Array:
    old, new = jnp.iinfo(x.low.dtype), jnp.iinfo(dtype)
    fits = jnp.ones((1, 1, 1, 1), bool)
    if new.min > old.min:
        fits = fits & (x.low >= np.array(new.min, x.low.dtype))
    if new.max < old.max:
        fits = fits & (x.high <= np.array(new.max, x.low.dtype))
    return fits


def range_known(atom: ir.Atom) -> bool:
    """Whether the integer atom has a known range, so that a value of 32 bits or more cannot have wrapped around."""
    return isinstance(atom, Lit) or atom.low is not None


def _select(op: Op, args: list[Abstract]) -> Interval | None:
    """The case that a select_n picks; the hull of all cases where the predicate is not known. None for bool cases."""
    predicate = args[0]
    cases = [c for c in args[1:] if isinstance(c, Interval)]
    if len(cases) < len(args) - 1:
        return None
    if isinstance(predicate, Truth) and len(cases) == 2:
        off, on = cases
        only_on, only_off = ~predicate.can_false, ~predicate.can_true
        both_low, both_high = jnp.minimum(off.low, on.low), jnp.maximum(off.high, on.high)
        low = jnp.where(only_on, on.low, jnp.where(only_off, off.low, both_low))
        return Interval(low, jnp.where(only_on, on.high, jnp.where(only_off, off.high, both_high)))
    low, high = cases[0].low, cases[0].high
    for case in cases[1:]:
        low, high = jnp.minimum(low, case.low), jnp.maximum(high, case.high)
    return Interval(low, high)


def _sign(op: Op, args: list[Interval]) -> Interval:
    return Interval(jnp.sign(args[0].low), jnp.sign(args[0].high), args[0].attained)


RULES: dict[str, Callable[..., Interval | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "max": _extremum(jnp.maximum),
    "min": _extremum(jnp.minimum),
    "floordiv": _floordiv,
    "floormod": _floormod,
    "div": _div,
    "integer_pow": _integer_pow,
    "square": _square,
    "convert_element_type": _convert,
    "select_n": _select,
    **FUNCTIONS,
}
"""The rule of each operation by its name; an operation without a rule is `unknown`."""
