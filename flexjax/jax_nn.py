"""`dot_product_attention`, with the arguments of jax.nn.dot_product_attention, computed by `flex_attention`.

Bias, masks and windows become score and mask functions over captured arrays. Blocks that they hide are skipped, and the
bias gets its gradient without an intermediate of shape [B, N, T, S].
"""

import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flexjax.attention import flex_attention
from flexjax.call.arguments import Keywords
from flexjax.combine import and_masks
from flexjax.errors import bad_argument, kind_of, public
from flexjax.mod_tools.settings import own
from flexjax.plan.kernel_plan import FLOAT8
from flexjax.types import ArrayArgument, AuxRequest, Implementations, MaskMod, Quantized

Array = jax.Array
Lookup = Callable[[Array, Array, Array, Array], Array]  # (b, h, q_idx, kv_idx) -> element of an array


class Options(typing.TypedDict, total=False):
    """The keywords of `dot_product_attention` except return_residual, which decides the type of the result."""

    scale: float | Array | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: ArrayLike | tuple[ArrayLike, ArrayLike] | None
    implementation: Implementations | None


@typing.overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: typing.Literal[False] = False,
    **options: typing.Unpack[Options],
) -> Array: ...


@typing.overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: typing.Literal[True],
    **options: typing.Unpack[Options],
) -> tuple[Array, Array]: ...


@public
@own
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    implementation: Implementations | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(where(mask, scale * query . key + bias, -inf)) . value, as jax.nn.dot_product_attention.

    query        [B, T, N, D] or [T, N, D]; of batch 1 it needs keys of batch 1
    key, value   [B or 1, S, M, D] or [S, M, D]; M divides N
    bias         added to the scores, broadcastable to [B, N, T, S]; differentiable
    mask         bool, True where the query attends to the key, broadcastable to [B, N, T, S]
    scale, implementation  as in flex_attention; there is no 'cudnn'
    is_causal    hides keys after the query position
    query_seq_lengths, key_value_seq_lengths  int [B]: queries and keys past their length do not exist
    local_window_size  (left, right): keys from query - left to query + right; one integer for both sides. Negative
                 numbers leave out the query's own position, fractions of a pair are rounded down, jax scalars may be
                 traced
    return_residual  also return the logsumexp, [B, T, N] or [T, N] in the dtype of key, without a gradient

    Returns [B, T, N, E], or [T, N, E] if query has three axes. Raises ValueError for arguments that do not fit, integer
    and float8 inputs and a complex bias; NotImplementedError if no backend accepts the call.

    Three results differ from those of jax.nn. A query whose keys are all hidden gives 0, logsumexp -inf and zero
    gradients; jax.nn gives the mean of the hidden values, or NaN for a bias of -inf. Integer inputs are refused. The
    softmax of float64 inputs is float64.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None or isinstance(x, Quantized):
            raise bad_argument(name, kind_of(x), "an array", "Pass a jax.Array or a numpy array.")
    query = jnp.asarray(query)
    q, k, v = (_four_axes(name, jnp.asarray(x)) for name, x in (("query", query), ("key", key), ("value", value)))
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    parts: list[MaskMod] = []
    if is_causal:
        parts.append(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    if local_window_size is not None:
        parts.append(_window(local_window_size))
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise bad_argument(
                "mask", f"of dtype {mask.dtype.name}", "bool, True where attended", "Compare it with != 0."
            )
        parts.append(broadcast_lookup("mask", mask, full))
    score_mod = None
    if bias is not None:
        bias = jnp.asarray(bias)
        if jnp.issubdtype(bias.dtype, jnp.complexfloating):
            raise bad_argument("bias", f"of dtype {bias.dtype.name}", "a real dtype", "Pass its real part, bias.real.")
        look_up = broadcast_lookup("bias", bias, full)
        score_mod = lambda score, *at: score + look_up(*at).astype(score.dtype)
    arguments: Keywords[ArrayArgument] = {
        "score_mod": score_mod,
        "mask_mod": and_masks(*parts) if parts else None,
        "scale": scale,
        "query_seq_lengths": _lengths("query_seq_lengths", query_seq_lengths, full[0]),
        "key_value_seq_lengths": _lengths("key_value_seq_lengths", key_value_seq_lengths, full[0]),
    }
    front = query.shape[:-1]
    chosen = _checked_implementation(implementation)
    if not return_residual:
        return flex_attention(q, k, v, implementation=chosen, **arguments).reshape(*front, v.shape[-1])
    out, aux = flex_attention(q, k, v, implementation=chosen, return_aux=AuxRequest(lse=True), **arguments)
    assert aux.lse is not None
    lse = jax.lax.stop_gradient(aux.lse.astype(k.dtype))
    return out.reshape(*front, v.shape[-1]), lse.reshape(front)


def _four_axes(name: str, x: Array) -> Array:
    """x as [B, tokens, heads, dim], with leading axes of size 1 added. Raises ValueError for integers and float8."""
    if not 1 <= x.ndim <= 4:
        raise bad_argument(
            name, f"of shape {x.shape}", "1 to 4 dims, [B, tokens, heads, dim]", "Use jax.vmap for more."
        )
    if jnp.issubdtype(x.dtype, jnp.integer):
        raise bad_argument(
            name,
            f"{x.dtype.name}{list(x.shape)}",
            "a floating array",
            "Cast it, for example x.astype(jnp.float32): jax.nn rounds probabilities to the dtype of key, here to 0 "
            "or 1.",
        )
    if x.dtype == FLOAT8:
        raise bad_argument(
            name,
            f"{x.dtype.name}{list(x.shape)}",
            "a floating array of 16 bits or more",
            "Cast it, or call flexjax.flex_attention, which takes float8 and its scales.",
        )
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _checked_implementation(implementation: Implementations | None) -> Implementations | None:
    """The argument itself. Raises ValueError for 'cudnn', which flexjax does not have."""
    given: object = implementation
    if given == "cudnn" or (isinstance(given, list | tuple) and "cudnn" in given):
        raise bad_argument(
            "implementation",
            repr(implementation),
            "None, or one or several of 'mosaic_gpu', 'mosaic_tpu', 'xla', 'reference'",
            "flexjax has kernels of its own and does not call cuDNN; None runs them on the GPUs that they support.",
        )
    return implementation


UNBOUNDED = 2**30
"""Tokens; a side of a window of this size hides nothing, because positions are int32 and sequences are shorter."""


def _window(size: ArrayLike | Sequence[ArrayLike]) -> MaskMod:
    """The mask mod of local_window_size: True for keys from q_idx - left to q_idx + right. Raises ValueError."""
    # as in jax.nn, a single number must be an integer, and a pair may be fractions
    many = isinstance(size, list | tuple) or getattr(size, "ndim", 0) == 1
    pair = tuple(typing.cast(Sequence[ArrayLike], size)) if many else (size, size)
    sides = [x for x in map(_tokens, pair) if x is not None]
    one_fraction = not many and jnp.issubdtype(getattr(size, "dtype", type(size)), jnp.floating)
    if len(pair) != 2 or len(sides) != 2 or one_fraction:
        got = f"({', '.join(map(_shown, pair))})" if many else _shown(size)
        raise bad_argument(
            "local_window_size", got, "an integer, or two numbers: (left, right)", "0 sees no neighbour."
        )
    left, right = sides
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)


def _tokens(size: object) -> int | Array | None:
    """The tokens on one side of a window, rounded down and cut to +-UNBOUNDED; None if `size` is no number."""
    if isinstance(size, Array):
        if size.shape != () or jnp.issubdtype(size.dtype, jnp.complexfloating):
            return None
        if not jnp.issubdtype(size.dtype, jnp.floating):
            unsigned = jnp.issubdtype(size.dtype, jnp.unsignedinteger)
            whole = size.astype(jnp.promote_types(size.dtype, jnp.uint32 if unsigned else jnp.int32))
            return jnp.clip(whole, 0 if unsigned else -UNBOUNDED, UNBOUNDED).astype(jnp.int32)
        # jax.nn compares with NaN, which is false, so a window of NaN is empty
        whole = jnp.where(jnp.isnan(size), -jnp.inf, jnp.floor(size)).astype(jnp.float32)
        return jnp.clip(whole, -UNBOUNDED, UNBOUNDED).astype(jnp.int32)
    try:
        number = float(size)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(size, str) or math.isnan(number) else math.floor(min(max(number, -UNBOUNDED), UNBOUNDED))


def _shown(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Array | np.ndarray) else repr(x)


def _lengths(name: str, values: ArrayLike | None, batch: int) -> Array | None:
    """The lengths as an integer array [batch]; None for None. Raises ValueError, for a single number too."""
    if values is None:
        return None
    lengths = jnp.asarray(values)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise bad_argument(
            name,
            f"{lengths.dtype.name}{list(lengths.shape)}",
            f"int32[{batch}], one for each batch entry",
            "Reshape it.",
        )
    return lengths


def broadcast_lookup(name: str, array: Array, full: tuple[int, int, int, int]) -> Lookup:
    """(b, h, q_idx, kv_idx) -> the element of `array`, broadcast to `full` = (B, N, T, S). Raises ValueError."""
    shape = (1,) * (4 - array.ndim) + tuple(array.shape)
    if array.ndim > 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise bad_argument(
            name, f"of shape {tuple(array.shape)}", f"one that broadcasts to [B, N, T, S] = {list(full)}", "Reshape it."
        )
    four = array.reshape(shape)

    def look_up(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return four[tuple(0 if n == 1 else i for i, n in zip((b, h, q_idx, kv_idx), shape, strict=True))]

    return look_up
