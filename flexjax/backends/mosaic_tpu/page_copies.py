"""Copies tiles of keys and values out of their pages, from HBM into two slots of VMEM, one visit ahead of the kernel.

    visit v    waits for the copies into slot v % 2, starts those of visit v + 1 into the other slot, and computes

The page numbers of all batch entries are in SMEM. A tile is copied in *pieces*: whole pages, or parts of a page where the tile is no
multiple of it. Pieces from the key length of the batch entry on are not copied; the kernel hides those columns, and values past the
length are zeroed once in the slot. A page number that is not in the pool is read as a page of zeros.

**Quantised pages** are copied as they are, and `tile_of` converts them. Their scales are rows beside the tiles, one number for each column
(`column_scales`), so that the kernel multiplies products and weights by them and no key. Values past the length are zeroed by the kernel.

Pages are those of a plan whose heads are joined (plan/join_heads.py): [P, page, D] and [P, page, E], all heads in one row of columns.
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
    """What the copies write, two slots of each.

    key, value   VMEM: keys [2, keys, D] and values [2, keys, E] of two tiles
    arrived      the semaphores of their copies, [2 slots, key or value]
    copied       SMEM: how many pieces are copied into each slot, int32 [2]
    """

    key: T
    value: T
    arrived: T
    copied: T


class Pages(typing.NamedTuple):
    """What the copies read.

    key, value   the pools in HBM, [P, page, D] and [P, page, E]
    numbers      SMEM: the page numbers [B * n], n for each batch entry
    lengths      SMEM: the key lengths [B]
    """

    key: jax.Ref
    value: jax.Ref
    numbers: jax.Ref
    lengths: jax.Ref


class Piece(typing.NamedTuple):
    """Which rows one copy moves (traced scalars).

    number             the page number, which the pool has
    in_page, in_tile   the first row in the page, and in the tile
    slot               the slot of the tile, 0 or 1
    """

    number: jax.Array
    in_page: jax.Array
    in_tile: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """The copies of one kernel.

    plan    with joined heads and keys in pages
    order   of the visits
    tile    how many keys a tile has
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
        """The slots, in the dtype in which the cache stores keys and values, and their semaphores."""
        slots = lambda dim: pltpu.VMEM((2, self.tile, dim), jnp.dtype(self.plan.cache_dtype or self.plan.dtype))
        return PageSlots(
            slots(self.plan.head_dim),
            slots(self.plan.value_dim),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SMEM((2,), jnp.int32),
        )

    def tile_of(self, visit: TileVisit, slots: PageSlots[jax.Ref], keys: slice) -> tuple[jax.Array, jax.Array]:
        """In a kernel, after `begin_visit`: keys [keys, D] of the visited tile and their values [keys, E], in the plan's dtype
        and without the scales of a quantised cache.

        slots   the scratch, in which the visit has its slot
        keys    which rows of the tile

        Values of keys that do not exist are 0, unless the cache is quantised; their keys may be anything.
        """
        slot, dtype = _slot(visit.number), jnp.dtype(self.plan.dtype)
        return slots.key[slot, keys, :].astype(dtype), slots.value[slot, keys, :].astype(dtype)

    def begin_visit(self, tables: Sequence[jax.Ref], visit: TileVisit, pages: Pages, slots: PageSlots[jax.Ref]) -> None:
        """In a kernel, at the start of each visit: starts the copies of the next visit, and those of this one if it is the
        first of the launch; then waits for those of this one, and zeroes its values past the key length, unless the cache is
        quantised.

        tables         the visit lists in SMEM
        pages, slots   what is read, and the scratch that is written
        """
        v = jnp.asarray(visit.number)
        pl.when(v == 0)(lambda: self._start(tables, v, pages, slots))
        pl.when(self.order.visit_follows(tables, v))(lambda: self._start(tables, v + 1, pages, slots))
        self._wait(slots, _slot(v))
        if self.plan.cache_dtype is None:
            self._zero_past_end(self._keys(tables, v, pages)[2], slots, _slot(v))

    def _keys(self, tables: Sequence[jax.Ref], v: jax.Array, pages: Pages) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch entry of visit v, first key of its tile, how many keys of the tile exist). For an idle visit the last is the
        whole tile, so that nothing of it is zeroed.
        """
        b, kv_tile, kind = self.order.keys_of_visit(tables, v)
        tile = np.int32(self.tile)
        start = kv_tile * tile
        keys = jnp.clip(jnp.minimum(pages.lengths[b], np.int32(self.plan.kv_len)) - start, 0, tile)
        return b, start, jnp.where(kind == np.int32(IDLE), tile, keys)

    def _start(self, tables: Sequence[jax.Ref], v: jax.Array, pages: Pages, slots: PageSlots[jax.Ref]) -> None:
        """Starts the copies of visit v into its slot, and records in `slots.copied` how many pieces are copied; `_wait` waits for them. A
        piece whose page is not in the pool is zeroed at once. An idle visit copies nothing. The slot must be free: the visit two before
        has been computed.

        tables         the visit lists in SMEM
        pages, slots   what is read, and the scratch that is written
        """
        b, start, keys = self._keys(tables, v, pages)
        columns, page, rows = (
            np.int32(n) for n in (pages.numbers.shape[0] // self.plan.batch, self.plan.page, self.rows)
        )
        idle = self.order.keys_of_visit(tables, v)[2] == np.int32(IDLE)

        def step(at: jax.Array, copied: jax.Array) -> jax.Array:
            """Starts the copies of the piece with number `at` in the tile, or zeroes it; returns the number of copied
            pieces, `copied` of those before included.
            """
            row = start + at * rows
            number = pages.numbers[b * columns + lax.div(row, page)]
            piece = Piece(number, lax.rem(row, page), at * rows, _slot(v))
            inside = self._in_pool(pages, number)

            @pl.when(inside)
            def copy() -> None:
                """Starts both copies of the piece."""
                for each in self._copies(pages, slots, piece):
                    each.start()

            @pl.when(~inside)
            def zero() -> None:
                """Writes a piece of zeros."""
                for ref in (slots.key, slots.value):
                    ref[piece.slot, self._at(piece.in_tile), :] = jnp.zeros((self.rows, ref.shape[2]), ref.dtype)

            return copied + inside.astype(jnp.int32)

        count = jnp.where(idle, 0, lax.div(keys + rows - 1, rows))
        slots.copied[_slot(v)] = lax.fori_loop(np.int32(0), count, step, jnp.int32(0))

    def _wait(self, slots: PageSlots[jax.Ref], slot: jax.Array) -> None:
        """Waits for all copies into a slot of `slots`. A semaphore counts bytes, so there is one wait for each bit that is set
        in the number of copied pieces, for the bytes of that power of two of pieces.
        """
        copied = slots.copied[slot]
        for bit in range((self.tile // self.rows).bit_length()):

            def wait(rows: int = self.rows << bit) -> None:
                """Waits for `rows` rows of keys and as many of values."""
                for which, ref in enumerate((slots.key, slots.value)):
                    part = ref.at[slot, pl.ds(0, rows)]
                    pltpu.make_async_copy(part, part, slots.arrived.at[slot, which]).wait()

            pl.when((copied >> bit) & 1 == 1)(wait)

    def _zero_past_end(self, keys: jax.Array, slots: PageSlots[jax.Ref], slot: jax.Array) -> None:
        """Zeroes the values of the tile in `slot` of `slots` that do not exist: pieces that were not copied hold what an
        earlier visit left there, which may be NaN, and 0 * NaN is NaN. The keys stay, because the kernel hides their columns.

        keys   how many keys of the tile exist: its rows from this number on are zeroed
        """

        def step(at: jax.Array, carry: jax.Array) -> jax.Array:
            """Zeroes the values of piece `at` of the tile whose row in the tile is `keys` or more; returns the carry,
            which nothing reads.
            """
            first = at * np.int32(self.rows)
            values = slots.value[slot, self._at(first), :]
            slots.value[slot, self._at(first), :] = zero_rows_past_end(values, first, keys)
            return carry

        pieces = self.tile // self.rows
        lax.fori_loop(lax.div(keys, np.int32(self.rows)), np.int32(pieces), step, np.int32(0))

    def _at(self, row: jax.Array) -> slice | pl.Slice:
        """The slice of the `self.rows` rows from `row` on, which is a multiple of `self.rows`."""
        return pl.ds(pl.multiple_of(row, self.rows), self.rows)

    def _in_pool(self, pages: Pages, number: jax.Array) -> jax.Array:
        """Whether the pool of `pages` has the page with this number, a traced bool scalar; False for -1, which stands for no page."""
        return (number >= 0) & (number < np.int32(pages.key.shape[0]))

    def _copies(self, pages: Pages, slots: PageSlots[jax.Ref], piece: Piece) -> list:
        """[copy of the keys, copy of the values] of a piece whose page is in the pool, from `pages` into `slots`, not started
        yet.
        """
        found = []
        for which, (pool, into) in enumerate(((pages.key, slots.key), (pages.value, slots.value))):
            given = pool.at[piece.number, self._at(piece.in_page)]
            taken = into.at[piece.slot, self._at(piece.in_tile)]
            found.append(pltpu.make_async_copy(given, taken, slots.arrived.at[piece.slot, which]))
        return found


def column_scales(plan: KernelPlan, operands: Operands, tile: int) -> tuple[jax.Array, jax.Array] | None:
    """(scales of the keys, scales of the values) of the columns of a quantised plan with joined heads, float32 [B, 1, columns]:
    one number for each column, 0 where no key exists; padded with 0 to whole tiles. None for plans that are not quantised. With scales of
    pages, those of a page number that is not in the pool are 0 too: they multiply zeros, and the scale of a free page may be NaN.

    tile   columns of a tile
    """
    if operands.scales is None or operands.pages is None or operands.lengths is None:
        return None
    pages, end = operands.pages, operands.lengths.key
    assert end is not None
    exists = jnp.arange(plan.kv_len, dtype=jnp.int32) < end[:, None]

    def of_columns(scale: jax.Array) -> jax.Array:
        """The scales of all columns, float32 [B, 1, columns padded to whole tiles], from those of heads [M] or of pages and heads [P, M]."""
        inside = (pages >= 0) & (pages < operands.key.shape[0])
        heads = scale.shape[-1]
        of_head = jnp.arange(plan.page, dtype=jnp.int32) % heads == jnp.arange(heads, dtype=jnp.int32)[:, None]
        if scale.ndim == 1:
            by_page = jnp.broadcast_to(scale, (*pages.shape, heads))
        else:
            by_page = jnp.where(inside[..., None], scale[jnp.where(inside, pages, 0)], 0.0)
        # A product, because XLA would store the scales of each token apart, heads padded to 128 lanes. It is exact: one factor is 1.
        by_column = jnp.einsum("bnm,mc->bnc", by_page, of_head.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        found = jnp.where(exists, by_column.reshape(exists.shape), 0.0)
        return jnp.pad(found, ((0, 0), (0, -plan.kv_len % tile)))[:, None]

    return of_columns(operands.scales[0]), of_columns(operands.scales[1])


def _slot(visit: jax.Array | int) -> jax.Array:
    """The slot, 0 or 1, of the visit with this number."""
    return lax.rem(jnp.asarray(visit), np.int32(2))
