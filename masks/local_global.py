"""Longformer's mask: a window around every query, and a few global tokens that see, and are seen by, everyone."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.masks.global_tokens import global_tokens
from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.made_for import sizes_of
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def local_global(reach: int, tokens: ArrayLike) -> MaskMod:
    """mask = (abs(q_idx - kv_idx) <= reach) | is_global(q_idx) | is_global(kv_idx)

    reach:   int of at least 0: how many keys a query sees on each side.
    tokens:  as in `global_tokens`: the first `tokens` positions are global, or those of a bool `[T]` or `[B, T]`.
    A call of other sizes raises ValueError. Source: Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1, whose
    window `w` has `reach = w // 2`. Raises ValueError for another `reach` and other `tokens`.
    Picture of `local_global(1, 1)`, 5 x 5:

        # # # # #
        # # # . .
        # # # # .
        # . # # #
        # . . # #
    """
    reach = integer("local_global", "reach", reach, 0, "It counts the keys on each side of the query's own.")
    everywhere = global_tokens(tokens)

    @named(f"local_global_{reach}", *sizes_of(everywhere))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        near = (q_idx - kv_idx <= reach) & (kv_idx - q_idx <= reach)
        return near | everywhere(b, h, q_idx, kv_idx)

    return mask_mod
