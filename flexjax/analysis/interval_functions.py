"""The intervals of functions of real numbers, and of roundings and bits: rules as those of interval_rules.py.

`INEXACT` and `ABSOLUTE` say how much devices differ; `rounded` of interval_rules.py widens what a rule here returns.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.interval_values import Interval, widened
from flexjax.ir.evaluate import apply_op
from flexjax.ir.program import Lit, Op

Array = jax.Array

INEXACT: dict[str, float] = {
    **dict.fromkeys(("tanh", "tan"), 2.0**-10),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "logistic", "pow", "erfc"), 2.0**-15),
    **dict.fromkeys(("log", "sqrt", "rsqrt", "log1p", "cbrt", "atan", "asinh", "erf", "sin", "cos"), 2.0**-18),
    **dict.fromkeys(("acos", "asin", "atan2", "acosh", "atanh", "rem"), 2.0**-15),
}
"""Functions whose results differ between devices and compilers, by how much relative to the result.

Largest are tanh.approx of NVIDIA GPUs (2^-11) and exponentials, whose operand is first multiplied by log2(e): an error
of 2^-24 of 128 is one of 2^-17 of the result. XLA's float32 functions are up to 34 ulp off (exp2).
"""

ABSOLUTE: dict[str, float] = {
    **dict.fromkeys(("log", "erfc"), 2.0**-20),
    **dict.fromkeys(("sin", "cos"), 2.0**-18),
    **dict.fromkeys(("acos", "asin", "atan2", "acosh", "atanh"), 2.0**-15),
}
"""Of functions that are 0 elsewhere than at 0, or near 0 by differences, how much they differ there."""


def size_of(term: Interval) -> Array:
    """The largest magnitude of the numbers of an interval, float32; NaN where an end is NaN."""
    return jnp.maximum(jnp.abs(term.low.astype(jnp.float32)), jnp.abs(term.high.astype(jnp.float32)))


def corners(f: Callable[[Array, Array], Array], x: Interval, y: Interval) -> tuple[Array, Array]:
    """The least and the greatest of f at the four pairs of ends; they bound an f that is monotone in each operand."""
    values = [f(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = values[0], values[0]
    for v in values[1:]:
        low, high = jnp.minimum(low, v), jnp.maximum(high, v)
    return low, high


def error_of_power(x: Interval, y: Interval) -> Array:
    """The relative error of x ** y where it is computed as exp(y log(x)); 0 where log(x) is infinite."""
    log = lambda end: jnp.abs(jnp.log(jnp.maximum(jnp.abs(end), jnp.finfo(end.dtype).tiny)))
    logarithm = jnp.maximum(log(x.low), log(x.high)).astype(jnp.float32)
    return 2.0**-18 * size_of(y) * (1 + jnp.where(jnp.isfinite(logarithm), logarithm, 0))


def _where(fine: Array, low: Array, high: Array) -> Interval:
    """The interval where `fine`, else that of a number that may be anything."""
    return Interval(jnp.where(fine, low, jnp.nan), jnp.where(fine, high, jnp.nan))


def _monotone(f: Callable[[Array], Array]) -> Callable:
    """The rule of a non-decreasing function of one operand: [f(low), f(high)]."""
    return lambda op, args: Interval(f(args[0].low), f(args[0].high), args[0].attained, False)


def _with_params(op: Op, args: list[Interval]) -> Interval:
    """The rule of a non-decreasing function with static parameters: round, reduce_precision."""
    (x,) = args
    return Interval(apply_op(op, [x.low]).astype(x.low.dtype), apply_op(op, [x.high]).astype(x.low.dtype))


def _inexact(f: Callable[[Array], Array]) -> Callable:
    """The rule of a non-decreasing function of INEXACT."""

    def rule(op: Op, args: list[Interval]) -> Interval:
        (x,) = args
        # a subnormal operand counts as 0 on some devices, and XLA's cbrt gives it a sign at random
        tiny = jnp.finfo(x.low.dtype).tiny
        least = jnp.where(x.low < 0, -tiny, 0) if op.prim in ("sqrt", "log") else -tiny
        low = jnp.where(jnp.abs(x.low) < tiny, least, x.low)
        high = jnp.where(jnp.abs(x.high) < tiny, tiny, x.high)
        return Interval(f(low), f(high))

    return rule


def _wave(f: Callable[[Array], Array]) -> Callable:
    """The rule of sin and cos: f itself at a normal number, else -1..1."""

    def rule(op: Op, args: list[Interval]) -> Interval:
        (x,) = args
        point = (x.low == x.high) & ((x.low == 0) | (jnp.abs(x.low) >= jnp.finfo(x.low.dtype).tiny))
        low, high = (jnp.where(point, f(x.low), e) for e in (-1.0, 1.0))
        return _where(jnp.isfinite(x.low) & jnp.isfinite(x.high), low, high)

    return rule


def _falling(f: Callable[[Array], Array]) -> Callable:
    return lambda op, args: Interval(f(args[0].high), f(args[0].low))


def _within(f: Callable[[Array], Array], least: float, largest: float, falls: bool = False) -> Callable:
    """The rule of a monotone function between `least` and `largest`; outside of these it may be NaN."""

    def rule(op: Op, args: list[Interval]) -> Interval:
        (x,) = args
        low, high = f(x.low), f(x.high)
        return _where((x.low >= least) & (x.high <= largest), *((high, low) if falls else (low, high)))

    return rule


def _rsqrt(op: Op, args: list[Interval]) -> Interval:
    (x,) = args
    return _where(x.low >= jnp.finfo(x.low.dtype).tiny, lax.rsqrt(x.high), lax.rsqrt(x.low))


def _cosh(op: Op, args: list[Interval]) -> Interval:
    (x,) = args
    a, b = lax.cosh(x.low), lax.cosh(x.high)
    crosses = (x.low <= 0) & (x.high >= 0)
    return Interval(jnp.where(crosses, jnp.ones_like(a), jnp.minimum(a, b)), jnp.maximum(a, b))


STEEPEST = 64.0  # the largest tangent that is bounded: beyond, devices differ by more than a share of it


def _tan(op: Op, args: list[Interval]) -> Interval:
    """tan within one period; anything where a pole is near, as the error of the operand is multiplied by 1 + tan^2."""
    (x,) = args
    period = lambda end: jnp.floor(end / math.pi + 0.5)
    low, high = lax.tan(x.low), lax.tan(x.high)
    steepest = jnp.maximum(jnp.abs(low), jnp.abs(high))
    fine = (period(x.low) == period(x.high)) & (x.high - x.low < math.pi) & (steepest <= STEEPEST) & (low <= high)
    slack = 2.0**-18 * (1 + size_of(x).astype(low.dtype)) * (1 + steepest * steepest)
    return _where(fine & (size_of(x) < 2.0**12), low - slack, high + slack)


def _pow(op: Op, args: list[Interval]) -> Interval:
    """x ** y of x >= 0, by its ends, as it is monotone in each; a literal integer y takes negative x too."""
    x, y = args
    dtype, tiny = x.low.dtype, jnp.finfo(x.low.dtype).tiny
    power = op.inputs[1].value if isinstance(op.inputs[1], Lit) else None
    y = Interval(y.low.astype(dtype), y.high.astype(dtype))
    # a subnormal operand counts as 0 on some devices
    ends = Interval(jnp.where(jnp.abs(x.low) < tiny, 0, x.low), jnp.where(jnp.abs(x.high) < tiny, tiny, x.high))
    positive = (x.low >= 0) & ~jnp.signbit(x.low)  # XLA compares subnormal numbers as 0
    found = _where(positive & jnp.isfinite(y.low) & jnp.isfinite(y.high), *corners(lax.pow, ends, y))
    if power is None or power < 0 or power != int(power):
        return found
    size = jnp.maximum(jnp.abs(x.low), jnp.abs(x.high))
    size = lax.pow(jnp.maximum(size, tiny), jnp.full_like(size, power))
    negative = jnp.signbit(x.low)
    least = jnp.zeros_like(size) if power % 2 == 0 else -size
    return Interval(jnp.where(negative, least, found.low), jnp.where(negative, size, found.high))


def _atan2(op: Op, args: list[Interval]) -> Interval:
    """Between -pi and pi; by its ends where x is positive, as it is monotone in each operand there."""
    y, x = args
    ends = corners(lax.atan2, y, x)
    right = x.low >= jnp.finfo(x.low.dtype).tiny
    low, high = (jnp.where(right, e, whole) for e, whole in zip(ends, (-math.pi, math.pi), strict=True))
    return _where(~(jnp.isnan(y.low) | jnp.isnan(x.low) | jnp.isnan(y.high) | jnp.isnan(x.high)), low, high)


def _rem(op: Op, args: list[Interval]) -> Interval:
    """The remainder of a division that rounds toward zero: of the sign of x, no larger than x or y."""
    x, y = args
    floats = jnp.issubdtype(x.low.dtype, jnp.floating)
    size = lambda i: jnp.maximum(jnp.abs(i.low), jnp.abs(i.high))
    crosses = (y.low <= 0) & (y.high >= 0)
    most = jnp.minimum(size(x), size(y)) if floats else jnp.where(crosses, size(x), jnp.minimum(size(x), size(y)))
    low, high = jnp.where(x.low < 0, -most, 0), jnp.where(x.high > 0, most, 0)
    if not floats:  # the magnitude of the least integer wraps around
        least = jnp.iinfo(x.low.dtype).min
        return widened(Interval(low, high), ((x.low == least) | (y.low == least)) & (least < 0))
    slack = 2.0**-20 * size(x)  # a device may compute x - trunc(x / y) * y
    fine = ~crosses & jnp.isfinite(size(x)) & jnp.isfinite(size(y))
    return _where(fine, low - slack, high + slack)


def _shift_right(op: Op, args: list[Interval]) -> Interval | None:
    """A shift by a literal; a logical one, of numbers of at least 0."""
    x, shift = args[0], op.inputs[1]
    if not isinstance(shift, Lit) or not 0 <= shift.value < x.low.dtype.itemsize * 8:
        return None
    low, high = (getattr(lax, op.prim)(end, jnp.full_like(end, shift.value)) for end in x[:2])
    # of one sign, so that both shifts are monotone in integers with and without a sign
    return widened(Interval(low, high), (x.low < 0) & (x.high >= 0) if op.prim == "shift_right_logical" else low > high)


def _and(op: Op, args: list[Interval]) -> Interval:
    """The common bits of two integers of which one is at least 0: at most as large as that one."""
    x, y = args
    top = np.array(jnp.iinfo(x.low.dtype).max, x.low.dtype)
    of = lambda i: jnp.where(i.low >= 0, i.high, top)
    high = jnp.minimum(of(x), of(y))
    return widened(Interval(jnp.zeros_like(high), high), (x.low < 0) & (y.low < 0))


FUNCTIONS: dict[str, Callable[..., Interval | None]] = {
    **{name: _monotone(getattr(lax, name)) for name in ("floor", "ceil")},
    **{
        name: _inexact(getattr(lax, name))
        for name in ("tanh", "exp", "exp2", "expm1", "sinh", "logistic", "log", "sqrt", "log1p", "cbrt", "atan")
    },
    **{name: _inexact(getattr(lax, name)) for name in ("asinh", "erf")},
    **{name: _wave(getattr(lax, name)) for name in ("sin", "cos")},
    **dict.fromkeys(("round", "reduce_precision"), _with_params),
    **dict.fromkeys(("shift_right_arithmetic", "shift_right_logical"), _shift_right),
    "erfc": _falling(lax.erfc),
    "asin": _within(lax.asin, -1.0, 1.0),
    "acos": _within(lax.acos, -1.0, 1.0, falls=True),
    "acosh": _within(lax.acosh, 1.0, math.inf),
    "atanh": _within(lax.atanh, -1.0, 1.0),
    "rsqrt": _rsqrt,
    "cosh": _cosh,
    "tan": _tan,
    "pow": _pow,
    "atan2": _atan2,
    "rem": _rem,
    "and": _and,
}
