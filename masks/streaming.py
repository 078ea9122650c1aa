"""StreamingLLM's mask: a few tokens at the start that all queries see, and a sliding window."""

from jax import Array

from flexjax.mod_tools.factory_arguments import integer
from flexjax.mod_tools.signatures import MaskMod, named


def streaming(sinks: int, window: int) -> MaskMod:
    """mask = (q_idx >= kv_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    sinks:   int of at least 0: tokens at the start that stay visible for ever.
    window:  int of at least 1: how many recent keys a query sees, itself included.

    A query far from the start sees exactly `sinks + window` keys.  These sinks are tokens with keys and
    values; the learned logits of `flex_attention(..., sinks=)` are another thing.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453.

    Raises ValueError if `sinks` is negative, `window` is less than 1, or either is not an int.

    Picture of `streaming(1, 3)`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        # # # # . . . .
        # . # # # . . .
        # . . # # # . .
        # . . . # # # .
        # . . . . # # #
    """
    sinks = integer("streaming", "sinks", sinks, 0, "It counts the tokens at the start that stay visible.")
    window = integer("streaming", "window", window, 1, "A query sees `window` recent keys, itself included.")

    @named(f"streaming_{sinks}_{window}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is not later than the query and is one of the first `sinks` tokens or in the window."""
        return (q_idx >= kv_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < window))

    return mask_mod
