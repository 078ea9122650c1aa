"""What a mask is, and three small helpers that most mask files share."""

from collections.abc import Callable
from typing import TypeVar

from jax import Array

MaskMod = Callable[[Array, Array, Array, Array], Array]
"""`(b, h, q_idx, kv_idx) -> bool`, all int32 scalars; True keeps the entry."""

F = TypeVar("F", bound=Callable[..., Array])


def named(name: str) -> Callable[[F], F]:
    """Decorator: gives the function inside a factory the name that reports and errors will show."""

    def rename(function: F) -> F:
        function.__name__ = function.__qualname__ = name
        return function

    return rename


def pick(value: int | Array, index: Array) -> int | Array:
    """`value` itself if it is an int or `[]`, else `value[index]`; `[1]` serves every index."""
    if isinstance(value, int) or value.ndim == 0:
        return value
    return value[index] if value.shape[0] > 1 else value[0]


def of_token(values: Array, b: Array, index: Array) -> Array:
    """`values[index]` for `[T]`, `values[b, index]` for `[B, T]`; `[1, T]` serves every batch entry."""
    if values.ndim == 1:
        return values[index]
    return values[b, index] if values.shape[0] > 1 else values[0, index]
