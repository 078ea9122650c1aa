"""Abstract evaluation of a mask program over blocks of the attention matrix.

Batch entries and heads are enumerated; queries and keys come in blocks. Each integer or float is an interval per block, each
bool a `Truth`: can it be true, can it be false, and is it known to be true (false) somewhere. The analysis is sound: a block is
called full or empty only where every entry is on or off. It is exact where the witnesses say so: `sure_true` and `sure_false`
mark blocks that certainly hold both.

What is known of a value is in interval_values.py, what operations, comparisons and loads make of it in interval_rules.py,
interval_truth.py and interval_loads.py. A value of b and h alone is computed as it is, by the operation itself.

Rounding: additions, products and quotients round the same way wherever they are computed, except that a compiler may keep
more digits than the type has: of a product that is added to something, and of types narrower than float32. Functions such as
exp differ by a few units in the last place. Both widen the interval, which then no longer claims that its ends occur.

Reference: Moore, Interval Analysis (1966); the idea of deciding attention blocks by it is flexjax's own.
"""

import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.analysis.block_grid import BlockGrid
from flexjax.analysis.interval_floats import narrow_type
from flexjax.analysis.interval_loads import load_extremes
from flexjax.analysis.interval_rules import RULES, rounded, unless_wrapped
from flexjax.analysis.interval_truth import COMPARISONS, logic
from flexjax.analysis.interval_values import Abstract, Interval, Truth, independent, of_literal, unknown, wide_type
from flexjax.ir import program as ir
from flexjax.ir.evaluate import apply_op
from flexjax.ir.program import Lit, Load, Op, Program, Val, axes_of
from flexjax.ir.ranges import is_integer, modular

Array = jax.Array


def decide(program: Program, captures: Sequence[Array], grid: BlockGrid) -> Truth:
    """The mask's truth in each block of the grid."""
    env: dict[int, typing.Any] = {v.id: grid.of(v.id) for v in program.inputs[1:]}
    # What b and h alone decide, as the program's own arithmetic has it: one value in every block.
    points: dict[int, Array] = {i: typing.cast(Interval, env[i]).low for i in (ir.B, ir.H)}
    products: set[int] = set()

    def read(atom: ir.Atom) -> Abstract:
        return of_literal(atom) if isinstance(atom, Lit) else env[atom.id]

    def point(atom: ir.Atom) -> Array | None:
        return _point_literal(atom) if isinstance(atom, Lit) else points.get(atom.id)

    for step in program.steps:
        known = None if isinstance(step, ir.Call) else [point(a) for a in step.inputs]
        if isinstance(step, ir.Call):
            env.update({v.id: unknown(v.dtype) for v in step.outs})
        elif known is not None and all(v is not None for v in known) and _is_reproducible(step):
            value = _evaluate_point(step, typing.cast(list[Array], known), captures)
            points[step.out.id], env[step.out.id] = value, _of_point(value, step.out.dtype)
        elif isinstance(step, Load):
            env[step.out.id] = load_extremes(step, [read(a) for a in step.index], captures[step.capture], grid, points)
        else:
            env[step.out.id] = _operation(step, [read(a) for a in step.inputs], env, products)
            if step.prim in ("mul", "square", "integer_pow"):
                products.add(step.out.id)
    return as_truth(read(program.results[0]))


def as_truth(value: Abstract) -> Truth:
    assert isinstance(value, Truth), "a mask program ends in a bool"
    return value


# ------------------------------------------------------------------- values of b and h alone


def _point_literal(lit: Lit) -> Array:
    return jnp.full((1, 1, 1, 1), lit.value, jnp.dtype(lit.dtype))


def _is_reproducible(step: Op | Load) -> bool:
    """Whether the result has the same bits wherever it is computed."""
    dtype = jnp.dtype(step.out.dtype)
    if isinstance(step, Load) or not jnp.issubdtype(dtype, jnp.floating):
        return not jnp.issubdtype(dtype, jnp.complexfloating)
    return dtype.itemsize >= 4 and step.prim in EXACT_FLOATS


EXACT_FLOATS = frozenset({"max", "min", "neg", "abs", "select_n", "convert_element_type", "floor", "ceil", "sign"})


def _evaluate_point(step: Op | Load, args: list[Array], captures: Sequence[Array]) -> Array:
    if isinstance(step, Op):
        return apply_op(step, jnp.broadcast_arrays(*args))
    array = jnp.asarray(captures[step.capture])
    return array.at[tuple(args)].get(mode="clip") if args else array.reshape(1, 1, 1, 1)


def _of_point(value: Array, dtype: str) -> Abstract:
    if dtype == "bool":
        return Truth(value, ~value, value, ~value)
    floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    ends = value.astype(wide_type(dtype)) if floating else value
    return Interval(ends, ends, True, not floating)


# ------------------------------------------------------------------- operations


def _operation(op: Op, args: list[typing.Any], env: Mapping[int, typing.Any], products: set[int]) -> Abstract:
    if op.out.linear is not None:
        exact = _linear(op.out, env)
        if exact is not None:
            return exact
    if not all(_is_ordered(a.dtype) for a in (*op.inputs, op.out)):
        return unknown(op.out.dtype)
    apart = independent([axes_of(a) for a in op.inputs])
    if op.prim in COMPARISONS and all(isinstance(a, Interval) for a in args):
        return COMPARISONS[op.prim](args[0], args[1], apart)
    if op.out.dtype == "bool":
        return logic(op, args, apart)
    rule = RULES.get(op.prim)
    if rule is None or (
        op.prim != "select_n" and any(isinstance(a, Truth) for a in args) and op.prim != "convert_element_type"
    ):
        return unknown(op.out.dtype)
    found = rule(op, args)
    if found is None:
        return unknown(op.out.dtype)
    if not apart and op.prim in DEPENDENT_ENDS:
        found = found._replace(attained=False, contiguous=False)
    if not is_integer(op.out.dtype):
        return rounded(op, args, found, products)
    return unless_wrapped(op, args, found)


def _is_ordered(dtype: str) -> bool:
    """Whether the rules hold for numbers of that type: real ones, with their negatives."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        return True
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and narrow_type(dtype).signed


DEPENDENT_ENDS = frozenset({"add", "sub", "mul", "max", "min", "floordiv", "floormod"})
"""Operations of several operands, whose ends occur only where the operands move independently."""


def _linear(val: Val, env: Mapping[int, typing.Any]) -> Interval | None:
    """The exact interval of b*b + h*h + q*q + kv*kv + const + uniform terms."""
    linear = val.linear
    assert linear is not None
    terms = [(c, env[i]) for i, c in zip((1, 2, 3, 4), (linear.b, linear.h, linear.q, linear.kv), strict=True) if c]
    for ident, coefficient in linear.uniform:
        terms.append((coefficient, env[ident]))
    if val.low is None or any(isinstance(t, Truth) or t.attained is not True for _, t in terms):
        return None
    # The whole fits the type, so partial sums may wrap around and come back.
    low = high = jnp.full((1, 1, 1, 1), modular(linear.const, val.dtype))
    for coefficient, term in terms:
        ends = (term.low, term.high) if coefficient >= 0 else (term.high, term.low)
        low, high = (
            e + t.astype(val.dtype) * modular(coefficient, val.dtype) for e, t in zip((low, high), ends, strict=True)
        )
    return Interval(low, high, True, abs(linear.q) <= 1 and abs(linear.kv) <= 1)
