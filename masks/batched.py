"""A mask of its own for every batch entry."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array

from flexjax.mod_tools.signatures import MaskMod, named


def batched(mask_mods: Sequence[MaskMod]) -> MaskMod:
    """mask = mask_mods[b](b, h, q_idx, kv_idx)

    mask_mods:  one mask for each batch entry; entries past the last take the last.

    All of them are evaluated and one is chosen, so the cost of a partial block grows with their number; blocks are
    classified for each batch entry by its own mask.

    Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
    arXiv:2412.05496; attention-gym, "batch_make_mask_mod".

    Raises ValueError if `mask_mods` is empty or has an element that is no function.

    The picture shows batch entry 0.  Picture of `batched([causal, full])`, 4 x 4:

        # . . .
        # # . .
        # # # .
        # # # #
    """
    mods = list(mask_mods) if isinstance(mask_mods, Iterable) else []
    if not mods or not all(map(callable, mods)):
        raise ValueError(
            f"`batched`: `mask_mods` is {mask_mods!r}; expected one function of (b, h, q_idx, kv_idx) for each batch entry. "
            "Pass a list of masks."
        )

    @named("batched_" + "_".join(getattr(m, "__name__", "mask") for m in mods[:3]))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the mask of batch entry `b`, the last mask for entries past it, lets the query see the key."""
        chosen = mods[-1](b, h, q_idx, kv_idx)
        for entry, inner in enumerate(mods[:-1]):
            chosen = jnp.where(b == entry, inner(b, h, q_idx, kv_idx), chosen)
        return chosen

    return mask_mod
