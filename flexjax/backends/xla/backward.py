"""The backward pass in XLA: one sweep over the same tiles, recomputing the probabilities.

With s' = score_mod(s), p = exp(s' - lse), r dropout's multiplier (1 without), do and dlse the cotangents of out and lse:

    delta = sum_e do * out                 per row
    dv    = (p r)^T do
    dp    = r (do v^T)
    ds'   = p (dp - delta + dlse)          cotangent of the modified score
    ds    = ds' * ds'/ds, 0 where masked   the select comes after the product: a mod may be NaN there
    dq    = scale ds k,   dk = scale ds^T q
    dl_j  = ds' * ds'/dl_j                 summed over the entries that load the same element
    dsink = sum_rows exp(sink - lse) (dlse - delta)
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.capture_gradients import CaptureGradients, add_at
from flexjax.backends.xla.forward import join_rows
from flexjax.backends.xla.problem import Problem, Scores, heads_first, pad_to
from flexjax.backends.xla.schedule import Row, Visit, row_at, walk
from flexjax.ir.program import Lit, Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted

Array = jax.Array


def backward(
    plan: KernelPlan,
    operands: Operands,
    results: Results,
    d_out: Array,
    d_lse: Array | None,
    wanted: Wanted,
    derivative: Program | None,
    target: Target,
) -> Gradients:
    """Cotangents of the wanted operands. d_out has the shape of out, d_lse that of lse (None: zero)."""
    if plan.batch * plan.q_len * plan.kv_len == 0:
        return _zeros(operands, wanted, d_lse, plan)
    problem = Problem(plan, operands, target, derivative, backward=True)
    s = problem.schedule
    wide = lambda x: heads_first(x, plan).astype(problem.compute)
    delta = jnp.sum(wide(d_out) * wide(results.out), -1)
    if d_lse is not None:
        delta = delta - wide(d_lse)
    lse = wide(results.lse)
    # An empty row got lse -inf, which no score depends on.
    delta = jnp.where(jnp.isneginf(lse), jnp.zeros_like(delta), delta)
    row_data = RowData(problem.rows(d_out), *(pad_to(x, 2, s.padded_q)[..., None] for x in (delta, lse)))
    captured = CaptureGradients(problem, derivative, wanted.score_captures)

    def one_row(carry: tuple, step: Array) -> tuple[tuple, tuple]:
        return _row(problem, row_data, row_at(plan, s, problem.lists, step), carry, captured, wanted, derivative)

    columns = [
        jnp.zeros(x.shape, problem.compute) if want else None
        for x, want in (
            (problem.key, wanted.key),
            (problem.value, wanted.value),
            (typing.cast(Array, problem.key_extra), wanted.key_extra),  # there where it is wanted
        )
    ]
    carry = problem.as_operands_vary((*columns, captured.start()))
    steps = jnp.arange(s.steps, dtype=jnp.int32)
    if s.steps == 1:
        carry, rows = one_row(carry, steps[0])
        rows = jax.tree.map(lambda x: x[None], rows)
    else:
        carry, rows = lax.scan(one_row, carry, steps)
    dk, dv, dkx, buffers = carry
    dq, dqx = rows

    def rows_back(x: Array | None, like: Array | None) -> Array | None:
        if x is None:
            return None
        assert like is not None
        return heads_first(join_rows(x, s)[:, :, : plan.q_len], plan).astype(like.dtype)

    def columns_back(x: Array | None, like: Array | None) -> Array | None:
        if x is None:
            return None
        assert like is not None
        return heads_first(x[:, :, : plan.kv_len], plan).astype(like.dtype)

    return Gradients(
        rows_back(dq, operands.query),
        columns_back(dk, operands.key),
        columns_back(dv, operands.value),
        rows_back(dqx, operands.query_extra),
        columns_back(dkx, operands.key_extra),
        _sinks(problem, delta, lse, operands) if wanted.sinks else None,
        captured.finish(buffers),
    )


class RowData:
    """What the sweep reads of each row, padded: d_out [B, N, T, E], delta - dlse and lse [B, N, T, 1]."""

    def __init__(self, d_out: Array, delta: Array, lse: Array):
        self.d_out, self.delta, self.lse = d_out, delta, lse


def _row(
    problem: Problem,
    data: RowData,
    row: Row,
    carry: tuple,
    captured: CaptureGradients,
    wanted: Wanted,
    derivative: Program | None,
) -> tuple[tuple, tuple]:
    plan, s = problem.plan, problem.schedule
    q = problem.take_rows(problem.query, row)
    qx = None if problem.query_extra is None else problem.take_rows(problem.query_extra, row)
    do, delta, lse = (problem.take_rows(x, row) for x in (data.d_out, data.delta, data.lse))
    scale = jnp.asarray(plan.scale, problem.compute)
    need_ds = wanted.query or wanted.key or wanted.query_extra or wanted.key_extra

    def visit_tile(state: tuple, visit: Visit) -> tuple:
        dq, dqx, dk, dv, dkx, buffers = state
        raw = problem.raw_scores(row, visit, q, qx)
        scores = problem.scores(row, visit, raw, derivative, bound_rows=True)
        p = tile_math.probabilities(scores.modified, lse)
        keep = problem.keep(row, visit)
        if dv is not None:
            dropped = p if keep is None else p * keep
            dv = _add_columns(problem, dv, row, visit, dropped, do)
        if not need_ds and not captured.slots:
            return dq, dqx, dk, dv, dkx, buffers
        dp = problem.query_times_key(do, problem.take_columns(problem.value, row, visit.blocks))
        cotangent = p * ((dp if keep is None else dp * keep) - delta)
        buffers = captured.add(buffers, row, visit, scores, cotangent)
        ds = raw_cotangent(scores, cotangent) * scale
        if dq is not None:
            dq = dq + problem.weights_times_value(ds, problem.take_columns(problem.key, row, visit.blocks))
        if dqx is not None:
            assert problem.key_extra is not None
            dqx = dqx + problem.weights_times_value(ds, problem.take_columns(problem.key_extra, row, visit.blocks))
        dk = dk if dk is None else _add_columns(problem, dk, row, visit, ds, q)
        dkx = dkx if dkx is None else _add_columns(problem, dkx, row, visit, ds, typing.cast(Array, qx))
        return dq, dqx, dk, dv, dkx, buffers

    zero = lambda dim, want: jnp.zeros((s.batch, s.heads, s.block_q, dim), problem.compute) if want else None
    state = (zero(plan.head_dim, wanted.query), zero(plan.extra_dim, wanted.query_extra), *carry)
    dq, dqx, *rest = walk(plan, s, row, visit_tile, problem.as_operands_vary(state))
    return tuple(rest), (dq, dqx)


def raw_cotangent(scores: Scores, cotangent: Array) -> Array:
    """Cotangent of scale * q . k from that of the modified score."""
    if scores.partials:
        partial = scores.partials[0]
        cotangent = cotangent * (partial.value if isinstance(partial, Lit) else partial)
    if scores.on is None:
        return cotangent
    return jnp.where(scores.on, cotangent, jnp.zeros_like(cotangent))


def _add_columns(problem: Problem, total: Array, row: Row, visit: Visit, weights: Array, rows: Array) -> Array:
    """total [B, heads, padded_kv, D] plus weights^T rows at the key blocks of the visit."""
    s = problem.schedule
    m0, nm = problem.key_group(total.shape[1], row)
    product = problem.weights_transposed_times(weights, rows, nm)
    for j, part in enumerate(jnp.split(product, visit.blocks.shape[0], 2)):
        total = add_at(total, part, (row.b0, m0, visit.blocks[j] * s.block_kv, 0))
    return total


def _sinks(problem: Problem, delta: Array, lse: Array, operands: Operands) -> Array:
    """delta here is sum(do * out) - dlse, [B, N, T]."""
    assert problem.sinks is not None
    assert operands.sinks is not None
    weight = tile_math.probabilities(problem.sinks[None, :, None], lse)
    return -(weight * delta).sum((0, 2)).astype(operands.sinks.dtype)


def _zeros(operands: Operands, wanted: Wanted, d_lse: Array | None, plan: KernelPlan) -> Gradients:
    """Without keys only the sinks have a gradient, through lse."""
    zero = lambda x, want: jnp.zeros_like(x) if want else None
    sinks = zero(operands.sinks, wanted.sinks)
    if sinks is not None and d_lse is not None:
        sinks = heads_first(d_lse, plan).sum((0, 2)).astype(sinks.dtype)
    captures = tuple(map(zero, operands.score_captures, wanted.score_captures))
    q, k, v, qx, kx = (zero(x, w) for x, w in zip(operands[:5], wanted[:5], strict=True))
    return Gradients(q, k, v, qx, kx, sinks, captures)
