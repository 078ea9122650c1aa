"""Attention over a ring cache whose slots store the position of their token."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from flexjax.attention import flex_attention
from flexjax.call.checks import check_array
from flexjax.errors import bad_argument, public
from flexjax.jax_nn import broadcast_lookup
from flexjax.mod_tools.factory_arguments import position_array
from flexjax.mod_tools.settings import own
from flexjax.nn.placed_masks import Placed, Window
from flexjax.types import ArrayArgument, Implementations, KernelOptions, MaskMod

Array = jax.Array


@public
@own
def cached_attention(
    query: ArrayArgument,
    key: ArrayArgument,
    value: ArrayArgument,
    *,
    mask: ArrayLike | None = None,
    positions: ArrayLike,
    kv_positions: ArrayLike,
    window: Window | None = None,
    softcap: float | Array | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
) -> Array:
    """Attention of new tokens over a cache whose slots are in any order, as those of a ring are.

        without mask:  (0 <= kv_positions[b, kv]) & (kv_positions[b, kv] <= positions[b, q])
        window:        & (abs(positions[b, q] - kv_positions[b, kv]) < window)

    query         [B, T, N, D];  key, value  [B, S, M, D], [B, S, M, E]: the slots of the cache
    mask          bool [B, T, S] or [B, N, T, S], axes of 1 broadcast: True where attended; in place of the first line
    positions     int [B, T] or [T]: position of each query
    kv_positions  int [B, S] or [S]: position of each slot's token, negative for an empty slot
    window        int, int32 [] or [N], or a pair (left, right), as in segment_attention
    softcap       softcap * tanh(score / softcap); 0 is no cap
    the rest      as in flexjax.flex_attention

    Returns [B, T, N, E]. A query that sees no slot gives 0. Raises ValueError for arguments that do not fit.

        out = flexjax.nn.cached_attention(q, cache["k"], cache["v"], positions=at, kv_positions=cache["positions"])
    """
    q, k, v = (check_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise bad_argument(name, f"of shape {x.shape}", "4 dims, [B, tokens, heads, dim]", "Add a batch axis.")
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    at = _placed("positions", positions, sizes[0], sizes[2])
    kv_at = _placed("kv_positions", kv_positions, sizes[0], sizes[3])
    placed = Placed(function="cached_attention", heads=sizes[1], at=at, kv_at=kv_at)
    if mask is None:
        seen: MaskMod = lambda b, h, q_idx, kv_idx: kv_at[b, kv_idx] >= 0
    else:
        given = jnp.asarray(mask)
        if given.dtype != jnp.bool_:
            raise bad_argument("mask", f"of dtype {given.dtype}", "bool, True where attended", "Compare it with != 0.")
        seen = broadcast_lookup("mask", given[:, None] if given.ndim == 3 else given, sizes)
    return flex_attention(
        q,
        k,
        v,
        score_mod=placed.score_mod(softcap, None),
        mask_mod=placed.mask_mod(seen, causal=mask is None, window=window),
        scale=scale,
        sinks=sinks,
        implementation=implementation,
        kernel_options=kernel_options,
    )


def _placed(name: str, value: ArrayLike, batch: int, tokens: int) -> Array:
    """Positions as int32 [batch, tokens]. Raises ValueError."""
    shapes = {1: f"[{tokens}]", 2: f"[{batch}, {tokens}]"}
    array = position_array("cached_attention", name, value, shapes, "One for each token.")
    if array.shape not in ((tokens,), (1, tokens), (batch, tokens)):
        wanted = f"int32[{batch}, {tokens}] or int32[{tokens}]"
        raise bad_argument(name, f"{array.dtype}{list(array.shape)}", wanted, "One for each token.")
    return jnp.broadcast_to(array, (batch, tokens))
