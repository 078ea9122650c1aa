"""Facts about one equation of a jaxpr, and functions that run it outside of the translation (lower_jaxpr.py)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.typing import ArrayLike

from flexjax.errors import ModError
from flexjax.trace.primitives import ELEMENTWISE, REDUCTIONS
from flexjax.trace.translation import Equation, Scope, Typed, Variable
from flexjax.trace.values import Value, is_key_dtype


def inner_jaxpr(eqn: Equation) -> tuple[jex_core.Jaxpr, Sequence[Value]]:
    """(body of the nested function (jit, remat) that an equation calls, the values of the body's constants)."""
    closed = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())


def has_jaxpr(eqn: Equation) -> bool:
    parts = [p for param in eqn.params.values() for p in (param if isinstance(param, tuple | list) else (param,))]
    return any(isinstance(p, jex_core.Jaxpr | jex_core.ClosedJaxpr) for p in parts)


def varying_axes(aval: object) -> frozenset[str]:
    """The mesh axes of shard_map over which the elements of an array of the type `aval` vary."""
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else kind.varying


def keeps_split(eqn: Equation, values: Sequence[jax.Array]) -> bool:
    """Whether the equation computes its result from split operands without moving an element."""
    specs = {tuple(spec) for v in values if any(spec := jax.typeof(v).sharding.spec)}
    # operands of one shape must not be split in two ways
    if len(specs) != 1:
        return False
    (spec,) = specs
    if eqn.primitive.name in REDUCTIONS:
        return all(spec[axis] is None for axis in cast(Sequence[int], eqn.params["axes"]))
    return eqn.primitive.name in ELEMENTWISE


def cast_over(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value, cast to vary over those of `axes` that are manual axes of a shard_map around this call."""
    missing = axes - varying_axes(jax.typeof(value))
    over = tuple(axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis in missing)
    return jax.lax.pcast(value, over, to="varying") if over else value


def refuse_symbolic_shape(shape: tuple[int, ...]) -> None:
    """Raises ModError for a shape with symbolic sizes, as jax.export makes them."""
    if any(not isinstance(n, int) for n in shape):
        raise ModError(
            f"it reads a captured array of shape ({', '.join(map(str, shape))}), whose size is symbolic; sizes have to "
            "be numbers, so export once for each size that you need, and pad the array to the nearest one."
        )


def aval_of(var: object) -> Typed:
    """The aval of a variable or literal of a jaxpr, with the shape and dtype that jax's own declaration lacks."""
    return cast(Variable, var).aval


def is_float0(var: object) -> bool:
    """Whether a variable or literal has dtype float0, as tangents of integers and bools have."""
    return getattr(aval_of(var), "dtype", None) == jax.dtypes.float0


def equation_function(
    eqn: Equation, closed_over: Mapping[int, jax.Array] | None = None
) -> Callable[..., list[jax.Array]]:
    """A function that runs the equation, from the operands that are not in `closed_over` (by number) to the results."""
    known = closed_over or {}
    over = [varying_axes(v.aval) for v in eqn.invars]

    def run(*values: jax.Array) -> list[jax.Array]:
        rest = iter(values)
        values = tuple(known[i] if i in known else next(rest) for i in range(len(eqn.invars)))
        # inside shard_map literals, and values whose cast (primitives.CASTS) was skipped, vary over fewer axes
        values = tuple(map(cast_over, values, over))
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    return run


def equation_text(eqn: Equation) -> str:
    """The parameters and a digest of the constants, as a text: equations with the same text compute the same."""
    digest = hashlib.sha256()
    for const in nested_consts(tuple(eqn.params.values())):
        words = jax.random.key_data(cast(jax.Array, const)) if is_key_dtype(getattr(const, "dtype", None)) else const
        digest.update(np.asarray(words).tobytes())
    return f"{ {k: str(v) for k, v in sorted(eqn.params.items())} } {digest.hexdigest()[:16]}"


def nested_consts(params: Sequence[object]) -> list[object]:
    """All constants in the jaxprs among parameters and, recursively, in their equations."""
    found: list[object] = []
    for param in params:
        if isinstance(param, tuple | list):
            found += nested_consts(param)
        elif hasattr(inner := getattr(param, "jaxpr", param), "eqns"):
            # before jax 0.11 the jaxpr of a jax.checkpoint has no constants of its own, and those inside have
            found += list(getattr(param, "consts", ()))
            scope = cast(Scope, inner)
            # with jax_use_simplified_jaxpr_constants, jax writes constants as literals
            used = [v for eqn in cast(Sequence[Equation], scope.eqns) for v in eqn.invars] + list(scope.outvars)
            found += [v.val for v in used if isinstance(v, jex_core.Literal) and np.ndim(v.val)]
            for eqn in cast(Sequence[Equation], scope.eqns):
                found += nested_consts(tuple(eqn.params.values()))
    return found


# ------------------------------------------------------------------- integer division as Python has it

# functions of jax.numpy that a nested function of that name may be
PYTHON_DIVISION = {"remainder": jnp.remainder, "floor_divide": jnp.floor_divide}


def is_jnp_function(function: Callable[..., jax.Array], jaxpr: jex_core.Jaxpr, consts: Sequence[ArrayLike]) -> bool:
    """Whether the jaxpr is the body that jax gives `function`, a function of jax.numpy, on operands of the same types;
    the two are compared as text.

    They are compared as text, because a function of the user may have the same name.
    """
    avals = [aval_of(v) for v in jaxpr.invars]
    if len(avals) != 2 or not jnp.issubdtype(aval_of(jaxpr.outvars[0]).dtype, jnp.integer):
        return False
    if any(isinstance(c, Tracer) or np.ndim(c) for c in consts):
        return False
    key = (function, str(jaxpr), str([np.asarray(c).item() for c in consts]))
    if key not in _jnp_functions:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        inside = [e.params["jaxpr"] for e in jax.make_jaxpr(function)(*shapes).jaxpr.eqns if "jaxpr" in e.params]
        text = lambda jaxpr, consts: (str(jaxpr), str([np.asarray(c).item() for c in consts]))
        # under jax.ensure_compile_time_eval its numbers are constants of the jaxpr
        _jnp_functions[key] = len(inside) == 1 and text(inside[0].jaxpr, inside[0].consts) == key[1:]
    return _jnp_functions[key]


_jnp_functions: dict[tuple[Callable, str, str], bool] = {}
"""Answers of is_jnp_function, by the function and the text of the jaxpr."""
