"""One pass over queries and keys: the largest norms of blocks, and the scores of witnesses.

XLA's max on a CPU loses NaN in arrays of some sizes, so `largest` marks it apart. What underflows, and what a kernel
rounds, is added to the norms.
"""

import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


class PagedKeys(typing.NamedTuple):
    """Keys [B, M, S, D] in pages."""

    # [P, page, M, D]; quantised: key = pool * scales, float32 [M] or [P, M]
    pool: Array
    scales: Array | None
    table: Array  # int32 [B, n], S = n * page
    norms: Array | None  # float32 [P, M], of each page; None: not known

    def at_rows(self, index: Array | np.ndarray) -> Array:
        """The keys [B, M, T, D] at the places `index`, [1 or B, T], in float32 or wider; 0 outside of the pool."""
        index, size = jnp.asarray(index), self.pool.shape[1]
        at = jnp.broadcast_to(index // size, (self.table.shape[0], index.shape[1]))
        page = jnp.take_along_axis(self.table, at, 1, mode="clip")
        found = self.pool.at[page, index % size].get(mode="clip")
        found = found if found.dtype.itemsize == 8 else found.astype(jnp.float32)
        if self.scales is not None:
            scale = self.scales if self.scales.ndim == 1 else self.scales.at[page].get(mode="clip")
            found = found * scale[..., None]
        return jnp.swapaxes(jnp.where(self._inside(page)[..., None, None], found, 0), 1, 2)

    def largest(self, size: int) -> Array:
        """The largest norm of each block of `size` keys, [B, M, blocks]; NaN where one is not finite."""
        assert self.norms is not None
        found = self.norms.at[self.table].get(mode="clip")
        found = jnp.where(jnp.isfinite(found), found, jnp.nan)
        found = jnp.moveaxis(jnp.where(self._inside(self.table)[..., None], found, 0), -1, 1)
        page = self.pool.shape[1]
        return jnp.repeat(found, page // size, -1) if size < page else largest(found, size // page)

    def _inside(self, page: Array) -> Array:
        return (page >= 0) & (page < self.pool.shape[0])


SMALLEST = 2.0**-62  # below this the square of a float32 may underflow


def rounding_of(dtype: str, precision: str, dim: int) -> float:
    """How far a kernel's score may be from the real one, relative to |scale| |q| |k|, where `dim` columns are summed.

    `precision` is a name of plan/precision.py.
    """
    eps = 2.0**-52 if dtype == "float64" else 2.0**-23
    # one pass of bfloat16 on a TPU, TF32 on a GPU; other names may stand for either
    inputs = 0.0 if dtype != "float32" or precision == "highest" else 2.0**-7
    return (4 * dim + 16) * eps + inputs


def norms(parts: Sequence[Array]) -> Array:
    """The length of each row of several arrays [.., dim], taken together as one vector; an upper bound of it."""
    dim = sum(x.shape[-1] for x in parts)
    total = typing.cast(Array, sum(jnp.sum(x * x, -1) for x in parts))
    return jnp.sqrt(total) + math.sqrt(dim) * SMALLEST


def largest(x: Array, size: int) -> Array:
    """The largest number of each block of `size` of the last axis, NaN where one is NaN; x is at least 0."""
    pad = -x.shape[-1] % size
    blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]).reshape(*x.shape[:-1], -1, size)
    bad = jnp.isnan(blocks).astype(jnp.int8).max(-1, initial=0)
    return jnp.where(bad == 1, jnp.nan, blocks.max(-1, initial=0))


def per_query_head(x: Array, heads: int, axis: int) -> Array:
    """x with its key heads repeated for the query heads of their groups."""
    return x if x.shape[axis] == heads else jnp.repeat(x, heads // x.shape[axis], axis, total_repeat_length=heads)


def product(query: Array, key: Array) -> Array:
    """The products of rows, [B, N, T], of query [B, N, T, D] and key [B, M, T, D], M dividing N."""
    batch, heads, tokens, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], tokens, dim)
    return jnp.sum(grouped * key[:, :, None], -1).reshape(batch, heads, tokens)


def at_rows(key: Array, index: Array | np.ndarray) -> Array:
    """The keys [B, M, T, D] at the places `index`, [1 or B, T], of key [B, M, S, D]."""
    if isinstance(index, np.ndarray) and index.shape[0] == 1:
        return key[:, :, index[0]]
    index = jnp.broadcast_to(jnp.asarray(index)[:, None, :, None], (key.shape[0], key.shape[1], index.shape[1], 1))
    return jnp.take_along_axis(key, index, 2, mode="clip")
