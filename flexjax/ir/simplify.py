"""Scores that a mod multiplies by one of several numbers: the choice is made between the numbers, not between the products.

    where(p, c * s, s)        is    s * where(p, c, 1)          to the bit: either way one product is rounded
    (s * where(p, c, 1)) * where(p', c', 1)    is    s * (where(p, c, 1) * where(p', c', 1))    within a rounding

What depends on places alone repeats over a tile and is computed once for many of its elements (a checkerboard has two
different factors); what depends on the score is computed for each.
"""

import typing
from collections.abc import Callable

from flexjax.ir.program import Atom, Lit, Op, Val, axes_of

DEEPEST = 3  # products of products that are looked into
LARGEST = 2.0**60  # of a product of factors, and the reciprocal of the smallest: no order of multiplying overflows
Definition = Callable[[Atom], Op | None]


class Choice(typing.NamedTuple):
    """select_n(predicate, score * on_false, score * on_true)."""

    score: Val
    predicate: Atom
    on_false: float
    on_true: float


def choice_of_products(inputs: tuple[Atom, ...], definition: Definition) -> Choice | None:
    """Of the operands of a select_n between floats, None where they are no products of one score."""
    if len(inputs) != 3:
        return None
    (one, n), (other, m) = (_product(a, definition) for a in inputs[1:])
    if one != other or not isinstance(one, Val) or "score" not in one.axes or n == m:
        return None
    return Choice(one, inputs[0], n, m)


def regrouped(inputs: tuple[Atom, ...], definition: Definition) -> tuple[Atom, Atom, Atom] | None:
    """(score, factor, factor) of the operands of a product that is (score * factor) * factor, both chosen numbers."""
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
    """A literal factor, None where it is anything else or could make a product overflow."""
    if not isinstance(atom, Lit) or isinstance(atom.value, (bool, complex)):
        return None
    value = float(atom.value)
    return value if 1 / LARGEST < abs(value) < LARGEST else None


def _product(atom: Atom, definition: Definition) -> tuple[Atom, float]:
    op = definition(atom)
    if op is not None and op.prim == "mul":
        for score, factor in (op.inputs, op.inputs[::-1]):
            number = _number(factor)
            if number is not None:
                return score, number
    return atom, 1.0


def _size(atom: Atom, definition: Definition, depth: int = DEEPEST) -> tuple[float, float] | None:
    """(largest, smallest) magnitude of a choice of numbers or a product of such, None for anything else."""
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
