"""Builds a program again from its own steps, with other inputs or other captured arrays.

A pass that changes the inputs of a program (fold_vmap.py, split_axes.py) or what it computes (trace/derivative.py) appends the
old steps to a new Builder one by one. The Builder then shares and simplifies them as if the user's function had been traced so.
Old means of the given program, new means of the Builder's program.
"""

import dataclasses
from collections.abc import Callable, Sequence

from flexjax.ir.builder import Builder
from flexjax.ir.program import Atom, Call, Lit, Load, Op, Program, Val, axes_of

LoadIndex = Callable[[Load, list[Atom]], Sequence[Atom]]
"""From an old load and its index in new atoms to the index of the new load."""
ReplayCall = Callable[[Call, Callable[[Atom], Atom]], Sequence[Atom]]
"""From an old Call and the map from old atoms to new ones to the atoms of its results, in order."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What became of a program in a new Builder.

    atoms   the new atom of each old value, by the id of the old value
    loads   the new Load of each old one, by its position in the old program's `steps`
    """

    atoms: dict[int, Atom]
    loads: dict[int, Load]

    def new(self, atom: Atom) -> Atom:
        """The new atom that an old atom became; a literal is returned as it is."""
        return atom if isinstance(atom, Lit) else self.atoms[atom.id]


def replay(
    program: Program,
    builder: Builder,
    inputs: dict[int, Atom],
    load_index: LoadIndex = lambda load, index: index,
    call: ReplayCall | None = None,
) -> Replayed:
    """Appends the program's steps to the builder and returns what they became.

    program      the old program
    builder      makes the new program; its captures must be in place, because a load keeps the number of its capture
    inputs       the new atom of each input of the old program, by id
    load_index   the index of each new load, from the old load and its index in new atoms; by default that index
    call         appends a Call and returns the new atoms of its results; by default `append_call`
    """
    found = Replayed(dict(inputs), {})
    for position, step in enumerate(program.steps):
        if isinstance(step, Op):
            operands = [found.new(a) for a in step.inputs]
            found.atoms[step.out.id] = builder.op(step.prim, operands, step.out.dtype, **dict(step.params))
        elif isinstance(step, Load):
            index = load_index(step, [found.new(a) for a in step.index])
            atom = builder.load(step.capture, index)
            found.atoms[step.out.id] = atom
            found.loads[position] = builder.load_step(atom)
        else:
            results = append_call(builder, step, found.new) if call is None else call(step, found.new)
            found.atoms.update({old.id: atom for old, atom in zip(step.outs, results, strict=True)})
    return found


def append_call(builder: Builder, step: Call, new: Callable[[Atom], Atom]) -> tuple[Val, ...]:
    """Appends a copy of an old Call to the builder, on the new atoms of its operands; returns its new results in order.

    builder   makes the new program
    step      the old Call
    new       from an old atom to the new one

    Each result depends on the axes of all operands that are atoms, with q and kv in place of delta.
    """
    arguments = tuple(a if isinstance(a, int) else (a[0], tuple(map(new, a[1]))) for a in step.arguments)
    axes = frozenset().union(*(axes_of(x) for a in arguments if not isinstance(a, int) for x in a[1]))
    axes = axes - {"delta"} | ({"q", "kv"} if "delta" in axes else frozenset())
    results = tuple((shape, tuple(builder.fresh(v.dtype, axes) for v in vals)) for shape, vals in step.results)
    made = Call(step.name, step.text, arguments, results, step.bind, step.inner)
    builder.steps.append(made)
    return made.outs
