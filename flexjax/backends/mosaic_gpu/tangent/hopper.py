"""The tangent kernel for Hopper: WGMMA, by the producer, the scheduler and the rings of the forward kernel.

S = Q K^T            tS = tQ K^T + Q tK^T      WGMMA, from shared memory; tS in flight while P is computed
P, P tS'             call.py
tout += P tS' V + P tV                         WGMMA, P and P tS' from registers
"""

import dataclasses
import functools

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward.common import Products
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath
from flexjax.backends.mosaic_gpu.forward.hopper_consumer import Consumer, QueryTile
from flexjax.backends.mosaic_gpu.forward.hopper_producer import Producer
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardScratch, forward_scratch
from flexjax.backends.mosaic_gpu.forward.launch import launch_forward
from flexjax.backends.mosaic_gpu.forward.rows import Phase, Position, Programs
from flexjax.backends.mosaic_gpu.forward.setup import ForwardOutputs, HopperSetup
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import WorkItem
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, split
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, not_hoisted, rows_of, slot_parts
from flexjax.backends.mosaic_gpu.tangent.call import (
    TangentCall,
    TangentMath,
    TangentOperands,
    Terms,
    finished,
    masked,
    row_vectors,
)
from flexjax.backends.mosaic_gpu.tangent.tiles import TangentTile
from flexjax.plan.kernel_plan import TangentInputs


def tangent(call: TangentCall, given: TangentInputs, tile: TangentTile) -> tuple[jax.Array, jax.Array]:
    """(tangent of out, tangent of lse or total) of a call, in the plan's layout."""
    setup = HopperSetup(call.plan, tile)
    math = TangentMath(call, (tile.rows, tile.block_kv), (tile.block_q, tile.block_kv))
    inputs = call.inputs(setup, given)
    query, key, value = (split(x, tile.parts) for x in inputs.forward[:3])
    inputs = inputs._replace(forward=inputs.forward._replace(query=query, key=key, value=value))

    def kernel(inputs: TangentOperands[Ref], outputs: ForwardOutputs[Ref], scratch: ForwardScratch[Ref]) -> None:
        clip_rows(aligned=True)
        role = lax.axis_index("wg")
        consumer = TangentConsumer(setup, inputs.forward, outputs, scratch, inputs, math)
        when(role < tile.groups)(consumer.run)
        when(role == tile.groups)(Producer(setup, inputs.forward, scratch).run)

    scratch = forward_scratch(tile, part_dtype(call.plan))
    found = launch_forward(setup, inputs, kernel, scratch, name="flexjax_tangent", warpgroups=tile.groups + 1)
    return found.float32_out if call.plan.partial else found.out, found.lse


@dataclasses.dataclass(frozen=True)
class TangentConsumer(Consumer):
    """One consumer warpgroup of a CTA."""

    given: TangentOperands[Ref]
    math: TangentMath

    def query_tile(self, item: WorkItem, turn: Scalar, first_step: Scalar, group: Scalar) -> "TangentRows":
        setup, tile, scratch = self.setup, self.setup.tile, self.scratch
        start = item.q_tile * tile.block_q + group * tile.rows
        rows, vectors = self.math.at_rows(self.inputs, item, start), row_vectors(self.given, item, start, tile.rows)
        slot = kernel_parts.slot_of(turn, tile.query_slots)
        if not tile.dynamic_scheduler:
            plgpu.barrier_wait(scratch.query_full.at[slot])
        place = (item, Programs(), scratch, turn, first_step, group, slot, ())
        return TangentRows(setup, self.inputs, self.outputs, *place, self.given, self.math, rows, vectors)


@dataclasses.dataclass(frozen=True)
class TangentRows(QueryTile):
    """The rows of one work item that one consumer computes; in the methods `n` is the number of a step in the item."""

    given: TangentOperands[Ref]
    math: TangentMath
    rows: RowMath
    vectors: tuple[jax.Array, jax.Array]

    @property
    def tile(self) -> TangentTile:
        tile = self.setup.tile
        assert isinstance(tile, TangentTile)
        return tile

    @property
    def products(self) -> Products:
        return Products(self.tile.parts)

    def needs_start(self, phase: Phase) -> bool:
        return self.math.needs_start(self.setup)

    def compute(self) -> None:
        tile = self.tile

        def accumulate(out: Ref) -> tuple[jax.Array, jax.Array]:
            step = functools.partial(self._step, out)
            (sums,) = self._loops(step, 0, (registers.splat(np.float32(0), "row", (tile.rows,)),))
            return self.products.read(out), sums

        moved, sums = self.products.accumulators(accumulate, (tile.rows, tile.value_dim))
        self._end(moved, sums, self._release_queries())

    def _step(self, out: Ref, n: Scalar, carry: tuple[Scalar, jax.Array], phase: Phase) -> tuple[Scalar, jax.Array]:
        """Adds step n to `out`; carry: (first key of the step's tile, sums of p ts')."""
        start, sums = carry
        scratch, slots, products, tile = self.scratch, self.setup.slots, self.products, self.tile
        found = self.rows.at_columns(start, masked(self.setup, self.item, n, phase))
        start = self.next_start(n, phase)
        key_slot, value_slot = not_hoisted(self._key_slot(n)), not_hoisted(self._value_slot(n))
        own = pl.ds(not_hoisted(self.group) * tile.rows, tile.rows)
        queries = slot_parts(scratch.query, not_hoisted(self.query_slot), tile.query_parts, own)
        keys = slot_parts(scratch.key, key_slot, tile.key_parts)
        values = slot_parts(scratch.value, value_slot, tile.value_parts)
        (q, tq), (k, tk), (v, tv) = map(self._with_tangent, (queries, keys, values), self.math.call.moving[:3])
        pairs = [(a, b) for a, b in ((tq, k), (q, tk)) if a is not None and b is not None]

        def score_terms(s: Ref, *ts: Ref) -> Terms:
            plgpu.barrier_wait(scratch.key_full.at[key_slot])
            products.add(s, q, k, b_t=True)
            for a, b in pairs:
                products.add(ts[0], a, b, b_t=True)
            probabilities = found.probabilities(products.read(s, len(pairs)), self.vectors[0])
            raw = products.read(ts[0], 0) if pairs else None
            slots.release("key", scratch.key_free, key_slot)
            return self.math.terms(probabilities, raw)

        shape = self.math.shape
        terms = products.accumulators(score_terms, *[shape] * (1 + bool(pairs)))
        plgpu.barrier_wait(scratch.value_full.at[value_slot])
        for weights, operand in ((terms.scores, v), (terms.values, tv)):
            if weights is not None and operand is not None:
                products.add(out, products.split(weights, part_dtype(self.setup.plan)), operand)
        products.wait(0)
        slots.release("value", scratch.value_free, value_slot)
        return start, sums if terms.sums is None else sums + terms.sums

    def _with_tangent(self, parts: tuple[Ref, ...], moves: bool) -> tuple[tuple[Ref, ...], tuple[Ref, ...] | None]:
        """(parts of an operand, parts of its tangent), from those of a slot: each part beside its tangent."""
        return (parts[::2], parts[1::2]) if moves else (parts, None)

    def _end(self, moved: jax.Array, sums: jax.Array, position: Position) -> None:
        """Writes the results."""
        (b, h, q_tile), plan, tile = position, self.setup.plan, self.tile
        start = q_tile * tile.block_q + self.group * tile.rows
        own = lambda x: rows_of(x, plan.layout, b, h, start, tile.rows)
        out, lse = finished(None if self.given.out is None else own(self.given.out), moved, sums, self.vectors[1])
        self.outputs.lse[b, h, pl.ds(start, tile.rows)] = lse
        self._write((out,), [own(x) for x in (self.outputs.out, self.outputs.rounding) if x is not None])
