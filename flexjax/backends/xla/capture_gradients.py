"""Gradients of captured arrays, summed in a fixed order.

Each load of a floating array gets a buffer shaped by how it walks the attention matrix: a number for each (b, h), for each
query, key or difference, or for a tile the array itself. Tiles add to it as they are visited; at the end the buffer is added
into the array at the places that the load's index names. Memory is that of the buffers, never queries times keys unless the
captured array has that size itself.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.problem import Problem, Scores
from flexjax.backends.xla.schedule import Row, Visit
from flexjax.backends.xla.tile import Region, SlicePlan, XlaTile, joint_axes, slice_plan, sum_diagonals
from flexjax.ir.evaluate import evaluate
from flexjax.ir.program import COLUMN, DIAGONAL, ROW, SCALAR, Axes, Lit, Load, Program, classify_load
from flexjax.ir.rewrite import with_results

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Slot:
    """One load whose gradient is wanted: which partial derivative it has and how its buffer is laid out."""

    partial: int
    load: Load
    kind: str
    axes: Axes
    plan: SlicePlan | None


def slots(derivative: Program, wanted: Sequence[bool]) -> list[Slot]:
    """The wanted loads; `partial` counts in Scores.partials (0 is the score itself)."""
    found = []
    for place, step in enumerate(derivative.gradients):
        load = derivative.steps[step]
        assert isinstance(load, Load)
        result = derivative.results[2 + place]
        zero = isinstance(result, Lit) and result.value == 0
        if wanted[load.capture] and not zero:
            plan = slice_plan(load, derivative.captures[load.capture])
            found.append(Slot(1 + place, load, classify_load(load).kind, joint_axes(load.index), plan))
    return found


def partial_of(scores: Scores, slot: Slot) -> Array | complex:
    partial = scores.partials[slot.partial]
    return partial.value if isinstance(partial, Lit) else partial


class CaptureGradients:
    """Buffers of all wanted loads; their values travel as a list in the loop's carry."""

    def __init__(self, problem: Problem, derivative: Program | None, wanted: Sequence[bool]):
        self.problem = problem
        self.plan = problem.plan
        self.derivative = derivative
        self.wanted = wanted
        self.slots = slots(derivative, wanted) if derivative is not None else []

    # ------------------------------------------------------------------ buffers

    def start(self) -> list[Array]:
        return [jnp.zeros(self._shape(slot), self.problem.compute) for slot in self.slots]

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        s = self.problem.schedule
        head = self._head(slot)
        if slot.kind == SCALAR:
            return head
        if slot.kind == ROW:
            return (*head, s.padded_q)
        if slot.kind == COLUMN:
            return (*head, s.padded_kv)
        if slot.kind == DIAGONAL:
            return (*head, s.padded_q + s.padded_kv - 1)
        return self.problem.score_captures[slot.load.capture].shape

    def _head(self, slot: Slot) -> tuple[int, int]:
        """Leading dims: batch entries and heads that the load tells apart."""
        return (self.plan.batch if "b" in slot.axes else 1, self.plan.q_heads if "h" in slot.axes else 1)

    def add(self, buffers: list[Array], row: Row, visit: Visit, scores: Scores, cotangent: Array) -> list[Array]:
        """Adds a tile; `cotangent` [b, n, q, k] is that of the modified score, before masking."""
        out = []
        for slot, buffer in zip(self.slots, buffers, strict=True):
            tile = cotangent * partial_of(scores, slot)
            if scores.on is not None:
                # after the product: 0 times the NaN of a masked entry is NaN
                tile = jnp.where(scores.on, tile, jnp.zeros_like(tile))
            out.append(self._add(slot, buffer, row, visit, scores, tile))
        return out

    def _add(self, slot: Slot, buffer: Array, row: Row, visit: Visit, scores: Scores, tile: Array) -> Array:
        drop = tuple(i for i, axis in enumerate(("b", "h")) if axis not in slot.axes)
        tile = tile.sum(drop, keepdims=True) if drop else tile
        at = (row.b0 if "b" in slot.axes else 0, row.h0 if "h" in slot.axes else 0)
        s = self.problem.schedule
        q0 = row.row * s.block_q
        starts = visit.blocks * s.block_kv
        if slot.kind == SCALAR:
            return add_at(buffer, tile.sum((2, 3)), at)
        if slot.kind == ROW:
            return add_at(buffer, tile.sum(3), (*at, q0))
        blocks = range(visit.blocks.shape[0])
        if slot.kind == COLUMN:
            columns = jnp.split(tile.sum(2), len(blocks), -1)
            for j in blocks:
                buffer = add_at(buffer, columns[j], (*at, starts[j]))
            return buffer
        if slot.kind == DIAGONAL:
            windows = sum_diagonals(tile, s.block_q, s.block_kv)
            for j in blocks:
                first = q0 - starts[j] + s.padded_kv - s.block_kv
                buffer = add_at(buffer, windows[:, :, j], (*at, first))
            return buffer
        if slot.plan is not None:
            return self._add_slices(slot.plan, buffer, scores.tile.region, tile)
        index = [jnp.broadcast_to(i, tile.shape) for i in scores.tile.indices[slot.load.out.id]]
        return buffer.at[tuple(index)].add(tile, mode="drop")

    def _add_slices(self, plan: SlicePlan, buffer: Array, region: Region, tile: Array) -> Array:
        names = {w for w, _ in plan.walks}
        drop = tuple(i for i, axis in enumerate(("b", "h")) if axis not in names)
        tile = tile.sum(drop, keepdims=True) if drop else tile
        for j, part in enumerate(jnp.split(tile, region.blocks, -1)):
            starts, sizes = plan.window(region, j)
            ordered = part.reshape([sizes[d] for d in plan.order])
            back = [plan.order.index(d) for d in range(len(sizes))]
            buffer = add_at(buffer, ordered.transpose(back), starts)
        return buffer

    # ------------------------------------------------------------------ from buffers to arrays

    def finish(self, buffers: list[Array]) -> tuple[Array | None, ...]:
        """The gradient of each captured array in its own shape and dtype, None where it was not wanted."""
        if self.derivative is None:
            return tuple(None for _ in self.wanted)
        total: list[Array | None] = [None] * len(self.wanted)
        for capture, want in enumerate(self.wanted):
            if want:
                total[capture] = jnp.zeros(self.derivative.captures[capture].shape, self.problem.compute)
        for slot, buffer in zip(self.slots, buffers, strict=True):
            capture = slot.load.capture
            total[capture] = self._scatter(slot, buffer, typing.cast(Array, total[capture]))
        dtypes = [c.dtype for c in self.derivative.captures]
        return tuple(None if t is None else t.astype(d) for t, d in zip(total, dtypes, strict=True))

    def _scatter(self, slot: Slot, buffer: Array, total: Array) -> Array:
        plan, s = self.plan, self.problem.schedule
        if slot.kind not in (SCALAR, ROW, COLUMN, DIAGONAL):
            return total + buffer[tuple(slice(0, n) for n in total.shape)]
        if slot.kind == SCALAR:
            values = buffer[:, :, None, None]
        elif slot.kind == ROW:
            values = buffer[:, :, : plan.q_len, None]
        elif slot.kind == COLUMN:
            values = buffer[:, :, None, : plan.kv_len]
        else:
            first = s.padded_kv - plan.kv_len
            values = buffer[:, :, None, first : first + plan.q_len + plan.kv_len - 1]
        nb, nh = self._head(slot)
        everywhere = Region(0, nb, 0, nh, 0, plan.q_len, jnp.zeros(1, jnp.int32), plan.kv_len)
        tile = XlaTile(everywhere, self.problem.score_captures)
        assert self.derivative is not None
        index = evaluate(with_results(self.derivative, slot.load.index), tile, [slot.axes] * len(slot.load.index))
        if not index:
            return total + values.sum()
        places = tuple(jnp.broadcast_to(i, values.shape) for i in index)
        return total.at[places].add(values, mode="drop")


def add_at(buffer: Array, part: Array, start: Sequence[Array | int]) -> Array:
    """buffer[start : start + part.shape] += part, in place inside a loop."""
    start = [jnp.asarray(i, jnp.int32) for i in start]
    old = lax.dynamic_slice(buffer, start, part.shape)
    return lax.dynamic_update_slice(buffer, old + part.astype(buffer.dtype), start)


def tangent_of_loads(scores: Scores, derivative: Program, tangents: Sequence[Array | None]) -> Array | None:
    """Sum over the loads of partial derivative times what the load finds in the tangent of its array."""
    total = None
    for slot in slots(derivative, [t is not None for t in tangents]):
        found = scores.tile.read(slot.load, typing.cast(Array, tangents[slot.load.capture]))
        found = scores.tile.spread(found, slot.load.out.axes, frozenset({"q", "kv"})).astype(scores.raw.dtype)
        if scores.tile.guard is not None:
            found = jnp.where(scores.tile.guard, found, jnp.zeros_like(found))
        term = found * partial_of(scores, slot)
        total = term if total is None else total + term
    return total
