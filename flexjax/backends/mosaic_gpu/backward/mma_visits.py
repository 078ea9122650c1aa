"""How a CTA of the mma.sync backward kernels goes through the tiles that it visits, and copies the next one ahead.

A CTA owns a tile of one axis and visits tiles of the other for one query head (dQ) or for those that read its key head
(dK/dV). Of each head it visits first the tiles without the mask, then those with it (tile_visits.py).

    for each visit:   wait for its tile     start the copies of the next tile     compute

The lists of the block mask are read two visits ahead, because a read of global memory takes long.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward.common import BackwardOperands
from flexjax.backends.mosaic_gpu.backward.mma_tiles import MmaBackwardTiles, MmaScratch
from flexjax.backends.mosaic_gpu.backward.tile_math import TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import TileVisits, VisitCounts, VisitLists
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, not_hoisted, rows_of, slot_of
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.mma_products import half_shape
from flexjax.backends.mosaic_gpu.machine.registers import zero_tile
from flexjax.plan.kernel_plan import KernelPlan

Carry = typing.TypeVar("Carry")
State = typing.TypeVar("State")


class MmaVisit(typing.NamedTuple):
    """One visit."""

    head: Scalar  # of the CTA's query heads; `VisitSequence.heads` or more if there is no such visit
    step: Scalar  # of the head's visits, unmasked ones before masked ones
    start: Scalar  # first token of the visited tile


class VisitNow(typing.NamedTuple):
    """A visit as it is made."""

    head: Scalar  # number of the query head among those of the CTA
    start: Scalar  # first token of the visited tile
    number: Scalar  # how many visits came before
    masked: bool  # whether the mask applies
    following: MmaVisit


@dataclasses.dataclass(frozen=True)
class VisitSequence:
    """The visits of one CTA: head after head, and in a head first the unmasked visits, then the masked ones.

    In the methods, `head` is the number of a query head among those of the CTA, and a step is the number of a visit
    among all visits of its head.
    """

    visits: TileVisits
    lists: VisitLists[Ref]
    b: Scalar
    first_head: Scalar  # query head
    heads: int  # how many query heads are visited
    tile: Scalar  # number of the owned tile
    visited: int  # tokens of a visited tile
    may_be_masked: bool  # whether the plan has a mask_mod or a block mask
    kv_group: int | None = None  # query heads that read one key head, for visits of keys

    def visited_head(self, head: Scalar) -> Scalar:
        """The head of the visited arrays: query head, or the key head that it reads (`kv_group`)."""
        h = self.first_head + head
        return h if self.kv_group is None else lax.div(h, jnp.int32(self.kv_group))

    def counts(self, head: Scalar) -> VisitCounts:
        return self.visits.counts(self.lists, self.b, self.first_head + head, self.tile)

    def first(self) -> MmaVisit:
        """The first visit; if the CTA has none, a Visit whose head is `heads`."""
        return self._from(jnp.int32(0))

    def after(self, visit: MmaVisit) -> MmaVisit:
        """The visit that follows `visit`; if none follows, a Visit whose head is `heads` or more."""
        head = jnp.minimum(visit.head, self.heads - 1)
        counts = self.counts(head)
        step = visit.step + 1
        more = (visit.head < self.heads) & (step < counts.unmasked + counts.masked)
        same = lambda: MmaVisit(head, step, self._start(head, step, counts))
        return cond(more, same, lambda: self._from(visit.head + 1))

    def _from(self, head: Scalar) -> MmaVisit:
        """The first visit of the heads from `head` on; if they have none, a Visit whose head is `heads` or more."""
        total = lambda n: sum(self.counts(n))
        if self.heads == 1:
            exists = (head == 0) & (total(jnp.int32(0)) > 0)
            head = jnp.where(exists, 0, 1)
        else:
            is_empty = lambda n: (n < self.heads) & (total(jnp.minimum(n, self.heads - 1)) == 0)
            head = lax.while_loop(is_empty, lambda n: n + 1, head)
        known = jnp.minimum(head, self.heads - 1)
        start = cond(
            head < self.heads, lambda: self._start(known, jnp.int32(0), self.counts(known)), lambda: jnp.int32(0)
        )
        return MmaVisit(head, jnp.int32(0), start)

    def _start(self, head: Scalar, step: Scalar, counts: VisitCounts) -> Scalar:
        """The first token of the tile that the head visits at this step: of the full list, then of the partial one."""
        tile = lambda n, masked: self.visits.tile(self.lists, self.b, self.first_head + head, self.tile, n, masked)
        if not self.visits.lists:
            return step * self.visited
        unmasked, masked = lambda: tile(step, False), lambda: tile(step - counts.unmasked, True)
        return cond(step < counts.unmasked, unmasked, masked) * self.visited

    def each(
        self, begin: Callable[[Scalar], State], step: Callable[[State, VisitNow, Carry], Carry], carry: Carry
    ) -> Carry:
        """Makes all visits in order: calls carry = step(begin(head), visit, carry) for each; returns the last carry.

        `begin` is called once a head, also for a head without visits.
        """

        def one_head(head: Scalar, carried: tuple) -> tuple:
            """Makes the visits of a head; `carried` is (start, the visit after it, number, carry)."""
            counts, state = self.counts(head), begin(head)

            def one(_: Scalar, carried: tuple, masked: bool) -> tuple:
                """Makes the next visit, and meanwhile reads from the lists which visit comes two visits later."""
                start, following, number, carry = carried
                now = VisitNow(head, start, number, masked, following)
                return following.start, self.after(following), number + 1, step(state, now, carry)

            carried = lax.fori_loop(0, counts.unmasked, lambda i, c: one(i, c, False), carried)
            if self.may_be_masked:
                carried = lax.fori_loop(0, counts.masked, lambda i, c: one(i, c, True), carried)
            return carried

        first = self.first()
        carried = (first.start, self.after(first), jnp.int32(0), carry)
        if self.heads == 1:
            return one_head(jnp.int32(0), carried)[-1]
        return lax.fori_loop(0, self.heads, one_head, carried)[-1]


@dataclasses.dataclass(frozen=True)
class VisitedTiles:
    """The slots of the visited tiles, and the CTA's own tokens, inside a kernel.

    All warpgroups of the CTA call each method, in the same order, because each copies its share.
    """

    plan: KernelPlan
    tiles: MmaBackwardTiles
    scratch: MmaScratch[Ref]
    arrays: tuple[Ref, Ref]  # of the visited axis, in global memory: for the scores (Q or K), and for dP (dO or V)
    length: int  # tokens of the visited axis
    sequence: VisitSequence

    @property
    def copies(self) -> Copies:
        tiles = self.tiles
        return Copies(tiles.copying, tiles.groups, self.scratch.meeting)

    def begin(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int, visit: MmaVisit) -> None:
        """Copies the own tokens, of head `head` of the owned axis, and the first visited tile; waits for the own."""
        arrived = self._copy_own(arrays, head, start, length)
        self._fetch_both(visit, jnp.int32(0))
        self.copies.wait(arrived, 1)

    def _copy_own(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int) -> Ref | None:
        """Starts the copies of the CTA's own tokens, as a group; returns their barrier, None with cp.async."""
        scratch, copies = self.scratch, self.copies
        arrived = None if scratch.own_full is None else scratch.own_full.at[0]
        for array, target in zip(arrays, (scratch.own_first, scratch.own_second), strict=True):
            source = rows_of(array, self.plan.layout, self.sequence.b, head, start, self.tiles.owned)
            copies.start(source, target, arrived, length - start)
        copies.commit()
        return arrived

    def own(self) -> tuple[Ref, Ref]:
        return self._own_rows(self.copies.group)

    def _own_rows(self, number: Scalar | int) -> tuple[Ref, Ref]:
        """Refs to the `number`-th `rows` own tokens, [rows, D] and [rows, E]; their addresses take no registers."""
        first = not_hoisted(jnp.asarray(number, jnp.int32)) * self.tiles.rows
        rows = pl.ds(first, self.tiles.rows)
        return self.scratch.own_first.at[rows], self.scratch.own_second.at[rows]

    def arrive(self, visit: VisitNow) -> tuple[Ref, Ref]:
        """Waits for the tiles of a visit, and returns Refs to them, [visited, D] and [visited, E].

        With two slots it then starts the copies of the next visit's tiles. Called once a visit.
        """
        slot = slot_of(visit.number, self.tiles.slots)
        self.copies.wait(None if self.scratch.full is None else self.scratch.full.at[slot], 0)
        if self.tiles.slots > 1:
            self._fetch_both(visit.following, visit.number + 1)
        return self.scratch.first.at[slot], self.scratch.second.at[slot]

    def leave(self, visit: VisitNow) -> None:
        """Called after the last read of a visit's tiles; with one slot it copies the next visit's tiles."""
        if self.tiles.slots == 1:
            self.copies.sync()
            self._fetch_both(visit.following, visit.number + 1)

    def _fetch_both(self, visit: MmaVisit, number: Scalar) -> None:
        """Starts the copies of both operands of a visit's tile to their slots, as a group."""
        scratch = self.scratch
        slots = scratch.first, scratch.second
        self._fetch(
            visit, number, tuple((array, to, scratch.full) for array, to in zip(self.arrays, slots, strict=True))
        )
        self.copies.commit()

    def _fetch(self, visit: MmaVisit, number: Scalar, operands: tuple[tuple[Ref, Ref, Ref | None], ...]) -> None:
        """Starts the copies of a visit's tile to its slots; `operands` are (array, slots, barriers)."""
        # the caller ends the group of copies, also where there is no such visit
        slot, sequence = slot_of(number, self.tiles.slots), self.sequence

        @when(visit.head < sequence.heads)
        def copy() -> None:
            head = sequence.visited_head(visit.head)
            for array, slots, full in operands:
                source = rows_of(array, self.plan.layout, sequence.b, head, visit.start, self.tiles.visited)
                arrived = None if full is None else full.at[slot]
                self.copies.start(source, slots.at[slot], arrived, self.length - visit.start)


@dataclasses.dataclass(frozen=True)
class VisitingCta:
    """One CTA of a backward kernel, as one of its warpgroups sees it."""

    math: TileMath
    visited: VisitedTiles
    inputs: BackwardOperands[Ref]

    @property
    def plan(self) -> KernelPlan:
        return self.math.plan

    @property
    def tiles(self) -> MmaBackwardTiles:
        return self.visited.tiles

    @property
    def sequence(self) -> VisitSequence:
        return self.visited.sequence

    @property
    def own_start(self) -> Scalar:
        return self.sequence.tile * self.tiles.owned

    @property
    def group_start(self) -> Scalar:
        """The first token that this warpgroup owns: of its own rows, or of those that warpgroups share."""
        own = 0 if self.tiles.split_columns else self.visited.copies.group
        return self.own_start + own * self.tiles.rows

    def first_scored(self, start: Scalar) -> Scalar:
        """The first visited token whose scores this warpgroup computes, in the tile from `start` on."""
        return start + self.visited.copies.group * self.tiles.scored if self.tiles.split_columns else start

    @property
    def half(self) -> Scalar | None:
        """Which half of the columns of a gradient this warpgroup has; None: all of them."""
        return jnp.asarray(self.visited.copies.group, jnp.int32) if self.tiles.split_columns else None

    def zero_gradient(self, own: Ref) -> jax.Array:
        """Float32 zeros of the gradient of `own`: [rows, D or E], or `half_shape` of split columns."""
        shape = self.tiles.rows, own.shape[-1]
        return zero_tile(half_shape(*shape) if self.tiles.split_columns else shape)
