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
    sums: Array | None = None  # expectations [B, T, N, n]; None unless the plan asks for them


def merged(a: Part, b: Part, weighted: bool) -> Part:
    """The rows over the keys of both parts, which have no key in common, in the score dtype (merge_states.py).

    Those of a `weighted` plan add.
    """
    if weighted:
        sums = None if a.sums is None or b.sums is None else a.sums + b.sums
        return Part(a.out + b.out, a.lse + b.lse, None, sums)
    lse = joint_lse(jnp.stack([a.lse, b.lse]))
    one, other = rescaled(a, lse), rescaled(b, lse)
    top = None if a.top is None or b.top is None else jnp.maximum(a.top, b.top)
    sums = None if one.sums is None or other.sums is None else one.sums + other.sums
    return Part(one.out + other.out, lse, top, sums)


def rescaled(part: Part, lse: Array) -> Part:
    """What a part is of the row that has `lse` and whose keys include its own."""
    weight = weight_of(part.lse, lse)[..., None]
    return part._replace(out=weight * part.out, lse=lse, sums=None if part.sums is None else weight * part.sums)
