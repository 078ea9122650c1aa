"""Forward mode in XLA: the tangents of out and lse by the same walk over tiles.

ts' = ds'/ds * scale (tq . k + q . tk) + sum_j ds'/dl_j * tl_j
tout = sum p r (ts' v + tv) - out sum p ts'     tlse = sum p ts'      (the sink's term is in both sums over p ts')
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.capture_gradients import tangent_of_loads
from flexjax.backends.xla.forward import join_rows, row_sinks
from flexjax.backends.xla.problem import Problem, heads_first, pad_to
from flexjax.backends.xla.schedule import Row, Visit, row_at, walk
from flexjax.ir.program import Lit, Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results

Array = jax.Array


def tangent(
    plan: KernelPlan,
    operands: Operands,
    results: Results,
    tangents: Gradients,
    derivative: Program | None,
    target: Target,
) -> tuple[Array, Array]:
    """(tangent of out, tangent of lse); `tangents` has None where an operand does not move."""
    if plan.batch * plan.q_len * plan.kv_len == 0:
        t_lse = jnp.zeros_like(results.lse)
        if tangents.sinks is not None:
            by_head = tangents.sinks.astype(t_lse.dtype)
            t_lse = t_lse + (by_head if plan.layout == "BTNH" else by_head[:, None])
        return jnp.zeros_like(results.out), t_lse
    moving = Moving(Problem(plan, operands, target, derivative), tangents, derivative, results)
    s = moving.problem.schedule
    one_row = lambda step: _row(moving, row_at(plan, s, moving.problem.lists, step))
    if s.steps == 1:
        t_out, t_lse = (x[None] for x in one_row(jnp.int32(0)))
    else:
        t_out, t_lse = lax.map(one_row, jnp.arange(s.steps, dtype=jnp.int32))
    t_out = heads_first(join_rows(t_out, s)[:, :, : plan.q_len], plan).astype(plan.dtype)
    return t_out, heads_first(join_rows(t_lse, s)[:, :, : plan.q_len, 0], plan)


class Moving:
    """A problem and the tangents of its operands, in tiles."""

    def __init__(self, problem: Problem, tangents: Gradients, derivative: Program | None, results: Results):
        maybe = lambda f, x: None if x is None else f(x)
        wide = lambda x: heads_first(x, problem.plan).astype(problem.compute)
        self.problem, self.derivative = problem, derivative
        self.query, self.query_extra = (maybe(problem.rows, x) for x in (tangents.query, tangents.query_extra))
        self.key, self.value, self.key_extra = (
            maybe(problem.columns, x) for x in (tangents.key, tangents.value, tangents.key_extra)
        )
        self.sinks = maybe(lambda x: x.astype(problem.compute), tangents.sinks)
        zeros = [
            jnp.zeros((), c.dtype) if t is None else t
            for c, t in zip(problem.score_captures, tangents.score_captures, strict=True)
        ]
        moved = [t is not None for t in tangents.score_captures]
        filled = [z if m else c for z, m, c in zip(zeros, moved, problem.score_captures, strict=True)]
        padded = problem.pad_score_captures(filled) if any(moved) else filled
        self.captures = tuple(p if m else None for p, m in zip(padded, moved, strict=True))
        self.lse = pad_to(wide(results.lse), 2, problem.schedule.padded_q)[..., None]
        self.out = problem.rows(results.out).astype(problem.compute)


def _row(moving: Moving, row: Row) -> tuple[Array, Array]:
    problem = moving.problem
    plan, s = problem.plan, problem.schedule
    take = lambda x: None if x is None else problem.take_rows(x, row)
    q, qx, tq, tqx = map(take, (problem.query, problem.query_extra, moving.query, moving.query_extra))
    lse, out = take(moving.lse), take(moving.out)
    assert q is not None
    assert lse is not None
    assert out is not None
    scale = jnp.asarray(plan.scale, problem.compute)

    def visit_tile(state: tuple[Array, Array], visit: Visit) -> tuple[Array, Array]:
        weighted, moved = state
        columns = lambda x: problem.take_columns(x, row, visit.blocks)
        raw = problem.raw_scores(row, visit, q, qx)
        scores = problem.scores(row, visit, raw, moving.derivative, bound_rows=True)
        products = [
            problem.query_times_key(a, columns(b))
            for a, b in ((tq, problem.key), (q, moving.key), (tqx, problem.key_extra), (qx, moving.key_extra))
            if a is not None and b is not None
        ]
        t_score = jnp.zeros_like(raw) if not products else sum(products) * scale
        if scores.partials:
            partial = scores.partials[0]
            t_score = t_score * (partial.value if isinstance(partial, Lit) else partial)
        if moving.derivative is not None:
            loads = tangent_of_loads(scores, moving.derivative, moving.captures)
            t_score = t_score if loads is None else t_score + loads
        if scores.on is not None:
            t_score = jnp.where(scores.on, t_score, jnp.zeros_like(t_score))
        p = tile_math.probabilities(scores.modified, lse)
        keep = problem.keep(row, visit)
        dropped = p if keep is None else p * keep
        weighted = weighted + problem.weights_times_value(dropped * t_score, columns(problem.value))
        if moving.value is not None:
            weighted = weighted + problem.weights_times_value(dropped, columns(moving.value))
        return weighted, moved + (p * t_score).sum(-1, keepdims=True)

    shape = (s.batch, s.heads, s.block_q)
    start = (jnp.zeros((*shape, plan.value_dim), problem.compute), jnp.zeros((*shape, 1), problem.compute))
    weighted, moved = walk(plan, s, row, visit_tile, problem.as_operands_vary(start))
    if moving.sinks is not None:
        t_sink = lax.dynamic_slice(moving.sinks, (row.h0,), (s.heads,)).reshape(1, -1, 1, 1)
        sinks = typing.cast(Array, row_sinks(problem, row))
        moved = moved + tile_math.probabilities(sinks, lse) * t_sink
    return weighted - out * moved, moved
