"""The mask that trains a block diffusion language model in one pass, over a noisy and a clean copy of the text."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.made_for import Size
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def block_diffusion(length: int, block: int) -> MaskMod:
    """mask = own | past | clean, over [noisy copy | clean copy], `i` and `j` are the blocks in the copies:

        own   = query noisy, key noisy, i == j      (denoise inside the block)
        past  = query noisy, key clean, i >  j      (given the clean blocks before it)
        clean = query clean, key clean, i >= j      (block-causal)

    length:  int of at least 1: tokens in one copy; queries and keys number `2 * length`.
    block:   int of at least 1: tokens in a block; the last one of a copy may be shorter.
    Source: Arriola et al., "Block Diffusion", arXiv:2503.09573. Raises ValueError for other numbers.
    Picture of `block_diffusion(2, 1)`, 4 x 4:

        # . . .
        . # # .
        . . # .
        . . # #
    """
    length = integer("block_diffusion", "length", length, 1, "It counts the tokens of one copy.")
    block = integer("block_diffusion", "block", block, 1, "It counts the tokens of a block.")

    both, source = 2 * length, f"`length` {length} of each copy"

    @named(f"block_diffusion_{length}_{block}", Size("queries", 1, both, source), Size("keys", both, both, source))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        i, j = q_idx % length // block, kv_idx % length // block
        own = ~q_clean & ~kv_clean & (i == j)
        past = ~q_clean & kv_clean & (i > j)
        clean = q_clean & kv_clean & (i >= j)
        return own | past | clean

    return mask_mod
