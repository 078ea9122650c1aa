"""Programs of a score_mod in float32 where the user's function computes in float64.

Under x64 a captured float64 array, and a numpy float64 number, make the arithmetic of a score_mod float64. For queries
of 16 bits no score has room for that precision, and no kernel computes it. `in_single_precision` makes it float32.

It declines where a rounded operand could change the result by more than its own rounding. Comparisons of a derivative
alone do not count: they choose between branches that meet where the operands are equal. It does not look for
cancellation: a difference of two large numbers, or of two positions of 2^24 or more, keeps the rounding of both.
"""

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from flexjax.ir.builder import Builder
from flexjax.ir.operations import COMPARISONS, DIVISIONS, ROUNDINGS
from flexjax.ir.program import SCORE, Atom, Lit, Load, Op, Program, Step, walk_atoms
from flexjax.ir.replay import replay

STEPPED = (
    COMPARISONS | DIVISIONS - {"div"} | ROUNDINGS | {"bitcast_convert_type", "is_finite", "reduce_precision", "sign"}
)
"""Primitives whose result jumps, or is about single bits, so that it may not take an operand that was rounded."""

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def in_single_precision(programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs with float32 in place of float64, also in captured arrays; None where they stay as they are.

    `programs` are those of one score_mod, its own first, then its derivatives. They stay if no step gives float64, if
    one gives complex128 or is a Call, if one makes float64 of other bits (`_is_bits`), if one of the first program
    jumps (`_may_round`), and if a literal does not fit (`_fits`).
    """
    dtypes = {out.dtype for p in programs for step in p.steps for out in step.outs}
    if "float64" not in dtypes or "complex128" in dtypes or any(p.calls for p in programs):
        return None
    if any(_is_bits(step) for p in programs for step in p.steps):
        return None
    if not all(_may_round(step) for step in programs[0].steps) or not all(
        map(_fits, itertools.chain(*map(walk_atoms, programs)))
    ):
        return None
    return tuple(map(_rounded, programs))


def with_single_captures(program: Program) -> Program | None:
    """The program with float32 captures that it converts to float64; None if a Call takes such an array whole."""
    doubles = {i for i, c in enumerate(program.captures) if c.dtype == "float64"}
    if any(a in doubles for call in program.calls for a in call.arguments if isinstance(a, int)):
        return None
    builder = Builder(program.sizes, program.inputs[SCORE].dtype)
    for capture in program.captures:
        builder.capture(capture.shape, _narrow(capture.dtype))
    found = replay(
        program, builder, {v.id: v for v in builder.inputs}, element=lambda load, x: builder.convert(x, load.out.dtype)
    )
    return builder.finish([found.new(r) for r in program.results], [found.loads[n] for n in program.gradients])


def _is_bits(step: Step) -> bool:
    # float32 has another number of bits
    return isinstance(step, Op) and step.prim == "bitcast_convert_type" and step.out.dtype == "float64"


def _may_round(step: Step) -> bool:
    doubles = any(atom.dtype == "float64" for atom in step.inputs)
    return not doubles or (isinstance(step, Op) and step.prim not in STEPPED and _is_float(step.out.dtype))


def _is_float(dtype: str) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _fits(atom: Atom) -> bool:
    """Whether a float64 literal is 0, infinite, NaN or a normal number of float32; True for every other atom."""
    if not isinstance(atom, Lit) or atom.dtype != "float64":
        return True
    value = abs(float(atom.value))
    return value == 0.0 or not math.isfinite(value) or _SMALLEST <= value <= _LARGEST


def _rounded(program: Program) -> Program:
    """The program, which has no Call, with float32 in place of float64, also in captured arrays."""
    builder = Builder(program.sizes, program.inputs[SCORE].dtype)
    for capture in program.captures:
        builder.capture(capture.shape, _narrow(capture.dtype))
    atoms: dict[int, Atom] = {v.id: v for v in builder.inputs}
    loads: dict[int, Load] = {}

    def new(atom: Atom) -> Atom:
        if not isinstance(atom, Lit):
            return atoms[atom.id]
        return Lit(float(np.float32(atom.value)), "float32") if atom.dtype == "float64" else atom

    for position, step in enumerate(program.steps):
        if isinstance(step, Load):
            atom = builder.load(step.capture, [new(a) for a in step.index])
            atoms[step.out.id], loads[position] = atom, builder.load_step(atom)
            continue
        assert isinstance(step, Op)  # programs with a Call stay as they are
        dtype = _narrow(step.out.dtype)
        if step.prim == "convert_element_type":
            atoms[step.out.id] = builder.convert(new(step.inputs[0]), dtype)
        else:
            atoms[step.out.id] = builder.op(step.prim, [new(a) for a in step.inputs], dtype, **dict(step.params))
    return builder.finish([new(r) for r in program.results], [loads[n] for n in program.gradients])


def _narrow(dtype: str) -> str:
    return "float32" if dtype == "float64" else dtype
