"""What is known of a value in each block of the attention matrix: an interval of a number, or the truth of a bool.

A block is a rectangle of one batch entry, one head, a range of queries and a range of keys; an entry is one (b, h, q, kv) of
it. All arrays have four dims and broadcast to one element a block, usually [batch, heads, q blocks, kv blocks]; the shape [1,
1, 1, 1] says the same of all blocks. An interval has two flags, which decide whether conclusions are exact:

    attained     both ends are values that some entry of the block has
    contiguous   every integer between the ends is a value that some entry of the block has

Ends of NaN (then both) mean that the value may be anything.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.ir.program import Axes, Lit

Array = jax.Array

Flag = bool | Array
"""A fact that is known while tracing (a Python bool), or known for each block (a bool array)."""


class Interval(typing.NamedTuple):
    """A number that lies between `low` and `high` in each block, both inclusive; arrays that broadcast over the blocks.

    attained     whether some entry of the block surely has the number `low`, and some entry `high`
    contiguous   whether some entry surely has each integer between the ends
    """

    low: Array
    high: Array
    attained: Flag = False
    contiguous: Flag = False


class Truth(typing.NamedTuple):
    """What is known of a bool in each block: four bool arrays.

    can_true, can_false     False where no entry of the block is true (false)
    sure_true, sure_false   True where some entry of the block is certainly true (false)
    """

    can_true: Array
    can_false: Array
    sure_true: Array
    sure_false: Array


Abstract = Interval | Truth
"""What is known of a value in each block: an Interval of a number, a Truth of a bool."""


def unknown(dtype: str) -> Abstract:
    """What is known of a value of which only the dtype is known, as arrays [1, 1, 1, 1]: for "bool" a Truth that can be either and is
    certain of nothing; else an Interval without flags, the whole range of an integer type, or NaN at both ends for other types.
    """
    if dtype == "bool":
        yes, no = jnp.ones((1, 1, 1, 1), bool), jnp.zeros((1, 1, 1, 1), bool)
        return Truth(yes, yes, no, no)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        info = jnp.iinfo(jnp.dtype(dtype))
        ends = (jnp.full((1, 1, 1, 1), np.array(e, jnp.dtype(dtype))) for e in (info.min, info.max))
        return Interval(*ends)
    nan = jnp.full((1, 1, 1, 1), jnp.nan, wide_type(dtype))
    return Interval(nan, nan)


def wide_type(dtype: str) -> jnp.dtype:
    """The dtype in which the ends of an interval of a floating type are stored: float32 for types of less than 32 bits, which
    it represents exactly; the type itself for others.
    """
    return jnp.dtype("float32") if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def of_literal(lit: Lit) -> Abstract:
    """What is known of a literal: an interval with equal ends, contiguous if it is an integer, or the truth of a bool.

    The arrays have shape [1, 1, 1, 1], because a literal has one value in all blocks.
    """
    if lit.dtype == "bool":
        yes, no = jnp.full((1, 1, 1, 1), bool(lit.value)), jnp.full((1, 1, 1, 1), not lit.value)
        return Truth(yes, no, yes, no)
    floating = jnp.issubdtype(jnp.dtype(lit.dtype), jnp.floating)
    value = jnp.full((1, 1, 1, 1), lit.value, wide_type(lit.dtype) if floating else jnp.dtype(lit.dtype))
    return Interval(value, value, True, not floating)


def widened(found: Interval, wraps: Array) -> Interval:
    """The interval `found`, replaced by the whole range of its type in blocks where `wraps` (bool) is True.

    There the value may have wrapped around, and the flags become False.
    """
    whole = typing.cast(Interval, unknown(found.low.dtype.name))
    stays = ~wraps
    return Interval(
        jnp.where(wraps, whole.low, found.low),
        jnp.where(wraps, whole.high, found.high),
        flag_and(found.attained, stays),
        flag_and(found.contiguous, stays),
    )


def is_nan(value: Array) -> Array:
    """Where the elements are NaN, a bool array; False for integers."""
    return jnp.isnan(value) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.zeros(value.shape, bool)


# ------------------------------------------------------------------- flags


def flag_and(a: Flag, b: Flag) -> Flag:
    """Whether both facts a and b hold: a Python bool where that is known while tracing (a False decides), else a bool for each
    block.
    """
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def flag_or(a: Flag, b: Flag) -> Flag:
    """Whether fact a or fact b holds: a Python bool where that is known while tracing (a True decides), else a bool for each
    block.
    """
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


def _expanded(axes: Axes) -> Axes:
    """Those of q, kv and score that the axes contain, with delta (a function of q - kv) replaced by q and kv."""
    return axes - {"delta", "b", "h"} | ({"q", "kv"} if "delta" in axes else frozenset())


def independent(parts: Sequence[Axes]) -> bool:
    """Whether no two operands share an axis of q, kv and score, so that every combination of their values occurs.

    parts   the axes of each operand; b and h do not count, and delta counts as q and kv
    """
    seen: set[str] = set()
    for axes in map(_expanded, parts):
        if seen & axes:
            return False
        seen |= axes
    return True
