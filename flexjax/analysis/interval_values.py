"""What is known of a value in each block of the attention matrix: an interval of a number, or the truth of a bool.

An entry of a block is one (b, h, q, kv) of it. All arrays have four dims and broadcast to one element a block, usually
[batch, heads, q blocks, kv blocks]; the shape [1, 1, 1, 1] says the same of all blocks. Ends of NaN (then both) mean
that the value may be anything.
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
    """A number that lies between `low` and `high` in each block, both inclusive."""

    low: Array
    high: Array
    attained: Flag = False  # some entry of the block surely has the number `low`, and some entry `high`
    contiguous: Flag = False  # some entry surely has each integer between the ends


class Truth(typing.NamedTuple):
    """What is known of a bool in each block: four bool arrays."""

    # False where no entry of the block is true (false)
    can_true: Array
    can_false: Array
    # True where some entry of the block is certainly true (false)
    sure_true: Array
    sure_false: Array


Abstract = Interval | Truth
"""What is known of a value in each block: an Interval of a number, a Truth of a bool."""


def unknown(dtype: str) -> Abstract:
    """What is known of a value of which only the dtype is known."""
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
    """The dtype of the ends of a floating type's interval: float32 represents types of less than 32 bits exactly."""
    return jnp.dtype("float32") if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def of_literal(lit: Lit) -> Abstract:
    if lit.dtype == "bool":
        yes, no = jnp.full((1, 1, 1, 1), bool(lit.value)), jnp.full((1, 1, 1, 1), not lit.value)
        return Truth(yes, no, yes, no)
    floating = jnp.issubdtype(jnp.dtype(lit.dtype), jnp.floating)
    value = jnp.full((1, 1, 1, 1), lit.value, wide_type(lit.dtype) if floating else jnp.dtype(lit.dtype))
    return Interval(value, value, True, not floating)


def widened(found: Interval, wraps: Array) -> Interval:
    """The interval, replaced by the whole range of its type in blocks where the value may have wrapped around."""
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
    """Whether both facts hold; a Python bool where that is known while tracing."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def flag_or(a: Flag, b: Flag) -> Flag:
    """Whether one of two facts holds; a Python bool where that is known while tracing."""
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return a | b


def _expanded(axes: Axes) -> Axes:
    """The axes without b and h, with delta (a function of q - kv) replaced by q and kv."""
    return axes - {"delta", "b", "h"} | ({"q", "kv"} if "delta" in axes else frozenset())


def independent(parts: Sequence[Axes]) -> bool:
    """Whether no two operands share an axis of q, kv and score, so that every combination of their values occurs."""
    seen: set[str] = set()
    for axes in map(_expanded, parts):
        if seen & axes:
            return False
        seen |= axes
    return True
