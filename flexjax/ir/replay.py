"""Builds a program again from its own steps, with other inputs or other captured arrays.

A pass that changes the inputs of a program (fold_vmap.py, split_axes.py) or what it computes (trace/derivative.py)
appends the old steps to a new Builder one by one. The Builder shares and simplifies them as if the user's function had
been traced so. Old means of the given program, new means of the Builder's program.
"""

import dataclasses
from collections.abc import Callable, Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.operations import STOP_GRADIENT
from flexjax.ir.program import Atom, Call, Lit, Load, Op, Program, Val, axes_of

# from an old load and its index in new atoms to the index of the new load
LoadIndex = Callable[[Load, list[Atom]], Sequence[Atom]]
# from an old Call and the map from old atoms to new ones to the atoms of its results
ReplayCall = Callable[[Call, Callable[[Atom], Atom]], Sequence[Atom]]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What became of a program in a new Builder."""

    atoms: dict[int, Atom]  # by the id of the old value
    loads: dict[int, Load]  # by position in the old program's `steps`

    def new(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else self.atoms[atom.id]


def replay(
    program: Program,
    builder: Builder,
    inputs: dict[int, Atom],
    load_index: LoadIndex = lambda load, index: index,
    call: ReplayCall | None = None,
    keep_stops: bool = True,
    element: Callable[[Load, Atom], Atom] | None = None,
) -> Replayed:
    """Appends the program's steps to the builder, whose captures must be in place; returns what they became.

    inputs       the new atom of each input of the old program, by id
    call         appends a Call and returns the new atoms of its results; by default `append_call`
    keep_stops   whether stop_gradient stays a step; its operand takes its place otherwise
    element      what takes the place of a load's result, from the old load and the new result
    """
    found = Replayed(dict(inputs), {})
    for position, step in enumerate(program.steps):
        if isinstance(step, Op):
            operands = [found.new(a) for a in step.inputs]
            if step.prim == STOP_GRADIENT and keep_stops:
                found.atoms[step.out.id] = builder.unfolded(STOP_GRADIENT, operands[0])
                continue
            found.atoms[step.out.id] = builder.op(step.prim, operands, step.out.dtype, **dict(step.params))
        elif isinstance(step, Load):
            index = load_index(step, [found.new(a) for a in step.index])
            atom = builder.load(step.capture, index)
            found.atoms[step.out.id] = atom if element is None else element(step, atom)
            found.loads[position] = builder.load_step(atom)
        else:
            results = append_call(builder, step, found.new) if call is None else call(step, found.new)
            found.atoms.update({old.id: atom for old, atom in zip(step.outs, results, strict=True)})
    return found


def append_call(builder: Builder, step: Call, new: Callable[[Atom], Atom]) -> tuple[Val, ...]:
    """Appends a copy of an old Call, on the new atoms of its operands; returns its new results in order."""
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(new, a[1]))) for a in step.arguments)
    axes = frozenset().union(*(axes_of(x) for a in arguments if not isinstance(a, int) for x in a[1]))
    axes = axes - {"delta"} | ({"q", "kv"} if "delta" in axes else frozenset())
    results = tuple((shape, tuple(builder.fresh(v.dtype, axes) for v in vals)) for shape, vals in step.results)
    made = dataclasses.replace(step, arguments=arguments, results=results)
    builder.steps.append(made)
    return made.outs
