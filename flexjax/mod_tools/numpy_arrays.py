"""Copies numpy arrays to JAX arrays without a compiled program, and takes arrays out of objects that hold one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jax.typing import ArrayLike


def as_array(value: ArrayLike) -> jax.Array:
    """A copy of `value`, with the type that jax gives the numbers: jax shares the memory of some numpy arrays."""
    # jnp.asarray compiles a program for each shape of numpy array: 7 ms on a CPU, more on a GPU; it places on a mesh
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(value.copy())
    return jnp.array(value) if isinstance(value, np.ndarray) else jnp.asarray(value)


MOST_BYTES = 1 << 14  # bytes of an array that `equal_array` keeps


def equal_array(value: ArrayLike) -> jax.Array:
    """As `as_array`; outside of meshes equal small lists and numpy arrays give one array object, for caches."""
    if type(value) is list and value and all(type(x) is int for x in value):
        value = np.array(value)
    kind = value.dtype.kind if type(value) is np.ndarray and value.nbytes <= MOST_BYTES else ""
    if kind not in ("b", "i", "u", "f") or not jax.sharding.get_abstract_mesh().empty:
        return as_array(value)
    # jax.extend.backend.clear_backends makes devices anew
    place = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
    key = value.tobytes(), value.dtype.str, value.shape, jax.config.jax_enable_x64, place  # type: ignore[attr-defined]
    if (kept := _kept(*key)).is_deleted():  # by a user who deletes all jax.live_arrays()
        _kept.cache_clear()
        kept = _kept(*key)
    return kept


@functools.lru_cache(maxsize=128)
def _kept(numbers: bytes, dtype: str, shape: tuple[int, ...], *_: object) -> jax.Array:
    with eval_context():
        return jax.device_put(np.frombuffer(numbers, dtype).reshape(shape).copy())


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
