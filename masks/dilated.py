"""Dilated sliding windows: a query sees every `dilation`-th key near it."""

from jax import Array

from flexjax.mod_tools.factory_arguments import LARGEST, integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def dilated_window(window: int, dilation: int) -> MaskMod:
    """mask = (q_idx >= kv_idx) & (q_idx - kv_idx < window * dilation) & ((q_idx - kv_idx) % dilation == 0)

    window:    int of at least 1: how many keys a query sees, `q, q - dilation, .., q - (window - 1) * dilation`.
    dilation:  int of at least 1: distance between neighbouring keys of the window; 1 means no gaps.
    Source: Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1, causal. Raises ValueError for other numbers.
    Picture of `dilated_window(2, 2)`, 5 x 5:

        # . . . .
        . # . . .
        # . # . .
        . # . # .
        . . # . #
    """
    window = integer("dilated_window", "window", window, 1, "A query sees `window` keys, itself included.")
    dilation = integer("dilated_window", "dilation", dilation, 1, "Pass 1 for a window without gaps.")

    width = min(window * dilation, LARGEST)

    @named(f"dilated_window_{window}_{dilation}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < width) & (distance % dilation == 0)

    return mask_mod


@without_frames
def dilated_two_sided_window(left: int, right: int, dilation: int) -> MaskMod:
    """mask = (-right * dilation <= q_idx - kv_idx <= left * dilation) & ((q_idx - kv_idx) % dilation == 0)

    left:      int of at least 0: how many keys before its own a query sees.
    right:     int of at least 0: how many keys after its own a query sees.
    dilation:  int of at least 1: distance between neighbouring keys of the window; 1 means no gaps.
    Source: Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1. Raises ValueError for other numbers.
    Picture of `dilated_two_sided_window(1, 1, 2)`, 4 x 5:

        # . # . .
        . # . # .
        # . # . #
        . # . # .
    """
    call = "dilated_two_sided_window"
    left = integer(call, "left", left, 0, "It counts the keys before the query's own.")
    right = integer(call, "right", right, 0, "It counts the keys after the query's own.")
    dilation = integer(call, "dilation", dilation, 1, "Pass 1 for a window without gaps.")

    before, after = min(left * dilation, LARGEST), min(right * dilation, LARGEST)

    @named(f"dilated_two_sided_window_{left}_{right}_{dilation}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        distance = q_idx - kv_idx
        return (distance <= before) & (-distance <= after) & (distance % dilation == 0)

    return mask_mod
