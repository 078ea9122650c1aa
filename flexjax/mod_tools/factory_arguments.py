"""Checks of the arguments of mask and score mod factories. Each returns the value in the form that the mod uses.

Every check takes the name of the factory (`call`), the name of the argument (`name`), its value, and a sentence of `advice`;
the checks of arrays also take `shapes`, which maps each allowed rank to a spelling of it, such as `{1: "[T]"}`.
Every message names the factory and the argument, says what it got, what was expected and what to do.  Of arrays the dtype, the
rank, whether they are empty and, where known integers do not fit their type, the numbers are checked; traced arrays pass.
"""

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from flexjax.mod_tools.numpy_arrays import as_array

LARGEST = 2**31 - 1
"""The largest position that int32 represents."""


def integer(call: str, name: str, value: object, least: int | None, advice: str) -> int:
    """Returns `value` as an int of at least `least` (None: any), as positions are; else raises ValueError, also for a magnitude above
    2^31 - 1.

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
    return position_array(call, name, value, {0: "[]", 1: axis}, advice)


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
    array, ends = _integers(call, name, value, shapes, advice)
    if ends is not None:
        if array.dtype == jnp.int64 and _hold(jnp.int32, ends):
            array = array.astype(jnp.int32)
        elif not _hold(array.dtype, ends):
            raise ValueError(
                f"`{call}`: `{name}` has numbers from {ends[0]} to {ends[1]}; expected numbers that {array.dtype} holds. Number them "
                f"anew, as np.unique({name}, return_inverse=True)[1] does, the same in all arrays that are compared, or turn on "
                "jax_enable_x64."
            )
    return _of_rank(call, name, array, shapes, advice)


def position_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a non-empty int32 array whose rank is a key of `shapes`: positions or numbers of tokens; else raises ValueError.

    Numbers that int32 does not hold are refused where they are known; those of a traced array wrap around.
    """
    array, ends = _integers(call, name, value, shapes, advice)
    if ends is not None and not _hold(jnp.int32, ends):
        raise ValueError(
            f"`{call}`: `{name}` has numbers from {ends[0]} to {ends[1]}; expected numbers that int32 holds, as positions are. {advice}"
        )
    return _of_rank(call, name, array, shapes, advice).astype(jnp.int32)


def _integers(
    call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str
) -> tuple[Array, tuple[int, int] | None]:
    """(`value` as an integer array of the type that jax gives it, its smallest and largest number). Raises ValueError for what is no array
    of integers; the rank is not checked.

    The second is None for an array that is empty, traced or of other processes, and for a jax array of a type that int32 covers,
    which is not read.
    """
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
    """`value` as an array of any type and rank; raises ValueError for what jax makes no array of, such as None and a list of rows of
    unequal length. `kind` says in the error what the elements should be.
    """
    try:
        if isinstance(value, str):
            raise TypeError("jax.numpy would evaluate the text")
        return as_array(value)
    except (TypeError, ValueError, OverflowError) as error:
        given = "None" if value is None else f"a {type(value).__name__}, which is no array of numbers"
        raise ValueError(
            f"`{call}`: `{name}` is {given}; expected {kind} {' or '.join(shapes.values())}. Rows of unequal length "
            f"are padded first. {advice}"
        ) from error


def _hold(dtype: DTypeLike, ends: tuple[int, int]) -> bool:
    """Whether an integer dtype holds all numbers from ends[0] to ends[1]."""
    info = jnp.iinfo(dtype)
    return int(info.min) <= ends[0] and ends[1] <= int(info.max)


def bool_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a boolean array. Raises ValueError for another dtype, a rank that is no key of `shapes`, and an empty array."""
    array = _array(call, name, value, "bools", shapes, advice)
    if array.dtype != jnp.bool_:
        raise ValueError(f"`{call}`: `{name}` has dtype {array.dtype}; expected bool. {advice}")
    return _of_rank(call, name, array, shapes, advice)


def float_array(call: str, name: str, value: ArrayLike, shapes: dict[int, str], advice: str) -> Array:
    """Returns `value` as a floating array of its own dtype; gradients pass. Raises ValueError for integers, another rank than the keys of
    `shapes`, and an empty array.
    """
    array = _array(call, name, value, "floating numbers", shapes, advice)
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
    """Returns `value` as an int by its `__index__`; None for a bool and for what has none or refuses: floats (2.0 too), tracers, arrays
    of floats or of several numbers.
    """
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
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that no float holds
        return None
