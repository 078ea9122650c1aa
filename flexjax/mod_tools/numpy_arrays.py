"""Copies numpy arrays to JAX arrays without a compiled program, and takes arrays out of objects that hold one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike


def as_array(value: ArrayLike) -> jax.Array:
    """A copy of `value`, with the type that jax gives the numbers: jax shares the memory of some numpy arrays."""
    # jnp.asarray compiles a program for each shape of numpy array: 7 ms on a CPU, more on a GPU; it places on a mesh
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(value.copy())
    return jnp.array(value) if isinstance(value, np.ndarray) else jnp.asarray(value)


def shown(value: object) -> str:
    """A value for a message; of an array, traced or not, its type."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{'a traced ' * isinstance(value, Tracer)}{value.dtype.name}{list(value.shape)}"
    return f"({', '.join(map(shown, value))})" if type(value) is tuple and len(value) > 1 else repr(value)


def unwrapped(value: Any) -> Any:
    """The array that an object with `__jax_array__` holds, such as a flax.nnx.Param; any other value as it is."""
    if isinstance(value, jax.Array | np.ndarray) or not hasattr(type(value), "__jax_array__"):
        return value
    return value.__jax_array__()
