"""The range of a program's results over the whole attention matrix, whatever the score and the captured arrays hold.

A soft cap, `cap * tanh(score / cap)`, lies within -cap..cap, so a kernel that knows the range needs no running maximum.
A range is two Python floats, (lowest, highest), infinite where nothing is known. A result may be NaN in spite of its
range, because NaN passes through every operation.

Ranges are computed for float32 values only. Integers have the ranges of the trace; narrower floats and integers cast
from floats have none.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from flexjax.ir.program import Atom, Lit, Op, Program, range_of_val

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)
LARGEST = 3.4028234663852886e38  # the largest float32; a larger number rounds to infinity
EXACT = ("neg", "abs", "max", "min", "select_n")  # operations that do not round
ROUNDING = 2.0**-22
"""Relative error of a result by float32 rounding and approximate instructions; a sum's is of its largest operand."""
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
    """The range (lowest, highest) of each result of the program."""
    known: dict[int, Range] = {}
    for step in program.steps:
        if isinstance(step, Op) and step.out.dtype == "float32":
            known[step.out.id] = of_op(step.prim, [range_of(a, known) for a in step.inputs])
    return tuple(range_of(result, known) for result in program.results)


FINITE = ("convert_element_type", "add", "sub", "mul", "neg", "abs", "max", "min")
"""Operations of float32 whose result is no NaN if no operand is NaN or infinite."""
SURELY_FINITE = 1e30
"""Up to this magnitude `finite_results` calls a float32 finite: rounding cannot take it past the largest float32."""


@functools.lru_cache(maxsize=256)
def finite_results(program: Program) -> tuple[bool, ...]:
    """For each result whether it is finite for every query and key of the call, whatever the score and the arrays hold.

    Positions past the ends of the call may give other values.
    """
    known: dict[int, Range] = {}
    finite: set[int] = set()

    def is_finite(atom: Atom) -> bool:
        if atom.dtype.startswith(("int", "uint", "bool")):
            return True
        return math.isfinite(float(atom.value)) if isinstance(atom, Lit) else atom.id in finite

    for step in program.steps:
        if not isinstance(step, Op) or step.out.dtype != "float32":
            continue
        known[step.out.id] = of_op(step.prim, [range_of(a, known) for a in step.inputs])
        within = max(map(abs, known[step.out.id])) <= SURELY_FINITE
        if step.prim in FINITE and within and all(map(is_finite, step.inputs)):
            finite.add(step.out.id)
    return tuple(map(is_finite, program.results))


def range_of(atom: Atom, known: Mapping[int, Range]) -> Range:
    """The range of an atom; `known` has the ranges of float32 values by id."""
    if isinstance(atom, Lit):
        return _range_of_literal(atom)
    if atom.dtype == "bool":
        return (0.0, 1.0)
    whole = range_of_val(atom)
    return known.get(atom.id, ANYTHING if whole is None else (float(whole[0]), float(whole[1])))


def _range_of_literal(atom: Lit) -> Range:
    value = float(atom.value)
    return ANYTHING if math.isnan(value) else (value, value)


def of_op(prim: str, given: Sequence[Range]) -> Range:
    """The range of a float32 result of the operation `prim`, from the ranges of its operands, widened for rounding."""
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
        low, high = _widened_end(low, -ROUNDING, largest), _widened_end(high, ROUNDING, largest)
    return low if low >= -LARGEST else -math.inf, high if high <= LARGEST else math.inf


def _widened_end(end: float, share: float, beside: float) -> float:
    """Moves a finite end by `share` times the larger of its magnitude and `beside`, the largest operand of a sum."""
    return end + share * max(abs(end), beside) if math.isfinite(end) else end


def _mul(a: Range, b: Range) -> Range:
    """The range of a product before rounding."""
    if not all(map(math.isfinite, (*a, *b))):
        return ANYTHING  # 0 * inf
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _div(a: Range, b: Range) -> Range:
    """The range of a quotient before rounding."""
    # an end of 0 means that the divisor may be 0
    if b[0] <= 0 <= b[1]:
        return ANYTHING
    return _mul(a, (1 / b[1], 1 / b[0]))


def _select(_: Range, *cases: Range) -> Range:
    """The hull of the ranges of a select's cases."""
    return min(c[0] for c in cases), max(c[1] for c in cases)


def _increasing(function: Callable[[float], float], least: float) -> Callable[[Range], Range]:
    """The rule of a function that increases on [least, inf): the function of both ends."""
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
"""By operation: the range of its exact result, from the ranges of its operands."""
