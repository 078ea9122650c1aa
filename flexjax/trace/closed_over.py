"""Arrays that a function with its own derivative rule (custom_jvp, custom_vjp) closes over inside a mod.

jax passes these arrays to the function as its first operands (closed-over operands), and the derivative rule has no
derivative by them. They are bound to the function here, and a gradient by one of them raises ModError instead of being
silently 0. `eqn` is always the equation of a jaxpr that calls such a function.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from flexjax.errors import ModError
from flexjax.trace.translation import Equation
from flexjax.trace.values import Value, is_known


def split_closed_over(eqn: Equation, args: Sequence[Value]) -> tuple[dict[int, jax.Array], list[Value]]:
    """({number of a closed-over operand: its known value, wrapped by `_constant`}, all other operands in order)."""
    first = enumerate(args[: num_consts(eqn)])
    arrays = {i: _constant(a) for i, a in first if is_known(a)}
    return arrays, [a for i, a in enumerate(args) if i not in arrays]


def num_consts(eqn: Equation) -> int:
    return eqn.params.get("num_consts", 0)


def without_closed_over(eqn: Equation, bind: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """`bind`, which runs the equation on all its operands, without derivatives by the closed-over ones."""
    first = num_consts(eqn)
    return lambda *values: bind(*(jax.lax.stop_gradient(x) if i < first else x for i, x in enumerate(values)))


def explain_custom_vjp(bind: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """`bind` with ModError for CustomVJPException of jax: a function closes over a value that is differentiated."""

    def run(*values: jax.Array) -> list[jax.Array]:
        try:
            return bind(*values)
        except Exception as error:
            if type(error).__name__ != "CustomVJPException":  # jax does not export it
                raise
            raise ModError(
                "a function with a custom_vjp rule closes over the score or over an element of a captured array, for "
                "which the rule has no derivative; hand it over as an argument of that function, or stop its gradient "
                "with lax.stop_gradient."
            ) from error

    return run


def _constant(array: jax.Array) -> jax.Array:
    """The array, as a value by which differentiating raises ModError if it is a floating tracer."""
    floating = jnp.issubdtype(array.dtype, jnp.inexact)
    return _no_derivative(array) if floating and isinstance(array, Tracer) else array


@jax.custom_jvp
def _no_derivative(array: jax.Array) -> jax.Array:
    return array


def _no_derivative_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array | SymbolicZero]
) -> tuple[jax.Array, jax.Array | SymbolicZero]:
    """Raises ModError for a tangent that is not a SymbolicZero, even an array of zeros."""
    if not isinstance(tangents[0], SymbolicZero):
        array = f"a captured array of {primals[0].dtype.name}{list(primals[0].shape)}"
        raise ModError(
            f"`score_mod` cannot be differentiated with respect to {array}, because a function with a derivative rule "
            "of its own closes over it; pass its element as an argument of that function, or stop its gradient with "
            "lax.stop_gradient."
        )
    return primals[0], tangents[0]


# jax types tangents as arrays
_no_derivative.defjvp(_no_derivative_jvp, symbolic_zeros=True)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Body:
    """The parts of a jaxpr that are read to run it (translation.Scope)."""

    constvars: Sequence[object]
    invars: Sequence[object]
    eqns: Sequence[object]
    outvars: Sequence[object]


@dataclasses.dataclass(frozen=True)
class ClosedBody:
    """A Body with the values of its constants, in the order of its constvars."""

    jaxpr: Body
    consts: Sequence[Value]


def body_of(eqn: Equation, closed_over: Mapping[int, jax.Array]) -> ClosedBody:
    """The jaxpr of the function without its derivative rule, with the closed-over arrays as its last constants."""
    closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
    jaxpr = closed.jaxpr
    constvars = [*jaxpr.constvars, *(jaxpr.invars[i] for i in closed_over)]
    invars = [v for i, v in enumerate(jaxpr.invars) if i not in closed_over]
    return ClosedBody(Body(constvars, invars, jaxpr.eqns, jaxpr.outvars), [*closed.consts, *closed_over.values()])
