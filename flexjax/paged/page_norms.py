"""The largest norm of the keys of each page, which a cache keeps for calls with `tolerance`."""

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.errors import bad_argument
from flexjax.paged.table import described
from flexjax.tolerance.norms import norms

Array = jax.Array


def check_norms(given: object, pool: int, heads: int) -> None:
    """Raises ValueError unless the norms of a cache are float32 [P, M] or None."""
    known = isinstance(given, Array | np.ndarray) and given.dtype == jnp.float32 and given.shape == (pool, heads)
    if given is not None and not known:
        raise bad_argument(
            "cache.norms", described(given), f"float32[{pool}, {heads}] or None",
            "Make the cache with paged.empty(..., norms=True).",
        )  # fmt: skip


def with_tokens(longest: Array, pool: Array, scales: Array | None, page: Array, slot: Array) -> Array:
    """`longest`, [P, M], after tokens were written to slots of pages of `pool`; inf where one is NaN.

    page, slot   int32 [tokens]; a page that begins at slot 0 is begun anew, and page P stands for no page
    """
    tokens = pool.at[page, slot].get(mode="clip")  # as they are stored
    tokens = tokens if tokens.dtype.itemsize == 8 else tokens.astype(jnp.float32)
    if scales is not None:
        tokens = tokens * (scales if scales.ndim == 1 else scales.at[page].get(mode="clip"))[..., None]
    found = norms([tokens])
    # the max of some devices loses NaN, not inf
    found = jnp.where(jnp.isnan(found), jnp.inf, found * (1 + 2.0**-22)).astype(jnp.float32)
    begun = jnp.where(slot == 0, page, longest.shape[0])
    return longest.at[begun].set(0, mode="drop").at[page].max(found, mode="drop")
