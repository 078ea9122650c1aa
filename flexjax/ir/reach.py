"""How far the indices of a call certainly count: for the sizes of mods (mod_tools/made_for.py) and for bare reads."""

import numpy as np

from flexjax.ir.origin import OriginTable, Sizes
from flexjax.mod_tools.made_for import Reach
from flexjax.types import Origin


def reach_of(
    given: Origin | OriginTable | None,
    made: OriginTable | None,
    sizes: Sizes,
    lengths: tuple[object, object] = (None, None),
) -> Reach:
    """The reach of a call of flex_attention or create_block_mask.

    given     the argument `origin`
    made      the origin that holds: that of `given`, or of the block mask
    sizes     (batch, heads, q_len, kv_len) of the call
    lengths   query_seq_lengths and key_value_seq_lengths: nothing reads past them
    """
    counts: list[int | None] = list(sizes)
    if given is None and made is None:
        exact = [True] * 4
    elif isinstance(given, Origin):
        whole = given.whole or (None,) * 4
        fields = (given.batch, given.head, given.query, given.key)
        zero = [isinstance(x, int) and x == 0 for x in fields]
        # batch and heads that start at int 0 beside placed queries or keys are those of the whole problem, as in
        # decoding
        alone = [zero[0] and not all(zero), zero[1] and not all(zero), False, False]
        counts = [own if w is None else w for own, w in zip(sizes, whole, strict=True)]
        exact = [w is not None or a for w, a in zip(whole, alone, strict=True)]
        exact[2:] = [False, False]
    else:  # of a block mask, or of a call that is planned in parts
        table = given if isinstance(given, OriginTable) else made
        assert table is not None
        exact = [table.batch is None, table.head is None, False, False]
        counts[2:] = [None, None]
    for place, length in zip((2, 3), lengths, strict=True):
        if length is not None:
            counts[place], exact[place] = _longest(length, counts[place]), False
    return Reach((counts[0], counts[1], counts[2], counts[3]), (exact[0], exact[1], exact[2], exact[3]))


def _longest(lengths: object, count: int | None) -> int | None:
    """The largest of the lengths, at most `count`; None where they are not known on the host."""
    known = np.asarray(lengths) if isinstance(lengths, int | np.integer | np.ndarray) else np.zeros(0)
    return min(count, int(known.max())) if count is not None and known.size else None
