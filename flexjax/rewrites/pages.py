"""Keys and values in pages: the size of their key blocks, and the same call with contiguous keys."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.rewrite import Rewrite

Array = jax.Array


def whole_pages(page: int, most: int) -> int:
    """The tokens of a key block: the largest multiple of `page` up to `most`, or a divisor of a longer page."""
    if page <= most:
        return most // page * page
    return most if page % most == 0 else page


def contiguous_plan(plan: KernelPlan) -> KernelPlan:
    return dataclasses.replace(plan, page=0, stored_pages=0, cache_dtype=None)


def gathered(plan: KernelPlan, quantised_as: DTypeLike | None = None) -> Rewrite | None:
    """The call with the tokens of each batch entry in order; None without pages."""
    if not plan.page:
        return None

    def operands(given: Operands) -> Operands:
        numbers = given.pages
        assert numbers is not None

        def tokens(pool: Array, scale: Array | None) -> Array:
            found = tokens_of_pages(pool, scale, numbers, plan.score_dtype)
            if scale is not None and quantised_as is not None:
                found = found.astype(quantised_as)
            return found if plan.layout == "BTNH" else jnp.swapaxes(found, 1, 2)

        of_key, of_value = given.scales or (None, None)
        key, value = tokens(given.key, of_key), tokens(given.value, of_value)
        return given._replace(key=key, value=value, pages=None, scales=None)

    return Rewrite(contiguous_plan(plan), "pages: the keys and values of all pages of the table are gathered", operands)


def widened_pools(plan: KernelPlan) -> Rewrite:
    """The call, whose cache is quantised, with pools in the plan's dtype, multiplied by their scales."""

    def operands(given: Operands) -> Operands:
        assert given.scales is not None

        def wide(pool: Array, scale: Array) -> Array:
            factor = (scale if scale.ndim == 1 else scale[:, None])[..., None]
            return (pool.astype(plan.score_dtype) * factor.astype(plan.score_dtype)).astype(plan.dtype)

        key, value = wide(given.key, given.scales.key), wide(given.value, given.scales.value)
        return given._replace(key=key, value=value, scales=None)

    why = f"pages: the whole pools are multiplied by their scales, in {plan.dtype}"
    return Rewrite(dataclasses.replace(plan, cache_dtype=None), why, operands)


def tokens_of_pages(pool: Array, scale: Array | None, pages: Array, dtype: DTypeLike) -> Array:
    """The tokens of all batch entries, contiguous: [B, n * page, M, D], 0 for page numbers that are not in the pool.

    `pool` is [P, page, M, D], `pages` int32 [B, n]. Quantised ones have a scale, float32 [M] or [P, M].
    """
    inside = (pages >= 0) & (pages < pool.shape[0])
    at = jnp.where(inside, pages, 0)
    found = pool[at]
    if scale is not None:
        factor = scale if scale.ndim == 1 else scale[at][:, :, None]
        found = found.astype(dtype) * factor[..., None].astype(dtype)
    found = jnp.where(inside[:, :, None, None, None], found, jnp.zeros_like(found))
    return found.reshape(pages.shape[0], pages.shape[1] * pool.shape[1], *pool.shape[2:])
