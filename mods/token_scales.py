"""Scales of queries and keys that were quantised token by token: they multiply the score, not the vectors."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.factory_arguments import float_array, integer
from flexjax.mod_tools.signatures import ScoreMod, named


def key_scales(scales: ArrayLike, *, group: int = 1) -> ScoreMod:
    """score * scales[b, h // group, kv_idx]

    scales:  floating `[S]`, `[B, S]` or `[B, M, S]`: what each quantised key has to be multiplied by.  Axes `B` and `M`
             of size 1 serve every index.  Differentiable.
    group:   int of at least 1: query heads per key head, `N // M`, if `scales` has one row per key head.

    `q . (scale * k) = scale * (q . k)`, so keys are read in eight bits and scaled after the product. Chain it before
    every mod that adds to the score.

    Sizes are not checked against those of the call: an index past the end of `scales` reads the last element.

    Source: Zhang et al., "SageAttention", arXiv:2410.02367.

    Raises ValueError if `scales` is not floating or has another number of axes, or `group` is less than 1 or not an
    int.
    """
    by_token = _checked("key_scales", scales, {1: "[S]", 2: "[B, S]", 3: "[B, M, S]"}, "key")
    per_row = integer("key_scales", "group", group, 1, "Pass the number of query heads per key head.")

    @named("key_scales")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score times the scale of the key."""
        row = h if per_row == 1 else h // per_row
        return score * _scale(by_token, b, row, kv_idx).astype(score.dtype)

    return score_mod


def query_scales(scales: ArrayLike) -> ScoreMod:
    """score * scales[b, h, q_idx]

    scales:  floating `[T]`, `[B, T]` or `[B, N, T]`: what each quantised query has to be multiplied by.  Axes
             `B` and `N` of size 1 serve every index.  Differentiable.

    The counterpart of `key_scales`; chain both for quantised queries and keys.

    Sizes are not checked against those of the call: an index past the end of `scales` reads the last element.

    Source: Zhang et al., "SageAttention", arXiv:2410.02367.

    Raises ValueError if `scales` is not floating or has another number of axes.
    """
    by_token = _checked("query_scales", scales, {1: "[T]", 2: "[B, T]", 3: "[B, N, T]"}, "query")

    @named("query_scales")
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score times the scale of the query."""
        return score * _scale(by_token, b, h, q_idx).astype(score.dtype)

    return score_mod


def _checked(call: str, scales: ArrayLike, shapes: dict[int, str], of: str) -> Array:
    """Returns `scales` as a floating array of three axes: `[T]` becomes `[1, 1, T]`, `[B, T]` becomes `[B, 1, T]`.  Raises ValueError if
    it has another rank or dtype.

    call:     the name of the factory, for errors
    shapes:   each allowed rank with its spelling, such as `{1: "[S]"}`
    of:       "query" or "key", for the advice in errors
    """
    array = float_array(call, "scales", scales, shapes, f"Pass the factor of each {of}.")
    if array.ndim == 1:
        return array[None, None]
    return array[:, None] if array.ndim == 2 else array


def _scale(scales: Array, b: Array, row: Array, token: Array) -> Array:
    """The element `scales[b, row, token]` of an array of three axes; of the first two, axes of size 1 serve every index."""
    by_batch, by_row = scales.shape[0] > 1, scales.shape[1] > 1
    return scales[b if by_batch else 0, row if by_row else 0, token]
