"""Pattern matches on programs: simple forms for which kernels have a faster way. A program that matches nothing runs the general way."""

from flexjax.ir.operations import DIVISIONS
from flexjax.ir.program import SCORE, UNIFORM, Linear, Lit, Op, Program, Val, axes_of
from flexjax.ir.ranges import is_integer


def adds_to_score(program: Program) -> bool:
    """Whether a score program is the score plus or minus values without the score, so that its derivative by the score is 1."""
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
    """Whether a mask is causal-like: one comparison, and the last visible key grows with the query."""
    (result,) = program.results
    step = next((s for s in program.steps if result in s.outs), None)
    if not isinstance(step, Op) or step.prim not in ("ge", "gt", "le", "lt"):
        return False
    linears = [a.linear if isinstance(a, Val) else Linear() for a in step.inputs]
    greater, less = linears if step.prim in ("ge", "gt") else linears[::-1]
    if greater is None or less is None:
        return False
    return greater.q - less.q > 0 > greater.kv - less.kv


def divides_tiles(program: Program | None) -> bool:
    """Whether the program divides integers element by element of a tile, by a divisor that is not a literal.

    Such a division takes about a dozen operations and several registers an element; a division by a literal is a product.
    """
    return program is not None and any(
        isinstance(step, Op)
        and step.prim in DIVISIONS
        and is_integer(step.out.dtype)
        and step.out.axes - UNIFORM not in (set(), {"q"}, {"kv"})
        and not isinstance(step.inputs[1], Lit)
        for step in program.steps
    )
