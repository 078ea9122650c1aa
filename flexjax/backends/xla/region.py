"""Where a tile of the xla backend lies in the attention matrix.

A tile has `nb` batch entries from b0, `nh` query heads from h0, `bq` queries from position q0 and, side by side, one or
more key blocks of `bk` keys each, at the positions `kv_starts`. Positions are those of the whole problem
(ir/origin.py).
"""

import dataclasses

import jax
import jax.numpy as jnp

from flexjax.ir.program import KV, B, H, Q

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Region:
    """Where a tile lies in the attention matrix; starts may be traced."""

    b0: Array | int
    nb: int
    h0: Array | int
    nh: int
    q0: Array | int
    bq: int
    kv_starts: Array  # int32 [blocks]; the blocks need not be neighbours
    bk: int

    @property
    def blocks(self) -> int:
        return self.kv_starts.shape[0]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """An element for each entry of the tile: (nb, nh, bq, blocks * bk)."""
        return (self.nb, self.nh, self.bq, self.blocks * self.bk)

    def index(self, axis: int) -> Array:
        """Indices or positions along B, H, Q or KV, int32 of rank 4; they may lie past an end."""
        start = {B: self.b0, H: self.h0, Q: self.q0}
        size = {B: self.nb, H: self.nh, Q: self.bq}
        if axis == KV:
            return (self.kv_starts[:, None] + jnp.arange(self.bk, dtype=jnp.int32)[None]).reshape(1, 1, 1, -1)
        spread = [1, 1, 1, 1]
        spread[axis - B] = size[axis]
        return (start[axis] + jnp.arange(size[axis], dtype=jnp.int32)).reshape(spread)

    def differences(self) -> Array:
        """q - kv in each key block, int32 [1, 1, blocks, bq + bk - 1], ascending along the last axis."""
        t = jnp.arange(self.bq + self.bk - 1, dtype=jnp.int32) - (self.bk - 1)
        return (self.q0 - self.kv_starts[:, None] + t[None])[None, None]
