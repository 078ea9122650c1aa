"""Small arrays of atoms, the values of a mod that is being translated."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flexjax.errors import ModError
from flexjax.ir.program import Atom

MAX_ELEMENTS = 1024
"""Largest small array that is unrolled into scalars."""
MAX_UNROLL = 64
"""Longest loop that is unrolled, and largest array handed whole to a function with a derivative rule of its own."""

Value = Any
"""A JAX value (it depends on captures alone) or an object array of atoms."""


def is_atoms(value: Value) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def scalar(atom: Atom) -> np.ndarray:
    return object_array([atom]).reshape(())


def object_array(atoms: Sequence[Atom]) -> np.ndarray:
    out = np.empty(len(atoms), object)
    for i, atom in enumerate(atoms):
        out[i] = atom
    return out


def map_elements(make: Callable[..., Atom], args: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(shape) > MAX_ELEMENTS:
        raise ModError(
            f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."
        )
    out = np.empty(shape, object)
    full = [np.broadcast_to(a, shape) for a in args]
    for place in np.ndindex(*shape):
        out[place] = make(*(a[place] for a in full))
    return out


def as_object(value: Any) -> np.ndarray:
    """numpy hands out a bare atom where an object array has no dimension."""
    return value if is_atoms(value) else scalar(value)
