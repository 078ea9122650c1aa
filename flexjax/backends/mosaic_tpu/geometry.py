"""Sizes of one kernel: the attention matrix, its tiles, their orientation, and where a tile's diagonals are stored.

A kernel reads a value of q - kv from a *diagonal array*: one number for each diagonal of the attention matrix, padded
so that the window of every tile (the part with its diagonals) starts at a multiple of 128 lanes. In kernel coordinates
(rows of tiles, columns of tiles) the entry (row r, column c) of the matrix reads element `c - r + padded_rows`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.backends.mosaic_tpu.vmem import VmemTiles
from flexjax.integers import cdiv, round_up
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileGeometry:
    """Sizes of the attention matrix and of a tile, in tokens, counted in rows of the call."""

    batch: int
    heads: int  # query heads
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    q_axis: int  # 0: queries are the rows of a tile (sublanes) and keys its columns (lanes); 1: the other way round
    origin: OriginLayout | None = None

    @classmethod
    def of(cls, plan: KernelPlan, tiles: VmemTiles, q_axis: int) -> "TileGeometry":
        return cls(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, q_axis, plan.origin)

    @property
    def q_tiles(self) -> int:
        return cdiv(self.q_len, self.block_q)

    @property
    def kv_tiles(self) -> int:
        return cdiv(self.kv_len, self.block_kv)

    @property
    def tile_rows(self) -> int:
        return self.block_q if self.q_axis == 0 else self.block_kv

    @property
    def tile_columns(self) -> int:
        return self.block_kv if self.q_axis == 0 else self.block_q

    @property
    def padded_rows(self) -> int:
        """Of the matrix, rounded up to whole tiles."""
        return self.q_tiles * self.block_q if self.q_axis == 0 else self.kv_tiles * self.block_kv

    @property
    def padded_columns(self) -> int:
        """Of the matrix, rounded up to whole tiles."""
        return self.kv_tiles * self.block_kv if self.q_axis == 0 else self.q_tiles * self.block_q

    @property
    def window(self) -> int:
        """Lanes of a window, a multiple of 128: it has one element more than the tile has diagonals."""
        return round_up(self.tile_rows + self.tile_columns, LANES)

    @property
    def diagonals(self) -> int:
        """Lanes of the diagonal array, a multiple of 128, padded so that the window of every tile lies inside."""
        return round_up(self.padded_rows + self.padded_columns, LANES) + LANES

    def window_start(self, q_tile: jax.Array, kv_tile: jax.Array) -> jax.Array:
        """The element of the diagonal array at which the window of a tile starts, a multiple of 128; int32."""
        q_step = self.block_q // LANES if self.q_tiles > 1 else 0
        kv_step = self.block_kv // LANES if self.kv_tiles > 1 else 0
        q0, k0 = q_tile * np.int32(q_step), kv_tile * np.int32(kv_step)
        ahead = k0 - q0 if self.q_axis == 0 else q0 - k0
        before = (self.q_tiles - 1) * q_step if self.q_axis == 0 else (self.kv_tiles - 1) * kv_step
        # The multiplication by LANES comes last because the compiler then proves that the start is aligned.
        return (ahead + np.int32(before)) * np.int32(LANES)

    @property
    def _padding_before(self) -> int:
        """Elements before the first diagonal of the matrix."""
        return self.padded_rows + 1 - (self.q_len if self.q_axis == 0 else self.kv_len)

    def pad_diagonals(self, values: jax.Array) -> jax.Array:
        """[..., kv_len + q_len - 1] by ascending q - kv as a diagonal array [..., diagonals], with zeros around."""
        if self.q_axis == 0:
            values = jnp.flip(values, -1)  # now by ascending kv - q, from 1 - q_len
        before = self._padding_before
        after = self.diagonals - before - values.shape[-1]
        return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(before, after)])

    def unpad_diagonals(self, values: jax.Array) -> jax.Array:
        """The inverse of `pad_diagonals`, and its transpose."""
        start = self._padding_before
        values = values[..., start : start + self.q_len + self.kv_len - 1]
        return jnp.flip(values, -1) if self.q_axis == 0 else values
