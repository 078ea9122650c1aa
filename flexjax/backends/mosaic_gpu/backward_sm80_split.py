"""A visit of the mma.sync backward kernels whose two warpgroups have the same rows and split the columns, for head dims above 128.

There the gradient of 64 rows takes 128 registers of a thread, so a warpgroup with all columns has no more rows: each of its warps reads
the whole right operand of every product from shared memory for 16 rows, which takes longer than the products. Two warpgroups that split
the columns have twice the rows, or the accumulators of dK and dV both.

    scores, dP     each warpgroup: all rows, its half of the visited tokens
    P, dS          each warpgroup writes its half to shared memory, in 16 bits
    gradients      each warpgroup: all rows, all visited tokens, its half of the head dim (`sm80_products.half_piece`)

A visited tile has one slot for each of its two operands. One of them is read by the gradient, the other one is free before, so each is
copied behind the products that read the other:

    dQ, dK           wait second: dP    wait first: S     write dS     | copy second     dQ or dK    | copy first
    dV               wait first: S      write P           wait second  | copy first      dV          | copy second
    dK and dV        wait second: dP    wait first: S     write P, dS  | dV              | copy second    dK    | copy first

"|" is the barrier of the CTA. "First" is the operand of the scores, "second" that of dP.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu.backward_sm80_visits import Visit, VisitedTiles, VisitNow
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar
from flexjax.backends.mosaic_gpu.sm80_products import add_half, product_transposed


@dataclasses.dataclass(frozen=True)
class SplitTiles(VisitedTiles):
    """The slots of the visited tiles where warpgroups split the columns. All warpgroups of the CTA call each method, in the same order.

    scores_first   whether the scores are computed before dP, or alone
    """

    scores_first: bool = False

    def begin(self, arrays: tuple[Ref, Ref], head: Scalar, start: Scalar, length: int, visit: Visit) -> None:
        """As `VisitedTiles.begin`; the operand that is read first arrives first."""
        arrived = self._copy_own(arrays, head, start, length)
        for first in (self.scores_first, not self.scores_first):
            self._fetch_one(first, visit)
        self.copies.wait(arrived, 2)

    def own(self) -> tuple[Ref, Ref]:
        """Refs to the CTA's own tokens in shared memory, [rows, D] and [rows, E], which all warpgroups share."""
        return self._own_rows(0)

    @property
    def half(self) -> Scalar:
        """Number of this warpgroup, which is that of its half of the columns."""
        return jnp.asarray(self.copies.group, jnp.int32)

    def product(self, own: Ref, first: bool) -> jax.Array:
        """Waits for an operand of the visited tile and returns own operand^T for this warpgroup's half of the visited tokens, [rows,
        scored] float32: the scores without scale (`first`) or dP.

        own     [rows, D or E], the CTA's own tokens
        first   which operand
        """
        self.wait(first, int(first == self.scores_first))
        slots = self.scratch.first if first else self.scratch.second
        columns = pl.ds(self.half * self.tiles.scored, self.tiles.scored)
        return product_transposed(own, slots.at[0, columns], self.plan.options.interpret)

    def wait(self, first: bool, pending: int) -> None:
        """Waits for an operand of the visited tile.

        first     which operand
        pending   whether the copies of the other one were started later: 1 or 0
        """
        full = self.scratch.full if first else self.scratch.second_full
        self.copies.arrive(None if full is None else full.at[0], pending)

    def write_weights(self, number: int, tile: jax.Array) -> None:
        """Writes this warpgroup's half of P or dS, [rows, scored], to shared memory in 16 bits. The others see it after the next `release`.

        number   0 or 1: of the gradient whose weights they are
        """
        weights = self.scratch.weights
        assert weights is not None
        weights.at[number, self.half][...] = tile.astype(weights.dtype)

    def release(self, first: bool | None, visit: VisitNow) -> None:
        """Meets all threads of the CTA, then starts the copies of the next visit's operand.

        first   which operand, read for the last time in this visit; None: neither was
        """
        self.copies.sync()
        if first is not None:
            self._fetch_one(first, visit.following)

    def add_gradient(self, total: jax.Array, number: int, first: bool) -> jax.Array:
        """total + weights operand, float32 of `half_shape`, this warpgroup's half of the columns of a gradient; all operands must be there.

        number   of the gradient, as in `write_weights`
        first    which operand of the visited tile
        """
        operand = (self.scratch.first if first else self.scratch.second).at[0]
        weights, scored = self.scratch.weights, self.tiles.scored
        assert weights is not None
        for part in range(self.tiles.groups):
            rows = operand.at[pl.ds(part * scored, scored)]
            total = add_half(total, weights.at[number, part], rows, self.half, self.plan.options.interpret)
        return total

    def _fetch_one(self, first: bool, visit: Visit) -> None:
        """Starts the copies of one operand of a visit's tile, as a group, which is empty if there is no such visit."""
        scratch = self.scratch
        full, target = (scratch.full, scratch.first) if first else (scratch.second_full, scratch.second)
        self._fetch(visit, jnp.int32(0), ((self.arrays[int(not first)], target, full),))
        self.copies.commit()
