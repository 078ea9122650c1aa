"""How a CTA of the mma.sync backward kernels goes through the tiles that it visits, and copies the next one ahead.

A CTA owns a tile of one axis and visits tiles of the other for one or several query heads: the dQ kernel for one, the dK/dV kernel for
those that read its key head. Of each head it visits first the tiles without the mask, then those with it (tile_visits.py).

    for each visit:   wait for its tile     start the copies of the next tile     compute

The lists of the block mask are read two visits ahead, because a read of global memory takes as long as a good part of a visit.
"""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward_common import Inputs
from flexjax.backends.mosaic_gpu.backward_sm80_tiles import Scratch, Tiles
from flexjax.backends.mosaic_gpu.backward_tile_math import TileMath
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, not_hoisted, rows_of, slot_of
from flexjax.backends.mosaic_gpu.registers import zero_tile
from flexjax.backends.mosaic_gpu.sm80_copies import Copies
from flexjax.backends.mosaic_gpu.sm80_products import half_shape
from flexjax.backends.mosaic_gpu.tile_visits import TileVisits, VisitCounts, VisitLists
from flexjax.plan.kernel_plan import KernelPlan

Carry = typing.TypeVar("Carry")
State = typing.TypeVar("State")


class Visit(typing.NamedTuple):
    """One visit, int32 scalars.

    head     number of the query head among those of the CTA; `VisitSequence.heads` or more if there is no such visit
    step     number of the visit among those of the head, where unmasked visits come before masked ones
    start    first token of the visited tile
    """

    head: Scalar
    step: Scalar
    start: Scalar


class VisitNow(typing.NamedTuple):
    """A visit as it is made.

    head        number of the query head among those of the CTA
    start       first token of the visited tile
    number      how many visits came before
    masked      whether the mask applies
    following   the next visit; if there is none, its head is `VisitSequence.heads` or more
    """

    head: Scalar
    start: Scalar
    number: Scalar
    masked: bool
    following: Visit


@dataclasses.dataclass(frozen=True)
class VisitSequence:
    """The visits of one CTA, in order: head after head, and in a head first the unmasked visits, then the masked ones.

    In the methods, `head` is the number of a query head among those of the CTA, and a step is the number of a visit among all
    visits of its head (in tile_visits.py it counts within one list).

    visits, lists   which tiles the owned tile visits
    b, first_head   batch entry, and the first query head
    heads           how many query heads are visited, one after the other
    tile            number of the owned tile
    visited         tokens of a visited tile
    may_be_masked   whether the plan has a mask_mod or a block mask; False: no visit is masked
    kv_group        query heads that read one key head, for visits of keys; None for visits of queries
    """

    visits: TileVisits
    lists: VisitLists[Ref]
    b: Scalar
    first_head: Scalar
    heads: int
    tile: Scalar
    visited: int
    may_be_masked: bool
    kv_group: int | None = None

    def visited_head(self, head: Scalar) -> Scalar:
        """The head of the visited arrays that belongs to `head`: a query head, or the key head that it reads (`kv_group`)."""
        h = self.first_head + head
        return h if self.kv_group is None else lax.div(h, jnp.int32(self.kv_group))

    def counts(self, head: Scalar) -> VisitCounts:
        """How many visits the head has without and with the mask, read from the lists in the kernel."""
        return self.visits.counts(self.lists, self.b, self.first_head + head, self.tile)

    def first(self) -> Visit:
        """The first visit; if the CTA has none, a Visit whose head is `heads`."""
        return self._from(jnp.int32(0))

    def after(self, visit: Visit) -> Visit:
        """The visit that follows `visit`, in its head or in the next head with a visit; if none follows, a Visit whose
        head is `heads` or more, also for a `visit` that does not exist itself.
        """
        head = jnp.minimum(visit.head, self.heads - 1)
        counts = self.counts(head)
        step = visit.step + 1
        more = (visit.head < self.heads) & (step < counts.unmasked + counts.masked)
        same = lambda: Visit(head, step, self._start(head, step, counts))
        return cond(more, same, lambda: self._from(visit.head + 1))

    def _from(self, head: Scalar) -> Visit:
        """The first visit of the heads from `head` on, found in their lists; if they have none, a Visit whose head is
        `heads` or more, with step and start 0.
        """
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
        return Visit(head, jnp.int32(0), start)

    def _start(self, head: Scalar, step: Scalar, counts: VisitCounts) -> Scalar:
        """The number of the first token of the tile that the head visits at this step: of the full list, then of the
        partial one; without lists the tiles come in order.

        step     less than the sum of `counts`
        counts   what `counts(head)` gives
        """
        tile = lambda n, masked: self.visits.tile(self.lists, self.b, self.first_head + head, self.tile, n, masked)
        if not self.visits.lists:
            return step * self.visited
        unmasked, masked = lambda: tile(step, False), lambda: tile(step - counts.unmasked, True)
        return cond(step < counts.unmasked, unmasked, masked) * self.visited

    def each(
        self,
        begin: Callable[[Scalar], State],
        step: Callable[[State, VisitNow, Carry], Carry],
        carry: Carry,
    ) -> Carry:
        """Makes all visits in order: calls carry = step(begin(head), visit, carry) for each; returns the last carry,
        the given one if there is no visit.

        begin   number of a head -> what `step` gets for all visits of this head; called once a head, also for a head
                without visits
        step    (what `begin` returned, the visit, carry) -> carry; called for the unmasked visits of a head, then for
                its masked ones
        carry   what the first visit gets, such as accumulators
        """

        def one_head(head: Scalar, carried: tuple) -> tuple:
            """Makes the visits of one head, the unmasked ones first; returns `carried` after them.

            carried   (first token of the next visit, the visit after that, number of the next visit, carry)
            """
            counts, state = self.counts(head), begin(head)

            def one(_: Scalar, carried: tuple, masked: bool) -> tuple:
                """Makes the next visit, and meanwhile reads from the lists which visit comes two visits later; returns
                `carried` after it.

                carried   as for `one_head`
                masked    whether the mask applies to the visit
                """
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
    """The slots of the visited tiles, and the CTA's own tokens, inside a kernel. All warpgroups of the CTA call each
    method, in the same order, because each copies its share.

    plan       of the call
    tiles      sizes of the kernel
    scratch    with the slots and barriers
    arrays     of the visited axis: what the scores need (queries or keys) and what dP needs (dO or values), in global
               memory
    length     tokens of the visited axis
    sequence   which tiles are visited
    """

    plan: KernelPlan
    tiles: Tiles
    scratch: Scratch[Ref]
    arrays: tuple[Ref, Ref]
    length: int
    sequence: VisitSequence

    @property
    def copies(self) -> Copies:
        """The Copies of the kernel, by which this warpgroup copies its share of a tile."""
        tiles = self.tiles
        return Copies(tiles.copying, tiles.groups, self.plan.options.interpret, self.scratch.meeting)

    def begin(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int, visit: Visit) -> None:
        """Starts the copies of the CTA's own tokens and of the first visited tile, if there is one, and waits until the
        own tokens are there; called once, before the visits.

        arrays   of the owned axis, in the order of `VisitedTiles.arrays`
        head     of the owned arrays: query head, or key head where keys are owned
        start    first token of the owned tile
        length   tokens of the owned axis
        visit    the first visit
        """
        arrived = self._copy_own(arrays, head, start, length)
        self._fetch_both(visit, jnp.int32(0))
        self.copies.wait(arrived, 1)

    def _copy_own(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int) -> Ref | None:
        """Starts the copies of the CTA's own tokens, as a group; returns the barrier at which they arrive, None with cp.async. The arguments
        are those of `begin`.
        """
        scratch, copies = self.scratch, self.copies
        arrived = None if scratch.own_full is None else scratch.own_full.at[0]
        for array, target in zip(arrays, (scratch.own_first, scratch.own_second), strict=True):
            source = rows_of(array, self.plan.layout, self.sequence.b, head, start, self.tiles.owned)
            copies.start(source, target, arrived, length - start)
        copies.commit()
        return arrived

    def own(self) -> tuple[Ref, Ref]:
        """Refs to this warpgroup's own tokens in shared memory, [rows, D] and [rows, E]."""
        return self._own_rows(self.copies.group)

    def _own_rows(self, number: Scalar | int) -> tuple[Ref, Ref]:
        """Refs to `rows` of the CTA's own tokens in shared memory, [rows, D] and [rows, E], at addresses that the compiler does not keep in
        registers.

        number   which `rows` tokens
        """
        first = not_hoisted(jnp.asarray(number, jnp.int32), self.plan.options.interpret) * self.tiles.rows
        rows = pl.ds(first, self.tiles.rows)
        return self.scratch.own_first.at[rows], self.scratch.own_second.at[rows]

    def arrive(self, visit: VisitNow) -> tuple[Ref, Ref]:
        """Waits until the tiles of a visit are there, and returns Refs to them, [visited, D] and [visited, E]; with two
        slots it then starts the copies of the next visit's tiles. Called once a visit, before the tiles are read.
        """
        slot = slot_of(visit.number, self.tiles.slots)
        self.copies.wait(None if self.scratch.full is None else self.scratch.full.at[slot], 0)
        if self.tiles.slots > 1:
            self._fetch_both(visit.following, visit.number + 1)
        return self.scratch.first.at[slot], self.scratch.second.at[slot]

    def leave(self, visit: VisitNow) -> None:
        """Called once a visit, after the last read of its tiles: with one slot, waits until all warpgroups are here and
        starts the copies of the next visit's tiles; nothing with two, where `arrive` has started them.
        """
        if self.tiles.slots == 1:
            self.copies.sync()
            self._fetch_both(visit.following, visit.number + 1)

    def _fetch_both(self, visit: Visit, number: Scalar) -> None:
        """Starts the copies of both operands of a visit's tile to their slots, as a group.

        number   of the visit over all visits of the CTA, which gives the slot
        """
        scratch = self.scratch
        slots = scratch.first, scratch.second
        self._fetch(
            visit, number, tuple((array, to, scratch.full) for array, to in zip(self.arrays, slots, strict=True))
        )
        self.copies.commit()

    def _fetch(self, visit: Visit, number: Scalar, operands: tuple[tuple[Ref, Ref, Ref | None], ...]) -> None:
        """Starts the copies of a visit's tile to its slots, and does not wait; nothing if there is no such visit. The caller ends the group
        of copies (`Copies.commit`), also where there is no such visit.

        number     of the visit over all visits of the CTA, which gives the slot
        operands   (array, its slots, their barriers; None with cp.async) of each operand that is copied
        """
        slot, sequence = slot_of(number, self.tiles.slots), self.sequence

        @when(visit.head < sequence.heads)
        def copy() -> None:
            """Starts the copies of this warpgroup's share of each operand."""
            head = sequence.visited_head(visit.head)
            for array, slots, full in operands:
                source = rows_of(array, self.plan.layout, sequence.b, head, visit.start, self.tiles.visited)
                arrived = None if full is None else full.at[slot]
                self.copies.start(source, slots.at[slot], arrived, self.length - visit.start)


@dataclasses.dataclass(frozen=True)
class VisitingCta:
    """One CTA of a backward kernel, as one of its warpgroups sees it.

    math      how a tile's P and dS are computed
    visited   slots of the visited tiles, and which are visited
    inputs    Refs to the operands
    """

    math: TileMath
    visited: VisitedTiles
    inputs: Inputs[Ref]

    @property
    def plan(self) -> KernelPlan:
        """The plan of the call."""
        return self.math.plan

    @property
    def tiles(self) -> Tiles:
        """Sizes of the kernel."""
        return self.visited.tiles

    @property
    def sequence(self) -> VisitSequence:
        """Which tiles are visited."""
        return self.visited.sequence

    @property
    def own_start(self) -> Scalar:
        """Number of the first token that the CTA owns."""
        return self.sequence.tile * self.tiles.owned

    @property
    def group_start(self) -> Scalar:
        """Number of the first token that this warpgroup owns: of its own rows, or of those that warpgroups share."""
        own = 0 if self.tiles.split_columns else self.visited.copies.group
        return self.own_start + own * self.tiles.rows

    def first_scored(self, start: Scalar) -> Scalar:
        """Number of the first visited token whose scores this warpgroup computes, in the tile whose first token is `start`: another one for
        each warpgroup where they split the columns.
        """
        return start + self.visited.copies.group * self.tiles.scored if self.tiles.split_columns else start

    @property
    def half(self) -> Scalar | None:
        """Which half of the columns of a gradient this warpgroup has, the number of the warpgroup; None: all of them."""
        return jnp.asarray(self.visited.copies.group, jnp.int32) if self.tiles.split_columns else None

    def zero_gradient(self, own: Ref) -> jax.Array:
        """The sum of a gradient before the first visit, float32 zeros: [rows, D or E] or, where warpgroups split the columns, of `half_shape`.

        own   the own tokens that it is the gradient of, [owned, D or E]
        """
        shape = self.tiles.rows, own.shape[-1]
        return zero_tile(half_shape(*shape, self.plan.options.interpret) if self.tiles.split_columns else shape)
