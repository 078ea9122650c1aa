"""What runs in the simulator in place of the operations of this room, by the same names (machine/simulator.py)."""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_gpu.decode.bytes import WarpSoftmax, by_warp, from_rows, numbers_of_bytes, to_rows
from flexjax.backends.mosaic_gpu.decode.rows import ROWS
from flexjax.backends.mosaic_gpu.decode.setup import DecodeSetup
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPS
from flexjax.backends.tile_math import LOG2E


def padded_lengths(setup: DecodeSetup) -> tuple[int, int]:
    return ROWS, max(setup.items.stored_keys, setup.tile.block_kv)


def write_merged(partial: Ref, stats: Ref, out: Ref, out_stats: Ref, large_scores: bool) -> None:
    rows = partial.shape[1]
    tops = stats[:, 0, :]
    top = tops.max(0)
    unit = np.float32(LOG2E if large_scores else 1)
    factors = jnp.exp2((tops - jnp.where(jnp.isneginf(top), 0.0, top)) * unit)
    out[...] = (partial[...] * factors[:, :rows, None]).sum(0)
    out_stats[0] = top[:rows]
    out_stats[1] = (stats[:, 1, :] * factors).sum(0)[:rows]


def write_partials(target: Ref, stats: Ref, out: jax.Array, state: WarpSoftmax, rows: int, group: Scalar) -> None:
    sums = from_rows(out)
    for n in range(WARPS):
        target[group * WARPS + n] = sums[n].T[:rows]
        stats[group * WARPS + n, 0] = state.top[16 * n]
        stats[group * WARPS + n, 1] = state.total[16 * n : 16 * n + 16].sum(0)


def add_byte_values(
    values: Ref, weights: jax.Array, factor: jax.Array, out: jax.Array, stored: str, dtype: str
) -> jax.Array:
    columns = out.shape[1]
    rounded = by_warp(weights.astype(dtype).astype(jnp.float32))
    new = jnp.einsum("bwkc,bwkd->wdc", rounded, by_warp(numbers_of_bytes(values[...], stored)))
    before = from_rows(out) * factor.reshape(WARPS, 16, columns)[:, :1]
    return to_rows(before + new)


def byte_softmax(scores: jax.Array, state: WarpSoftmax, large_scores: bool) -> tuple[jax.Array, jax.Array, WarpSoftmax]:
    narrow = typing.cast(tuple[int, int], state.top.shape)
    largest = jnp.repeat(by_warp(scores).max((0, 2)), 16, axis=0)
    top = jnp.maximum(state.top, largest)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    unit = np.float32(LOG2E if large_scores else 1)
    factor = jnp.exp2((state.top - base) * unit)
    weights = jnp.exp2((scores.reshape(-1, *narrow) - base) * unit)
    return weights.reshape(scores.shape), factor, WarpSoftmax(top, state.total * factor + weights.sum(0))


def byte_scores(keys: Ref, queries: jax.Array, columns: int, stored: str, dtype: str) -> jax.Array:
    return numbers_of_bytes(keys[...], stored) @ queries.astype(jnp.float32).T


def query_fragments(queries: Ref) -> jax.Array:
    return queries[...]


def widen(source: Ref, target: Ref, stored: str, dtype: str) -> None:
    target[...] = numbers_of_bytes(source[...], stored).astype(dtype)


def store_row_vector(target: Ref, vector: jax.Array, rows: int) -> None:
    target[...] = vector[:rows]


def load_rows(source: Ref, columns: int, rows: int) -> jax.Array:
    return jnp.pad(source[...], ((0, ROWS - rows), (0, 0)))


def store_rows(target: Ref, tile: jax.Array, rows: int) -> None:
    target[...] = tile[:rows]


def scaled_columns(tile: jax.Array, scales: Sequence[Scalar]) -> jax.Array:
    if len(scales) == 1:
        return tile * scales[0]
    part = tile.shape[1] // len(scales)
    return tile * jnp.repeat(jnp.stack(scales), part)[None, :]
