"""Between the class of every block and the lists that kernels walk.

Lists are int32. `num` [batch, heads, rows] says how many entries of `index` [batch, heads, rows, width] count; they ascend,
the rest are 0.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array

EMPTY, PARTIAL, FULL = 0, 1, 2


def lists_of(flags: Array) -> tuple[Array, Array]:
    """(num, index) of the True columns of each row of bool [batch, heads, rows, columns]; traced, width = columns."""
    columns = flags.shape[-1]
    count = jnp.cumsum(flags, -1, dtype=jnp.int32)
    place = jnp.where(flags, count - 1, columns)
    number = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), flags.shape)
    flat_place = place.reshape(math.prod(flags.shape[:-1]), columns)
    rows = jnp.arange(flat_place.shape[0], dtype=jnp.int32)[:, None]
    index = (
        jnp.zeros(flat_place.shape, jnp.int32).at[rows, flat_place].set(number.reshape(flat_place.shape), mode="drop")
    )
    num = jnp.sum(flags, -1, dtype=jnp.int32)
    return num, index.reshape(flags.shape)


def lists_of_places(places: np.ndarray, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(num, index) from coordinates [n, 4] (batch, head, row, column), as narrow as the widest row. On the host."""
    b, h, row, columns = places.astype(np.int64).T
    rows = (b * shape[1] + h) * shape[2] + row
    last = int(columns.max()) + 1 if len(columns) else 1
    order = np.argsort(rows * last + columns)
    rows, columns = rows[order], columns[order]
    num = np.bincount(rows, minlength=math.prod(shape)).astype(np.int32)
    width = int(num.max()) if num.size else 0
    index = np.zeros((num.size, width), np.int32)
    first = np.concatenate([[0], np.cumsum(num)[:-1]]) if num.size else np.zeros(0, int)
    index[rows, np.arange(len(rows)) - first[rows]] = columns
    return num.reshape(shape), index.reshape(*shape, width)


def narrowed(num: Array, index: Array) -> tuple[Array, Array]:
    """The lists as narrow as the widest row, where they are known."""
    if isinstance(num, Tracer) or isinstance(index, Tracer) or not num.size:
        return num, index
    return num, index[..., : int(np.max(np.asarray(num)))]


def places_of_lists(num: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Coordinates [n, 4] of the entries that count. On the host."""
    live = np.arange(index.shape[-1]) < num[..., None]
    where = np.argwhere(live)
    return np.concatenate([where[:, :3], index[live][:, None]], 1)


def flags_of_lists(num: Array, index: Array, columns: int) -> Array:
    """bool [batch, heads, rows, columns] of the entries that count; traced."""
    live = jnp.arange(index.shape[-1], dtype=jnp.int32) < num[..., None]
    place = jnp.where(live, index, columns)
    flat = place.reshape(math.prod(num.shape), place.shape[-1])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flags = jnp.zeros((flat.shape[0], columns), bool).at[rows, flat].set(True, mode="drop")
    return flags.reshape(*place.shape[:-1], columns)
