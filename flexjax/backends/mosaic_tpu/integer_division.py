"""Integer division inside a TPU kernel, with jax's results where those of the hardware are undefined.

Quotients by a constant become shifts or a float32 multiplication where the range of the numerator allows it. The
undefined cases are division by 0 and division of the least integer by -1; each needs selects, which are emitted only if
the ranges of the operands allow the case. A rule takes a step of a program and its operands, of shapes that broadcast
together, and returns the result.
"""

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.ir.program import Lit, Op, Val
from flexjax.ir.ranges import may_be, quotient_may_overflow

Rule = Callable[..., jax.Array]
F32 = jnp.float32


def broadcast(args: Sequence[jax.Array | np.integer]) -> list[jax.Array]:
    shape = np.broadcast_shapes(*[np.shape(a) for a in args])
    return [typing.cast(jax.Array, a) if np.shape(a) == shape else jnp.broadcast_to(a, shape) for a in args]


def _bounds(atom: Val | Lit) -> tuple[int | None, int | None]:
    """(least, greatest) value that an integer operand may have; None where unknown."""
    if isinstance(atom, Lit):
        return int(typing.cast(int, atom.value)), int(typing.cast(int, atom.value))
    return atom.low, atom.high


def _int_division(op: Op, x: jax.Array, y: jax.Array, floor: bool) -> jax.Array:
    """The int32 quotient x / y, rounded down if `floor`, else towards 0; undefined in the two cases."""
    by = op.inputs[1]
    low, high = _bounds(op.inputs[0])
    if isinstance(by, Lit) and int(typing.cast(int, by.value)) > 0:
        c = int(typing.cast(int, by.value))
        positive = low is not None and low >= 0
        if c == 1:
            return x
        if c & (c - 1) == 0 and (floor or positive):
            return lax.shift_right_arithmetic(*broadcast([x, np.int32(c.bit_length() - 1)]))
        # The range of x does not hold at positions past the end of the matrix, where the quotient may be wrong; they
        # are masked.
        if positive and high is not None and high < 1 << 21:
            return jnp.floor((jnp.asarray(x).astype(F32) + 0.5) * np.float32(1.0 / c)).astype(jnp.int32)
    x, y = broadcast([x, y])
    if not floor:
        return lax.div(x, y)
    quotient, rest = lax.div(x, y), lax.rem(x, y)
    wrong = (rest != 0) & ((rest < 0) != (y < 0))
    return quotient - jnp.where(wrong, 1, 0).astype(quotient.dtype)


def _unsafe_floormod(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """The remainder of x / y with the sign of y, of integers or floats."""
    by = op.inputs[1]
    if op.out.dtype == "int32" and isinstance(by, Lit) and int(typing.cast(int, by.value)) > 0:
        c = int(typing.cast(int, by.value))
        if c & (c - 1) == 0:
            return lax.bitwise_and(*broadcast([x, np.int32(c - 1)]))
        x = jnp.asarray(x)
        return x - _int_division(op, x, y, floor=True) * np.int32(c)
    x, y = broadcast([x, y])
    rest = lax.rem(x, y)
    if op.out.dtype == "uint32":
        return rest
    wrong = (rest != 0) & ((rest < 0) != (y < 0))
    return jnp.where(wrong, rest + y, rest)


def _unsafe_floordiv(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """The quotient x / y of int32 or uint32, rounded down."""
    if op.out.dtype == "uint32":
        return lax.div(*broadcast([x, y]))
    return _int_division(op, x, y, floor=True)


def _unsafe_rem(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """The remainder of x / y with the sign of x, of integers or floats."""
    return lax.rem(*broadcast([x, y]))


def _unsafe_div(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """The quotient x / y of int32 or uint32, rounded towards 0."""
    if op.out.dtype == "uint32":
        return lax.div(*broadcast([x, y]))
    return _int_division(op, x, y, floor=False)


def _defined(divide: Rule) -> Rule:
    """The rule `divide` with jax's results also for a division by 0 and of the least integer by -1."""

    def rule(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
        if op.out.dtype not in ("int32", "uint32"):
            return divide(op, x, y)
        by_zero, overflows = may_be(op.inputs[1], 0), quotient_may_overflow(*op.inputs)
        if not by_zero and not overflows:
            return divide(op, x, y)
        x, y = broadcast([x, y])
        safe = jnp.where(y == 0, jnp.ones_like(y), y) if by_zero else y
        safe = jnp.where(y == -1, jnp.ones_like(y), safe) if overflows else safe
        out = divide(op, x, safe)
        if overflows:  # integer negation maps the least integer to itself
            out = jnp.where(y == -1, jnp.zeros_like(x) if op.prim in ("rem", "floormod") else -x, out)
        return jnp.where(y == 0, _by_zero(op, x), out) if by_zero else out

    return rule


def _by_zero(op: Op, x: jax.Array) -> jax.Array:
    """jax's result of the integer division or remainder of x by 0, in the shape and dtype of x.

    rem gives x, and floormod 0. div, and floordiv of uint32, give all bits set (-1 in int32). floordiv of int32 gives
    -1 for x = 0, else -2.
    """
    if op.prim == "rem":
        return x
    if op.prim == "floormod":
        return jnp.zeros_like(x)
    if op.prim == "div" or op.out.dtype == "uint32":
        return ~jnp.zeros_like(x)
    return jnp.where(x == 0, -1, -2).astype(x.dtype)


int_div = _defined(_unsafe_div)
rem = _defined(_unsafe_rem)
floordiv = _defined(_unsafe_floordiv)
floormod = _defined(_unsafe_floormod)
