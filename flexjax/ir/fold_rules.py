"""Facts about the result of one operation that its operands determine: an operand that it equals, or its linear form.

The Builder (builder.py) asks these functions before it makes a step.
"""

from flexjax.ir.program import UNIFORM, Atom, Linear, Lit, range_of_val
from flexjax.ir.ranges import is_integer


def fold_select(inputs: tuple[Atom, ...]) -> Atom | None:
    """The case that a select_n equals, if its predicate is a literal or all its cases are equal."""
    predicate, *cases = inputs
    if isinstance(predicate, Lit):
        return cases[int(predicate.value)]
    return cases[0] if all(c == cases[0] for c in cases) else None


def fold_logic(prim: str, inputs: tuple[Atom, ...]) -> Atom | None:
    """The operand that "and" or "or" of two bools equals, if one is a literal or both are equal."""
    a, b = inputs
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Lit):
            absorbing = bool(y.value) == (prim == "or")
            return y if absorbing else x
    return a if a == b else None


def fold_extremum(prim: str, inputs: tuple[Atom, ...]) -> Atom | None:
    """The operand that "max" or "min" of two operands equals at every entry, by their ranges."""
    a, b = inputs
    ra, rb = range_of_val(a), range_of_val(b)
    # only equal operands are folded where a range is unknown, as for floats
    if ra is None or rb is None:
        return a if a == b else None
    if prim == "max":
        return a if ra[0] >= rb[1] else b if rb[0] >= ra[1] else None
    return a if ra[1] <= rb[0] else b if rb[1] <= ra[0] else None


def linear_of(atom: Atom) -> Linear | None:
    """The linear form of an integer atom; None for values that are not known to be affine."""
    if isinstance(atom, Lit):
        return Linear(const=int(atom.value)) if is_integer(atom.dtype) else None
    if atom.linear is not None:
        return atom.linear
    # a value of b and h alone that is not affine in them is one uniform term
    if is_integer(atom.dtype) and not atom.axes - UNIFORM:
        return Linear(uniform=((atom.id, 1),))
    return None


def linear_result(prim: str, inputs: tuple[Atom, ...], dtype: str) -> Linear | None:
    """The linear form of an operation's integer result in exact arithmetic; None where an operand or it has none."""
    if not is_integer(dtype) or any(not is_integer(a.dtype) for a in inputs):
        return None
    forms = [f for f in map(linear_of, inputs) if f is not None]
    if len(forms) < len(inputs):
        return None
    if prim == "add":
        return forms[0] + forms[1]
    if prim == "sub":
        return forms[0] + forms[1].times(-1)
    if prim == "neg":
        return forms[0].times(-1)
    if prim == "convert_element_type":
        return forms[0]
    if prim == "mul":
        for x, y in (inputs, inputs[::-1]):
            if isinstance(y, Lit):
                form = linear_of(x)
                return None if form is None else form.times(int(y.value))
    return None
