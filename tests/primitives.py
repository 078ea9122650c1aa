"""Small functions that use one operation of a program each: the rows of tests/trace/test_primitives.py and
tests/backends/test_every_primitive.py. Also which primitives a row or a jaxpr has.

A row is a function of a score x and a captured number y, both within 0.15..0.85, and of any int32 n. To add an operation, add
its row here; both files go over the rows, and the second one says which tables still lack the operation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

Row = Callable[[Any, Any, Any], Any]

F32 = lambda x: x.astype(jnp.float32)

ROWS: dict[str, Row] = {name: (lambda x, y, n, name=name: getattr(lax, name)(x * y)) for name in (
    "acos", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "neg", "rsqrt", "sin", "sinh", "sqrt", "square", "tan",
    "tanh",
)} | {name: (lambda x, y, n, name=name: getattr(lax, name)(9 * x * y - 2)) for name in (
    "abs", "ceil", "floor", "round", "sign",
)} | {name: (lambda x, y, n, name=name: getattr(lax, name)(x, 2.1 * y)) for name in (
    "add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2", "nextafter", "igamma", "igammac", "igamma_grad_a",
)} | {name: (lambda x, y, n, name=name: jnp.where(getattr(lax, name)(x, y), x * y, x)) for name in (
    "eq", "ne", "lt", "le", "gt", "ge",
)} | {name: (lambda x, y, n, name=name: jnp.where(getattr(lax, f"{name}_p").bind(x, y), x * y, x)) for name in (
    "eq_to", "le_to", "lt_to",
)} | {name: (lambda x, y, n, name=name: F32(getattr(lax, name)(n)) * x) for name in ("clz", "population_count")
} | {name: (lambda x, y, n, name=name: F32(getattr(lax, name)(n, jnp.int32(3))) * x) for name in (
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "mulhi",
)} | {name: (lambda x, y, n, name=name: F32(getattr(lax, "bitwise_" + name)(n, jnp.int32(0x5555))) * x) for name in (
    "and", "or", "xor",
)} | {
    "acosh": lambda x, y, n: lax.acosh(1 + x * y),
    "not": lambda x, y, n: F32(lax.bitwise_not(n)) * x,
    "is_finite": lambda x, y, n: jnp.where(lax.is_finite(x / F32(n & 1)), x, y),
    "clamp": lambda x, y, n: lax.clamp(0.3 * y, x, y),
    "select_n": lambda x, y, n: lax.select_n(n & 1, x * y, y),
    "integer_pow": lambda x, y, n: lax.integer_pow(x * y, -3),
    "reduce_precision": lambda x, y, n: lax.reduce_precision(x * y, 8, 7),
    "convert_element_type": lambda x, y, n: F32((x * y).astype(jnp.bfloat16)),
    "zeta": lambda x, y, n: lax.zeta(x + 2, jnp.float32(1.5)) * y,
    "polygamma": lambda x, y, n: lax.polygamma(jnp.float32(1), x * y),
    "regularized_incomplete_beta": lambda x, y, n: lax.betainc(jnp.float32(1.5), jnp.float32(2), x * y),
    "complex": lambda x, y, n: jnp.abs(lax.complex(x, y)),
    "real": lambda x, y, n: lax.real(lax.complex(x, y) ** 2),
    "imag": lambda x, y, n: lax.imag(jnp.exp(lax.complex(x, y))),
    "conj": lambda x, y, n: lax.real(lax.conj(lax.complex(x, y)) * (x + 2j)),
}  # fmt: skip
"""By the primitive of jax that the row binds."""

NOT_BOUND = frozenset({"add_any", "copy", "copy_p", "stop_gradient"})
"""Primitives without a row: jax's transformations write them, or nothing does."""

OWN_ROWS: dict[str, Row] = {
    "bitcast_convert_type": lambda x, y, n: F32(lax.bitcast_convert_type(x, jnp.int32) >> 8) * y,
    "floordiv": lambda x, y, n: F32(n // jnp.int32(-7)) * x,
    "floormod": lambda x, y, n: F32(n % jnp.int32(-7)) * x,
    "threefry2x32": lambda x, y, n: F32(sum(threefry2x32_p.bind(*([n.astype(jnp.uint32)] * 4))) >> 8) * x,
}
"""By an operation of programs that no primitive of one element stands for."""

NO_DERIVATIVE = frozenset({"igamma_grad_a", "nextafter", "zeta"})
"""Primitives of which jax has no derivative."""


def bound_primitives(row: Row) -> set[str]:
    """Names of the primitives that jax binds for the row."""
    one, word = jnp.float32(0.5), jnp.int32(5)
    return {e.primitive.name for e in jax.make_jaxpr(row)(one, one, word).jaxpr.eqns}


def primitives_of(jaxpr: object) -> set[str]:
    """The names of all primitives of a jaxpr, those of nested jaxprs included."""
    found: set[str] = set()
    for equation in getattr(jaxpr, "eqns", []):
        found.add(equation.primitive.name)
        for inner in equation.params.values():
            found |= primitives_of(getattr(inner, "jaxpr", None))
    return found
