"""Partial results over rows, each over some of the keys, and how two are merged.

With lse_s and out_s the row statistics and outputs of a part s over its own keys:

    lse = log sum_s exp(lse_s)        out = sum_s exp(lse_s - lse) out_s

A part without keys for a row has lse_s = -inf and weight 0, also where all parts are -inf.
"""

import typing

import jax
import jax.numpy as jnp

Array = jax.Array


class Part(typing.NamedTuple):
    """What a device computed of its rows: out [B, T, N, E], lse and max_scores [B, T, N] in float32; max_scores None if not asked."""

    out: Array
    lse: Array
    top: Array | None


def merged(a: Part, b: Part) -> Part:
    """The rows over the keys of both parts."""
    lse = jnp.logaddexp(a.lse, b.lse)
    out = sum(weight_of(x.lse, lse)[..., None] * x.out for x in (a, b))
    top = None if a.top is None or b.top is None else jnp.maximum(a.top, b.top)
    return Part(typing.cast(Array, out), lse, top)


def weight_of(part: Array, whole: Array) -> Array:
    """exp(part - whole), 0 where part is -inf."""
    return jnp.where(jnp.isneginf(part), 0, jnp.exp(part - jnp.where(jnp.isneginf(part), 0, whole)))
