"""Checks of what factories of score mods are given, beside those of `flexjax.masks.check_arguments`."""

import math

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flexjax.masks.check_arguments import floats


def finite(call: str, name: str, value: object, advice: str) -> float:
    """`value` as a finite float."""
    number = _as_float(value)
    if number is None:
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected a finite number. {advice}")
    return number


def positive(call: str, name: str, value: object, advice: str) -> float:
    """`value` as a finite float above 0."""
    number = _as_float(value)
    if number is None or number <= 0:
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected a finite number above 0. {advice}")
    return number


def positive_of_head(call: str, name: str, value: ArrayLike, advice: str) -> float | Array:
    """`value` as a finite float above 0, or as a floating array `[]` or `[N]`, of any values."""
    if isinstance(value, int | float | np.number):
        return positive(call, name, value, advice)
    return floats(call, name, value, {0: "[]", 1: "[N]"}, advice)


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    return float(value) if math.isfinite(value) else None
