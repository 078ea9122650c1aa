"""Checks of the arguments of mask and score mod factories. Each returns the value in the form that the mod uses.

Every check takes the name of the factory (`call`), the name of the argument (`name`), its value, and a sentence of `advice`;
the checks of arrays also take `shapes`, which maps each allowed rank to a spelling of it, such as `{1: "[T]"}`.
Every message names the factory and the argument, says what it got, what was expected and what to do.  Only types,
ranks and dtypes of arrays are checked, so traced arrays pass.
"""

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

LARGEST = 2**31 - 1
"""The largest position that int32 represents."""


def integer(call: str, name: str, value: object, least: int | None, advice: str) -> int:
    """Returns `value` as an int of at least `least` (None: any) that int32 represents, as positions are; else raises
    ValueError.

    A bool, a float and a tracer are no ints here; a concrete integer scalar of numpy or jax is.
    """
    number = _as_int(value)
    if number is None or (least is not None and number < least):
        wanted = "an int" if least is None else f"an int of at least {least}"
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected {wanted}. {advice}")
    if abs(number) > LARGEST:
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected an int of at most {LARGEST}. {advice}")
    return number


def integer_or_vector(call: str, name: str, value: ArrayLike, axis: str, least: int | None, advice: str) -> int | Array:
    """Returns `value` as an int, or as an int32 array `[]` or with one axis; else raises ValueError.

    axis:   the spelling of an array with one axis, such as "[B]", for errors
    least:  the smallest int that is accepted; None: any that int32 represents. Numbers in arrays are not compared with it

    Only an int of Python or numpy becomes an int. An array is of an integer type and not empty.
    """
    if isinstance(value, int | np.integer):
        return integer(call, name, value, least, advice)
    return integer_array(call, name, value, {0: "[]", 1: axis}, advice).astype(jnp.int32)


def positive_integers(call: str, name: str, value: object, axes: tuple[str, ...], advice: str) -> tuple[int, ...]:
    """Returns `value`, a tuple or list, as a tuple of ints of at least 1, one for each of the names `axes`; else raises ValueError.

    axes:   names of the elements, such as ("height", "width"), for errors
    """
    numbers = [_as_int(v) for v in value] if isinstance(value, Sequence) else []
    checked = tuple(n for n in numbers if n is not None and n >= 1)
    if len(numbers) != len(axes) or len(checked) != len(axes):
        wanted = f"({', '.join(axes)}), ints of at least 1"
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected {wanted}. {advice}")
    return checked


def integer_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a non-empty integer array whose rank is a key of `shapes`; else raises ValueError.

    It has the integer type that jax gives it, but int32 where that is int64 and the numbers are known and fit: kernels compute in 32
    bits. Numbers that the type does not hold are refused too.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{call}`: `{name}` is no array of numbers; expected integers {' or '.join(shapes.values())}. Rows of unequal length "
            f"are padded first. {advice}"
        ) from error
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected integers. {advice}")
    if array.size and (not isinstance(value, Array) or (array.dtype == jnp.int64 and not isinstance(value, Tracer))):
        given, info = np.asarray(value), jnp.iinfo(array.dtype)
        low, high = int(given.min()), int(given.max())
        if jnp.iinfo(jnp.int32).min <= low and high <= jnp.iinfo(jnp.int32).max:
            array = array.astype(jnp.int32) if array.dtype == jnp.int64 else array
        if low < info.min or high > info.max:
            raise ValueError(
                f"`{call}`: `{name}` has numbers from {low} to {high}; expected numbers that {array.dtype} holds. Number them "
                f"anew, as np.unique({name}, return_inverse=True)[1] does, the same in all arrays that are compared, or turn on "
                "jax_enable_x64."
            )
    return _of_rank(call, name, array, shapes, advice)


def bool_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a non-empty boolean array whose rank is a key of `shapes`; else raises ValueError."""
    array = jnp.asarray(value)
    if array.dtype != jnp.bool_:
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected bool. {advice}")
    return _of_rank(call, name, array, shapes, advice)


def float_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a non-empty floating array whose rank is a key of `shapes`; gradients pass. Else raises ValueError."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected floating. {advice}")
    return _of_rank(call, name, array, shapes, advice)


def finite_number(call: str, name: str, value: object, advice: str) -> float:
    """Returns `value`, a number of Python or numpy, as a finite float. Raises ValueError for others, for a bool and for arrays."""
    number = _as_float(value)
    if number is None:
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected a finite number. {advice}")
    return number


def positive_number(call: str, name: str, value: object, advice: str) -> float:
    """Returns `value`, a number of Python or numpy, as a finite float above 0. Raises ValueError for others, for a bool and for arrays."""
    number = _as_float(value)
    if number is None or number <= 0:
        raise ValueError(f"`{call}`: `{name}` is {value!r}; expected a finite number above 0. {advice}")
    return number


def positive_number_or_vector(call: str, name: str, value: ArrayLike, advice: str) -> float | Array:
    """Returns `value` as a finite float above 0, or as a floating array `[]` or `[N]` of any values; else raises ValueError.

    Only a number of Python or numpy becomes a float. An array of integers is refused, not converted, and so is an empty array.
    """
    if isinstance(value, int | float | np.number):
        return positive_number(call, name, value, advice)
    return float_array(call, name, value, {0: "[]", 1: "[N]"}, advice)


def _as_int(value: object) -> int | None:
    """Returns `value` as an int; None for a bool and for anything that does not convert without loss."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tracer, an array of floats or of several numbers
        return None


def _of_rank(call: str, name: str, array: Array, shapes: dict[int, str], advice: str) -> Array:
    """Returns `array` if its rank is a key of `shapes` and it is not empty; else raises ValueError."""
    if array.ndim not in shapes or 0 in array.shape:
        wanted = f"{' or '.join(shapes.values())}, not empty"
        raise ValueError(f"`{call}`: `{name}` has shape {array.shape}; expected {wanted}. {advice}")
    return array


def _as_float(value: object) -> float | None:
    """Returns `value` as a float; None for a bool, for anything that is not a number, and for infinities and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    return float(value) if math.isfinite(value) else None
