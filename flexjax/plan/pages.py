"""Plans whose keys and values are in pages: the size of their key blocks, and the same plan on contiguous keys."""

import dataclasses

import jax
import jax.numpy as jnp

from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


def whole_pages(page: int, most: int) -> int:
    """The size of a key block for pages of `page` tokens: a multiple or a divisor of it, `most` tokens or less unless no such size
    is near.
    """
    if page <= most:
        return most // page * page
    return most if page % most == 0 else page


def contiguous(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    """The plan and the operands with the keys and values of each batch entry gathered from its pages: [B, S, M, D] and [B, S, M, E]
    (heads first for BNTH), in the dtype of scores if they are quantised. Both themselves if keys are contiguous.
    """
    pages = operands.pages
    if pages is None:
        return plan, operands

    def gathered(pool: Array, scale: Array | None) -> Array:
        """The tokens of all batch entries from one pool; 0 for page numbers that are not in it."""
        inside = (pages >= 0) & (pages < pool.shape[0])
        at = jnp.where(inside, pages, 0)
        found = pool[at]
        if scale is not None:
            factor = scale if scale.ndim == 1 else scale[at][:, :, None]
            found = found.astype(plan.score_dtype) * factor[..., None].astype(plan.score_dtype)
        found = jnp.where(inside[:, :, None, None, None], found, jnp.zeros_like(found))
        found = found.reshape(plan.batch, plan.kv_len, *pool.shape[2:])
        return found if plan.layout == "BTNH" else jnp.swapaxes(found, 1, 2)

    scales = operands.scales or (None, None)
    key, value = gathered(operands.key, scales[0]), gathered(operands.value, scales[1])
    made = operands._replace(key=key, value=value, pages=None, scales=None)
    return dataclasses.replace(plan, page=0, cache_dtype=None), made
