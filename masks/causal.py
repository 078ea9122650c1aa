"""Masks that hide the future."""

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import integer_or_vector
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.numpy_arrays import as_array
from flexjax.mod_tools.refusals import no_factory
from flexjax.mod_tools.signatures import MaskMod, named

FARTHEST = 2**30
"""Offsets that are on the host are cut to it, so that their sum with a position stays in int32."""


@no_factory
def causal(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """mask = q_idx >= kv_idx

    Queries and keys are both counted from the start; see `causal_offset` for queries that continue a cache. Source:
    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.2.3.

    Picture of `causal`, 4 x 4:

        # . . .
        # # . .
        # # # .
        # # # #
    """
    return q_idx >= kv_idx


@eager
def causal_offset(offset: ArrayLike) -> MaskMod:
    """mask = q_idx + offset >= kv_idx

    offset:  int, or int32 `[]` or `[B]`: position of query 0 among the keys. May be traced.
    A negative offset leaves the first queries without a key. Offsets on the host are cut to +-2^30.
    A call of other sizes raises ValueError. Raises ValueError if `offset` is not integer or has more than one axis.
    Picture of `causal_offset(2)`, 3 x 5:

        # # # . .
        # # # # .
        # # # # #
    """
    given = integer_or_vector("causal_offset", "offset", offset, "[B]", None, "Pass one int, or one per batch entry.")
    shift = _cut(given, offset)

    @named(f"causal_offset_{shift}" if isinstance(shift, int) else "causal_offset", *of_array("offset", shift, "B"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return q_idx + value_at(shift, b) >= kv_idx

    return mask_mod


def _cut(given: int | Array, offset: ArrayLike) -> int | Array:
    """The checked offset `given`, int or int32 `[]` or `[B]`, cut to +-FARTHEST."""
    if isinstance(given, int):
        return max(-FARTHEST, min(given, FARTHEST))
    # an array on the device stays as it is, because to look at it would wait
    if any(isinstance(x, Array) for x in jax.tree.leaves(offset)):
        return given
    return as_array(np.clip(np.asarray(offset).astype(np.int64), -FARTHEST, FARTHEST).astype(np.int32))
