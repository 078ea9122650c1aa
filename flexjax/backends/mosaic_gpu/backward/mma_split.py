"""A visit of the mma.sync backward kernels whose two warpgroups split the columns, for head dims above 128.

There the gradient of 64 rows takes 128 registers of a thread, so a warpgroup with all columns has no more rows: each of
its warps reads the whole right operand of every product from shared memory for 16 rows, which takes longer than the
products. Two warpgroups that split the columns have twice the rows, or the accumulators of dK and dV both.

    scores, dP     each warpgroup: all rows, its half of the visited tokens
    P, dS          each warpgroup writes its half to shared memory, in 16 bits
    gradients      each warpgroup: all rows, all visited tokens, its half of the head dim (`mma_products.half_piece`)

A visited tile has one slot for each of its two operands. The gradient reads one of them; the other one is free before.
Each is copied behind the products that read the other ("|" is the barrier of the CTA, "first" the operand of the
scores, "second" that of dP):

    dQ, dK           wait second: dP    wait first: S     write dS     | copy second     dQ or dK    | copy first
    dV               wait first: S      write P           wait second  | copy first      dV          | copy second
    dK and dV        wait second: dP    wait first: S     write P, dS  | dV    | copy second    dK    | copy first
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward.mma_visits import MmaVisit, VisitedTiles, VisitNow
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.machine.mma_products import add_half, product_transposed


@dataclasses.dataclass(frozen=True)
class SplitTiles(VisitedTiles):
    """The slots of the visited tiles; all warpgroups of the CTA call each method, in the same order."""

    scores_first: bool = False  # whether the scores are computed before dP, or alone

    def begin(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int, visit: MmaVisit) -> None:
        """As `VisitedTiles.begin`; the operand that is read first arrives first."""
        arrived = self._copy_own(arrays, head, start, length)
        for first in (self.scores_first, not self.scores_first):
            self._fetch_one(first, visit)
        self.copies.wait(arrived, 2)

    def own(self) -> tuple[Ref, Ref]:
        return self._own_rows(0)

    @property
    def half(self) -> Scalar:
        return jnp.asarray(self.copies.group, jnp.int32)

    def product(self, own: Ref, first: bool) -> jax.Array:
        """Waits for an operand; own operand^T, [rows, scored] float32: scores without scale (`first`) or dP."""
        self.wait(first, int(first == self.scores_first))
        slots = self.scratch.first if first else self.scratch.second
        columns = pl.ds(self.half * self.tiles.scored, self.tiles.scored)
        return product_transposed(own, slots.at[0, columns])

    def wait(self, first: bool, pending: int) -> None:
        """Waits for an operand; `pending` is 1 if the copies of the other one were started later."""
        full = self.scratch.full if first else self.scratch.second_full
        self.copies.arrive(None if full is None else full.at[0], pending)

    def write_weights(self, number: int, tile: jax.Array) -> None:
        """Writes this warpgroup's half of P or dS, [rows, scored]; others see it after the next `release`."""
        weights = self.scratch.weights
        assert weights is not None
        weights.at[number, self.half][...] = tile.astype(weights.dtype)

    def release(self, first: bool | None, visit: VisitNow) -> None:
        """Meets all threads, then copies the next visit's operand that was read for the last time."""
        self.copies.sync()
        if first is not None:
            self._fetch_one(first, visit.following)

    def add_gradient(self, total: jax.Array, number: int, first: bool) -> jax.Array:
        """total + weights operand: this warpgroup's half of gradient `number`, float32 of `half_shape`."""
        operand = (self.scratch.first if first else self.scratch.second).at[0]
        weights, scored = self.scratch.weights, self.tiles.scored
        assert weights is not None
        for part in range(self.tiles.groups):
            rows = operand.at[pl.ds(part * scored, scored)]
            total = add_half(total, weights.at[number, part], rows, self.half)
        return total

    def _fetch_one(self, first: bool, visit: MmaVisit) -> None:
        """Starts the copies of one operand of a visit's tile, as a group, which is empty if there is no such visit."""
        scratch = self.scratch
        full, target = (scratch.full, scratch.first) if first else (scratch.second_full, scratch.second)
        self._fetch(visit, jnp.int32(0), ((self.arrays[int(not first)], target, full),))
        self.copies.commit()
