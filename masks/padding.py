"""Batches whose entries have different lengths: hides padding keys, or all keys of padding queries."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def padding(lengths: ArrayLike) -> MaskMod:
    """mask = kv_idx < lengths[b]

    lengths:  int32 `[B]` (or `[]`, or an int, for all): how many keys of the entry are real. May be traced.
    Rows of padding queries keep their real keys; `query_padding` empties them. A call of other sizes raises ValueError.
    Raises ValueError if `lengths` is a negative int, is not integer or has more than one axis.
    Picture of `padding(np.array([3]))`, 2 x 5:

        # # # . .
        # # # . .
    """
    advice = "Pass the number of real keys per batch entry."
    kv_lengths = integer_or_vector("padding", "lengths", lengths, "[B]", 0, advice)

    @named("padding", *of_array("lengths", kv_lengths, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return kv_idx < value_at(kv_lengths, b)

    return mask_mod


@eager
def query_padding(lengths: ArrayLike) -> MaskMod:
    """mask = q_idx < lengths[b]

    lengths:  int32 `[B]` (or `[]`, or an int, for all): how many queries of the entry are real. May be traced.
    A call of other sizes raises ValueError.
    Raises ValueError if `lengths` is a negative int, is not integer or has more than one axis.
    Picture of `query_padding(np.array([2]))`, 3 x 4:

        # # # #
        # # # #
        . . . .
    """
    advice = "Pass the number of real queries per batch entry."
    q_lengths = integer_or_vector("query_padding", "lengths", lengths, "[B]", 0, advice)

    @named("query_padding", *of_array("lengths", q_lengths, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return q_idx < value_at(q_lengths, b)

    return mask_mod


@eager
def left_padding(starts: ArrayLike) -> MaskMod:
    """mask = kv_idx >= starts[b]

    starts:  int32 `[B]` (or `[]`, or an int, for all): position of the first real key of the entry. May be traced.
    A call of other sizes raises ValueError.
    Raises ValueError if `starts` is a negative int, is not integer or has more than one axis.
    Picture of `left_padding(np.array([2]))`, 2 x 5:

        . . # # #
        . . # # #
    """
    advice = "Pass the position of the first real key per batch entry."
    first = integer_or_vector("left_padding", "starts", starts, "[B]", 0, advice)

    @named("left_padding", *of_array("starts", first, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return kv_idx >= value_at(first, b)

    return mask_mod
