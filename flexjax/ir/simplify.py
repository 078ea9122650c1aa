"""Choices between multipliers: a select between products of the score becomes one product with a select between factors.

    where(p, c * s, s)                       ->  s * where(p, c, 1)            the same bits: one product is rounded
    (s * where(p, c, 1)) * where(p2, c2, 1)  ->  s * (where(p, c, 1) * where(p2, c2, 1))     within one rounding

Here s is the score, or a value that depends on it; c and c2 are literals; p and p2 are predicates. A factor that depends on
positions alone repeats over a tile, so that kernels compute it once for many elements (a checkerboard has two different
factors). Operations on the score run for each element. The functions recognise the left-hand sides; the Builder (builder.py)
makes the right-hand sides.
"""

import typing
from collections.abc import Callable

from flexjax.ir.program import Atom, Lit, Op, Val, axes_of

DEEPEST = 3
"""How many levels of nested products of factors `_size` looks into."""
LARGEST = 2.0**60
"""Bound of a product of factors and of its reciprocal, so that no order of multiplication overflows or underflows."""
Definition = Callable[[Atom], Op | None]
"""From an atom to the Op that computes it, None where no Op does."""


class Choice(typing.NamedTuple):
    """The parts of select_n(predicate, score * on_false, score * on_true).

    score               the value that every case multiplies
    predicate           a bool atom
    on_false, on_true   the literal factors; 1.0 where a case is the score itself
    """

    score: Val
    predicate: Atom
    on_false: float
    on_true: float


def choice_of_products(inputs: tuple[Atom, ...], definition: Definition) -> Choice | None:
    """Recognises a select_n between two products of the same score by literals (or the score itself); returns its
    parts.

    inputs       the operands of the select_n: predicate, case for False, case for True
    definition   from an atom to the Op that computes it

    None for any other select, where both factors are equal, and where the common value does not depend on the score.
    """
    if len(inputs) != 3:
        return None
    (one, n), (other, m) = (_product(a, definition) for a in inputs[1:])
    if one != other or not isinstance(one, Val) or "score" not in one.axes or n == m:
        return None
    return Choice(one, inputs[0], n, m)


def regrouped(inputs: tuple[Atom, ...], definition: Definition) -> tuple[Atom, Atom, Atom] | None:
    """Recognises a product (score * inner) * outer in which inner and outer are selects between literals, or products
    of such.

    inputs       the two operands of the outer product, in either order
    definition   from an atom to the Op that computes it

    Returns (score, inner, outer), so that the caller can compute score * (inner * outer); None for any other product,
    and where the product of the factors could reach LARGEST or fall to its reciprocal. `score` is any value that
    depends on the score.
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
    """The value of a literal that can be a factor: real, with magnitude between 1 / LARGEST and LARGEST. None for any other
    atom.
    """
    if not isinstance(atom, Lit) or isinstance(atom.value, (bool, complex)):
        return None
    value = float(atom.value)
    return value if 1 / LARGEST < abs(value) < LARGEST else None


def _product(atom: Atom, definition: Definition) -> tuple[Atom, float]:
    """Splits an atom that is a product x * c with a literal c that can be a factor (`_number`): returns (x, c), and (atom, 1.0) for any
    other atom.

    definition   from an atom to the Op that computes it
    """
    op = definition(atom)
    if op is not None and op.prim == "mul":
        for score, factor in (op.inputs, op.inputs[::-1]):
            number = _number(factor)
            if number is not None:
                return score, number
    return atom, 1.0


def _size(atom: Atom, definition: Definition, depth: int = DEEPEST) -> tuple[float, float] | None:
    """(the largest, the smallest magnitude) of a factor that is a select between literals, or a product of such selects.

    definition   from an atom to the Op that computes it
    depth        how many more levels of nested products are looked into

    None for any other atom, for one that depends on the score, and if a literal is no factor by `_number`.
    """
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
