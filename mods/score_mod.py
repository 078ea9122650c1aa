"""What a score modification is, and one small helper that several mod files share."""

from collections.abc import Callable

from jax import Array

ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]
"""`(score, b, h, q_idx, kv_idx) -> score`: scalars, floating and int32; `score` is already scaled."""


def of_head(value: float | Array, h: Array, score: Array) -> float | Array:
    """`value` if it is a number; `value` if it is `[]`, else `value[h]`, in the dtype of `score`."""
    if isinstance(value, int | float):
        return value
    if value.ndim == 0:
        return value.astype(score.dtype)
    return (value[h] if value.shape[0] > 1 else value[0]).astype(score.dtype)
