"""Literals of a program, and constant folding on operations whose operands are all literals."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flexjax.ir.program import Atom, Lit
from flexjax.ir.ranges import fits, is_integer


def literal(value: object, dtype: DTypeLike) -> Lit:
    """The literal of a number or bool in the dtype, a Python number; converted as by numpy's `astype`."""
    name = jnp.dtype(dtype).name
    # a float that is too large becomes inf (NaN in a type without inf); an integer wraps around
    with np.errstate(over="ignore"):
        array = np.asarray(value).astype(jnp.dtype(dtype))
    if jnp.issubdtype(array.dtype, jnp.bool_):
        return Lit(bool(array), name)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return Lit(int(array), name)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return Lit(float(array), name)
    return Lit(complex(array), name)


def evaluate_literals(prim: str, inputs: tuple[Atom, ...], dtype: str) -> Lit | None:
    """Constant folding: `prim` on literals, as a literal of `dtype`; None if the operation is left to the device.

    Folded are operations of PYTHON_RULES on integers, unless the result overflows or the divisor is 0, the logic of
    bools, and conversions of integers and bools. Float arithmetic is left to the device, which may round differently;
    of floats only conversions are folded, where `_converts_alike`.
    """
    if any(not (is_integer(a.dtype) or a.dtype == "bool") for a in inputs):
        if prim == "convert_element_type" and isinstance(inputs[0], Lit) and _converts_alike(inputs[0].value, dtype):
            return literal(inputs[0].value, dtype)
        return None
    values = [a.value for a in inputs if isinstance(a, Lit)]
    if prim == "convert_element_type":
        return literal(values[0], dtype)
    rule = PYTHON_RULES.get(prim)
    if rule is None or any(isinstance(v, bool) for v in values) != (prim in ("and", "or", "xor", "not", "select_n")):
        return None
    if prim in ("floordiv", "floormod", "div", "rem") and values[1] == 0:
        return None
    result = rule(*values)
    return literal(result, dtype) if isinstance(result, bool) or fits((result, result), dtype) else None


def _converts_alike(value: bool | int | float | complex, dtype: str) -> bool:
    """Whether a float or complex number converts to `dtype` in numpy as on every device."""
    if not is_integer(dtype):
        return jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating) or not isinstance(value, complex)
    # a float alone that the integer type represents, truncated towards 0
    info = jnp.iinfo(jnp.dtype(dtype))
    return isinstance(value, float) and math.isfinite(value) and info.min <= int(value) <= info.max


# results on Python integers or bools, in exact arithmetic; div and rem truncate toward 0
PYTHON_RULES: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": abs,
    "max": max,
    "min": min,
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": lambda a, b: a != b,
    "not": lambda a: not a,
    "sign": lambda a: (a > 0) - (a < 0),
}
