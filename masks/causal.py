"""Masks that hide the future."""

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.numpy_arrays import as_array
from flexjax.mod_tools.signatures import MaskMod, named

FARTHEST = 2**30
"""Offsets that are on the host are cut to it, so that their sum with a position stays in int32; no sequence is as long."""


def causal(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """mask = q_idx >= kv_idx

    Query `q` sees the keys `0 .. q`, itself included.  Queries and keys are both counted from the start;
    when there are more keys than queries and the last query belongs to the last key, take
    `causal_offset(kv_len - q_len)`.

    Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.2.3.

    Picture of `causal`, 8 x 8:

        # . . . . . . .
        # # . . . . . .
        # # # . . . . .
        # # # # . . . .
        # # # # # . . .
        # # # # # # . .
        # # # # # # # .
        # # # # # # # #
    """
    return q_idx >= kv_idx


@eager
def causal_offset(offset: ArrayLike) -> MaskMod:
    """mask = q_idx + offset >= kv_idx

    offset:  int, or int32 `[]` or `[B]`: position, among the keys, of query 0.  It may be traced.

    Query `q` sees the first `q + offset + 1` keys.  With a cache of `kv_len` keys whose last `q_len` belong to the
    queries, `offset = kv_len - q_len`; in decoding it is the number of tokens already cached.  A negative
    offset leaves the first `-offset` queries without any key.  Offsets of Python and numpy beyond 2^30 count as 2^30, and
    below -2^30 as -2^30, because a sum beyond int32 wraps around; those in jax arrays are added as they are.

    Sizes are not checked against those of the call: an index past the end of `offset` reads the last element.

    Raises ValueError if `offset` is not integer or has more than one axis.

    Picture of `causal_offset(3)`, 5 x 8:

        # # # # . . . .
        # # # # # . . .
        # # # # # # . .
        # # # # # # # .
        # # # # # # # #
    """
    given = integer_or_vector("causal_offset", "offset", offset, "[B]", None, "Pass one int, or one per batch entry.")
    shift = _cut(given, offset)

    @named(f"causal_offset_{shift}" if isinstance(shift, int) else "causal_offset")
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the key is not later than the query, whose position among the keys is q_idx + offset."""
        return q_idx + value_at(shift, b) >= kv_idx

    return mask_mod


def _cut(given: int | Array, offset: ArrayLike) -> int | Array:
    """The checked offset `given`, an int or int32 `[]` or `[B]`, cut to the numbers from -FARTHEST to FARTHEST if the user's `offset`, from
    which it was made, is on the host; as it is otherwise, because to look at it would wait for the device.
    """
    if isinstance(given, int):
        return max(-FARTHEST, min(given, FARTHEST))
    if any(isinstance(x, Array) for x in jax.tree.leaves(offset)):
        return given
    return as_array(np.clip(np.asarray(offset).astype(np.int64), -FARTHEST, FARTHEST).astype(np.int32))
