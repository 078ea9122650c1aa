"""The mask of a prefix language model: every query sees a prefix, and what follows it is causal."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def prefix_lm(prefix: ArrayLike) -> MaskMod:
    """mask = (kv_idx < prefix) | (q_idx >= kv_idx)

    prefix:  int, or int32 `[]` or `[B]`: number of tokens at the start that every query sees, the earlier
             ones of the prefix included.  0 gives `causal`.  It may be traced.

    Sizes are not checked against those of the call: an index past the end of `prefix` reads the last element.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", arXiv:1910.10683, section 3.2.1 ("causal with prefix").

    Raises ValueError if `prefix` is a negative int, is not integer or has more than one axis.

    Picture of `prefix_lm(3)`, 8 x 8:

        # # # . . . . .
        # # # . . . . .
        # # # . . . . .
        # # # # . . . .
        # # # # # . . .
        # # # # # # . .
        # # # # # # # .
        # # # # # # # #
    """
    length = integer_or_vector("prefix_lm", "prefix", prefix, "[B]", 0, "Pass one length, or one per batch entry.")

    @named(f"prefix_lm_{length}" if isinstance(length, int) else "prefix_lm")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is in the prefix or not later than the query."""
        return (kv_idx < value_at(length, b)) | (q_idx >= kv_idx)

    return mask_mod
