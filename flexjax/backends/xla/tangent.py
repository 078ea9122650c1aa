"""Forward mode in XLA: the tangents of out and lse, by the same loops over tiles as the forward pass.

With t before the name of a tangent, s' the modified score, l_j the loads of captured arrays, r dropout's multiplier:

    ts'  = ds'/ds * scale (tq . k + q . tk) + sum_j ds'/dl_j * tl_j
    tlse = sum p ts'                              the sink is one more term of this sum
    tout = sum p r (ts' v + tv) - out tlse

Of a weighted plan s' is the weight w, and ttotal takes the place of tlse:

    tout = sum r (tw v + w tv)        ttotal = sum tw

Of an expectation E = sum p F of a function F of s', whose tangent tF is as ts':

    tE = sum p (ts' F + tF) - E tlse      of a weighted plan sum (tw F + w tF)
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.block_loop import BlockVisit, TileRow, row_at, walk
from flexjax.backends.xla.capture_gradients import tangent_of_loads
from flexjax.backends.xla.forward import join_rows, row_sinks
from flexjax.backends.xla.tiled_operands import TiledOperands, heads_first, pad_to
from flexjax.backends.xla.visit_scores import (
    dropout_multiplier,
    raw_scores,
    times_partial,
    visit_scores,
    zero_where_off,
)
from flexjax.plan.kernel_plan import KernelPlan, TangentInputs
from flexjax.plan.lengths import NONE, where_exists

Array = jax.Array


def tangent(plan: KernelPlan, given: TangentInputs, target: Target) -> tuple[Array, ...]:
    """(tangent of out, tangent of lse) and perhaps that of expectations, in the shapes and dtypes of these."""
    operands, results, tangents, derivative = given
    query_lengths = (operands.lengths or NONE).query
    if plan.batch * plan.q_len * plan.kv_len == 0:
        # without batch entries, queries or keys, lse is the sink
        t_lse = jnp.zeros_like(results.lse)
        if tangents.sinks is not None:
            by_head = tangents.sinks.astype(t_lse.dtype)
            t_lse = t_lse + (by_head if plan.layout == "BTNH" else by_head[:, None])
        sums = [jnp.zeros((*t_lse.shape, plan.expectations), t_lse.dtype)] * (plan.expectations > 0)
        return jnp.zeros_like(results.out), where_exists(t_lse, query_lengths, plan), *sums
    tiled = TiledOperands(plan, operands, target, derivative)
    tiled_tangents = TiledTangents(tiled, given)
    s = tiled.sizes
    one_row = lambda step: _row(tiled_tangents, row_at(plan, s, tiled.lists, step, tiled.lengths))
    if s.steps == 1:
        t_out, t_lse, *sums = (x[None] for x in one_row(jnp.int32(0)))
    else:
        t_out, t_lse, *sums = lax.map(one_row, jnp.arange(s.steps, dtype=jnp.int32))
    whole = lambda x: heads_first(join_rows(x, s)[:, :, : plan.q_len], plan)
    t_lse = heads_first(join_rows(t_lse, s)[:, :, : plan.q_len, 0], plan)
    found = (whole(t_out).astype(plan.out_dtype), t_lse, *map(whole, sums))
    return tuple(where_exists(x, query_lengths, plan) for x in found)


class TiledTangents:
    """The tangents (None where there is none), and out and lse of the forward pass, laid out as `tiled` is."""

    def __init__(self, tiled: TiledOperands, given: TangentInputs):
        maybe = lambda f, x: None if x is None else f(x)
        in_compute = lambda x: heads_first(x, tiled.plan).astype(tiled.compute)
        self.tiled, self.derivative, tangents, results = tiled, given.derivative, given.tangents, given.results
        self.query, self.query_extra = (maybe(tiled.rows, x) for x in (tangents.query, tangents.query_extra))
        self.key, self.value, self.key_extra = (
            maybe(tiled.columns, x) for x in (tangents.key, tangents.value, tangents.key_extra)
        )
        self.sinks = maybe(lambda x: x.astype(tiled.compute), tangents.sinks)
        zeros = [
            jnp.zeros((), c.dtype) if t is None else t
            for c, t in zip(tiled.score_captures, tangents.score_captures, strict=True)
        ]
        has_tangent = [t is not None for t in tangents.score_captures]
        filled = [z if has else c for z, has, c in zip(zeros, has_tangent, tiled.score_captures, strict=True)]
        padded = tiled.pad_score_captures(filled) if any(has_tangent) else filled
        self.captures = tuple(p if has else None for p, has in zip(padded, has_tangent, strict=True))
        self.lse = pad_to(in_compute(results.lse), 2, tiled.sizes.padded_q)[..., None]
        self.out = pad_to(in_compute(results.float32_out), 2, tiled.sizes.padded_q)


def _row(tiled_tangents: TiledTangents, row: TileRow) -> tuple[Array, ...]:
    """(tangent of out [batch, heads, block_q, E], of lse [.., 1]) and perhaps of expectations [.., n] of a tile row."""
    tiled = tiled_tangents.tiled
    plan, s = tiled.plan, tiled.sizes
    take = lambda x: None if x is None else tiled.take_rows(x, row)
    q, qx, tq, tqx = map(take, (tiled.query, tiled.query_extra, tiled_tangents.query, tiled_tangents.query_extra))
    lse, out = take(tiled_tangents.lse), take(tiled_tangents.out)
    assert q is not None
    assert lse is not None
    assert out is not None
    scale = jnp.asarray(plan.scale, tiled.compute)

    derivative, n = tiled_tangents.derivative, plan.expectations
    width = 2 if derivative is None else 2 + len(derivative.gradients)

    def visit_tile(state: tuple[Array, ...], visit: BlockVisit) -> tuple[Array, ...]:
        """Adds to the sums over keys of p r (ts' v + tv) and p ts', and of p (ts' F + tF) and p F with expectations."""
        weighted, t_lse, *sums = state
        columns = lambda x: tiled.take_columns(x, row, visit)
        raw = raw_scores(tiled, row, visit, q, qx)
        scores = visit_scores(tiled, row, visit, raw, tiled_tangents.derivative, mask_q_end=True)
        products = [
            tiled.query_times_key(a, columns(b))
            for a, b in (
                (tq, tiled.key),
                (q, tiled_tangents.key),
                (tqx, tiled.key_extra),
                (qx, tiled_tangents.key_extra),
            )
            if a is not None and b is not None
        ]
        t_raw = jnp.zeros_like(raw) if not products else sum(products) * scale

        def moved_value(group: int) -> Array:
            """The tangent of the score, or of the value of another group of the derivative program."""
            moved = times_partial(t_raw, scores.partials[group * width]) if scores.partials else t_raw
            loads = None
            if derivative is not None:
                loads = tangent_of_loads(scores, derivative, tiled_tangents.captures, group)
            return zero_where_off(scores, moved if loads is None else moved + loads)

        t_score = moved_value(0)
        p = scores.modified if plan.weighted else tile_math.probabilities(scores.modified, lse)
        moved = t_score if plan.weighted else p * t_score
        if sums:
            f = [scores.partials[group * width - 1] for group in range(1, n + 1)]
            t_terms = [times_partial(moved, f[i]) + p * moved_value(1 + i) for i in range(n)]
            terms = [times_partial(p, x) for x in f]
            add = lambda total, parts: total + jnp.stack([zero_where_off(scores, x).sum(-1) for x in parts], -1)
            sums = [add(sums[0], t_terms), add(sums[1], terms)]
        multiplier = dropout_multiplier(tiled, row, visit)
        kept = lambda x: x if multiplier is None else x * multiplier
        dropped = kept(p)
        weighted = weighted + tiled.weights_times_value(kept(moved), columns(tiled.value))
        if tiled_tangents.value is not None:
            weighted = weighted + tiled.weights_times_value(dropped, columns(tiled_tangents.value))
        return weighted, t_lse + moved.sum(-1, keepdims=True), *sums

    shape = (s.batch, s.heads, s.block_q)
    sizes = (plan.value_dim, 1, *([n, n] if n else []))
    start = tuple(jnp.zeros((*shape, size), tiled.compute) for size in sizes)
    weighted, t_lse, *sums = walk(plan, s, row, visit_tile, tiled.vary_like_operands(start))
    if tiled_tangents.sinks is not None:
        t_sink = lax.dynamic_slice(tiled_tangents.sinks, (row.h0,), (s.heads,)).reshape(1, -1, 1, 1)
        sinks = typing.cast(Array, row_sinks(tiled, row))
        t_lse = t_lse + tile_math.probabilities(sinks, lse) * t_sink
    if plan.weighted:
        return weighted, t_lse, *sums[:1]
    return weighted - out * t_lse, t_lse, *([sums[0] - sums[1] * t_lse] if sums else [])
