"""Gradients and tangents of captured arrays; gradients are summed in a fixed order.

Each load of a float array gets a buffer by its kind (ir.program.LoadClass): a number for each (b, h), for each query,
key or difference q - kv, or, for a load of kind tile, the shape of the array. Each visit (block_loop.py) adds to the
buffers. At the end a buffer is scatter-added into the array at the positions that the load's index names. The buffers
never have queries times keys elements unless the captured array has that size itself.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.block_loop import BlockVisit, TileRow
from flexjax.backends.xla.diagonals import sum_diagonals
from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile import XlaTile
from flexjax.backends.xla.tile_slices import SlicePlan, slice_plan
from flexjax.backends.xla.tiled_operands import TiledOperands
from flexjax.backends.xla.visit_scores import LoopedPartial, VisitScores, times_partial, zero_where_off
from flexjax.ir.evaluate import Values
from flexjax.ir.origin import Placed, key_positions, query_positions
from flexjax.ir.program import (
    COLUMN,
    DIAGONAL,
    KV,
    ROW,
    SCALAR,
    TILE,
    Atom,
    Axes,
    B,
    Lit,
    Load,
    Program,
    Q,
    Val,
    axes_of,
    classify_load,
    in_loop_order,
    loop_indices,
    loop_size,
    positions_of,
)
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.varying import varying_as

Array = jax.Array
Carry = typing.TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class LoadSlot:
    """One load whose captured array needs a gradient or has a tangent."""

    # places in VisitScores.partials of the derivatives by the load, of the score and of the program's other groups
    partials: tuple[int, ...]
    load: Load
    kind: str  # SCALAR, ROW, COLUMN, DIAGONAL or TILE, which decides the shape of its buffer
    axes: Axes
    slices: SlicePlan | None  # None: it gathers, or is not of kind TILE
    loops: tuple[Val, ...] = ()  # the loop indices on which its index depends: one element for each of their values

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(loop_size(*loop.axes) for loop in self.loops)

    def bound(self, values: Values, at: Sequence[Array], wanted: Sequence[Atom]) -> Values:
        """The values of a program for the values `at` of the loop indices."""
        for loop, k in zip(self.loops, at, strict=True):
            values = values.bind(loop, jnp.reshape(k, (1, 1, 1, 1)), wanted)
        return values


def slots(derivative: Program, wanted: Sequence[bool]) -> list[LoadSlot]:
    """A LoadSlot for each load of a wanted captured array by which a derivative is not the literal 0."""
    found, indices, width = [], loop_indices(derivative), 2 + len(derivative.gradients)
    for place, step in enumerate(derivative.gradients):
        load = derivative.steps[step]
        assert isinstance(load, Load)
        partials = tuple(range(1 + place, len(derivative.results) - 1, width))
        results = [derivative.results[1 + n] for n in partials]
        zero = all(isinstance(r, Lit) and r.value == 0 for r in results)
        if wanted[load.capture] and not zero:
            axes = frozenset().union(*map(axes_of, load.index))
            loops = tuple(indices[axis] for axis in in_loop_order(axes))
            plan = slice_plan(load)
            found.append(LoadSlot(partials, load, classify_load(load).kind, positions_of(axes), plan, loops))
    return found


class CaptureGradients:
    """How the gradients of captured arrays are summed: the slots of all wanted loads, and their buffers.

    The buffers, an array for each slot in this order, are a list in the carry of the loops: `start` makes them, `add`
    adds one visit, `finish` turns them into gradients.
    """

    def __init__(self, tiled: TiledOperands, derivative: Program | None, wanted: Sequence[bool]):
        """`derivative`: None where score_mod is the identity; `wanted`: of each captured array, whether."""
        self.tiled = tiled
        self.plan = tiled.plan
        self.derivative = derivative
        self.wanted = wanted
        self.slots = slots(derivative, wanted) if derivative is not None else []
        self.one_run = self.plan.origin is None or self.plan.origin.single

    # ------------------------------------------------------------------ buffers

    def start(self) -> list[Array]:
        return [jnp.zeros(self._shape(slot), self.tiled.compute) for slot in self.slots]

    def _like_array(self, slot: LoadSlot) -> bool:
        """Whether the buffer of a load has the shape of its captured array."""
        return slot.kind == TILE or (slot.kind == DIAGONAL and not self.one_run)

    def _shape(self, slot: LoadSlot) -> tuple[int, ...]:
        """[*counts, b, h], then by kind nothing, queries, keys or differences q - kv, padded to whole blocks."""
        if slot.loops and not self._like_array(slot):
            return (*slot.counts, *self._shape(dataclasses.replace(slot, loops=())))
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
        """(batch entries, query heads) of a load's buffer: 1 where the element's position does not depend on them."""
        batch = self.plan.batch if "b" in self._axes(slot) else 1
        return (batch, self.plan.q_heads if "h" in slot.axes else 1)

    def _axes(self, slot: LoadSlot) -> Axes:
        """The axes on which the position of the load's element depends."""
        origin = self.plan.origin
        # positions of queries or keys may differ between batch entries
        return slot.axes | {"b"} if origin is not None and origin.differs_by_entry(slot.axes) else slot.axes

    def add(
        self, buffers: list[Array], row: TileRow, visit: BlockVisit, scores: VisitScores, cotangents: Sequence[Array]
    ) -> list[Array]:
        """The buffers with the gradients from one visit added, of `cotangents` [batch, heads, block_q, keys] of the
        value of each group of the derivative program.
        """
        out = []
        for slot, buffer in zip(self.slots, buffers, strict=True):

            def add_element(
                buffer: Array, partials: Sequence[Array | Lit], at: Sequence[Array], slot: LoadSlot = slot
            ) -> Array:
                terms = map(times_partial, cotangents, partials)
                tile = zero_where_off(scores, functools.reduce(jnp.add, terms))
                if not at or self._like_array(slot):
                    return self._add(slot, buffer, row, visit, scores, tile)
                part = self._add(slot, buffer[tuple(at)], row, visit, scores, tile)
                return buffer.at[tuple(at)].set(part)

            out.append(each_element(slot, scores, add_element, buffer))
        return out

    def _add(
        self, slot: LoadSlot, buffer: Array, row: TileRow, visit: BlockVisit, scores: VisitScores, tile: Array
    ) -> Array:
        """The `buffer` of one load with the cotangents of a visit added, summed as the load's kind says.

        tile   [batch, heads, block_q, keys]: the cotangent of what the load reads at each entry, 0 at hidden entries
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
        # positions past the ends of the array are dropped
        index = [jnp.broadcast_to(i, tile.shape) for i in scores.tile.indices[slot.load.out.id]]
        return buffer.at[tuple(index)].add(tile, mode="drop")

    def _add_slices(self, plan: SlicePlan, buffer: Array, region: Region, tile: Array) -> Array:
        """The padded buffer with a visit's cotangents added by one dynamic slice a key block."""
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
        """The gradient of each captured array, in its shape and dtype; None where it was not wanted.

        All are None if score_mod is the identity. An array that no slot loads has gradient 0.
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
        """`total`, in the shape of the captured array, with the `buffer` of one of its loads added."""
        if self._like_array(slot):
            return total + buffer[tuple(slice(0, n) for n in total.shape)]
        nb, nh = self._head(slot)
        tile = XlaTile(Everywhere.of(self.plan, self.tiled.placed, nb, nh), self.tiled.score_captures)
        assert self.derivative is not None
        # the index of the load, at every position of the buffer
        index = Values.of(with_results(self.derivative, slot.load.index), tile)

        def add_part(at: Sequence[Array], total: Array) -> Array:
            found = slot.bound(index, at, slot.load.index)
            values = self._values(slot, buffer[tuple(at)])
            places = [found.read(a, slot.axes) for a in slot.load.index]
            if not places:
                return total + values.sum()
            return total.at[tuple(jnp.broadcast_to(i, values.shape) for i in places)].add(values, mode="drop")

        return nested(slot.counts, add_part, varying_as(buffer, total) if slot.loops else total)

    def _values(self, slot: LoadSlot, buffer: Array) -> Array:
        """The part [b, h, ..] of a load's buffer for one element of each vector, of rank 4 and without padding."""
        plan, s = self.plan, self.tiled.sizes
        if slot.kind == SCALAR:
            return buffer[:, :, None, None]
        if slot.kind == ROW:
            return buffer[:, :, : plan.q_len, None]
        if slot.kind == COLUMN:
            return buffer[:, :, None, : plan.kv_len]
        first = s.padded_kv - plan.kv_len
        return buffer[:, :, None, first : first + plan.q_len + plan.kv_len - 1]


def nested(counts: Sequence[int], body: Callable[[Sequence[Array], Carry], Carry], carry: Carry) -> Carry:
    """The carry after `body(index, carry)` for every index of an array of shape `counts`, in row-major order."""
    if not counts:
        return body((), carry)
    rest = lambda k, carry: nested(counts[1:], lambda index, carry: body((k, *index), carry), carry)
    return lax.fori_loop(0, counts[0], rest, carry)


def each_element(
    slot: LoadSlot,
    scores: VisitScores,
    body: Callable[[Carry, Sequence[Array | Lit], Sequence[Array]], Carry],
    carry: Carry,
) -> Carry:
    """The carry after `body(carry, derivatives by the element, values of the loop indices)` for each element of a load.

    A load reads one element at a position, or one for each value of its loop indices. `scores.tile` has its index.
    """
    partials, values = [scores.partials[n] for n in slot.partials], scores.values
    assert values is not None
    wanted = [slot.load.out, *(p.result for p in partials if isinstance(p, LoopedPartial))]

    def nest(values: Values, loops: Sequence[Val], at: tuple[Array, ...], carry: Carry) -> Carry:
        if not loops:
            return body(carry, [p.read(values) if isinstance(p, LoopedPartial) else p for p in partials], at)

        def one_value(k: Array, carry: Carry) -> Carry:
            found = values.bind(loops[0], jnp.reshape(k, (1, 1, 1, 1)), wanted)
            return nest(found, loops[1:], (*at, k), carry)

        return lax.fori_loop(0, loop_size(*loops[0].axes), one_value, carry)

    return nest(values, slot.loops, (), carry)


@dataclasses.dataclass(frozen=True)
class Everywhere(Region):
    """The whole attention matrix of a call, whose positions may be several runs of queries and keys."""

    placed: Placed  # where queries and keys lie in the whole problem; the fields of Region count rows of the call

    @classmethod
    def of(cls, plan: KernelPlan, placed: Placed, nb: int, nh: int) -> "Everywhere":
        return cls(0, nb, 0, nh, 0, plan.q_len, jnp.zeros(1, jnp.int32), plan.kv_len, placed)

    def index(self, axis: int) -> Array:
        """The positions along `axis` (B, H, Q or KV), int32 of 4 dims."""
        rows = super().index(axis)
        of = {Q: query_positions, KV: key_positions}.get(axis)
        return rows if of is None else of(*self.placed, super().index(B), rows)

    def differences(self) -> Array:
        """q - kv along the diagonals of one run of queries and one of keys, [1 or batch, 1, 1, bq + bk - 1]."""
        b = super().index(B)
        return query_positions(*self.placed, b, 0) - key_positions(*self.placed, b, 0) + super().differences()


def add_at(buffer: Array, part: Array, start: Sequence[Array | int]) -> Array:
    """`buffer` with `part` added at `start`, in place inside a loop; the slice has to lie in the buffer."""
    start = [jnp.asarray(i, jnp.int32) for i in start]
    # dynamic_slice would move a slice that reaches past the end
    old = lax.dynamic_slice(buffer, start, part.shape)
    return lax.dynamic_update_slice(buffer, old + part.astype(buffer.dtype), start)


def tangent_of_loads(
    scores: VisitScores, derivative: Program, tangents: Sequence[Array | None], group: int = 0
) -> Array | None:
    """The tangent of the score, or of the value of another group of the program, over the tile of one visit: the part
    that comes from the tangents of captured arrays.

    It is the sum over loads of the derivative by the load times what the load reads from the tangent of its array.
    `tangents` are padded as the arrays are, None for none. The result broadcasts to the tile; None if no term is left.
    """
    total = None
    for slot in slots(derivative, [t is not None for t in tangents]):

        def add(
            total: Array | None, partials: Sequence[Array | Lit], at: Sequence[Array], slot: LoadSlot = slot
        ) -> Array:
            found = scores.tile.read(slot.load, typing.cast(Array, tangents[slot.load.capture]))
            axes = positions_of(slot.load.out.axes)
            found = scores.tile.spread(found, axes, frozenset({"q", "kv"})).astype(scores.raw.dtype)
            if scores.tile.guard is not None:
                found = jnp.where(scores.tile.guard, found, jnp.zeros_like(found))
            term = times_partial(found, partials[group])
            return term if total is None else total + term

        if slot.loops:  # a loop begins with the type that it returns
            total = jnp.zeros_like(scores.raw) + (0 if total is None else total)
        total = each_element(slot, scores, add, total)
    return total
