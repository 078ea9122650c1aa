"""Scores of the form c * s + bias: separates the bias, so that the kernel adds at most one number to each score.

    s' = c * s + sum of terms          c a number; no term depends on s

A term that is affine in q and kv (ALiBi: slope * (kv - q)) is a row term of q plus a column term of kv. The row term is the
same for all scores of a row, so it is not added to the tile: the forward kernel leaves it out of the scores and adds it to the
row maximum and the lse when the row ends, and the backward kernels subtract it from the lse. The column term is one addition for
each score. Positions are counted from the first element of the strip, so that the sums stay as small as the biases themselves.
Other terms are evaluated and added to the scores. All terms are in base 2, that is, multiplied by log2(e).

A strip is the part of a tile whose scores are computed at once (tile_programs.py). An atom is an operand of a program: a literal
or the result of a step.

A SeparatedScore is a score that was found to have this form, a StripView says where a strip lies and reads values on it.
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

EXACT_INTEGERS = 1 << 24
"""Integers below this are exact in float32."""


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """One term of the bias: sign * the product of `factors` * a value.

    factors   atoms that depend on b and h alone
    sign      1 or -1
    value     the atom of the value; None if `linear` is given
    linear    the value as a linear form of q and kv, to be converted to float32; None if `value` is given
    """

    factors: tuple[Atom, ...]
    sign: int
    value: Atom | None
    linear: Linear | None = None


@dataclasses.dataclass(frozen=True)
class SeparatedScore:
    """A score of the form c * s + sum of terms.

    scale     c
    terms     of the sum
    program   computes the factors and values of all terms
    atoms     the results of `program`, in order: these factors and values, each once
    """

    scale: float
    terms: tuple[BiasTerm, ...]
    program: Program
    atoms: tuple[Atom, ...]


@functools.lru_cache(maxsize=512)
def separate_bias(program: Program) -> SeparatedScore | None:
    """Splits the score (the first result) of a score program or derivative program into c * s + terms.

    c is a Python float, the product of literals: `s * 0.5` is of this form, `s * slope[h]` is not. If s is in several summands,
    c is the sum of their factors.

    None if the score is not of this form, does not contain s, has no term beside c * s, or has a summand that is not float32.
    """
    made_by = {o.id: s for s in program.steps for o in s.outs}
    scales: list[float] = []
    terms: list[BiasTerm] = []

    def uniform(atom: Atom) -> bool:
        """Whether the atom is a literal or depends on b and h alone."""
        return axis_class(ir.axes_of(atom)) == UNIFORM

    def walk(atom: Atom, factors: tuple[Atom, ...], sign: int) -> bool:
        """Adds sign * factors * atom, summand by summand, to `scales` (of s) and `terms`.

        Sums, negations and products with an atom of b and h alone are taken apart; anything else without s is one term.
        False if s occurs in the atom otherwise than in a summand that is s times literals, or if a summand is not
        float32.
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
    """The linear form of an atom in q and kv, if it is an int32 that has one without b and h and is below 2^24 in
    magnitude.

    None otherwise, also for a constant and for an unknown range. float32 holds such values exactly.
    """
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
    """The bias on a strip, in base 2 (multiplied by log2(e)).

    row_term   the part that depends on the query alone, which is not added to the scores: (rows, 1), or (1, cols) if
               q_axis is 1; None without such a part
    tile       what is added to each score, in a shape that broadcasts to the strip; None: nothing
    """

    row_term: jax.Array | None
    tile: jax.Array | None


def strip_bias(separated: SeparatedScore, values: Sequence[jax.Array], view: StripView) -> StripBias:
    """The bias of a separated score on a strip.

    values   the values of `separated.atoms` on the strip, in this order
    view     where the strip lies

    Affine values are not among `values`: they are computed from the positions of the strip. Their part of q is the row
    term, their part of kv and the value at the strip's first element are added to the tile (to the row term if kv has
    no part). All other terms are added to the tile.
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
