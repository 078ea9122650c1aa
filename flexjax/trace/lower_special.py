"""Lowering rules of primitives that take several operations of the program for each element: bitcasts, cumlogsumexp."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import Atom
from flexjax.trace.translation import Equation, Rule, Translation
from flexjax.trace.values import Value, as_object, map_elements, scalar

# ------------------------------------------------------------------- reinterpreting bits


def bits_of(dtype: DTypeLike) -> int | None:
    """The bits of a number of the dtype; None for dtypes whose bits shifts cannot separate (bool, complex)."""
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return int(jnp.iinfo(kind).bits)
    return int(jnp.finfo(kind).bits) if jnp.issubdtype(kind, jnp.floating) else None


def _reinterpreted(builder: Builder, atom: Atom, dtype: DTypeLike) -> Atom:
    name = jnp.dtype(dtype).name
    return atom if atom.dtype == name else builder.op("bitcast_convert_type", (atom,), name, new_dtype=name)


def _bitcast(self: Translation, eqn: Equation, args: list[Value]) -> Sequence[Value] | None:
    """The rule of `bitcast_convert_type`; None (a Call) for bool and complex numbers to another width.

    Shifts separate and join the parts of numbers of different widths. The last dimension counts the parts, the least
    significant first.
    """
    out = eqn.outvars[0].aval
    old, new = bits_of(eqn.invars[0].aval.dtype), bits_of(out.dtype)
    builder = self.builder
    if old == new:
        return [self.map_values(lambda x: _reinterpreted(builder, x, out.dtype), args, out.shape, out.dtype)]
    atoms = self.as_atoms(args[0])
    if old is None or new is None:
        return None
    small, large = (f"uint{min(old, new)}", f"uint{max(old, new)}")

    def part(atom: Atom, place: int) -> Atom:
        whole = _reinterpreted(builder, atom, large)
        moved = builder.op("shift_right_logical", (whole, literal(place * new, large)), large)
        return _reinterpreted(builder, builder.convert(moved, small), out.dtype)

    def joined(*parts: Atom) -> Atom:
        total: Atom = literal(0, large)
        for place, atom in enumerate(parts):
            widened = builder.convert(_reinterpreted(builder, atom, small), large)
            moved = builder.op("shift_left", (widened, literal(place * old, large)), large)
            total = builder.op("or", (total, moved), large)
        return _reinterpreted(builder, total, out.dtype)

    if new < old:
        columns = [map_elements(lambda x, i=i: part(x, i), [atoms], atoms.shape) for i in range(old // new)]
        return [np.stack(columns, -1)]
    return [map_elements(joined, [as_object(c) for c in np.moveaxis(atoms, -1, 0)], out.shape)]


# ------------------------------------------------------------------- running sums of exponentials


def _cumlogsumexp(self: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    """jnp.logaddexp of each element and the result before it, with its derivative rule."""
    atoms = np.moveaxis(self.as_atoms(args[0]).copy(), eqn.params["axis"], 0)
    kind = jax.ShapeDtypeStruct((), eqn.outvars[0].aval.dtype)
    add = jax.make_jaxpr(jnp.logaddexp)(kind, kind)
    order = list(range(len(atoms)))[:: -1 if eqn.params["reverse"] else 1]
    for before, here in itertools.pairwise(order):
        for place in np.ndindex(*atoms.shape[1:]):
            pair = [scalar(atoms[(at, *place)]) for at in (before, here)]
            (total,) = self.run(add.jaxpr, add.consts, pair)
            atoms[(here, *place)] = self.as_atoms(total).item()
    return [np.moveaxis(atoms, 0, eqn.params["axis"])]


SPECIAL_RULES: dict[str, Rule] = {"bitcast_convert_type": _bitcast, "cumlogsumexp": _cumlogsumexp}
