"""Several documents packed into one sequence: a query sees the keys of its own document."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import LARGEST, integer_array, position_array
from flexjax.mod_tools.made_for import Size, of_array
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

    segment_ids:     integer `[T]` or `[B, T]`: the document of each query, best sorted.
    kv_segment_ids:  integer `[S]` or `[B, S]`: the document of each key; `segment_ids` if None.
    lengths:         instead of ids: integer `[n]` or `[B, n]`, the tokens of each document; a short row ends in zeros.
    offsets:         instead of ids: integer `[n + 1]` or `[B, n + 1]`, as in FlashAttention's cu_seqlens.
    All may be traced. Ids that the other side lacks (-1 for queries, -2 for keys) mark padding. Tokens outside of the
    offsets, or past the sum of the lengths, see nothing. Join it to `causal` for packed language models.
    A call of other sizes raises ValueError. Source: Krell et al., "Efficient Sequence Packing", arXiv:2107.02027.
    Raises ValueError unless one of `segment_ids`, `lengths` and `offsets` is given, for arrays that do not fit, for
    known offsets that fall, and for traced lengths or offsets of more than 256 documents.
    Picture of `document(np.array([0, 0, 1, 1]))`, 4 x 4:

        # # . .
        # # . .
        . . # #
        . . # #
    """
    given = [n for n, x in (("segment_ids", segment_ids), ("lengths", lengths), ("offsets", offsets)) if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"`document` got {' and '.join(f'`{n}`' for n in given) or 'no description of the documents'}; expected "
            "exactly one of `segment_ids`, `lengths` and `offsets`. They say the same thing in three ways."
        )
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError(
                f"`document` got `kv_segment_ids` beside `{given[0]}`; expected it beside `segment_ids`. Number the "
                "keys with `segment_ids` too."
            )
        made = _offsets_of_lengths(lengths) if offsets is None else _checked_offsets(offsets)
        return _of_offsets(made, of_array(given[0], made, "B."), given[0])
    advice = "Pass the document number of each token."
    q_ids = integer_array("document", "segment_ids", segment_ids, {1: "[T]", 2: "[B, T]"}, advice)
    sizes = of_array("segment_ids", q_ids, "BT" if kv_segment_ids is not None else "Bt")
    if kv_segment_ids is None:
        return _of_ids(q_ids, q_ids, (*sizes, *of_array("segment_ids", q_ids, "BS")))
    kv_ids = integer_array("document", "kv_segment_ids", kv_segment_ids, {1: "[S]", 2: "[B, S]"}, advice)
    _check_signs(segment_ids=q_ids, kv_segment_ids=kv_ids)
    return _of_ids(q_ids, kv_ids, (*sizes, *of_array("kv_segment_ids", kv_ids, "BS")))


def _check_signs(**ids: Array) -> None:
    """Raises ValueError if one array is uint32 with a known number beyond int32, and the other is signed."""
    # jax compares them as int32, in which such a number is negative
    for (name, x), (other, y) in itertools.permutations(ids.items(), 2):
        if x.dtype != jnp.uint32 or y.dtype == jnp.uint32 or isinstance(x, Tracer) or not x.is_fully_addressable:
            continue
        most = int(np.asarray(x).max())
        if most > LARGEST:
            raise ValueError(
                f"`document`: `{name}` has numbers up to {most} beside `{other}` of {y.dtype}; expected numbers that "
                f"int32 holds, as {most} and {most - 2**32} are the same 32 bits. Number both anew, as np.unique does "
                "with return_inverse=True, or give both one type."
            )


def _of_ids(q_ids: Array, kv_ids: Array, sizes: Sequence[Size], last_holds: bool = False) -> MaskMod:
    """The mask that compares document ids, integer `[T]` and `[S]`, or `[B, T]` and `[B, S]`.

    last_holds   whether the last id is that of all tokens past the end
    """

    @named("document", *sizes)
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        q_id, kv_id = (batched_value_at(ids, b, i, last_holds) for ids, i in ((q_ids, q_idx), (kv_ids, kv_idx)))
        return q_id == kv_id

    return mask_mod


def _offsets_of_lengths(lengths: ArrayLike | None) -> Array:
    """The offsets, int32 `[n + 1]` or `[B, n + 1]`, of documents of the given `lengths`. Raises ValueError."""
    assert lengths is not None
    shapes = {1: "[n]", 2: "[B, n]"}
    counted = position_array("document", "lengths", lengths, shapes, "Pass the number of tokens of each document.")
    return jnp.pad(jnp.cumsum(counted, axis=-1, dtype=jnp.int32), [(0, 0)] * (counted.ndim - 1) + [(1, 0)])


def _checked_offsets(offsets: ArrayLike) -> Array:
    shapes = {1: "[n + 1]", 2: "[B, n + 1]"}
    advice = "Pass where each document starts, and where the last one ends."
    return position_array("document", "offsets", offsets, shapes, advice)


def _check_rises(name: str, offsets: np.ndarray) -> None:
    """Raises ValueError, about the argument `name`, unless each row of the `offsets` rises or stays."""
    falls = np.argwhere(offsets[:, 1:] < offsets[:, :-1])
    if not len(falls):
        return
    row, at = falls[0]
    before, after = offsets[row, at], offsets[row, at + 1]
    if name == "lengths":
        raise ValueError(f"`document`: `lengths` has {after - before}; expected numbers of tokens, 0 or more.")
    raise ValueError(
        f"`document`: `offsets` fall from {before} to {after}; expected each at least the one before, because "
        "documents start there in order. Sort them; fill a short row with its last offset."
    )


def _of_offsets(offsets: Array, sizes: Sequence[Size], name: str) -> MaskMod:
    """The mask of documents from offsets[i] to offsets[i + 1] - 1, int32 `[n + 1]` or `[B, n + 1]`, of argument `name`.

    Known offsets become ids of tokens, which a kernel reads faster. Traced ones do not say how many tokens there are.
    """
    if not isinstance(offsets, Tracer):
        with jax.ensure_compile_time_eval():
            known = np.atleast_2d(np.asarray(offsets))
        _check_rises(name, known)
        tokens = np.arange(max(int(known.max()), 0) + 1)  # the last of them is past every document
        ids = np.stack([np.searchsorted(row, tokens, side="right") for row in known]) - 1
        in_none = (ids < 0) | (ids >= known.shape[1] - 1)
        shape = (len(tokens),) if offsets.ndim == 1 else ids.shape
        q_ids, kv_ids = (jnp.asarray(np.where(in_none, nobody, ids).reshape(shape), jnp.int32) for nobody in (-1, -2))
        return _of_ids(q_ids, kv_ids, sizes, last_holds=True)
    count = offsets.shape[-1] - 1
    if count > MOST_TRACED:
        raise ValueError(
            f"`document` got traced offsets or lengths of {count} documents; expected at most {MOST_TRACED}. Pass "
            "`segment_ids`, for example jnp.repeat(jnp.arange(n), lengths, total_repeat_length=T)."
        )

    @named("document", *sizes)
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        def number(index: Array, nobody: int) -> Array:
            # counts the offsets after the first that are at most `index`
            at = [batched_value_at(offsets, b, jnp.int32(n)) for n in range(count + 1)]
            found = sum(((start <= index).astype(jnp.int32) for start in at[1:]), jnp.int32(0))
            return jnp.where((index >= at[0]) & (index < at[-1]), found, nobody)

        return number(q_idx, -1) == number(kv_idx, -2)

    return mask_mod
