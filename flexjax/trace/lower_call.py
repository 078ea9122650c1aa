"""Turns an equation of a mod that no rule covers into a Call: a step that runs all of it, such as a while loop.

Only backends that map a jaxpr over a tile run a Call.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.errors import ModError
from flexjax.ir.builder import Builder, literal
from flexjax.ir.program import Call, Lit, Val, axes_of, is_vector, positions_of, vector_axes
from flexjax.trace.closed_over import body_of, explain_custom_vjp, split_closed_over, without_closed_over
from flexjax.trace.equations import equation_function, equation_text
from flexjax.trace.lazy_rules import too_large_of
from flexjax.trace.linearity import calls_rule, digest, is_linear, rule_of
from flexjax.trace.primitives import CONTROL_FLOW, CUSTOM
from flexjax.trace.random_keys import keys_of, on_words, word_type, words_of
from flexjax.trace.translation import Equation, Translation
from flexjax.trace.values import (
    MAX_ELEMENTS,
    MAX_UNROLL,
    ROLL,
    Index,
    NotRolled,
    Value,
    is_key_dtype,
    is_known,
    is_lazy,
    object_array,
)


def equation_as_call(lowering: Translation, eqn: Equation, args: list[Value]) -> list[Value]:
    """Appends a Call that runs the whole equation to the program; returns its results as arrays of atoms.

    Known arrays that a loop reads, or of more than MAX_UNROLL elements, are captured whole; all other operands are
    atoms, but lazy ones of a custom function with more than ROLL elements are vectors (program.is_vector). Random keys
    enter and leave as words. Raises ModError for more than MAX_ELEMENTS elements.
    """
    custom = eqn.primitive.name in CUSTOM
    # a Call for second derivatives runs when closed-over arrays may be gone: there they stay operands
    closed_over, args = split_closed_over(eqn, args) if custom and not lowering.again else ({}, args)
    parts, axes, vectors = [], frozenset(), False
    dtypes = [v.aval.dtype for i, v in enumerate(eqn.invars) if i not in closed_over]
    for arg, dtype in zip(args, dtypes, strict=True):
        whole = is_known(arg) and arg.ndim > 0 and (eqn.primitive.name in CONTROL_FLOW or arg.size > MAX_UNROLL)
        if is_known(arg) and whole and not is_key_dtype(dtype):
            parts.append(lowering.capture(arg))
            continue
        rolls = custom and not lowering.again  # a program that jax differentiates again has no vectors
        if rolls and is_lazy(arg) and arg.size > ROLL and not is_key_dtype(dtype):
            vectors = True
            index = vector_index(lowering.builder, arg.shape)
            with lowering.builder.opened(index):
                try:
                    atom = arg.element(index)
                except NotRolled:
                    atom = None
            if atom is not None:
                parts.append((arg.shape, (atom,)))
                axes = axes.union(positions_of(axes_of(atom)))
                continue
        atoms = words_of(lowering.as_atoms(arg), dtype)
        parts.append((atoms.shape, tuple(atoms.ravel())))
        axes = axes.union(*(axes_of(a) for a in atoms.ravel()))
    axes = frozenset({"q", "kv"} | (axes - {"delta"})) if "delta" in axes else axes
    axes = axes | {"b", "h", "q", "kv"} if "score" in axes else axes
    results = []
    for var in eqn.outvars:
        shape, dtype = word_type(var.aval.shape, var.aval.dtype)
        size = math.prod(shape)
        if vectors and size > ROLL and not is_key_dtype(var.aval.dtype):
            index = vector_index(lowering.builder, shape)
            own = axes.union(*map(axes_of, index))
            results.append((shape, (lowering.builder.fresh(dtype.name, own),)))
            continue
        if size > MAX_ELEMENTS:
            raise ModError(
                f"its `{eqn.primitive.name}` makes an array of shape {tuple(var.aval.shape)} at each position; at most "
                f"{MAX_ELEMENTS} elements."
            )
        results.append((shape, tuple(lowering.builder.fresh(dtype.name, axes) for _ in range(size))))
    inner = body_of(eqn, closed_over) if custom else None
    bind = equation_function(eqn, closed_over)
    if custom:
        bind = explain_custom_vjp(without_closed_over(eqn, bind) if lowering.again else bind)
    text, linear = equation_text(eqn), None
    if custom or calls_rule(eqn):
        taken = [v.aval for i, v in enumerate(eqn.invars) if i not in closed_over]
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in taken]
        rule = rule_of(eqn, bind, types)
        linear = rule is None or is_linear(rule, sum(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars))
        text += digest(rule)  # the text of an equation has only the name of a derivative rule
    step = Call(eqn.primitive.name, text, tuple(parts), tuple(results), on_words(bind, dtypes), inner, linear)
    lowering.builder.steps.append(step)
    made = [
        _vector(lowering, shape, vals[0]) if is_vector(shape, vals) else object_array(vals).reshape(shape)
        for shape, vals in results
    ]
    return [keys_of(words, var.aval.dtype) for words, var in zip(made, eqn.outvars, strict=True)]


def vector_index(builder: Builder, shape: Sequence[int]) -> Index:
    """The index at which a vector of a Call has its one atom: a loop index for each dim, 0 for dims of size 1."""
    pairs = iter(vector_axes(tuple(shape)))
    return tuple(literal(0, "int32") if n == 1 else builder.loop_index(*next(pairs)) for n in shape)


def _vector(lowering: Translation, shape: tuple[int, ...], val: Val) -> Value:
    """The lazy array of which a Call makes `val`, its element at the loop indices."""
    own = vector_index(lowering.builder, shape)
    make = lambda index: lowering.builder.vector_at(
        val, {k: i for k, i in zip(own, index, strict=True) if not isinstance(k, Lit)}
    )
    return lowering.lazy(shape, val.dtype, make, too_large_of([], shape))
