"""The types of mask mods and score mods, and the decorator that names what a factory returns."""

from collections.abc import Callable
from typing import TypeVar

from jax import Array

MaskMod = Callable[[Array, Array, Array, Array], Array]
"""`(b, h, q_idx, kv_idx) -> bool`, all int32 scalars; True keeps the entry."""

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
"""`(score, b, h, q_idx, kv_idx) -> score`: scalars, floating and int32; `score` is already scaled."""

F = TypeVar("F", bound=Callable[..., object])


def named(name: str) -> Callable[[F], F]:
    """Makes a decorator for the function inside a factory: it sets the function's `__name__` and `__qualname__` to
    `name` and returns the function itself.

    `explain` and error messages show the name.
    """

    def rename(function: F) -> F:
        """Sets the name of `function` and returns the function itself."""
        function.__name__ = function.__qualname__ = name
        return function

    return rename
