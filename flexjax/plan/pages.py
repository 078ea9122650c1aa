"""Keys and values in pages: the size of their key blocks, and the same tokens, or the same plan, contiguous; and the other way round."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


def whole_pages(page: int, most: int) -> int:
    """The size in tokens of a key block for pages of `page` tokens.

    The largest multiple of `page` up to `most`. For pages longer than `most`: `most` if it divides `page`, else `page`.
    """
    if page <= most:
        return most // page * page
    return most if page % most == 0 else page


def contiguous_plan(plan: KernelPlan) -> KernelPlan:
    """The plan of a call on the keys and values that `contiguous` gathers: page 0 and no cache_dtype, otherwise `plan`."""
    return dataclasses.replace(plan, page=0, cache_dtype=None)


def contiguous(
    plan: KernelPlan, operands: Operands, quantised_as: DTypeLike | None = None
) -> tuple[KernelPlan, Operands]:
    """The same call with keys and values that are not in pages: (plan, operands), or the arguments themselves if they are not in pages.

    plan           of the call; the new one has page 0 and no cache_dtype, and is the same otherwise (`contiguous_plan`)
    operands       of the call; in the new ones key and value are [B, S, M, D] and [B, S, M, E], heads first for BNTH, with the tokens of
                   each batch entry in order, and pages and scales are None
    quantised_as   the dtype that keys and values of a quantised cache get after they are multiplied by their scales; None: that of
                   scores. Not read for other caches, whose dtype stays

    Tokens of a page whose number is not in the pool are 0.
    """
    pages = operands.pages
    if pages is None:
        return plan, operands

    def gathered(pool: Array, scale: Array | None) -> Array:
        """The tokens of one pool in the plan's layout, in the dtype of the pool; those of a quantised pool in `quantised_as`, or the
        score dtype if that is None.

        pool    [P, page, M, D], keys or values
        scale   what a quantised pool is multiplied by, float32 [M] or [P, M]; None for others
        """
        found = tokens_of_pages(pool, scale, pages, plan.score_dtype)
        if scale is not None and quantised_as is not None:
            found = found.astype(quantised_as)
        return found if plan.layout == "BTNH" else jnp.swapaxes(found, 1, 2)

    of_key, of_value = operands.scales or (None, None)
    key, value = gathered(operands.key, of_key), gathered(operands.value, of_value)
    made = operands._replace(key=key, value=value, pages=None, scales=None)
    return contiguous_plan(plan), made


def widened(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    """The same call with pools in the plan's dtype: (plan, operands), or the arguments themselves if the cache is not quantised.

    plan       of the call, with keys in pages; the new one has no cache_dtype, and is the same otherwise
    operands   of the call; in the new ones key and value are the pools multiplied by their scales, and scales is None

    The numbers are those that `contiguous` gathers with `quantised_as=plan.dtype`.
    """
    if operands.scales is None:
        return plan, operands

    def wide(pool: Array, scale: Array) -> Array:
        """The pool [P, page, M, D], multiplied by its scales [M] or [P, M], in the plan's dtype."""
        factor = (scale if scale.ndim == 1 else scale[:, None])[..., None]
        return (pool.astype(plan.score_dtype) * factor.astype(plan.score_dtype)).astype(plan.dtype)

    key, value = wide(operands.key, operands.scales[0]), wide(operands.value, operands.scales[1])
    return dataclasses.replace(plan, cache_dtype=None), operands._replace(key=key, value=value, scales=None)


def tokens_of_pages(pool: Array, scale: Array | None, pages: Array, dtype: DTypeLike) -> Array:
    """The tokens of all batch entries, contiguous: [B, n * page, M, D], 0 for page numbers that are not in the pool.

    pool    [P, page, M, D]
    scale   what quantised tokens are multiplied by, float32 [M] or [P, M]; None for others
    pages   int32 [B, n]
    dtype   of the result if there is a scale; without one the result has that of the pool
    """
    inside = (pages >= 0) & (pages < pool.shape[0])
    at = jnp.where(inside, pages, 0)
    found = pool[at]
    if scale is not None:
        factor = scale if scale.ndim == 1 else scale[at][:, :, None]
        found = found.astype(dtype) * factor[..., None].astype(dtype)
    found = jnp.where(inside[:, :, None, None, None], found, jnp.zeros_like(found))
    return found.reshape(pages.shape[0], pages.shape[1] * pool.shape[1], *pool.shape[2:])
