"""The range of a program's results over the whole attention matrix, whatever the score and the captured arrays hold.

A soft cap, `cap * tanh(score / cap)`, lies within -cap..cap, so a kernel that knows the range needs no running maximum. The
range consists of two Python floats known while compiling; intervals.py bounds masks block by block. A result may be NaN in
spite of its range, because NaN passes through every operation.

Ranges are computed for float32 values only. Integers have the ranges of the trace (none where they may wrap around); narrower
floats and integers cast from floats have none. An end past the largest float32 is infinite.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from flexjax.ir.program import Atom, Lit, Op, Program, range_of_val

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)
LARGEST = 3.4028234663852886e38
"""The largest float32; a larger number rounds to infinity."""
EXACT = ("neg", "abs", "max", "min", "select_n")
ROUNDING = 2.0**-22
"""Relative error of a result by float32 rounding and approximate instructions; of a sum, relative to its largest operand."""
WITHIN: dict[str, Range] = {
    "tanh": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "atan": (-math.pi / 2, math.pi / 2),
    "logistic": (0.0, 1.0),
    "erfc": (0.0, 2.0),
}
"""Ranges of functions that are bounded for every operand."""


def bounds(program: Program) -> tuple[Range, ...]:
    """(lowest, highest) of each result; infinite where nothing is known."""
    known: dict[int, Range] = {}
    for step in program.steps:
        if isinstance(step, Op) and step.out.dtype == "float32":
            known[step.out.id] = of_op(step.prim, [range_of(a, known) for a in step.inputs])
    return tuple(range_of(result, known) for result in program.results)


def range_of(atom: Atom, known: Mapping[int, Range]) -> Range:
    """The range of an atom, from those `known` by id."""
    if isinstance(atom, Lit):
        return _number(atom)
    if atom.dtype == "bool":
        return (0.0, 1.0)
    whole = range_of_val(atom)
    return known.get(atom.id, ANYTHING if whole is None else (float(whole[0]), float(whole[1])))


def _number(atom: Lit) -> Range:
    """The range of a literal."""
    value = float(atom.value)
    return ANYTHING if math.isnan(value) else (value, value)


def of_op(prim: str, given: Sequence[Range]) -> Range:
    """The range of a float32 result, from those of its arguments."""
    if prim in WITHIN:
        return WITHIN[prim]
    rule = RULES.get(prim)
    if rule is None:
        return ANYTHING
    low, high = rule(*given)
    if math.isnan(low) or math.isnan(high):
        return ANYTHING
    if prim not in EXACT:
        terms = [end for a in given for end in a if math.isfinite(end)] if prim in ("add", "sub") else []
        largest = max(map(abs, terms), default=0.0)
        low, high = _moved(low, -ROUNDING, largest), _moved(high, ROUNDING, largest)
    return low if low >= -LARGEST else -math.inf, high if high <= LARGEST else math.inf


def _moved(end: float, share: float, beside: float) -> float:
    """A finite end plus `share` times the larger of its magnitude and `beside`."""
    return end + share * max(abs(end), beside) if math.isfinite(end) else end


def _mul(a: Range, b: Range) -> Range:
    """The range of a product; anything where an end is infinite, because 0 * inf is NaN."""
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


def _increasing(function: Callable[[float], float], least: float) -> Callable[[Range], Range]:
    """The rule of a function that increases on [least, inf)."""
    return lambda a: (function(a[0]), function(a[1])) if least <= a[0] and math.isfinite(a[1]) else ANYTHING


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
    "sqrt": _increasing(math.sqrt, 0.0),
    "log": _increasing(math.log, 1e-30),
    "log1p": _increasing(math.log1p, -0.5),
}
