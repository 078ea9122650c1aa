"""Reads of small arrays by a mod: an axis of size 1 serves every index of that axis."""

from jax import Array


def value_at(value: int | Array, index: Array) -> int | Array:
    """`value` itself if it is an int or `[]`, else `value[index]`; `[1]` serves every index."""
    if isinstance(value, int) or value.ndim == 0:
        return value
    return value[index] if value.shape[0] > 1 else value[0]


def batched_value_at(values: Array, b: Array, index: Array) -> Array:
    """`values[index]` for `[n]`, `values[b, index]` for `[B, n]`; `[1, n]` serves every batch entry."""
    if values.ndim == 1:
        return values[index]
    return values[b, index] if values.shape[0] > 1 else values[0, index]


def head_value(value: float | Array, h: Array, score: Array) -> float | Array:
    """`value` if it is a number; `value` if it is `[]`, else `value[h]`, in the dtype of `score`; `[1]` serves every head."""
    if isinstance(value, int | float):
        return value
    if value.ndim == 0:
        return value.astype(score.dtype)
    return (value[h] if value.shape[0] > 1 else value[0]).astype(score.dtype)
