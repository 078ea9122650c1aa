"""Which traced programs the kernels can evaluate on a tile.

A program is a traced mod (ir/program.py). Nothing here imports Mosaic, because plans are refused on machines without a
GPU and with an older jax.
"""

import math

from flexjax.backends.mosaic_gpu.tile_ops import DTYPES, SUPPORTED, is_float, precision_name
from flexjax.ir import program as ir


def unsupported(program: ir.Program) -> str | None:
    """Why the kernels cannot evaluate the program, as the end of a sentence whose subject is the program; None if
    they can.

    The first of: a jaxpr that tracing could not unroll; a captured array of a dtype outside of DTYPES; then, step by
    step, a result of such a dtype, a load from an empty array, a load whose varying indices span 2^31 or more elements,
    or an operation that `_unsupported_op` names.
    """
    if program.calls:
        return f"contains control flow that could not be unrolled (`{program.calls[0].name}`)"
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


def _unsupported_op(step: ir.Op) -> str | None:
    """Why the kernels cannot evaluate `step`, one operation, as the end of a sentence whose subject is the program; None if they can.

    Refused are primitives outside of SUPPORTED, `pow` with an integer base, `reduce_precision` to a format other than bfloat16, float16 and
    float32, `bitcast_convert_type` unless both dtypes have 32 bits, and `select_n` by a bool among other than two cases.
    """
    if step.prim not in SUPPORTED:
        return f"uses the primitive `{step.prim}`, which has no form on a tile"
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
