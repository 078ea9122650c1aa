"""The types and arguments of mask mods and score mods, and the decorator that names what a factory returns."""

import inspect
from collections.abc import Callable
from typing import TypeVar

from jax import Array

MaskMod = Callable[[Array, Array, Array, Array], Array]
"""`(b, h, q_idx, kv_idx) -> bool`, all int32 scalars; True keeps the entry."""

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
"""`(score, b, h, q_idx, kv_idx) -> score`: scalars, floating and int32; `score` is already scaled."""

MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
"""The arguments of a mask mod and of a score mod, all positional."""

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


def without_types(signature: inspect.Signature) -> inspect.Signature:
    """The signature without annotations, as error messages show it: `(b, h, q_idx, kv_idx)`."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


def other_kind(signature: inspect.Signature, expected: tuple[str, ...]) -> str:
    """What a function with this signature may be instead of one that takes the arguments `expected`: "mask_mod" where a score mod is expected
    and it has as many arguments as a mask mod, "score_mod" the other way round, else "".
    """
    count = len(signature.parameters)
    if expected == SCORE_ARGUMENTS and count == len(MASK_ARGUMENTS):
        return "mask_mod"
    return "score_mod" if expected == MASK_ARGUMENTS and count == len(SCORE_ARGUMENTS) else ""
