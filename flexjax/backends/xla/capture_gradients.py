"""Gradients and tangents of captured arrays; gradients are summed in a fixed order.

A load is a step of the score program that reads an element of a captured array for each entry of the attention matrix. Each load
of a float array gets a buffer by its kind (see ir.program.LoadClass): a number for each (b, h), for each query, key or
difference q - kv, or, for a load of kind tile, the shape of the array. Each visit adds to the buffers; at the end a buffer is
scatter-added into the array at the positions that the load's index names. The buffers never have queries times keys elements
unless the captured array has that size itself.

A tile row is one query block of one group of batch entries and query heads; a visit computes its tile at `chunk` key blocks
(block_loop.py). A LoadSlot is a load with what is known of its buffer, and VisitScores are the scores of a visit with their
derivatives. A SlicePlan says how a load reads its array by slices, a Region which part of the attention matrix a tile covers.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.block_loop import BlockVisit, TileRow
from flexjax.backends.xla.diagonals import sum_diagonals
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.backends.xla.tile_slices import SlicePlan, slice_plan
from flexjax.backends.xla.tiled_operands import TiledOperands
from flexjax.backends.xla.visit_scores import VisitScores, times_partial, zero_where_off
from flexjax.ir.evaluate import evaluate
from flexjax.ir.origin import Placed, key_positions, query_positions
from flexjax.ir.program import (
    COLUMN,
    DIAGONAL,
    KV,
    ROW,
    SCALAR,
    Axes,
    B,
    Lit,
    Load,
    Program,
    Q,
    axes_of,
    classify_load,
)
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LoadSlot:
    """One load whose captured array needs a gradient or has a tangent.

    partial   place of the derivative of the score with respect to the load in VisitScores.partials
    load      the step of the derivative program
    kind      SCALAR, ROW, COLUMN, DIAGONAL or TILE, which decides the shape of its buffer
    axes      the axes (b, h, q, kv, delta) on which its index depends
    slices    how to read it as slices; None: it gathers, or is not of kind TILE
    """

    partial: int
    load: Load
    kind: str
    axes: Axes
    slices: SlicePlan | None


def slots(derivative: Program, wanted: Sequence[bool]) -> list[LoadSlot]:
    """A LoadSlot for each load of a wanted captured array, in the order of the program, but none for a load by which the
    derivative of the score is the literal 0.

    derivative   program of score_mod's derivatives
    wanted       for each captured array of score_mod, whether its gradient (or tangent) is wanted
    """
    found = []
    for place, step in enumerate(derivative.gradients):
        load = derivative.steps[step]
        assert isinstance(load, Load)
        result = derivative.results[2 + place]
        zero = isinstance(result, Lit) and result.value == 0
        if wanted[load.capture] and not zero:
            axes = frozenset().union(*map(axes_of, load.index))
            plan = slice_plan(load)
            found.append(LoadSlot(1 + place, load, classify_load(load).kind, axes, plan))
    return found


class CaptureGradients:
    """How the gradients of captured arrays are summed: the slots of all wanted loads, and what is done with their buffers.

    slots   one for each wanted load by which the derivative is not the literal 0

    The buffers themselves, an array for each slot in this order, are a list in the carry of the loops: `start` makes them, `add`
    adds one visit, `finish` turns them into gradients.
    """

    def __init__(self, tiled: TiledOperands, derivative: Program | None, wanted: Sequence[bool]):
        """Finds the slots of the wanted loads.

        tiled        the operands of the backward pass
        derivative   program of score_mod's derivatives; None where score_mod is the identity
        wanted       for each captured array of score_mod, whether its gradient is wanted
        """
        self.tiled = tiled
        self.plan = tiled.plan
        self.derivative = derivative
        self.wanted = wanted
        self.slots = slots(derivative, wanted) if derivative is not None else []
        self.one_run = self.plan.origin is None or self.plan.origin.single

    # ------------------------------------------------------------------ buffers

    def start(self) -> list[Array]:
        """The buffers of all slots, filled with 0, in the dtype of the scores."""
        return [jnp.zeros(self._shape(slot), self.tiled.compute) for slot in self.slots]

    def _shape(self, slot: LoadSlot) -> tuple[int, ...]:
        """The shape of a load's buffer: [b, h], then by kind nothing, the queries, the keys or the differences q - kv,
        each padded to whole blocks; for kind TILE, and for a diagonal under an origin of several runs, the padded shape
        of the captured array, without [b, h].
        """
        s = self.tiled.sizes
        head = self._head(slot)
        if slot.kind == SCALAR:
            return head
        if slot.kind == ROW:
            return (*head, s.padded_q)
        if slot.kind == COLUMN:
            return (*head, s.padded_kv)
        if slot.kind == DIAGONAL and self.one_run:
            return (*head, s.padded_q + s.padded_kv - 1)
        return self.tiled.score_captures[slot.load.capture].shape

    def _head(self, slot: LoadSlot) -> tuple[int, int]:
        """(batch entries, query heads) of a load's buffer: 1 along b or h where the index of the load does not depend on it, but all
        batch entries where their positions differ.
        """
        batch = self.plan.batch if "b" in self._axes(slot) else 1
        return (batch, self.plan.q_heads if "h" in slot.axes else 1)

    def _axes(self, slot: LoadSlot) -> Axes:
        """The axes on which the position of the load's element depends: those of its index, and b if the index depends on queries
        or keys whose positions differ between batch entries.
        """
        origin = self.plan.origin
        return slot.axes | {"b"} if origin is not None and origin.differs_by_entry(slot.axes) else slot.axes

    def add(
        self, buffers: list[Array], row: TileRow, visit: BlockVisit, scores: VisitScores, cotangent: Array
    ) -> list[Array]:
        """The buffers, one for each slot, with the gradients from the tile of one visit added.

        row, visit   the tile row, and its key blocks
        scores       of the visit, by a derivative program
        cotangent    of the score after score_mod, [batch, heads, block_q, keys]; what it has at hidden entries is not counted
        """
        out = []
        for slot, buffer in zip(self.slots, buffers, strict=True):
            tile = zero_where_off(scores, times_partial(cotangent, scores.partials[slot.partial]))
            out.append(self._add(slot, buffer, row, visit, scores, tile))
        return out

    def _add(
        self, slot: LoadSlot, buffer: Array, row: TileRow, visit: BlockVisit, scores: VisitScores, tile: Array
    ) -> Array:
        """The `buffer` of one load with the cotangents of a visit, summed as the load's kind says, added at the visit's place.

        row, visit   the tile row, and its key blocks
        scores       of the visit, which keep the index values of the load
        tile         [batch, heads, block_q, keys]: the cotangent of what the load reads at each entry, 0 at hidden entries

        Cotangents are summed over batch entries and heads on which the index does not depend (`_axes`). A load of kind TILE is
        added by slices where it has `slices`; otherwise it, and a diagonal under an origin of several runs, is scattered at the
        index values, and positions past the ends of the array are dropped.
        """
        axes = self._axes(slot)
        drop = tuple(i for i, axis in enumerate(("b", "h")) if axis not in axes)
        tile = tile.sum(drop, keepdims=True) if drop else tile
        at = (row.b0 if "b" in axes else 0, row.h0 if "h" in slot.axes else 0)
        s = self.tiled.sizes
        q0 = row.q_block * s.block_q
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
            if not self.one_run:  # the array has one element for a difference, whatever runs have it
                index = [jnp.broadcast_to(i, windows.shape) for i in scores.tile.indices[slot.load.out.id]]
                return buffer.at[tuple(index)].add(windows.astype(buffer.dtype), mode="drop")
            for j in blocks:
                first = q0 - starts[j] + s.padded_kv - s.block_kv
                buffer = add_at(buffer, windows[:, :, j], (*at, first))
            return buffer
        if slot.slices is not None:
            return self._add_slices(slot.slices, buffer, scores.tile.region, tile)
        index = [jnp.broadcast_to(i, tile.shape) for i in scores.tile.indices[slot.load.out.id]]
        return buffer.at[tuple(index)].add(tile, mode="drop")

    def _add_slices(self, plan: SlicePlan, buffer: Array, region: Region, tile: Array) -> Array:
        """The buffer of a load that reads slices, with the cotangents of one visit added where the load reads the
        array.

        plan     how the load reads slices
        buffer   in the shape of the captured array, which is padded to whole tiles
        region   the positions of the visit
        tile     [batch, heads, queries, keys], the cotangents of the values that the load reads there

        Cotangents are first summed over the batch and the heads on which the load's index does not depend. Each key
        block is then one dynamic slice of the buffer, so no scatter is needed.
        """
        names = {name for name, _ in plan.index}
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
        """The gradient of each captured array of score_mod, in its shape and dtype; None where it was not wanted, and
        for all if score_mod is the identity. An array that no slot loads has gradient 0.

        buffers   after all visits; those of all loads of an array are added up
        """
        if self.derivative is None:
            return tuple(None for _ in self.wanted)
        total: list[Array | None] = [None] * len(self.wanted)
        for capture, want in enumerate(self.wanted):
            if want:
                total[capture] = jnp.zeros(self.derivative.captures[capture].shape, self.tiled.compute)
        for slot, buffer in zip(self.slots, buffers, strict=True):
            capture = slot.load.capture
            total[capture] = self._scatter(slot, buffer, typing.cast(Array, total[capture]))
        dtypes = [c.dtype for c in self.derivative.captures]
        return tuple(None if t is None else t.astype(d) for t, d in zip(total, dtypes, strict=True))

    def _scatter(self, slot: LoadSlot, buffer: Array, total: Array) -> Array:
        """`total` with the `buffer` of one load of its captured array added.

        total   in the shape of the captured array: the gradients of its other loads that were added before

        A buffer of kind TILE (or of a diagonal under an origin of several runs) has the array's shape, up to padding,
        and is added as it is. Any other is scatter-added: the index of the load is evaluated at every position of the
        buffer and says to which element of the array the position belongs; positions past the ends of the array are
        dropped. All sums of a captured scalar are added up.
        """
        plan, s = self.plan, self.tiled.sizes
        if slot.kind not in (SCALAR, ROW, COLUMN, DIAGONAL) or (slot.kind == DIAGONAL and not self.one_run):
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
        tile = XlaTile(Everywhere.of(plan, self.tiled.placed, nb, nh), self.tiled.score_captures)
        assert self.derivative is not None
        index = evaluate(with_results(self.derivative, slot.load.index), tile, [slot.axes] * len(slot.load.index))
        if not index:
            return total + values.sum()
        places = tuple(jnp.broadcast_to(i, values.shape) for i in index)
        return total.at[places].add(values, mode="drop")


@dataclasses.dataclass(frozen=True)
class Everywhere(Region):
    """The whole attention matrix of a call, whose positions may be several runs of queries and keys.

    placed   where queries and keys lie in the whole problem; the fields of Region count rows of the call
    """

    placed: Placed

    @classmethod
    def of(cls, plan: KernelPlan, placed: Placed, nb: int, nh: int) -> "Everywhere":
        """The attention matrix of the plan, at `nb` batch entries from 0 and `nh` heads from 0; see `placed` above."""
        return cls(0, nb, 0, nh, 0, plan.q_len, jnp.zeros(1, jnp.int32), plan.kv_len, placed)

    def index(self, axis: int) -> Array:
        """The positions along `axis` (B, H, Q or KV of ir/program.py), int32 of 4 dims; those of q and kv for each batch entry
        where they differ.
        """
        rows = super().index(axis)
        of = {Q: query_positions, KV: key_positions}.get(axis)
        return rows if of is None else of(*self.placed, super().index(B), rows)

    def differences(self) -> Array:
        """q - kv along the diagonals of one run of queries and one of keys, [1 or batch, 1, 1, bq + bk - 1]."""
        b = super().index(B)
        return query_positions(*self.placed, b, 0) - key_positions(*self.placed, b, 0) + super().differences()


def add_at(buffer: Array, part: Array, start: Sequence[Array | int]) -> Array:
    """`buffer` with `part` added to its slice that begins at `start` (an index for each dimension) and has the shape of part.

    The part is cast to the dtype of the buffer. The slice has to lie in the buffer: lax.dynamic_slice would move one that
    reaches past the end. Inside a loop XLA does this in place.
    """
    start = [jnp.asarray(i, jnp.int32) for i in start]
    old = lax.dynamic_slice(buffer, start, part.shape)
    return lax.dynamic_update_slice(buffer, old + part.astype(buffer.dtype), start)


def tangent_of_loads(scores: VisitScores, derivative: Program, tangents: Sequence[Array | None]) -> Array | None:
    """The tangent of the score after score_mod that comes from the tangents of captured arrays, over the tile of one visit.

    It is the sum over loads of the derivative of the score by the load times what the load reads from the tangent of its array;
    for a differentiable plan, what it reads at hidden entries counts as 0.

    scores       of the visit, by the derivative program
    derivative   program of score_mod's derivatives
    tangents     of each captured array of score_mod, padded as the array is; None where it has none

    Returns an array that broadcasts to the tile; None if the sum has no term: no load reads an array that has a tangent, or only
    loads by which the derivative is the literal 0 do.
    """
    total = None
    for slot in slots(derivative, [t is not None for t in tangents]):
        found = scores.tile.read(slot.load, typing.cast(Array, tangents[slot.load.capture]))
        found = scores.tile.spread(found, slot.load.out.axes, frozenset({"q", "kv"})).astype(scores.raw.dtype)
        if scores.tile.guard is not None:
            found = jnp.where(scores.tile.guard, found, jnp.zeros_like(found))
        term = times_partial(found, scores.partials[slot.partial])
        total = term if total is None else total + term
    return total
