"""Scales of queries and keys that were quantised token by token: they multiply the score, not the vectors."""

from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.factory_arguments import float_array, integer
from flexjax.mod_tools.made_for import of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def key_scales(scales: ArrayLike, *, group: int = 1) -> ScoreMod:
    """score * scales[b, h // group, kv_idx]

    scales:  floating `[S]`, `[B or 1, S]` or `[B or 1, M or 1, S]`: of each quantised key. Differentiable.
    group:   int of at least 1: query heads per key head, `N // M`, if `scales` has one row per key head.
    Keys are read in eight bits and scaled after the product; chain it before mods that add to the score.
    A call of other sizes raises ValueError. Source: Zhang et al., "SageAttention", arXiv:2410.02367.
    """
    by_token = _checked("key_scales", scales, {1: "[S]", 2: "[B, S]", 3: "[B, M, S]"}, "key")
    per_row = integer("key_scales", "group", group, 1, "Pass the number of query heads per key head.")

    @named("key_scales", *of_array("scales", by_token, "BNS", per_row))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        row = h if per_row == 1 else h // per_row
        return score * _scale(by_token, b, row, kv_idx).astype(score.dtype)

    return score_mod


@without_frames
def query_scales(scales: ArrayLike) -> ScoreMod:
    """score * scales[b, h, q_idx]

    scales:  floating `[T]`, `[B or 1, T]` or `[B or 1, N or 1, T]`: what each quantised query is multiplied by.
    Differentiable. A call of other sizes raises ValueError. Source: Zhang et al., "SageAttention", arXiv:2410.02367.
    """
    by_token = _checked("query_scales", scales, {1: "[T]", 2: "[B, T]", 3: "[B, N, T]"}, "query")

    @named("query_scales", *of_array("scales", by_token, "BNT"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return score * _scale(by_token, b, h, q_idx).astype(score.dtype)

    return score_mod


def _checked(call: str, scales: ArrayLike, shapes: dict[int, str], of: str) -> Array:
    """`scales` as a floating array of three axes: `[1, 1, T]` of `[T]`, `[B, 1, T]` of `[B, T]`."""
    array = float_array(call, "scales", scales, shapes, f"Pass the factor of each {of}.")
    if array.ndim == 1:
        return array[None, None]
    return array[:, None] if array.ndim == 2 else array


def _scale(scales: Array, b: Array, row: Array, token: Array) -> Array:
    """`scales[b, row, token]` of an array of three axes; of the first two, axes of size 1 serve every index."""
    by_batch, by_row = scales.shape[0] > 1, scales.shape[1] > 1
    return scales[b if by_batch else 0, row if by_row else 0, token]
