"""Lowering rules of indexing inside a mod (`dynamic_slice`, `gather`): each element of the result is one element of the
operand.

Starts, the indices at which a slice begins, are clamped so that the slice lies within the operand, as in jax. The operand may
itself be the result of indexing. Each level then clamps, fills and counts from the end by its own sizes. A rule has the
arguments (translation, equation, operands) and returns the values of the equation's results; see lower_rules.py.
"""

import math

import jax.numpy as jnp
from jax import lax

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom, Lit
from flexjax.trace.lazy_rules import element_of
from flexjax.trace.translation import Equation, Rule, Translation
from flexjax.trace.values import MAX_ELEMENTS, Index, Value, is_atoms, is_lazy, literal_index


def _of_atoms(self: Translation, value: Value, operands: list[Value]) -> Value:
    """The result of indexing as an array of atoms if it is lazy and all `operands` are arrays of atoms, so that nothing stays
    lazy; ModError for more than MAX_ELEMENTS elements. Any other result is returned as it is.
    """
    return self.as_atoms(value) if is_lazy(value) and all(map(is_atoms, operands)) else value


def dynamic_slice(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `dynamic_slice`: each start is clamped so that the slice lies within the array.

    The result is lazy, unless it has at most one element, as x[b] of a vector x has, or the array is an array of atoms: then
    it is an array of atoms, and ModError is raised if it would have more than MAX_ELEMENTS elements.
    """
    array, sizes = args[0], eqn.params["slice_sizes"]
    starts = [self.as_atoms(a).item() for a in args[1:]]
    starts = [self.builder.clamped(s, n - k) for s, n, k in zip(starts, array.shape, sizes, strict=True)]

    def make(place: Index) -> Atom:
        """The element at index `place` of the slice."""
        index = [self.builder.op("add", pair, "int32") for pair in zip(starts, place, strict=True)]
        return element_of(self, array, index)

    too_large = f"it slices out shape {tuple(sizes)} at each position; at most {MAX_ELEMENTS} elements."
    return [_of_atoms(self, self.lazy(sizes, array.dtype, make, too_large), [array])]


def gather(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `gather`: each start is clamped; in mode "fill", an index out of bounds gives the fill value.

    The result is lazy, unless it has at most one element or both operands are arrays of atoms: then it is an array of
    atoms, and ModError is raised if it would have more than MAX_ELEMENTS elements.
    """
    array, indices = args
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    aval = eqn.outvars[0].aval
    collapsed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window_dims = [d for d in range(len(sizes)) if d not in collapsed]
    batch_axes = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]
    fill = _fill_value(eqn)

    def make(place: Index) -> Atom:
        """The element at index `place` of the result: the start of its slice is read from the array of indices and
        clamped; the fill value, if there is one, where the start was out of bounds.
        """
        batch = [place[d] for d in batch_axes]
        index: list[Atom] = [literal(0, "int32")] * len(sizes)
        valid: Atom = literal(True, "bool")
        for k, d in enumerate(dims.start_index_map):
            start = element_of(self, indices, [*batch, *literal_index([k])])
            valid = _in_bounds(self, valid, start, array.shape[d] - sizes[d])
            index[d] = self.builder.clamped(start, array.shape[d] - sizes[d])
        for d, i in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            index[d] = batch[i]
        for d, axis in zip(window_dims, dims.offset_dims, strict=True):
            index[d] = self.builder.op("add", (index[d], place[axis]), "int32")
        element = element_of(self, array, index)
        return element if fill is None else self.builder.select(valid, element, fill)

    too_large = f"it gathers shape {tuple(aval.shape)} at each position; at most {MAX_ELEMENTS} elements."
    return [_of_atoms(self, self.lazy(aval.shape, aval.dtype, make, too_large), args)]


def _fill_value(eqn: Equation) -> Lit | None:
    """The literal that a `gather` of mode "fill" returns for an index out of bounds; None for other modes, where
    indices are clamped.

    Without a value in the equation it is jax's default: NaN, True, the least signed or the greatest unsigned integer.
    """
    mode, dtype = eqn.params["mode"], eqn.outvars[0].aval.dtype
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    value = eqn.params.get("fill_value")
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = math.nan
        elif dtype == jnp.bool_:
            value = True
        else:
            info = jnp.iinfo(dtype)
            value = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return literal(value, dtype)


def _in_bounds(self: Translation, valid: Atom, start: Atom, limit: int) -> Atom:
    """The bool atom `valid and 0 <= start <= limit`, without the upper comparison where the type of `start` ends before
    the limit.
    """
    low = self.builder.op("ge", (start, literal(0, start.dtype)), "bool")
    if limit > jnp.iinfo(jnp.dtype(start.dtype)).max:
        return self.builder.op("and", (valid, low), "bool")
    high = self.builder.op("le", (start, literal(limit, start.dtype)), "bool")
    both = self.builder.op("and", (low, high), "bool")
    return self.builder.op("and", (valid, both), "bool")


INDEXING_RULES: dict[str, Rule] = {"dynamic_slice": dynamic_slice, "gather": gather}
