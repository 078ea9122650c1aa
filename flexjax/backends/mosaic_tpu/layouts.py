"""Arrays of heads as kernels read them, in both layouts, with the extra features folded into the head dim.

Kernels read blocks [tokens, dim] of one head. Arrays [B, N, T, D] (BNTH) hold them as they are. Arrays [B, T, N, D]
(BTNH) hold them too when D is a multiple of 128 or N is 1: [B, T, N * D] is the same memory, and a head is a block of
lanes of it. Other BTNH arrays are transposed.
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
    """(grid indices and prefetched references) -> (batch entry, head, token tile); an index map starts from it."""

    def __call__(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """How an array [batch, heads, length, dim] lies in memory for a kernel."""

    batch: int
    heads: int
    length: int
    dim: int
    tokens_first: bool  # the layout of the call is BTNH

    @property
    def heads_in_lanes(self) -> bool:
        """Whether the kernel gets the array as [batch, length, heads * dim], where a head is a block of lanes."""
        return self.tokens_first and (self.dim % LANES == 0 or self.heads == 1)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.heads_in_lanes:
            return (self.batch, self.length, self.heads * self.dim)
        return (self.batch, self.heads, self.length, self.dim)

    def to_kernel(self, array: jax.Array) -> jax.Array:
        """From the layout of the call to the shape that the kernel gets."""
        if self.heads_in_lanes:
            return array.reshape(self.shape)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def from_kernel(self, array: jax.Array) -> jax.Array:
        """The inverse of `to_kernel`."""
        if self.heads_in_lanes:
            return array.reshape(self.batch, self.length, self.heads, self.dim)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def spec(self, block: int, at: HeadTileAt) -> pl.BlockSpec:
        """For blocks [block, dim]: `block` tokens of one head."""
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
    """Sizes of a call with the extra features folded in, and the layouts of its arrays."""

    batch: int
    heads: int  # query heads
    kv_heads: int  # the larger of the heads of key and key_extra, to which both and value are repeated
    q_len: int
    kv_len: int
    dim: int  # D + R: head dim and extra features
    value_dim: int
    tokens_first: bool  # the layout of the call is BTNH

    @classmethod
    def of(cls, plan: KernelPlan) -> "FoldedShapes":
        heads = max(plan.kv_heads, plan.extra_heads) if plan.extra_dim else plan.kv_heads
        dim = plan.head_dim + plan.extra_dim
        tokens_first = plan.layout == "BTNH"
        return cls(plan.batch, plan.q_heads, heads, plan.q_len, plan.kv_len, dim, plan.value_dim, tokens_first)

    @property
    def group(self) -> int:
        """Query heads of one key head of the folded arrays."""
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
    """Index maps of a kernel: from a grid step to the block of each array that the step's tile needs."""

    order: VisitOrder
    group: int  # query heads of one key head: group * M = N

    def query(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch entry, query head, query tile), for HeadLayout.spec."""
        b, h, i, _ = self.order.tile_at(*grid)
        return b, h, i

    def key(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch entry, key head, key tile), for HeadLayout.spec."""
        b, h, _, j = self.order.tile_at(*grid)
        return b, lax.div(h, np.int32(self.group)) if self.group > 1 else h, j

    def row(self, *grid: jax.Array) -> tuple:
        """For an array [B, N, 1, T] in blocks of a query tile."""
        b, h, i, _ = self.order.tile_at(*grid)
        return b, h, ZERO, i

    def row_of_head(self, *grid: jax.Array) -> tuple:
        """For an array [1, T] in blocks of a query tile; all batch entries and heads read the same."""
        return ZERO, self.order.tile_at(*grid)[2]

    def head(self, *grid: jax.Array) -> tuple:
        """For an array [B, N, x, y] with one block for each head."""
        b, h, _, _ = self.order.tile_at(*grid)
        return b, h, ZERO, ZERO

    def tile(self, *grid: jax.Array) -> tuple:
        """For an array [B, N, T, S] in blocks of a tile."""
        return self.order.tile_at(*grid)

    def key_column(self, *grid: jax.Array) -> tuple:
        """For an array [B, M, group, 1, S] in blocks of a key tile with all query heads of a group."""
        b, m, j = self.key(*grid)
        return b, m, ZERO, ZERO, j

    def columns_of_entry(self, *grid: jax.Array) -> tuple:
        """For an array [B, 1, S] in blocks of a key tile."""
        b, _, _, j = self.order.tile_at(*grid)
        return b, ZERO, j

    def row_spec(self, block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, 1, block), self.row)


def fold(plan: KernelPlan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(query, key, value) in the shapes that kernels read, with the extra features appended along the head dim.

    If key and key_extra differ in heads, the heads of both and of value are repeated to the larger number.
    """
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
    """The transpose of the repetition in `fold`: equal neighbours along `dim` are summed in float32."""
    if array.shape[dim] == heads:
        return array
    shape = (*array.shape[:dim], heads, array.shape[dim] // heads, *array.shape[dim + 1 :])
    return array.reshape(shape).astype(jnp.float32).sum(dim + 1).astype(array.dtype)


def rows_to_kernel(array: jax.Array, tokens_first: bool) -> jax.Array:
    """Numbers of queries and heads (lse, delta), [B, T, N] or [B, N, T], as float32 [B, N, 1, T]."""
    array = array.astype(jnp.float32)
    return (jnp.swapaxes(array, 1, 2) if tokens_first else array)[:, :, None, :]


def rows_from_kernel(array: jax.Array, tokens_first: bool) -> jax.Array:
    """The inverse of `rows_to_kernel`; the dtype stays."""
    array = array[:, :, 0, :]
    return jnp.swapaxes(array, 1, 2) if tokens_first else array
