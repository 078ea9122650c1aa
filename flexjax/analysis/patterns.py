"""Programs of a simple form, told by their steps; what is not recognised is merely run in the general way."""

from flexjax.ir.program import SCORE, UNIFORM, Linear, Lit, Op, Program, Val, axes_of
from flexjax.ir.ranges import is_integer


def adds_to_score(program: Program) -> bool:
    """Whether the score is only added to, so that its derivative is 1."""
    made = {out.id: step for step in program.steps for out in step.outs}
    atom = program.results[0]
    while isinstance(atom, Val) and atom.id != SCORE:
        step = made.get(atom.id)
        if not isinstance(step, Op) or step.prim not in ("add", "sub"):
            return False
        moving = [n for n, a in enumerate(step.inputs) if "score" in axes_of(a)]
        if moving not in ([0], [1]) or (step.prim == "sub" and moving != [0]):
            return False
        atom = step.inputs[moving[0]]
    return isinstance(atom, Val)


def is_lower_triangle(program: Program) -> bool:
    """Whether a mask is one comparison that lets a query see keys up to one that comes later the later the query is."""
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
    """Whether each element of a tile is divided, as an integer, by a number that is not a literal.

    Such a division takes about a dozen operations and several registers an element; one by a literal is a product.
    """
    return program is not None and any(
        isinstance(step, Op)
        and step.prim in ("div", "rem", "floordiv", "floormod")
        and is_integer(step.out.dtype)
        and step.out.axes - UNIFORM not in (set(), {"q"}, {"kv"})
        and not isinstance(step.inputs[1], Lit)
        for step in program.steps
    )
