"""The relative position biases of T5: a learned bias for each bucket of distances and each head.

Near distances have a bucket each; far ones share buckets that grow logarithmically.
"""

import bisect

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import float_array, integer
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@eager
def t5_bias(table: ArrayLike, *, bidirectional: bool, max_distance: int = 128) -> ScoreMod:
    """score + table[h, t5_buckets(..)[kv_idx - q_idx]]

    table:          floating `[N or 1, num_buckets]`, the transpose of T5's checkpoints. Differentiable.
    bidirectional:  True for encoders: half of the buckets are for later keys. False: later keys share bucket 0.
    max_distance:   int: from here on all distances share the last bucket.
    T5 does not scale its scores: pass `scale=1.0`. A call of another number of heads raises ValueError.
    Source: Raffel et al., "T5", arXiv:1910.10683, section 2.1.
    """
    advice = "Pass a learned bias for each query head and bucket."
    by_bucket = float_array("t5_bias", "table", table, {2: "[N, num_buckets]"}, advice)
    reach = integer("t5_bias", "max_distance", max_distance, 1, "T5 uses 128.")
    relative = np.arange(-reach, reach + 1)
    buckets = t5_buckets(relative, num_buckets=by_bucket.shape[1], bidirectional=bidirectional, max_distance=reach)
    by_distance = by_bucket[0, buckets] if by_bucket.shape[0] == 1 else by_bucket[:, buckets]
    todo = "Heads are the first axis: transpose a table of [num_buckets, N]."
    sizes = (s._replace(todo=todo) for s in of_array("table", by_bucket, "N."))

    @named("t5_bias", *sizes)
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        row = jnp.clip(kv_idx - q_idx, -reach, reach) + reach
        entry = by_distance[row] if by_distance.ndim == 1 else by_distance[h, row]
        return score + entry.astype(score.dtype)

    return score_mod


@without_frames
def t5_buckets(relative: np.ndarray, *, num_buckets: int, bidirectional: bool, max_distance: int = 128) -> np.ndarray:
    """bucket = n if n < m else m + min(floor(log(n / m) / log(max_distance / m) * (c - m)), c - m - 1),  m = c // 2

    relative:       integer numpy array of any shape: key position minus query position.
    num_buckets:    int: number of buckets, even if `bidirectional`.
    bidirectional:  True: `c = num_buckets / 2`, `n = abs(relative)`; later keys get `c` more.
                    False: `c = num_buckets`, `n = max(-relative, 0)`.
    max_distance:   int above `m`: from here on all distances share the last bucket.
    int32, computed in integers. Source: arXiv:1910.10683, section 2.1. Raises ValueError for arguments that do not fit.
    """
    if not isinstance(bidirectional, bool):
        raise ValueError(
            f"`t5_buckets`: `bidirectional` is {bidirectional!r}; expected True or False. True is for encoders, False "
            "for decoders."
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
    """The least `n` with `log(n / own) / log(reach / own) * steps >= j`, for each shared bucket j = 1 .. steps - 1."""

    def first(j: int) -> int:
        bound = reach**j * own**steps
        return bisect.bisect_left(range(reach), True, key=lambda n: n**steps * own**j >= bound)

    return [first(j) for j in range(1, steps)]
