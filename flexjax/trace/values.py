"""The values of a mod while it is translated to a program.

A value is one of three things:

    known value      a jax.Array that depends on captured arrays alone; it is computed outside of the kernel
    array of atoms   a numpy object array of program atoms: a scalar, or a small vector that is unrolled into scalars
    lazy array       a LazyArray, whose elements become atoms when they are asked for

Inside a mod, `x[b]` is a row of the captured array `x`. An array of atoms would need one load for each element of the row, and
most of these elements are never used. The LazyArray has a shape and a function from an index to an atom: `x[b][q_idx]` asks for
one element, and the program has one load, `x[b, q_idx]`. An index is a tuple of one int32 atom for each dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from flexjax.errors import ModError
from flexjax.ir.builder import literal
from flexjax.ir.program import Atom, Lit

MAX_ELEMENTS = 1024
"""Largest small array that is unrolled into scalars."""
MAX_UNROLL = 64
"""The most iterations of a loop that is unrolled, and the most elements of a known array that a Call other than a loop gets as atoms; a
larger one is captured whole."""

Index = tuple[Atom, ...]
"""The index of an element: an int32 atom for each dimension, within bounds."""


class LazyArray:
    """An array whose elements are made as atoms when asked for; for one index the element is made once.

    shape, dtype   of the array
    element        makes the atom at an index
    too_large      the error where more than MAX_ELEMENTS elements are all needed: a sentence that starts with "it"
    """

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str):
        """The arguments are those of the class; `dtype` may be anything that names one."""
        self.shape = tuple(shape)
        self.dtype = cast(np.dtype, dtype)
        self.too_large = too_large
        self._element = element
        self._made: dict[Index, Atom] = {}

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def element(self, index: Sequence[Atom]) -> Atom:
        """The atom at an index, one atom for each dimension, within bounds."""
        index = tuple(index)
        if index not in self._made:
            self._made[index] = self._element(index)
        return self._made[index]

    def atoms(self) -> np.ndarray:
        """Makes every element; returns them as an array of atoms. Raises ModError for more than MAX_ELEMENTS elements."""
        if self.size > MAX_ELEMENTS:
            raise ModError(self.too_large)
        out = np.empty(self.shape, object)
        for place in np.ndindex(*self.shape):
            out[place] = self.element(literal_index(place))
        return out

    def __getitem__(self, row: int) -> "Value":
        """The part of the array at number `row` of the first dimension: lazy, or an array of atoms if it has at most one
        element.
        """
        first = literal(row, "int32")
        return settled(LazyArray(self.shape[1:], self.dtype, lambda i: self.element((first, *i)), self.too_large))


Value: TypeAlias = jax.Array | np.ndarray | LazyArray
"""A value of the mod; see the top of this file."""


def is_atoms(value: Value) -> TypeGuard[np.ndarray]:
    """Whether the value is an array of atoms: a numpy object array."""
    return isinstance(value, np.ndarray) and value.dtype == object


def is_lazy(value: Value) -> TypeGuard[LazyArray]:
    """Whether the value is a LazyArray."""
    return isinstance(value, LazyArray)


def is_known(value: Value) -> TypeGuard[jax.Array]:
    """Whether the value is a known value, one that depends on captured arrays alone and is computed outside of the kernel."""
    return not is_atoms(value) and not is_lazy(value)


def settled(array: LazyArray) -> Value:
    """The value that stands for a new lazy array: the array as it is, but one of at most one element is made at once, as an array of
    atoms, because nothing is gained by waiting.
    """
    return array.atoms() if array.size <= 1 else array


def literal_index(place: Sequence[int]) -> Index:
    """An index whose atoms are the integers of `place` as literals."""
    return tuple(literal(i, "int32") for i in place)


# ------------------------------------------------------------------- arrays of atoms


def scalar(atom: Atom) -> np.ndarray:
    """The atom as an array of atoms of shape ()."""
    return object_array([atom]).reshape(())


def no_tangent(shape: Sequence[int]) -> np.ndarray:
    """The array of atoms of `shape` that stands for an array of dtype float0: False everywhere, because float0 has no numbers."""
    return np.full(shape, Lit(False, "bool"), object)


def object_array(atoms: Sequence[Atom]) -> np.ndarray:
    """The atoms as an array of atoms with one dimension."""
    out = np.empty(len(atoms), object)
    for i, atom in enumerate(atoms):
        out[i] = atom
    return out


def as_object(value: Any) -> np.ndarray:
    """Turns what indexing an array of atoms gives into an array of atoms: numpy returns a bare atom where no dimension is left."""
    return value if is_atoms(value) else scalar(value)


def map_elements(make: Callable[..., Atom], args: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The array of atoms of that shape whose elements are `make(*elements)` of the corresponding elements of `args`.

    make   makes an atom from one atom of each argument
    args   arrays of atoms, broadcast to `shape`

    Raises ModError for more than MAX_ELEMENTS elements.
    """
    if math.prod(shape) > MAX_ELEMENTS:
        raise ModError(
            f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."
        )
    out = np.empty(shape, object)
    full = [np.broadcast_to(a, shape) for a in args]
    for place in np.ndindex(*shape):
        out[place] = make(*(a[place] for a in full))
    return out
