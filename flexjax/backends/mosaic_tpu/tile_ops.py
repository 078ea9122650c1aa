"""Runs one operation of a traced program inside a TPU kernel.

Most are the jax.lax function of the same name (PLAIN). RULES rewrites those that the TPU compiler lacks or compiles
badly: selects between booleans become and/or, divisions by constants become shifts or multiplications
(integer_division.py), and missing transcendental functions are composed of exp, log, erf and arctan2. Operands are
scalars, (rows, 1), (1, columns) or (rows, columns); `apply` broadcasts them to one shape. A rule is a function (op,
*operands) -> result, where `op` is the step of the program.
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_tpu.integer_division import Rule, broadcast, floordiv, floormod, int_div, rem
from flexjax.backends.tile_math import TOTAL_ORDER, threefry2x32
from flexjax.ir.program import Call, Op

# Primitives that are the function of jax.lax of the same name: they compile on float32 and int32 tiles.
PLAIN = frozenset(
    {
        "abs", "add", "sub", "mul", "neg", "max", "min", "exp", "exp2", "log", "log1p", "tanh", "logistic",
        "sqrt", "rsqrt", "erf", "erf_inv", "sin", "cos", "tan", "floor", "ceil", "atan2", "square", "sign",
        "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "population_count", "clz", "rem",
    }
)  # fmt: skip

# dtypes that a value may have in a kernel
KERNEL_DTYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16", "int8", "uint8", "int16", "uint16"})
# those with arithmetic; the others must be converted first
ARITHMETIC_DTYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16"})

F32 = jnp.float32


def refusal(op: Op) -> str | None:
    """Why a kernel cannot run the operation, as a clause that follows 'because'; None if it can."""
    name = op.prim
    for atom in (*op.inputs, op.out):
        dtype = atom.dtype
        if dtype not in KERNEL_DTYPES:
            return f"it computes `{name}` on {dtype} for each (q, kv), a type the TPU vector unit does not have"
    narrow = [a.dtype for a in (*op.inputs, op.out) if a.dtype not in ARITHMETIC_DTYPES]
    if narrow and name != "convert_element_type":
        return f"it computes `{name}` on {narrow[0]} for each (q, kv); convert to int32 first"
    if name in PLAIN or name in RULES:
        return None
    return f"it computes `{name}` for each (q, kv), which has no form in a TPU kernel"


def apply(op: Op, args: Sequence[jax.Array]) -> jax.Array:
    """On operands that broadcast; `refusal(op)` must be None."""
    rule = RULES.get(op.prim)
    if rule is not None:
        return rule(op, *args)
    return getattr(lax, op.prim)(*broadcast(args))


# calls of one float scalar that a kernel can compute
CALLS: dict[str, Callable[[jax.Array], jax.Array]] = {"one_minus_square": lambda x: (1.0 - x) * (1.0 + x)}


def unary_call(step: Call) -> bool:
    """Whether a Call is one of CALLS, on a float32 scalar."""
    one = len(step.arguments) == 1 and len(step.outs) == 1 and len(step.inputs) == 1
    return step.name in CALLS and one and step.outs[0].dtype == "float32"


def cost(op: Op) -> int:
    """A rough estimate of how many vector operations the operation takes for each vector of elements."""
    if op.prim in ("floordiv", "floormod", "rem", "div"):
        return 8
    if op.prim in ("exp", "exp2", "log", "tanh", "logistic", "sqrt", "rsqrt", "log1p", "convert_element_type"):
        return 2
    return 120 if op.prim == "threefry2x32" else 20 if op.prim in SLOW else 1


# operations that take some twenty vector operations
SLOW = frozenset(
    {
        "erf", "erf_inv", "sin", "cos", "tan", "atan2", "pow", "asin", "acos", "atan", "asinh", "acosh",
        "atanh", "erfc", "expm1", "cbrt",
    }
)  # fmt: skip


# ------------------------------------------------------------------- rewrites


def _as_float(function: Callable[..., jax.Array]) -> Rule:
    """Casts the operands to float32, and the result to the dtype of the operation."""

    def rule(op: Op, *args: jax.Array) -> jax.Array:
        floats = [jnp.asarray(a).astype(F32) for a in broadcast(args)]
        return function(*floats).astype(jnp.dtype(op.out.dtype))

    return rule


def _expm1(x: jax.Array) -> jax.Array:
    """By its Taylor polynomial of degree 7 for |x| < 0.3, because the subtraction would cancel digits there."""
    small = jnp.abs(x) < 0.3
    y = jnp.where(small, x, 0.0)
    series = y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    return jnp.where(small, series, jnp.exp(x) - 1.0)


def _cbrt(x: jax.Array) -> jax.Array:
    """exp(log|x| / 3), one Newton step, and the sign of x; 0, NaN and infinite numbers stay."""
    size = jnp.abs(x)
    plain = (size > 0) & (size < np.float32(np.inf))
    safe = jnp.where(plain, size, 1.0)
    root = jnp.exp(jnp.log(safe) * (1.0 / 3.0))
    root = root - (root - safe / (root * root)) * (1.0 / 3.0)
    return jnp.where(plain, jnp.where(x < 0, -root, root), x)


def _cosh(x: jax.Array) -> jax.Array:
    """exp(|x| - log 2) + exp(-|x| - log 2), which overflows no earlier than the result."""
    size, half = jnp.abs(x), np.float32(np.log(2))
    return jnp.exp(size - half) + jnp.exp(-size - half)


def _sinh(x: jax.Array) -> jax.Array:
    """From e = expm1(|x|): (e + e / (e + 1)) / 2 keeps digits near 0; exp(|x| - log 2) where e overflows."""
    e = _expm1(jnp.abs(x))
    half = 0.5 * (e + e / (e + 1.0))
    half = jnp.where(jnp.abs(x) > 80.0, jnp.exp(jnp.abs(x) - math.log(2.0)), half)
    return jnp.where(x < 0, -half, half)


def _asinh(x: jax.Array) -> jax.Array:
    """log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))) with the sign of x; log(2 |x|) where x^2 would overflow."""
    size = jnp.abs(x)
    root = jnp.log1p(size + size * size / (1.0 + jnp.sqrt(size * size + 1.0)))
    root = jnp.where(size > 1e9, jnp.log(size) + math.log(2.0), root)
    return jnp.where(x < 0, -root, root)


def _acosh(x: jax.Array) -> jax.Array:
    """log(x + sqrt((x - 1) (x + 1))); log(2 x) where the product would overflow."""
    return jnp.where(x > 1e9, jnp.log(x) + math.log(2.0), jnp.log(x + jnp.sqrt((x - 1.0) * (x + 1.0))))


def _atanh(x: jax.Array) -> jax.Array:
    return 0.5 * (jnp.log1p(x) - jnp.log1p(-x))


def _div(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """Rounds int32 and uint32 towards 0, and divides bfloat16 in float32."""
    if op.out.dtype in ("int32", "uint32"):
        return int_div(op, x, y)
    if op.out.dtype == "bfloat16":
        return _as_float(lambda a, b: a / b)(op, x, y)
    return lax.div(*broadcast([x, y]))


def _select(op: Op, which: jax.Array, *given: jax.Array) -> jax.Array:
    """select_n; an integer `which` that is the number of no case takes the last one."""
    which, *cases = broadcast([which, *given])
    if op.inputs[0].dtype != "bool":
        chosen = cases[-1]
        for i in range(len(cases) - 2, -1, -1):
            chosen = _choose(op.out.dtype, which == np.int32(i), cases[i], chosen)
        return chosen
    return _choose(op.out.dtype, which, cases[1], cases[0])


def _choose(dtype: str, which: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """A select; of booleans by and/or, because Mosaic cannot select between them."""
    if dtype == "bool":
        return (which & yes) | (~which & no)
    return jnp.where(which, yes, no)


def _convert(op: Op, x: jax.Array) -> jax.Array:
    """convert_element_type, by conversions that Mosaic has."""
    source, target = op.inputs[0].dtype, op.out.dtype
    x = jnp.asarray(x)
    if source == target:
        return x
    if target == "bool":
        return x != jnp.zeros((), x.dtype)
    if source == "bool" and target != "int32":
        x = x.astype(jnp.int32)
    return x.astype(jnp.dtype(target))


def _bool_compare(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """A comparison; of booleans, where False is less than True, by and, or, xor and not."""
    x, y = broadcast([x, y])
    if op.inputs[0].dtype != "bool":
        return getattr(lax, op.prim)(x, y)
    if op.prim in ("eq", "ne"):
        differ = x ^ y
        return differ if op.prim == "ne" else ~differ
    if op.prim in ("lt", "gt"):
        return (~x & y) if op.prim == "lt" else (x & ~y)
    return (~x | y) if op.prim == "le" else (x | ~y)


def _bool_arithmetic(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """max, min, add or mul; of booleans by and (min, mul) and or (max, add)."""
    x, y = broadcast([x, y])
    if op.out.dtype != "bool":
        return getattr(lax, op.prim)(x, y)
    return (x & y) if op.prim in ("min", "mul") else (x | y)


def _integer_pow(op: Op, x: jax.Array) -> jax.Array:
    return lax.integer_pow(x, int(typing.cast(int, dict(op.params)["y"])))


def _pow(op: Op, x: jax.Array, y: jax.Array) -> jax.Array:
    """In float32; an integer y is rounded to float32."""
    x, y = broadcast([x, y])
    return jnp.power(jnp.asarray(x).astype(F32), jnp.asarray(y).astype(F32)).astype(jnp.dtype(op.out.dtype))


def _sign(op: Op, x: jax.Array) -> jax.Array:
    """-1, 0 or 1 in the dtype of x; NaN for NaN."""
    if op.out.dtype == "uint32":
        return (x != 0).astype(jnp.uint32)
    one = jnp.ones((), x.dtype)
    zero = jnp.zeros((), x.dtype)
    signed = jnp.where(x > 0, one, jnp.where(x < 0, -one, zero))
    return signed if op.out.dtype == "int32" else jnp.where(x == x, signed, x)


def _is_finite(op: Op, x: jax.Array) -> jax.Array:
    return jnp.abs(jnp.asarray(x).astype(F32)) < np.float32(np.inf)


def _round(op: Op, x: jax.Array) -> jax.Array:
    return lax.round(x, lax.RoundingMethod(int(typing.cast(int, dict(op.params).get("rounding_method", 0)))))


def _bitcast(op: Op, x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(op.out.dtype))


def _total_order(function: Callable[..., jax.Array]) -> Rule:
    """The rule of a comparison in total order: `function` of the operands in float32."""
    return lambda op, *args: function(*(jnp.asarray(a).astype(F32) for a in broadcast(args)))


def _bitwise(function: Callable[..., jax.Array]) -> Rule:
    return lambda op, *args: function(*broadcast(args))


def _threefry2x32(op: Op, *words: jax.Array) -> jax.Array:
    """One word of the hash of four words."""
    return threefry2x32(*broadcast(words))[typing.cast(int, dict(op.params)["word"])]


RULES: dict[str, Rule] = {
    "expm1": _as_float(_expm1),
    "erfc": _as_float(lambda x: 1.0 - lax.erf(x)),
    "cbrt": _as_float(_cbrt),
    "sinh": _as_float(_sinh),
    "cosh": _as_float(_cosh),
    "asinh": _as_float(_asinh),
    "acosh": _as_float(_acosh),
    "atanh": _as_float(_atanh),
    "atan": _as_float(lambda x: jnp.arctan2(x, jnp.ones_like(x))),
    "asin": _as_float(lambda x: jnp.arctan2(x, jnp.sqrt((1.0 - x) * (1.0 + x)))),
    "acos": _as_float(lambda x: jnp.arctan2(jnp.sqrt((1.0 - x) * (1.0 + x)), x)),
    "sin": _as_float(jnp.sin),
    "cos": _as_float(jnp.cos),
    "tan": _as_float(jnp.tan),
    "erf": _as_float(lax.erf),
    "erf_inv": _as_float(lax.erf_inv),
    "logistic": _as_float(lax.logistic),
    "log1p": _as_float(jnp.log1p),
    "div": _div,
    "rem": rem,
    "floordiv": floordiv,
    "floormod": floormod,
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "sign": _sign,
    "is_finite": _is_finite,
    "round": _round,
    "and": _bitwise(lambda x, y: x & y),
    "or": _bitwise(lambda x, y: x | y),
    "xor": _bitwise(lambda x, y: x ^ y),
    "not": _bitwise(lambda x: ~x),
    "threefry2x32": _threefry2x32,
    **{name: _total_order(function) for name, function in TOTAL_ORDER.items()},
    **{name: _bool_compare for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _bool_arithmetic for name in ("max", "min", "add", "mul")},
}
