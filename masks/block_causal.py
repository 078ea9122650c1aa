"""Causal between blocks of tokens, with full attention inside each block."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


def block_causal(block: int) -> MaskMod:
    """mask = q_idx // block >= kv_idx // block

    block:  int of at least 1: tokens in a block (a video frame, a block of a diffusion model); the last one
            may be shorter.

    A query sees its whole block, also the later tokens in it, and all earlier blocks.  `block_causal(1)`
    equals `causal`.

    Source: Arriola et al., "Block Diffusion", arXiv:2503.09573, the mask of its clean tokens.

    Raises ValueError if `block` is less than 1 or not an int.

    Picture of `block_causal(3)`, 8 x 8:

        # # # . . . . .
        # # # . . . . .
        # # # . . . . .
        # # # # # # . .
        # # # # # # . .
        # # # # # # . .
        # # # # # # # #
        # # # # # # # #
    """
    block = integer("block_causal", "block", block, 1, "It counts the tokens of a block.")

    @named(f"block_causal_{block}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key's block is the query's block or an earlier one."""
        return q_idx // block >= kv_idx // block

    return mask_mod
