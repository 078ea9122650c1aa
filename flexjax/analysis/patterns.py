"""Pattern matches on programs: recognises forms of score and mask programs for which a kernel takes a faster way.

Each function looks at the steps of a program (ir/program.py) and answers yes or no. A program that matches no pattern runs the
general way with the same results.
"""

from flexjax.ir.operations import DIVISIONS
from flexjax.ir.program import SCORE, UNIFORM, Linear, Lit, Op, Program, Val, axes_of
from flexjax.ir.ranges import is_integer


def adds_to_score(program: Program) -> bool:
    """Whether a score program computes score + a - b ... with terms that do not depend on the score.

    The derivative of such a program by the score is 1, so a backward kernel need not evaluate it. A program that
    subtracts the score from something, or applies any other operation to it, gives False; the identity gives True.

    program   the score program; its first result is the modified score
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
    """Whether a mask program ends in one comparison of affine functions of the indices by which later queries see more
    keys.

    An example is q >= kv + 3: every key before a last visible key is visible, and that last key grows with the query.
    The backward pass then orders its work by the triangle of visible blocks. Masks such as q_idx - kv_idx < 512, which
    hide early keys, or a conjunction of comparisons give False. Terms of b and h do not count.
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


def divides_tiles(program: Program | None) -> bool:
    """Whether the program contains an integer division or remainder that differs for each entry (q, kv) and has no
    literal divisor.

    program   a score or mask program; None, the identity, gives False

    Such a division takes about a dozen instructions and several registers for each entry of a tile, so kernels that
    count registers ask this. A division by a literal is a multiplication, and a quotient that depends on b and h alone,
    on q alone or on kv alone is computed once per tile, row or column; these do not count. A quotient of q - kv does.
    """
    return program is not None and any(
        isinstance(step, Op)
        and step.prim in DIVISIONS
        and is_integer(step.out.dtype)
        and step.out.axes - UNIFORM not in (set(), {"q"}, {"kv"})
        and not isinstance(step.inputs[1], Lit)
        for step in program.steps
    )
