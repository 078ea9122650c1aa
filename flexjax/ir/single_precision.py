"""Programs of a score_mod in float32 where the user's function computes in float64.

Under x64 a captured float64 array, and a numpy float64 number, make the arithmetic of a score_mod float64. For queries of 16 bits
that is precision which no score has room for, and no kernel computes it. `in_single_precision` makes the same program in float32.

It declines where a rounded operand could change the result by more than its own rounding: where float64 values are compared,
rounded to integers, or reinterpreted as bits, where a literal is beyond the range of float32, and for steps that are whole jaxprs.
Comparisons of a derivative alone do not count: they choose between branches that meet where the operands are equal. It does not look for
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

STEPPED = (
    COMPARISONS | DIVISIONS - {"div"} | ROUNDINGS | {"bitcast_convert_type", "is_finite", "reduce_precision", "sign"}
)
"""Primitives whose result jumps, or is about single bits, so that it may not take an operand that was rounded."""

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def in_single_precision(programs: Sequence[Program]) -> tuple[Program, ...] | None:
    """The programs with float32 in place of float64, and with captured arrays of float32 in place of float64; None where they
    stay as they are.

    programs   of one score_mod, whose score is float32: its program, and its derivative program if it has one. They have the
               same captured arrays

    They stay if no step of theirs gives float64; if one gives complex128 or is a Call; if a step makes float64 of other bits
    (`_is_bits`); if a step of the score_mod's own program compares, rounds to integers or reinterprets float64 values
    (`_may_round`); and if a float64 literal is neither a normal number of float32 nor 0, infinite or NaN (`_fits`).
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


def _is_bits(step: Step) -> bool:
    """Whether a step reinterprets the bits of another dtype as float64; float32 has another number of them."""
    return isinstance(step, Op) and step.prim == "bitcast_convert_type" and step.out.dtype == "float64"


def _may_round(step: Step) -> bool:
    """Whether float64 may become float32 in a step: True for a step without float64 operands; of the others for an Op that is
    not one of STEPPED and has a real floating result.
    """
    doubles = any(atom.dtype == "float64" for atom in step.inputs)
    return not doubles or (isinstance(step, Op) and step.prim not in STEPPED and _is_float(step.out.dtype))


def _is_float(dtype: str) -> bool:
    """Whether the dtype of a name is a real floating one."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _fits(atom: Atom) -> bool:
    """Whether a float64 literal is 0, infinite, NaN or a normal number of float32; True for every other atom."""
    if not isinstance(atom, Lit) or atom.dtype != "float64":
        return True
    value = abs(float(atom.value))
    return value == 0.0 or not math.isfinite(value) or _SMALLEST <= value <= _LARGEST


def _rounded(program: Program) -> Program:
    """The program with float32 in place of float64, step by step, and with captured arrays of float32. It must have no Call."""
    builder = Builder(program.sizes, program.inputs[SCORE].dtype)
    for capture in program.captures:
        builder.capture(capture.shape, _narrow(capture.dtype))
    atoms: dict[int, Atom] = {v.id: v for v in builder.inputs}
    loads: dict[int, Load] = {}

    def new(atom: Atom) -> Atom:
        """The atom of the new program for an atom of the old: a float64 literal rounded to float32, other literals as they are."""
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
    """The dtype name of the new program for one of the old: float32 for float64, any other as it is."""
    return "float32" if dtype == "float64" else dtype
