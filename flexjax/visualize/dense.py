"""The numbers behind a picture: scores, weights and masks of one batch entry and head, entry by entry or as means of blocks.

An entry is a pair of a query and a key; it is visible if the mask is True there. A picture has at most SIDE cells on a side. Up
to SIDE tokens a cell is one entry; a longer sequence is cut into equal blocks, and a cell is the mean over the visible entries
of a block. Some rows are computed at a time, so that memory is O(rows x kv_len).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.trace.lift_numpy import lift_numpy
from flexjax.types import MaskMod, ScoreMod

Array = jax.Array

SIDE = 256
"""Most cells of a picture on a side."""

ROWS = 64
"""Rows of queries that are computed at a time, if a cell is no taller."""


def block_of(length: int) -> int:
    """The number of tokens that one cell of a picture stands for on a side of `length` tokens: length / SIDE, rounded up, at least 1."""
    return max(1, math.ceil(length / SIDE))


def visible(mask_mod: MaskMod | None, b: int, h: Array, rows: Array, kv_len: int) -> Array:
    """Evaluates a mask on some rows of the attention matrix: bool [len(rows), kv_len], True where the query sees the key.

    mask_mod   the mask; None keeps everything
    b, h       the batch entry and the query head
    rows       the positions of the queries
    kv_len     number of keys
    """
    if mask_mod is None:
        return jnp.ones((len(rows), kv_len), bool)
    entry = lift_numpy(mask_mod)[0]
    at = lambda q, kv: jnp.asarray(entry(jnp.int32(b), h, q, kv), bool)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(rows, jnp.arange(kv_len))


def scores_of_rows(
    query: Array, key: Array, score_mod: ScoreMod | None, b: int, h: Array, rows: Array, scale: float
) -> Array:
    """Computes the scores after score_mod on some rows of the attention matrix: float32 [len(rows), S].

    query, key   [T, D] and [S, D]: the queries of head h of batch entry b, and the keys that they read
    score_mod    None changes nothing
    rows         the positions of the queries
    scale        factor of the dot products
    """
    dots = scale * jnp.dot(query[rows].astype(jnp.float32), key.astype(jnp.float32).T, precision="highest")
    if score_mod is None:
        return dots
    entry = lift_numpy(score_mod)[0]
    at = lambda score, q, kv: jnp.asarray(entry(score, jnp.int32(b), h, q, kv), jnp.float32)
    return jax.vmap(jax.vmap(at, (0, None, 0)), (0, 0, None))(dots, rows, jnp.arange(key.shape[0]))


def cells(rows_of: Callable[[Array, Array], tuple[Array, Array]], h: int, q_len: int, kv_len: int) -> np.ndarray:
    """Reduces the rows of a picture to its cells: float [q cells, kv cells], the mean over the visible entries of each
    block.

    rows_of         from a head and the positions of some queries to (values, visible), both [number of queries,
                    kv_len]; called with int32 arrays of one shape, so that a jitted function compiles once for all rows
                    and heads; the last query is repeated to fill the last array, and is counted once
    h               the head
    q_len, kv_len   number of queries and of keys

    A cell without visible entries is NaN.
    """
    tall, wide = block_of(q_len), block_of(kv_len)
    cuts = np.arange(0, kv_len, wide)
    step = tall * max(1, min(ROWS, q_len) // tall)
    out = []
    for first in range(0, q_len, step):
        rows = np.arange(first, first + step)
        values, on = (np.asarray(x) for x in rows_of(jnp.int32(h), jnp.asarray(np.minimum(rows, q_len - 1), jnp.int32)))
        on = on & (rows < q_len)[:, None]
        total, count = (
            np.add.reduceat(np.add.reduceat(x, cuts, axis=1), np.arange(0, step, tall), axis=0)
            for x in (np.where(on, values, 0).astype(np.float64), on.astype(np.int64))
        )
        out.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return np.concatenate(out)[: -(-q_len // tall)]
