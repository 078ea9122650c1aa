"""Lowering rules of primitives that rearrange elements (reshape, transpose, concatenate), for operands that are lazy arrays.

The result is a lazy array too (`Translation.lazy`): an index of the result is mapped to an index of the operand, and no element is made
before somebody asks for it. Only a result of at most one element is made at once, as an array of atoms. A rule has the arguments
(translation, equation, operands) and returns the values of the equation's results; see lower_rules.py. An index map (`IndexMap`) is made
from the parameters of the equation and the shape of its operand. Operations that need all elements, such as a sum, are in lower_rules.py
and ask for each of them.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom, Lit
from flexjax.trace.translation import Equation, Params, Rule, Translation
from flexjax.trace.values import MAX_ELEMENTS, Index, Value, as_object, is_atoms, is_known, is_lazy


def element_of(self: Translation, value: Value, index: Sequence[Atom]) -> Atom:
    """The atom value[index] of a known value (a load, which captures the array), a lazy array or an array of atoms; `index` has
    one int32 atom for each dimension, within bounds.
    """
    if is_known(value):
        return self.load(value, index)
    return value.element(index) if is_lazy(value) else _pick(self, as_object(value), list(index))


def _pick(self: Translation, atoms: np.ndarray, index: list[Atom]) -> Atom:
    """The element of an array of atoms at `index`, one int32 atom for each dimension, in bounds: picked at once along dimensions whose
    index is a literal, by a chain of selects over all elements where it is known only in the kernel.
    """
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
    """The error for a captured array of that shape of which all elements are needed at each position: a sentence that starts with "it"
    and says what to do.
    """
    return (
        f"it uses a whole captured array of shape {tuple(shape)} at each position; index it with b, h, q_idx or kv_idx, or "
        "reduce it outside the mod."
    )


def too_large_of(values: Sequence[Value], shape: Sequence[int]) -> str:
    """The error for needing all elements of an array of that shape that is computed from `values`: a sentence that starts with "it".

    It is that of the first value that is the cause: the sentence of a lazy value, or that of a captured array of more than MAX_ELEMENTS
    elements (`whole_capture`). Without such a value it names the array itself.
    """
    for value in values:
        if is_lazy(value):
            return value.too_large
        if not is_atoms(value) and value.size > MAX_ELEMENTS:
            return whole_capture(value.shape)
    return f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."


# ------------------------------------------------------------------- rules that rearrange elements

IndexMap = Callable[[Translation, Index], Sequence[Atom]]
"""Maps an index of the result to the index of the operand."""


def _add(self: Translation, atom: Atom, number: int) -> Atom:
    """The int32 atom `atom + number`."""
    return self.builder.op("add", (atom, literal(number, "int32")), "int32")


def _times(self: Translation, atom: Atom, factor: int) -> Atom:
    """The int32 atom `atom * factor`."""
    return self.builder.op("mul", (atom, literal(factor, "int32")), "int32")


def _by_index(index_map: Callable[[Params, tuple[int, ...]], IndexMap]) -> Rule:
    """Makes the rule of a primitive that rearranges elements of its one operand.

    index_map   from the equation's parameters and the shape of the operand to the IndexMap
    """

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
        """The rule: the lazy array whose elements are those of the operand at the mapped index."""
        (array,), aval = args[:1], eqn.outvars[0].aval
        where = index_map(eqn.params, tuple(array.shape))
        make = lambda index: element_of(self, array, where(self, index))
        return [self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))]

    return rule


def _squeeze(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `squeeze`: an index of the operand has 0 in each dimension that the result lacks."""
    gone = {d % len(shape) for d in params["dimensions"]}

    def operand_index(self: Translation, index: Index) -> list[Atom]:
        """The index of the operand for an index of the result: 0 is put in for each removed dimension."""
        rest = iter(index)
        return [literal(0, "int32") if d in gone else next(rest) for d in range(len(shape))]

    return operand_index


def _expand_dims(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `expand_dims`: the index of the operand is that of the result without the new dimensions."""
    new = {d % (len(shape) + len(params["dimensions"])) for d in params["dimensions"]}
    return lambda self, index: [i for d, i in enumerate(index) if d not in new]


def _transpose(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `transpose`: the indices of the result, in the operand's order of dimensions."""
    order = tuple(params["permutation"])
    return lambda self, index: [index[order.index(d)] for d in range(len(shape))]


def _reverse(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `rev`: index i of a reversed dimension of length n becomes n - 1 - i."""
    reversed_dims = set(params["dimensions"])

    def operand_index(self: Translation, index: Index) -> list[Atom]:
        """The index of the operand for an index of the result: n - 1 - i in reversed dimensions."""
        back = lambda i, n: self.builder.op("sub", (literal(n - 1, "int32"), i), "int32")
        return [back(i, n) if d in reversed_dims else i for d, (i, n) in enumerate(zip(index, shape, strict=True))]

    return operand_index


def _slice(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `slice`: index i becomes start + i * stride."""
    strides = params["strides"] or (1,) * len(shape)
    starts = params["start_indices"]
    return lambda self, index: [
        _add(self, _times(self, i, step), start) for i, step, start in zip(index, strides, starts, strict=True)
    ]


def _broadcast(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `broadcast_in_dim`: 0 in dimensions of length 1, which are repeated; new dimensions are left out."""
    dims = params["broadcast_dimensions"]
    return lambda self, index: [literal(0, "int32") if n == 1 else index[d] for d, n in zip(dims, shape, strict=True)]


def _reshape(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Index map of `reshape`: within each group of matching dimensions, the index is flattened to one number, in row-major order, and
    split anew.
    """
    groups = _matching_groups(shape, tuple(params["new_sizes"]))

    def operand_index(self: Translation, index: Index) -> list[Atom]:
        """The index of the operand for an index of the result, group by group of matching dimensions."""
        out: list[Atom] = [literal(0, "int32")] * len(shape)
        for old, new in groups:
            flat: Atom = literal(0, "int32")
            for d in new:
                flat = self.builder.op("add", (_times(self, flat, params["new_sizes"][d]), index[d]), "int32")
            for d in reversed(old[1:]):
                size = literal(shape[d], "int32")
                out[d] = self.builder.op("floormod", (flat, size), "int32")
                flat = self.builder.op("floordiv", (flat, size), "int32")
            if old:
                out[old[0]] = flat
        return out

    return operand_index


def _matching_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Pairs of (old dimensions, new dimensions) that a reshape maps to each other, each as short as possible.

    old, new   the shape before and after

    Dimensions of length 1 are in no group.
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


def _split(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `split`: each result is a slice of the operand along one axis; its indices are shifted by the slice's start."""
    array, axis = args[0], eqn.params["axis"]
    outs, start = [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):

        def make(index: Index, start: int = start) -> Atom:
            """The element at an index of one result: that of the operand at the index shifted by `start` along the axis."""
            return element_of(self, array, [_add(self, i, start) if d == axis else i for d, i in enumerate(index)])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
        start += size
    return outs


def _concatenate(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `concatenate`. For each element asked for, every operand is read, at the index clamped to it, and selects take the
    element of the operand in which the index lies; selects fold away where the index is a literal.

    Operands of length 0 along the axis are left out.
    """
    axis, aval = eqn.params["dimension"], eqn.outvars[0].aval
    parts = [a for a in args if a.shape[axis]]

    def make(index: Index) -> Atom:
        """The element at an index of the result: that of the last operand that starts at or before the index along the axis."""
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


def _stack(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `stack`: the index along the new axis selects the operand. Where that index is known only in the kernel, every operand
    is read.
    """
    axis, aval = eqn.params["axis"], eqn.outvars[0].aval

    def make(index: Index) -> Atom:
        """The element at an index of the result: that of the operand whose number is the index along the new axis."""
        rest = [i for d, i in enumerate(index) if d != axis]
        return _one_of(self, index[axis], [lambda a=a: element_of(self, a, rest) for a in args])

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))]


def _one_of(self: Translation, which: Atom, makes: Sequence[Callable[[], Atom]]) -> Atom:
    """The atom that makes[which]() makes; where the atom `which` is known only in the kernel, all are made and one is selected."""
    if isinstance(which, Lit):
        return makes[int(which.value)]()
    atoms = np.empty(len(makes), object)
    for i, make in enumerate(makes):
        atoms[i] = make()
    return _pick(self, atoms, [which])


def _unstack(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `unstack`: each result is the part of the operand at one index along an axis."""
    array, axis = args[0], eqn.params["axis"]
    outs = []
    for row, var in enumerate(eqn.outvars):

        def make(index: Index, row: int = row) -> Atom:
            """The element at an index of result number `row`: that of the operand with `row` put into the index at the axis."""
            return element_of(self, array, [*index[:axis], literal(row, "int32"), *index[axis:]])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
    return outs


LAZY_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _by_index(_broadcast),
    "concatenate": _concatenate,
    "expand_dims": _by_index(_expand_dims),
    "reshape": _by_index(_reshape),
    "rev": _by_index(_reverse),
    "slice": _by_index(_slice),
    "split": _split,
    "squeeze": _by_index(_squeeze),
    "stack": _stack,
    "transpose": _by_index(_transpose),
    "unstack": _unstack,
}
"""The rules by primitive, for equations with a lazy operand."""
