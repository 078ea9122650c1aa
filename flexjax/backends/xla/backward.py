"""The backward pass in XLA: one loop over the tiles of the forward pass, which computes the probabilities again.

With s' = score_mod(s), p = exp(s' - lse), r dropout's multiplier (1 without), do and dlse the cotangents of out and lse:

    delta = sum_e do * out                 for each row
    dv    = (p r)^T do
    dp    = r (do v^T)
    ds'   = p (dp - delta + dlse)          cotangent of the modified score
    ds    = ds' * ds'/ds, 0 where masked   the select comes after the product, because score_mod may be NaN there
    dq    = scale ds k,   dk = scale ds^T q
    dl_j  = ds' * ds'/dl_j                 summed over the entries that load the same element
    dsink = sum_rows exp(sink - lse) (dlse - delta)

A tile row is one query block of one group of batch entries and query heads; a visit computes its tile at `chunk` key blocks
(block_loop.py). In the code, `delta` is already delta - dlse.

TiledOperands are the operands of the pass, laid out for tiles; a TileRow says which tile row, a BlockVisit which key blocks a
visit computes. KeySums and QuerySums are the sums that become the gradients: over queries, and over keys of one tile row.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.backends.base import BackwardInputs
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
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Wanted
from flexjax.plan.lengths import NONE, where_exists

Array = jax.Array


class KeySums(typing.NamedTuple):
    """Gradients that are sums over queries, to which every tile row adds; None for those that are not wanted.

    key, value, key_extra   [B, heads, padded_kv, D], [.., E] and [.., R]
    captures                the buffers of CaptureGradients
    """

    key: Array | None
    value: Array | None
    key_extra: Array | None
    captures: list[Array]


class QuerySums(typing.NamedTuple):
    """Gradients that are sums over keys, of the queries of one tile row: [batch, heads, block_q, D] of query and [.., R] of
    query_extra; None for those that are not wanted.
    """

    query: Array | None
    query_extra: Array | None


def backward(plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
    """The gradients of the wanted operands, in their shapes and dtypes; None for those that are not wanted. Of a partial plan,
    those of query, key, value and extra features are in the dtype of scores, unless the call is empty.

    given   operands, results, cotangents, what is wanted and the derivative program

    Sums are in the dtype of scores. A call without batch entries, queries or keys has gradients 0, but those of the sinks
    (`_empty_gradients`). A query that does not exist (lengths) has gradient 0 and adds nothing to other gradients; one that sees
    no key neither, except that its d_lse is added to the gradient of its head's sink.
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
    delta = jnp.sum(in_compute(d_out) * in_compute(results.float32_out), -1)
    if d_lse is not None:
        delta = delta - in_compute(d_lse)
    lse = in_compute(results.lse)
    # The lse of an empty row is -inf, on which no score depends.
    delta = jnp.where(jnp.isneginf(lse), jnp.zeros_like(delta), delta)
    per_row = RowArrays(tiled.rows(d_out), *(pad_to(x, 2, sizes.padded_q)[..., None] for x in (delta, lse)))
    captured = CaptureGradients(tiled, derivative, wanted.score_captures)
    sweep = BackwardSweep(tiled, per_row, captured, wanted, derivative)

    def one_row(sums: KeySums, step: Array) -> tuple[KeySums, QuerySums]:
        """(`sums` with the terms of the tile row of number `step` added, the gradients of that tile row's queries), for lax.scan."""
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
        """A gradient x [B, heads, padded tokens, D] in the layout and length of its operand, and in its dtype, or that of scores
        for a partial plan; 0 for tokens that do not exist. None for None.

        like       the operand, which has the dtype
        length     how many tokens the operand has
        existing   int32 [B], how many of them exist; None: all
        """
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
    """What the backward sweep reads for each query: d_out [B, N, padded_q, E], delta - dlse and lse [B, N, padded_q, 1]."""

    d_out: Array
    delta: Array
    lse: Array


class BackwardSweep(typing.NamedTuple):
    """What is the same for all tile rows of a backward pass, and the step `add_row` for one of them.

    tiled        the operands of the pass
    per_row      what the pass reads for each query
    captured     how the gradients of captured arrays are summed
    wanted       which operands get a gradient
    derivative   program of score_mod's derivatives; None where score_mod is the identity
    """

    tiled: TiledOperands
    per_row: RowArrays
    captured: CaptureGradients
    wanted: Wanted
    derivative: Program | None

    def add_row(self, row: TileRow, sums: KeySums) -> tuple[KeySums, QuerySums]:
        """Computes the gradients from one tile row: returns `sums` with its part added, and the gradients of its
        queries, in the dtype of scores. What is not wanted stays None; products for dS are left out if only gradients
        of values and sinks are wanted.
        """
        tiled, wanted = self.tiled, self.wanted
        plan, sizes = tiled.plan, tiled.sizes
        q = tiled.take_rows(tiled.query, row)
        q_extra = None if tiled.query_extra is None else tiled.take_rows(tiled.query_extra, row)
        do, delta, lse = (tiled.take_rows(x, row) for x in self.per_row)
        scale = jnp.asarray(plan.scale, tiled.compute)
        need_ds = wanted.query or wanted.key or wanted.query_extra or wanted.key_extra

        def visit_tile(state: tuple[QuerySums, KeySums], visit: BlockVisit) -> tuple[QuerySums, KeySums]:
            """`state`, (the sums of this row's queries, the sums over queries), with the tile of one visit added. If no
            gradient but those of values and sinks is wanted, only the sum for values changes.
            """
            (dq, dqx), (dk, dv, dkx, buffers) = state
            raw = raw_scores(tiled, row, visit, q, q_extra)
            scores = visit_scores(tiled, row, visit, raw, self.derivative, mask_q_end=True)
            p = tile_math.probabilities(scores.modified, lse)
            multiplier = dropout_multiplier(tiled, row, visit)
            if dv is not None:
                dropped = p if multiplier is None else p * multiplier
                dv = _add_columns(tiled, dv, row, visit, dropped, do)
            if not need_ds and not self.captured.slots:
                return QuerySums(dq, dqx), KeySums(dk, dv, dkx, buffers)
            dp = tiled.query_times_key(do, tiled.take_columns(tiled.value, row, visit))
            cotangent = p * ((dp if multiplier is None else dp * multiplier) - delta)
            of_loads = cotangent
            if tiled.rounds_weights and self.captured.slots:
                weights = p if multiplier is None else p * multiplier
                weights = tile_math.rounded_weights(weights, lse * tile_math.LOG2E, plan.dtype)
                of_loads = weights * dp - p * delta
            buffers = self.captured.add(buffers, row, visit, scores, of_loads)
            d_raw = times_partial(cotangent, scores.partials[0]) if scores.partials else cotangent
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
    """`total` with weights^T rows, the part of a gradient of keys or values from one visit, added at the visit's key blocks.

    tiled        the operands of the pass
    total        [B, key heads, padded_kv, D]
    row, visit   the tile row, and its key blocks
    weights      of the visit: probabilities, or cotangents of the raw scores; [batch, heads, block_q, keys]
    rows         of the tile row: d_out or the queries, [batch, heads, block_q, D]
    """
    m0, nm = tiled.key_group(total.shape[1], row)
    product = tiled.weights_transposed_times(weights, rows, nm)
    for j, part in enumerate(jnp.split(product, visit.blocks.shape[0], 2)):
        total = add_at(total, part, (row.b0, m0, visit.blocks[j] * tiled.sizes.block_kv, 0))
    return total


def _sink_gradient(tiled: TiledOperands, delta: Array, lse: Array, operands: Operands) -> Array:
    """The gradient of the sinks, [N] in their dtype: minus the sum over batch and queries of exp(sink - lse) * delta.

    tiled       the operands laid out for tiles, with sinks in the dtype of scores
    operands    those of the call, with sinks, whose dtype the result gets
    delta       sum(d_out * out) - dlse, [B, N, T]
    lse         [B, N, T]; a query whose lse is -inf, because it does not exist or its sink is -inf, adds nothing
    """
    assert tiled.sinks is not None
    assert operands.sinks is not None
    sinks = jnp.where(lse == -jnp.inf, -jnp.inf, tiled.sinks[None, :, None])  # exp(sink) may be infinite
    weight = tile_math.probabilities(sinks, lse)
    return -(weight * delta).sum((0, 2)).astype(operands.sinks.dtype)


def _empty_gradients(operands: Operands, wanted: Wanted, d_lse: Array | None, plan: KernelPlan) -> Gradients:
    """The gradients of a call without batch entries, queries or keys: 0, but that of a sink is the sum of d_lse,
    because lse is the sink there (0 if d_lse is None). None for what is not wanted.
    """
    zero = lambda x, want: jnp.zeros_like(x) if want else None
    sinks = zero(operands.sinks, wanted.sinks)
    if sinks is not None and d_lse is not None:
        sinks = heads_first(d_lse, plan).sum((0, 2)).astype(sinks.dtype)
    captures = tuple(map(zero, operands.score_captures, wanted.score_captures))
    q, k, v, qx, kx = (zero(x, w) for x, w in zip(operands[:5], wanted[:5], strict=True))
    return Gradients(q, k, v, qx, kx, sinks, captures)
