"""Biases read from arrays: by distance, or by the pair of query and key."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.factory_arguments import float_array
from flexjax.mod_tools.made_for import Size, of_array
from flexjax.mod_tools.refusals import without_frames
from flexjax.mod_tools.signatures import ScoreMod, named


@without_frames
def relative_table(table: ArrayLike) -> ScoreMod:
    """score + table[h, q_idx - kv_idx + T - 1]

    table:  floating `[2T-1]` or `[N, 2T-1]`: a bias for each distance, the query's own key at `T - 1`. Differentiable.
    `T` must be no less than the number of queries and the number of keys. A call of other sizes raises ValueError.
    Source: Liu et al., "Swin Transformer", arXiv:2103.14030, section 3.2, on a line; Shaw et al., arXiv:1803.02155.
    """
    advice = "Pass a bias for each distance -(T - 1) .. T - 1."
    by_distance = float_array("relative_table", "table", table, {1: "[2T-1]", 2: "[N, 2T-1]"}, advice)
    if by_distance.shape[-1] % 2 == 0:
        raise ValueError(
            f"`relative_table`: `table` has shape {by_distance.shape}; expected an odd last size, 2T-1. {advice}"
        )
    middle = by_distance.shape[-1] // 2
    one_row = by_distance.ndim == 2 and by_distance.shape[0] == 1
    rows = by_distance[0] if one_row else by_distance

    source = f"`table` {by_distance.dtype.name}{list(by_distance.shape)}"
    lengths = (Size(axis, 1, middle + 1, source) for axis in ("queries", "keys"))

    @named("relative_table", *of_array("table", by_distance, "N."), *lengths)
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        column = q_idx - kv_idx + middle
        entry = rows[column] if rows.ndim == 1 else rows[h, column]
        return score + entry.astype(score.dtype)

    return score_mod


@without_frames
def pair_bias(bias: ArrayLike) -> ScoreMod:
    """score + bias[b, h, q_idx, kv_idx]

    bias:  floating `[T, S]`, `[N, T, S]` or `[B, N, T, S]`; leading axes of size 1 serve every index. Differentiable.
    A call of other sizes raises ValueError. Source: Jumper et al., "Highly accurate protein structure prediction with
    AlphaFold", Nature 596, 2021, supplementary algorithm 7, among many.
    """
    advice = "Pass one number for each query and key, with axes for heads and batch in front if they differ."
    shapes = {2: "[T, S]", 3: "[N, T, S]", 4: "[B, N, T, S]"}
    array = float_array("pair_bias", "bias", bias, shapes, advice)
    given, array = array, array.reshape((1,) * (4 - array.ndim) + array.shape)
    by_batch, by_head = array.shape[0] > 1, array.shape[1] > 1
    kept = jnp.squeeze(array, tuple(axis for axis, used in enumerate((by_batch, by_head)) if not used))

    @named("pair_bias", *of_array("bias", given, "BNTS"))
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        leading = ((b,) if by_batch else ()) + ((h,) if by_head else ())
        return score + kept[(*leading, q_idx, kv_idx)].astype(score.dtype)

    return score_mod
