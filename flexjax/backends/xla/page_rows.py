"""Fetches key blocks of keys and values in pages: only the pages that a visit computes, never the whole pool.

A key block is some whole pages, or a part of one page (rewrites/pages.py).
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.tile_sizes import TileSizes
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

Array = jax.Array


class Pool(typing.NamedTuple):
    """The keys or the values in pages."""

    tokens: Array  # [P, page, M, D]
    scale: Array | None  # float32 [M] or [P, M] of a quantised pool


class PageRows:
    """The page numbers of a call, padded to whole key blocks."""

    def __init__(self, plan: KernelPlan, sizes: TileSizes, pages: Array):
        self.page, self.block_kv = plan.page, sizes.block_kv
        short = cdiv(sizes.padded_kv, plan.page) - pages.shape[1]
        self.pages = jnp.pad(pages, ((0, 0), (0, short)), constant_values=-1)  # -1 past the end

    def take(self, given: Pool, heads: tuple[Array | int, int], b: Array, blocks: Array, dtype: jnp.dtype) -> Array:
        """The tokens of key blocks of batch entry b: [1, heads, blocks * block_kv, D], multiplied by the scales of a
        quantised pool.

        heads   (first key head, how many)

        Tokens of a page number that is not in the pool are 0.
        """
        pool, scale = given
        first = blocks * self.block_kv
        most = min(self.block_kv, self.page)
        starts = (first[:, None] + most * jnp.arange(self.block_kv // most, dtype=jnp.int32)).reshape(-1)
        number = self.pages.at[b, starts // self.page].get(mode="clip")
        inside = (number >= 0) & (number < pool.shape[0])
        number = jnp.where(inside, number, 0)
        m0, count = jnp.asarray(heads[0], jnp.int32), heads[1]
        zero = jnp.int32(0)

        def tokens(page: Array, slot: Array) -> Array:
            """`most` tokens from `slot` on, of the wanted heads: [most, heads, D]."""
            return lax.dynamic_slice(pool, (page, slot, m0, zero), (1, most, count, pool.shape[3]))[0]

        found = jax.vmap(tokens)(number, starts % self.page).astype(dtype)
        if scale is not None:
            by_page = scale if scale.ndim == 2 else scale[None]
            factor = jax.vmap(lambda page: lax.dynamic_slice(by_page, (page, m0), (1, count))[0])(
                number if scale.ndim == 2 else jnp.zeros_like(number)
            )
            found = found * factor[:, None, :, None].astype(dtype)
        found = jnp.where(inside[:, None, None, None], found, jnp.zeros((), dtype))
        return jnp.moveaxis(found, 2, 0).reshape(1, count, -1, pool.shape[3])
