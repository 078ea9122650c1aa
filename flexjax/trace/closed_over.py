"""Arrays that a function with a derivative rule (custom_jvp, custom_vjp) closes over inside a mod.

jax passes these arrays to the function as its first operands, and the derivative rule has no derivative for them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from flexjax.errors import ModError
from flexjax.trace.atoms import Value, is_atoms
from flexjax.trace.lazy_arrays import is_lazy


def split_closed_over(eqn: Any, args: Sequence[Value]) -> tuple[dict[int, jax.Array], list[Value]]:
    """(captured arrays among the closed-over operands, by operand number; all other operands).

    The derivative rule has no derivative for the captured arrays, so none of their elements becomes a variable of the
    derivative.
    """
    first = enumerate(args[: num_consts(eqn)])
    arrays = {i: _constant(a) for i, a in first if not is_atoms(a) and not is_lazy(a)}
    return arrays, [a for i, a in enumerate(args) if i not in arrays]


def num_consts(eqn: Any) -> int:
    return eqn.params.get("num_consts", 0)


def saying_why(bind: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """`bind`, which raises a ModError where a custom_vjp function has no derivative for what it closes over."""

    def run(*values: jax.Array) -> list[jax.Array]:
        try:
            return bind(*values)
        except Exception as error:
            if type(error).__name__ != "CustomVJPException":  # jax does not export it
                raise
            raise ModError(
                "a function with a custom_vjp rule closes over the score or over an element of a captured array, for which the "
                "rule has no derivative; hand it over as an argument of that function, or stop its gradient with "
                "lax.stop_gradient."
            ) from error

    return run


def _constant(array: jax.Array) -> jax.Array:
    """The array; differentiating by it raises a ModError, because the rule has no derivative for it."""
    floating = jnp.issubdtype(array.dtype, jnp.inexact)
    return _no_derivative(array) if floating and isinstance(array, Tracer) else array


@jax.custom_jvp
def _no_derivative(array: jax.Array) -> jax.Array:
    return array


def _no_derivative_jvp(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        array = f"a captured array of {primals[0].dtype.name}{list(primals[0].shape)}"
        raise ModError(
            f"`score_mod` cannot be differentiated by {array} that a function with a derivative rule of its own closes over, "
            "as in jax; hand its element over as an argument of that function, or stop its gradient with lax.stop_gradient."
        )
    return primals[0], tangents[0]


_no_derivative.defjvp(_no_derivative_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The parts of a jaxpr that `Lowering.run` reads."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _ClosedScope:
    jaxpr: _Scope
    consts: Sequence[Any]


def body_of(eqn: Any, closed_over: Mapping[int, jax.Array]) -> _ClosedScope:
    """The function without its derivative rule, with the closed-over arrays among its constants."""
    closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
    jaxpr = closed.jaxpr
    constvars = [*jaxpr.constvars, *(jaxpr.invars[i] for i in closed_over)]
    invars = [v for i, v in enumerate(jaxpr.invars) if i not in closed_over]
    return _ClosedScope(_Scope(constvars, invars, jaxpr.eqns, jaxpr.outvars), [*closed.consts, *closed_over.values()])
