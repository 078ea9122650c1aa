"""Reads of small captured arrays by a mod, at scalar indices; an axis of size 1 serves every index of that axis."""

from jax import Array


def value_at(value: int | Array, index: Array) -> int | Array:
    """The scalar `value[index]` of a vector `[n]`; `value` itself if it is an int or `[]`, and `value[0]` if it is `[1]`."""
    if isinstance(value, int) or value.ndim == 0:
        return value
    return value[index] if value.shape[0] > 1 else value[0]


def batched_value_at(values: Array, b: Array, index: Array) -> Array:
    """The scalar `values[index]` of an array `[n]`, or `values[b, index]` of `[B, n]`; of `[1, n]`, `values[0, index]`.

    b, index:   int32 scalars: the batch entry and the position
    """
    if values.ndim == 1:
        return values[index]
    return values[b, index] if values.shape[0] > 1 else values[0, index]


def head_value(value: float | Array, h: Array, score: Array) -> float | Array:
    """The value of head `h`, in the dtype of `score`: `value[h]` of a vector `[N]`, `value[0]` of `[1]`, `value` if it
    is `[]`.

    A Python number is returned as it is, without a dtype.
    """
    if isinstance(value, int | float):
        return value
    if value.ndim == 0:
        return value.astype(score.dtype)
    return (value[h] if value.shape[0] > 1 else value[0]).astype(score.dtype)
