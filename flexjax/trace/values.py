"""The values of a mod while it is translated to a program.

A value is one of three things:

    known value      a jax.Array that depends on captured arrays alone; it is computed outside of the kernel
    array of atoms   a numpy object array of program atoms: a scalar, or a small vector that is unrolled into scalars
    lazy array       a LazyArray, whose elements become atoms when they are asked for

Inside a mod, `x[b]` is a row of the captured array `x`. An array of atoms would need a load for each element of the
row, most of which are never used. The LazyArray has a shape and a function from an index to an atom: `x[b][q_idx]` asks
for one element, and the program has one load, `x[b, q_idx]`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import Atom, Lit

MAX_ELEMENTS = 1024  # largest small array that is unrolled into scalars
ROLL = 8
"""The most elements of a vector that is unrolled into scalars; a loop reads one element of a longer one a round."""
# iterations of a loop that is unrolled, and elements of a known array that a Call other than a loop gets as atoms
MAX_UNROLL = 64

# an int32 atom for each dimension, within bounds
Index = tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Key:
    """A random key, made of the uint32 atoms of its words: it stands where an atom stands, in an array of atoms."""

    words: tuple[Atom, ...]
    dtype: Any


def is_key_dtype(dtype: object) -> bool:
    """Whether a dtype is that of random keys, such as key<fry>."""
    return jnp.issubdtype(cast(Any, dtype), jax.dtypes.prng_key)


def choose(builder: Builder, predicate: Atom, on_true: Atom, on_false: Atom) -> Atom:
    """`on_true` where the bool atom `predicate` is True, else `on_false`: two atoms of one dtype, or two keys."""
    if isinstance(on_true, Key) and isinstance(on_false, Key):
        words = (builder.select(predicate, *pair) for pair in zip(on_true.words, on_false.words, strict=True))
        return cast(Atom, Key(tuple(words), on_true.dtype))
    return builder.select(predicate, on_true, on_false)


class NotRolled(Exception):
    """An array of atoms is read at a loop index: the loop over it has to be unrolled."""


class LazyArray:
    """An array whose elements are made as atoms when asked for, once for each index."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, element: Callable[[Index], Atom], too_large: str):
        """`too_large`: the error where all of more than MAX_ELEMENTS are needed, a sentence that starts with "it"."""
        self.shape = tuple(shape)
        self.dtype = cast(np.dtype, dtype)
        self.too_large = too_large
        self._element = element
        self._made: dict[Index, Atom] = {}

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def element(self, index: Sequence[Atom]) -> Atom:
        index = tuple(index)
        if index not in self._made:
            self._made[index] = self._element(index)
        return self._made[index]

    def atoms(self) -> np.ndarray:
        """Makes every element. Raises ModError for more than MAX_ELEMENTS elements."""
        if self.size > MAX_ELEMENTS:
            raise ModError(self.too_large)
        out = np.empty(self.shape, object)
        for place in np.ndindex(*self.shape):
            out[place] = self.element(literal_index(place))
        return out

    def __getitem__(self, row: int) -> "Value":
        first = literal(row, "int32")
        return settled(LazyArray(self.shape[1:], self.dtype, lambda i: self.element((first, *i)), self.too_large))


Value: TypeAlias = jax.Array | np.ndarray | LazyArray


def is_atoms(value: Value) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.dtype == object


def is_lazy(value: Value) -> TypeGuard[LazyArray]:
    return isinstance(value, LazyArray)


def is_known(value: Value) -> TypeGuard[jax.Array]:
    """Whether the value depends on captured arrays alone."""
    return not is_atoms(value) and not is_lazy(value)


def settled(array: LazyArray) -> Value:
    """The lazy array, or an array of atoms for one of at most one element."""
    return array.atoms() if array.size <= 1 else array


def literal_index(place: Sequence[int]) -> Index:
    return tuple(literal(i, "int32") for i in place)


# ------------------------------------------------------------------- arrays of atoms


def scalar(atom: Atom) -> np.ndarray:
    return object_array([atom]).reshape(())


def no_tangent(shape: Sequence[int]) -> np.ndarray:
    """The array of atoms for an array of dtype float0, which has no numbers: False everywhere."""
    return np.full(shape, Lit(False, "bool"), object)


def object_array(atoms: Sequence[Atom]) -> np.ndarray:
    out = np.empty(len(atoms), object)
    for i, atom in enumerate(atoms):
        out[i] = atom
    return out


def as_object(value: Any) -> np.ndarray:
    """An array of atoms; numpy returns a bare atom where no dimension is left."""
    return value if is_atoms(value) else scalar(value)


def map_elements(make: Callable[..., Atom], args: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """`make(*elements)` for each element of `args`, arrays of atoms that are broadcast to `shape`.

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
