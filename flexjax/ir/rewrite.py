"""Programs with other names for their values, with fewer captures or with other results; no operation changes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from flexjax.ir.program import Atom, Call, Linear, Lit, Load, Op, Program, Step, Val, uses


def map_atoms(step: Step, change: Callable[[Atom], Atom], change_out: Callable[[Val], Val]) -> Step:
    """A copy of a step with `change` applied to each operand that is an atom, and `change_out` to each result."""
    if isinstance(step, Op):
        return dataclasses.replace(step, inputs=tuple(map(change, step.inputs)), out=change_out(step.out))
    if isinstance(step, Load):
        return dataclasses.replace(step, index=tuple(map(change, step.index)), out=change_out(step.out))
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(change, a[1]))) for a in step.arguments)
    results = tuple((shape, tuple(map(change_out, vals))) for shape, vals in step.results)
    return dataclasses.replace(step, arguments=arguments, results=results)


def rename_steps(
    steps: Sequence[Step], results: Sequence[Atom], fresh: Mapping[int, int]
) -> tuple[tuple[Step, ...], tuple[Atom, ...]]:
    """Copies of steps and results in which every value, also in linear forms, has the new id of `fresh`."""

    def change_linear(linear: Linear | None) -> Linear | None:
        if linear is None or not linear.uniform:
            return linear
        # the value loses its linear form where that names an id without a new one
        if any(i not in fresh for i, _ in linear.uniform):
            return None
        return dataclasses.replace(linear, uniform=tuple(sorted((fresh[i], c) for i, c in linear.uniform)))

    def change_val(val: Val) -> Val:
        return dataclasses.replace(val, id=fresh[val.id], linear=change_linear(val.linear))

    def change(atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else change_val(atom)

    return tuple(map_atoms(s, change, change_val) for s in steps), tuple(map(change, results))


def select_captures(program: Program, used: Sequence[int]) -> Program:
    """The program with the captured arrays `used` alone, in that order; its steps must read no others."""
    number = {old: new for new, old in enumerate(used)}

    def move(step: Step) -> Step:
        if isinstance(step, Load):
            return dataclasses.replace(step, capture=number[step.capture])
        if isinstance(step, Call):
            arguments = tuple(number[a] if isinstance(a, int) else a for a in step.arguments)
            return dataclasses.replace(step, arguments=arguments)
        return step

    captures = tuple(program.captures[i] for i in used)
    return dataclasses.replace(program, steps=tuple(map(move, program.steps)), captures=captures)


def with_results(program: Program, results: Sequence[Atom]) -> Program:
    """The program that computes `results` alone; its captured arrays stay, its `gradients` are empty."""
    live = uses(program.steps, tuple(results))
    steps = tuple(s for s in program.steps if any(o.id in live for o in s.outs))
    return Program(program.inputs, steps, tuple(results), program.captures)
