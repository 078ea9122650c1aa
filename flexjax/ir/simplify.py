"""A select between products of the score becomes one product with a select between factors.

    where(p, c * s, s)                       ->  s * where(p, c, 1)            the same bits: one product is rounded
    (s * where(p, c, 1)) * where(p2, c2, 1)  ->  s * (where(p, c, 1) * where(p2, c2, 1))     within one rounding

Here s is the score, or a value that depends on it; c and c2 are literals; p and p2 are predicates. A factor that
depends on positions alone repeats over a tile, so that kernels compute it once for many elements, while operations on
the score run for each element. Functions recognise the left-hand sides; builder.py makes the right-hand sides.
"""

import typing
from collections.abc import Callable

from flexjax.ir.program import Atom, Lit, Op, Val, axes_of

# levels of nested products of factors that `_size` looks into
DEEPEST = 3
LARGEST = 2.0**60
"""Bound of a product of factors and of its reciprocal, so that no order of multiplication overflows or underflows."""
# from an atom to the Op that computes it
Definition = Callable[[Atom], Op | None]


class Choice(typing.NamedTuple):
    """The parts of select_n(predicate, score * on_false, score * on_true)."""

    score: Val
    predicate: Atom
    # literal factors; 1.0 where a case is the score itself
    on_false: float
    on_true: float


def choice_of_products(inputs: tuple[Atom, ...], definition: Definition) -> Choice | None:
    """The parts of a select_n between different products of one score by literals; None for any other select."""
    if len(inputs) != 3:
        return None
    (one, n), (other, m) = (_product(a, definition) for a in inputs[1:])
    if one != other or not isinstance(one, Val) or "score" not in one.axes or n == m:
        return None
    return Choice(one, inputs[0], n, m)


def regrouped(inputs: tuple[Atom, ...], definition: Definition) -> tuple[Atom, Atom, Atom] | None:
    """(score, inner, outer) of a product (score * inner) * outer in which inner and outer are factors (`_size`).

    The caller computes score * (inner * outer). None where the product of the factors could reach LARGEST or fall to
    its reciprocal. `score` is any value that depends on the score.
    """
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
    """The value of a literal that can be a factor: real, with magnitude between 1 / LARGEST and LARGEST."""
    if not isinstance(atom, Lit) or isinstance(atom.value, (bool, complex)):
        return None
    value = float(atom.value)
    return value if 1 / LARGEST < abs(value) < LARGEST else None


def _product(atom: Atom, definition: Definition) -> tuple[Atom, float]:
    """(x, c) of an atom x * c with a literal c that can be a factor; (atom, 1.0) for any other atom."""
    op = definition(atom)
    if op is not None and op.prim == "mul":
        for score, factor in (op.inputs, op.inputs[::-1]):
            number = _number(factor)
            if number is not None:
                return score, number
    return atom, 1.0


def _size(atom: Atom, definition: Definition, depth: int = DEEPEST) -> tuple[float, float] | None:
    """(largest, smallest) magnitude of a factor: a select between literals, or a product of such selects; else None."""
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
