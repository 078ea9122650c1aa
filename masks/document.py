"""Several documents packed into one sequence."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.factory_arguments import integer_array
from flexjax.mod_tools.signatures import MaskMod, named


def document(segment_ids: ArrayLike, kv_segment_ids: ArrayLike | None = None) -> MaskMod:
    """mask = segment_ids[b, q_idx] == kv_segment_ids[b, kv_idx]

    segment_ids:     integer `[T]` or `[B, T]`: the document of each query.
    kv_segment_ids:  integer `[S]` or `[B, S]`: the document of each key; `segment_ids` if None.

    A query sees the keys of its own document.  Ids need not be sorted or consecutive, though blocks are
    skipped best when they are sorted.  Both arrays may be traced.  To give queries or keys no partner at all,
    use ids that the other side lacks (-1 for padding queries, -2 for padding keys).  For packed language
    models combine it with `causal`.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.

    Raises ValueError if an array is not integer or has other than one or two axes.

    Picture of `document(np.array([0, 0, 0, 1, 1, 2, 2, 2]))`, 8 x 8:

        # # # . . . . .
        # # # . . . . .
        # # # . . . . .
        . . . # # . . .
        . . . # # . . .
        . . . . . # # #
        . . . . . # # #
        . . . . . # # #
    """
    advice = "Pass the document number of each token."
    q_ids = integer_array("document", "segment_ids", segment_ids, {1: "[T]", 2: "[B, T]"}, advice)
    kv_ids = q_ids
    if kv_segment_ids is not None:
        kv_ids = integer_array("document", "kv_segment_ids", kv_segment_ids, {1: "[S]", 2: "[B, S]"}, advice)

    @named("document")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return batched_value_at(q_ids, b, q_idx) == batched_value_at(kv_ids, b, kv_idx)

    return mask_mod
