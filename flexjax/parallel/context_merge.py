"""Partial results over rows, each over some of the keys, and how two are merged (merge_states.py)."""

import typing

import jax
import jax.numpy as jnp

from flexjax.merge_states import joint_lse, weight_of

Array = jax.Array


class Part(typing.NamedTuple):
    """The results of a device's rows over some or all keys: out [B, T, N, E], lse and max_scores (`top`) [B, T, N], in the plan's layout.

    They are in the score dtype. Where nothing more is to be merged, out is in the dtype of query, or in float32 if the plan asks for
    rounding. top is None unless the plan asks for it.
    """

    out: Array
    lse: Array
    top: Array | None


def merged(a: Part, b: Part) -> Part:
    """The rows over the keys of both parts, which must have no key in common, in the score dtype (merge_states.py). A row that one part
    sees no key of (lse -inf) is that of the other; one that neither sees has out 0 and lse -inf.
    """
    lse = joint_lse(jnp.stack([a.lse, b.lse]))
    out = sum(weight_of(x.lse, lse)[..., None] * x.out for x in (a, b))
    top = None if a.top is None or b.top is None else jnp.maximum(a.top, b.top)
    return Part(typing.cast(Array, out), lse, top)
