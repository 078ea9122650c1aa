"""A prefix, such as a prompt, that everything packed behind it sees."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def shared_prefix(length: ArrayLike, mask_mod: MaskMod) -> MaskMod:
    """mask = mask_mod(b, h, q_idx, kv_idx) | (q_idx >= length) & (kv_idx < length)

    length:    int, or int32 `[]` or `[B]`: tokens of the prefix.  It may be traced.
    mask_mod:  the mask of all other entries, in positions of the whole row.

    Several continuations of one prompt, packed behind it: each sees the prompt whole, and
    `and_masks(causal, document(ids))` keeps them apart, with the prompt a document of its own.  The prompt is stored
    and computed once.

    Sizes are not checked against those of the call: an index past the end of `length` reads the last element.

    Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", arXiv:2312.07104 (prefix
    sharing).

    Raises ValueError if `length` is a negative int, is not integer or has more than one axis, or if `mask_mod` is no function.

    Picture of `shared_prefix(2, and_masks(causal, document(np.array([0, 0, 1, 1, 1, 2, 2, 2]))))`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        # # # # . . . .
        # # # # # . . .
        # # . . . # . .
        # # . . . # # .
        # # . . . # # #
    """
    if not callable(mask_mod):
        raise ValueError(
            f"`shared_prefix`: `mask_mod` is {mask_mod!r}; expected a function of (b, h, q_idx, kv_idx). Pass the length first, "
            "then the mask of the other entries."
        )
    prefix = integer_or_vector("shared_prefix", "length", length, "[B]", 0, "Pass one length, or one per batch entry.")

    @named(f"shared_prefix_{getattr(mask_mod, '__name__', 'mask')}")
    def with_prefix(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether `mask_mod` lets the query see the key, or the query is behind the prefix and the key in it."""
        end = value_at(prefix, b)
        return mask_mod(b, h, q_idx, kv_idx) | ((q_idx >= end) & (kv_idx < end))

    return with_prefix
