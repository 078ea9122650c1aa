"""Lowering rules of primitives that rearrange elements (reshape, transpose, ..), for lazy arrays.

The result is a lazy array too (`Lowering.lazy`): an index of the result is mapped to an index of the operand, and no
element is made before somebody asks for it. Operations that need all elements, such as a sum, are in lower_rules.py.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom, Lit, axes_of, loops_of
from flexjax.trace.translation import Equation, Params, Rule, Translation
from flexjax.trace.values import MAX_ELEMENTS, Index, NotRolled, Value, as_object, choose, is_atoms, is_known, is_lazy


def element_of(self: Translation, value: Value, index: Sequence[Atom]) -> Atom:
    """The atom value[index] of a value of any kind; `index` has one int32 atom for each dimension, within bounds."""
    if is_known(value):
        return self.load(value, index)
    return value.element(index) if is_lazy(value) else _pick(self, as_object(value), list(index))


def _pick(self: Translation, atoms: np.ndarray, index: list[Atom]) -> Atom:
    """The element of an array of atoms: by selects over all elements along dims whose index is no literal."""
    if not index:
        return atoms.item()
    first, rest = index[0], index[1:]
    if isinstance(first, Lit):
        return _pick(self, as_object(atoms[int(first.value)]), rest)
    if atoms.shape[0] == 1 or all(a == atoms.flat[0] for a in atoms.flat):
        return _pick(self, as_object(atoms[0]), rest)
    if loops_of(axes_of(first)) & self.builder.open_loops:
        raise NotRolled
    chosen = _pick(self, as_object(atoms[0]), rest)
    for i in range(1, atoms.shape[0]):
        here = self.builder.op("eq", (first, literal(i, first.dtype)), "bool")
        chosen = choose(self.builder, here, _pick(self, as_object(atoms[i]), rest), chosen)
    return chosen


def whole_capture(shape: Sequence[int]) -> str:
    """The error where a whole captured array is needed at each position: a sentence that starts with "it"."""
    return (
        f"it uses a whole captured array of shape {tuple(shape)} at each position; index it with b, h, q_idx or "
        "kv_idx, or reduce it outside the mod."
    )


def too_large_of(values: Sequence[Value], shape: Sequence[int]) -> str:
    """The error for needing all elements of an array computed from `values`, which names the first cause among them."""
    for value in values:
        if is_lazy(value):
            return value.too_large
        if not is_atoms(value) and value.size > MAX_ELEMENTS:
            return whole_capture(value.shape)
    return f"it computes an array of shape {tuple(shape)} at each position; at most {MAX_ELEMENTS} elements."


# ------------------------------------------------------------------- rules that rearrange elements

# maps an index of the result to the index of the operand
IndexMap = Callable[[Translation, Index], Sequence[Atom]]


def _add(self: Translation, atom: Atom, number: int) -> Atom:
    return self.builder.op("add", (atom, literal(number, "int32")), "int32")


def _times(self: Translation, atom: Atom, factor: int) -> Atom:
    return self.builder.op("mul", (atom, literal(factor, "int32")), "int32")


def _by_index(index_map: Callable[[Params, tuple[int, ...]], IndexMap]) -> Rule:
    """The rule of a primitive that rearranges its one operand, from (parameters, operand's shape) to IndexMap."""

    def rule(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
        (array,), aval = args[:1], eqn.outvars[0].aval
        where = index_map(eqn.params, tuple(array.shape))
        make = lambda index: element_of(self, array, where(self, index))
        return [self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))]

    return rule


def _squeeze(params: Params, shape: tuple[int, ...]) -> IndexMap:
    gone = {d % len(shape) for d in params["dimensions"]}

    def operand_index(self: Translation, index: Index) -> list[Atom]:
        rest = iter(index)
        return [literal(0, "int32") if d in gone else next(rest) for d in range(len(shape))]

    return operand_index


def _expand_dims(params: Params, shape: tuple[int, ...]) -> IndexMap:
    new = {d % (len(shape) + len(params["dimensions"])) for d in params["dimensions"]}
    return lambda self, index: [i for d, i in enumerate(index) if d not in new]


def _transpose(params: Params, shape: tuple[int, ...]) -> IndexMap:
    order = tuple(params["permutation"])
    return lambda self, index: [index[order.index(d)] for d in range(len(shape))]


def _reverse(params: Params, shape: tuple[int, ...]) -> IndexMap:
    reversed_dims = set(params["dimensions"])

    def operand_index(self: Translation, index: Index) -> list[Atom]:
        back = lambda i, n: self.builder.op("sub", (literal(n - 1, "int32"), i), "int32")
        return [back(i, n) if d in reversed_dims else i for d, (i, n) in enumerate(zip(index, shape, strict=True))]

    return operand_index


def _slice(params: Params, shape: tuple[int, ...]) -> IndexMap:
    strides = params["strides"] or (1,) * len(shape)
    starts = params["start_indices"]
    return lambda self, index: [
        _add(self, _times(self, i, step), start) for i, step, start in zip(index, strides, starts, strict=True)
    ]


def _broadcast(params: Params, shape: tuple[int, ...]) -> IndexMap:
    dims = params["broadcast_dimensions"]
    return lambda self, index: [literal(0, "int32") if n == 1 else index[d] for d, n in zip(dims, shape, strict=True)]


def _reshape(params: Params, shape: tuple[int, ...]) -> IndexMap:
    """Flattens the index to one number within each group of matching dims, in row-major order, and splits it."""
    order = params.get("dimensions") or tuple(range(len(shape)))  # in which the operand's dims are read
    shape = tuple(shape[d] for d in order)
    groups = _matching_groups(shape, tuple(params["new_sizes"]))

    def operand_index(self: Translation, index: Index) -> list[Atom]:
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
        return [out[order.index(d)] for d in range(len(shape))]

    return operand_index


def _matching_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The (old dims, new dims) that a reshape maps to each other, as short as possible, without dims of length 1."""
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
    array, axis = args[0], eqn.params["axis"]
    outs, start = [], 0
    for var, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):

        def make(index: Index, start: int = start) -> Atom:
            return element_of(self, array, [_add(self, i, start) if d == axis else i for d, i in enumerate(index)])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
        start += size
    return outs


def _concatenate(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """Reads every operand at the index clamped to it; selects take that of the index, and fold for literals."""
    axis, aval = eqn.params["dimension"], eqn.outvars[0].aval
    parts = [a for a in args if a.shape[axis]]

    def make(index: Index) -> Atom:
        chosen, start = None, 0
        for part in parts:
            size = part.shape[axis]
            inside = self.builder.clamped(_add(self, index[axis], -start), size - 1)
            candidate = element_of(self, part, [inside if d == axis else i for d, i in enumerate(index)])
            later = self.builder.op("ge", (index[axis], literal(start, "int32")), "bool")
            chosen = candidate if chosen is None else choose(self.builder, later, candidate, chosen)
            start += size
        assert chosen is not None
        return chosen

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))]


def _stack(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    axis, aval = eqn.params["axis"], eqn.outvars[0].aval

    def make(index: Index) -> Atom:
        rest = [i for d, i in enumerate(index) if d != axis]
        return _one_of(self, index[axis], [lambda a=a: element_of(self, a, rest) for a in args])

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))]


def _one_of(self: Translation, which: Atom, makes: Sequence[Callable[[], Atom]]) -> Atom:
    """The atom makes[which](); where `which` is known only in the kernel, all are made and one is selected."""
    if isinstance(which, Lit):
        return makes[int(which.value)]()
    atoms = np.empty(len(makes), object)
    for i, make in enumerate(makes):
        atoms[i] = make()
    return _pick(self, atoms, [which])


def _pad(self: Translation, eqn: Equation, args: list[Value]) -> list[Value] | None:
    """The rule of `pad`: None (a Call) for negative padding."""
    array, fill, aval, config = (
        args[0],
        self.as_atoms(args[1]).item(),
        eqn.outvars[0].aval,
        eqn.params["padding_config"],
    )
    if any(low < 0 or high < 0 for low, high, _ in config) or array.size == 0:
        return None

    def make(index: Index) -> Atom:
        inside: Atom = literal(True, "bool")
        places = []
        for i, n, (low, _, gap) in zip(index, array.shape, config, strict=True):
            at = _add(self, i, -low)
            step = literal(gap + 1, "int32")
            place = self.builder.op("floordiv", (at, step), "int32")
            truths = [
                self.builder.op("ge", (at, literal(0, "int32")), "bool"),
                self.builder.op("lt", (place, literal(n, "int32")), "bool"),
                self.builder.op("eq", (self.builder.op("floormod", (at, step), "int32"), literal(0, "int32")), "bool"),
            ]
            for truth in truths[: 3 if gap else 2]:
                inside = self.builder.op("and", (inside, truth), "bool")
            places.append(self.builder.clamped(place, n - 1))
        return self.builder.select(inside, element_of(self, array, places), fill)

    return [self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))]


def _unstack(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    array, axis = args[0], eqn.params["axis"]
    outs = []
    for row, var in enumerate(eqn.outvars):

        def make(index: Index, row: int = row) -> Atom:
            return element_of(self, array, [*index[:axis], literal(row, "int32"), *index[axis:]])

        outs.append(self.lazy(var.aval.shape, var.aval.dtype, make, too_large_of([array], var.aval.shape)))
    return outs


LAZY_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _by_index(_broadcast),
    "concatenate": _concatenate,
    "expand_dims": _by_index(_expand_dims),
    "pad": _pad,
    "reshape": _by_index(_reshape),
    "rev": _by_index(_reverse),
    "slice": _by_index(_slice),
    "split": _split,
    "squeeze": _by_index(_squeeze),
    "stack": _stack,
    "transpose": _by_index(_transpose),
    "unstack": _unstack,
}
