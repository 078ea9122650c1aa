"""What is known of a reduction over a loop index, from what is known of its operand over all values of the index.

A fact "at some entry" of the operand is one at some entry and some value of the index: an `or` is then true at that
entry, and nothing else is sure. The cost does not depend on the number of values.
"""

import typing

import jax.numpy as jnp

from flexjax.analysis.interval_rules import range_known
from flexjax.analysis.interval_values import Abstract, Interval, Truth, unknown
from flexjax.ir.program import Op, Val, axes_of, loop_size
from flexjax.ir.ranges import is_integer


def reduce_all(step: Op, operand: Abstract) -> Abstract:
    never = jnp.zeros((1, 1, 1, 1), bool)
    if isinstance(operand, Truth):
        if step.prim in ("loop_or", "loop_max"):
            return Truth(operand.can_true, operand.can_false, operand.sure_true, ~operand.can_true)
        if step.prim in ("loop_and", "loop_min"):
            return Truth(operand.can_true, operand.can_false, ~operand.can_false, operand.sure_false)
        return Truth(~never, operand.can_false | operand.can_true, never, never)
    if step.prim in ("loop_max", "loop_min"):
        return Interval(operand.low, operand.high)
    if step.prim == "loop_add":
        return _sum(step, operand)
    return unknown(step.out.dtype)


def _sum(step: Op, x: Interval) -> Abstract:
    """The interval of a sum; unknown where it may wrap around and for narrow floats, which rounding may lose."""
    size, dtype = loop_size(*axes_of(step.inputs[1])), step.out.dtype
    if is_integer(dtype):
        if not range_known(typing.cast(Val, step.out)) or not range_known(step.inputs[0]):
            return unknown(dtype)
        return Interval(x.low * size, x.high * size)
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating) or jnp.dtype(dtype).itemsize < 4:
        return unknown(dtype)
    # each of `size` partial sums is rounded once, relative to itself
    error = 2.0 * size * float(jnp.finfo(jnp.dtype(dtype)).eps)
    largest = jnp.maximum(jnp.abs(x.low), jnp.abs(x.high)) * size
    low, high = x.low * size - error * largest, x.high * size + error * largest
    bad = ~jnp.isfinite(largest)  # an infinite term of either sign makes a sum infinite or NaN
    return Interval(jnp.where(bad, jnp.nan, low), jnp.where(bad, jnp.nan, high))
