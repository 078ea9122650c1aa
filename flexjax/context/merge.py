"""Partial results over rows, each over some of the keys, and how two are merged (merge_states.py)."""

import typing

import jax
import jax.numpy as jnp

from flexjax.merge_states import joint_lse, weight_of

Array = jax.Array


class Part(typing.NamedTuple):
    """A device's rows over some or all keys, in the plan's layout; partial ones are in the score dtype."""

    out: Array  # [B, T, N, E]
    lse: Array  # [B, T, N]
    top: Array | None  # max_scores [B, T, N]; None unless the plan asks for it


def merged(a: Part, b: Part, weighted: bool) -> Part:
    """The rows over the keys of both parts, which have no key in common, in the score dtype (merge_states.py).

    Those of a `weighted` plan add.
    """
    if weighted:
        return Part(a.out + b.out, a.lse + b.lse, None)
    lse = joint_lse(jnp.stack([a.lse, b.lse]))
    out = sum(weight_of(x.lse, lse)[..., None] * x.out for x in (a, b))
    top = None if a.top is None or b.top is None else jnp.maximum(a.top, b.top)
    return Part(typing.cast(Array, out), lse, top)
