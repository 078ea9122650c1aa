"""Pattern matches on programs: recognises forms of score and mask programs for which a kernel takes a faster way."""

import functools
import math
from collections.abc import Mapping

from flexjax.ir.operations import DIVISIONS, HASHES, REDUCTIONS
from flexjax.ir.program import INPUT_NAMES, SCORE, UNIFORM, Atom, Call, Linear, Lit, Op, Program, Step, Val, axes_of
from flexjax.ir.ranges import is_integer


def adds_to_score(program: Program) -> bool:
    """Whether a score program computes score + a - b ... with terms that do not depend on the score.

    The derivative of such a program by the score is 1, so a backward kernel need not evaluate it.
    """
    made = {out.id: step for step in program.steps for out in step.outs}
    atom = program.results[0]
    while isinstance(atom, Val) and atom.id != SCORE:
        step = made.get(atom.id)
        if not isinstance(step, Op) or step.prim not in ("add", "sub"):
            return False
        with_score = [n for n, a in enumerate(step.inputs) if "score" in axes_of(a)]
        if with_score not in ([0], [1]) or (step.prim == "sub" and with_score != [0]):
            return False
        atom = step.inputs[with_score[0]]
    return isinstance(atom, Val)


def is_causal_like(program: Program) -> bool:
    """Whether a mask program ends in one comparison by which later queries see more keys, such as q >= kv + 3.

    The backward pass then orders its work by the triangle of visible blocks. A conjunction of comparisons gives False.
    """
    (result,) = program.results
    step = next((s for s in program.steps if result in s.outs), None)
    if not isinstance(step, Op) or step.prim not in ("ge", "gt", "le", "lt"):
        return False
    linears = [a.linear if isinstance(a, Val) else Linear() for a in step.inputs]
    greater, less = linears if step.prim in ("ge", "gt") else linears[::-1]
    if greater is None or less is None:
        return False
    return greater.q - less.q > 0 > greater.kv - less.kv


def fills_registers(program: Program | None) -> bool:
    """Whether a hash, a loop, or a division of integers by no literal, differs for each (q, kv)."""
    # each takes dozens of instructions an entry; other divisions are products, or run once for a tile, row or column
    return program is not None and any(
        isinstance(step, Op)
        and (
            step.prim in HASHES
            or step.prim in REDUCTIONS
            or (step.prim in DIVISIONS and is_integer(step.out.dtype) and not isinstance(step.inputs[1], Lit))
        )
        and step.out.axes - UNIFORM not in (set(), {"q"}, {"kv"})
        for step in program.steps
    )


def residue_conjuncts(program: Program) -> tuple[int, tuple[Atom, ...]]:
    """(m, the other conjuncts) of a mask that says that q and kv agree modulo the literal m; else (1, ()).

    That conjunct is `(q - kv) % m == 0` or `q % m == kv % m`. If several are, m is the largest.
    """
    made = {out.id: step for step in program.steps for out in step.outs}
    parts: list[Atom] = []
    rest = list(program.results)
    while rest:
        atom = rest.pop()
        step = made.get(atom.id) if isinstance(atom, Val) else None
        if isinstance(step, Op) and step.prim == "and":
            rest += step.inputs
        else:
            parts.append(atom)
    found = [_modulus(atom, made) for atom in parts]
    m = max(found)
    if m < 2:
        return 1, ()
    return m, tuple(atom for n, atom in enumerate(parts) if n != found.index(m))


def _modulus(atom: Atom, made: dict[int, Step]) -> int:
    """The m of a conjunct that says that q and kv have the same residue modulo m; 1 for others."""
    step = made.get(atom.id) if isinstance(atom, Val) else None
    if not isinstance(step, Op) or step.prim != "eq":
        return 1
    sides = [_remainder(a, made) for a in step.inputs]
    for side, other in (sides, sides[::-1]):
        if side is None:
            continue
        of, m = side
        if other is None and any(isinstance(a, Lit) and a.value == 0 for a in step.inputs):
            return m if of in (Linear(q=1, kv=-1), Linear(q=-1, kv=1)) else 1
        if other is not None and other[1] == m and {of, other[0]} == {Linear(q=1), Linear(kv=1)}:
            return m
    return 1


def _remainder(atom: Atom, made: dict[int, Step]) -> tuple[Linear, int] | None:
    """(linear form of x, m) of an atom that is x % m with a positive literal m; None for other atoms."""
    step = made.get(atom.id) if isinstance(atom, Val) else None
    if not isinstance(step, Op) or step.prim not in ("floormod", "rem"):
        return None
    x, m = step.inputs
    linear = x.linear if isinstance(x, Val) else None
    if linear is None or not isinstance(m, Lit) or m.value < 1:
        return None
    return linear, m.value


@functools.lru_cache(maxsize=512)
def run_lengths(program: Program, axis: str) -> Mapping[int, int]:
    """By id of a value: n, if the value changes along the axis ("q" or "kv") at multiples of n only; 0: nowhere.

    So `kv // 64`, and what is made of it and of other indices, is one value for a row of a tile of 64 keys.
    """
    runs = {n: int(name in (axis, "score")) for n, name in enumerate(INPUT_NAMES)}
    of = lambda atom: runs[atom.id] if isinstance(atom, Val) else 0
    for step in program.steps:
        run = math.gcd(*map(of, step.inputs))
        if isinstance(step, Call):
            run = min(run, 1)
        elif run == 1 and isinstance(step, Op) and step.prim == "floordiv":
            run = _run_of_quotient(step.inputs[0], step.inputs[1], axis)
        runs |= {out.id: run for out in step.outs}
    return runs


def _run_of_quotient(dividend: Atom, divisor: Atom, axis: str) -> int:
    """`run_lengths` of (index of the axis + c) // m with a literal m and no other terms; 1 for other quotients."""
    linear = dividend.linear if isinstance(dividend, Val) else None
    if linear is None or not isinstance(divisor, Lit) or divisor.value < 1:
        return 1
    alone = Linear(q=int(axis == "q"), kv=int(axis == "kv"), const=linear.const)
    return math.gcd(divisor.value, linear.const) if linear == alone else 1
