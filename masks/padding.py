"""Batches whose entries have different lengths: hides padding keys, or all keys of padding queries."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def padding(lengths: ArrayLike) -> MaskMod:
    """mask = kv_idx < lengths[b]

    lengths:  int32 `[B]` (or `[]`, or an int, for all entries alike): how many keys of the entry are real.
              It may be traced; 0 hides all.

    Hides the keys that pad an entry at its end.  Rows of padding queries keep their real keys; combine with
    `query_padding` to empty them too.

    Sizes are not checked against those of the call: an index past the end of `lengths` reads the last element.

    Raises ValueError if `lengths` is a negative int, is not integer or has more than one axis.

    Picture of `padding(np.array([5]))`, 4 x 8:

        # # # # # . . .
        # # # # # . . .
        # # # # # . . .
        # # # # # . . .
    """
    advice = "Pass the number of real keys per batch entry."
    kv_lengths = integer_or_vector("padding", "lengths", lengths, "[B]", 0, advice)

    @named("padding")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is before the end of the batch entry's real keys."""
        return kv_idx < value_at(kv_lengths, b)

    return mask_mod


@eager
def query_padding(lengths: ArrayLike) -> MaskMod:
    """mask = q_idx < lengths[b]

    lengths:  int32 `[B]` (or `[]`, or an int): how many queries of the entry are real.  It may be traced.

    Empties the rows of the queries that pad an entry at its end, so that their output is zero.

    Sizes are not checked against those of the call: an index past the end of `lengths` reads the last element.

    Raises ValueError if `lengths` is a negative int, is not integer or has more than one axis.

    Picture of `query_padding(np.array([5]))`, 8 x 4:

        # # # #
        # # # #
        # # # #
        # # # #
        # # # #
        . . . .
        . . . .
        . . . .
    """
    advice = "Pass the number of real queries per batch entry."
    q_lengths = integer_or_vector("query_padding", "lengths", lengths, "[B]", 0, advice)

    @named("query_padding")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the query is before the end of the batch entry's real queries."""
        return q_idx < value_at(q_lengths, b)

    return mask_mod


@eager
def left_padding(starts: ArrayLike) -> MaskMod:
    """mask = kv_idx >= starts[b]

    starts:  int32 `[B]` (or `[]`, or an int): position of the first real key of the entry.  It may be traced.

    Hides the keys that pad an entry at its beginning, as batches for generation often do.

    Sizes are not checked against those of the call: an index past the end of `starts` reads the last element.

    Raises ValueError if `starts` is a negative int, is not integer or has more than one axis.

    Picture of `left_padding(np.array([3]))`, 4 x 8:

        . . . # # # # #
        . . . # # # # #
        . . . # # # # #
        . . . # # # # #
    """
    advice = "Pass the position of the first real key per batch entry."
    first = integer_or_vector("left_padding", "starts", starts, "[B]", 0, advice)

    @named("left_padding")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is at or after the first real key of the batch entry."""
        return kv_idx >= value_at(first, b)

    return mask_mod
