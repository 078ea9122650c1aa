"""Combines mask mods by and, or and not, and chains score mods.

The functions that are made have names such as "and_masks(causal, window)".
"""

import functools
import inspect
import operator
from collections.abc import Callable

import numpy as np
from jax import Array

from flexjax.errors import ModError, not_bool
from flexjax.mod_tools.made_for import sizes_of
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MASK_ARGUMENTS, SCORE_ARGUMENTS, misplaced, named, other_kind, without_types
from flexjax.types import MaskMod, ScoreMod


@without_frames
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask mod `mask_mods[0](..) & mask_mods[1](..) & ..`. Raises ValueError for none and for anything else."""
    _check("and_masks", "mask_mods", mask_mods, MASK_ARGUMENTS)

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        shown = [
            _bool("and_masks", f"mask_mods[{n}]", mod, mod(b, h, q_idx, kv_idx)) for n, mod in enumerate(mask_mods)
        ]
        return functools.reduce(operator.and_, shown)

    return named(f"and_masks({_names(mask_mods)})", *sizes_of(*mask_mods))(mask_mod)


@without_frames
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask mod `mask_mods[0](..) | mask_mods[1](..) | ..`. Raises ValueError for none and for anything else."""
    _check("or_masks", "mask_mods", mask_mods, MASK_ARGUMENTS)

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        shown = [_bool("or_masks", f"mask_mods[{n}]", mod, mod(b, h, q_idx, kv_idx)) for n, mod in enumerate(mask_mods)]
        return functools.reduce(operator.or_, shown)

    return named(f"or_masks({_names(mask_mods)})", *sizes_of(*mask_mods))(mask_mod)


@without_frames
def not_mask(mask_mod: MaskMod) -> MaskMod:
    """A mask mod `~mask_mod(..)`. Raises ValueError for anything that is not callable as a mask mod."""
    _check_one("not_mask", "mask_mod", mask_mod, MASK_ARGUMENTS)

    def opposite(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array | bool:
        kept = _bool("not_mask", "mask_mod", mask_mod, mask_mod(b, h, q_idx, kv_idx))
        return not kept if isinstance(kept, bool) else ~kept  # ~True is -2

    return named(f"not_mask({_names((mask_mod,))})", *sizes_of(mask_mod))(opposite)


@without_frames
def chain_mods(*score_mods: ScoreMod) -> ScoreMod:
    """A score mod `.. score_mods[1](score_mods[0](score, ..), ..)`. Raises ValueError as `and_masks` does."""
    _check("chain_mods", "score_mods", score_mods, SCORE_ARGUMENTS)

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        for mod in score_mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    return named(f"chain_mods({_names(score_mods)})", *sizes_of(*score_mods))(score_mod)


def _check(call: str, name: str, mods: object, arguments: tuple[str, ...]) -> None:
    """Raises ValueError, about the parameter `name` of the function `call`, unless `mods` take `arguments`."""
    if not isinstance(mods, tuple):
        _check_one(call, name, mods, arguments)
        return
    if not mods:
        raise ValueError(f"`{call}` got no functions; expected at least one. Pass `{name}` one by one.")
    for i, mod in enumerate(mods):
        _check_one(call, f"{name}[{i}]", mod, arguments)


def _check_one(call: str, name: str, mod: object, arguments: tuple[str, ...]) -> None:
    """Raises ValueError unless `mod`, the argument `name` of the function `call`, takes the positional `arguments`."""
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
    if misplaced(signature, arguments):
        raise ValueError(
            f"`{call}`: `{name}` is `{_name(mod)}{without_types(signature)}`; expected {wanted}, in this order. "
            "Arguments are given by position: order them so, or use other names."
        )


def _bool(call: str, name: str, mod: MaskMod, kept: Array | bool) -> Array | bool:
    """`kept`, what the argument `name` of the function `call` returned. Raises ModError if it is no bool."""
    dtype = np.dtype(getattr(kept, "dtype", type(kept)))
    if dtype != np.bool_:
        raise ModError(not_bool(f"`{call}`: `{name}`, `{_name(mod)}`,", dtype))
    return kept


def _names(mods: tuple[Callable[..., object], ...]) -> str:
    return ", ".join(_name(mod) for mod in mods)


def _name(mod: Callable[..., object]) -> str:
    return getattr(mod, "__name__", type(mod).__name__)
