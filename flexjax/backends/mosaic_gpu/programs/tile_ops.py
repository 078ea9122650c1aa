"""One operation of a traced program on scalars, vectors or tiles of a Mosaic GPU kernel.

`apply` computes an operation of SUPPORTED; what Mosaic lacks is composed here of what it has. Floats are computed in
float32, integers in int32 or uint32 (narrower ones are wrapped after arithmetic), booleans as booleans. All operands of
an operation have one shape. Dtypes are given by name, such as "int8".
"""

import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu.programs.integer_division import integer_division
from flexjax.backends.tile_math import TOTAL_ORDER, threefry2x32
from flexjax.ir import program as ir

Value = jax.Array
"""An array or scalar inside a kernel; a literal operand is a numpy scalar, which has the same operators."""
NARROW_BITS = {"int8": 8, "int16": 16, "uint8": 8, "uint16": 16}
"""Integer dtypes that are computed in int32 -> their bits."""
DTYPES = {"bool", "float32", "bfloat16", "float16", "int32", "uint32", *NARROW_BITS}


def inner_dtype(name: str) -> type[np.generic]:
    """The dtype in which a kernel computes values whose dtype in the program is `name`."""
    if name == "bool":
        return np.bool_
    if name in ("float32", "bfloat16", "float16"):
        return np.float32
    return np.uint32 if name == "uint32" else np.int32


def is_float(name: str) -> bool:
    return name in ("float32", "bfloat16", "float16")


def _trunc(x: Value) -> Value:
    """x rounded toward zero; from 2^23 on every float32 is an integer already."""
    small = jnp.abs(x) < np.float32(1 << 23)
    return jnp.where(small, x.astype(jnp.int32).astype(jnp.float32), x)


def _floor(x: Value) -> Value:
    t = _trunc(x)
    return jnp.where(t > x, t - np.float32(1), t)


def _ceil(x: Value) -> Value:
    t = _trunc(x)
    return jnp.where(t < x, t + np.float32(1), t)


def _round_half_to_even(x: Value) -> Value:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _round_half_away(x: Value) -> Value:
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


def _log1p(x: Value) -> Value:
    """log(1 + x); near 0 by 2 atanh(x / (2 + x)) as a polynomial, because 1 + x would lose digits."""
    s = x / (np.float32(2) + x)
    s2 = s * s
    poly = np.float32(1 / 9)
    for n in (7, 5, 3, 1):
        poly = poly * s2 + np.float32(1 / n)
    return jnp.where(jnp.abs(x) < np.float32(0.25), np.float32(2) * s * poly, jnp.log(np.float32(1) + x))


def _expm1(x: Value) -> Value:
    """exp(x) - 1; near 0 by its Taylor polynomial, because the subtraction would cancel digits."""
    poly = x * np.float32(1 / 7) + np.float32(1)
    for n in (6, 5, 4, 3, 2):
        poly = poly * (x * np.float32(1 / n)) + np.float32(1)
    return jnp.where(jnp.abs(x) < np.float32(0.35), x * poly, jnp.exp(x) - np.float32(1))


def _logistic(x: Value) -> Value:
    # 1 / y = rsqrt(y)^2, within 2^-21: a division takes many more instructions
    root = lax.rsqrt(np.float32(1) + jnp.exp(-x))
    return root * root


def _reduced_angle(x: Value) -> Value:
    """x minus the nearest multiple of 2 pi; the error is 4e-6 at |x| = 4e5, and 0.03 at 1e6."""
    turns = _round_half_to_even(x * np.float32(1 / (2 * math.pi)))
    # In three parts, of which the first is exact up to 2^16 turns.
    x = x - turns * np.float32(6.28125)
    x = x - turns * np.float32(0.0019350051879882812)
    return x - turns * np.float32(3.0199159819e-07)


def _sin(x: Value) -> Value:
    """sin(x) of the reduced angle, because the instruction is accurate only there."""
    return jnp.sin(_reduced_angle(x))


def _cos(x: Value) -> Value:
    return jnp.cos(_reduced_angle(x))


def _pow(x: Value, y: Value) -> Value:
    """x ** y as exp2(y log2|x|), so the relative error grows as |y log2|x||; -0 counts as 0."""
    one, zero = np.float32(1), np.float32(0)
    base = jnp.abs(x)
    size = jnp.where(base == one, one, jnp.exp2(y * jnp.log2(base)))  # an infinite y times log2(1) is NaN
    whole = _trunc(y) == y
    half = y * np.float32(0.5)
    odd = whole & (_trunc(half) != half)
    negative = jnp.where(whole | (base == np.float32(math.inf)), jnp.where(odd, -size, size), np.float32(math.nan))
    out = jnp.where(x < zero, negative, size)
    return jnp.where((y == zero) | (x == one), one, out)


def _integer_pow(x: Value, y: int) -> Value:
    """x ** y by repeated squaring, for a Python int y."""
    if y < 0:
        return np.float32(1) / _integer_pow(x, -y)
    out, base = None, x
    while y:
        if y & 1:
            out = base if out is None else out * base
        y >>= 1
        base = base * base if y else base
    return jnp.ones_like(x) if out is None else out


def _float_rem(a: Value, b: Value) -> Value:
    """a - b * trunc(a / b), with an error, modulo b, up to 2^-24 |a|; a where b is infinite."""
    rest = a - b * _trunc(a / b)
    size = jnp.where(a < 0, -jnp.abs(b), jnp.abs(b))
    rest = jnp.where((a < 0) & (rest > 0) | (a > 0) & (rest < 0), rest + size, rest)  # the quotient was rounded up
    rest = jnp.where(jnp.abs(rest) >= jnp.abs(b), rest - size, rest)
    return jnp.where(jnp.abs(b) == np.float32(math.inf), a, rest)


def _sign(x: Value) -> Value:
    """-1, 0 or 1 in the dtype of x; NaN for NaN."""
    zero, one = (np.dtype(x.dtype).type(n) for n in (0, 1))
    out = jnp.where(x > zero, one, zero)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return out
    out = jnp.where(x < zero, -one, out)
    return jnp.where(x != x, x, out) if jnp.issubdtype(x.dtype, jnp.floating) else out


def _population_count(x: Value) -> Value:
    """The number of bits that are set, summed pairwise within the 32 bits."""
    u = x.astype(jnp.uint32)
    u = u - ((u >> 1) & np.uint32(0x55555555))
    u = (u & np.uint32(0x33333333)) + ((u >> 2) & np.uint32(0x33333333))
    u = (u + (u >> 4)) & np.uint32(0x0F0F0F0F)
    return ((u * np.uint32(0x01010101)) >> 24).astype(x.dtype)


def _cbrt(x: Value) -> Value:
    """The cube root as exp2(log2|x| / 3), so the relative error grows as |log2|x||."""
    size = jnp.exp2(jnp.log2(jnp.abs(x)) * np.float32(1 / 3))
    return jnp.where(x == 0, x, jnp.where(x < 0, -size, size))


def _cosh(x: Value) -> Value:
    """exp(|x| - log 2) + exp(-|x| - log 2), which overflows no earlier than the result."""
    size, half = jnp.abs(x), np.float32(math.log(2))
    return jnp.exp(size - half) + jnp.exp(-size - half)


def _sinh(x: Value) -> Value:
    """sinh from e = expm1(|x|): (e + e / (e + 1)) / 2, with the sign of x."""
    e = _expm1(jnp.abs(x))
    size = np.float32(0.5) * (e + e / (e + np.float32(1)))
    # e overflows soon after 80.
    size = jnp.where(jnp.abs(x) > np.float32(80), jnp.exp(jnp.abs(x) - np.float32(math.log(2))), size)
    return jnp.where(x < 0, -size, size)


def _asinh(x: Value) -> Value:
    """log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))) with the sign of x."""
    a = jnp.abs(x)
    size = _log1p(a + a * a / (np.float32(1) + jnp.sqrt(a * a + np.float32(1))))
    # x^2 overflows soon after 1e18.
    size = jnp.where(a > np.float32(1e18), jnp.log(a) + np.float32(math.log(2)), size)
    return jnp.where(x < 0, -size, size)


def _erf_inv(x: Value) -> Value:
    """The inverse of erf, by the polynomials that XLA uses (M. Giles, "Approximating the erfinv function", 2010)."""
    w = -_log1p(-x * x)
    near, far = w - np.float32(2.5), jnp.sqrt(w) - np.float32(3)
    p, q = np.float32(ERF_INV_NEAR[0]), np.float32(ERF_INV_FAR[0])
    for a, b in zip(ERF_INV_NEAR[1:], ERF_INV_FAR[1:], strict=True):
        p, q = np.float32(a) + p * near, np.float32(b) + q * far
    out = jnp.where(w < np.float32(5), p, q) * x
    return jnp.where(jnp.abs(x) == np.float32(1), x * np.float32(math.inf), out)


ERF_INV_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
ERF_INV_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _atan(x: Value) -> Value:
    return lax.atan2(x, jnp.ones_like(x))


_ONE, _HALF = np.float32(1), np.float32(0.5)
FLOAT_UNARY: dict[str, Callable[[Value], Value]] = {
    "exp": jnp.exp, "exp2": jnp.exp2, "log": jnp.log, "tanh": jnp.tanh, "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt, "sin": _sin, "cos": _cos, "tan": lambda x: _sin(x) / _cos(x), "logistic": _logistic,
    "log1p": _log1p, "expm1": _expm1, "floor": _floor, "ceil": _ceil, "erf": lax.erf, "erf_inv": _erf_inv,
    "erfc": lambda x: _ONE - lax.erf(x), "cbrt": _cbrt, "sinh": _sinh, "asinh": _asinh, "atan": _atan,
    "cosh": _cosh,
    "asin": lambda x: lax.atan2(x, jnp.sqrt((_ONE - x) * (_ONE + x))),
    "acos": lambda x: lax.atan2(jnp.sqrt((_ONE - x) * (_ONE + x)), x),
    "acosh": lambda x: jnp.log(x + jnp.sqrt((x - _ONE) * (x + _ONE))),
    "atanh": lambda x: _HALF * (_log1p(x) - _log1p(-x)),
    "is_finite": lambda x: jnp.abs(x) < np.float32(math.inf),
}  # fmt: skip
BOOL_COMPARE: dict[str, Callable[[Value, Value], Value]] = {
    "eq": lambda a, b: (a ^ b) ^ True, "ne": lambda a, b: a ^ b, "lt": lambda a, b: (a ^ True) & b,
    "le": lambda a, b: (a ^ True) | b, "gt": lambda a, b: a & (b ^ True), "ge": lambda a, b: a | (b ^ True),
}  # fmt: skip
COMPARE = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}
BITS = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
ARITHMETIC = {"add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min}
OTHER = frozenset(
    {
        "not", "neg", "abs", "sign", "square", "integer_pow", "pow", "div", "rem", "floordiv", "floormod", "atan2",
        "select_n", "convert_element_type", "reduce_precision", "bitcast_convert_type", "round", "shift_left",
        "shift_right_logical", "shift_right_arithmetic", "clz", "population_count", "threefry2x32", *TOTAL_ORDER,
    }
)  # fmt: skip
"""Operations that `apply` computes by a branch of their own."""
SUPPORTED = frozenset({*FLOAT_UNARY, *COMPARE, *BITS, *ARITHMETIC, *OTHER})
"""Operations that the kernels can compute on a tile."""


def precision_name(params: dict[str, object]) -> str | None:
    """The float dtype, by name, that `reduce_precision` with these parameters rounds to; None for another format."""
    bits = (params.get("exponent_bits"), params.get("mantissa_bits"))
    return {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}.get(bits)  # type: ignore[arg-type]


def _round_to(x: Value, dtype: str) -> Value:
    """x rounded to the nearest number that the float dtype `dtype` has, still as float32."""
    return x if dtype == "float32" else x.astype(dtype).astype(jnp.float32)


def _wrap(x: Value, dtype: str) -> Value:
    """The int32 x modulo 2^bits into the range of a narrower integer `dtype`."""
    if dtype not in NARROW_BITS:
        return x
    if dtype.startswith("u"):
        return x & np.int32((1 << NARROW_BITS[dtype]) - 1)
    shift = np.int32(32 - NARROW_BITS[dtype])
    return lax.shift_right_arithmetic(lax.shift_left(x, jnp.full_like(x, shift)), jnp.full_like(x, shift))


def _convert(x: Value, old: str, new: str) -> Value:
    """x as `convert_element_type` does it: floats to 8- and 16-bit integers saturate, integers wrap around."""
    if new == "bool":
        return x if old == "bool" else x != np.zeros((), x.dtype)
    if is_float(new):
        out = x.astype(jnp.float32) if old == "uint32" or is_float(old) else x.astype(jnp.int32).astype(jnp.float32)
        return _round_to(out, new)
    if is_float(old) and new in NARROW_BITS:
        low, high = (
            (-(1 << NARROW_BITS[new] - 1), (1 << NARROW_BITS[new] - 1) - 1)
            if new[0] == "i"
            else (0, (1 << NARROW_BITS[new]) - 1)
        )
        return jnp.clip(x, np.float32(low), np.float32(high)).astype(jnp.int32)
    target = inner_dtype(new)
    if old == "bool":
        x = x.astype(jnp.int32)
    return _wrap(x if x.dtype == target else x.astype(target), new)


def _shift(name: str, a: Value, n: Value, constant: bool) -> Value:
    """a shifted by n bits, jax's result outside of 0 .. 31; a `constant` n is within, and not compared."""
    function = {"shift_left": lax.shift_left, "shift_right_logical": lax.shift_right_logical}.get(
        name, lax.shift_right_arithmetic
    )
    if constant:
        return function(a, n)
    inside = (n >= np.zeros((), n.dtype)) & (n < np.asarray(32, n.dtype))
    limit = np.asarray(31, n.dtype)
    if name == "shift_right_arithmetic":
        return function(a, jnp.where(inside, n, limit))
    return jnp.where(inside, function(a, jnp.where(inside, n, limit)), np.zeros((), a.dtype))


def apply(step: ir.Op, args: list[Value], overhangs: bool) -> Value:
    """The result of an operation on operands of one shape in inner dtypes; NotImplementedError outside of SUPPORTED.

    overhangs   whether the tile may extend past the end of the attention matrix, where ranges of integers do not hold
    """
    name, params, dtype = step.prim, dict(step.params), step.out.dtype
    operand = step.inputs[0].dtype
    first = args[0]
    if name in FLOAT_UNARY:
        return FLOAT_UNARY[name](first)
    if name in COMPARE:
        return (BOOL_COMPARE if operand == "bool" else COMPARE)[name](*args)
    if name in TOTAL_ORDER:
        return TOTAL_ORDER[name](*args)
    if name == "threefry2x32":
        return threefry2x32(*args)[typing.cast(int, params["word"])]
    if name in BITS:
        return BITS[name](*args)
    if name in ARITHMETIC:
        if dtype == "bool":
            return {"add": lax.bitwise_or, "max": lax.bitwise_or}.get(name, lax.bitwise_and)(*args)
        return _wrap(ARITHMETIC[name](*args), dtype)
    if name == "not":
        return first ^ True if dtype == "bool" else _wrap(~first, dtype)
    if name == "neg":
        return _wrap(-first, dtype)
    if name == "abs":
        return first if first.dtype == jnp.uint32 else _wrap(jnp.abs(first), dtype)
    if name == "sign":
        return _sign(first)
    if name == "square":
        return _wrap(first * first, dtype)
    if name == "integer_pow":
        return _wrap(_integer_pow(first, typing.cast(int, params["y"])), dtype)
    if name == "pow":
        return _pow(first, args[1].astype(jnp.float32))
    if name == "atan2":
        return lax.atan2(*args)
    if name == "div" and is_float(dtype):
        divisor = step.inputs[1]
        if isinstance(divisor, ir.Lit) and divisor.value and math.isfinite(1 / float(divisor.value.real)):
            return first * np.float32(1 / float(divisor.value.real))
        return first / args[1]
    if name == "rem" and is_float(dtype):
        return _float_rem(first, args[1])
    if name in ("div", "rem", "floordiv", "floormod"):
        return _wrap(integer_division(name, step, first, args[1], overhangs), dtype)
    if name == "select_n":
        out = args[1]
        for n, case in enumerate(args[2:], 1):
            chosen = first if operand == "bool" else first >= np.asarray(n, first.dtype)
            out = chosen & case | (chosen ^ True) & out if dtype == "bool" else jnp.where(chosen, case, out)
        return out
    if name == "convert_element_type":
        return _convert(first, operand, dtype)
    if name == "reduce_precision":
        return _round_to(first, typing.cast(str, precision_name(params)))
    if name == "bitcast_convert_type":
        return lax.bitcast_convert_type(first, inner_dtype(dtype))
    if name == "round":
        even = "EVEN" in str(params.get("rounding_method", "")) or params.get("rounding_method") == 1
        return _round_half_to_even(first) if even else _round_half_away(first)
    if name.startswith("shift_"):
        if name == "shift_right_logical" and operand in ("int8", "int16"):
            first = first & np.int32((1 << NARROW_BITS[operand]) - 1)
        if name == "shift_right_arithmetic" and operand in ("uint8", "uint16"):
            first = _wrap(first, operand[1:])  # jax copies the top bit of unsigned integers, too
        bits = step.inputs[1]
        return _wrap(_shift(name, first, args[1], isinstance(bits, ir.Lit) and 0 <= bits.value < 32), dtype)
    if name == "clz":
        return lax.clz(first) - (
            np.int32(32 - NARROW_BITS[operand]) if operand in NARROW_BITS else np.zeros((), first.dtype)
        )
    if name == "population_count":
        return _population_count(first & np.int32((1 << NARROW_BITS[operand]) - 1) if operand in NARROW_BITS else first)
    raise NotImplementedError(f"The primitive `{name}` has no form on a tile.")
