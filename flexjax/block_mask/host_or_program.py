"""Operations on block lists that run on the host for numpy arrays, and in the caller's program otherwise.

Lists that are known while a call is traced are numpy arrays (plan/known_lists.py). What a kernel needs of them is then
computed once and is a constant of the program. The same operations on traced lists are about twenty small XLA kernels
in each step; XLA takes minutes to fold large ones.
"""

import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if typing.TYPE_CHECKING:
    Array = jax.Array
else:
    Array = jax.Array | np.ndarray


def known(*arrays: object) -> bool:
    """Whether every array is a numpy array; None stands for an array that is not there."""
    return all(x is None or isinstance(x, np.ndarray) for x in arrays)


def module_of(*arrays: object) -> typing.Any:
    """numpy if all arrays are known, else jax.numpy."""
    return np if known(*arrays) else jnp


MaybeArray = typing.TypeVar("MaybeArray", bound=jax.Array | None)


def not_folded(*arrays: MaybeArray) -> tuple[MaybeArray, ...]:
    """The arrays behind a barrier, past which XLA does not fold constants, which can take minutes."""
    return arrays if known(*arrays) else tuple(lax.optimization_barrier(arrays))


def largest_first(numbers: Array) -> Array:
    """int32 indices that sort the last axis from the largest to the smallest number, equal ones by index."""
    if known(numbers):
        order = np.argsort(-np.asarray(numbers), axis=-1, kind="stable")
        return order.astype(np.int32)  # pyright: ignore[reportReturnType]
    return jnp.argsort(-numbers, axis=-1, stable=True).astype(jnp.int32)


def sort_together(arrays: Sequence[Array]) -> list[Array]:
    """Arrays of one shape, sorted along the last axis by the first of them, equal entries by the second, and so on."""
    if known(*arrays):
        order = np.lexsort(tuple(reversed(arrays)), axis=-1)
        return [np.take_along_axis(np.asarray(x), order, axis=-1) for x in arrays]  # pyright: ignore[reportReturnType]
    return list(lax.sort([jnp.asarray(x) for x in arrays], num_keys=len(arrays)))


def counts_of(numbers: Array, length: int) -> Array:
    """How often each of 0 .. length - 1 occurs along the last axis of int32 [..., n]: int32 [..., length]."""
    lead = numbers.shape[:-1]
    rows = numbers.reshape(math.prod(lead), numbers.shape[-1])
    if known(numbers):
        counts = np.zeros((rows.shape[0], length + 1), np.int32)
        np.add.at(counts, (np.arange(rows.shape[0])[:, None], np.minimum(rows, length)), 1)
        return counts[:, :length].reshape(*lead, length)  # pyright: ignore[reportReturnType]
    made = jnp.zeros((rows.shape[0], length), jnp.int32)
    made = made.at[jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None], rows].add(1, mode="drop")
    return made.reshape(*lead, length)


def flat_constant(x: Array) -> Array:
    """x in one dimension; if it is known, with one more element, -1."""
    # XLA computes a constant of equal or of consecutive numbers in a kernel of its own; with the -1 it stays a constant
    flat = x.reshape(-1)
    return np.append(flat, np.int32(-1)) if known(flat) else flat  # pyright: ignore[reportReturnType]
