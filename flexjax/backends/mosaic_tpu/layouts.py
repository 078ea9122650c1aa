"""Arrays of heads as kernels want them, in either layout, and extra features folded into the head dim.

Kernels read [tokens, dim] blocks of one head. BNTH arrays have them as they are. BTNH arrays have them too when the dim is
a multiple of 128: [B, T, N * D] is the same memory, and head n is a block of lanes. Otherwise the array is transposed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu.tile_programs import LANES
from flexjax.plan.kernel_plan import KernelPlan, Operands

At = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""(grid indices and prefetched refs) -> batch, head, token tile."""

ZERO = np.int32(0)


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Where the heads of an array [batch, heads, length, dim] are in memory."""

    batch: int
    heads: int
    length: int
    dim: int
    tokens_first: bool

    @property
    def lanes(self) -> bool:
        """Heads are blocks of lanes of [batch, length, heads * dim]."""
        return self.tokens_first and (self.dim % LANES == 0 or self.heads == 1)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.lanes:
            return (self.batch, self.length, self.heads * self.dim)
        return (self.batch, self.heads, self.length, self.dim)

    def lay(self, array: jax.Array) -> jax.Array:
        if self.lanes:
            return array.reshape(self.shape)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def unlay(self, array: jax.Array) -> jax.Array:
        if self.lanes:
            return array.reshape(self.batch, self.length, self.heads, self.dim)
        return jnp.swapaxes(array, 1, 2) if self.tokens_first else array

    def spec(self, block: int, at: At) -> pl.BlockSpec:
        if self.lanes:

            def lane_index(*grid: jax.Array) -> tuple:
                b, h, i = at(*grid)
                return b, i, h

            return pl.BlockSpec((None, block, self.dim), lane_index)

        def head_index(*grid: jax.Array) -> tuple:
            b, h, i = at(*grid)
            return b, h, i, ZERO

        return pl.BlockSpec((None, None, block, self.dim), head_index)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The call with extra features folded in: `dim` = D + R, and one number of key/value heads for both."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    value_dim: int
    tokens_first: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def layout(self, heads: int, length: int, dim: int) -> HeadLayout:
        return HeadLayout(self.batch, heads, length, dim, self.tokens_first)

    @property
    def query(self) -> HeadLayout:
        return self.layout(self.heads, self.q_len, self.dim)

    @property
    def key(self) -> HeadLayout:
        return self.layout(self.kv_heads, self.kv_len, self.dim)

    @property
    def value(self) -> HeadLayout:
        return self.layout(self.kv_heads, self.kv_len, self.value_dim)

    @property
    def out(self) -> HeadLayout:
        return self.layout(self.heads, self.q_len, self.value_dim)


def problem_of(plan: KernelPlan) -> Problem:
    heads = max(plan.kv_heads, plan.extra_heads) if plan.extra_dim else plan.kv_heads
    return Problem(
        plan.batch,
        plan.q_heads,
        heads,
        plan.q_len,
        plan.kv_len,
        plan.head_dim + plan.extra_dim,
        plan.value_dim,
        plan.layout == "BTNH",
    )


def fold(plan: KernelPlan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of the Problem, laid for kernels."""
    problem = problem_of(plan)
    q, k, v = operands.query, operands.key, operands.value
    if plan.extra_dim:
        assert operands.query_extra is not None
        assert operands.key_extra is not None
        dim = 2 if problem.tokens_first else 1
        spread = lambda x: jnp.repeat(x, problem.kv_heads // x.shape[dim], axis=dim)
        q = jnp.concatenate([q, operands.query_extra.astype(q.dtype)], -1)
        k = jnp.concatenate([spread(k), spread(operands.key_extra.astype(k.dtype))], -1)
        v = spread(v)
    return problem.query.lay(q), problem.key.lay(k), problem.value.lay(v)


def fold_heads(array: jax.Array, heads: int, dim: int) -> jax.Array:
    """Sums the copies that `spread` made of each head."""
    if array.shape[dim] == heads:
        return array
    shape = (*array.shape[:dim], heads, array.shape[dim] // heads, *array.shape[dim + 1 :])
    return array.reshape(shape).astype(jnp.float32).sum(dim + 1).astype(array.dtype)


def row_values(array: jax.Array, tokens_first: bool) -> jax.Array:
    """lse-like [B, T, N] or [B, N, T] -> float32 [B, N, 1, T]."""
    array = array.astype(jnp.float32)
    return (jnp.swapaxes(array, 1, 2) if tokens_first else array)[:, :, None, :]


def unrow(array: jax.Array, tokens_first: bool) -> jax.Array:
    array = array[:, :, 0, :]
    return jnp.swapaxes(array, 1, 2) if tokens_first else array
