"""Between which numbers the results of a program lie, whatever the score and the captured arrays hold.

A soft cap, `cap * tanh(score / cap)`, lies between -cap and cap; a kernel that knows it needs no running maximum. The bounds are
numbers known while compiling, for the whole attention matrix; `intervals` bounds masks block by block. NaN passes through what
is here, so a bounded result may be NaN.

Only float32 values are followed: integers have the ranges that tracing gave them (none where they may wrap around), narrower
floats and casts to integers none. An end past the largest float32 is infinite.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from flexjax.ir.program import Atom, Lit, Op, Program, range_of_val

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)
LARGEST = 3.4028234663852886e38
"""No float32 is larger; what may be rounds to infinity."""
EXACT = ("neg", "abs", "max", "min", "select_n", "copy")
ROUNDING = 2.0**-22
"""What float32 and approximate instructions may make of a result, relative to it; a sum, relative to what is added."""
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
    return end + share * max(abs(end), beside) if math.isfinite(end) else end


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


def _rising(function: Callable[[float], float], least: float) -> Callable[[Range], Range]:
    """The rule of a function that rises, from `least` on."""
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
    "copy": lambda a: a,
    "sqrt": _rising(math.sqrt, 0.0),
    "log": _rising(math.log, 1e-30),
    "log1p": _rising(math.log1p, -0.5),
}
