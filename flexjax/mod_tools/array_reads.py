"""Reads of small captured arrays by a mod, at scalar indices; an axis of size 1 serves every index of that axis."""

from jax import Array


def value_at(value: int | Array, index: Array) -> int | Array:
    """`value[index]` of `[n]`, `value[0]` of `[1]`; `value` itself if it is an int or `[]`."""
    if isinstance(value, int) or value.ndim == 0:
        return value
    return _at(value, index)


def _at(value: Array, index: Array) -> Array:
    # a load even of one element: jax computes value[0], and the memo of traces does not know the result
    return value[index] if value.shape[0] > 1 else value.at[index].get(mode="clip")


def batched_value_at(values: Array, b: Array, index: Array, last_holds: bool = False) -> Array:
    """`values[index]` of `[n]`, or `values[b, index]` of `[B, n]` or `[1, n]`.

    last_holds   whether the last value is meant past the end, so that nothing warns
    """
    at = index if values.ndim == 1 else (b if values.shape[0] > 1 else 0, index)
    return values.at[at].get(mode="clip") if last_holds else values[at]


def head_value(value: float | Array, h: Array, score: Array) -> float | Array:
    """The value of head `h` in the dtype of `score`, from `[N]`, `[1]` or `[]`; a Python number as it is."""
    if isinstance(value, int | float):
        return value
    if value.ndim == 0:
        return value.astype(score.dtype)
    return _at(value, h).astype(score.dtype)
