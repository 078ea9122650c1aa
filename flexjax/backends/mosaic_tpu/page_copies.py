"""Copies tiles of keys and values out of their pages, from HBM into two slots of VMEM, one visit ahead of the kernel.

    visit v    waits for the copies into slot v % 2, starts those of visit v + 1 into the other slot, and computes

The page numbers of all batch entries are in SMEM. A tile is copied in *pieces*: whole pages, or parts of a page where
the tile is no multiple of it. Pieces from the key length of the batch entry on are not copied; the kernel hides those
columns, and their values are zeroed in the slot. A page number that is not in the pool is read as a page of zeros.

**Quantised pages** are copied as they are, and `tile_of` converts them. Their scales are rows beside the tiles, one
number for each column (`column_scales`), so that the kernel multiplies products and weights by them and no key. The
kernel zeroes values past the length.

Pages are those of a plan whose heads are joined (rewrites/join_heads.py): [P, page, D] and [P, page, E], all heads in
one row of columns.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu.block_sparse_order import BlockSparseOrder
from flexjax.backends.mosaic_tpu.vector_ops import zero_rows_past_end
from flexjax.backends.mosaic_tpu.visit_order import IDLE, TileVisit
from flexjax.plan.kernel_plan import KernelPlan, Operands

T = typing.TypeVar("T")


class PageSlots(typing.NamedTuple, typing.Generic[T]):
    """What the copies write, two slots of each."""

    key: T  # VMEM: keys of two tiles [2, keys, D]
    value: T  # VMEM: values of two tiles [2, keys, E]
    arrived: T  # semaphores of the copies, [2 slots, key or value]
    copied: T  # SMEM: how many pieces are copied into each slot, int32 [2]


class Pages(typing.NamedTuple):
    """What the copies read."""

    key: jax.Ref  # the pool in HBM, [P, page, D]
    value: jax.Ref  # the pool in HBM, [P, page, E]
    numbers: jax.Ref  # SMEM: the page numbers [B * n], n for each batch entry
    lengths: jax.Ref  # SMEM: the key lengths [B]


class Piece(typing.NamedTuple):
    """Which rows one copy moves (traced scalars)."""

    number: jax.Array  # the page number, which the pool has
    in_page: jax.Array  # the first row in the page
    in_tile: jax.Array  # the first row in the tile
    slot: jax.Array  # of the tile, 0 or 1


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """The copies of one kernel."""

    plan: KernelPlan  # with joined heads and keys in pages
    order: BlockSparseOrder
    tile: int  # keys of a tile

    @property
    def rows(self) -> int:
        """Rows of a piece: the largest number that divides the page and the tile."""
        return math.gcd(self.tile, self.plan.page)

    @property
    def scratch(self) -> PageSlots:
        slots = lambda dim: pltpu.VMEM((2, self.tile, dim), jnp.dtype(self.plan.cache_dtype or self.plan.dtype))
        return PageSlots(
            slots(self.plan.head_dim),
            slots(self.plan.value_dim),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SMEM((2,), jnp.int32),
        )

    def tile_of(self, visit: TileVisit, slots: PageSlots[jax.Ref], keys: slice) -> tuple[jax.Array, jax.Array]:
        """Rows `keys` of the visited tile [keys, D] and their values [keys, E], after `begin_visit`.

        Quantised ones are without their scales. Values of keys that do not exist are 0 unless quantised.
        """
        slot, dtype = _slot(visit.number), jnp.dtype(self.plan.dtype)
        return slots.key[slot, keys, :].astype(dtype), slots.value[slot, keys, :].astype(dtype)

    def begin_visit(self, tables: Sequence[jax.Ref], visit: TileVisit, pages: Pages, slots: PageSlots[jax.Ref]) -> None:
        """Starts the copies of the next visit (at the first visit also its own), and waits for those of this visit."""
        v = jnp.asarray(visit.number)
        pl.when(v == 0)(lambda: self._start(tables, v, pages, slots))
        pl.when(self.order.visit_follows(tables, v))(lambda: self._start(tables, v + 1, pages, slots))
        self._wait(slots, _slot(v))
        if self.plan.cache_dtype is None:
            self._zero_past_end(self._keys(tables, v, pages)[2], slots, _slot(v))

    def _keys(self, tables: Sequence[jax.Ref], v: jax.Array, pages: Pages) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch entry of visit v, first key of its tile, how many keys of the tile exist)."""
        b, kv_tile, kind = self.order.keys_of_visit(tables, v)
        tile = np.int32(self.tile)
        start = kv_tile * tile
        keys = jnp.clip(jnp.minimum(pages.lengths[b], np.int32(self.plan.kv_len)) - start, 0, tile)
        # an idle visit counts as a whole tile, so that nothing of it is zeroed
        return b, start, jnp.where(kind == np.int32(IDLE), tile, keys)

    def _start(self, tables: Sequence[jax.Ref], v: jax.Array, pages: Pages, slots: PageSlots[jax.Ref]) -> None:
        """Starts the copies of visit v into its slot, none if idle, and counts them in `slots.copied`.

        The slot must be free: the visit two before has been computed. A piece that is not in the pool is zeroed.
        """
        b, start, keys = self._keys(tables, v, pages)
        columns, page, rows = (
            np.int32(n) for n in (pages.numbers.shape[0] // self.plan.batch, self.plan.page, self.rows)
        )
        idle = self.order.keys_of_visit(tables, v)[2] == np.int32(IDLE)

        def step(at: jax.Array, copied: jax.Array) -> jax.Array:
            """Copies or zeroes piece `at` of the tile; returns the number of copied pieces."""
            row = start + at * rows
            number = pages.numbers[b * columns + lax.div(row, page)]
            piece = Piece(number, lax.rem(row, page), at * rows, _slot(v))
            inside = self._in_pool(pages, number)

            @pl.when(inside)
            def copy() -> None:
                for each in self._copies(pages, slots, piece):
                    each.start()

            @pl.when(~inside)
            def zero() -> None:
                for ref in (slots.key, slots.value):
                    ref[piece.slot, self._at(piece.in_tile), :] = jnp.zeros((self.rows, ref.shape[2]), ref.dtype)

            return copied + inside.astype(jnp.int32)

        count = jnp.where(idle, 0, lax.div(keys + rows - 1, rows))
        slots.copied[_slot(v)] = lax.fori_loop(np.int32(0), count, step, jnp.int32(0))

    def _wait(self, slots: PageSlots[jax.Ref], slot: jax.Array) -> None:
        """Waits for all copies into a slot."""
        # A semaphore counts bytes, so there is one wait for each bit that is set in the number of copied pieces.
        copied = slots.copied[slot]
        for bit in range((self.tile // self.rows).bit_length()):

            def wait(rows: int = self.rows << bit) -> None:
                for which, ref in enumerate((slots.key, slots.value)):
                    part = ref.at[slot, pl.ds(0, rows)]
                    pltpu.make_async_copy(part, part, slots.arrived.at[slot, which]).wait()

            pl.when((copied >> bit) & 1 == 1)(wait)

    def _zero_past_end(self, keys: jax.Array, slots: PageSlots[jax.Ref], slot: jax.Array) -> None:
        """Zeroes the values of the rows from `keys` on in the slot's tile."""

        # Pieces that were not copied hold values of an earlier visit, maybe NaN. Their keys stay: the kernel hides
        # their columns.
        def step(at: jax.Array, carry: jax.Array) -> jax.Array:
            first = at * np.int32(self.rows)
            values = slots.value[slot, self._at(first), :]
            slots.value[slot, self._at(first), :] = zero_rows_past_end(values, first, keys)
            return carry

        pieces = self.tile // self.rows
        lax.fori_loop(lax.div(keys, np.int32(self.rows)), np.int32(pieces), step, np.int32(0))

    def _at(self, row: jax.Array) -> slice | pl.Slice:
        """`self.rows` rows from `row` on, a multiple of `self.rows`."""
        return pl.ds(pl.multiple_of(row, self.rows), self.rows)

    def _in_pool(self, pages: Pages, number: jax.Array) -> jax.Array:
        """False for -1, which stands for no page."""
        return (number >= 0) & (number < np.int32(pages.key.shape[0]))

    def _copies(self, pages: Pages, slots: PageSlots[jax.Ref], piece: Piece) -> list:
        """[copy of the keys, copy of the values], not started yet."""
        found = []
        for which, (pool, into) in enumerate(((pages.key, slots.key), (pages.value, slots.value))):
            given = pool.at[piece.number, self._at(piece.in_page)]
            taken = into.at[piece.slot, self._at(piece.in_tile)]
            found.append(pltpu.make_async_copy(given, taken, slots.arrived.at[piece.slot, which]))
        return found


def column_scales(plan: KernelPlan, operands: Operands, tile: int) -> tuple[jax.Array, jax.Array] | None:
    """(key scales, value scales) of a quantised plan with joined heads, float32 [B, 1, columns]; None for other plans.

    They are 0 where no key exists, and are padded with 0 to whole tiles of `tile` columns.
    """
    if operands.scales is None or operands.pages is None or operands.lengths is None:
        return None
    pages, end = operands.pages, operands.lengths.key
    assert end is not None
    exists = jnp.arange(plan.kv_len, dtype=jnp.int32) < end[:, None]

    def of_columns(scale: jax.Array) -> jax.Array:
        """From scales of heads [M] or of pages and heads [P, M]."""
        inside = (pages >= 0) & (pages < operands.key.shape[0])
        heads = scale.shape[-1]
        of_head = jnp.arange(plan.page, dtype=jnp.int32) % heads == jnp.arange(heads, dtype=jnp.int32)[:, None]
        if scale.ndim == 1:
            by_page = jnp.broadcast_to(scale, (*pages.shape, heads))
        else:
            # Pages that are not in the pool hold zeros; the scale of a free page may be NaN.
            by_page = jnp.where(inside[..., None], scale[jnp.where(inside, pages, 0)], 0.0)
        # A product, because XLA would store the scales of each token apart, heads padded to 128 lanes. It is exact:
        # one factor is 1.
        by_column = jnp.einsum("bnm,mc->bnc", by_page, of_head.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        found = jnp.where(exists, by_column.reshape(exists.shape), 0.0)
        return jnp.pad(found, ((0, 0), (0, -plan.kv_len % tile)))[:, None]

    return of_columns(operands.scales[0]), of_columns(operands.scales[1])


def _slot(visit: jax.Array | int) -> jax.Array:
    return lax.rem(jnp.asarray(visit), np.int32(2))
