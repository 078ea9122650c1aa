"""Turns an equation of a mod that no rule covers into a Call: a step that runs the whole equation, for example a while loop.

Only backends that map a jaxpr over a tile run a Call. `eqn` is the equation, and `args` are the values of its operands.
"""

import math

import numpy as np

from flexjax.errors import ModError
from flexjax.ir.program import Call, axes_of
from flexjax.trace.closed_over import body_of, explain_custom_vjp, split_closed_over
from flexjax.trace.equations import equation_function, equation_text
from flexjax.trace.primitives import CUSTOM, LOOPS
from flexjax.trace.translation import Equation, Translation
from flexjax.trace.values import MAX_ELEMENTS, MAX_UNROLL, Value, is_known, object_array


def equation_as_call(lowering: Translation, eqn: Equation, args: list[Value]) -> list[np.ndarray]:
    """Appends a Call that runs the whole equation to the program of the translation `lowering`; returns its results as arrays of atoms.

    A known array that a loop reads, or one of more than MAX_UNROLL elements, is captured and passed whole; all other operands are atoms.
    A function with a derivative rule of its own keeps its body, and operands of it that `split_closed_over` finds are no operands of the
    Call. Raises ModError for a result, or an operand that becomes atoms, of more than MAX_ELEMENTS elements.
    """
    custom = eqn.primitive.name in CUSTOM
    closed_over, args = split_closed_over(eqn, args) if custom else ({}, args)
    parts, axes = [], frozenset()
    for arg in args:
        if is_known(arg) and arg.ndim > 0 and (eqn.primitive.name in LOOPS or arg.size > MAX_UNROLL):
            parts.append(lowering.capture(arg))
            continue
        atoms = lowering.as_atoms(arg)
        parts.append((atoms.shape, tuple(atoms.ravel())))
        axes = axes.union(*(axes_of(a) for a in atoms.ravel()))
    axes = frozenset({"q", "kv"} | (axes - {"delta"})) if "delta" in axes else axes
    axes = axes | {"b", "h", "q", "kv"} if "score" in axes else axes
    results = []
    for var in eqn.outvars:
        size = math.prod(var.aval.shape)
        if size > MAX_ELEMENTS:
            raise ModError(
                f"its `{eqn.primitive.name}` makes an array of shape {tuple(var.aval.shape)} at each position; at most "
                f"{MAX_ELEMENTS} elements."
            )
        results.append((var.aval.shape, tuple(lowering.builder.fresh(var.aval.dtype.name, axes) for _ in range(size))))
    inner = body_of(eqn, closed_over) if custom else None
    bind = equation_function(eqn, closed_over)
    step = Call(
        eqn.primitive.name,
        equation_text(eqn),
        tuple(parts),
        tuple(results),
        explain_custom_vjp(bind) if custom else bind,
        inner,
    )
    lowering.builder.steps.append(step)
    return [object_array(vals).reshape(shape) for shape, vals in results]
