"""`attention_weights`: the matrix of probabilities that flex_attention never builds, for looking at small problems."""

import typing

import jax
import jax.numpy as jnp

from flexjax.attention import flex_attention
from flexjax.call.arguments import Arguments, MaskAndScore, with_signature
from flexjax.call.checks import DTYPES, LAYOUTS, check_array, check_inputs
from flexjax.errors import bad_argument, public
from flexjax.mod_tools.settings import own
from flexjax.plan.kernel_plan import FLOAT8
from flexjax.types import ArrayArgument

Array = jax.Array

LARGEST = 2**28  # entries of the matrix that are allowed: 1 GiB of float32


@public
@own
@with_signature(Arguments, MaskAndScore)
def attention_weights(query: Array, key: Array, **keywords: typing.Unpack[MaskAndScore[ArrayArgument]]) -> Array:
    """softmax(where(mask, score_mod(scale * query . key), -inf)) as an array, [B, N, T, S] for either layout.

    query   [B, T, N, D] (layout "BTNH") or [B, N, T, D] ("BNTH");  key  [B, S, M, D] or [B, M, S, D], M divides N

    The other arguments are those of flexjax.flex_attention. With `sinks` a row adds up to less than 1. A row in which
    nothing is visible is 0.

    Returns float32 (float64 for float64 inputs), differentiable like flex_attention. Memory is O(B N T S). Raises
    ValueError for arguments that do not fit and for a matrix of more than 2^28 entries.
    """
    layout = Arguments(query, key, key, **keywords).layout
    fits = all(getattr(x, "ndim", None) == 4 and x.dtype.name in DTYPES for x in (query, key))
    if layout not in LAYOUTS or not fits:
        # raises for the layout, and for what is no array of 4 dims and of such a dtype
        query, key = check_array("query", query), check_array("key", key)
        check_inputs(Arguments(query, key, key, layout=layout))
    tokens, head = (1, 2) if layout == "BTNH" else (2, 1)
    kv_len = key.shape[tokens]
    entries = query.shape[0] * query.shape[head] * query.shape[tokens] * kv_len
    if entries > LARGEST:
        raise bad_argument(
            "query",
            f"of shape {query.shape} with {kv_len} keys, {entries} weights",
            f"at most {LARGEST} weights",
            "Look at fewer heads or tokens at a time.",
        )
    wide = jnp.promote_types(query.dtype, jnp.float32) if query.dtype != FLOAT8 else jnp.float32
    # with the identity as values, the output is the weights
    identity = jnp.expand_dims(jnp.eye(kv_len, dtype=wide), (0, head))
    value = jnp.broadcast_to(identity, (*key.shape[:-1], kv_len))
    out = flex_attention(query.astype(wide), key.astype(wide), value, implementation="reference", **keywords)
    return jnp.swapaxes(out, 1, 2) if layout == "BTNH" else out
