"""Lowering rules of indexing inside a mod (`dynamic_slice`, `gather`): results are elements of the operand.

Starts, the indices at which a slice begins, are clamped so that the slice lies within the operand, as in jax. The
operand may itself be the result of indexing. Each level then clamps, fills and counts from the end by its own sizes. A
result is lazy, unless it has at most one element, as x[b] of a vector x has, or all operands are arrays of atoms.
"""

import math

import jax.numpy as jnp
from jax import lax

from flexjax.ir.builder import literal
from flexjax.ir.program import Atom
from flexjax.trace.lazy_rules import element_of
from flexjax.trace.random_keys import filled_key
from flexjax.trace.translation import Equation, Rule, Translation
from flexjax.trace.values import MAX_ELEMENTS, Index, Value, choose, is_atoms, is_key_dtype, is_lazy, literal_index


def _of_atoms(self: Translation, value: Value, operands: list[Value]) -> Value:
    # nothing stays lazy where all operands are atoms; ModError for more than MAX_ELEMENTS elements
    return self.as_atoms(value) if is_lazy(value) and all(map(is_atoms, operands)) else value


def dynamic_slice(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `dynamic_slice`; ModError if the result is an array of atoms of more than MAX_ELEMENTS."""
    array, sizes = args[0], eqn.params["slice_sizes"]
    starts = [self.as_atoms(a).item() for a in args[1:]]
    starts = [self.builder.clamped(s, n - k) for s, n, k in zip(starts, array.shape, sizes, strict=True)]

    def make(place: Index) -> Atom:
        index = [self.builder.op("add", pair, "int32") for pair in zip(starts, place, strict=True)]
        return element_of(self, array, index)

    too_large = f"it slices out shape {tuple(sizes)} at each position; at most {MAX_ELEMENTS} elements."
    return [_of_atoms(self, self.lazy(sizes, array.dtype, make, too_large), [array])]


def gather(self: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """The rule of `gather`; in mode "fill", an index out of bounds gives the fill value.

    Raises ModError if the result is an array of atoms of more than MAX_ELEMENTS elements.
    """
    array, indices = args
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    aval = eqn.outvars[0].aval
    collapsed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window_dims = [d for d in range(len(sizes)) if d not in collapsed]
    batch_axes = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]
    fill = _fill_value(eqn)

    def make(place: Index) -> Atom:
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
        return element if fill is None else choose(self.builder, valid, element, fill)

    too_large = f"it gathers shape {tuple(aval.shape)} at each position; at most {MAX_ELEMENTS} elements."
    return [_of_atoms(self, self.lazy(aval.shape, aval.dtype, make, too_large), args)]


def _fill_value(eqn: Equation) -> Atom | None:
    """The literal that a `gather` of mode "fill" returns for an index out of bounds; None for other modes."""
    mode, dtype = eqn.params["mode"], eqn.outvars[0].aval.dtype
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    value = eqn.params.get("fill_value")
    if is_key_dtype(dtype):
        return filled_key(2**32 - 1 if value is None else value, dtype)
    # jax's default
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
    """The bool atom `valid and 0 <= start <= limit`."""
    low = self.builder.op("ge", (start, literal(0, start.dtype)), "bool")
    # the type of `start` ends before the limit
    if limit > jnp.iinfo(jnp.dtype(start.dtype)).max:
        return self.builder.op("and", (valid, low), "bool")
    high = self.builder.op("le", (start, literal(limit, start.dtype)), "bool")
    both = self.builder.op("and", (low, high), "bool")
    return self.builder.op("and", (valid, both), "bool")


INDEXING_RULES: dict[str, Rule] = {"dynamic_slice": dynamic_slice, "gather": gather}
