"""Sequences cut into chunks (blocks) of equal length that do not see each other."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def chunked(chunk: int) -> MaskMod:
    """mask = (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)

    chunk:  int of at least 1: tokens in a chunk; the last one may be shorter.
    Source: Llama 4's local layers; Liu et al., arXiv:1801.10198, section 4.2.4. Raises ValueError for another `chunk`.
    Picture of `chunked(2)`, 4 x 4:

        # . . .
        # # . .
        . . # .
        . . # #
    """
    chunk = integer("chunked", "chunk", chunk, 1, "It counts the tokens of a chunk.")

    @named(f"chunked_{chunk}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)

    return mask_mod


@without_frames
def block_diagonal(block: int) -> MaskMod:
    """mask = q_idx // block == kv_idx // block

    block:  int of at least 1: tokens in a block; the last one may be shorter.
    Source: Qiu et al., "Blockwise Self-Attention", arXiv:1911.02972. Raises ValueError for another `block`.
    Picture of `block_diagonal(2)`, 4 x 4:

        # # . .
        # # . .
        . . # #
        . . # #
    """
    block = integer("block_diagonal", "block", block, 1, "It counts the tokens of a block.")

    @named(f"block_diagonal_{block}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return q_idx // block == kv_idx // block

    return mask_mod
