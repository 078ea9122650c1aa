"""The forward kernel: online softmax over the visited tiles of a row.

    grid step = one visited tile (query tile, key tile) of one query head; all tiles of a row follow one another

Queries are the rows of a tile (sublanes), keys its columns (lanes). The kernel keeps the row maximum and the row sum as
[queries, 128]: the maximum the same in every lane, the sum as 128 partial sums that are added when the row ends.
Exponentials are to base 2; without a score program, the scale is folded into their argument. Of a weighted plan the
scores are the weights: no maximum, no exponential and no division, and lse is the row sum. Expectations sum alike.

The kernel itself copies keys and values in pages, a visit ahead (page_copies.py); Pallas copies all others.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends import tile_math
from flexjax.backends.mosaic_tpu import layouts, vmem
from flexjax.backends.mosaic_tpu.block_sparse_order import BlockSparseOrder, make_order
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.hoisted_operands import Operand
from flexjax.backends.mosaic_tpu.launch import KernelCall, KernelRefs, KernelStep, Output, each_strip, launch
from flexjax.backends.mosaic_tpu.page_copies import PageCopies, Pages, PageSlots, column_scales
from flexjax.backends.mosaic_tpu.tile_programs import Strip
from flexjax.backends.mosaic_tpu.tile_scores import TileScores
from flexjax.backends.mosaic_tpu.vector_ops import (
    F32,
    LANES,
    NN,
    NT,
    dot,
    fill,
    lane_sums,
    repeat_lanes,
    round_to,
    zero_rows_past_end,
)
from flexjax.backends.tile_math import LN2, LOG2E
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

T = typing.TypeVar("T")


class ForwardInputs(typing.NamedTuple, typing.Generic[T]):
    """Blocks of a visit."""

    query: T  # [queries, D]
    key: T  # [keys, D]; in pages the whole pool in HBM, [P, page, D]
    value: T  # [keys, E]; in pages the whole pool in HBM, [P, page, E]
    sinks: T | None  # [1, queries], of a plan in pages, whose heads are joined; None for other plans
    key_scale: T | None = None  # [1, keys], factors of the products of each key of quantised pages
    value_scale: T | None = None  # [1, keys], factors of the weights of each value of quantised pages


class ForwardOutputs(typing.NamedTuple, typing.Generic[T]):
    """Blocks of a row."""

    out: T  # [queries, E]
    lse: T  # [1, queries] float32, natural logarithms
    max_scores: T | None  # [1, queries] float32
    rounding: T | None  # what rounding took from out, [queries, E]
    expectations: tuple[T, ...]  # like lse


class ForwardScratch(typing.NamedTuple, typing.Generic[T]):
    """What the kernel keeps in VMEM, float32, for one row."""

    maximum: T  # row maximum, the same in each lane, [queries, 128]
    total: T  # partial row sums, [queries, 128]
    accumulated: T  # output before it is divided by the row sum, [queries, E]
    sums: tuple[T, ...]  # of expectations, as `total`
    slots: PageSlots[T] | None  # tiles of keys and values in pages


Refs = KernelRefs[ForwardInputs[jax.Ref], ForwardOutputs[jax.Ref], ForwardScratch[jax.Ref]]


@dataclasses.dataclass(frozen=True)
class ForwardKernel:
    """The body of the forward kernel, with what is static about it."""

    plan: KernelPlan  # after heads were joined or packed
    tiles: vmem.VmemTiles
    scores: TileScores
    copies: PageCopies | None = None  # None if keys and values are contiguous

    @property
    def identity(self) -> bool:
        """Whether the row maximum is taken of q . k, because only a positive scale is applied to it."""
        return self.plan.score is None and self.plan.scale > 0

    @property
    def whole_powers(self) -> bool:
        """Whether references of rows are multiples of ln 2, so that both passes round weights alike (tile_math.py).

        Scores are then converted to base 2 before the row maximum is taken, which is rounded up to an integer. Scores
        that may be large stay in base e, and their maximum is rounded up by `tile_math.whole_power`.
        """
        return self.plan.rounds_weights_alike

    @property
    def in_base_2(self) -> bool:
        """Whether `strip_scores` returns scores to base 2."""
        return self.scores.separated is not None or (self.whole_powers and not self.scores.large)

    @property
    def to_base_2(self) -> np.float32:
        """The factor from what `strip_scores` returns to scores to base 2 (for exp2)."""
        if self.in_base_2:
            return np.float32(1.0)
        return np.float32(self.plan.scale * LOG2E if self.identity else LOG2E)

    @property
    def to_natural(self) -> np.float32:
        """The factor from what `strip_scores` returns to scores to base e."""
        if self.in_base_2:
            return np.float32(LN2)
        return np.float32(self.plan.scale if self.identity else 1.0)

    def __call__(self, refs: Refs) -> None:
        """One grid step: opens the row at its first visit, adds the tile, writes the row at its last visit.

        An idle visit, the only one of a row without tiles, adds nothing, so that out is 0 and lse -inf (or the sink).
        """
        visit = self.scores.order.visit(refs.tables)
        if self.copies is not None and refs.scratch.slots is not None:
            pages = Pages(refs.inputs.key, refs.inputs.value, refs.prefetched[0], refs.prefetched[-1])
            self.copies.begin_visit(refs.tables, visit, pages, refs.scratch.slots)

        @pl.when(visit.first)
        def open_row() -> None:
            fill(refs.scratch.maximum, -jnp.inf)
            for ref in (refs.scratch.total, refs.scratch.accumulated, *refs.scratch.sums):
                fill(ref, 0.0)

        tiles = self.tiles
        each_strip(refs, visit, self.scores.order.kinds, (tiles.q, tiles.kv, tiles.strip), self.add_strip)

        @pl.when(visit.last)
        def close_row() -> None:
            self.finish_row(KernelStep(refs, visit, Strip(self.tiles.q, 0, min(LANES, self.tiles.kv)), False))

    def strip_scores(self, step: KernelStep, qk: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """(scores of a strip of which the row maximum is taken, float32 (queries, keys), from the products q . k; the
        functions of them whose expectations are asked for, which broadcast to that).

        Without a score program (`identity`) they are q . k itself; with a separated bias the scores in base 2, without
        the row term unless `whole_powers`; otherwise the scores after score_mod.
        """
        if self.identity:
            return qk, []
        separated = self.scores.separated
        if separated is None:
            scores, *functions = self.scores.scores(step, qk * np.float32(self.plan.scale))
            return scores * np.float32(LOG2E) if self.in_base_2 else scores, functions
        bias = self.scores.bias(step)
        x = qk * np.float32(self.plan.scale * separated.scale * LOG2E)
        x = x if bias.tile is None else x + bias.tile
        return x + bias.row_term if self.whole_powers and bias.row_term is not None else x, []

    def add_strip(self, step: KernelStep) -> None:
        """One step of the online softmax, or of plain sums: adds the keys of a strip to the sums in scratch."""
        refs: Refs = step.refs
        plan, strip = self.plan, step.strip
        maximum, total, accumulated, sums, slots = refs.scratch
        if self.copies is None or slots is None:
            keys, values = refs.inputs.key[strip.columns, :], refs.inputs.value[strip.columns, :]
        else:
            keys, values = self.copies.tile_of(step.visit, slots, strip.columns)
        key_scale, value_scale = refs.inputs.key_scale, refs.inputs.value_scale
        qk = dot(refs.inputs.query[...], keys, NT)
        x, functions = self.strip_scores(step, qk if key_scale is None else qk * key_scale[:, strip.columns])
        on = self.scores.on(step) if step.checked else None
        if on is not None:
            x = jnp.where(on, x, 0.0 if plan.weighted else -jnp.inf)
        rescale = None
        if plan.weighted:
            p = x
            if plan.total:
                total[...] += lane_sums(p)
        else:
            p, rescale = self.online_step(x, on, maximum, total)
        for ref, function in zip(sums, functions, strict=True):
            terms = p * function if on is None else jnp.where(on, p * function, 0.0)
            ref[...] = (ref[...] if rescale is None else ref[...] * rescale) + lane_sums(terms)
        # Dropout and the scales of quantised values multiply what is added to the output, not to the row sum.
        multiplier = self.scores.dropout(step)
        if multiplier is not None:
            p = p * multiplier if on is None else jnp.where(on, p * multiplier, 0.0)
        if value_scale is not None:
            p = p * value_scale[:, strip.columns]
        if step.checked and self.scores.keys_end and (self.copies is None or plan.cache_dtype is not None):
            start = step.visit.kv_tile * np.int32(self.tiles.kv) + np.int32(strip.col0)
            values = zero_rows_past_end(values, start, self.scores.end_of_keys(step))
        earlier = accumulated[...]
        earlier = earlier if rescale is None else earlier * repeat_lanes(rescale, accumulated.shape[1])
        accumulated[...] = earlier + dot(p.astype(values.dtype), values, NN)

    def online_step(
        self, x: jax.Array, on: jax.Array | None, maximum: jax.Ref, total: jax.Ref
    ) -> tuple[jax.Array, jax.Array]:
        """(exponentials of the scores `x` of a strip, the factor of earlier sums), after it follows the row maximum."""
        plan, large, cols = self.plan, self.scores.large, x.shape[1]
        m_before = maximum[...]
        largest = jnp.max(x, axis=1, keepdims=True)
        if self.whole_powers:
            largest = tile_math.whole_power(largest) if large else jnp.ceil(largest)
        m = jnp.maximum(m_before, largest)
        subtracted = m if large else m * self.to_base_2
        if on is not None or plan.score is not None:
            subtracted = jnp.where(m == -jnp.inf, 0.0, subtracted)
        if large:
            distance = tile_math.large_distance(plan.score, x, repeat_lanes(subtracted, cols))
            p = jnp.exp2(distance * self.to_base_2)
            rescale = jnp.exp2((m_before - subtracted) * self.to_base_2)
        else:
            base_2 = x if self.in_base_2 else x * self.to_base_2
            p = jnp.exp2(base_2 - repeat_lanes(subtracted, cols))
            rescale = jnp.exp2(m_before * self.to_base_2 - subtracted)
        total[...] = total[...] * rescale + lane_sums(p)
        maximum[...] = m
        return p, rescale

    def finish_row(self, step: KernelStep) -> None:
        """Writes the results of a row of tiles from its sums, at the row's last visit.

        A sink counts in out and lse, but not in max_scores. A query with no visible key and no sink has out 0 and lse
        -inf; so has a query that does not exist, with a sink too. NaN stays. The strip of `step` may be any of the
        tile: it gives the row term.
        """
        refs: Refs = step.refs
        out_ref, lse_ref, max_scores_ref, rounding_ref, expectations = refs.outputs
        accumulated = refs.scratch.accumulated
        m = refs.scratch.maximum[...]
        if self.scores.separated is not None and not self.whole_powers:
            row_term = self.scores.bias(step).row_term  # the scores are without it: the whole row shares it
            m = m if row_term is None else jnp.where(m == -jnp.inf, m, m + row_term)
        m = m * self.to_natural
        total = jnp.broadcast_to(jnp.sum(refs.scratch.total[...], axis=1, keepdims=True), m.shape)
        exists = None
        if self.plan.lengths[0]:
            row = lax.broadcasted_iota(jnp.int32, m.shape, 0) + step.visit.q_tile * np.int32(self.tiles.q)
            exists = row < self.scores.end_of_queries(step)
            m, total = jnp.where(exists, m, -jnp.inf), jnp.where(exists, total, 0.0)
        if max_scores_ref is not None:
            max_scores_ref[...] = m[:, :1].reshape(1, self.tiles.q)
        shrink = jnp.ones_like(m)
        if self.plan.has_sinks:
            rows = refs.inputs.sinks
            sink = refs.prefetched[0][step.visit.h] if rows is None else rows[...].reshape(self.tiles.q, 1)
            top = jnp.maximum(m, sink)
            top = jnp.where(top == -jnp.inf, 0.0, top)
            shrink = jnp.exp(m - top)
            total = total * shrink + jnp.exp(sink - top)
            m = top
        not_empty = total != 0  # True for NaN, which the outputs must show
        if exists is not None:
            not_empty = not_empty & exists
        inverse = jnp.where(not_empty, shrink / jnp.where(not_empty, total, 1.0), 0.0)
        inverse = jnp.ones_like(m) if self.plan.weighted else inverse
        sums = accumulated[...]
        if exists is not None:
            sums = jnp.where(exists[:, :1], sums, 0.0)
        out = sums * repeat_lanes(inverse, accumulated.shape[1])
        for ref, partial in zip(expectations, refs.scratch.sums, strict=True):
            value = jnp.sum(partial[...], axis=1, keepdims=True) * inverse[:, :1]
            value = value if exists is None else jnp.where(exists[:, :1], value, 0.0)
            ref[...] = value.reshape(1, self.tiles.q)
        if rounding_ref is None:
            out_ref[...] = out.astype(out_ref.dtype)
        else:
            rounded = round_to(out, self.plan.dtype, self.plan.options.interpret)
            out_ref[...], rounding_ref[...] = rounded.astype(out_ref.dtype), (out - rounded).astype(out_ref.dtype)
        lse = jnp.where(not_empty, m + jnp.log(jnp.where(not_empty, total, 1.0)), -jnp.inf)
        lse = total if self.plan.weighted else lse
        lse_ref[...] = lse[:, :1].reshape(1, self.tiles.q)


def forward(plan: KernelPlan, operands: Operands, chip: vmem.Chip) -> Results:
    """The forward pass of a plan by the forward kernel, as Results (plan/kernel_plan.py) says.

    plan   one that the backend does not refuse, with mask blocks of the sizes that support.py takes; with keys in pages
           its heads are
           joined (rewrites/join_heads.py), because a page is copied with the keys of all heads
    """
    shapes = layouts.FoldedShapes.of(plan)
    tiles = vmem.forward_tiles(plan, chip)
    order = make_order(plan, TileGeometry.of(plan, tiles, q_axis=0), shapes.group, False, operands)
    copies = None
    if plan.page:
        assert isinstance(order, BlockSparseOrder)
        copies = PageCopies(plan, order, tiles.kv)
    added, row_sinks = _prefetched(plan, operands)
    scales = column_scales(plan, operands, tiles.kv) or (None, None)
    scores = TileScores(plan, order, operands, plan.score, added_prefetch=len(added))
    maps = layouts.IndexMaps(order, shapes.group)
    scale_spec = pl.BlockSpec((None, 1, tiles.kv), maps.columns_of_entry)
    row_output = Output((plan.batch, plan.q_heads, 1, plan.q_len), "float32", maps.row_spec(tiles.q))
    out_output = Output(shapes.out.shape, plan.out_dtype, shapes.out.spec(tiles.q, maps.query))
    found = launch(
        KernelCall(
            "flexjax_forward",
            order,
            scores.hoisted,
            inputs=ForwardInputs(
                *_inputs(plan, operands, tiles, maps),
                None if row_sinks is None else Operand(row_sinks, pl.BlockSpec((1, tiles.q), maps.row_of_head)),
                *(None if scale is None else Operand(scale, scale_spec) for scale in scales),
            ),
            outputs=ForwardOutputs(
                out_output,
                row_output,
                row_output if plan.max_scores else None,
                out_output if plan.returns_rounding else None,
                (row_output,) * plan.expectations,
            ),
            scratch=ForwardScratch(
                pltpu.VMEM((tiles.q, LANES), F32),
                pltpu.VMEM((tiles.q, LANES), F32),
                pltpu.VMEM((tiles.q, plan.value_dim), F32),
                (pltpu.VMEM((tiles.q, LANES), F32),) * plan.expectations,
                None if copies is None else copies.scratch,
            ),
            vmem_limit=chip.vmem_limit,
            interpret=plan.options.interpret,
            prefetched=(*added, *scores.lengths),
        ),
        ForwardKernel(plan, tiles, scores, copies),
    )
    out, lse, max_scores, rounding, expectations = typing.cast(ForwardOutputs[jax.Array], found)
    from_rows = lambda x: layouts.rows_from_kernel(x, shapes.tokens_first)
    return Results(
        shapes.out.from_kernel(out),
        from_rows(lse),
        None if max_scores is None else from_rows(max_scores),
        None if rounding is None else shapes.out.from_kernel(rounding),
        jnp.stack([from_rows(x) for x in expectations], -1) if expectations else None,
    )


def _prefetched(plan: KernelPlan, operands: Operands) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """(arrays that the kernel prefetches to SMEM before the lengths, sinks of rows [1, T] float32 or None)."""
    # With pages the heads are joined, so that rows of a head have sinks of their own.
    if operands.pages is not None:
        return (operands.pages.reshape(-1),), None if operands.sinks is None else operands.sinks.astype(F32)
    if operands.sinks is None or not plan.has_sinks:
        return (), None
    return (operands.sinks.astype(F32),), None


def _inputs(
    plan: KernelPlan, operands: Operands, tiles: vmem.VmemTiles, maps: layouts.IndexMaps
) -> tuple[Operand, Operand, Operand]:
    """(query, key, value) with block specs, in the shapes of layouts.fold; pools in HBM lose their one head."""
    shapes = layouts.FoldedShapes.of(plan)
    if not plan.page:
        q, k, v = layouts.fold(plan, operands)
        key, value = shapes.key.spec(tiles.kv, maps.key), shapes.value.spec(tiles.kv, maps.key)
    else:
        q, key = shapes.query.to_kernel(operands.query), pl.BlockSpec(memory_space=pl.ANY)
        k, v, value = operands.key[:, :, 0], operands.value[:, :, 0], key
    return Operand(q, shapes.query.spec(tiles.q, maps.query)), Operand(k, key), Operand(v, value)
