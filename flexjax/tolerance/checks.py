"""Checks of the arguments tolerance and score_bound, with a ValueError for each mistake."""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.errors import bad_argument, kind_of

Array = jax.Array


def check_tolerance(tolerance: object) -> float:
    """The argument tolerance as a float. Raises ValueError unless it is a Python number from 0 to below 0.5."""
    expected = "a Python float of at least 0 and less than 0.5, or None"
    if isinstance(tolerance, Array | np.ndarray):
        got = "traced" if isinstance(tolerance, Tracer) else kind_of(tolerance)
        raise bad_argument(
            "tolerance", got, expected, "It is decided while tracing what may go: make it a static argument of jit."
        )
    number = isinstance(tolerance, int | float | np.number) and not isinstance(tolerance, bool)
    if not number or not 0 <= typing.cast(float, tolerance) < 0.5:
        raise bad_argument("tolerance", repr(tolerance), expected, "2.0**-24 is below the rounding of float32.")
    return float(typing.cast(float, tolerance))


def check_bound(bound: object, shape: Sequence[int]) -> Array | None:
    """The argument score_bound as an array of four dims, each 1 or that of `shape`: B, N, query and key blocks."""
    if bound is None:
        return None
    number = isinstance(bound, int | float | np.number) and not isinstance(bound, bool)
    array: typing.Any = np.asarray(bound) if number else bound
    if isinstance(array, Array | np.ndarray) and array.ndim <= 4:
        dims = (*array.shape, *[1] * (4 - array.ndim))
        real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
        bad = not isinstance(array, Tracer) and not (np.asarray(array) >= 0).all()
        if real and not bad and all(n in (1, most) for n, most in zip(dims, shape, strict=True)):
            if isinstance(array, Tracer):
                return _rounded_up(jnp.abs(jax.lax.stop_gradient(array))).reshape(dims)
            with jax.ensure_compile_time_eval():  # a number stays known inside jit
                return _rounded_up(array).reshape(dims)
    shaped = isinstance(array, Array | np.ndarray) and array.ndim > 0
    raise bad_argument(
        "score_bound",
        f"{array.dtype.name}{list(array.shape)}" if shaped else repr(bound),
        f"a number of at least 0, or numbers of shape {list(shape)} or of its first dims, 1 for all",
        "The dims are batch entries, heads, blocks of queries and blocks of keys.",
    )


def _rounded_up(bound: Array | np.ndarray) -> Array:
    """The bound, or somewhat more, in float32."""
    if bound.dtype.itemsize <= 4 and jnp.issubdtype(bound.dtype, jnp.floating):
        return jnp.asarray(bound, jnp.float32)
    if isinstance(bound, np.ndarray):
        with np.errstate(over="ignore"):
            near = bound.astype(np.float32)
        return jnp.asarray(np.where(near < bound, np.nextafter(near, np.float32(np.inf)), near))
    near = bound.astype(jnp.float32)
    return jnp.where(near.astype(bound.dtype) < bound, near * (1 + 2.0**-22), near)
