"""The backward pass in XLA: one loop over the tiles of the forward pass, which computes the probabilities again.

With s' = score_mod(s), p = exp(s' - lse), r dropout's multiplier (1 without), do, dlse the cotangents of out, lse:

    delta = sum_e do * out                 for each row
    dv    = (p r)^T do
    dp    = r (do v^T)
    ds'   = p (dp - delta + dlse)          cotangent of the modified score
    ds    = ds' * ds'/ds, 0 where masked   the select comes after the product, because score_mod may be NaN there
    dq    = scale ds k,   dk = scale ds^T q
    dl_j  = ds' * ds'/dl_j                 summed over the entries that load the same element
    dsink = sum_rows exp(sink - lse) (dlse - delta)

Of a weighted plan, with w the weights and dtotal the cotangent of their sum (the lse of such a plan):

    dw    = dp + dtotal                    in place of ds', with s' = w: the cotangent of the program's result
    dv    = (w r)^T do

Beside expectations (passes/expectations.py) the derivative program has a second group, fbar and its derivatives:

    ds'   = p (dp + fbar - delta + dlse)   of a weighted plan dw = dp + dtotal + fbar
    ds    = ds' * ds'/ds + p * dfbar/ds    and so dl_j; p is w of a weighted plan

A derivative rule that is not linear takes ds' itself and gives ds and ds' * ds'/dl_j (Program.takes_cotangent).

A tile row is one query block of one group of batch entries and query heads; a visit computes its tile at `chunk` key
blocks (block_loop.py). In the code, `delta` is already delta - dlse.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.target import Target
from flexjax.backends.xla.block_loop import BlockVisit, TileRow, row_at, walk
from flexjax.backends.xla.capture_gradients import CaptureGradients, add_at
from flexjax.backends.xla.forward import join_rows
from flexjax.backends.xla.tiled_operands import TiledOperands, heads_first, pad_to
from flexjax.backends.xla.visit_scores import (
    dropout_multiplier,
    raw_scores,
    times_partial,
    visit_scores,
    zero_where_off,
)
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Wanted
from flexjax.plan.lengths import NONE, where_exists

Array = jax.Array


class KeySums(typing.NamedTuple):
    """Gradients that are sums over queries, to which every tile row adds; None for those that are not wanted."""

    key: Array | None  # [B, heads, padded_kv, D]
    value: Array | None  # [B, heads, padded_kv, E]
    key_extra: Array | None  # [B, heads, padded_kv, R]
    captures: list[Array]  # the buffers of CaptureGradients


class QuerySums(typing.NamedTuple):
    """Gradients that are sums over keys, of the queries of one tile row; None for those that are not wanted."""

    query: Array | None  # [batch, heads, block_q, D]
    query_extra: Array | None  # [batch, heads, block_q, R]


def backward(plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
    """The gradients of the wanted operands, in their shapes and dtypes; None for the others.

    Of a partial plan, those of query, key, value and extra features are in the dtype of scores, unless the call is
    empty. A query that does not exist (lengths) adds nothing; one that sees no key neither, except that its d_lse is
    added to the gradient of its head's sink.
    """
    operands, results, d_out, d_lse, wanted, derivative = given
    lengths = operands.lengths or NONE
    if d_lse is not None:
        d_lse = where_exists(d_lse, lengths.query, plan)
    if plan.batch * plan.q_len * plan.kv_len == 0:
        return _empty_gradients(operands, wanted, d_lse, plan)
    d_out = where_exists(d_out, lengths.query, plan)
    tiled = TiledOperands(plan, operands, target, derivative, backward=True)
    sizes = tiled.sizes
    in_compute = lambda x: heads_first(x, plan).astype(tiled.compute)
    lse = in_compute(results.lse)
    out = None if plan.weighted else in_compute(results.float32_out)
    delta = jnp.zeros_like(lse) if out is None else jnp.sum(in_compute(d_out) * out, -1)
    if d_lse is not None:
        delta = delta - in_compute(d_lse)
    # The lse of an empty row is -inf, on which no score depends.
    delta = jnp.where(jnp.isneginf(lse), jnp.zeros_like(delta), delta)
    per_row = RowArrays(tiled.rows(d_out), *(pad_to(x, 2, sizes.padded_q)[..., None] for x in (delta, lse)))
    captured = CaptureGradients(tiled, derivative, wanted.score_captures)
    sweep = BackwardSweep(tiled, per_row, captured, wanted, derivative)

    def one_row(sums: KeySums, step: Array) -> tuple[KeySums, QuerySums]:
        return sweep.add_row(row_at(plan, sizes, tiled.lists, step, tiled.lengths), sums)

    zero = lambda x, want: None if not want else jnp.zeros(typing.cast(Array, x).shape, tiled.compute)
    sums = KeySums(
        zero(tiled.key, wanted.key),
        zero(tiled.value, wanted.value),
        zero(tiled.key_extra, wanted.key_extra),
        captured.start(),
    )
    sums = tiled.vary_like_operands(sums)
    steps = jnp.arange(sizes.steps, dtype=jnp.int32)
    if sizes.steps == 1:
        sums, rows = one_row(sums, steps[0])
        rows = jax.tree.map(lambda x: x[None], rows)
    else:
        sums, rows = lax.scan(one_row, sums, steps)

    def in_layout(x: Array | None, like: Array | None, length: int, existing: Array | None) -> Array | None:
        """x [B, heads, padded tokens, D] in the layout, length and dtype of its operand `like`."""
        if x is None:
            return None
        assert like is not None
        x = where_exists(heads_first(x[:, :, :length], plan), existing, plan)
        return x.astype(tiled.compute if plan.partial else like.dtype)

    join = lambda x: None if x is None else join_rows(x, sizes)
    return Gradients(
        in_layout(join(rows.query), operands.query, plan.q_len, lengths.query),
        in_layout(sums.key, operands.key, plan.kv_len, lengths.key),
        in_layout(sums.value, operands.value, plan.kv_len, lengths.key),
        in_layout(join(rows.query_extra), operands.query_extra, plan.q_len, lengths.query),
        in_layout(sums.key_extra, operands.key_extra, plan.kv_len, lengths.key),
        _sink_gradient(tiled, delta, lse, operands) if wanted.sinks else None,
        captured.finish(sums.captures),
    )


class RowArrays(typing.NamedTuple):
    """What the backward sweep reads for each query."""

    d_out: Array  # [B, N, padded_q, E]
    delta: Array  # delta - dlse, [B, N, padded_q, 1]
    lse: Array  # [B, N, padded_q, 1]


class BackwardSweep(typing.NamedTuple):
    """What is the same for all tile rows of a backward pass, and the step `add_row` for one of them."""

    tiled: TiledOperands
    per_row: RowArrays
    captured: CaptureGradients
    wanted: Wanted
    derivative: Program | None  # None where score_mod is the identity

    def add_row(self, row: TileRow, sums: KeySums) -> tuple[KeySums, QuerySums]:
        """`sums` with the part of one tile row added, and the gradients of its queries, in the dtype of scores."""
        tiled, wanted = self.tiled, self.wanted
        plan, sizes = tiled.plan, tiled.sizes
        q = tiled.take_rows(tiled.query, row)
        q_extra = None if tiled.query_extra is None else tiled.take_rows(tiled.query_extra, row)
        do, delta, lse = (tiled.take_rows(x, row) for x in self.per_row)
        scale = jnp.asarray(plan.scale, tiled.compute)
        need_ds = wanted.query or wanted.key or wanted.query_extra or wanted.key_extra

        def visit_tile(state: tuple[QuerySums, KeySums], visit: BlockVisit) -> tuple[QuerySums, KeySums]:
            (dq, dqx), (dk, dv, dkx, buffers) = state
            raw = raw_scores(tiled, row, visit, q, q_extra)
            scores = visit_scores(tiled, row, visit, raw, self.derivative, mask_q_end=True)
            p = scores.modified if plan.weighted else tile_math.probabilities(scores.modified, lse)
            multiplier = dropout_multiplier(tiled, row, visit)
            if dv is not None:
                dropped = p if multiplier is None else p * multiplier
                dv = _add_columns(tiled, dv, row, visit, dropped, do)
            # products for dS are left out if only gradients of values and sinks are wanted
            if not need_ds and not self.captured.slots:
                return QuerySums(dq, dqx), KeySums(dk, dv, dkx, buffers)
            dp = tiled.query_times_key(do, tiled.take_columns(tiled.value, row, visit))
            cotangent = (dp if multiplier is None else dp * multiplier) - delta
            # the value of the second group is a part of the cotangent over p
            width = 1 if self.derivative is None else 1 + len(self.derivative.gradients)
            beside = scores.partials[width:]
            more = times_partial(jnp.ones_like(p), beside[0]) if beside else None
            cotangent = cotangent if more is None else cotangent + more
            cotangent = cotangent if plan.weighted else p * cotangent
            of_loads = cotangent
            if self.derivative is not None and self.derivative.takes_cotangent:
                # the partials are cotangents then; what is off counts as 0, which a rule may make something else of
                given = zero_where_off(scores, cotangent)
                scores = visit_scores(tiled, row, visit, raw, self.derivative, mask_q_end=True, cotangent=given)
                cotangent = of_loads = jnp.ones_like(cotangent)
            elif tiled.rounds_weights and self.captured.slots:
                weights = p if multiplier is None else p * multiplier
                weights = tile_math.rounded_weights(weights, lse * tile_math.LOG2E, plan.dtype)
                of_loads = weights * dp - p * (delta if more is None else delta - more)
            buffers = self.captured.add(buffers, row, visit, scores, (of_loads, p))
            d_raw = times_partial(cotangent, scores.partials[0]) if scores.partials else cotangent
            d_raw = d_raw + times_partial(p, beside[1]) if beside else d_raw
            ds = zero_where_off(scores, d_raw) * scale
            if dq is not None:
                dq = dq + tiled.weights_times_value(ds, tiled.take_columns(tiled.key, row, visit))
            if dqx is not None:
                assert tiled.key_extra is not None
                dqx = dqx + tiled.weights_times_value(ds, tiled.take_columns(tiled.key_extra, row, visit))
            dk = dk if dk is None else _add_columns(tiled, dk, row, visit, ds, q)
            dkx = dkx if dkx is None else _add_columns(tiled, dkx, row, visit, ds, typing.cast(Array, q_extra))
            return QuerySums(dq, dqx), KeySums(dk, dv, dkx, buffers)

        shape = (sizes.batch, sizes.heads, sizes.block_q)
        zero = lambda dim, want: jnp.zeros((*shape, dim), tiled.compute) if want else None
        row_sums = QuerySums(zero(plan.head_dim, wanted.query), zero(plan.extra_dim, wanted.query_extra))
        state = tiled.vary_like_operands((row_sums, sums))
        row_sums, sums = walk(plan, sizes, row, visit_tile, state)
        return sums, row_sums


def _add_columns(
    tiled: TiledOperands, total: Array, row: TileRow, visit: BlockVisit, weights: Array, rows: Array
) -> Array:
    """`total` [B, key heads, padded_kv, D] with weights^T rows added at the visit's key blocks.

    weights   probabilities, or cotangents of the raw scores: [batch, heads, block_q, keys]
    rows      d_out or the queries of the tile row: [batch, heads, block_q, D]
    """
    m0, nm = tiled.key_group(total.shape[1], row)
    product = tiled.weights_transposed_times(weights, rows, nm)
    for j, part in enumerate(jnp.split(product, visit.blocks.shape[0], 2)):
        total = add_at(total, part, (row.b0, m0, visit.blocks[j] * tiled.sizes.block_kv, 0))
    return total


def _sink_gradient(tiled: TiledOperands, delta: Array, lse: Array, operands: Operands) -> Array:
    """Minus the sum over batch and queries of exp(sink - lse) * delta, [N]; delta and lse are [B, N, T]."""
    assert tiled.sinks is not None
    assert operands.sinks is not None
    sinks = jnp.where(lse == -jnp.inf, -jnp.inf, tiled.sinks[None, :, None])  # exp(sink) may be infinite
    weight = tile_math.probabilities(sinks, lse)
    return -(weight * delta).sum((0, 2)).astype(operands.sinks.dtype)


def _empty_gradients(operands: Operands, wanted: Wanted, d_lse: Array | None, plan: KernelPlan) -> Gradients:
    """Of a call without batch entries, queries or keys: lse is the sink, so its gradient is the sum of d_lse."""
    zero = lambda x, want: jnp.zeros_like(x) if want else None
    sinks = zero(operands.sinks, wanted.sinks)
    if sinks is not None and d_lse is not None:
        sinks = heads_first(d_lse, plan).sum((0, 2)).astype(sinks.dtype)
    captures = tuple(map(zero, operands.score_captures, wanted.score_captures))
    q, k, v, qx, kx = (zero(x, w) for x, w in zip(operands[:5], wanted[:5], strict=True))
    return Gradients(q, k, v, qx, kx, sinks, captures)
