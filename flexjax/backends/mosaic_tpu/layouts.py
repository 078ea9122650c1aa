"""Arrays of heads as kernels read them, in both layouts, with the extra features folded into the head dim.

Kernels read blocks [tokens, dim] of one head. Arrays [B, N, T, D] (BNTH) hold them as they are. Arrays [B, T, N, D] (BTNH)
hold them too when D is a multiple of 128: [B, T, N * D] is the same memory, and a head is a block of lanes of it. Other BTNH
arrays are transposed.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu.hoisted_operands import ZERO
from flexjax.backends.mosaic_tpu.vector_ops import LANES
from flexjax.backends.mosaic_tpu.visit_order import VisitOrder
from flexjax.plan.kernel_plan import KernelPlan, Operands


class HeadTileAt(typing.Protocol):
    """(grid indices and prefetched references of an index map) -> batch entry, head, token tile."""

    def __call__(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """How an array of heads, of sizes [batch, heads, length, dim], lies in memory for a kernel."""

    batch: int
    heads: int
    length: int
    dim: int
    tokens_first: bool

    @property
    def heads_in_lanes(self) -> bool:
        """Whether heads are blocks of lanes of [batch, length, heads * dim]."""
        return self.tokens_first and (self.dim % LANES == 0 or self.heads == 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that the kernel gets."""
        if self.heads_in_lanes:
            return (self.batch, self.length, self.heads * self.dim)
        return (self.batch, self.heads, self.length, self.dim)

    def to_kernel(self, array: jax.Array) -> jax.Array:
        """An array in the layout of the call -> `shape`."""
        if self.heads_in_lanes:
            return array.reshape(self.shape)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def from_kernel(self, array: jax.Array) -> jax.Array:
        """The inverse of `to_kernel`."""
        if self.heads_in_lanes:
            return array.reshape(self.batch, self.length, self.heads, self.dim)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def spec(self, block: int, at: HeadTileAt) -> pl.BlockSpec:
        """Block spec of `block` tokens of one head."""
        if self.heads_in_lanes:

            def lane_index(*grid: jax.Array) -> tuple:
                b, h, i = at(*grid)
                return b, i, h

            return pl.BlockSpec((None, block, self.dim), lane_index)

        def head_index(*grid: jax.Array) -> tuple:
            b, h, i = at(*grid)
            return b, h, i, ZERO

        return pl.BlockSpec((None, None, block, self.dim), head_index)


@dataclasses.dataclass(frozen=True)
class FoldedShapes:
    """Sizes of a call with the extra features folded in: `dim` = D + R, and one number of key/value heads for both."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    value_dim: int
    tokens_first: bool

    @classmethod
    def of(cls, plan: KernelPlan) -> "FoldedShapes":
        heads = max(plan.kv_heads, plan.extra_heads) if plan.extra_dim else plan.kv_heads
        dim = plan.head_dim + plan.extra_dim
        tokens_first = plan.layout == "BTNH"
        return cls(plan.batch, plan.q_heads, heads, plan.q_len, plan.kv_len, dim, plan.value_dim, tokens_first)

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads

    def _layout(self, heads: int, length: int, dim: int) -> HeadLayout:
        return HeadLayout(self.batch, heads, length, dim, self.tokens_first)

    @property
    def query(self) -> HeadLayout:
        return self._layout(self.heads, self.q_len, self.dim)

    @property
    def key(self) -> HeadLayout:
        return self._layout(self.kv_heads, self.kv_len, self.dim)

    @property
    def value(self) -> HeadLayout:
        return self._layout(self.kv_heads, self.kv_len, self.value_dim)

    @property
    def out(self) -> HeadLayout:
        return self._layout(self.heads, self.q_len, self.value_dim)


@dataclasses.dataclass(frozen=True)
class IndexMaps:
    """Index maps of a kernel: from a grid step to the block of each array. `group`: query heads of one key head."""

    order: VisitOrder
    group: int

    def query(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, h, i, _ = self.order.tile_at(*grid)
        return b, h, i

    def key(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, h, _, j = self.order.tile_at(*grid)
        return b, lax.div(h, np.int32(self.group)) if self.group > 1 else h, j

    def row(self, *grid: jax.Array) -> tuple:
        """Of an array [B, N, 1, T]."""
        b, h, i, _ = self.order.tile_at(*grid)
        return b, h, ZERO, i

    def head(self, *grid: jax.Array) -> tuple:
        """Of an array [B, N, x, y] with one block a head."""
        b, h, _, _ = self.order.tile_at(*grid)
        return b, h, ZERO, ZERO

    def tile(self, *grid: jax.Array) -> tuple:
        """Of an array [B, N, T, S]."""
        return self.order.tile_at(*grid)

    def key_column(self, *grid: jax.Array) -> tuple:
        """Of an array [B, M, group, 1, S]."""
        b, m, j = self.key(*grid)
        return b, m, ZERO, ZERO, j

    def row_spec(self, block: int) -> pl.BlockSpec:
        """Block spec of `block` queries of an array [B, N, 1, T]."""
        return pl.BlockSpec((None, None, 1, block), self.row)


def fold(plan: KernelPlan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value with the extra features folded in, in the shapes that kernels read (see FoldedShapes)."""
    shapes = FoldedShapes.of(plan)
    q, k, v = operands.query, operands.key, operands.value
    if plan.extra_dim:
        assert operands.query_extra is not None
        assert operands.key_extra is not None
        dim = 2 if shapes.tokens_first else 1
        repeat_heads = lambda x: jnp.repeat(x, shapes.kv_heads // x.shape[dim], axis=dim)
        q = jnp.concatenate([q, operands.query_extra.astype(q.dtype)], -1)
        k = jnp.concatenate([repeat_heads(k), repeat_heads(operands.key_extra.astype(k.dtype))], -1)
        v = repeat_heads(v)
    return shapes.query.to_kernel(q), shapes.key.to_kernel(k), shapes.value.to_kernel(v)


def sum_repeated_heads(array: jax.Array, heads: int, dim: int) -> jax.Array:
    """The transpose of the repetition of heads in `fold`: dimension `dim` summed down to `heads` heads, in float32."""
    if array.shape[dim] == heads:
        return array
    shape = (*array.shape[:dim], heads, array.shape[dim] // heads, *array.shape[dim + 1 :])
    return array.reshape(shape).astype(jnp.float32).sum(dim + 1).astype(array.dtype)


def rows_to_kernel(array: jax.Array, tokens_first: bool) -> jax.Array:
    """A number for each row of scores, [B, T, N] or [B, N, T] -> float32 [B, N, 1, T]."""
    array = array.astype(jnp.float32)
    return (jnp.swapaxes(array, 1, 2) if tokens_first else array)[:, :, None, :]


def rows_from_kernel(array: jax.Array, tokens_first: bool) -> jax.Array:
    """The inverse of `rows_to_kernel`, in the dtype that the array has."""
    array = array[:, :, 0, :]
    return jnp.swapaxes(array, 1, 2) if tokens_first else array
