"""Which traced programs (ir/program.py) the kernels can evaluate on a tile; nothing here imports Mosaic."""

import math

from flexjax.backends.mosaic_gpu.programs.tile_ops import DTYPES, SUPPORTED, is_float, precision_name
from flexjax.ir import program as ir
from flexjax.ir.operations import LOOPS
from flexjax.trace.primitives import CONTROL_FLOW


def unsupported(program: ir.Program) -> str | None:
    """Why the kernels cannot evaluate the program, as the end of a sentence about it; None if they can."""
    if program.calls:
        name = program.calls[0].name
        loop = f"contains control flow that could not be unrolled (`{name}`)"
        return loop if name in CONTROL_FLOW else _no_form(name)
    for array in program.captures:
        if array.dtype not in DTYPES:
            return f"reads a captured array of {array.dtype}; the kernel takes {', '.join(sorted(DTYPES))}"
    for step in program.steps:
        for value in step.outs:
            if value.dtype not in DTYPES:
                return f"computes a value of {value.dtype}; the kernel computes in 32 bits"
        if isinstance(step, ir.Load):
            array = program.captures[step.capture]
            if math.prod(array.shape) == 0:
                return "reads an empty array"
            kind = ir.classify_load(step)
            moving = [n for n, d in zip(array.shape, kind.dims, strict=True) if d != "uniform"]
            if math.prod(moving) >= 1 << 31:
                return "reads one captured array at indices that range over 2^31 or more elements"
        elif isinstance(step, ir.Op):
            reason = _unsupported_op(step)
            if reason:
                return reason
    return None


def _no_form(primitive: str) -> str:
    """The end of a sentence that refuses a program for a primitive of that name."""
    return f"uses the primitive `{primitive}`, which has no form on a tile"


def _unsupported_op(step: ir.Op) -> str | None:
    """Why the kernels cannot evaluate the operation, as the end of a sentence about its program; None if they can."""
    if step.prim in LOOPS:
        return None
    if step.prim not in SUPPORTED:
        return _no_form(step.prim)
    operand = step.inputs[0].dtype
    if step.prim == "pow" and not is_float(operand):
        return "raises integers to a power"
    params = dict(step.params)
    if step.prim == "reduce_precision" and precision_name(params) is None:
        return "rounds to a format (`reduce_precision`) other than bfloat16, float16 or float32"
    if step.prim == "bitcast_convert_type" and {operand, step.out.dtype} - {"float32", "int32", "uint32"}:
        return f"reinterprets {operand} bits as {step.out.dtype}"
    if step.prim == "select_n" and len(step.inputs) != 3 and operand == "bool":
        return "selects in an unknown way"
    return None
