"""Combines mask mods by and, or and not, and chains score mods: plain functions in, one plain function out.

A mask mod is a function (b, h, q_idx, kv_idx) -> bool, a score mod (score, b, h, q_idx, kv_idx) -> score, both of scalars. An entry is visible
where the mask is True. The functions that are made have names such as "and_masks(causal, window)".
"""

import inspect
from collections.abc import Callable

import numpy as np
from jax import Array

from flexjax.mod_tools.signatures import MASK_ARGUMENTS, SCORE_ARGUMENTS, named, other_kind, without_types
from flexjax.types import MaskMod, ScoreMod


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask mod `mask_mods[0](..) & mask_mods[1](..) & ..`: an entry is visible if it is visible under every mask.

    Raises ValueError for no functions, and for anything that is not callable as a mask mod.
    """
    _check("and_masks", "mask_mods", mask_mods, MASK_ARGUMENTS)

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        """Whether every mask keeps the entry: the `&` of their results, all of which are computed."""
        kept = mask_mods[0](b, h, q_idx, kv_idx)
        for other in mask_mods[1:]:
            kept = kept & other(b, h, q_idx, kv_idx)
        return kept

    return named(f"and_masks({_names(mask_mods)})")(mask_mod)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask mod `mask_mods[0](..) | mask_mods[1](..) | ..`: an entry is visible if it is visible under some mask.

    Raises ValueError for no functions, and for anything that is not callable as a mask mod.
    """
    _check("or_masks", "mask_mods", mask_mods, MASK_ARGUMENTS)

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        """Whether some mask keeps the entry: the `|` of their results, all of which are computed."""
        kept = mask_mods[0](b, h, q_idx, kv_idx)
        for other in mask_mods[1:]:
            kept = kept | other(b, h, q_idx, kv_idx)
        return kept

    return named(f"or_masks({_names(mask_mods)})")(mask_mod)


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """A mask mod `~mask_mod(..)`: an entry is visible if `mask_mod` hides it. Where mask_mod returns a Python bool, its `not`.

    Raises ValueError for anything that is not callable as a mask mod.
    """
    _check_one("not_mask", "mask_mod", mask_mod, MASK_ARGUMENTS)

    def opposite(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        """Whether the mask does not keep the entry."""
        kept = mask_mod(b, h, q_idx, kv_idx)
        return not kept if isinstance(kept, bool) else ~kept  # ~True is -2

    return named(f"not_mask({_names((mask_mod,))})")(opposite)


def chain_mods(*score_mods: ScoreMod) -> ScoreMod:
    """One score mod that applies one or more: `.. score_mods[1](score_mods[0](score, ..), ..)`, the first mod first.

    Raises ValueError for no functions, and for anything that is not callable as a score mod.
    """
    _check("chain_mods", "score_mods", score_mods, SCORE_ARGUMENTS)

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score of one entry after all mods, each applied to the result of the one before; b, h, q_idx and kv_idx are the same for
        all.
        """
        for mod in score_mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    return named(f"chain_mods({_names(score_mods)})")(score_mod)


def _check(call: str, name: str, mods: object, arguments: tuple[str, ...]) -> None:
    """Raises ValueError unless `mods` can be called with `arguments`, or is a tuple of at least one function that can.

    call, name   the function that the user called and its parameter that takes the mods, for the message
    arguments    the names of the positional arguments that a mod must take
    """
    if not isinstance(mods, tuple):
        _check_one(call, name, mods, arguments)
        return
    if not mods:
        raise ValueError(f"`{call}` got no functions; expected at least one. Pass `{name}` one by one.")
    for i, mod in enumerate(mods):
        _check_one(call, f"{name}[{i}]", mod, arguments)


def _check_one(call: str, name: str, mod: object, arguments: tuple[str, ...]) -> None:
    """Raises ValueError unless `mod` is a function that can be called with positional `arguments` (their names).

    call, name   the function that the user called and which of its arguments `mod` is, for the message

    A callable without a signature (written in C) passes.
    """
    wanted = f"a function of ({', '.join(arguments)})"
    if not callable(mod):
        if isinstance(mod, list | tuple):
            advice = "Join them with and_masks or or_masks." if call == "not_mask" else "Pass its functions one by one."
        else:
            advice = "Leave it out." if mod is None else "Pass the function itself."
        got = f"{mod.dtype}{list(mod.shape)}" if isinstance(mod, Array | np.ndarray) else repr(mod)
        raise ValueError(f"`{call}`: `{name}` is {got}; expected {wanted}. {advice}")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        other = other_kind(signature, arguments)
        joins = {"mask_mod": "and_masks", "score_mod": "chain_mods"}
        advice = (
            f"If it is a {other}, pass it as {other}=; {joins[other]} joins several."
            if other
            else "If it makes such a function, call it first."
        )
        raise ValueError(
            f"`{call}`: `{name}` is `{_name(mod)}{without_types(signature)}`; expected {wanted}. {advice}"
        ) from None


def _names(mods: tuple[Callable[..., object], ...]) -> str:
    """The names of the functions (`_name`), joined by commas, for the name of the function that combines them."""
    return ", ".join(_name(mod) for mod in mods)


def _name(mod: Callable[..., object]) -> str:
    """The __name__ of a function; the name of its type if it is an object without one."""
    return getattr(mod, "__name__", type(mod).__name__)
