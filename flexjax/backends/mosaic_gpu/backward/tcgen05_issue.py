"""The warpgroup of the backward kernel on tcgen05 that computes nothing: one warp copies by TMA, one issues products.

With A and B for the own tokens, X and Y for the visited ones (first and second operands of tcgen05_tiles.py), the
products of half g of a visit are

    S = A X^T      dP = B Y^T      second += P Y      first += dS X

    kernel     A, B              X, Y             first, second
    dQ         queries, dO       keys, values     dQ, -
    dK/dV      keys, values      queries, dO      dK, dV

and the warp that issues them runs, after S and dP of both halves of the first visit, for each visit and each half

    wait for P:    second += P Y,   S of the next visit
    wait for dS:   first += dS X,   dP of the next visit

so that the tensor cores multiply for one half while the warpgroup of the other computes. dQ has no second sum: there S
of the next visit follows first += dS X. P lies over S and dS over dP in tensor memory: the tensor cores execute
products in the order in which one thread issues them, see forward/tcgen05_issue.py.

In a pair of CTAs (tcgen05_tiles.py) both copy, each its own tokens and its halves of the visited tiles; the copies of
visited tiles arrive at the barrier of the first CTA. Its warp issues all products; its commits arrive in both.
"""

import dataclasses
import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward.mma_visits import VisitNow, VisitSequence
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import HALVES, PAIR, TILE, Tcgen05Scratch, Tcgen05Tiles
from flexjax.backends.mosaic_gpu.machine.branch import one_warp, when
from flexjax.backends.mosaic_gpu.machine.columns import COLUMNS
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, overlaid, rows_of, slot_of
from flexjax.backends.mosaic_gpu.machine.shared_memory import COPIED_ROWS
from flexjax.backends.mosaic_gpu.machine.tcgen05_tiles import copied_rows
from flexjax.plan.kernel_plan import KernelPlan

COPYING_WARP, PRODUCT_WARP = 0, 1


def own_start(sequence: VisitSequence, tiles: Tcgen05Tiles) -> Scalar:
    """The first token that this CTA owns; the tile of a pair has 256 tokens."""
    if not tiles.pairs:
        return sequence.tile * TILE
    return sequence.tile * (PAIR * TILE) + lax.axis_index(COLUMNS) * TILE


@dataclasses.dataclass(frozen=True)
class IssuingWarps:
    """The warpgroup that copies and issues products."""

    plan: KernelPlan
    tiles: Tcgen05Tiles
    scratch: Tcgen05Scratch[Ref]
    own: tuple[Ref, Ref]  # (A, B) of the table at the top of this file, in global memory
    visited: tuple[Ref, Ref]  # (X, Y)
    own_head: Scalar  # query head for dQ, key head for dK/dV
    sequence: VisitSequence
    total: Scalar  # how many visits there are

    @property
    def pair(self) -> str | None:
        """The axis of the cluster whose CTAs share instructions; None without pairs."""
        # in the simulator each CTA of a pair issues products of its own
        return None if self.scratch.columns is None else COLUMNS

    def run(self) -> None:
        """What the warpgroup does: makes all copies in one warp and issues all products in another."""
        plgpu.set_max_registers(self.tiles.issuing_registers, action="decrease")

        @plgpu.warp_map  # pyright: ignore[reportAttributeAccessIssue]  # exists from jax 0.11 on
        def by_warp(warp: Scalar) -> None:
            with one_warp():
                when((warp == COPYING_WARP) & (self.total > 0))(self._copy)
                multiplies = (warp == PRODUCT_WARP) & (self.total > 0)
                if self.pair is not None:
                    multiplies = multiplies & (lax.axis_index(self.pair) == 0)
                when(multiplies)(self._multiply)

    # ----------------------------------------------------------------- copies

    def _copy(self) -> None:
        """Starts the copies of the own tokens, and of both tiles of every visit, each when its slot is free."""
        scratch, sequence, layout = self.scratch, self.sequence, self.plan.layout
        start = functools.partial(own_start, sequence, self.tiles)
        for array, target in zip(self.own, (scratch.own_first, scratch.own_second), strict=True):
            for lane, row in copied_rows():
                source = rows_of(array, layout, sequence.b, self.own_head, start() + row, COPIED_ROWS)
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(lane, COPIED_ROWS)], scratch.own_full.at[0])
        for slot in range(self.tiles.slots):
            plgpu.barrier_arrive(scratch.free.at[slot])

        def step(_: None, visit: VisitNow, carry: Scalar) -> Scalar:
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
        """In a pair: copies own rows, [2, 32, D or E], and own columns, [128, D / 2 or E / 2], of a visited tile."""
        half, source = self.tiles.half, functools.partial(rows_of, array, self.plan.layout, self.sequence.b, head)
        copies = [(source(start + n * half, half), rows.at[n], 0) for n in range(HALVES)]
        for tile, target, axis in (*copies, (source(start, TILE), columns, 1)):
            # exists from jax 0.11 on
            split = plgpu.CopyPartition.PARTITIONED(axis)  # pyright: ignore[reportAttributeAccessIssue]
            # at the barrier of the first CTA, which counts the copies of both
            plgpu.copy_gmem_to_smem(
                tile, target, self.scratch.full.at[slot], collective_axes=COLUMNS, leader_tracked=split
            )

    # ----------------------------------------------------------------- products

    def _multiply(self) -> None:
        """Issues the products of all visits in the order above; waits for copies, P and dS, not for products."""
        scratch, slots = self.scratch, self.tiles.slots
        first_ring, second_ring = (scratch.first, scratch.second) if scratch.columns is None else scratch.columns
        plgpu.barrier_wait((scratch.own_full if scratch.own_ready is None else scratch.own_ready).at[0])
        plgpu.barrier_wait(scratch.full.at[0])
        for half in range(HALVES):
            self._multiply_scores(i32(0), half)
            self._multiply_cotangents(i32(0), half)

        def step(n: Scalar, _: None) -> None:
            more = n + 1 < self.total
            slot, following = slot_of(n, slots), slot_of(n + 1, slots)
            when(more)(lambda: plgpu.barrier_wait(scratch.full.at[following]))
            for half in range(HALVES):
                # the first addition of all overwrites what the sums held
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
        """Gives `barrier`, in each CTA of a pair, an arrival when all earlier products have completed."""
        plgpu.tcgen05_commit_arrive(barrier, collective_axis=self.pair)

    def _half(self, ring: Ref, slot: Scalar, half: int) -> Ref:
        """Half of the visited tile in a slot, [64, D or E], the right operand of `_add`; in a pair own columns."""
        return ring.at[slot, pl.ds(half * self.tiles.half, self.tiles.half)]

    def _transposed(self, ring: Ref, slot: Scalar, half: int) -> Ref:
        """Half of the visited tile in a slot, transposed, [D or E, 64]; in a pair own tokens, [D or E, 32]."""
        tile = self._half(ring, slot, half) if self.pair is None else ring.at[slot, half]
        return tile.transpose((1, 0))

    def _multiply_scores(self, slot: Scalar, half: int) -> None:
        """Issues S = A X^T of one half of the visited tile in a slot, overwriting S and P of the half."""
        scratch = self.scratch
        self._set(overlaid(scratch.scores)[0], scratch.own_first, scratch.first, slot, half, scratch.scores_full)

    def _multiply_cotangents(self, slot: Scalar, half: int) -> None:
        """Issues dP = B Y^T of one half of the visited tile in a slot, overwriting dP and dS of the half."""
        scratch = self.scratch
        self._set(
            overlaid(scratch.cotangents)[0], scratch.own_second, scratch.second, slot, half, scratch.cotangents_full
        )

    def _set(self, target: Ref, own: Ref, ring: Ref, slot: Scalar, half: int, full: Ref) -> None:
        """Issues target[half] = own @ visited^T, [128, 64]; `full` of this half gets an arrival at its end."""
        visited = self._transposed(ring, slot, half)
        plgpu.tcgen05_mma(target.at[half], own, visited, accumulate=False, collective_axis=self.pair)
        self._commit(full.at[half])

    def _add(self, total: Ref, left: Ref, ring: Ref, slot: Scalar, half: int, accumulate: Scalar | bool) -> None:
        """Issues total += left @ visited for a half, `total` [1, 128, D or E], or overwrites it."""
        weights = left.at[half, :, pl.ds(0, self.tiles.half)]
        visited = self._half(ring, slot, half)
        plgpu.tcgen05_mma(total.at[0], weights, visited, accumulate=accumulate, collective_axis=self.pair)
