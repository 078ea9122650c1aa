"""Arrays that a function with its own derivative rule (custom_jvp, custom_vjp) closes over inside a mod.

jax passes these arrays to the function as its first operands (closed-over operands), and the derivative rule has no derivative
by them. They are bound to the function here, and a gradient by one of them raises ModError instead of being silently 0. `eqn`
is always the equation of a jaxpr that calls such a function.
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
    """Separates the known values (captured arrays, and what is computed from these alone) among the closed-over operands of the equation
    from its other operands.

    args   the values of the operands

    Returns ({operand number: known value, wrapped by `_constant`}, [all other operands, in order]). Nothing is differentiated by the
    wrapped values, so none of their elements becomes a variable of the derivative.
    """
    first = enumerate(args[: num_consts(eqn)])
    arrays = {i: _constant(a) for i, a in first if is_known(a)}
    return arrays, [a for i, a in enumerate(args) if i not in arrays]


def num_consts(eqn: Equation) -> int:
    """How many of the equation's first operands are values that the function closes over."""
    return eqn.params.get("num_consts", 0)


def explain_custom_vjp(bind: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Wraps `bind`, which runs an equation on its operands, so that it raises ModError in a sentence where jax raises
    CustomVJPException: where a custom_vjp function closes over a value that is differentiated. Other errors are passed on.
    """

    def run(*values: jax.Array) -> list[jax.Array]:
        """The results of `bind` on the operands `values`; ModError in place of CustomVJPException."""
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
    """The array as a value by which there is no derivative: differentiating by it raises ModError. Only a tracer of a floating
    or complex dtype is wrapped so; any other array is returned as it is.
    """
    floating = jnp.issubdtype(array.dtype, jnp.inexact)
    return _no_derivative(array) if floating and isinstance(array, Tracer) else array


@jax.custom_jvp
def _no_derivative(array: jax.Array) -> jax.Array:
    """Returns the array; its derivative rule (_no_derivative_jvp) raises ModError."""
    return array


def _no_derivative_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array | SymbolicZero]
) -> tuple[jax.Array, jax.Array | SymbolicZero]:
    """The derivative rule of _no_derivative: returns (array, its tangent), the one element of `primals` and of `tangents`.
    Raises ModError for a tangent that is not a SymbolicZero, even an array of zeros.
    """
    if not isinstance(tangents[0], SymbolicZero):
        array = f"a captured array of {primals[0].dtype.name}{list(primals[0].shape)}"
        raise ModError(
            f"`score_mod` cannot be differentiated with respect to {array}, because a function with a derivative rule of its own closes "
            "over it; pass its element as an argument of that function, or stop its gradient with lax.stop_gradient."
        )
    return primals[0], tangents[0]


_no_derivative.defjvp(_no_derivative_jvp, symbolic_zeros=True)  # pyright: ignore[reportArgumentType] jax types tangents as arrays


@dataclasses.dataclass(frozen=True)
class Body:
    """The parts of a jaxpr that are read to run it.

    constvars, invars   the variables of constants, and of inputs
    eqns                the equations, in order
    outvars             the outputs, variables or literals
    """

    constvars: Sequence[object]
    invars: Sequence[object]
    eqns: Sequence[object]
    outvars: Sequence[object]


@dataclasses.dataclass(frozen=True)
class ClosedBody:
    """The Body `jaxpr` with the values of its constants, `consts`, in the order of its constvars."""

    jaxpr: Body
    consts: Sequence[Value]


def body_of(eqn: Equation, closed_over: Mapping[int, jax.Array]) -> ClosedBody:
    """The jaxpr of the function without its derivative rule, with the closed-over arrays among its constants.

    closed_over   known values by operand number, as split_closed_over returns them; they are no inputs of the result, and follow the
                  jaxpr's own constants
    """
    closed = eqn.params.get("call_jaxpr") or eqn.params["fun_jaxpr"]
    jaxpr = closed.jaxpr
    constvars = [*jaxpr.constvars, *(jaxpr.invars[i] for i in closed_over)]
    invars = [v for i, v in enumerate(jaxpr.invars) if i not in closed_over]
    return ClosedBody(Body(constvars, invars, jaxpr.eqns, jaxpr.outvars), [*closed.consts, *closed_over.values()])
