"""The forward pass in XLA: an online softmax over the visited tiles of each row. Extra memory is one tile."""

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.problem import Problem, heads_first
from flexjax.backends.xla.schedule import Row, Schedule, Visit, row_at, walk
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Array = jax.Array


def forward(plan: KernelPlan, operands: Operands, target: Target) -> Results:
    """out, lse and, if the plan asks, max_scores (see Results)."""
    if plan.batch * plan.q_len * plan.kv_len == 0:
        return empty_results(plan, operands)
    problem = Problem(plan, operands, target)
    schedule = problem.schedule

    def one_row(step: Array) -> tuple[Array, Array, Array]:
        return _row(problem, row_at(plan, schedule, problem.lists, step))

    if schedule.steps == 1:
        out, lse, top = (x[None] for x in one_row(jnp.int32(0)))
    else:
        out, lse, top = lax.map(one_row, jnp.arange(schedule.steps, dtype=jnp.int32))
    out = heads_first(join_rows(out, schedule)[:, :, : plan.q_len], plan).astype(plan.dtype)
    flat = lambda x: heads_first(join_rows(x, schedule)[:, :, : plan.q_len, 0], plan)
    return Results(out, flat(lse), flat(top) if plan.max_scores else None)


def _row(problem: Problem, row: Row) -> tuple[Array, Array, Array]:
    """(out [b, n, q, E], lse [b, n, q, 1], max [b, n, q, 1]) of one row."""
    plan, s = problem.plan, problem.schedule
    q = problem.take_rows(problem.query, row)
    qx = None if problem.query_extra is None else problem.take_rows(problem.query_extra, row)

    def visit_tile(state: tuple[Array, Array, Array], visit: Visit) -> tuple[Array, Array, Array]:
        maximum, total, accumulated = state
        raw = problem.raw_scores(row, visit, q, qx)
        scores = problem.scores(row, visit, raw, plan.score, bound_rows=False).modified
        maximum, total, factor, weights = tile_math.online_step(maximum, total, scores)
        keep = problem.keep(row, visit)
        weights = weights if keep is None else weights * keep
        product = problem.weights_times_value(weights, problem.take_columns(problem.value, row, visit.blocks))
        return maximum, total, accumulated * factor + product

    shape = (s.batch, s.heads, s.block_q)
    start = (
        jnp.full((*shape, 1), -jnp.inf, problem.compute),
        jnp.zeros((*shape, 1), problem.compute),
        jnp.zeros((*shape, plan.value_dim), problem.compute),
    )
    maximum, total, accumulated = walk(plan, s, row, visit_tile, problem.as_operands_vary(start))
    out, lse = tile_math.finalise(maximum, total, accumulated, row_sinks(problem, row))
    return out, lse, maximum


def row_sinks(problem: Problem, row: Row) -> Array | None:
    """The sinks of the row's heads as [1, heads, 1, 1]."""
    if problem.sinks is None:
        return None
    return lax.dynamic_slice(problem.sinks, (row.h0,), (problem.schedule.heads,)).reshape(1, -1, 1, 1)


def join_rows(x: Array, schedule: Schedule) -> Array:
    """[steps, batch, heads, block_q, ...] -> [B, N, padded_q, ...]."""
    rest = x.shape[4:]
    x = x.reshape(schedule.batch_groups, schedule.head_groups, schedule.rows, *x.shape[1:])
    x = jnp.moveaxis(x, (0, 3, 1, 4, 2, 5), range(6))
    b, n = schedule.batch_groups * schedule.batch, schedule.head_groups * schedule.heads
    return x.reshape(b, n, schedule.padded_q, *rest)


def empty_results(plan: KernelPlan, operands: Operands) -> Results:
    """Without queries or keys: outputs 0; lse the sink, or -inf."""
    tokens = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    shape = (plan.batch, *tokens)
    lse = jnp.full(shape, -jnp.inf, plan.score_dtype)
    if operands.sinks is not None:
        by_head = operands.sinks.astype(lse.dtype)
        lse = jnp.broadcast_to(by_head if plan.layout == "BTNH" else by_head[:, None], shape)
    top = jnp.full(shape, -jnp.inf, plan.score_dtype) if plan.max_scores else None
    return Results(jnp.zeros((*shape, plan.value_dim), plan.dtype), lse, top)
