"""Sizes of one kernel: the attention matrix, its tiles, their orientation, and where the diagonals of a tile are stored.

A kernel reads a value of q - kv from a *diagonal array*: one number for each diagonal of the attention matrix, padded so
that the window of every tile starts at a multiple of 128 lanes. In kernel coordinates (rows of tiles, columns of tiles)
the entry (row r, column c) of the matrix reads element `c - r + padded_rows` of that array. The window of a tile is the part of
the diagonal array that has the diagonals of the tile.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.backends.mosaic_tpu.vmem import Tiles
from flexjax.integers import cdiv, round_up
from flexjax.ir.origin import OriginLayout
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class TileGeometry:
    """Sizes of the attention matrix and of a tile, in tokens.

    batch, heads, q_len, kv_len   of the call; heads are query heads
    block_q, block_kv             queries and keys of a tile
    q_axis                        0: queries are the rows of a tile (sublanes) and keys its columns (lanes); 1: the other
                                  way round
    origin                        of the plan (ir/origin.py); all other numbers here count rows of the call
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    q_axis: int
    origin: OriginLayout | None = None

    @classmethod
    def of(cls, plan: KernelPlan, tiles: Tiles, q_axis: int) -> "TileGeometry":
        """The geometry of a kernel that computes a plan in these tiles.

        q_axis   0 if queries are the rows of a tile, 1 if keys are
        """
        return cls(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, q_axis, plan.origin)

    @property
    def q_tiles(self) -> int:
        """How many tiles cover the queries."""
        return cdiv(self.q_len, self.block_q)

    @property
    def kv_tiles(self) -> int:
        """How many tiles cover the keys."""
        return cdiv(self.kv_len, self.block_kv)

    @property
    def tile_rows(self) -> int:
        """Rows (sublanes) of a tile."""
        return self.block_q if self.q_axis == 0 else self.block_kv

    @property
    def tile_columns(self) -> int:
        """Columns (lanes) of a tile."""
        return self.block_kv if self.q_axis == 0 else self.block_q

    @property
    def padded_rows(self) -> int:
        """Rows of the matrix, rounded up to whole tiles."""
        return self.q_tiles * self.block_q if self.q_axis == 0 else self.kv_tiles * self.block_kv

    @property
    def padded_columns(self) -> int:
        """Columns of the matrix, rounded up to whole tiles."""
        return self.kv_tiles * self.block_kv if self.q_axis == 0 else self.q_tiles * self.block_q

    @property
    def window(self) -> int:
        """Length of a window: rows plus columns of a tile, one more than it has diagonals, rounded up to a multiple of 128 lanes."""
        return round_up(self.tile_rows + self.tile_columns, LANES)

    @property
    def diagonals(self) -> int:
        """Length of the diagonal array, a multiple of 128, padded so that the window of every tile lies inside."""
        return round_up(self.padded_rows + self.padded_columns, LANES) + LANES

    def window_start(self, q_tile: jax.Array, kv_tile: jax.Array) -> jax.Array:
        """The element of the diagonal array at which the window of a tile starts, a multiple of 128; int32.

        q_tile, kv_tile   numbers of the tile along queries and keys
        """
        q_step = self.block_q // LANES if self.q_tiles > 1 else 0
        kv_step = self.block_kv // LANES if self.kv_tiles > 1 else 0
        q0, k0 = q_tile * np.int32(q_step), kv_tile * np.int32(kv_step)
        ahead = k0 - q0 if self.q_axis == 0 else q0 - k0
        before = (self.q_tiles - 1) * q_step if self.q_axis == 0 else (self.kv_tiles - 1) * kv_step
        # The multiplication by LANES comes last because the compiler then proves that the start is aligned.
        return (ahead + np.int32(before)) * np.int32(LANES)

    @property
    def _padding_before(self) -> int:
        """Elements of the diagonal array before the first diagonal of the matrix."""
        return self.padded_rows + 1 - (self.q_len if self.q_axis == 0 else self.kv_len)

    def pad_diagonals(self, values: jax.Array) -> jax.Array:
        """The diagonal array [..., diagonals] of `values` [..., kv_len + q_len - 1], one for each diagonal by ascending q - kv.

        The values are put in the order in which the kernel's tiles read them, with zeros before and after.
        """
        if self.q_axis == 0:
            values = jnp.flip(values, -1)  # now by ascending kv - q, from 1 - q_len
        before = self._padding_before
        after = self.diagonals - before - values.shape[-1]
        return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(before, after)])

    def unpad_diagonals(self, values: jax.Array) -> jax.Array:
        """The values of a diagonal array [..., diagonals] by ascending q - kv, [..., kv_len + q_len - 1]; the padding is dropped.

        It is the inverse of `pad_diagonals`, and its transpose.
        """
        start = self._padding_before
        values = values[..., start : start + self.q_len + self.kv_len - 1]
        return jnp.flip(values, -1) if self.q_axis == 0 else values
