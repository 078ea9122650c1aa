"""What is known of a value in each block of the attention matrix: an interval of a number, or the truth of a bool.

An interval has two flags, which decide whether conclusions are exact. Each is known while tracing or per block (`Flag`).

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
"""A fact known while tracing (a bool) or block by block."""


class Interval(typing.NamedTuple):
    """low <= value <= high in each block; arrays broadcast to [batch, heads, q blocks, kv blocks]."""

    low: Array
    high: Array
    attained: Flag = False
    contiguous: Flag = False


class Truth(typing.NamedTuple):
    """What is known of a bool in each block; the four arrays are bool and broadcast to one element a block.

    can_true, can_false     False where no entry of the block is true (false)
    sure_true, sure_false   True where some entry of the block is certainly true (false)
    """

    can_true: Array
    can_false: Array
    sure_true: Array
    sure_false: Array


Abstract = Interval | Truth


def unknown(dtype: str) -> Abstract:
    """What is known of a value of that dtype when nothing else is known."""
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
    """The dtype of the ends of intervals of a floating type: float32 for narrower types, which float32 represents exactly."""
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
    """`found`, but the whole range of the type in blocks of `wraps`, where the value may have wrapped around."""
    whole = typing.cast(Interval, unknown(found.low.dtype.name))
    stays = ~wraps
    return Interval(
        jnp.where(wraps, whole.low, found.low),
        jnp.where(wraps, whole.high, found.high),
        flag_and(found.attained, stays),
        flag_and(found.contiguous, stays),
    )


def is_nan(value: Array) -> Array:
    """Where the value is NaN; nowhere for integers."""
    return jnp.isnan(value) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.zeros(value.shape, bool)


# ------------------------------------------------------------------- flags


def flag_and(a: Flag, b: Flag) -> Flag:
    """Both facts; a bool where that is known while tracing."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def flag_or(a: Flag, b: Flag) -> Flag:
    """Either fact; a bool where that is known while tracing."""
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


def _expanded(axes: Axes) -> Axes:
    """The axes that vary within a block: q, kv and score."""
    return axes - {"delta", "b", "h"} | ({"q", "kv"} if "delta" in axes else frozenset())


def independent(parts: Sequence[Axes]) -> bool:
    """Whether no two operands depend on queries, nor two on keys, so that every combination of their values occurs."""
    seen: set[str] = set()
    for axes in map(_expanded, parts):
        if seen & axes:
            return False
        seen |= axes
    return True
