"""Copies numpy arrays to JAX arrays without a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def as_array(value: ArrayLike) -> jax.Array:
    """`jnp.asarray(value)`, with the type that jax gives the numbers.

    Eagerly, jnp.asarray compiles and runs a program for each shape of numpy array (jax 0.10 and later), which takes 7 ms on a CPU and more
    on a GPU. A numpy array of numbers or bools is therefore copied by jax.device_put, which compiles nothing. With a mesh in context
    it goes through jnp.asarray, which places it on the mesh.
    """
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(value)
    return jnp.asarray(value)
