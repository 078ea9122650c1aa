"""The warpgroup of a CTA of the decode kernel on mma.sync: copies the tiles of its work items, and computes attention for the packed rows.

    S = Q K^T          mma.sync, both operands from shared memory; 64 rows, of which the packed queries fill `used_rows`
    score, mask, P     as in the kernel for Hopper (decode_consumer.py, online_softmax.py)
    out += P V         mma.sync, P from registers

Steps, rings and their copies follow the forward kernel (forward_sm80_rows.py): all threads meet twice in a step, and then begin the copy
into the slot that all have read for the last time.

    keys n arrived, all meet       copy values n + stages - 1     S of step n
    values n arrived, all meet     copy keys n + stages           softmax, out += P V of step n

A tile of a cache in pages is copied in parts of `page_rows` keys, each from one page. Their page numbers are read a step before the copy
begins. Parts whose page number is not in the cache become zeros. Of the rows past the end of a batch entry (`DecodeItem.end`), cp.async
makes zeros; TMA brings what lies there, and the threads clear those of values in tiles of 16 bits.

Tiles of a quantised cache arrive as bytes, which the threads widen to a tile of 16 bits before they multiply (decode_widen.py). Scores
are multiplied by the scales of keys before score_mod, and weights by those of values after they were added to the row sums. With few packed
rows decode_sm80_byte_consumer.py computes instead.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import decode_rows, registers
from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.decode_consumer import ItemConsumer, Programs
from flexjax.backends.mosaic_gpu.decode_items import DecodeItem
from flexjax.backends.mosaic_gpu.decode_scales import scaled_columns
from flexjax.backends.mosaic_gpu.decode_sm80_tiles import MmaDecodeScratch, MmaDecodeTile
from flexjax.backends.mosaic_gpu.decode_tiles import ROWS
from flexjax.backends.mosaic_gpu.decode_widen import widen
from flexjax.backends.mosaic_gpu.forward_setup import present
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32, rows_of, slot_of
from flexjax.backends.mosaic_gpu.online_softmax import State
from flexjax.backends.mosaic_gpu.sm80_copies import Copies
from flexjax.backends.mosaic_gpu.sm80_products import add_product, product_transposed
from flexjax.backends.mosaic_gpu.tile_scores import scores_of


class KeyTile(typing.NamedTuple):
    """The key tile of a step; int32 scalars.

    number   of the tile in its batch entry
    start    number of the first key that is copied
    pages    the page of each part of `page_rows` keys; () where keys are contiguous
    """

    number: Scalar
    start: Scalar
    pages: tuple[Scalar, ...]


Carry = tuple[tuple[KeyTile, ...], jax.Array, State]
"""(the tiles of this step and the next `stages`, out [ROWS, value dim] float32, softmax state)."""


@dataclasses.dataclass(frozen=True)
class MmaDecodeConsumer(ItemConsumer):
    """The only warpgroup of a CTA: beside the fields of ItemConsumer

    tile      the kernel's configuration, that of `setup`
    scratch   Refs to the CTA's shared memory
    copies    of the kernel
    """

    tile: MmaDecodeTile
    scratch: MmaDecodeScratch[Ref]
    copies: Copies

    def run(self) -> None:
        """Computes the work items of this CTA one after the other, and writes their partial results."""
        items, work = self.setup.items, self.inputs.work

        def compute_item(turn: Scalar, _: None) -> None:
            """Computes the work item that is number `turn` of this CTA; the loop carries nothing."""
            self.compute_item(items.item(work, turn))

        lax.fori_loop(i32(0), items.turns(work), compute_item, None)

    def compute_item(self, item: DecodeItem) -> None:
        """Runs the steps of a work item and writes its partial result to `outputs`: the sums of P V, and references and sums of
        exponentials, of the packed rows that exist. An item without steps, of a batch entry that sees no key, copies nothing; its
        result is that of no visible key.
        """
        setup, tile = self.setup, self.tile
        programs = Programs(
            self.at_rows(setup.score, self.inputs.score, item), self.at_rows(setup.mask, self.inputs.mask, item)
        )
        out = plgpu.layout_cast(jnp.zeros((ROWS, tile.value_dim), jnp.float32), registers.TILE)
        if self.inputs.work.begin is None:
            out, state = self._steps(item, programs, out)
        else:
            out, state = cond(
                item.total > 0, lambda: self._steps(item, programs, out), lambda: (out, setup.softmax.start)
            )
        row_term = None
        if programs.score is not None and setup.reference is None and not setup.large_scores:
            row_term = programs.score.row_term()
        place = (item.b, item.kv_head, item.chunk)
        decode_rows.store_rows(self.outputs.out.at[place], out, tile.used_rows, setup.interpret)
        for n, vector in enumerate(setup.softmax.finish(state, row_term)):
            decode_rows.store_row_vector(self.outputs.stats.at[(*place, n)], vector, tile.used_rows, setup.interpret)

    # ----------------------------------------------------------------- the steps

    def _steps(self, item: DecodeItem, programs: Programs, out: jax.Array) -> tuple[jax.Array, State]:
        """Begins the copies of an item that has steps, waits for its queries, and runs every step.

        programs   at the rows of the item
        out        [ROWS, value dim] float32, zeros

        Returns (`out` plus P V of every step relative to the reference of its row, softmax state).
        """
        tiles = self.begin(item)
        if self.scratch.query_full is not None:
            plgpu.barrier_wait(self.scratch.query_full.at[0])
        step = functools.partial(self._step, item, programs)
        return lax.fori_loop(i32(0), item.total, step, (tiles, out, self.setup.softmax.start))[1:]

    def _step(self, item: DecodeItem, programs: Programs, n: Scalar, carry: Carry) -> Carry:
        """S, softmax and P V of step n of the item; waits for its keys and values, and begins the copies of later steps.

        programs   at the rows of the item
        carry      before the step; the same for step n + 1 is returned
        """
        setup, tile, scratch = self.setup, self.tile, self.scratch
        tiles, out, state = carry
        here, slot = tiles[0], slot_of(n, tile.stages)
        following = self.key_tile(item, n + tile.stages + 1)
        programs = programs.at_columns(here.start)
        key_scales, value_scales = self.scales(item, here.start)
        self.next_values(item, n, tiles)
        keys = self._widened(scratch.key.at[slot], scratch.wide_key)
        s = product_transposed(present(scratch.query), keys, setup.interpret)
        self.next_keys(item, n, tiles)
        if key_scales:
            s = scaled_columns(s, key_scales, setup.interpret)
        scores = scores_of(programs.score, s, setup.plan.scale, setup.large_scores, setup.interpret)
        scores = self.masked(scores, programs.mask, here.number, here.start, item.end)
        p, rescale, state = setup.softmax.step(scores, state)
        out = setup.softmax.rescale(out, rescale)
        values = self._widened(scratch.value.at[slot], scratch.wide_value)
        if setup.lengths and tile.copying == "tma" and tile.stored is None:
            rows = item.end - here.start
            when(rows < tile.block_kv)(lambda: self.copies.clear(values, rows))
        weights = scaled_columns(p, value_scales, setup.interpret) if value_scales else p
        out = add_product(out, weights.astype(setup.plan.dtype), values, setup.interpret)
        return (*tiles[1:], following), out, state

    def _widened(self, stored: Ref, wide: Ref | None) -> Ref:
        """The key or value tile that is multiplied: `stored` itself or, for a quantised cache, its numbers in 16 bits, which all threads
        write to `wide` together; they meet afterwards, so that each can read all of it.

        stored   the slot
        wide     where the numbers go, a tile that all threads have multiplied by before; None if the cache is not quantised
        """
        dtype = self.tile.stored
        if wide is None or dtype is None:
            return stored
        widen(stored, wide, dtype, self.setup.plan.dtype, self.setup.interpret)
        self.copies.sync()
        return wide

    # ----------------------------------------------------------------- copies

    def begin(self, item: DecodeItem) -> tuple[KeyTile, ...]:
        """Waits until all threads have read the tiles of the item before, and begins the copies of an item that has steps: of the packed
        queries, unless the tile is `transposed`, of the keys of its first `stages` steps, and of the values of all of these steps but the
        last. Returns the tiles of its first `stages` + 1 steps, for the first carry.
        """
        stages = self.tile.stages
        tiles = tuple(self.key_tile(item, i32(n)) for n in range(stages + 1))
        self.copies.sync()  # all have read the tiles of the item before
        if self.scratch.query is not None:
            self._copy_queries(item, self.scratch.query)
        self._copy(item, i32(0), tiles[0], "key")
        for n in range(1, stages):
            self._copy(item, i32(n - 1), tiles[n - 1], "value")
            self._copy(item, i32(n), tiles[n], "key")
        return tiles

    def next_values(self, item: DecodeItem, n: Scalar, tiles: tuple[KeyTile, ...]) -> None:
        """Waits for the keys of step n of the item, at a barrier of all threads, and begins to copy the values of step n + stages - 1 into
        the slot that step n - 1 has read. Called in every step before S is computed; the caller calls `next_keys` after it.

        tiles   of step n and the next `stages`
        """
        self._meet(self.scratch.key_full, n)
        self._copy(item, n + self.tile.stages - 1, tiles[-2], "value")

    def next_keys(self, item: DecodeItem, n: Scalar, tiles: tuple[KeyTile, ...]) -> None:
        """Waits for the values of step n of the item, at a barrier of all threads, and begins to copy the keys of step n + stages into the
        slot that step n has read. Called in every step after S is computed, before the values are read.

        tiles   of step n and the next `stages`
        """
        self._meet(self.scratch.value_full, n)
        self._copy(item, n + self.tile.stages, tiles[-1], "key")

    def _meet(self, full: Ref | None, n: Scalar) -> None:
        """Waits until the tile of step n has arrived in a ring, for all threads of the CTA, and until all threads are here. So all have
        read what they used last of the other ring, whose slot may then be overwritten: the values of step n - 1 where keys are waited
        for, the keys of step n where values are. Called at the two places of a step that the top of this file names, and nowhere else,
        because groups of cp.async are counted.

        full   the barriers of the ring of keys or of values; None with cp.async, where the group that was committed 2 * stages - 2 groups
               before the newest is waited for
        """
        stages = self.tile.stages
        self.copies.wait(None if full is None else full.at[slot_of(n, stages)], 2 * stages - 2)

    def key_tile(self, item: DecodeItem, n: Scalar) -> KeyTile:
        """The key tile of step n of the item, read from the work items and the pages in global memory; that of the last step for a step
        past it.
        """
        setup, tile = self.setup, self.tile
        n = lax.max(lax.min(n, item.total - 1), i32(0))
        number = setup.items.tile_number(self.inputs.work, item, n)
        start = setup.items.start(number)
        if self.inputs.pages is None:
            return KeyTile(number, start, ())
        most = i32(self.inputs.pages.shape[1] - 1)
        parts = (lax.div(start + i32(m * tile.page_rows), i32(setup.page)) for m in range(tile.copies))
        return KeyTile(number, start, tuple(self.inputs.pages[item.b, lax.min(part, most)] for part in parts))

    def _copy_queries(self, item: DecodeItem, target: Ref) -> None:
        """Begins to copy the packed queries of the item, as a part of the group of copies that the first keys end; rows past the last
        become zeros.

        target   [ROWS, D] in shared memory
        """
        source = self.inputs.query.at[item.b, item.kv_head, pl.ds(item.total * 0, ROWS)]
        arrived = None if self.scratch.query_full is None else self.scratch.query_full.at[0]
        self.copies.start(source, target, arrived, i32(self.tile.used_rows))

    def _copy(self, item: DecodeItem, n: Scalar, tile: KeyTile, ring: str) -> None:
        """Begins to copy the keys or values of step n to their slot, which must be free, and ends a group of copies; the group is empty
        where the item has no step n.

        tile   of that step
        ring   "key" or "value"
        """
        source, target, full = {
            "key": (self.inputs.key, self.scratch.key, self.scratch.key_full),
            "value": (self.inputs.value, self.scratch.value, self.scratch.value_full),
        }[ring]

        def begin() -> None:
            """Begins the copy of the tile of step n, which the item has, to its slot of the ring."""
            slot = slot_of(n, self.tile.stages)
            arrived = None if full is None else full.at[slot]
            self._copy_tile(source, target.at[slot], arrived, item, tile)

        when(n < item.total)(begin)
        self.copies.commit()

    @property
    def _plain(self) -> bool:
        """Whether slots of keys and values are bytes in row-major order (PlainArray): for a quantised cache, unless the tile is
        `transposed`.
        """
        return self.tile.stored is not None and not self.tile.transposed

    def _copy_tile(self, source: Ref, target: Ref, arrived: Ref | None, item: DecodeItem, tile: KeyTile) -> None:
        """Begins the copies of one tile of keys or of values into a free slot: one, or for a cache in pages one for each part of
        `page_rows` keys.

        source    the array in global memory
        target    [block_kv, D or E], the slot
        arrived   barrier of the slot, at which each copy arrives; None with cp.async
        item      whose batch entry, key head and `end` are read
        tile      which keys to copy

        A part whose page number is not in the cache becomes zeros. cp.async also writes zeros for keys from `item.end` on; TMA brings
        what lies there, and for a part in pages that begins at or past `item.end`, the tile's first part again.
        """
        setup, rows = self.setup, self.tile.page_rows
        exist = item.end - tile.start if setup.lengths or setup.items.tiles_may_overhang else None
        if not setup.page:
            part = rows_of(source, setup.plan.layout, item.b, item.kv_head, tile.start, self.tile.block_kv)
            self.copies.start(part, target, arrived, exist, self._plain)
            return
        for n, page in enumerate(tile.pages):
            key = tile.start + i32(n * rows)
            stored = (page >= 0) & (page < setup.stored_pages)
            if self.tile.copying == "tma":
                # A part past the last key copies the tile's first part instead: its own page need not exist, and memory that was
                # never written could hold NaN. For a number that is not in the cache, a page past the end of the array is read,
                # where TMA gives zeros.
                inside = key < item.end
                page = lax.select(inside, page, tile.pages[0])
                page = lax.select((page >= 0) & (page < setup.stored_pages), page, i32(setup.stored_pages))
                key, exists = lax.select(inside, key, tile.start), None
            else:
                page = lax.select(stored, page, i32(0))
                exists = lax.select(stored, lax.max(item.end - key, i32(0)), i32(0))
            part = rows_of(source, "BTNH", page, item.kv_head, lax.rem(key, i32(setup.page)), rows)
            self.copies.start(part, target.at[pl.ds(n * rows, rows)], arrived, exists, self._plain)
