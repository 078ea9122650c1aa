"""Global tokens, which see, and are seen by, everyone."""

import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import bool_array, integer
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def global_tokens(tokens: ArrayLike) -> MaskMod:
    """mask = is_global(q_idx) | is_global(kv_idx)

    tokens:  int of at least 0: the first `tokens` positions are global; or bool `[T]` or `[B, T]`, which may be traced.
    To be joined to a local mask by or_masks. Source: Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1.
    A call of other sizes raises ValueError. Raises ValueError for other `tokens`.
    Picture of `global_tokens(1)`, 4 x 4:

        # # # #
        # . . .
        # . . .
        # . . .
    """
    advice = "Pass how many tokens at the start are global, or a bool for each token."
    if isinstance(tokens, int | float | np.number) or _is_known_integer(tokens):
        return _first_tokens(integer("global_tokens", "tokens", tokens, 0, advice))
    is_global = bool_array("global_tokens", "tokens", tokens, {1: "[T]", 2: "[B, T]"}, advice)

    @named("global_tokens", *of_array("tokens", is_global, "Bt"), *of_array("tokens", is_global, "BS"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return batched_value_at(is_global, b, q_idx) | batched_value_at(is_global, b, kv_idx)

    return mask_mod


def _is_known_integer(tokens: object) -> bool:
    if isinstance(tokens, Tracer) or not isinstance(tokens, Array | np.ndarray):
        return False
    return tokens.ndim == 0 and np.issubdtype(tokens.dtype, np.integer)


def _first_tokens(count: int) -> MaskMod:
    @named(f"global_tokens_{count}")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx < count) | (kv_idx < count)

    return mask_mod
