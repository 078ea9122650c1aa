"""Reductions and products of vectors as loops of the program, whose size does not grow with that of the vectors.

A lazy array (values.py) gives its element at any index. A reduction over K > ROLL elements asks for one, at a loop
index k, and appends a loop over k (`Builder.loop`): `any(nb[b, q_idx] == kv_idx)` is one load, one comparison and
`loop_or`. A result that is a vector itself is a lazy array again, whose elements have a loop each. In products of
several matrices the loops are nested: the work grows with the product of the widths, and the program does not.

An array of atoms, whose elements have nothing in common, cannot be read at a loop index (NotRolled): such loops are
unrolled.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom
from flexjax.trace.lazy_rules import element_of, too_large_of
from flexjax.trace.translation import Equation, Translation, Typed
from flexjax.trace.values import ROLL, Index, NotRolled, Value, is_lazy, literal_index

# from a dtype to the number with which an operation changes nothing, such as 0 for sums
Unit = Callable[[np.dtype], object]


def rolls(value: Value) -> bool:
    """Whether reductions of the value are loops."""
    return is_lazy(value) and value.size > ROLL


def over(
    self: Translation, prim: str, sizes: Sequence[int], make: Callable[[Index], Atom], unit: Unit, dtype: np.dtype
) -> Atom:
    """Combines make(index) over an array of these sizes, in row-major order, by the operation `prim`.

    Makes loops, or steps for at most ROLL elements and where `make` cannot be rolled. No elements give `unit`.
    """
    if math.prod(sizes) > ROLL:
        try:
            return _loops(self, prim, list(sizes), make, ())
        except NotRolled:
            pass
    total: Atom | None = None
    for place in np.ndindex(*sizes):
        atom = make(literal_index(place))
        total = atom if total is None else self.builder.op(prim, (total, atom), dtype)
    return literal(unit(dtype), dtype) if total is None else total


def _loops(
    self: Translation, prim: str, sizes: list[int], make: Callable[[Index], Atom], outer: tuple[Atom, ...]
) -> Atom:
    """The nest of loops over these sizes, inside loops over `outer`."""
    if not sizes:
        return make(outer)
    if sizes[0] == 1:
        return _loops(self, prim, sizes[1:], make, (*outer, literal(0, "int32")))
    index = self.builder.free_index(sizes[0], frozenset())
    with self.builder.opened([index]):
        operand = _loops(self, prim, sizes[1:], make, (*outer, index))
    return self.builder.loop(f"loop_{prim}", operand, index)


def reduced(self: Translation, prim: str, array: Value, axes: tuple[int, ...], unit: Unit, aval: Typed) -> Value:
    """`array` combined along the axes by the operation `prim`; `aval` is the type of the result."""
    sizes = [array.shape[d] for d in axes]

    def make(index: Index) -> Atom:
        def at(place: Index) -> Atom:
            rest, inner = iter(index), dict(zip(axes, place, strict=True))
            return element_of(self, array, [inner[d] if d in inner else next(rest) for d in range(array.ndim)])

        return over(self, prim, sizes, at, unit, aval.dtype)

    return self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))


def place_of_best(self: Translation, prim: str, array: Value, axis: int, aval: Typed) -> Value:
    """The places along the axis of the first greatest (prim "max") or least ("min") elements, or first NaNs."""
    size, builder = array.shape[axis], self.builder

    def make(index: Index) -> Atom:
        def at(place: Index) -> Atom:
            atom = element_of(self, array, [*index[:axis], *place, *index[axis:]])
            return builder.convert(atom, "int32") if atom.dtype == "bool" else atom

        none = lambda dtype: 0  # an axis without elements has no place, and jax refuses it
        best = over(self, prim, [size], at, none, array.dtype)

        def place_if_best(place: Index) -> Atom:
            atom = at(place)
            here = builder.op("eq", (atom, best), "bool")
            if jnp.issubdtype(jnp.dtype(atom.dtype), jnp.floating):
                here = builder.op("or", (here, builder.op("ne", (atom, atom), "bool")), "bool")
            # the last place where the best element is not
            return builder.select(here, place[0], literal(size - 1, "int32"))

        return builder.convert(over(self, "min", [size], place_if_best, none, np.dtype("int32")), aval.dtype)

    return self.lazy(aval.shape, aval.dtype, make, too_large_of([array], aval.shape))


def cumulative(self: Translation, prim: str, array: Value, axis: int, reverse: bool, unit: Unit) -> Value:
    """The elements of `array` combined up to each place of the axis, or from it on with `reverse`."""
    builder, size = self.builder, array.shape[axis]

    def make(index: Index) -> Atom:
        def at(place: Index) -> Atom:
            atom = element_of(self, array, [*index[:axis], *place, *index[axis + 1 :]])
            counts = builder.op("ge" if reverse else "le", (place[0], index[axis]), "bool")
            return builder.select(counts, atom, literal(unit(array.dtype), array.dtype))

        return over(self, prim, [size], at, unit, array.dtype)

    return self.lazy(array.shape, array.dtype, make, too_large_of([array], array.shape))


def dot(self: Translation, eqn: Equation, args: list[Value]) -> Value:
    """The result of `dot_general`, whose elements are sums of products (lower_rules.py)."""
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    (a, b), aval = args, eqn.outvars[0].aval
    free_a = [d for d in range(a.ndim) if d not in (*contract_a, *batch_a)]
    free_b = [d for d in range(b.ndim) if d not in (*contract_b, *batch_b)]

    def make(index: Index) -> Atom:
        head, rest = index[: len(batch_a)], index[len(batch_a) :]

        def at(place: Index) -> Atom:
            sides = (
                (a, batch_a, contract_a, free_a, rest[: len(free_a)]),
                (b, batch_b, contract_b, free_b, rest[len(free_a) :]),
            )
            atoms = []
            for array, batch, contract, free, own in sides:
                where = dict(zip((*batch, *contract, *free), (*head, *place, *own), strict=True))
                atom = element_of(self, array, [where[d] for d in range(array.ndim)])
                atoms.append(self.builder.convert(atom, aval.dtype))
            return self.builder.op("mul", atoms, aval.dtype)

        return over(self, "add", [a.shape[d] for d in contract_a], at, lambda dtype: 0, aval.dtype)

    return self.lazy(aval.shape, aval.dtype, make, too_large_of(args, aval.shape))
