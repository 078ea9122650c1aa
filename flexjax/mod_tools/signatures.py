"""The types and arguments of mask mods and score mods, and the decorator that names what a factory returns."""

import inspect
from collections.abc import Callable
from typing import TypeVar, cast

from jax import Array

from flexjax.mod_tools.made_for import Size, carry
from flexjax.mod_tools.picklable import Mod

MaskMod = Callable[[Array, Array, Array, Array], Array]
"""`(b, h, q_idx, kv_idx) -> bool`, all int32 scalars; True keeps the entry."""

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
"""`(score, b, h, q_idx, kv_idx) -> score`: scalars, floating and int32; `score` is already scaled."""

MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
"""The arguments of a mask mod and of a score mod, all positional."""

F = TypeVar("F", bound=Callable[..., object])


def named(name: str, *sizes: Size) -> Callable[[F], F]:
    """A decorator for the function inside a factory: it names it, makes it picklable and gives it its sizes."""

    def rename(function: F) -> F:
        function.__name__ = function.__qualname__ = name
        mod = cast(F, Mod(function))
        return carry(mod, sizes) if sizes else mod

    return rename


def without_types(signature: inspect.Signature) -> inspect.Signature:
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


def other_kind(signature: inspect.Signature, expected: tuple[str, ...]) -> str:
    """ "mask_mod" or "score_mod" if the function seems to be of the kind that is not `expected`; else ""."""
    count = len(signature.parameters)
    if expected == SCORE_ARGUMENTS and count == len(MASK_ARGUMENTS):
        return "mask_mod"
    return "score_mod" if expected == MASK_ARGUMENTS and count == len(SCORE_ARGUMENTS) else ""


def misplaced(signature: inspect.Signature, expected: tuple[str, ...]) -> bool:
    """Whether a function that takes the positional arguments `expected` names one of them at the place of another."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in kinds]
    return any(name in expected and name != wanted for name, wanted in zip(names, expected, strict=False))
