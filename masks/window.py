"""Sliding windows: a query sees the keys next to it."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer, integer_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def sliding_window(window: ArrayLike) -> MaskMod:
    """mask = (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    window:  int of at least 1, or int32 `[]` or `[N]`: how many keys a query sees, itself included. May be traced.
    A `window_size=(left, 0)` that excludes the query itself is `sliding_window(left + 1)`.
    A call of other sizes raises ValueError. Source: Beltagy et al., "Longformer", arXiv:2004.05150; Jiang et al.,
    "Mistral 7B", arXiv:2310.06825. Raises ValueError for another `window`.
    Picture of `sliding_window(2)`, 4 x 4:

        # . . .
        # # . .
        . # # .
        . . # #
    """
    advice = "A query sees `window` keys, itself included; pass one int, or one per head."
    width = integer_or_vector("sliding_window", "window", window, "[N]", 1, advice)

    @named(f"sliding_window_{width}" if isinstance(width, int) else "sliding_window", *of_array("window", width, "N"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < value_at(width, h))

    return mask_mod


@without_frames
def two_sided_window(left: int, right: int) -> MaskMod:
    """mask = (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    left:   int of at least 0: how many keys before its own a query sees.
    right:  int of at least 0: how many keys after its own a query sees.
    Source: Beltagy et al., "Longformer", arXiv:2004.05150, with `w // 2` for both. Raises ValueError for other numbers.
    Picture of `two_sided_window(2, 1)`, 4 x 5:

        # # . . .
        # # # . .
        # # # # .
        . # # # #
    """
    left = integer("two_sided_window", "left", left, 0, "It counts the keys before the query's own.")
    right = integer("two_sided_window", "right", right, 0, "It counts the keys after the query's own.")

    @named(f"two_sided_window_{left}_{right}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask_mod
