"""Several documents packed into one sequence: a query sees the keys of its own document.

Documents are described by an id for each token, by their lengths, or by offsets: where each document starts and where the last
one ends.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import LARGEST, integer_array, position_array
from flexjax.mod_tools.signatures import MaskMod, named

MOST_TRACED = 256
"""Most documents of a batch entry whose offsets may be traced; the mask then compares a token with each offset."""


@eager
def document(
    segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    *,
    lengths: ArrayLike | None = None,
    offsets: ArrayLike | None = None,
) -> MaskMod:
    """mask = segment_ids[b, q_idx] == kv_segment_ids[b, kv_idx]

    segment_ids:     integer `[T]` or `[B, T]`: the document of each query.
    kv_segment_ids:  integer `[S]` or `[B, S]`: the document of each key; `segment_ids` if None.
    lengths:         instead of ids: integer `[n]` or `[B, n]`, the tokens of each document, one after the other; a
                     row of fewer documents ends in zeros.
    offsets:         instead of ids: integer `[n + 1]` or `[B, n + 1]`, where each document starts and the last one ends,
                     as in torch's nested tensors and FlashAttention's cu_seqlens.

    A query sees the keys of its own document.  Ids need not be sorted or consecutive, though blocks are
    skipped best when they are sorted.  All arrays may be traced.  To give queries or keys no partner at all,
    use ids that the other side lacks (-1 for padding queries, -2 for padding keys).  Tokens before the first offset
    and past the last one, or past the sum of the lengths, belong to no document: they see nothing.  Documents of
    length 0 are allowed; lengths below 0 and offsets that do not ascend make no sense and are not looked for.  For
    packed language models combine it with `causal`.

    Sizes are not checked against those of the call: an index past the end of the ids, or past the rows of an array,
    reads the last one.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.

    Raises ValueError if an array is empty, not integer or has other than one or two axes, if not exactly one of
    `segment_ids`, `lengths` and `offsets` is given, if `kv_segment_ids` is given without `segment_ids`, or if traced lengths
    or offsets describe more than 256 documents.

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
    given = [n for n, x in (("segment_ids", segment_ids), ("lengths", lengths), ("offsets", offsets)) if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"`document` got {' and '.join(f'`{n}`' for n in given) or 'no description of the documents'}; expected exactly one "
            "of `segment_ids`, `lengths` and `offsets`. They say the same thing in three ways."
        )
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError(
                f"`document` got `kv_segment_ids` beside `{given[0]}`; expected it beside `segment_ids`. Number the keys with "
                "`segment_ids` too."
            )
        return _of_offsets(_offsets_of_lengths(lengths) if offsets is None else _checked_offsets(offsets))
    advice = "Pass the document number of each token."
    q_ids = integer_array("document", "segment_ids", segment_ids, {1: "[T]", 2: "[B, T]"}, advice)
    kv_ids = q_ids
    if kv_segment_ids is not None:
        kv_ids = integer_array("document", "kv_segment_ids", kv_segment_ids, {1: "[S]", 2: "[B, S]"}, advice)
        _check_signs(segment_ids=q_ids, kv_segment_ids=kv_ids)
    return _of_ids(q_ids, kv_ids)


def _check_signs(**ids: Array) -> None:
    """Raises ValueError if one of the two arrays is uint32 with a known number beyond int32, and the other is signed: jax compares them
    as int32, in which such a number is a negative one.
    """
    for (name, x), (other, y) in itertools.permutations(ids.items(), 2):
        if x.dtype != jnp.uint32 or y.dtype == jnp.uint32 or isinstance(x, Tracer) or not x.is_fully_addressable:
            continue
        most = int(np.asarray(x).max())
        if most > LARGEST:
            raise ValueError(
                f"`document`: `{name}` has numbers up to {most} beside `{other}` of {y.dtype}; expected numbers that int32 holds, as "
                f"{most} and {most - 2**32} are the same 32 bits. Number both anew, as np.unique does with return_inverse=True, or give "
                "both one type."
            )


def _of_ids(q_ids: Array, kv_ids: Array) -> MaskMod:
    """The mask that compares the document ids of query and key, integer `[T]` and `[S]`, or `[B, T]` and `[B, S]`.

    One row serves every batch entry. An index past the end of the ids reads the last one.
    """

    @named("document")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether query and key have the same document id."""
        return batched_value_at(q_ids, b, q_idx) == batched_value_at(kv_ids, b, kv_idx)

    return mask_mod


def _offsets_of_lengths(lengths: ArrayLike | None) -> Array:
    """The offsets, int32 `[n + 1]` or `[B, n + 1]`, of documents of the given `lengths`, which are not None: the first is 0. Raises
    ValueError if they are not an integer array of one or two axes.
    """
    assert lengths is not None
    shapes = {1: "[n]", 2: "[B, n]"}
    counted = position_array("document", "lengths", lengths, shapes, "Pass the number of tokens of each document.")
    return jnp.pad(jnp.cumsum(counted, axis=-1, dtype=jnp.int32), [(0, 0)] * (counted.ndim - 1) + [(1, 0)])


def _checked_offsets(offsets: ArrayLike) -> Array:
    """The user's offsets as an int32 array; raises ValueError if they are not an integer array of one or two axes."""
    shapes = {1: "[n + 1]", 2: "[B, n + 1]"}
    advice = "Pass where each document starts, and where the last one ends."
    return position_array("document", "offsets", offsets, shapes, advice)


def _of_offsets(offsets: Array) -> MaskMod:
    """The mask of documents that start and end at `offsets`, int32 `[n + 1]` or `[B, n + 1]`; document i has the tokens
    from offsets[i] to offsets[i + 1] - 1.

    A token before the first offset or from the last one on is in no document: it sees no key, and no query sees it.
    Known offsets become ids of tokens, which a kernel reads faster.  Traced offsets do not say how many tokens there
    are; the mask then counts, for each token, the offsets after the first that are at most its position.  Raises
    ValueError for traced offsets of more than MOST_TRACED documents.
    """
    if not isinstance(offsets, Tracer):
        with jax.ensure_compile_time_eval():
            known = np.atleast_2d(np.asarray(offsets))
        tokens = np.arange(max(int(known.max()), 0) + 1)  # the last of them is past every document
        ids = np.stack([np.searchsorted(np.sort(row), tokens, side="right") for row in known]) - 1
        in_none = (ids < 0) | (ids >= known.shape[1] - 1)
        shape = (len(tokens),) if offsets.ndim == 1 else ids.shape
        q_ids, kv_ids = (jnp.asarray(np.where(in_none, nobody, ids).reshape(shape), jnp.int32) for nobody in (-1, -2))
        return _of_ids(q_ids, kv_ids)
    count = offsets.shape[-1] - 1
    if count > MOST_TRACED:
        raise ValueError(
            f"`document` got traced offsets or lengths of {count} documents; expected at most {MOST_TRACED}. Pass `segment_ids`, "
            "for example jnp.repeat(jnp.arange(n), lengths, total_repeat_length=T)."
        )

    @named("document")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether one of the traced documents contains both query and key; False if either is in no document."""

        def number(index: Array, nobody: int) -> Array:
            """The number of the document that contains the token at `index`; `nobody` if no document does."""
            at = [batched_value_at(offsets, b, jnp.int32(n)) for n in range(count + 1)]
            found = sum(((start <= index).astype(jnp.int32) for start in at[1:]), jnp.int32(0))
            return jnp.where((index >= at[0]) & (index < at[-1]), found, nobody)

        return number(q_idx, -1) == number(kv_idx, -2)

    return mask_mod
