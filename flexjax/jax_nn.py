"""`dot_product_attention` with the signature of jax.nn.dot_product_attention, compiled by the same machinery.

Bias, masks, windows and lengths become mods over captured arrays, so blocks that they switch off are skipped and the bias gets
its gradient without a dense intermediate. Dimensions of size 1 stay of size 1.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flexjax.attention import flex_attention
from flexjax.combine import and_masks
from flexjax.errors import bad_argument
from flexjax.types import AuxRequest

Array = jax.Array
MaskMod = Callable[[Array, Array, Array, Array], Array]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scale * query . key + bias, where masked) . value, as jax.nn.dot_product_attention.

    query   [B, T, N, D] or [T, N, D];  key, value  [B, S, M, D] or [S, M, D], M divides N
    bias    added to the scores, broadcastable to [B, N, T, S]; differentiable
    mask    bool, True where attended, broadcastable to [B, N, T, S]
    is_causal                key position of at most the query position
    query_seq_lengths        int [B]: queries past their length give 0
    key_value_seq_lengths    int [B]: keys past their length are masked
    local_window_size        (left, right) keys beside the own position, or one int for both sides
    implementation           as in flex_attention
    return_residual          also returns the logsumexp, [B, T, N] or [T, N] in the dtype of key, without a gradient

    Returns [B, T, N, E] or [T, N, E]. Raises ValueError for shapes that do not fit.

    A query that may look at no key gives 0 (and logsumexp -inf), as elsewhere in flexjax; jax.nn gives it the mean of all values.
    """
    q, k, v = (jnp.asarray(x) for x in (query, key, value))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != q.ndim or x.ndim not in (3, 4):
            dims = "4 dims, [B, T, N, D], or 3, [T, N, D]," if name == "query" else f"{q.ndim} dims, as query has"
            raise bad_argument(name, f"of shape {x.shape}", dims.rstrip(","), "Add or drop the batch axis.")
    single = q.ndim == 3
    if single:
        q, k, v = q[None], k[None], v[None]
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    parts: list[MaskMod] = []
    if is_causal:
        parts.append(lambda b, h, q, kv: q >= kv)
    if local_window_size is not None:
        parts.append(_window(local_window_size))
    if query_seq_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_seq_lengths, full[0])
        parts.append(lambda b, h, q, kv: q < lengths[b])
    if key_value_seq_lengths is not None:
        kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, full[0])
        parts.append(lambda b, h, q, kv: kv < kv_lengths[b])
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise bad_argument(
                "mask", f"of dtype {mask.dtype.name}", "bool, True where attended", "Compare it with != 0."
            )
        parts.append(broadcast_lookup("mask", mask, full))
    score_mod = None
    if bias is not None:
        look_up = broadcast_lookup("bias", jnp.asarray(bias), full)
        score_mod = lambda score, b, h, q, kv: score + look_up(b, h, q, kv).astype(score.dtype)
    result = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        mask_mod=and_masks(*parts) if parts else None,
        scale=scale,
        implementation=implementation,
        return_aux=AuxRequest(lse=True) if return_residual else None,
    )
    if not isinstance(result, tuple):
        return result[0] if single else result
    out, aux = result
    assert aux.lse is not None
    lse = jax.lax.stop_gradient(aux.lse.astype(k.dtype))
    return (out[0], lse[0]) if single else (out, lse)


def _window(size: int | tuple[int, int]) -> MaskMod:
    left, right = size if isinstance(size, tuple | list) and len(size) == 2 else (size, size)
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in (left, right)):
        raise bad_argument(
            "local_window_size",
            repr(size),
            "a non-negative int, or two: (left, right)",
            "0 sees no neighbour.",
        )
    return lambda b, h, q, kv: (q - kv <= left) & (kv - q <= right)


def _lengths(name: str, values: ArrayLike, batch: int) -> Array:
    lengths = jnp.asarray(values)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise bad_argument(
            name,
            f"{lengths.dtype.name}{list(lengths.shape)}",
            f"int32[{batch}], one for each batch entry",
            "Reshape it.",
        )
    return lengths


def broadcast_lookup(name: str, array: Array, full: tuple[int, int, int, int]) -> MaskMod:
    """(b, h, q, kv) -> element of an array that broadcasts to `full`; dims of size 1 are read at 0."""
    shape = (1,) * (4 - array.ndim) + tuple(array.shape)
    if array.ndim > 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise bad_argument(
            name,
            f"of shape {tuple(array.shape)}",
            f"one that broadcasts to [B, N, T, S] = {list(full)}",
            "Reshape it.",
        )
    four = array.reshape(shape)

    def look_up(b: Array, h: Array, q: Array, kv: Array) -> Array:
        return four[tuple(0 if n == 1 else i for i, n in zip((b, h, q, kv), shape, strict=True))]

    return look_up
