"""A mask that starts anew in every document of a packed sequence, as if each document were alone."""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_array
from flexjax.mod_tools.made_for import of_array, sizes_of
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def per_document(mask_mod: MaskMod, segment_ids: ArrayLike) -> MaskMod:
    """mask = (start[b, q_idx] == start[b, kv_idx]) & mask_mod(b, h, q_idx - start[b, q_idx], kv_idx - start[b, kv_idx])

    mask_mod:     a mask of positions in one document, such as `prefix_lm(64)` or `sliding_window(128)`.
    segment_ids:  integer `[T]` or `[B, T]`, may be traced: a run of equal ids is a document, which begins at `start`.
    A call of other sizes raises ValueError. Source: PyTorch, "FlexAttention", 2024, "Document masking".
    Raises ValueError for other arguments.
    Picture of `per_document(prefix_lm(2), np.array([0, 0, 1, 1, 1]))`, 5 x 5:

        # # . . .
        # # . . .
        . . # # .
        . . # # .
        . . # # #
    """
    if not callable(mask_mod):
        raise ValueError(
            f"`per_document`: `mask_mod` is {mask_mod!r}; expected a function of (b, h, q_idx, kv_idx). Pass the mask "
            "of one document first, then the ids."
        )
    shapes = {1: "[T]", 2: "[B, T]"}
    ids = integer_array("per_document", "segment_ids", segment_ids, shapes, "Pass the document number of each token.")
    tokens = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    begins = jnp.concatenate([jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1)
    start = lax.cummax(jnp.where(begins, tokens, 0), axis=ids.ndim - 1)
    position = tokens - start

    inner = tuple(s for s in sizes_of(mask_mod) if s.axis in ("batch", "heads"))  # its positions count in a document

    @named(
        f"per_document_{getattr(mask_mod, '__name__', 'mask')}",
        *of_array("segment_ids", ids, "Bt"),
        *of_array("segment_ids", ids, "BS"),
        *inner,
    )
    def restarted(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        same = batched_value_at(start, b, q_idx) == batched_value_at(start, b, kv_idx)
        return same & mask_mod(b, h, batched_value_at(position, b, q_idx), batched_value_at(position, b, kv_idx))

    return restarted
