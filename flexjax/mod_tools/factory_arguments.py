"""Checks of the arguments of mask and score mod factories. Each returns the value in the form that the mod uses.

A check takes the name of the factory (`call`), the name of the argument, its value, and a sentence of `advice`;
`shapes` maps each allowed rank to a spelling of it, such as `{1: "[T]"}`. All raise ValueError.
"""

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from flexjax.mod_tools.numpy_arrays import equal_array, shown, unwrapped

LARGEST = 2**31 - 1  # the largest position that int32 represents


def integer(call: str, name: str, value: object, least: int | None, advice: str) -> int:
    """`value` as an int of at least `least` (None: any) and of int32; a bool, a float and a tracer are none."""
    number = _as_int(value)
    if number is None or (least is not None and number < least):
        wanted = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"`{call}`: `{name}` is {shown(value)}; expected {wanted}. {advice}{_static(value)}")
    if abs(number) > LARGEST:
        bound = f"at least {-LARGEST}" if number < 0 else f"at most {LARGEST}"
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected an int of {bound}. {advice}")
    return number


def integer_or_vector(call: str, name: str, value: ArrayLike, axis: str, least: int | None, advice: str) -> int | Array:
    """`value` as an int, or as an int32 array `[]` or with one axis, spelled as `axis`, such as "[B]".

    Numbers in arrays are not compared with `least`.
    """
    if isinstance(value, int | np.integer):
        return integer(call, name, value, least, advice)
    return position_array(call, name, value, {0: "[]", 1: axis}, advice)


def positive_integers(call: str, name: str, value: object, axes: tuple[str, ...], advice: str) -> tuple[int, ...]:
    """`value` as a tuple of ints of at least 1, one for each of `axes`, such as ("height", "width")."""
    numbers = [_as_int(v) for v in value] if isinstance(value, Sequence) else []
    checked = tuple(n for n in numbers if n is not None and n >= 1)
    if len(numbers) != len(axes) or len(checked) != len(axes):
        wanted = f"({', '.join(axes)}), ints of at least 1"
        raise ValueError(f"`{call}`: `{name}` is {shown(value)}; expected {wanted}. {advice}{_static(value)}")
    return checked


def integer_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """`value` as a non-empty integer array whose rank is a key of `shapes`."""
    array, ends = _integers(call, name, value, shapes, advice)
    if ends is not None:
        # kernels compute in 32 bits
        if array.dtype == jnp.int64 and _hold(jnp.int32, ends):
            array = array.astype(jnp.int32)
        elif not _hold(array.dtype, ends):
            raise ValueError(
                f"`{call}`: `{name}` has numbers from {ends[0]} to {ends[1]}; expected numbers that {array.dtype} "
                f"holds. Number them anew, as np.unique({name}, return_inverse=True)[1] does, the same in all arrays "
                "that are compared, or turn on jax_enable_x64."
            )
    return _of_rank(call, name, array, shapes, advice)


def position_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """`value` as a non-empty int32 array whose rank is a key of `shapes`; traced numbers beyond int32 wrap around."""
    array, ends = _integers(call, name, value, shapes, advice)
    if ends is not None and not _hold(jnp.int32, ends):
        raise ValueError(
            f"`{call}`: `{name}` has numbers from {ends[0]} to {ends[1]}; expected numbers that int32 holds, as "
            f"positions are. {advice}"
        )
    array = _of_rank(call, name, array, shapes, advice)
    return array if array.dtype == jnp.int32 else array.astype(jnp.int32)


def _integers(
    call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str
) -> tuple[Array, tuple[int, int] | None]:
    """(`value` as an integer array of any rank, its smallest and largest number or None if they are not known)."""
    value = unwrapped(value)
    array = _array(call, name, value, "integers", shapes, advice)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected integers. {advice}")
    covered = isinstance(value, Array) and np.can_cast(array.dtype, np.int32)
    known = all(
        not isinstance(x, Tracer) and (not isinstance(x, Array) or x.is_fully_addressable)
        for x in jax.tree.leaves(value)
    )
    if covered or not known or not array.size:
        return array, None
    given = np.asarray(value)
    return array, (int(given.min()), int(given.max()))


def _array(call: str, name: str, value: ArrayLike, kind: str, shapes: dict[int, str], advice: str) -> Array:
    """`value` as an array of any type and rank; `kind` says in the error what its elements should be."""
    try:
        if isinstance(value, str):
            raise TypeError("jax.numpy would evaluate the text")
        return equal_array(unwrapped(value))
    except (TypeError, ValueError, OverflowError):
        given = "None" if value is None else f"a {type(value).__name__}, which is no array of numbers"
        raise ValueError(
            f"`{call}`: `{name}` is {given}; expected {kind} {' or '.join(shapes.values())}. Rows of unequal length "
            f"are padded first. {advice}"
        ) from None


def _hold(dtype: DTypeLike, ends: tuple[int, int]) -> bool:
    info = jnp.iinfo(dtype)
    return int(info.min) <= ends[0] and ends[1] <= int(info.max)


def bool_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """`value` as a non-empty boolean array whose rank is a key of `shapes`."""
    array = _array(call, name, value, "bools", shapes, advice)
    if array.dtype != jnp.bool_:
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected bool. {advice}")
    return _of_rank(call, name, array, shapes, advice)


def float_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """`value` as a non-empty floating array of its own dtype whose rank is a key of `shapes`; gradients pass."""
    array = _array(call, name, value, "floating numbers", shapes, advice)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected floating. {advice}")
    return _of_rank(call, name, array, shapes, advice)


def finite_number(call: str, name: str, value: object, advice: str) -> float:
    number = _as_float(value)
    if number is None:
        raise ValueError(f"`{call}`: `{name}` is {shown(value)}; expected a finite number. {advice}{_static(value)}")
    return number


def positive_number(call: str, name: str, value: object, advice: str) -> float:
    number = _as_float(value)
    if number is None or number <= 0:
        raise ValueError(
            f"`{call}`: `{name}` is {shown(value)}; expected a finite number above 0. {advice}{_static(value)}"
        )
    return number


def positive_number_or_vector(call: str, name: str, value: ArrayLike, advice: str) -> float | Array:
    """`value` as a finite float above 0, or as a floating array `[]` or `[N]` of any values."""
    # an array of integers is refused, not converted
    if isinstance(value, int | float | np.number):
        return positive_number(call, name, value, advice)
    return float_array(call, name, value, {0: "[]", 1: "[N]"}, advice)


def _static(value: object) -> str:
    """What to do with a traced number where a Python number is expected."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(value))
    return " It is compiled into the program: name it in static_argnames of jax.jit." if traced else ""


def _as_int(value: object) -> int | None:
    """`value` as an int by its `__index__`; None for a bool and for what has none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # no integer, a tracer, an array of floats or of several numbers
        return None


def _of_rank(call: str, name: str, array: Array, shapes: dict[int, str], advice: str) -> Array:
    if array.ndim not in shapes or 0 in array.shape:
        wanted = f"{' or '.join(shapes.values())}, not empty"
        raise ValueError(f"`{call}`: `{name}` has shape {array.shape}; expected {wanted}. {advice}")
    return array


def _as_float(value: object) -> float | None:
    """`value` as a float; None for a bool, for what is no number, and for infinities and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that no float holds
        return None
