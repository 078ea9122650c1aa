"""A mask of its own for every batch entry."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import Array

from flexjax.mod_tools.made_for import Size, sizes_of
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def batched(mask_mods: Sequence[MaskMod]) -> MaskMod:
    """mask = mask_mods[b](b, h, q_idx, kv_idx)

    mask_mods:  one mask for each batch entry. All are evaluated and one is chosen.
    Source: Dong et al., "Flex Attention", arXiv:2412.05496; attention-gym, "batch_make_mask_mod".
    Raises ValueError if `mask_mods` is empty or has an element that is no function. The picture shows batch entry 0.
    Picture of `batched([causal, full])`, 3 x 3:

        # . .
        # # .
        # # #
    """
    mods = list(mask_mods) if isinstance(mask_mods, Iterable) else []
    if not mods or not all(map(callable, mods)):
        raise ValueError(
            f"`batched`: `mask_mods` is {mask_mods!r}; expected one function of (b, h, q_idx, kv_idx) for each batch "
            "entry. Pass a list of masks."
        )

    count = len(mods)
    own = (Size("batch", count, count, f"`mask_mods` of length {count}"),) if count > 1 else ()

    @named("batched_" + "_".join(getattr(m, "__name__", "mask") for m in mods[:3]), *own, *sizes_of(*mods))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        chosen = mods[-1](b, h, q_idx, kv_idx)
        for entry, inner in enumerate(mods[:-1]):
            chosen = jnp.where(b == entry, inner(b, h, q_idx, kv_idx), chosen)
        return chosen

    return mask_mod
