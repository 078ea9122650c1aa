"""Facts about one equation of a jaxpr, and functions that run it outside of the translation (lower_jaxpr.py).

An equation is results = primitive(operands, parameters). Inside shard_map the type of an array says over which mesh axes its
elements vary, so that operands have to be cast to the types that the jaxpr expects.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from flexjax.errors import ModError
from flexjax.trace.translation import Equation, Scope, Typed, Variable
from flexjax.trace.values import Value


def inner_jaxpr(eqn: Equation) -> tuple[jex_core.Jaxpr, Sequence[Value]]:
    """(the body of a nested function that an equation calls (jit, remat), the values of the body's constants), for `Lowering.inline`; the
    second is () where the equation has a jaxpr without constants.
    """
    closed = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())


def has_jaxpr(eqn: Equation) -> bool:
    """Whether a parameter of the equation is a jaxpr, or a tuple or list with a jaxpr in it."""
    parts = [p for param in eqn.params.values() for p in (param if isinstance(param, tuple | list) else (param,))]
    return any(isinstance(p, jex_core.Jaxpr | jex_core.ClosedJaxpr) for p in parts)


def varying_axes(aval: object) -> frozenset[str]:
    """The mesh axes of shard_map over which the elements of an array of the type `aval` vary; none outside of shard_map."""
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else kind.varying


def cast_over(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, cast to vary over those of `axes` that are manual axes of a shard_map around this call; its elements stay."""
    missing = axes - varying_axes(jax.typeof(value))
    over = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis in missing)
    return jax.lax.pcast(value, over, to="varying") if over else value


def refuse_symbolic_shape(shape: tuple[int, ...]) -> None:
    """Raises ModError for the shape of a captured array with symbolic sizes, as jax.export makes them; None for a shape of
    ints.
    """
    if any(not isinstance(n, int) for n in shape):
        raise ModError(
            f"it reads a captured array of shape ({', '.join(map(str, shape))}), whose size is symbolic; sizes have to be numbers, "
            "so export once for each size that you need, and pad the array to the nearest one."
        )


def aval_of(var: object) -> Typed:
    """The type (aval) of `var`, a variable or literal of a jaxpr, declared with the shape and dtype that jax's own declaration
    lacks.
    """
    return cast(Variable, var).aval


def is_float0(var: object) -> bool:
    """Whether `var`, a variable or literal of a jaxpr, has dtype float0, as tangents of integers and bools have."""
    return getattr(aval_of(var), "dtype", None) == jax.dtypes.float0


def equation_function(
    eqn: Equation, closed_over: Mapping[int, jax.Array] | None = None
) -> Callable[..., list[jax.Array]]:
    """Makes a function that runs the equation: from the operands to the list of the results.

    closed_over   operands that are already known, by operand number; the function takes the other operands only

    Inside shard_map the function casts the operands to vary over the mesh axes that the jaxpr says, because literals, and
    values whose cast (primitives.CASTS) was skipped, vary over fewer.
    """
    known = closed_over or {}
    over = [varying_axes(v.aval) for v in eqn.invars]

    def run(*values: jax.Array) -> list[jax.Array]:
        """The list of the equation's results on these operands."""
        rest = iter(values)
        values = tuple(known[i] if i in known else next(rest) for i in range(len(eqn.invars)))
        values = tuple(map(cast_over, values, over))
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


def equation_text(eqn: Equation) -> str:
    """The equation's parameters as the text of a dict of strings, sorted by name, then a space and the first 16 hexadecimal digits of the
    SHA-256 of the values of all constants inside nested jaxprs (`nested_consts`).

    Two equations of one primitive with the same text compute the same, unless a nested jaxpr has an array as a literal, as jax makes them
    under jax_use_simplified_jaxpr_constants.
    """
    digest = hashlib.sha256()
    for const in nested_consts(tuple(eqn.params.values())):
        digest.update(np.asarray(const).tobytes())
    return f"{ {k: str(v) for k, v in sorted(eqn.params.items())} } {digest.hexdigest()[:16]}"


def nested_consts(params: Sequence[object]) -> list[object]:
    """The values of all constants inside an equation, by which `equation_text` tells apart equations whose jaxprs print alike.

    params   the values of the equation's parameters; tuples and lists are searched, and what is no jaxpr is skipped

    They are those of every jaxpr among the parameters, and of every jaxpr in the equations of one of these, in the order found; an array
    that several jaxprs hold comes several times. Arrays that are literals of a jaxpr count, too: with
    jax_use_simplified_jaxpr_constants jax writes constants so.
    """
    found: list[object] = []
    for param in params:
        if isinstance(param, tuple | list):
            found += nested_consts(param)
        elif hasattr(inner := getattr(param, "jaxpr", param), "eqns"):
            # before jax 0.11 the jaxpr of a jax.checkpoint has no constants of its own, and those inside have
            found += list(getattr(param, "consts", ()))
            scope = cast(Scope, inner)
            used = [v for eqn in cast(Sequence[Equation], scope.eqns) for v in eqn.invars] + list(scope.outvars)
            found += [v.val for v in used if isinstance(v, jex_core.Literal) and np.ndim(v.val)]
            for eqn in cast(Sequence[Equation], scope.eqns):
                found += nested_consts(tuple(eqn.params.values()))
    return found


# ------------------------------------------------------------------- integer division as Python has it

PYTHON_DIVISION = {"remainder": jnp.remainder, "floor_divide": jnp.floor_divide}
"""Functions of jax.numpy that a nested function of that name may be."""


def is_jnp_function(function: Callable[..., jax.Array], jaxpr: jex_core.Jaxpr) -> bool:
    """Whether the jaxpr is the body that jax gives `function`, a function of jax.numpy, on operands of the same types;
    the two are compared as text.

    False for a jaxpr with other than two operands or with a first result that is no integer. A name is not enough,
    because a function of the user may have the same name and compute something else. Answers are remembered.
    """
    avals = [aval_of(v) for v in jaxpr.invars]
    if len(avals) != 2 or not jnp.issubdtype(aval_of(jaxpr.outvars[0]).dtype, jnp.integer):
        return False
    key = (function, str(jaxpr))
    if key not in _jnp_functions:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        inside = [e.params["jaxpr"].jaxpr for e in jax.make_jaxpr(function)(*shapes).jaxpr.eqns if "jaxpr" in e.params]
        _jnp_functions[key] = len(inside) == 1 and str(inside[0]) == str(jaxpr)
    return _jnp_functions[key]


_jnp_functions: dict[tuple[Callable, str], bool] = {}
"""Answers of is_jnp_function, by the function and the text of the jaxpr."""
