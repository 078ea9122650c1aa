"""Whether the scores of a program may lie far out, beyond what a kernel can scale without a thought for rounding.

A kernel likes to scale and shift a score in one operation, in powers of two. Where the score is -1e10, as an additive mask has it,
that operation and the scaling of what it is relative to round apart by hundreds of powers of two; a row of which the mask leaves
nothing is then NaN. What may be so large takes the difference first, for one more operation an element.

Far are: literals from LARGE on; what is added or chosen from captured arrays, which may hold anything; what nothing is known of.
Taken to be moderate are the score itself, what multiplies it (gates, temperatures, scales of keys), and numbers of a batch entry or
a head that multiply something known: slopes along positions.
"""

import functools
import math

from flexjax.analysis.bounds import Range, of_op, range_of
from flexjax.ir.program import SCORE, UNIFORM, Call, Lit, Op, Program, axes_of, walk_atoms

LARGE = 2.0**22
"""Float32 numbers from here on are a half apart or more."""
MODERATE_SCORE: Range = (-(2.0**10), 2.0**10)
MODERATE_FACTOR: Range = (-2.0, 2.0)
MASK_WIDTH = 2.0
"""What has no wider range, 0 to 1 or -1 to 1, says where to hide, and what multiplies it may be how much: no slope."""


@functools.lru_cache(maxsize=512)
def may_be_large(program: Program | None) -> bool:
    """Whether a score that is finite may be as large as LARGE, either way. None: the identity, whose scores are moderate."""
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
    """Whether a score may be far out and is a product, which a compiler may merge with what is subtracted from it: see
    tile_math.exact_distance."""
    if program is None or not may_be_large(program):
        return False
    made = {out.id: step for step in program.steps for out in step.outs}
    atom = program.results[0]
    while not isinstance(atom, Lit):
        step = made.get(atom.id)
        if not isinstance(step, Op):
            return step is not None and isinstance(step, Call)
        if step.prim not in SAME_VALUE:
            return step.prim in PRODUCTS
        atom = step.inputs[0]
    return False


PRODUCTS = frozenset({"mul", "div", "square", "integer_pow"})
SAME_VALUE = frozenset({"neg", "copy", "convert_element_type"})


def _is_large(atom: Lit) -> bool:
    value = atom.value
    return isinstance(value, float) and math.isfinite(value) and abs(value) >= LARGE


def _of_step(step: Op, known: dict[int, Range]) -> Range:
    given = [_read(step, place, known) for place in range(len(step.inputs))]
    divides = step.prim == "div" and given[1] is MODERATE_FACTOR  # so is what it is a factor of
    return of_op("mul" if divides else step.prim, given)


def _read(step: Op, place: int, known: dict[int, Range]) -> Range:
    """The range that the step takes its argument to have."""
    atom = step.inputs[place]
    found = range_of(atom, known)
    if _is_known(found):
        return found
    if isinstance(atom, Lit):  # where infinity is added or chosen, the result is infinite, not far
        neutral = step.prim in ("add", "sub", "select_n") and not math.isnan(atom.value)
        return (0.0, 0.0) if neutral else found
    if step.prim not in ("mul", "div"):
        return found
    other = step.inputs[1 - place]
    low, high = range_of(other, known)
    slope = axes_of(atom) <= UNIFORM and MASK_WIDTH < high - low < math.inf
    factor = "score" in axes_of(other) and "score" not in axes_of(atom)
    return MODERATE_FACTOR if factor or slope else found


def _is_known(found: Range) -> bool:
    return all(map(math.isfinite, found))
