"""Whether a load's index reads the same element when query and key both grow by the same number of positions.

`table[h, i // w - j // w + w - 1, i % w - j % w + w - 1]` reads the same element at (i, j) and at (i + w, j + w):
moving both by a multiple of w changes neither difference. Two tiles with the same difference of first query and first
key, whose first queries are a multiple of w apart, therefore read the same elements of the table, so their gradients
can be summed in registers before they are added to the table.

The *change* of a value is the number by which it grows when query and key grow by `period` positions, whatever they
are. `_changes` computes the changes of all integers that the index needs, with a rule for each operation. What no
rule covers is unknown (None).
"""

import typing

from flexjax.ir import program as ir

SAME = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "sub"})
"""Operations whose result depends only on the difference of their arguments, as long as neither wraps around."""
JOINS = frozenset({"max", "min"})


def invariant(program: ir.Program, index: tuple[ir.Atom, ...], period: int) -> bool:
    """Whether the rules of this file prove that the index is the same at (q, kv) and (q + period, kv + period), for the
    same b and h and all q and kv. False means that it may differ.

    index    one atom of the program for each dimension of the array
    period   in positions
    """
    known = _changes(program, index, period)
    return all(_change_of(atom, known, period) == 0 for atom in index)


def _change_of(atom: ir.Atom, known: dict[int, int | None], period: int) -> int | None:
    """The change of an atom: by how much it grows when query and key both grow by `period` positions, whatever they
    are; None where unknown.

    0 for literals and for values of b, h and q - kv alone; (a + b) * period for an affine integer a * q + b * kv + c;
    None for what depends on the score; otherwise the entry of `known`.

    known   id of a value -> its change, for the values of earlier steps
    """
    if isinstance(atom, ir.Lit):
        return 0
    if "score" in atom.axes:
        return None
    if not atom.axes - ir.UNIFORM - {"delta"}:
        return 0
    if atom.linear is not None:
        return (atom.linear.q + atom.linear.kv) * period
    return known.get(atom.id)


def _changes(program: ir.Program, index: tuple[ir.Atom, ...], period: int) -> dict[int, int | None]:
    """Id -> change (`_change_of`) of q and kv (`period`), of the score (None), and of the result of each step of
    `program` that `index` needs, None where unknown. The result of a load or Call has change 0 if no argument changes,
    else None.

    index    atoms of the program
    period   in positions
    """
    needed = ir.uses(program.steps, index)
    known: dict[int, int | None] = {ir.Q: period, ir.KV: period, ir.SCORE: None}
    for step in program.steps:
        if not any(o.id in needed for o in step.outs):
            continue
        changes = [_change_of(a, known, period) for a in step.inputs]
        for out in step.outs:
            unchanged = 0 if all(g == 0 for g in changes) else None
            known[out.id] = _change_of_op(step, changes) if isinstance(step, ir.Op) else unchanged
    return known


def _change_of_op(step: ir.Op, changes: list[int | None]) -> int | None:
    """The change (`_change_of`) of the result of an operation, from the changes of its arguments; None where unknown.

    step      the operation
    changes   those of its arguments, None where unknown

    0 where no argument changes. Otherwise None unless the change of each argument is known, and is 0 for floats and
    bools, and the range of each integer argument is known, so that it does not wrap around. Then there are rules for
    copies, conversions to an integer of known range, neg, add, sub, products with a literal, comparisons of two equal
    changes (0), max and min of two equal changes, select_n between equal changes by an argument that does not change,
    and what `_change_of_quotient` has.
    """
    if all(g == 0 for g in changes):
        return 0
    if any(g is None for g in changes) or not all(_never_wraps(a) for a in step.inputs if _is_integer(a)):
        return None
    if not all(_is_integer(a) or g == 0 for a, g in zip(step.inputs, changes, strict=True)):
        return None
    known_changes = typing.cast(list[int], changes)
    name, first = step.prim, known_changes[0]
    if name == "convert_element_type" and _never_wraps(step.out):
        return first
    if name == "neg":
        return -first
    if name == "add":
        return first + known_changes[1]
    if name in SAME and first == known_changes[1]:
        return 0
    if name == "sub":
        return first - known_changes[1]
    if name in JOINS:
        return first if first == known_changes[1] else None
    if name == "select_n":
        return known_changes[1] if first == 0 and len(set(known_changes[1:])) == 1 else None
    if name == "mul":
        for factor, other in (step.inputs, step.inputs[::-1]):
            if isinstance(factor, ir.Lit):
                return int(factor.value) * (known_changes[1] if other is step.inputs[1] else first)
        return None
    return _change_of_quotient(step, first)


def _change_of_quotient(step: ir.Op, change: int) -> int | None:
    """The change (`_change_of`) of a quotient or remainder by a positive literal that divides the change of the
    numerator; None otherwise.

    step     any operation of integers
    change   of the numerator

    Quotients (div, floordiv, shifts to the right by n, a division by 2^n) change by the fraction; remainders (rem,
    floormod, `and` with 2^n - 1) by 0. For div, rem and the logical shift the numerator must never be negative.
    """
    name, by = step.prim, step.inputs[-1]
    if len(step.inputs) != 2 or not isinstance(by, ir.Lit) or not isinstance(by.value, int) or by.value <= 0:
        return None
    number = step.inputs[0]
    positive = isinstance(number, ir.Val) and number.low is not None and number.low >= 0
    if name in ("div", "rem", "shift_right_logical") and not positive:
        return None
    if name in ("shift_right_logical", "shift_right_arithmetic"):
        divisor = 1 << by.value
    elif name == "and" and not by.value & (by.value + 1):
        divisor = by.value + 1
    elif name in ("div", "rem", "floordiv", "floormod"):
        divisor = by.value
    else:
        return None
    if change % divisor:
        return None
    return 0 if name in ("rem", "floormod", "and") else change // divisor


def _is_integer(atom: ir.Atom) -> bool:
    """Whether the atom's dtype is a signed or unsigned integer."""
    return atom.dtype.startswith(("int", "uint"))


def _never_wraps(atom: ir.Atom) -> bool:
    """Whether the atom is an integer whose range is known, so that it does not wrap around."""
    return ir.range_of_val(atom) is not None
