"""Choices between multipliers: a select between products of the score becomes one product with a select between factors.

    where(p, c * s, s)                       ->  s * where(p, c, 1)            the same bits: one product is rounded
    (s * where(p, c, 1)) * where(p2, c2, 1)  ->  s * (where(p, c, 1) * where(p2, c2, 1))     within one rounding

A factor that depends on positions alone repeats over a tile, so that kernels compute it once for many elements (a
checkerboard has two different factors). Operations on the score run for each element.
"""

import typing
from collections.abc import Callable

from flexjax.ir.program import Atom, Lit, Op, Val, axes_of

DEEPEST = 3
"""Nesting of products of factors up to which their magnitudes are bounded."""
LARGEST = 2.0**60
"""Bound of a product of factors and of its reciprocal, so that no order of multiplication overflows or underflows."""
Definition = Callable[[Atom], Op | None]
"""From an atom to the Op that computes it, None where no Op does."""


class Choice(typing.NamedTuple):
    """What select_n(predicate, score * on_false, score * on_true) consists of."""

    score: Val
    predicate: Atom
    on_false: float
    on_true: float


def choice_of_products(inputs: tuple[Atom, ...], definition: Definition) -> Choice | None:
    """The Choice that a select_n between floats makes, from its operands; None unless all cases are products of one score."""
    if len(inputs) != 3:
        return None
    (one, n), (other, m) = (_product(a, definition) for a in inputs[1:])
    if one != other or not isinstance(one, Val) or "score" not in one.axes or n == m:
        return None
    return Choice(one, inputs[0], n, m)


def regrouped(inputs: tuple[Atom, ...], definition: Definition) -> tuple[Atom, Atom, Atom] | None:
    """(score, inner, outer) where the operands' product is (score * inner) * outer and both factors are choices of literals."""
    for outer, factor in (inputs, inputs[::-1]):
        op = definition(outer)
        size = _size(factor, definition)
        if op is None or op.prim != "mul" or size is None:
            continue
        for score, inner in (op.inputs, op.inputs[::-1]):
            inner_size = _size(inner, definition)
            if inner_size is None or "score" not in axes_of(score):
                continue
            if size[0] * inner_size[0] < LARGEST and size[1] * inner_size[1] > 1 / LARGEST:
                return score, inner, factor
    return None


def _number(atom: Atom) -> float | None:
    """The value of a literal factor, None for anything else and for values that could make a product overflow."""
    if not isinstance(atom, Lit) or isinstance(atom.value, (bool, complex)):
        return None
    value = float(atom.value)
    return value if 1 / LARGEST < abs(value) < LARGEST else None


def _product(atom: Atom, definition: Definition) -> tuple[Atom, float]:
    """(x, c) where the atom is x * c with a literal c; (atom, 1.0) otherwise."""
    op = definition(atom)
    if op is not None and op.prim == "mul":
        for score, factor in (op.inputs, op.inputs[::-1]):
            number = _number(factor)
            if number is not None:
                return score, number
    return atom, 1.0


def _size(atom: Atom, definition: Definition, depth: int = DEEPEST) -> tuple[float, float] | None:
    """(largest, smallest) magnitude of a select between literals or of a product of such selects, None for anything else."""
    op = definition(atom)
    if op is None or "score" in axes_of(atom):
        return None
    if op.prim == "select_n":
        numbers = [_number(a) for a in op.inputs[1:]]
        sizes = [abs(n) for n in numbers if n is not None]
        return (max(sizes), min(sizes)) if len(sizes) == len(numbers) else None
    if op.prim != "mul" or not depth:
        return None
    a, b = (_size(x, definition, depth - 1) for x in op.inputs)
    return None if a is None or b is None else (a[0] * b[0], a[1] * b[1])
