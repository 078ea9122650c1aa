"""StreamingLLM's mask: a few tokens at the start that all queries see, and a sliding window."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@without_frames
def streaming(sinks: int, window: int) -> MaskMod:
    """mask = (q_idx >= kv_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    sinks:   int of at least 0: tokens at the start that stay visible; not the logits of `flex_attention(..., sinks=)`.
    window:  int of at least 1: how many recent keys a query sees, itself included.
    Source: Xiao et al., "Attention Sinks", arXiv:2309.17453. Raises ValueError for other numbers.
    Picture of `streaming(1, 2)`, 5 x 5:

        # . . . .
        # # . . .
        # # # . .
        # . # # .
        # . . # #
    """
    sinks = integer("streaming", "sinks", sinks, 0, "It counts the tokens at the start that stay visible.")
    window = integer("streaming", "window", window, 1, "A query sees `window` recent keys, itself included.")

    @named(f"streaming_{sinks}_{window}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx >= kv_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    return mask_mod
