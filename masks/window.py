"""Sliding windows: a query sees the keys next to it."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer, integer_or_vector
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def sliding_window(window: ArrayLike) -> MaskMod:
    """mask = (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    window:  int of at least 1, or int32 `[]` or `[N]`, one per query head: how many keys a query sees.
             It may be traced.

    The width is exact: query `q` sees the `window` keys `q - window + 1 .. q`, itself among them (fewer only
    where the sequence begins).  `sliding_window(1)` is the diagonal.  Other systems count differently:
    a `window_size=(left, 0)` that excludes the query itself is `sliding_window(left + 1)`.

    Sizes are not checked against those of the call: an index past the end of `window` reads the last element.

    Source: Beltagy et al., "Longformer", arXiv:2004.05150; Jiang et al., "Mistral 7B", arXiv:2310.06825.

    Raises ValueError if `window` is an int less than 1, not integer, or has more than one axis.

    Picture of `sliding_window(3)`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        . # # # . . . .
        . . # # # . . .
        . . . # # # . .
        . . . . # # # .
        . . . . . # # #
    """
    advice = "A query sees `window` keys, itself included; pass one int, or one per head."
    width = integer_or_vector("sliding_window", "window", window, "[N]", 1, advice)

    @named(f"sliding_window_{width}" if isinstance(width, int) else "sliding_window")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is the query's own or one of the `window - 1` before it; `window` may differ by head."""
        return (q_idx >= kv_idx) & (q_idx - kv_idx < value_at(width, h))

    return mask_mod


def two_sided_window(left: int, right: int) -> MaskMod:
    """mask = (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    left:   int of at least 0: how many keys before its own a query sees.
    right:  int of at least 0: how many keys after its own a query sees.

    The width is exact: query `q` sees the `left + 1 + right` keys `q - left .. q + right` (fewer only at the
    ends).  `two_sided_window(w - 1, 0)` equals `sliding_window(w)`.

    Source: Beltagy et al., "Longformer", arXiv:2004.05150; its window `w` has `left = right = w // 2`.

    Raises ValueError if `left` or `right` is negative or not an int.

    Picture of `two_sided_window(2, 1)`, 8 x 8:

        # # . . . . . .
        # # # . . . . .
        # # # # . . . .
        . # # # # . . .
        . . # # # # . .
        . . . # # # # .
        . . . . # # # #
        . . . . . # # #
    """
    left = integer("two_sided_window", "left", left, 0, "It counts the keys before the query's own.")
    right = integer("two_sided_window", "right", right, 0, "It counts the keys after the query's own.")

    @named(f"two_sided_window_{left}_{right}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is at most `left` positions before the query or `right` positions after it."""
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return mask_mod
