"""Between which numbers the results of a program lie, whatever the score and the captured arrays hold.

A soft cap, `cap * tanh(score / cap)`, lies between -cap and cap; a kernel that knows it needs no running maximum. The bounds are
numbers known while compiling, for the whole attention matrix; `intervals` bounds masks block by block. NaN passes through what
is here, so a bounded result may be NaN.

Only float32 values are followed: integers have the ranges that tracing gave them (none where they may wrap around), narrower
floats and casts to integers none. An end past the largest float32 is infinite.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from flexjax.trace.mod_ir import SCORE, UNIFORM, Atom, Lit, Op, Program, axes_of, range_of_val

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)
LARGEST = 3.4028234e38
"""No float32 is larger; what may be rounds to infinity."""
WITHIN: dict[str, Range] = {
    "tanh": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "atan": (-math.pi / 2, math.pi / 2),
    "logistic": (0.0, 1.0),
    "erfc": (0.0, 2.0),
}
"""Functions that are bounded whatever they are given."""


FAR = 2.0**27
"""From here on neighbouring float32 numbers are 16 apart: of the scores of a row only those weigh that equal the largest."""
MODERATE_SCORE = (-(2.0**15), 2.0**15)
MODERATE_NUMBER = (-(2.0**10), 2.0**10)
"""What `may_be_far` takes a score, and a number of a batch entry or a head (a slope, a gate), to lie between."""


def bounds(program: Program) -> tuple[Range, ...]:
    """(lowest, highest) of each result; infinite where nothing is known."""
    return _bounds(program, {}, lambda _, found: found)


@functools.lru_cache(maxsize=512)
def may_be_far(program: Program | None) -> bool:
    """Whether a score that is finite may lie further out than half of FAR: a bias that is -1e10 where it hides, a literal -1e30.

    Captured arrays may hold anything. Infinite literals are no concern: what they add or select is infinite. None: the identity.
    """
    if program is None:
        return False

    def moderate(atom: Atom, found: Range) -> Range:
        if isinstance(atom, Lit):
            return found if all(map(math.isfinite, found)) or math.isnan(atom.value) else (0.0, 0.0)
        unknown = not all(map(math.isfinite, found)) and axes_of(atom) <= UNIFORM
        return MODERATE_NUMBER if unknown and atom.dtype == "float32" else found

    low, high = _bounds(program, {SCORE: MODERATE_SCORE}, moderate)[0]
    return not (low >= -FAR / 2 and high <= FAR / 2)


def _bounds(program: Program, known: Mapping[int, Range], seen: Callable[[Atom, Range], Range]) -> tuple[Range, ...]:
    """`seen` may replace what is known of an atom, each time that it is read."""
    known = dict(known)

    def read(atom: Atom) -> Range:
        if isinstance(atom, Lit):
            return seen(atom, _number(atom))
        whole = range_of_val(atom)
        return seen(atom, known.get(atom.id, ANYTHING if whole is None else (float(whole[0]), float(whole[1]))))

    for step in program.steps:
        if isinstance(step, Op) and step.out.dtype == "float32":
            known[step.out.id] = _of_op(step.prim, [read(a) for a in step.inputs])
    return tuple(read(result) for result in program.results)


def _number(atom: Lit) -> Range:
    value = float(atom.value)
    return ANYTHING if math.isnan(value) else (value, value)


def _of_op(prim: str, given: Sequence[Range]) -> Range:
    if prim in WITHIN:
        return WITHIN[prim]
    rule = RULES.get(prim)
    if rule is None:
        return ANYTHING
    low, high = rule(*given)
    if math.isnan(low) or math.isnan(high):
        return ANYTHING
    return low if low >= -LARGEST else -math.inf, high if high <= LARGEST else math.inf


def _mul(a: Range, b: Range) -> Range:
    if not all(map(math.isfinite, (*a, *b))):
        return ANYTHING  # 0 * inf
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _div(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:
        return ANYTHING
    return _mul(a, (1 / b[1], 1 / b[0]))


def _select(_: Range, *cases: Range) -> Range:
    return min(c[0] for c in cases), max(c[1] for c in cases)


RULES: dict[str, Callable[..., Range]] = {
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (max(a[0], -a[1], 0.0), max(-a[0], a[1])),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _mul,
    "div": _div,
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "select_n": _select,
    "convert_element_type": lambda a: a,
    "copy": lambda a: a,
}
