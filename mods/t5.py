"""The relative position biases of T5: a learned bias for each bucket of distances and each head.

Near distances have a bucket each; far ones share buckets that grow logarithmically.
"""

import bisect

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.factory_arguments import float_array, integer
from flexjax.mod_tools.signatures import ScoreMod, named


def t5_bias(table: ArrayLike, *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """score + table[t5_buckets(..)[kv_idx - q_idx], h]

    table:          floating `[num_buckets, N]`: a bias for each bucket and query head.  Differentiable.
    bidirectional:  True for encoders: half of the buckets are for later keys.  False for decoders: later keys
                    share bucket 0 with the query's own, and `masks.causal` hides them.
    max_distance:   int: from here on all distances share the last bucket.

    The factory expands the table once to an array by distance and head, for the distances `-max_distance ..
    max_distance`; the mod clips `kv_idx - q_idx` to them and reads one element.  T5 does not scale its scores: pass
    `scale=1.0` to agree with its weights.

    The number of heads is not checked against that of the call: heads past the end of `table` have its last column.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", arXiv:1910.10683, section 2.1.

    Raises ValueError if `table` is not floating or has other than two axes, or `t5_buckets` refuses the rest.
    """
    advice = "Pass a learned bias for each bucket and query head."
    by_bucket = float_array("t5_bias", "table", table, {2: "[num_buckets, N]"}, advice)
    reach = integer("t5_bias", "max_distance", max_distance, 1, "T5 uses 128.")
    relative = np.arange(-reach, reach + 1)
    buckets = t5_buckets(relative, num_buckets=by_bucket.shape[0], bidirectional=bidirectional, max_distance=reach)
    by_distance = by_bucket[buckets]

    @named("t5_bias")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score plus the bias of the head for the distance between query and key."""
        row = jnp.clip(kv_idx - q_idx, -reach, reach) + reach
        return score + by_distance[row, h].astype(score.dtype)

    return score_mod


def t5_buckets(relative: np.ndarray, *, num_buckets: int, bidirectional: bool, max_distance: int = 128) -> np.ndarray:
    """bucket = n                                                           if n < m
             = m + min(floor(log(n / m) / log(max_distance / m) * (c - m)), c - m - 1)   otherwise

    relative:       integer numpy array of any shape: key position minus query position.
    num_buckets:    int: number of buckets, even if `bidirectional`.
    bidirectional:  True: `c = num_buckets / 2`, `n = abs(relative)`; later keys get `c` more.
                    False: `c = num_buckets`, `n = max(-relative, 0)`.
    max_distance:   int above `m`: from here on all distances share the last bucket.

    `m = c // 2` is the number of distances with a bucket of their own.  Computed in integers, hence free of
    rounding.  int32, shaped like `relative`.

    Source: arXiv:1910.10683, section 2.1.

    Raises ValueError if `relative` is not integer, `bidirectional` is no bool, `num_buckets` is too small or odd where it must be even,
    or `max_distance` does not exceed `m`.
    """
    if not isinstance(bidirectional, bool):
        raise ValueError(
            f"`t5_buckets`: `bidirectional` is {bidirectional!r}; expected True or False. True is for encoders, False for decoders."
        )
    relative = np.asarray(relative)
    if not np.issubdtype(relative.dtype, np.integer):
        raise ValueError(
            f"`t5_buckets`: `relative` has dtype {relative.dtype}; expected integers. "
            "Pass key positions minus query positions."
        )
    relative = relative.astype(np.int64)  # the least number of a narrow type has no opposite there
    least = 4 if bidirectional else 2
    count = integer("t5_buckets", "num_buckets", num_buckets, least, "T5 uses 32.")
    if bidirectional and count % 2:
        raise ValueError(
            f"`t5_buckets`: `num_buckets` is {count}; expected an even int when `bidirectional` is True. "
            "Half of the buckets are for later keys."
        )
    per_side = count // 2 if bidirectional else count
    own = per_side // 2
    reach = integer("t5_buckets", "max_distance", max_distance, own + 1, "Nearer keys have their own bucket.")
    limits = _first_distances(own, reach, per_side - own)
    distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    bucket = np.where(distance < own, distance, own + np.searchsorted(limits, distance, side="right"))
    if bidirectional:
        bucket = bucket + per_side * (relative > 0)
    return bucket.astype(np.int32)


def _first_distances(own: int, reach: int, steps: int) -> list[int]:
    """The first distance of each bucket that several distances share, but for the first such bucket, ascending.

    own:     number of distances with a bucket of their own, `m` in `t5_buckets`; shared buckets begin there
    reach:   the distance from which on all share the last bucket, `max_distance`
    steps:   number of shared buckets

    For `j = 1 .. steps - 1` it is the least `n` with `log(n / own) / log(reach / own) * steps >= j`.
    """

    def first(j: int) -> int:
        """The first distance of shared bucket number `j`, by exact comparisons of integer powers."""
        bound = reach**j * own**steps
        return bisect.bisect_left(range(reach), True, key=lambda n: n**steps * own**j >= bound)

    return [first(j) for j in range(1, steps)]
