"""Whether scores may be too large to scale before the maximum is subtracted (large scores).

Kernels fold scale and max-subtraction into one FMA: exp2(score * c - max * c), where max is the running maximum of the
row and c a constant factor such as log2(e). For a score of -1e10, as an additive mask has, the FMA and the separate
product max * c round differently by hundreds, so exp2 overflows, and a fully masked row becomes NaN. A kernel whose
scores may be large computes exp2((score - max) * c) instead, one more operation an element, or has another c for each
row (backends/mosaic_gpu/machine/row_scales.py).

A score may be large where a literal of magnitude LARGE or more, an element of a captured array or a value of unknown
range is added to it or selected. Three things are assumed to be moderate: the score that the mod is given, factors of
the score (gates, temperatures, scales of keys), and slopes along positions.
"""

import functools
import math

from flexjax.analysis.bounds import Range, of_op, range_of
from flexjax.ir.program import SCORE, UNIFORM, Call, Lit, Op, Program, axes_of, walk_atoms

LARGE = 2.0**22  # from this magnitude on, neighbouring float32 numbers differ by 1/2 or more
MODERATE_SCORE: Range = (-(2.0**10), 2.0**10)
"""The range that the score which the mod is given is assumed to have."""
MODERATE_FACTOR: Range = (-2.0, 2.0)  # the range that factors of the score and slopes are assumed to have
MASK_WIDTH = 2.0
"""A range at most 2 wide (0 to 1, or -1 to 1) is treated as a 0/1 mask, so its multiplier may be the -1e10."""


@functools.lru_cache(maxsize=512)
def may_be_large(program: Program | None) -> bool:
    """Whether a finite result of the score program (None: the identity) may have magnitude LARGE or more."""
    if program is None:
        return False
    if any(isinstance(atom, Lit) and _is_large(atom) for atom in walk_atoms(program)):
        return True
    known = {SCORE: MODERATE_SCORE}
    for step in program.steps:
        if isinstance(step, Op) and step.out.dtype == "float32":
            known[step.out.id] = _of_step(step, known)
    low, high = range_of(program.results[0], known)
    return not (low >= -LARGE and high <= LARGE)


@functools.lru_cache(maxsize=512)
def may_be_large_product(program: Program | None) -> bool:
    """Whether scores may be large and a product makes them, which a compiler may fuse with the maximum into an FMA."""
    if program is None or not may_be_large(program):
        return False
    made = {out.id: step for step in program.steps for out in step.outs}
    atom = program.results[0]
    while not isinstance(atom, Lit):
        step = made.get(atom.id)
        if not isinstance(step, Op):
            return step is not None and isinstance(step, Call)
        if step.prim not in SAME_MAGNITUDE:
            return step.prim in PRODUCTS
        atom = step.inputs[0]
    return False


PRODUCTS = frozenset({"mul", "div", "square", "integer_pow"})
"""Operations that a compiler may compute as a product, so that a subtraction that follows can be fused with them."""
SAME_MAGNITUDE = frozenset({"neg", "convert_element_type"})
"""Operations whose result has the magnitude of their operand."""


def _is_large(atom: Lit) -> bool:
    value = atom.value
    return isinstance(value, float) and math.isfinite(value) and abs(value) >= LARGE


def _of_step(step: Op, known: dict[int, Range]) -> Range:
    """The range of the result of a float32 operation."""
    given = [_operand_range(step, number, known) for number in range(len(step.inputs))]
    # a divisor that is assumed to be moderate is treated as a moderate factor
    divides = step.prim == "div" and given[1] is MODERATE_FACTOR
    return of_op("mul" if divides else step.prim, given)


def _operand_range(step: Op, number: int, known: dict[int, Range]) -> Range:
    """The range of an operand of the step, or an assumed one if that is infinite.

    A slope is a value of b and h alone whose other operand has a finite range wider than MASK_WIDTH.
    """
    atom = step.inputs[number]
    found = range_of(atom, known)
    if _is_known(found):
        return found
    if isinstance(atom, Lit):  # an infinite literal that is added or selected makes the score infinite, not large
        neutral = step.prim in ("add", "sub", "select_n") and not math.isnan(atom.value)
        return (0.0, 0.0) if neutral else found
    if step.prim not in ("mul", "div"):
        return found
    other = step.inputs[1 - number]
    low, high = range_of(other, known)
    slope = axes_of(atom) <= UNIFORM and MASK_WIDTH < high - low < math.inf
    factor = "score" in axes_of(other) and "score" not in axes_of(atom)
    return MODERATE_FACTOR if factor or slope else found


def _is_known(found: Range) -> bool:
    return all(map(math.isfinite, found))
