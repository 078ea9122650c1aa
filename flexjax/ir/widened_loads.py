"""Programs that read a captured array of 16-bit floats as float32, where they only convert its elements.

Converting to float32 is exact, so a call may convert such an array once in place of each element at each read.
"""

import dataclasses
from collections.abc import Collection, Sequence

from flexjax.ir.program import Atom, Lit, Load, Op, Program, Step, Val
from flexjax.ir.rewrite import map_atoms

# dtypes that float32 contains
NARROW = ("bfloat16", "float16")


def widenable(programs: Sequence[Program]) -> frozenset[int]:
    """The captured arrays of a NARROW dtype whose elements the programs only convert to float32."""
    found = {load.capture for program in programs for load in program.loads}
    found = {n for n in found if programs[0].captures[n].dtype in NARROW}
    return frozenset(found - {n for program in programs for n in _used_otherwise(program)})


def _used_otherwise(program: Program) -> set[int]:
    """The captured arrays of which the program uses an element otherwise than to convert it to float32."""
    capture_of = {load.out.id: load.capture for load in program.loads}
    found = {a for call in program.calls for a in call.arguments if isinstance(a, int)}
    used: list[Atom] = list(program.results)
    for step in program.steps:
        if not _widens(step):
            used += step.inputs
    return found | {capture_of[a.id] for a in used if isinstance(a, Val) and a.id in capture_of}


def _widens(step: Step) -> bool:
    return isinstance(step, Op) and step.prim == "convert_element_type" and step.out.dtype == "float32"


def widened(program: Program, captures: Collection[int]) -> Program:
    """The program that reads the captured arrays of these numbers as float32; its values are the same numbers."""
    if not captures:
        return program
    renamed: dict[int, Val] = {}  # id of an element or of its conversion -> the element in float32
    steps: list[Step] = []
    place: dict[int, int] = {}  # position of a step -> its position among `steps`

    def new(atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else renamed.get(atom.id, atom)

    for n, step in enumerate(program.steps):
        if isinstance(step, Load) and step.capture in captures:
            renamed[step.out.id] = dataclasses.replace(step.out, dtype="float32")
        elif isinstance(step, Op) and _widens(step) and isinstance(step.inputs[0], Val):
            source = step.inputs[0].id
            if source in renamed:
                renamed[step.out.id] = renamed[source]
                continue
        place[n] = len(steps)
        steps.append(map_atoms(step, new, lambda out: renamed.get(out.id, out)))
    return Program(
        program.inputs,
        tuple(steps),
        tuple(map(new, program.results)),
        tuple(dataclasses.replace(c, dtype="float32") if n in captures else c for n, c in enumerate(program.captures)),
        tuple(place[n] for n in program.gradients),
    )
