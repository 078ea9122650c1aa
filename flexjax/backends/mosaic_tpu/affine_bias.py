"""Scores of the form c * s + bias: separates the bias, so that the kernel adds at most one number to each score.

    s' = c * s + sum of terms          c a number; no term depends on s

A term that is affine in q and kv (ALiBi: slope * (kv - q)) is a row term of q plus a column term of kv. The row term is
the same for all scores of a row, so it is not added to the tile: the forward kernel adds it to the row maximum and the
lse when the row ends, and the backward kernels subtract it from the lse. The column term is one addition for each
score. Positions are counted from the first element of the strip, so that the sums stay as small as the biases
themselves. Other terms are evaluated and added to the scores. All terms are in base 2, that is, multiplied by log2(e).
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_tpu.split_program import UNIFORM, axis_class
from flexjax.backends.mosaic_tpu.tile_programs import StripView
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.ir.program import Atom, Linear, Lit, Op, Program, Val

EXACT_INTEGERS = 1 << 24  # integers below this are exact in float32


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """One term of the bias: sign * the product of `factors` * (`value` or `linear`)."""

    factors: tuple[Atom, ...]  # they depend on b and h alone
    sign: int  # 1 or -1
    value: Atom | None  # None if `linear` is given
    linear: Linear | None = None  # of q and kv, to be converted to float32


@dataclasses.dataclass(frozen=True)
class SeparatedScore:
    """A score of the form c * s + sum of terms."""

    scale: float  # c
    terms: tuple[BiasTerm, ...]
    program: Program  # computes the factors and values of all terms
    atoms: tuple[Atom, ...]  # the results of `program`, in order: these factors and values, each once


@functools.lru_cache(maxsize=512)
def separate_bias(program: Program) -> SeparatedScore | None:
    """Splits the score (the first result) of a score program or derivative program into c * s + terms.

    c is a Python float, the product of literals: `s * 0.5` is of this form, `s * slope[h]` is not. None if the score is
    not of this form, does not contain s, has no term beside c * s, or has a summand that is not float32.
    """
    made_by = {o.id: s for s in program.steps for o in s.outs}
    scales: list[float] = []
    terms: list[BiasTerm] = []

    def uniform(atom: Atom) -> bool:
        return axis_class(ir.axes_of(atom)) == UNIFORM

    def walk(atom: Atom, factors: tuple[Atom, ...], sign: int) -> bool:
        """Adds sign * factors * atom, summand by summand, to `scales` (of s) and `terms`; False if it does not fit.

        It takes sums, negations and products with an atom of b and h alone apart; anything else without s is one term.
        """
        if isinstance(atom, Val) and atom.id == ir.SCORE:
            if all(isinstance(f, Lit) for f in factors):
                scales.append(
                    sign * math.prod(float(typing.cast(float, f.value)) for f in factors if isinstance(f, Lit))
                )
                return True
            return False
        step = made_by.get(atom.id) if isinstance(atom, Val) else None
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
                    terms.append(BiasTerm(factors, sign, None, linear))
                    return True
        if "score" in ir.axes_of(atom) or atom.dtype != "float32":
            return False
        terms.append(BiasTerm(factors, sign, atom))
        return True

    if not walk(program.results[0], (), 1):
        return None
    if not scales or not terms:
        return None
    atoms = tuple(dict.fromkeys(a for t in terms for a in (*t.factors, *((t.value,) if t.value is not None else ()))))
    return SeparatedScore(sum(scales), tuple(terms), dataclasses.replace(program, results=atoms, gradients=()), atoms)


def _affine(atom: Atom) -> Linear | None:
    """The linear form of an int32 in q and kv alone that float32 holds exactly; None for others and for a constant."""
    if not isinstance(atom, Val) or atom.dtype != "int32" or atom.linear is None:
        return None
    linear = atom.linear
    if linear.b or linear.h or linear.uniform or not (linear.q or linear.kv):
        return None
    if atom.low is None or atom.high is None or max(-atom.low, atom.high) >= EXACT_INTEGERS:
        return None
    return linear


@dataclasses.dataclass(frozen=True)
class StripBias:
    """The bias on a strip, in base 2 (multiplied by log2(e))."""

    # the part of the query alone, which is not added to the scores: (rows, 1), or (1, cols) if q_axis is 1
    row_term: jax.Array | None
    tile: jax.Array | None  # what is added to each score, in a shape that broadcasts to the strip


def strip_bias(separated: SeparatedScore, values: Sequence[jax.Array], view: StripView) -> StripBias:
    """The bias of a separated score on the strip of `view`; `values` are those of `separated.atoms` there.

    Affine values are computed from the positions of the strip: their part of q is the row term, and the rest is added
    to the tile (to the row term if kv has no part).
    """
    known = dict(zip(separated.atoms, values, strict=True))
    row_term: jax.Array | None = None
    pieces: list[jax.Array] = []
    for term in separated.terms:
        factor: jax.Array | np.float32 = np.float32(LOG2E * term.sign)
        for atom in term.factors:
            factor = factor * known[atom]
        if term.linear is None:
            assert term.value is not None
            pieces.append(known[term.value] * factor)
            continue
        linear = term.linear
        corner = view.q_start * np.int32(linear.q) + view.kv_start * np.int32(linear.kv) + np.int32(linear.const)
        at_corner = corner.astype(jnp.float32) * factor
        if linear.q:
            line = view.offsets(view.q_axis) * np.float32(linear.q) * factor
            line = line if linear.kv else line + at_corner
            row_term = line if row_term is None else row_term + line
        if linear.kv:
            pieces.append(view.offsets(1 - view.q_axis) * np.float32(linear.kv) * factor + at_corner)
    # Pieces of one shape are added before their sum meets the tile, because that costs less: small pieces first.
    pieces.sort(key=jnp.size)
    return StripBias(row_term, functools.reduce(lambda x, y: x + y, pieces) if pieces else None)
