"""The warpgroup of the backward kernel on tcgen05 that computes nothing: one warp copies by TMA, one issues products.

With A and B for the own tokens, X and Y for the visited ones (first and second operands of backward_sm100_tiles.py), the products of
half g of a visit are

    S = A X^T      dP = B Y^T      second += P Y      first += dS X

    kernel     A, B              X, Y             first, second
    dQ         queries, dO       keys, values     dQ, -
    dK/dV      keys, values      queries, dO      dK, dV

and the warp that issues them runs, after S and dP of both halves of the first visit, for each visit and each half

    wait for P:    second += P Y,   S of the next visit
    wait for dS:   first += dS X,   dP of the next visit

so that the tensor cores multiply for one half while the warpgroup of the other computes. dQ has no second sum: there S of the next
visit follows first += dS X. P lies over S and dS over dP in tensor memory: the tensor cores execute products in the order in which one
thread issues them, see forward_sm100_issue.py.

In a pair of CTAs (backward_sm100_tiles.py) both copy, each its own tokens and its halves of the visited tiles; the copies of visited tiles
arrive at the barrier of the first CTA. Its warp issues the products of both, and its commits arrive in both.
"""

import dataclasses
import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward_sm80_visits import VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward_sm100_tiles import HALVES, PAIR, TILE, Scratch, Tcgen05Tiles
from flexjax.backends.mosaic_gpu.branch import one_warp, when
from flexjax.backends.mosaic_gpu.columns import COLUMNS
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import COPIED_ROWS
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, overlaid, rows_of, slot_of
from flexjax.backends.mosaic_gpu.sm100_tiles import copied_rows
from flexjax.plan.kernel_plan import KernelPlan

COPYING_WARP, PRODUCT_WARP = 0, 1


def own_start(sequence: VisitSequence, tiles: Tcgen05Tiles) -> Scalar:
    """Number of the first token that this CTA owns: of the tile of the sequence or, in a pair (`tiles.pairs`), whose tile has 256 tokens,
    of the half of it that belongs to this CTA of the cluster.
    """
    if not tiles.pairs:
        return sequence.tile * TILE
    return sequence.tile * (PAIR * TILE) + lax.axis_index(COLUMNS) * TILE


@dataclasses.dataclass(frozen=True)
class IssuingWarps:
    """The warpgroup that copies and issues products.

    plan             of the call, with extra features joined to the head dim
    tiles, scratch   sizes of the kernel; Refs to the CTA's shared and tensor memory
    own, visited     (A, B) and (X, Y) of the table at the top of this file, whole arrays in global memory
    own_head         head of the own tokens in their arrays: query head for dQ, key head for dK/dV
    sequence         which tiles are visited
    total            how many visits there are
    """

    plan: KernelPlan
    tiles: Tcgen05Tiles
    scratch: Scratch[Ref]
    own: tuple[Ref, Ref]
    visited: tuple[Ref, Ref]
    own_head: Scalar
    sequence: VisitSequence
    total: Scalar

    @property
    def pair(self) -> str | None:
        """The axis of the cluster whose CTAs share instructions, for Pallas's `collective_axis`; None without pairs, and in the simulator,
        where each CTA of a pair issues products of its own.
        """
        return None if self.scratch.columns is None else COLUMNS

    def run(self) -> None:
        """What the warpgroup does: lowers its register limit, and makes all copies in one warp and issues all products in another; the
        other two warps do nothing. Without visits nothing is copied or issued. In a pair only the first CTA issues products, in the
        simulator each.
        """
        plgpu.set_max_registers(self.tiles.issuing_registers, action="decrease")

        @plgpu.warp_map  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        def by_warp(warp: Scalar) -> None:
            """Runs the loop of one warp: `_copy` in COPYING_WARP, `_multiply` in PRODUCT_WARP (in a pair that of the first CTA alone),
            nothing in the others.
            """
            with one_warp():
                when((warp == COPYING_WARP) & (self.total > 0))(self._copy)
                multiplies = (warp == PRODUCT_WARP) & (self.total > 0)
                if self.pair is not None:
                    multiplies = multiplies & (lax.axis_index(self.pair) == 0)
                when(multiplies)(self._multiply)

    # ----------------------------------------------------------------- copies

    def _copy(self) -> None:
        """Starts the copies of the own tokens, 16 rows at a time to their lanes (sm100_tiles.py), and of both tiles of every visit, each
        when its slot is free. It marks all slots as free at the start, and waits at the end until all are free again.
        """
        scratch, sequence, layout = self.scratch, self.sequence, self.plan.layout
        start = functools.partial(own_start, sequence, self.tiles)
        for array, target in zip(self.own, (scratch.own_first, scratch.own_second), strict=True):
            for lane, row in copied_rows():
                source = rows_of(array, layout, sequence.b, self.own_head, start() + row, COPIED_ROWS)
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(lane, COPIED_ROWS)], scratch.own_full.at[0])
        for slot in range(self.tiles.slots):
            plgpu.barrier_arrive(scratch.free.at[slot])

        def step(_: None, visit: VisitNow, carry: Scalar) -> Scalar:
            """Waits until the slot of a visit is free and starts the copies of its two tiles, as `VisitSequence.each` calls it; returns
            `carry`, which means nothing here, as it is.
            """
            slot, head = slot_of(visit.number, self.tiles.slots), sequence.visited_head(visit.head)
            plgpu.barrier_wait(scratch.free.at[slot])
            rings = scratch.first, scratch.second
            if scratch.columns is not None:
                for array, rows, columns in zip(self.visited, rings, scratch.columns, strict=True):
                    self._copy_halves(array, rows.at[slot], columns.at[slot], head, visit.start, slot)
                return carry
            for array, ring in zip(self.visited, rings, strict=True):
                source = rows_of(array, layout, sequence.b, head, visit.start, TILE)
                plgpu.copy_gmem_to_smem(source, ring.at[slot], scratch.full.at[slot])
            return carry

        sequence.each(lambda _: None, step, i32(0))
        for n in range(self.tiles.slots):  # no arrival at a barrier may come after the end of the CTA
            plgpu.barrier_wait(scratch.free.at[slot_of(self.total + n, self.tiles.slots)])

    def _copy_halves(self, array: Ref, rows: Ref, columns: Ref, head: Scalar, start: Scalar, slot: Scalar) -> None:
        """In a pair: starts the copies of this CTA's 32 rows of each half of a visited tile, and of its half of the tile's columns. They
        arrive at the barrier `full` of the slot in the first CTA, which counts those of both CTAs.

        array           of the visited tokens, in global memory
        rows, columns   [2, 32, D or E] and [128, D / 2 or E / 2] in shared memory
        head            of the array
        start           first token of the tile
        slot            number of the slot
        """
        half, source = self.tiles.half, functools.partial(rows_of, array, self.plan.layout, self.sequence.b, head)
        copies = [(source(start + n * half, half), rows.at[n], 0) for n in range(HALVES)]
        for tile, target, axis in (*copies, (source(start, TILE), columns, 1)):
            split = plgpu.CopyPartition.PARTITIONED(axis)  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
            plgpu.copy_gmem_to_smem(
                tile, target, self.scratch.full.at[slot], collective_axes=COLUMNS, leader_tracked=split
            )

    # ----------------------------------------------------------------- products

    def _multiply(self) -> None:
        """Issues the products of all visits in the order at the top of this file. It waits for copies and for P and dS, not for
        products: tcgen05.commit arrives at a slot's `free` after the products of each visit, and at `sums_full` after the last.
        """
        scratch, slots = self.scratch, self.tiles.slots
        first_ring, second_ring = (scratch.first, scratch.second) if scratch.columns is None else scratch.columns
        plgpu.barrier_wait((scratch.own_full if scratch.own_ready is None else scratch.own_ready).at[0])
        plgpu.barrier_wait(scratch.full.at[0])
        for half in range(HALVES):
            self._multiply_scores(i32(0), half)
            self._multiply_cotangents(i32(0), half)

        def step(n: Scalar, _: None) -> None:
            """Issues, for both halves, the additions to the sums for visit n, once P and dS are there, and S and dP of visit n + 1, if
            there is one. The first addition of all overwrites what the sums held.
            """
            more = n + 1 < self.total
            slot, following = slot_of(n, slots), slot_of(n + 1, slots)
            when(more)(lambda: plgpu.barrier_wait(scratch.full.at[following]))
            for half in range(HALVES):
                first = n > 0 if half == 0 else True
                if scratch.sum_second is not None and scratch.weights_full is not None:
                    plgpu.barrier_wait(scratch.weights_full.at[half])
                    self._add(scratch.sum_second, overlaid(scratch.scores)[1], second_ring, slot, half, first)
                    when(more)(lambda half=half: self._multiply_scores(following, half))
                plgpu.barrier_wait(scratch.differences_full.at[half])
                self._add(scratch.sum_first, overlaid(scratch.cotangents)[1], first_ring, slot, half, first)
                if scratch.sum_second is None:
                    when(more)(lambda half=half: self._multiply_scores(following, half))
                when(more)(lambda half=half: self._multiply_cotangents(following, half))
            self._commit(scratch.free.at[slot])

        lax.fori_loop(i32(0), self.total, step, None)
        self._commit(scratch.sums_full.at[0])

    def _commit(self, barrier: Ref) -> None:
        """Gives `barrier` an arrival, in a pair in each of the two CTAs, when all products that were issued before have completed; it does
        not wait for them.
        """
        plgpu.tcgen05_commit_arrive(barrier, collective_axis=self.pair)

    def _half(self, ring: Ref, slot: Scalar, half: int) -> Ref:
        """A Ref to half `half`, 0 or 1, of the visited tile in slot `slot` of `ring`, [64, D or E]: the right operand of `_add`. In a pair
        the ring is one of `Scratch.columns`, and the Ref has this CTA's columns, [64, D / 2 or E / 2].
        """
        return ring.at[slot, pl.ds(half * self.tiles.half, self.tiles.half)]

    def _transposed(self, ring: Ref, slot: Scalar, half: int) -> Ref:
        """A Ref to half `half` of the visited tile in slot `slot` of `ring` (`Scratch.first` or `.second`), transposed, [D or E, 64]: the
        right operand of S and dP. In a pair it has this CTA's 32 of the 64 tokens, [D or E, 32].
        """
        tile = self._half(ring, slot, half) if self.pair is None else ring.at[slot, half]
        return tile.transpose((1, 0))

    def _multiply_scores(self, slot: Scalar, half: int) -> None:
        """Issues S = A X^T of one half of the visited tile in a slot, overwriting S (and P) of the half in tensor memory; the half's
        barrier `scores_full` gets an arrival when the product has completed.
        """
        scratch = self.scratch
        self._set(overlaid(scratch.scores)[0], scratch.own_first, scratch.first, slot, half, scratch.scores_full)

    def _multiply_cotangents(self, slot: Scalar, half: int) -> None:
        """Issues dP = B Y^T of one half of the visited tile in a slot, overwriting dP (and dS) of the half in tensor memory; the half's
        barrier `cotangents_full` gets an arrival when the product has completed.
        """
        scratch = self.scratch
        self._set(
            overlaid(scratch.cotangents)[0], scratch.own_second, scratch.second, slot, half, scratch.cotangents_full
        )

    def _set(self, target: Ref, own: Ref, ring: Ref, slot: Scalar, half: int, full: Ref) -> None:
        """Issues target = own @ visited^T for a half; it does not wait.

        target       S or dP of both halves, [2, 128, 64] in tensor memory
        own          [128, D or E] in shared memory
        ring, slot   where the visited tile is in shared memory
        half         0 or 1
        full         barriers of the halves; that of this half gets an arrival when the product has completed
        """
        visited = self._transposed(ring, slot, half)
        plgpu.tcgen05_mma(target.at[half], own, visited, accumulate=False, collective_axis=self.pair)
        self._commit(full.at[half])

    def _add(self, total: Ref, left: Ref, ring: Ref, slot: Scalar, half: int, accumulate: Scalar | bool) -> None:
        """Issues total += left @ visited for a half; it does not wait.

        total        `sum_first` or `sum_second`, [1, 128, D or E] in tensor memory
        left         dS or P of both halves in tensor memory
        ring, slot   where the visited tile is in shared memory, in a pair this CTA's columns of it
        half         0 or 1
        accumulate   False: total = left @ visited, for the first product into the sum
        """
        weights = left.at[half, :, pl.ds(0, self.tiles.half)]
        visited = self._half(ring, slot, half)
        plgpu.tcgen05_mma(total.at[0], weights, visited, accumulate=accumulate, collective_axis=self.pair)
