"""The numbers behind a picture: scores, weights and masks of one batch entry and head, by entry or as means of blocks.

A picture has at most SIDE cells on a side. Up to SIDE tokens a cell is one entry; a longer sequence is cut into equal
blocks, and a cell is the mean over the visible entries of a block.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flexjax.mod_tools.settings import users
from flexjax.trace.lift_numpy import lift_numpy
from flexjax.types import MaskMod, ScoreMod

Array = jax.Array

SIDE = 256  # most cells of a picture on a side

ROWS = 64  # rows of queries computed at a time, so that memory is O(rows x kv_len)


def block_of(length: int) -> int:
    return max(1, math.ceil(length / SIDE))


def visible(mask_mod: MaskMod | None, b: int, h: Array, rows: Array, kv_len: int) -> Array:
    """bool [len(rows), kv_len]: where the queries at positions `rows` see the key; None shows everything."""
    if mask_mod is None:
        return jnp.ones((len(rows), kv_len), bool)
    entry = users(lift_numpy(mask_mod)[0])
    at = lambda q, kv: jnp.asarray(entry(jnp.int32(b), h, q, kv), bool)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(rows, jnp.arange(kv_len))


def scores_of_rows(
    query: Array, key: Array, score_mod: ScoreMod | None, b: int, h: Array, rows: Array, scale: float
) -> Array:
    """float32 [len(rows), S]: scores after score_mod of the queries at positions `rows`; query [T, D], key [S, D]."""
    dots = scale * jnp.dot(query[rows].astype(jnp.float32), key.astype(jnp.float32).T, precision="highest")
    if score_mod is None:
        return dots
    entry = users(lift_numpy(score_mod)[0])
    at = lambda score, q, kv: jnp.asarray(entry(score, jnp.int32(b), h, q, kv), jnp.float32)
    return jax.vmap(jax.vmap(at, (0, None, 0)), (0, 0, None))(dots, rows, jnp.arange(key.shape[0]))


def cells(rows_of: Callable[[Array, Array], tuple[Array, Array]], h: int, q_len: int, kv_len: int) -> np.ndarray:
    """float [q cells, kv cells]: the mean over the visible entries of each block, NaN without any.

    rows_of         from a head and the positions of some queries to (values, visible), both [number of queries,
                    kv_len]; called with int32 arrays of one shape, so that a jitted function compiles once for all rows
                    and heads; the last query is repeated to fill the last array, and is counted once
    h               the head
    q_len, kv_len   number of queries and of keys

    A cell without visible entries is NaN. Raises ValueError inside a transformation, where the numbers are not known.
    """
    tall, wide = block_of(q_len), block_of(kv_len)
    cuts = np.arange(0, kv_len, wide)
    step = tall * max(1, min(ROWS, q_len) // tall)
    out = []
    for first in range(0, q_len, step):
        rows = np.arange(first, first + step)
        found = rows_of(jnp.int32(h), jnp.asarray(np.minimum(rows, q_len - 1), jnp.int32))
        if any(isinstance(x, Tracer) for x in found):
            raise ValueError(
                "A picture is drawn inside jit or another transformation, where numbers are traced; expected known "
                "numbers. Return the arrays from the transformed function, and draw outside of it."
            )
        values, on = map(np.asarray, found)
        on = on & (rows < q_len)[:, None]
        total, count = (
            np.add.reduceat(np.add.reduceat(x, cuts, axis=1), np.arange(0, step, tall), axis=0)
            for x in (np.where(on, values, 0).astype(np.float64), on.astype(np.int64))
        )
        out.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return np.concatenate(out)[: -(-q_len // tall)]
