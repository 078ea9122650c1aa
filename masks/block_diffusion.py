"""The mask that trains a block diffusion language model in one pass, over a noisy and a clean copy of the text."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


def block_diffusion(length: int, block: int) -> MaskMod:
    """mask = own | past | clean, over the sequence [noisy copy | clean copy], each `length` tokens, with
    `i` and `j` the blocks of query and key inside their copies:

        own   = query noisy, key noisy, i == j      (denoise inside the block)
        past  = query noisy, key clean, i >  j      (given the clean blocks before it)
        clean = query clean, key clean, i >= j      (block-causal)

    length:  int of at least 1: tokens in one copy; queries and keys number `2 * length`.
    block:   int of at least 1: tokens in a block; the last one of a copy may be shorter.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
    Models", arXiv:2503.09573 (its block-diagonal, offset block-causal and block-causal parts).

    Raises ValueError if either is less than 1 or not an int.

    Picture of `block_diffusion(4, 2)`, 8 x 8:

        # # . . . . . .
        # # . . . . . .
        . . # # # # . .
        . . # # # # . .
        . . . . # # . .
        . . . . # # . .
        . . . . # # # #
        . . . . # # # #
    """
    length = integer("block_diffusion", "length", length, 1, "It counts the tokens of one copy.")
    block = integer("block_diffusion", "block", block, 1, "It counts the tokens of a block.")

    @named(f"block_diffusion_{length}_{block}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the query sees the key, by the copies and the blocks that they are in."""
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        i, j = q_idx % length // block, kv_idx % length // block
        own = ~q_clean & ~kv_clean & (i == j)
        past = ~q_clean & kv_clean & (i > j)
        clean = q_clean & kv_clean & (i >= j)
        return own | past | clean

    return mask_mod
