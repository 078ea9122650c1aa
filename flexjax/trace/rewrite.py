"""Programs made from programs: renaming values and folding a mapped axis into the batch."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

from flexjax.trace.mod_ir import (
    SCORE,
    ArrayType,
    Atom,
    B,
    Call,
    Linear,
    Lit,
    Load,
    Op,
    Program,
    Step,
    Val,
    axes_of,
    uses,
)

if typing.TYPE_CHECKING:
    from flexjax.trace.builder import Builder


def map_atoms(step: Step, change: Callable[[Atom], Atom], change_out: Callable[[Val], Val]) -> Step:
    """The step with its operands and results replaced."""
    if isinstance(step, Op):
        return dataclasses.replace(step, inputs=tuple(map(change, step.inputs)), out=change_out(step.out))
    if isinstance(step, Load):
        return dataclasses.replace(step, index=tuple(map(change, step.index)), out=change_out(step.out))
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(change, a[1]))) for a in step.arguments)
    results = tuple((shape, tuple(map(change_out, vals))) for shape, vals in step.results)
    return Call(step.name, step.text, arguments, results, step.bind, step.inner)


def rename_steps(
    steps: Sequence[Step], results: Sequence[Atom], fresh: Mapping[int, int]
) -> tuple[tuple[Step, ...], tuple[Atom, ...]]:
    """Steps and results with every value's id replaced by fresh[id], inside linear forms too."""

    def change_linear(linear: Linear | None) -> Linear | None:
        if linear is None or not linear.uniform:
            return linear
        if any(i not in fresh for i, _ in linear.uniform):
            return None
        return dataclasses.replace(linear, uniform=tuple(sorted((fresh[i], c) for i, c in linear.uniform)))

    def change_val(val: Val) -> Val:
        return dataclasses.replace(val, id=fresh[val.id], linear=change_linear(val.linear))

    def change(atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else change_val(atom)

    return tuple(map_atoms(s, change, change_val) for s in steps), tuple(map(change, results))


def select_captures(program: Program, used: Sequence[int]) -> Program:
    """The program with only the captures in `used`, renumbered in that order."""
    place = {old: new for new, old in enumerate(used)}

    def move(step: Step) -> Step:
        if isinstance(step, Load):
            return dataclasses.replace(step, capture=place[step.capture])
        if isinstance(step, Call):
            arguments = tuple(place[a] if isinstance(a, int) else a for a in step.arguments)
            return Call(step.name, step.text, arguments, step.results, step.bind, step.inner)
        return step

    captures = tuple(program.captures[i] for i in used)
    return dataclasses.replace(program, steps=tuple(map(move, program.steps)), captures=captures)


def with_results(program: Program, results: Sequence[Atom]) -> Program:
    """The part of the program that computes `results`, some of its values."""
    live = uses(program.steps, tuple(results))
    steps = tuple(s for s in program.steps if any(o.id in live for o in s.outs))
    return Program(program.inputs, steps, tuple(results), program.captures)


def fold_batch(program: Program, copies: int, batch: int, mapped: Sequence[bool]) -> Program:
    """The program for a batch of `copies` * batch entries, in which entry b stands for (b // batch, b % batch).

    The captures flagged in `mapped` have a new first dimension of `copies`.
    """
    from flexjax.trace.builder import Builder, literal

    sizes = tuple((v.high or 0) + 1 for v in program.inputs[2:])
    builder = Builder((copies * batch, *sizes), program.inputs[SCORE].dtype)
    builder.captures = [
        ArrayType((copies, *c.shape), c.dtype) if m else c for c, m in zip(program.captures, mapped, strict=True)
    ]
    env: dict[int, Atom] = {v.id: v for v in builder.inputs}
    entry = env[B]
    env[B] = builder.op("floormod", (entry, literal(batch, "int32")), "int32")
    copy = builder.op("floordiv", (entry, literal(batch, "int32")), "int32")
    new = lambda atom: atom if isinstance(atom, Lit) else env[atom.id]
    loads: list[Load] = []
    for step in program.steps:
        if isinstance(step, Op):
            env[step.out.id] = builder.op(step.prim, [new(a) for a in step.inputs], step.out.dtype, **dict(step.params))
        elif isinstance(step, Load):
            index = [new(a) for a in step.index]
            env[step.out.id] = builder.load(step.capture, [copy, *index] if mapped[step.capture] else index)
        else:
            _append_call(builder, step, new, env)
    for place in program.gradients:
        made = env[program.steps[place].outs[0].id]
        loads.append(next(s for s in builder.steps if isinstance(s, Load) and s.out == made))
    return builder.finish([new(r) for r in program.results], loads)


def _append_call(builder: "Builder", step: Call, new: Callable[[Atom], Atom], env: dict[int, Atom]) -> None:
    """The call on new operands, appended to the builder."""
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(new, a[1]))) for a in step.arguments)
    axes = frozenset().union(*(axes_of(x) for a in arguments if not isinstance(a, int) for x in a[1]))
    axes = axes - {"delta"} | ({"q", "kv"} if "delta" in axes else frozenset())
    results = tuple((shape, tuple(builder.fresh(v.dtype, axes) for v in vals)) for shape, vals in step.results)
    builder.steps.append(Call(step.name, step.text, arguments, results, step.bind, step.inner))
    env.update({old.id: val for old, val in zip(step.outs, builder.steps[-1].outs, strict=True)})
