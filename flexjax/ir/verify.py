"""The rules that a legal program keeps; `check` runs after every pass that makes a program.

The docstring of each function states its rule. It returns what breaks the rule, as text for the error, or None.
"""

from collections.abc import Callable

from flexjax.ir.builder import mixed_axes
from flexjax.ir.operations import COTANGENT, LOOP_AT, LOOPS, OPERATIONS, REDUCTIONS, STOP_GRADIENT
from flexjax.ir.program import AXES, Call, Lit, Op, Program, Val, axes_of, loop_indices
from flexjax.ir.ranges import is_integer


class IllegalProgram(AssertionError):
    """A pass made a program that breaks a rule: a bug in flexjax."""


def _defined_before_use(program: Program) -> str | None:
    """Every value is defined once, before it is used."""
    known = {v.id for v in program.inputs}
    for step in program.steps:
        for atom in step.inputs:
            if isinstance(atom, Val) and atom.id not in known:
                return f"{atom} is used before it is defined"
        for out in step.outs:
            if out.id in known:
                return f"{out} is defined twice"
            known.add(out.id)
    missing = [str(r) for r in program.results if isinstance(r, Val) and r.id not in known]
    return f"results {missing} are not defined" if missing else None


def _loads_fit_captures(program: Program) -> str | None:
    """A load has one int32 index for each dimension of an existing capture, and the dtype of that capture."""
    for load in program.loads:
        if not 0 <= load.capture < len(program.captures):
            return f"load of capture {load.capture}, of {len(program.captures)}"
        array = program.captures[load.capture]
        if len(load.index) != len(array.shape):
            return f"load with {len(load.index)} indices of {array}"
        if load.out.dtype != array.dtype:
            return f"load of {array} gives {load.out.dtype}"
        if any(a.dtype != "int32" for a in load.index):
            return f"load index of dtype {[a.dtype for a in load.index]}"
    return None


def _axes_cover_operands(program: Program) -> str | None:
    """The axes of a result are known and include those of its operands, but for linear forms, loops and Calls."""
    known = {*AXES, *loop_indices(program)}
    for step in program.steps:
        if isinstance(step, Call):
            continue
        operands = mixed_axes([axes_of(a) for a in step.inputs])
        if isinstance(step, Op) and step.prim in (*REDUCTIONS, LOOP_AT):
            operands -= frozenset().union(*map(axes_of, step.inputs[1::2]))
        if not step.out.axes <= known:
            return f"{step.out} has axes {sorted(step.out.axes)}"
        lost = operands - step.out.axes
        # the axes may cancel out in a linear form
        if lost and step.out.linear is None:
            return f"{step.out} loses the axes {sorted(lost)}"
    return None


def _loops_have_an_index(program: Program) -> str | None:
    """A loop goes over a loop index on which its operand depends, and its result does not."""
    indices = set(loop_indices(program).values())
    for step in program.loops:
        operand, index = step.inputs
        if index not in indices or not axes_of(index) <= axes_of(operand) or axes_of(index) & step.out.axes:
            return f"{step.prim} of {operand} over {index}"
    return None


def _select_is_typed(program: Program) -> str | None:
    """A select has a bool or integer predicate, and cases of the dtype of its result."""
    for step in program.steps:
        if isinstance(step, Op) and step.prim == "select_n":
            predicate, *cases = step.inputs
            if predicate.dtype != "bool" and not is_integer(predicate.dtype):
                return f"select on {predicate.dtype}"
            if any(c.dtype != step.out.dtype for c in cases):
                return f"select of {[c.dtype for c in cases]} gives {step.out.dtype}"
    return None


def _index_literals_in_bounds(program: Program) -> str | None:
    """A literal index of a load is in bounds; 0 is for a dimension of length 0 too."""
    for load in program.loads:
        for atom, size in zip(load.index, program.captures[load.capture].shape, strict=True):
            if isinstance(atom, Lit) and not 0 <= int(atom.value) < max(size, 1):
                return f"load index {atom} of a dimension of {size}"
    return None


def _operations_are_known(program: Program) -> str | None:
    """The primitive of every Op is one of operations.py."""
    unknown = (
        {s.prim for s in program.steps if isinstance(s, Op)} - OPERATIONS - LOOPS - {STOP_GRADIENT, COTANGENT, LOOP_AT}
    )
    return f"operations {sorted(unknown)} are not in ir/operations.py" if unknown else None


RULES: tuple[Callable[[Program], str | None], ...] = (
    _operations_are_known,
    _defined_before_use,
    _loads_fit_captures,
    _axes_cover_operands,
    _loops_have_an_index,
    _select_is_typed,
    _index_literals_in_bounds,
)


def check(program: Program) -> None:
    """Raises IllegalProgram, with the program's text, at the first rule that the program breaks."""
    for rule in RULES:
        complaint = rule(program)
        if complaint:
            raise IllegalProgram(f"{rule.__name__.strip('_')}: {complaint}\n{program}")
