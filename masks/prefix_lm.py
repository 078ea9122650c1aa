"""The mask of a prefix language model: every query sees a prefix, and what follows it is causal."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def prefix_lm(prefix: ArrayLike) -> MaskMod:
    """mask = (kv_idx < prefix) | (q_idx >= kv_idx)

    prefix:  int, or int32 `[]` or `[B]`: number of tokens at the start that every query sees. May be traced.
    A call of other sizes raises ValueError. Source: Raffel et al., "Exploring the Limits of Transfer Learning with a
    Unified Text-to-Text Transformer", arXiv:1910.10683, section 3.2.1. Raises ValueError for another `prefix`.
    Picture of `prefix_lm(2)`, 4 x 4:

        # # . .
        # # . .
        # # # .
        # # # #
    """
    length = integer_or_vector("prefix_lm", "prefix", prefix, "[B]", 0, "Pass one length, or one per batch entry.")

    @named(f"prefix_lm_{length}" if isinstance(length, int) else "prefix_lm", *of_array("prefix", length, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (kv_idx < value_at(length, b)) | (q_idx >= kv_idx)

    return mask_mod
