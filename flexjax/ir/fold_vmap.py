"""The program of a mapped problem: one more axis, folded into the batch."""

from collections.abc import Callable, Sequence

from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import SCORE, ArrayType, Atom, B, Call, Lit, Load, Op, Program, axes_of


def fold_batch(program: Program, copies: int, batch: int, mapped: Sequence[bool]) -> Program:
    """The program for a batch of `copies` * batch entries, in which entry b stands for (b // batch, b % batch).

    The captures flagged in `mapped` have a new first dimension of `copies`.
    """
    sizes = tuple((v.high or 0) + 1 for v in program.inputs[2:])
    builder = Builder((copies * batch, sizes[0], sizes[1], sizes[2]), program.inputs[SCORE].dtype)
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
            append_call(builder, step, new, env)
    for place in program.gradients:
        made = env[program.steps[place].outs[0].id]
        loads.append(next(s for s in builder.steps if isinstance(s, Load) and s.out == made))
    return builder.finish([new(r) for r in program.results], loads)


def append_call(builder: Builder, step: Call, new: Callable[[Atom], Atom], env: dict[int, Atom]) -> None:
    """The call on new operands, appended to the builder."""
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(new, a[1]))) for a in step.arguments)
    axes = frozenset().union(*(axes_of(x) for a in arguments if not isinstance(a, int) for x in a[1]))
    axes = axes - {"delta"} | ({"q", "kv"} if "delta" in axes else frozenset())
    results = tuple((shape, tuple(builder.fresh(v.dtype, axes) for v in vals)) for shape, vals in step.results)
    builder.steps.append(Call(step.name, step.text, arguments, results, step.bind, step.inner))
    env.update({old.id: val for old, val in zip(step.outs, builder.steps[-1].outs, strict=True)})
