"""The two factorised patterns of the Sparse Transformer, each as one mask."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def strided(stride: int) -> MaskMod:
    """mask = (q_idx >= kv_idx) & ((q_idx - kv_idx < stride) | ((q_idx - kv_idx) % stride == 0))

    stride:  int of at least 1: width of the local window, and distance between the keys before it that are seen.
    Source: Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.3, both parts merged. Raises ValueError.
    Picture of `strided(2)`, 5 x 5:

        # . . . .
        # # . . .
        # # # . .
        . # # # .
        # . # # #
    """
    stride = integer(
        "strided", "stride", stride, 1, "It is the distance between the keys that a query sees beyond its window."
    )

    @named(f"strided_{stride}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < stride) | (distance % stride == 0))

    return mask_mod


@without_frames
def strided_fixed(stride: int, summary: int = 1) -> MaskMod:
    """mask = (q_idx >= kv_idx) & (same | last)

        same = q_idx // stride == kv_idx // stride
        last = kv_idx % stride >= stride - summary

    stride:   int of at least 1: tokens in a block.
    summary:  int, 1 to `stride`: how many tokens at the end of each block all later queries see.
    Source: as `strided`, "fixed" (its `c` is `summary`). Raises ValueError for other numbers.
    Picture of `strided_fixed(2)`, 5 x 5:

        # . . . .
        # # . . .
        . # # . .
        . # # # .
        . # . # #
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
        same = q_idx // stride == kv_idx // stride
        last = kv_idx % stride >= stride - summary
        return (q_idx >= kv_idx) & (same | last)

    return mask_mod
