"""A prefix, such as a prompt, that everything packed behind it sees."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.made_for import of_array, sizes_of
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def shared_prefix(length: ArrayLike, mask_mod: MaskMod) -> MaskMod:
    """mask = mask_mod(b, h, q_idx, kv_idx) | (q_idx >= length) & (kv_idx < length)

    length:    int, or int32 `[]` or `[B]`: tokens of the prefix, such as a prompt. May be traced.
    mask_mod:  the mask of all other entries, in positions of the whole row.
    A call of other sizes raises ValueError. Source: Zheng et al., "SGLang", arXiv:2312.07104 (prefix sharing).
    Raises ValueError for other arguments.
    Picture of `shared_prefix(2, and_masks(causal, document(np.array([0, 0, 1, 2, 2]))))`, 5 x 5:

        # . . . .
        # # . . .
        # # # . .
        # # . # .
        # # . # #
    """
    if not callable(mask_mod):
        raise ValueError(
            f"`shared_prefix`: `mask_mod` is {mask_mod!r}; expected a function of (b, h, q_idx, kv_idx). Pass the "
            "length first, then the mask of the other entries."
        )
    prefix = integer_or_vector("shared_prefix", "length", length, "[B]", 0, "Pass one length, or one per batch entry.")

    @named(
        f"shared_prefix_{getattr(mask_mod, '__name__', 'mask')}", *of_array("length", prefix, "B"), *sizes_of(mask_mod)
    )
    def with_prefix(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        end = value_at(prefix, b)
        return mask_mod(b, h, q_idx, kv_idx) | ((q_idx >= end) & (kv_idx < end))

    return with_prefix
