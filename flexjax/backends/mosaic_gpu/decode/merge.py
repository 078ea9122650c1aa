"""Merges the partial results of the chunks of the decode kernel into the results of a call (split-KV).

Sums run over the chunks in ascending order, in groups of ORDERED: within each group, then over the groups. Chunks
without visits add exact zeros, so bits depend neither on the length of the buffer nor on the batch. The chains of
additions are written out, because the order in which XLA sums an axis follows the shape of the array.
"""

import functools
import operator
import typing

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.forward.online_softmax import Softmax
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan, Results
from flexjax.rewrites.pack_heads import unpack_rows

ORDERED = 16  # chunks whose partial results are added in one chain


class Chunks(typing.NamedTuple):
    """Which chunks have partial results."""

    # bool [B or 1, M or 1, chunks] (`DecodeItems.live`); the results of the others are undefined and not used
    live: jax.Array
    last: jax.Array  # int32 [B or 1, M or 1, 1], the last of them (`DecodeItems.last`)


def sum_in_order(x: jax.Array) -> jax.Array:
    """The sum of x over axis 2, the chunks, in the order above; zeros appended there change no bit."""
    while x.shape[2] > 1:
        groups = cdiv(x.shape[2], ORDERED)
        parts = [_padded(x[:, :, n::ORDERED], groups) for n in range(min(ORDERED, x.shape[2]))]
        x = functools.reduce(operator.add, parts)
    return x[:, :, 0]


def _padded(x: jax.Array, length: int) -> jax.Array:
    """x with zeros appended to axis 2 up to `length`."""
    widths = [(0, 0)] * x.ndim
    widths[2] = (0, length - x.shape[2])
    return jnp.pad(x, widths) if x.shape[2] < length else x


def merged(
    plan: KernelPlan,
    softmax: Softmax,
    out: jax.Array,
    stats: jax.Array,
    chunks: Chunks | None,
    sinks: jax.Array | None,
    query_lengths: jax.Array | None,
) -> Results:
    """The results of a call, in its layout, from the partial results of its chunks.

    `out` is [B, M, chunks, R, E padded], `stats` [B, M, chunks, statistics, R] float32 (`DecodeOutputs`): row r is
    query r // (N // M) of head r % (N // M) of the key head's group. A sink of `sinks`, [N], is added once to the
    softmax denominator of each row of its head, not to the row maximum. Queries past `query_lengths`, [B], get out 0,
    and lse and row maximum -inf.
    """
    kv_heads, group = plan.kv_heads, plan.group
    out = out[..., : plan.value_dim]
    if plan.expectations:  # merged as columns of out
        out = jnp.concatenate([out, jnp.moveaxis(stats[:, :, :, 2:], 3, 4)], -1)
    tops, totals = stats[:, :, :, 0], stats[:, :, :, 1]
    if chunks is not None:
        live, last = chunks
        chunk = jnp.arange(live.shape[-1], dtype=jnp.int32)
        # Past the last chunk with visits its results are read again, so that the memory of an empty buffer is not read.
        out = jnp.take_along_axis(out, jnp.minimum(chunk, last)[..., None, None], axis=2, mode="promise_in_bounds")
        live = jnp.broadcast_to(live, tops.shape[:3])[..., None]
        tops, totals = jnp.where(live, tops, -jnp.inf), jnp.where(live, totals, 0.0)
        out = jnp.where(live[..., None], out, 0.0)
    top = tops.max(2)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    sink = None
    if sinks is not None:  # the packed row t * group + g is query t of the g-th head of the group
        heads = softmax.to_reference(sinks.astype(jnp.float32)).reshape(kv_heads, 1, group)
        sink = jnp.broadcast_to(heads, (kv_heads, plan.q_len, group)).reshape(1, kv_heads, -1)
        base = jnp.maximum(top, sink)
        base = jnp.where(jnp.isinf(base), 0.0, base)
    weights = softmax.power(tops - base[:, :, None])
    total = sum_in_order(totals * weights)
    if sink is not None:
        total = total + softmax.power(sink - base)
    dead = total == 0
    lse, divisor = softmax.statistic(base, total, dead), softmax.out_factor(total, dead)
    found = sum_in_order(out * weights[..., None])
    found = found if divisor is None else found * divisor[..., None]
    largest = softmax.to_score(top)
    if query_lengths is not None:
        query = jnp.arange(plan.q_len * group, dtype=jnp.int32) // group
        exists = query < query_lengths[:, None, None]
        found = jnp.where(exists[..., None], found, 0.0)
        lse = jnp.where(exists, lse, plan.lse_without_keys)
        largest = jnp.where(exists, largest, -jnp.inf)
    place = lambda x: unpack_rows(x, plan, "BNTH")
    out, sums = found[..., : plan.value_dim].astype(plan.out_dtype), found[..., plan.value_dim :]
    most = place(largest) if plan.max_scores else None
    return Results(place(out), place(lse), most, expectations=place(sums) if plan.expectations else None)
