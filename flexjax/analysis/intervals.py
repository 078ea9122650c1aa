"""Interval analysis: decides for each block of the attention matrix whether a mask is true everywhere, nowhere or both.

The mask program is evaluated step by step, once for all blocks, on what is known of each value: an `Interval` per block
in place of each number and a `Truth` per block in place of each bool (interval_values.py).

  point      a value of b and h alone, or of literals: one number a block, computed by the operation itself
  product    the result of a multiplication or power, which a compiler may fuse with the addition that follows

The analysis is sound: it calls a block full (empty) only if the mask is True (False) for every entry. It is exact for a
block that is full, empty, or certainly has both outcomes (`Truth.sure_true` and `Truth.sure_false`).

Every device rounds sums, products and quotients alike, with two exceptions: a product that is added to something (FMA),
and types narrower than float32, of which a compiler may keep more digits. Functions such as exp differ between devices
and compilers (INEXACT of interval_functions.py). There the interval is widened and its ends are not `attained`.

Reference: Moore, Interval Analysis (1966); the idea of deciding attention blocks by it is flexjax's own.
"""

import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from flexjax.analysis.block_grid import BlockGrid
from flexjax.analysis.interval_floats import narrow_type
from flexjax.analysis.interval_functions import INEXACT
from flexjax.analysis.interval_loads import load_extremes
from flexjax.analysis.interval_loops import reduce_all
from flexjax.analysis.interval_rules import RULES, rounded, unless_wrapped
from flexjax.analysis.interval_truth import COMPARISONS, logic, negate, same
from flexjax.analysis.interval_values import Abstract, Interval, Truth, independent, of_literal, unknown, wide_type
from flexjax.ir import program as ir
from flexjax.ir.evaluate import apply_op
from flexjax.ir.operations import LOOP_INDEX, REDUCTIONS
from flexjax.ir.program import Lit, Load, Op, Program, Val, axes_of, loop_size
from flexjax.ir.ranges import is_integer, modular

Array = jax.Array


def depends_on_device(program: Program) -> bool:
    """Whether devices compute a floating result differently, sums of products and narrow types aside."""
    ops = [step for step in program.steps if isinstance(step, Op)]
    floats = [op for op in ops if jnp.issubdtype(jnp.dtype(op.out.dtype), jnp.inexact)]
    return any(op.prim in INEXACT or op.prim not in RULES for op in floats)


def decide(program: Program, captures: Sequence[Array], grid: BlockGrid, entries: bool = False) -> Truth:
    """What is known of a mask in each block of the grid; `entries` as of `bound`."""
    return as_truth(bound(program, captures, grid, entries))


def bound(
    program: Program, captures: Sequence[Array], grid: BlockGrid, entries: bool = False, score: Interval | None = None
) -> Abstract:
    """What is known of the first result of a program in each block of the grid, where the score lies in `score`.

    With `entries` each block is one entry, so that queries and keys are points too. What depends on a loop index is
    bounded over all of its values at once, so the cost does not grow with them. It works under jit.
    """
    env: dict[int, Abstract] = {v.id: grid.of(v.id) for v in program.inputs[1:]}
    if score is not None:
        env[ir.SCORE] = score
    # Points by id: arrays of four dims that broadcast to one number a block.
    known_inputs = (ir.B, ir.H, ir.Q, ir.KV) if entries else (ir.B, ir.H)
    points: dict[int, Array] = {i: typing.cast(Interval, env[i]).low for i in known_inputs}
    products: set[int] = set()
    loops = frozenset(ir.loop_indices(program).values())

    def read(atom: ir.Atom) -> Abstract:
        return of_literal(atom) if isinstance(atom, Lit) else env[atom.id]

    def point(atom: ir.Atom) -> Array | None:
        """The number that an operand is in each block, if it is a point; else None."""
        return _point_literal(atom) if isinstance(atom, Lit) else points.get(atom.id)

    for step in program.steps:
        known = None if isinstance(step, ir.Call) else [point(a) for a in step.inputs]
        if isinstance(step, Op) and step.prim == LOOP_INDEX:
            low = jnp.zeros((1, 1, 1, 1), jnp.int32)
            env[step.out.id] = Interval(low, low + (loop_size(*step.out.axes) - 1), True, True)
        elif isinstance(step, Op) and step.prim in REDUCTIONS:
            env[step.out.id] = reduce_all(step, read(step.inputs[0]))
        elif isinstance(step, ir.Call):
            env.update({v.id: unknown(v.dtype) for v in step.outs})
        elif known is not None and all(v is not None for v in known) and _is_reproducible(step):
            value = _evaluate_point(step, typing.cast(list[Array], known), captures)
            points[step.out.id], env[step.out.id] = value, _of_point(value, step.out.dtype)
        elif isinstance(step, Load):
            env[step.out.id] = load_extremes(
                step, [read(a) for a in step.index], captures[step.capture], grid, points, loops
            )
        else:
            env[step.out.id] = _operation(step, [read(a) for a in step.inputs], env, products)
            if step.prim in ("mul", "square", "integer_pow"):
                products.add(step.out.id)
    return read(program.results[0])


def as_truth(value: Abstract) -> Truth:
    assert isinstance(value, Truth), "a mask program ends in a bool"
    return value


# ------------------------------------------------------------------- values of b and h alone


def _point_literal(lit: Lit) -> Array:
    return jnp.full((1, 1, 1, 1), lit.value, jnp.dtype(lit.dtype))


def _is_reproducible(step: Op | Load) -> bool:
    """Whether every device and compiler computes the same bits from the same operands."""
    dtype = jnp.dtype(step.out.dtype)
    if isinstance(step, Load) or not jnp.issubdtype(dtype, jnp.floating):
        return not jnp.issubdtype(dtype, jnp.complexfloating)
    return dtype.itemsize >= 4 and step.prim in EXACT_FLOATS


EXACT_FLOATS = frozenset({"max", "min", "neg", "abs", "select_n", "convert_element_type", "floor", "ceil", "sign"})
"""Operations whose floating results need no rounding, so that every device computes the same bits."""


def _evaluate_point(step: Op | Load, args: list[Array], captures: Sequence[Array]) -> Array:
    """The result of an operation or load whose operands are points: one number a block."""
    if isinstance(step, Op):
        return apply_op(step, jnp.broadcast_arrays(*args))
    array = jnp.asarray(captures[step.capture])
    return array.at[tuple(args)].get(mode="clip") if args else array.reshape(1, 1, 1, 1)


def _of_point(value: Array, dtype: str) -> Abstract:
    """A point as an Interval with equal ends, or as a Truth that is certain everywhere."""
    if dtype == "bool":
        return Truth(value, ~value, value, ~value)
    floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    ends = value.astype(wide_type(dtype)) if floating else value
    return Interval(ends, ends, True, not floating)


# ------------------------------------------------------------------- operations


def _operation(op: Op, args: list[Abstract], env: Mapping[int, Abstract], products: set[int]) -> Abstract:
    """What is known of an operation's result in each block; `env` has what is known of earlier values, by id."""
    if op.out.linear is not None:
        exact = _interval_of_linear(op.out, env)
        if exact is not None:
            return exact
    if not all(_is_ordered(a.dtype) for a in (*op.inputs, op.out)):
        return unknown(op.out.dtype)
    apart = independent([axes_of(a) for a in op.inputs])
    intervals = [a for a in args if isinstance(a, Interval)]
    if op.prim in ("eq", "ne") and op.inputs[0] == op.inputs[1] and intervals:
        return same(intervals[0]) if op.prim == "eq" else negate(same(intervals[0]))
    if op.prim in COMPARISONS and len(intervals) == len(args):
        return COMPARISONS[op.prim](intervals[0], intervals[1], apart)
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
    """Whether the interval rules hold for the dtype: integers, bools and real floats with a sign."""
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        return True
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and narrow_type(dtype).signed


DEPENDENT_ENDS = frozenset({"add", "sub", "mul", "max", "min", "floordiv", "floormod"})
"""Operations whose result attains its ends only if every combination of the operands' values occurs."""


def _interval_of_linear(val: Val, env: Mapping[int, Abstract]) -> Interval | None:
    """The interval of an integer that is an affine function of b, h, q and kv; None where it may not be exact.

    Better than the operation's rule, because q and kv appear once each: (q - kv) + q would count q twice.
    """
    linear = val.linear
    assert linear is not None
    of_inputs = zip((ir.B, ir.H, ir.Q, ir.KV), (linear.b, linear.h, linear.q, linear.kv), strict=True)
    found = [(c, env[i]) for i, c in (*((i, c) for i, c in of_inputs if c), *linear.uniform)]
    terms = [(c, t) for c, t in found if isinstance(t, Interval) and t.attained is True]
    if val.low is None or len(terms) < len(found):
        return None
    # The total fits the type, so partial sums may wrap around: the total is right modulo 2^bits.
    low = high = jnp.full((1, 1, 1, 1), modular(linear.const, val.dtype))
    for coefficient, term in terms:
        ends = (term.low, term.high) if coefficient >= 0 else (term.high, term.low)
        low, high = (
            e + t.astype(val.dtype) * modular(coefficient, val.dtype) for e, t in zip((low, high), ends, strict=True)
        )
    return Interval(low, high, True, abs(linear.q) <= 1 and abs(linear.kv) <= 1)
