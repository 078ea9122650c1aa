"""The numbers behind a picture: scores, weights and masks of one batch entry and head, entry by entry or as means of blocks.

An entry is a pair of a query and a key; it is visible if the mask is True there. A picture has at most SIDE cells on a side. Up
to SIDE tokens a cell is one entry; a longer sequence is cut into equal blocks, and a cell is the mean over the visible entries
of a block. Rows of blocks are computed one after the other, so that memory is O(block x kv_len).
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


def block_of(length: int) -> int:
    """The number of tokens that one cell of a picture stands for on a side of `length` tokens."""
    return max(1, math.ceil(length / SIDE))


def visible(mask_mod: MaskMod | None, b: int, h: int, rows: np.ndarray, kv_len: int) -> Array:
    """Evaluates a mask on some rows of the attention matrix: bool [len(rows), kv_len], True where the query sees the key.

    mask_mod   the mask; None keeps everything
    b, h       the batch entry and the query head
    rows       the positions of the queries
    kv_len     number of keys
    """
    if mask_mod is None:
        return jnp.ones((len(rows), kv_len), bool)
    entry = lift_numpy(mask_mod)[0]
    at = lambda q, kv: jnp.asarray(entry(jnp.int32(b), jnp.int32(h), q, kv), bool)
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(jnp.asarray(rows, jnp.int32), jnp.arange(kv_len))


def scores_of_rows(
    query: Array, key: Array, score_mod: ScoreMod | None, b: int, h: int, rows: np.ndarray, scale: float
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
    at = lambda score, q, kv: jnp.asarray(entry(score, jnp.int32(b), jnp.int32(h), q, kv), jnp.float32)
    return jax.vmap(jax.vmap(at, (0, None, 0)), (0, 0, None))(
        dots, jnp.asarray(rows, jnp.int32), jnp.arange(key.shape[0])
    )


def cells(rows_of: Callable[[np.ndarray], tuple[Array, Array]], q_len: int, kv_len: int) -> np.ndarray:
    """Reduces the rows of a picture to its cells: float [q cells, kv cells], the mean over the visible entries of each block.

    rows_of         from the positions of some queries to (values, visible), both [number of queries, kv_len]
    q_len, kv_len   number of queries and of keys

    A cell without visible entries is NaN.
    """
    tall, wide = block_of(q_len), block_of(kv_len)
    cuts = np.arange(0, kv_len, wide)
    out = []
    for first in range(0, q_len, tall):
        values, on = (np.asarray(x) for x in rows_of(np.arange(first, min(first + tall, q_len))))
        total = np.add.reduceat(np.where(on, values, 0).sum(0, dtype=np.float64), cuts)
        count = np.add.reduceat(on.sum(0), cuts)
        out.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return np.stack(out)
