"""The forward pass in XLA: an online softmax over the visited tiles of each tile row, in the memory of one tile."""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.block_loop import BlockVisit, TileRow, row_at, walk
from flexjax.backends.xla.tile_sizes import TileSizes
from flexjax.backends.xla.tiled_operands import TiledOperands, heads_first
from flexjax.backends.xla.visit_scores import (
    dropout_multiplier,
    raw_scores,
    times_partial,
    visit_scores,
    zero_where_off,
)
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.plan.lengths import existing_results

Array = jax.Array
# (out, lse, max_scores) and perhaps expectations of a tile row, or of all, stacked along a new first axis
Rows = tuple[Array, ...]


def forward(plan: KernelPlan, operands: Operands, target: Target) -> Results:
    """out in plan.out_dtype; lse and max_scores in the dtype of scores; rounding in the dtype of out."""
    if plan.batch * plan.q_len * plan.kv_len == 0:
        return existing_results(empty_results(plan, operands), operands.lengths, plan)
    tiled = TiledOperands(plan, operands, target)
    sizes = tiled.sizes

    def one_row(step: Array) -> Rows:
        return _row(tiled, row_at(plan, sizes, tiled.lists, step, tiled.lengths))

    if plan.page and not plan.differentiable:
        out, lse, top, *sums = _opaque_map(one_row, sizes.steps, tiled)
    elif sizes.steps == 1:
        out, lse, top, *sums = (x[None] for x in one_row(jnp.int32(0)))
    else:
        out, lse, top, *sums = lax.map(one_row, jnp.arange(sizes.steps, dtype=jnp.int32))
    whole = lambda x: heads_first(join_rows(x, sizes)[:, :, : plan.q_len], plan)
    flat = lambda x: heads_first(join_rows(x, sizes)[:, :, : plan.q_len, 0], plan)
    results = Results(whole(out), flat(lse), flat(top) if plan.max_scores else None, None, *map(whole, sums))
    results = existing_results(results, operands.lengths, plan)
    out, rounding = tile_math.out_and_rounding(results.out, plan)
    return results._replace(out=out, rounding=rounding)


def _opaque_map(one_row: Callable[[Array], Rows], steps: int, tiled: TiledOperands) -> Rows:
    """lax.map of `one_row` over 0 .. steps - 1, in a loop whose length XLA does not know."""
    lengths = tiled.lengths.key
    assert lengths is not None
    # XLA inlines a loop of one round and fuses its code with what is around it, which can change the last bits: those
    # of a request that is alone would differ from those of the same request among others.
    count = jnp.where(jnp.max(lengths) >= 0, jnp.int32(steps), jnp.int32(0))  # lengths are never negative
    empty = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), jax.eval_shape(one_row, jnp.int32(0)))

    def round_(step: Array, found: Rows) -> Rows:
        put = lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, step, 0)
        return typing.cast(Rows, jax.tree.map(put, found, one_row(step)))

    return lax.fori_loop(jnp.int32(0), count, round_, tiled.vary_like_operands(empty))


def _row(tiled: TiledOperands, row: TileRow) -> Rows:
    """(out [batch, heads, block_q, E], lse and max_scores [batch, heads, block_q, 1]) and perhaps expectations [batch,
    heads, block_q, n] of one tile row, in the dtype of scores.

    lse includes the sinks, max_scores does not; of a weighted plan lse is the total. If the plan does not ask for
    max_scores, they may be rounded up to multiples of ln 2.
    """
    plan, s = tiled.plan, tiled.sizes
    q = tiled.take_rows(tiled.query, row)
    qx = None if tiled.query_extra is None else tiled.take_rows(tiled.query_extra, row)

    def visit_tile(state: Rows, visit: BlockVisit) -> Rows:
        """One step of the online softmax on (row maximum, row sum, sum of exp(score - maximum) * value), or of plain
        sums; the sums of exp(score - maximum) * f last, of functions of the scores.
        """
        maximum, total, accumulated, *sums = state
        raw = raw_scores(tiled, row, visit, q, qx)
        visited = visit_scores(tiled, row, visit, raw, plan.score, mask_q_end=False)
        scores = visited.modified
        if plan.weighted:
            total, factor, weights = total + scores.sum(-1, keepdims=True), 1, scores
        else:
            maximum, total, factor, weights = tile_math.online_step(maximum, total, scores, tiled.rounds_weights)
        if sums:
            terms = (zero_where_off(visited, times_partial(weights, f)) for f in visited.partials)
            sums = [sums[0] * factor + jnp.stack([term.sum(-1) for term in terms], -1)]
        multiplier = dropout_multiplier(tiled, row, visit)
        weights = weights if multiplier is None else weights * multiplier
        product = tiled.weights_times_value(weights, tiled.take_columns(tiled.value, row, visit))
        return maximum, total, accumulated * factor + product, *sums

    shape = (s.batch, s.heads, s.block_q)
    start = (
        jnp.full((*shape, 1), -jnp.inf, tiled.compute),
        jnp.zeros((*shape, 1), tiled.compute),
        jnp.zeros((*shape, plan.value_dim), tiled.compute),
        *[jnp.zeros((*shape, plan.expectations), tiled.compute)] * (plan.expectations > 0),
    )
    maximum, total, accumulated, *sums = walk(plan, s, row, visit_tile, tiled.vary_like_operands(start))
    if plan.weighted:
        return accumulated, total, maximum, *sums
    # sums are divided as the output is
    columns = jnp.concatenate([accumulated, *sums], -1) if sums else accumulated
    out, lse = tile_math.finalise(maximum, total, columns, row_sinks(tiled, row))
    out, *sums = (out[..., : plan.value_dim], out[..., plan.value_dim :]) if sums else (out,)
    return out, lse, maximum, *sums


def row_sinks(tiled: TiledOperands, row: TileRow) -> Array | None:
    """The sinks of the tile row's heads, [1, heads, 1, 1] in the dtype of scores."""
    if tiled.sinks is None:
        return None
    return lax.dynamic_slice(tiled.sinks, (row.h0,), (tiled.sizes.heads,)).reshape(1, -1, 1, 1)


def join_rows(x: Array, sizes: TileSizes) -> Array:
    """The results of all tile rows, [steps, batch, heads, block_q, ...], put together to [B, N, padded_q, ...]."""
    rest = x.shape[4:]
    x = x.reshape(sizes.batch_groups, sizes.head_groups, sizes.rows, *x.shape[1:])
    x = jnp.moveaxis(x, (0, 3, 1, 4, 2, 5), range(6))
    b, n = sizes.batch_groups * sizes.batch, sizes.head_groups * sizes.heads
    return x.reshape(b, n, sizes.padded_q, *rest)


def empty_results(plan: KernelPlan, operands: Operands) -> Results:
    """Of a call without batch entries, queries or keys: out 0, lse the head's sink, or that of no keys."""
    tokens = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    shape = (plan.batch, *tokens)
    lse = jnp.full(shape, plan.lse_without_keys, plan.score_dtype)
    if operands.sinks is not None:
        by_head = operands.sinks.astype(lse.dtype)
        lse = jnp.broadcast_to(by_head if plan.layout == "BTNH" else by_head[:, None], shape)
    top = jnp.full(shape, -jnp.inf, plan.score_dtype) if plan.max_scores else None
    out = jnp.zeros((*shape, plan.value_dim), plan.out_dtype)
    sums = jnp.zeros((*shape, plan.expectations), plan.score_dtype) if plan.expectations else None
    return Results(out, lse, top, jnp.zeros_like(out) if plan.returns_rounding else None, sums)
