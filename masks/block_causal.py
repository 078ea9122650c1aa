"""Causal between blocks of tokens, with full attention inside each block."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def block_causal(block: int) -> MaskMod:
    """mask = q_idx // block >= kv_idx // block

    block:  int of at least 1: tokens in a block, such as a video frame; the last one may be shorter.
    Source: Arriola et al., "Block Diffusion", arXiv:2503.09573, clean tokens. Raises ValueError for another `block`.
    Picture of `block_causal(2)`, 4 x 4:

        # # . .
        # # . .
        # # # #
        # # # #
    """
    block = integer("block_causal", "block", block, 1, "It counts the tokens of a block.")

    @named(f"block_causal_{block}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return q_idx // block >= kv_idx // block

    return mask_mod
