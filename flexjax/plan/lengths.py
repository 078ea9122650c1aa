"""Which queries and keys of a call exist, for calls with lengths (`KernelPlan.lengths`).

    slot of query t of batch entry b exists   where t < lengths.query[b]
    slot of key s of batch entry b exists     where s < lengths.key[b]

What the other slots hold, NaN included, reaches no result: out is 0 and lse and max_scores are -inf in rows of queries
that do not exist, also with sinks, and gradients of such slots are 0. A backend masks the columns and zeroes the tail
of the tiles that straddle a length, because 0 * NaN is NaN, and skips the tiles past it.
"""

import jax
import jax.numpy as jnp

from flexjax.plan.kernel_plan import KernelPlan, Lengths, Results

Array = jax.Array

NONE = Lengths(None, None)  # the lengths of a call without lengths: every query and key exists


def token_axis(plan: KernelPlan) -> int:
    """The axis of tokens in the plan's layout: 1 for BTNH, 2 for BNTH."""
    return 1 if plan.layout == "BTNH" else 2


def exists(lengths: Array, plan: KernelPlan, x: Array) -> Array:
    """Which tokens exist: bool [B, tokens, 1, ..] ([B, 1, tokens, ..] for BNTH), which broadcasts to x."""
    axis = token_axis(plan)
    spread = [1] * x.ndim
    spread[axis] = x.shape[axis]
    return jnp.arange(x.shape[axis], dtype=jnp.int32).reshape(spread) < lengths.reshape(-1, *[1] * (x.ndim - 1))


def where_exists(x: Array, lengths: Array | None, plan: KernelPlan, other: float = 0.0) -> Array:
    """x in the plan's layout with `other` in the slots of tokens that do not exist."""
    return x if lengths is None else jnp.where(exists(lengths, plan, x), x, jnp.asarray(other, x.dtype))


def existing_results(results: Results, lengths: Lengths | None, plan: KernelPlan) -> Results:
    """The results with those of no keys in rows of queries that do not exist: 0, of lse and max_scores -inf."""
    query = None if lengths is None else lengths.query
    if query is None:
        return results
    fills: tuple[float, ...] = (0.0, plan.lse_without_keys, float("-inf"), 0.0, 0.0)
    pairs = zip(results, fills, strict=True)
    return Results._make(None if x is None else where_exists(x, query, plan, fill) for x, fill in pairs)
