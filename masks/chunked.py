"""Sequences cut into chunks (blocks) of equal length that do not see each other."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


def chunked(chunk: int) -> MaskMod:
    """mask = (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)

    chunk:  int of at least 1: tokens in a chunk; the last one may be shorter.

    Causal inside each chunk, nothing across chunks.

    Source: the local layers of Llama 4 ("chunked attention"); the idea of independent blocks is in Liu et
    al., "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198, section 4.2.4.

    Raises ValueError if `chunk` is less than 1 or not an int.

    Picture of `chunked(3)`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        . . . # . . . .
        . . . # # . . .
        . . . # # # . .
        . . . . . . # .
        . . . . . . # #
    """
    chunk = integer("chunked", "chunk", chunk, 1, "It counts the tokens of a chunk.")

    @named(f"chunked_{chunk}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is in the query's chunk and not later than the query."""
        return (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)

    return mask_mod


def block_diagonal(block: int) -> MaskMod:
    """mask = q_idx // block == kv_idx // block

    block:  int of at least 1: tokens in a block; the last one may be shorter.

    Everything inside each block, nothing across blocks.

    Source: Qiu et al., "Blockwise Self-Attention for Long Document Understanding", arXiv:1911.02972, its
    identity permutation.

    Raises ValueError if `block` is less than 1 or not an int.

    Picture of `block_diagonal(3)`, 8 x 8:

        # # # . . . . .
        # # # . . . . .
        # # # . . . . .
        . . . # # # . .
        . . . # # # . .
        . . . # # # . .
        . . . . . . # #
        . . . . . . # #
    """
    block = integer("block_diagonal", "block", block, 1, "It counts the tokens of a block.")

    @named(f"block_diagonal_{block}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether query and key are in the same block."""
        return q_idx // block == kv_idx // block

    return mask_mod
