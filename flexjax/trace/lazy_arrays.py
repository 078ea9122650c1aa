"""Arrays inside a mod whose elements are computed on demand.

Inside a mod, `x[b]` is a row of the captured array `x`. An array of atoms would need one load for each element of the
row, and most of these elements are never used. A `LazyArray` is a shape and a function from an index to an atom:
`x[b][q_idx]` asks the LazyArray for one element, and the program has one load, `x[b, q_idx]`. Operations that rearrange
elements (reshape, transpose, concatenate) and elementwise operations (exp, select) return another LazyArray. Operations
that need all elements, such as a sum, ask for each of them with `atoms`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import Atom, Lit
from flexjax.trace.atoms import MAX_ELEMENTS, Value, as_object, is_atoms

Index = tuple[Atom, ...]
"""An int32 atom for each dimension, within bounds."""


class LazyArray:
    """An array whose elements are computed by index, each at most once for the same index.

    shape      its dimensions
    dtype      of its elements
    element    computes the element at an index
    too_large  the error where more than MAX_ELEMENTS elements are all needed: a sentence that starts with "it"
    """

    def __init__(self, shape: Sequence[int], dtype: Any, element: Callable[[Index], Atom], too_large: str):
        self.shape = tuple(shape)
        self.dtype = dtype
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
        """Every element, as an object array."""
        if self.size > MAX_ELEMENTS:
            raise ModError(self.too_large)
        out = np.empty(self.shape, object)
        for place in np.ndindex(*self.shape):
            out[place] = self.element(literal_index(place))
        return out

    def __getitem__(self, row: int) -> Value:
        """A row along the first dimension."""
        first = literal(row, "int32")
        return settled(LazyArray(self.shape[1:], self.dtype, lambda i: self.element((first, *i)), self.too_large))


def settled(array: LazyArray) -> Value:
    """The atoms of an array of at most one element, because nothing is gained by waiting; other arrays unchanged."""
    return array.atoms() if array.size <= 1 else array


def is_lazy(value: Value) -> bool:
    return isinstance(value, LazyArray)


def literal_index(place: Sequence[int]) -> Index:
    return tuple(literal(i, "int32") for i in place)


class Translation(Protocol):
    """What the rules need of lower_jaxpr.Lowering."""

    builder: Builder

    def load(self, array: jax.Array, index: Sequence[Atom]) -> Atom: ...

    def as_atoms(self, value: Value) -> np.ndarray: ...

    def lazy(self, shape: Sequence[int], dtype: Any, element: Callable[[Index], Atom], too_large: str) -> Value: ...


def element_of(self: Translation, value: Value, index: Sequence[Atom]) -> Atom:
    """value[index], for an index within bounds."""
    if is_lazy(value):
        return value.element(index)
    return _pick(self, value, list(index)) if is_atoms(value) else self.load(value, index)


def _pick(self: Translation, atoms: np.ndarray, index: list[Atom]) -> Atom:
    """One element of a small array of atoms, as a chain of selects where the index is known only in the kernel."""
    if not index:
        return atoms.item()
    first, rest = index[0], index[1:]
    if isinstance(first, Lit):
        return _pick(self, as_object(atoms[int(first.value)]), rest)
    chosen = _pick(self, as_object(atoms[0]), rest)
    for i in range(1, atoms.shape[0]):
        here = self.builder.op("eq", (first, literal(i, first.dtype)), "bool")
        chosen = self.builder.select(here, _pick(self, as_object(atoms[i]), rest), chosen)
    return chosen


def whole_capture(shape: Sequence[int]) -> str:
    return (
        f"it uses a whole captured array of shape {tuple(shape)} at each position; index it with b, h, q_idx or kv_idx, or "
        "reduce it outside the mod."
    )


def too_large_of(values: Sequence[Value], shape: Sequence[int]) -> str:
    """The error message for needing all elements of an array that is computed from these values."""
    for value in values:
        if is_lazy(value):
            return value.too_large
        if not is_atoms(value) and value.size > MAX_ELEMENTS:
            return whole_capture(value.shape)
    return f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."


# ------------------------------------------------------------------- rules that rearrange elements

Place = Callable[[Translation, Index], Sequence[Atom]]
"""Maps an index of the result to the index of the operand."""


def _add(self: Translation, atom: Atom, number: int) -> Atom:
    return self.builder.op("add", (atom, literal(number, "int32")), "int32")


def _scaled(self: Translation, atom: Atom, factor: int) -> Atom:
    return self.builder.op("mul", (atom, literal(factor, "int32")), "int32")


def _moved(place: Callable[[Any, tuple[int, ...]], Place]) -> Callable:
    """The rule of a primitive that rearranges elements.

    place   from the equation's parameters and the shape of the operand to a Place
    """

    def rule(self: Translation, eqn: Any, args: list[Value]) -> list[Value]:
        (array,), aval = args[:1], eqn.outvars[0].aval
        where = place(eqn.params, tuple(array.shape))
        make = lambda index: element_of(self, array, where(self, index))
        return [self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))]

    return rule


def _squeeze(params: Any, shape: tuple[int, ...]) -> Place:
    gone = {d % len(shape) for d in params["dimensions"]}

    def place(self: Translation, index: Index) -> list[Atom]:
        rest = iter(index)
        return [literal(0, "int32") if d in gone else next(rest) for d in range(len(shape))]

    return place


def _expand_dims(params: Any, shape: tuple[int, ...]) -> Place:
    new = {d % (len(shape) + len(params["dimensions"])) for d in params["dimensions"]}
    return lambda self, index: [i for d, i in enumerate(index) if d not in new]


def _transpose(params: Any, shape: tuple[int, ...]) -> Place:
    order = tuple(params["permutation"])
    return lambda self, index: [index[order.index(d)] for d in range(len(shape))]


def _reverse(params: Any, shape: tuple[int, ...]) -> Place:
    turned = set(params["dimensions"])

    def place(self: Translation, index: Index) -> list[Atom]:
        back = lambda i, n: self.builder.op("sub", (literal(n - 1, "int32"), i), "int32")
        return [back(i, n) if d in turned else i for d, (i, n) in enumerate(zip(index, shape, strict=True))]

    return place


def _slice(params: Any, shape: tuple[int, ...]) -> Place:
    strides = params["strides"] or (1,) * len(shape)
    starts = params["start_indices"]
    return lambda self, index: [
        _add(self, _scaled(self, i, step), start) for i, step, start in zip(index, strides, starts, strict=True)
    ]


def _broadcast(params: Any, shape: tuple[int, ...]) -> Place:
    dims = params["broadcast_dimensions"]
    return lambda self, index: [literal(0, "int32") if n == 1 else index[d] for d, n in zip(dims, shape, strict=True)]


def _reshape(params: Any, shape: tuple[int, ...]) -> Place:
    groups = _matching_groups(shape, tuple(params["new_sizes"]))

    def place(self: Translation, index: Index) -> list[Atom]:
        out: list[Atom] = [literal(0, "int32")] * len(shape)
        for old, new in groups:
            flat: Atom = literal(0, "int32")
            for d in new:
                flat = self.builder.op("add", (_scaled(self, flat, params["new_sizes"][d]), index[d]), "int32")
            for d in reversed(old[1:]):
                size = literal(shape[d], "int32")
                out[d] = self.builder.op("floormod", (flat, size), "int32")
                flat = self.builder.op("floordiv", (flat, size), "int32")
            if old:
                out[old[0]] = flat
        return out

    return place


def _matching_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The shortest groups of old and new dimensions that a reshape maps to each other; dimensions of length 1 have
    none.
    """
    groups: list[tuple[list[int], list[int]]] = []
    a = [d for d, n in enumerate(old) if n != 1]
    b = [d for d, n in enumerate(new) if n != 1]
    while a or b:
        left, right = [a.pop(0)], [b.pop(0)]
        while (x := math.prod(old[d] for d in left)) != (y := math.prod(new[d] for d in right)):
            if x < y:
                left.append(a.pop(0))
            else:
                right.append(b.pop(0))
        groups.append((left, right))
    return groups


def _split(self: Translation, eqn: Any, args: list[Value]) -> list[Value]:
    array, axis = args[0], eqn.params["axis"]
    outs, start = [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):

        def make(index: Index, start: int = start) -> Atom:
            return element_of(self, array, [_add(self, i, start) if d == axis else i for d, i in enumerate(index)])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
        start += size
    return outs


def _concatenate(self: Translation, eqn: Any, args: list[Value]) -> list[Value]:
    axis, aval = eqn.params["dimension"], eqn.outvars[0].aval
    parts = [a for a in args if a.shape[axis]]

    def make(index: Index) -> Atom:
        chosen, start = None, 0
        for part in parts:
            size = part.shape[axis]
            inside = self.builder.clamped(_add(self, index[axis], -start), size - 1)
            candidate = element_of(self, part, [inside if d == axis else i for d, i in enumerate(index)])
            later = self.builder.op("ge", (index[axis], literal(start, "int32")), "bool")
            chosen = candidate if chosen is None else self.builder.select(later, candidate, chosen)
            start += size
        assert chosen is not None
        return chosen

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))]


def _stack(self: Translation, eqn: Any, args: list[Value]) -> list[Value]:
    axis, aval = eqn.params["axis"], eqn.outvars[0].aval

    def make(index: Index) -> Atom:
        rest = [i for d, i in enumerate(index) if d != axis]
        return _one_of(self, index[axis], [lambda a=a: element_of(self, a, rest) for a in args])

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))]


def _one_of(self: Translation, which: Atom, makes: Sequence[Callable[[], Atom]]) -> Atom:
    if isinstance(which, Lit):
        return makes[int(which.value)]()
    atoms = np.empty(len(makes), object)
    for i, make in enumerate(makes):
        atoms[i] = make()
    return _pick(self, atoms, [which])


def _unstack(self: Translation, eqn: Any, args: list[Value]) -> list[Value]:
    array, axis = args[0], eqn.params["axis"]
    outs = []
    for row, var in enumerate(eqn.outvars):

        def make(index: Index, row: int = row) -> Atom:
            return element_of(self, array, [*index[:axis], literal(row, "int32"), *index[axis:]])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
    return outs


LAZY_RULES: dict[str, Callable[..., list[Value]]] = {
    "broadcast_in_dim": _moved(_broadcast),
    "concatenate": _concatenate,
    "expand_dims": _moved(_expand_dims),
    "reshape": _moved(_reshape),
    "rev": _moved(_reverse),
    "slice": _moved(_slice),
    "split": _split,
    "squeeze": _moved(_squeeze),
    "stack": _stack,
    "transpose": _moved(_transpose),
    "unstack": _unstack,
}
"""The rules by primitive, for equations with a lazy operand."""
