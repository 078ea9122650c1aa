"""Scores that are the plain score plus a bias: the bias taken apart, so that little of it runs for each element.

    s' = c * s + sum of terms          c a number, no term depends on s

A term that is affine in q and kv (ALiBi: slope * (kv - q)) is a line of queries plus a line of keys. The line of queries never
meets the tile: the forward pass leaves it out (it is the same for a whole row) and adds it to the maximum and lse when the row
ends, the backward pass subtracts it from lse. What is left for each element is one addition. Positions are counted from the
tile's corner, so that the sums stay as small as the biases themselves.
Other terms are evaluated as they are and added. Everything is in base 2: multiplied by log2(e) where that is cheapest.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_tpu import tile_programs
from flexjax.backends.mosaic_tpu.tile_programs import UNIFORM
from flexjax.ir import program as ir
from flexjax.ir.program import Atom, Linear, Lit, Op, Program, Val

LOG2E = math.log2(math.e)
EXACT = 1 << 24
"""Integers below this are exact in float32."""


@dataclasses.dataclass(frozen=True)
class Term:
    """The product of `factors` (numbers of b and h) and either `leaf` or, as float, the affine `linear`."""

    factors: tuple[Atom, ...]
    sign: int
    leaf: Atom | None
    linear: Linear | None = None


@dataclasses.dataclass(frozen=True)
class Separated:
    """c and the terms; `program` computes all their atoms, `atoms` says in which order."""

    scale: float
    terms: tuple[Term, ...]
    program: Program
    atoms: tuple[Atom, ...]

    @property
    def affine(self) -> bool:
        return any(t.linear is not None for t in self.terms)


@functools.lru_cache(maxsize=512)
def separate(program: Program) -> Separated | None:
    """The first result taken apart; None where it is not such a sum, or where that would save nothing."""
    maker = {o.id: s for s in program.steps for o in s.outs}
    scales: list[float] = []
    terms: list[Term] = []

    def uniform(atom: Atom) -> bool:
        return tile_programs.place_of(ir.axes_of(atom)) == UNIFORM

    def walk(atom: Atom, factors: tuple[Atom, ...], sign: int) -> bool:
        if isinstance(atom, Val) and atom.id == ir.SCORE:
            if all(isinstance(f, Lit) for f in factors):
                scales.append(
                    sign * math.prod(float(typing.cast(float, f.value)) for f in factors if isinstance(f, Lit))
                )
                return True
            return False
        step = maker.get(atom.id) if isinstance(atom, Val) else None
        if isinstance(step, Op) and atom.dtype == "float32" and not uniform(atom):
            if step.prim in ("add", "sub"):
                x, y = step.inputs
                return walk(x, factors, sign) and walk(y, factors, sign if step.prim == "add" else -sign)
            if step.prim == "neg":
                return walk(step.inputs[0], factors, -sign)
            if step.prim == "mul":
                x, y = step.inputs
                if uniform(y):
                    return walk(x, (*factors, y), sign)
                if uniform(x):
                    return walk(y, (*factors, x), sign)
            if step.prim == "convert_element_type":
                linear = _affine(step.inputs[0])
                if linear is not None:
                    terms.append(Term(factors, sign, None, linear))
                    return True
        if "score" in ir.axes_of(atom) or atom.dtype != "float32":
            return False
        terms.append(Term(factors, sign, atom))
        return True

    if not walk(program.results[0], (), 1):
        return None
    if not scales or not terms:
        return None
    atoms = tuple(dict.fromkeys(a for t in terms for a in (*t.factors, *((t.leaf,) if t.leaf is not None else ()))))
    return Separated(sum(scales), tuple(terms), dataclasses.replace(program, results=atoms, gradients=()), atoms)


def _affine(atom: Atom) -> Linear | None:
    """The affine form of an int32 of q and kv alone, if it is exact as a float."""
    if not isinstance(atom, Val) or atom.dtype != "int32" or atom.linear is None:
        return None
    linear = atom.linear
    if linear.b or linear.h or linear.uniform or not (linear.q or linear.kv):
        return None
    if atom.low is None or atom.high is None or max(-atom.low, atom.high) >= EXACT:
        return None
    return linear


@dataclasses.dataclass(frozen=True)
class Bias:
    """The bias of a part of a tile in base 2: `q_line` belongs to queries (or None), `tile` is added to each element."""

    q_line: jax.Array | None
    tile: jax.Array | None


def bias_on(found: Separated, values: Sequence[jax.Array], view: tile_programs.View) -> Bias:
    """`values` are the atoms of `found` on the part of `view`."""
    known = dict(zip(found.atoms, values, strict=True))
    q_line: jax.Array | None = None
    pieces: list[jax.Array] = []
    for term in found.terms:
        factor: jax.Array | np.float32 = np.float32(LOG2E * term.sign)
        for atom in term.factors:
            factor = factor * known[atom]
        if term.linear is None:
            assert term.leaf is not None
            pieces.append(known[term.leaf] * factor)
            continue
        linear = term.linear
        corner = view.q_start * np.int32(linear.q) + view.kv_start * np.int32(linear.kv) + np.int32(linear.const)
        number = corner.astype(jnp.float32) * factor
        if linear.q:
            line = view.local(view.q_axis) * np.float32(linear.q) * factor
            line = line if linear.kv else line + number
            q_line = line if q_line is None else q_line + line
        if linear.kv:
            pieces.append(view.local(1 - view.q_axis) * np.float32(linear.kv) * factor + number)
    # Small pieces first: what is of one shape is added before it meets the tile.
    pieces.sort(key=jnp.size)
    return Bias(q_line, functools.reduce(lambda x, y: x + y, pieces) if pieces else None)
