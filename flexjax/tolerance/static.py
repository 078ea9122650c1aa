"""What is known of a score program before it meets an array: whether a bound of its result can leave blocks out."""

import functools
import math

import jax.numpy as jnp

from flexjax.analysis.interval_rules import RULES
from flexjax.analysis.interval_truth import COMPARISONS, LOGIC
from flexjax.ir import program as ir
from flexjax.ir.operations import LOOPS
from flexjax.ir.program import Atom, Lit, Op, Program

BOUNDED_LOOPS = frozenset({"loop_index", "loop_add", "loop_max", "loop_min", "loop_and", "loop_or"})


def why_nothing(program: Program | None, weighted: bool = False) -> str | None:
    """Why no bound of this program's result leaves a block out, in a sentence; None if one may."""
    if program is None or "kv" not in indices_of(program):
        what = "weight" if weighted else "new score"
        return f"The {what} does not depend on kv_idx, so that no block is provably small."
    step = unbounded_step(program)
    return None if step is None else f"`{step}` in {'weights or ' if weighted else ''}score_mod has no bounds."


def indices_of(program: Program) -> frozenset[str]:
    """Which of b, h, q and kv the result depends on beside the score, which depends on all of them."""
    found = {i: frozenset({name}) for i, name in enumerate(ir.INPUT_NAMES) if i != ir.SCORE}
    of = lambda a: frozenset() if isinstance(a, Lit) else found.get(a.id, frozenset())
    for step in program.steps:
        found.update({out.id: frozenset().union(*map(of, step.inputs)) for out in step.outs})
    return of(program.results[0])


@functools.lru_cache(maxsize=256)
def sums_of(program: Program) -> tuple[Atom, ...]:
    """The numbers on the way from the score to a result that is it plus what does not depend on it; () for others.

    A choice between such numbers, or of -inf in their place, is one too: a shift of all scores shifts the result.
    """
    score = program.inputs[ir.SCORE]
    depends, sums = {score.id}, {score.id}
    moves = lambda a: not isinstance(a, Lit) and a.id in sums
    still = lambda a: isinstance(a, Lit) or a.id not in depends
    gone = lambda a: isinstance(a, Lit) and a.value == -math.inf
    found: list[Atom] = []
    for step in program.steps:
        if all(map(still, step.inputs)):
            continue
        depends.update(out.id for out in step.outs)
        if not isinstance(step, Op) or step.out.dtype != score.dtype:
            continue
        first, *others = step.inputs
        adds = step.prim in ("add", "sub") and moves(first) and still(others[0])
        adds = adds or (step.prim == "add" and still(first) and moves(others[0]))
        if adds or (step.prim == "select_n" and still(first) and all(moves(a) or gone(a) for a in others)):
            sums.add(step.out.id)
            found.append(step.out)
    return tuple(found) if moves(program.results[0]) else ()


def unbounded_step(program: Program) -> str | None:
    """The name of the first step without an interval rule that makes the result unbounded; None without such a step.

    A bool that is not known still bounds what it chooses from, as an index that is not known bounds a read.
    """
    named: dict[int, str] = {}

    def name_of(atom: Atom) -> str | None:
        return None if isinstance(atom, Lit) else named.get(atom.id)

    for step in program.steps:
        if isinstance(step, ir.Load):
            continue
        found = next((name for a in step.inputs if (name := name_of(a))), None)
        if isinstance(step, Op) and step.prim == "select_n":
            cases = [name_of(a) for a in step.inputs[1:]]
            found = cases[0] if all(cases) else None
        if isinstance(step, ir.Call):
            found = found or step.name
        elif not _has_rule(step):
            found = found or step.prim
        named.update({out.id: found for out in step.outs if found and out.dtype != "bool"})
    return name_of(program.results[0])


def _has_rule(step: Op) -> bool:
    if step.prim in LOOPS:
        return step.prim in BOUNDED_LOOPS
    floats = all(not jnp.issubdtype(jnp.dtype(a.dtype), jnp.complexfloating) for a in (*step.inputs, step.out))
    known = step.prim in RULES or step.prim in COMPARISONS or step.prim in LOGIC
    return floats and (known or step.out.linear is not None)
