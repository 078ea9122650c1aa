"""Merges the partial results of the chunks of the decode kernel into the results of a call: one softmax over all chunks.

Sums run over the chunks in ascending order, in groups of ORDERED: within each group, then over the groups. Chunks without
visits add exact zeros, so bits depend neither on the length of the buffer nor on the batch. The chains of additions are
written out, because the order in which XLA sums an axis follows the shape of the array.
"""

import functools
import operator
import typing

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_gpu.online_softmax import OnlineSoftmax
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan, Results
from flexjax.plan.pack_heads import unpack_rows

ORDERED = 16
"""Chunks whose partial results are added in one chain."""


class Chunks(typing.NamedTuple):
    """Which chunks have partial results.

    live   bool [B or 1, M or 1, chunks] of `DecodeItems.live`; the results of the others are undefined and not used
    last   int32 [B or 1, M or 1, 1] of `DecodeItems.last`: the last of them
    """

    live: jax.Array
    last: jax.Array


def sum_in_order(x: jax.Array) -> jax.Array:
    """The sum of x over axis 2, the axis of the chunks, in the order that the top of this file describes. Zeros appended
    to that axis do not change a bit of the result.
    """
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
    softmax: OnlineSoftmax,
    out: jax.Array,
    stats: jax.Array,
    chunks: Chunks | None,
    sinks: jax.Array | None,
    query_lengths: jax.Array | None,
) -> Results:
    """The results of a call, in its layout, from the partial results of its chunks: out, lse and, if the plan asks for
    it, the row maximum, which is that of the scores alone, without the sink.

    plan            of the call, before its heads are packed into rows
    softmax         that of the kernel; it converts references to scores, which differ by a factor of log2(e) unless
                    scores are large
    out, stats      [B, M, chunks, R, E padded] and [B, M, chunks, 2, R] float32, what the kernel wrote
                    (`DecodeOutputs`). R is T * (N // M), no padding rows: row r is query r // (N // M) of head r % (N // M) of
                    the key head's group
    chunks          which chunks have partial results; None: all
    sinks           [N] or None; a sink is added once to the softmax denominator of each row of its head
    query_lengths   [B] int32, how many queries exist; the others get out 0, and lse and row maximum -inf. None: all
                    exist

    A query that exists but sees no key gets out 0 and row maximum -inf; its lse is the logit of its sink, or -inf without sinks.
    """
    kv_heads, group = plan.kv_heads, plan.group
    out = out[..., : plan.value_dim]
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
    lse = jnp.where(dead, -jnp.inf, softmax.lse(base, total))
    divisor = jnp.where(dead, 0.0, 1.0 / total)
    found = sum_in_order(out * weights[..., None]) * divisor[..., None]
    largest = softmax.to_score(top)
    if query_lengths is not None:
        query = jnp.arange(plan.q_len * group, dtype=jnp.int32) // group
        exists = query < query_lengths[:, None, None]
        found = jnp.where(exists[..., None], found, 0.0)
        lse, largest = jnp.where(exists, lse, -jnp.inf), jnp.where(exists, largest, -jnp.inf)
    place = lambda x: unpack_rows(x, plan, "BNTH")
    return Results(place(found.astype(plan.out_dtype)), place(lse), place(largest) if plan.max_scores else None)
