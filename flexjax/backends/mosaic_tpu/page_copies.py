"""Copies tiles of keys and values out of their pages, from HBM into two slots of VMEM, one visit ahead of the kernel.

    visit v    waits for the copies into slot v % 2, starts those of visit v + 1 into the other slot, and computes

The page numbers of all batch entries are in SMEM. A tile is copied in *pieces*: whole pages, or parts of a page where the tile is no
multiple of it. Pieces from the key length of the batch entry on are not copied, and their slots keep what they had; the kernel hides
those columns and zeroes their values. A page number that is not in the pool stands for a page of zeros.

Pages are those of a plan whose heads are joined (plan/join_heads.py): [P, page, D] and [P, page, E], all heads in one row of columns.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu.block_sparse_order import BlockSparseOrder
from flexjax.backends.mosaic_tpu.visit_order import IDLE, TileVisit
from flexjax.plan.kernel_plan import KernelPlan

T = typing.TypeVar("T")


class PageSlots(typing.NamedTuple, typing.Generic[T]):
    """Scratch: key [2, keys, D] and value [2, keys, E] of two tiles, and the semaphores of their copies, [2 slots, key or value]."""

    key: T
    value: T
    arrived: T


class Pages(typing.NamedTuple):
    """What the copies read: pools [P, page, D] and [P, page, E] in HBM; in SMEM page numbers [B * n] and key lengths [B]."""

    key: jax.Ref
    value: jax.Ref
    numbers: jax.Ref
    lengths: jax.Ref


class Piece(typing.NamedTuple):
    """Rows of one copy (traced scalars): the page number, the first row in the page and in the tile, and the slot of the tile."""

    number: jax.Array
    in_page: jax.Array
    in_tile: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """The copies of one kernel.

    order   of the visits
    tile    keys of a tile
    """

    plan: KernelPlan
    order: BlockSparseOrder
    tile: int

    @property
    def rows(self) -> int:
        """Rows of a piece: the largest number that divides the page and the tile."""
        return math.gcd(self.tile, self.plan.page)

    @property
    def scratch(self) -> PageSlots:
        """The slots and their semaphores."""
        slots = lambda dim: pltpu.VMEM((2, self.tile, dim), jnp.dtype(self.plan.dtype))
        return PageSlots(slots(self.plan.head_dim), slots(self.plan.value_dim), pltpu.SemaphoreType.DMA((2, 2)))

    def tile_of(self, visit: TileVisit, slots: PageSlots[jax.Ref], keys: slice) -> tuple[jax.Array, jax.Array]:
        """In a kernel: some keys [keys, D] of the visited tile and their values [keys, E]."""
        slot = _slot(visit.number)
        return slots.key[slot, keys, :], slots.value[slot, keys, :]

    def begin_visit(self, tables: Sequence[jax.Ref], visit: TileVisit, pages: Pages, slots: PageSlots[jax.Ref]) -> None:
        """In a kernel: starts the copies of the next visit, and those of this one if it is the first of the launch; then waits for those
        of this one.

        tables   the visit lists in SMEM
        """
        v = jnp.asarray(visit.number)

        def start(piece: Piece) -> None:
            """Starts the copies of a piece, or zeroes it if its page is not in the pool."""
            copies = self._copies(pages, slots, piece)

            @pl.when(self._in_pool(pages, piece))
            def copy() -> None:
                """Starts both copies."""
                for each in copies:
                    each.start()

            @pl.when(~self._in_pool(pages, piece))
            def zero() -> None:
                """Writes a piece of zeros."""
                for ref in (slots.key, slots.value):
                    ref[piece.slot, self._at(piece.in_tile), :] = jnp.zeros((self.rows, ref.shape[2]), ref.dtype)

        def finish(piece: Piece) -> None:
            """Waits for as much as the copies of a piece bring; the tile is complete after all waits, a piece after its own may not be."""
            copies = self._copies(pages, slots, piece)

            @pl.when(self._in_pool(pages, piece))
            def wait() -> None:
                """Waits for both copies."""
                for each in copies:
                    each.wait()

        pl.when(v == 0)(lambda: self._each_piece(tables, v, pages, start))
        pl.when(self.order.visit_follows(tables, v))(lambda: self._each_piece(tables, v + 1, pages, start))
        self._each_piece(tables, v, pages, finish)

    def _each_piece(self, tables: Sequence[jax.Ref], v: jax.Array, pages: Pages, body: Callable[[Piece], None]) -> None:
        """Runs `body` for each piece that visit v copies. An idle visit copies none."""
        b, kv_tile, kind = self.order.keys_of_visit(tables, v)
        columns, page = np.int32(pages.numbers.shape[0] // self.plan.batch), np.int32(self.plan.page)
        tile, rows = np.int32(self.tile), np.int32(self.rows)
        start = kv_tile * tile
        keys = jnp.clip(pages.lengths[b] - start, 0, tile)

        def step(at: jax.Array, carry: jax.Array) -> jax.Array:
            """The piece with number `at` in the tile."""
            row = start + at * rows
            number = pages.numbers[b * columns + lax.div(row, page)]
            body(Piece(number, lax.rem(row, page), at * rows, _slot(v)))
            return carry

        count = jnp.where(kind == np.int32(IDLE), 0, lax.div(keys + rows - 1, rows))
        lax.fori_loop(np.int32(0), count, step, np.int32(0))

    def _at(self, row: jax.Array) -> slice | pl.Slice:
        """The rows of a piece that begins at `row`, a multiple of its rows."""
        return pl.ds(pl.multiple_of(row, self.rows), self.rows)

    def _in_pool(self, pages: Pages, piece: Piece) -> jax.Array:
        """Whether the pool has the page of a piece."""
        return (piece.number >= 0) & (piece.number < np.int32(pages.key.shape[0]))

    def _copies(self, pages: Pages, slots: PageSlots[jax.Ref], piece: Piece) -> list:
        """The copies of the keys and of the values of a piece whose page is in the pool."""
        found = []
        for which, (pool, into) in enumerate(((pages.key, slots.key), (pages.value, slots.value))):
            given = pool.at[piece.number, self._at(piece.in_page)]
            taken = into.at[piece.slot, self._at(piece.in_tile)]
            found.append(pltpu.make_async_copy(given, taken, slots.arrived.at[piece.slot, which]))
        return found


def _slot(visit: jax.Array | int) -> jax.Array:
    """The slot of the visit with this number."""
    return lax.rem(jnp.asarray(visit), np.int32(2))
