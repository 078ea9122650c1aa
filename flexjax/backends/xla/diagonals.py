"""A function of q - kv spread over a tile, and the sums of a tile along its diagonals, without gathers.

A window holds one number for each diagonal of a key block of `bk` keys: element x belongs to q - kv = q0 - kv_start + x
- (bk - 1), where q0 and kv_start are the first of the `bq` queries of the tile and of the keys of the block.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def along_diagonals(windows: Array, bq: int, bk: int) -> Array:
    """Spreads windows [.., blocks, bq + bk - 1] over a tile [.., bq, blocks * bk], constant along diagonals of a block.

    out[i, j * bk + k] = windows[j, i - k + bk - 1] for query i and key k of block j.
    """
    length = bq + bk - 1
    *head, blocks, _ = windows.shape
    # Row i of a block is the reversed window from element bq - 1 - i on. L + 1 numbers (the L of a window and a zero,
    # which no entry of the tile gets), repeated and cut into rows of L, move by one element from row to row.
    turned = jnp.flip(windows, -1)
    ring = jnp.concatenate([turned[..., bq - 1 :], jnp.zeros_like(turned[..., :1]), turned[..., : bq - 1]], -1)
    rows = jnp.broadcast_to(ring[..., None, :], (*head, blocks, bq, length + 1)).reshape(*head, blocks, -1)
    rows = rows[..., : bq * length].reshape(*head, blocks, bq, length)[..., :bk]
    return jnp.moveaxis(rows, -3, -2).reshape(*head, bq, blocks * bk)


def sum_diagonals(tile: Array, bq: int, bk: int) -> Array:
    """The sum of each diagonal of each key block of a tile [.., bq, blocks * bk], as windows [.., blocks, bq + bk - 1].

    It is the transpose of along_diagonals: element i - k + bk - 1 of a window sums tile[i, j * bk + k].
    """
    length = bq + bk - 1
    *head, _, width = tile.shape
    blocks = width // bk
    rows = jnp.moveaxis(tile.reshape(*head, bq, blocks, bk), -2, -3)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, length - bk)]).reshape(*head, blocks, bq * length)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, bq)]).reshape(*head, blocks, bq, length + 1)
    ring = rows.sum(-2)
    turned = jnp.concatenate([ring[..., bk + 1 :], ring[..., :bk]], -1)
    return jnp.flip(turned, -1)
