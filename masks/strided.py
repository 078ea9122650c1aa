"""The two factorised patterns of the Sparse Transformer, each as one mask."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


def strided(stride: int) -> MaskMod:
    """mask = (q_idx >= kv_idx) & ((q_idx - kv_idx < stride) | ((q_idx - kv_idx) % stride == 0))

    stride:  int of at least 1: width of the local window, and distance between the keys before it that are seen.

    A query sees the last `stride` tokens, and every `stride`-th one before them.  On an image of width
    `stride` these are the row so far and the column above.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section
    4.3.  The paper deals the two parts to different heads or merges them; this is the merged one.

    Raises ValueError if `stride` is less than 1 or not an int.

    Picture of `strided(3)`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        # # # # . . . .
        . # # # # . . .
        . . # # # # . .
        # . . # # # # .
        . # . . # # # #
    """
    stride = integer(
        "strided", "stride", stride, 1, "It is the distance between the keys that a query sees beyond its window."
    )

    @named(f"strided_{stride}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is one of the last `stride` up to the query's own, or a multiple of `stride` before the query."""
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < stride) | (distance % stride == 0))

    return mask_mod


def strided_fixed(stride: int, summary: int = 1) -> MaskMod:
    """mask = (q_idx >= kv_idx) & (same | last)

        same = q_idx // stride == kv_idx // stride
        last = kv_idx % stride >= stride - summary

    stride:   int of at least 1: tokens in a block.
    summary:  int, 1 to `stride`: how many tokens at the end of each block all later queries see.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section
    4.3, "fixed" (its `c` is `summary`), both parts merged.

    Raises ValueError if `stride` is less than 1, `summary` is not in 1 .. `stride`, or either is not an int.

    Picture of `strided_fixed(3)`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        . . # # . . . .
        . . # # # . . .
        . . # # # # . .
        . . # . . # # .
        . . # . . # # #
    """
    stride = integer("strided_fixed", "stride", stride, 1, "It counts the tokens of a block.")
    summary = integer("strided_fixed", "summary", summary, 1, "It counts the tokens that end a block.")
    if summary > stride:
        raise ValueError(
            f"`strided_fixed`: `summary` is {summary}; expected at most `stride`, which is {stride}. "
            "A block has no more tokens than that."
        )

    @named(f"strided_fixed_{stride}_{summary}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is not later than the query and is in its block or among the last `summary` tokens of a block."""
        same = q_idx // stride == kv_idx // stride
        last = kv_idx % stride >= stride - summary
        return (q_idx >= kv_idx) & (same | last)

    return mask_mod
