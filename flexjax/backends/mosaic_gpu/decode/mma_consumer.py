"""The warpgroup of a CTA of the decode kernel on mma.sync: copies tiles, and computes attention for the packed rows.

    S = Q K^T          mma.sync, both operands from shared memory; 64 rows, of which the packed queries fill `used_rows`
    score, mask, P     as in the kernel for Hopper (consumer.py, forward/online_softmax.py)
    out += P V         mma.sync, P from registers

Steps, rings and their copies follow the forward kernel (forward/mma_rows.py): all threads meet twice in a step, and
then begin the copy into the slot that all have read for the last time.

    keys n arrived, all meet       copy values n + stages - 1     S of step n
    values n arrived, all meet     copy keys n + stages           softmax, out += P V of step n

A tile of a cache in pages is copied in parts of `page_rows` keys, each from one page. Their page numbers are read a
step before the copy begins. Tiles of a quantised cache arrive as bytes, which the threads widen to 16 bits before they
multiply (hopper_widen.py). Scores are multiplied by the scales of keys before score_mod, weights by those of values
after they were added to the row sums.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.decode import rows as decode_rows
from flexjax.backends.mosaic_gpu.decode.consumer import ItemConsumer
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import ROWS
from flexjax.backends.mosaic_gpu.decode.hopper_widen import widen
from flexjax.backends.mosaic_gpu.decode.items import DecodeItem
from flexjax.backends.mosaic_gpu.decode.mma_tiles import MmaDecodeScratch, MmaDecodeTile
from flexjax.backends.mosaic_gpu.decode.scales import scaled_columns
from flexjax.backends.mosaic_gpu.forward.online_softmax import State
from flexjax.backends.mosaic_gpu.forward.rows import Programs
from flexjax.backends.mosaic_gpu.forward.setup import present
from flexjax.backends.mosaic_gpu.machine import registers
from flexjax.backends.mosaic_gpu.machine.branch import cond, when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32, rows_of, slot_of
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.mma_products import add_product, product_transposed


class KeyTile(typing.NamedTuple):
    """The key tile of a step."""

    number: Scalar  # of the tile in its batch entry
    start: Scalar  # the first key that is copied
    pages: tuple[Scalar, ...]  # the page of each part of `page_rows` keys; () where keys are contiguous


Carry = tuple[tuple[KeyTile, ...], jax.Array, State]
"""(the tiles of this step and the next `stages`, out [ROWS, value dim] float32, softmax state)."""


@dataclasses.dataclass(frozen=True)
class MmaDecodeConsumer(ItemConsumer):
    """The only warpgroup of a CTA."""

    tile: MmaDecodeTile
    scratch: MmaDecodeScratch[Ref]
    copies: Copies

    def run(self) -> None:
        """Computes the work items of this CTA one after the other, and writes their partial results."""
        items, work = self.setup.items, self.inputs.work

        def compute_item(turn: Scalar, _: None) -> None:
            self.compute_item(items.item(work, turn))

        lax.fori_loop(i32(0), items.turns(work), compute_item, None)

    def compute_item(self, item: DecodeItem) -> None:
        """Runs the steps of a work item, and writes its partial result."""
        setup, tile = self.setup, self.tile
        programs = Programs(
            self.at_rows(setup.score, self.inputs.score, item), self.at_rows(setup.mask, self.inputs.mask, item)
        )
        out = plgpu.layout_cast(jnp.zeros((ROWS, tile.value_dim), jnp.float32), registers.TILE)
        # an item without steps, of a batch entry that sees no key, copies nothing
        if self.inputs.work.begin is None:
            out, state = self._steps(item, programs, out)
        else:
            out, state = cond(
                item.total > 0, lambda: self._steps(item, programs, out), lambda: (out, setup.softmax.start)
            )
        place = (item.b, item.kv_head, item.chunk)
        decode_rows.store_rows(self.outputs.out.at[place], out, tile.used_rows)
        for n, vector in enumerate(self.statistics(state, programs)):
            decode_rows.store_row_vector(self.outputs.stats.at[(*place, n)], vector, tile.used_rows)

    # ----------------------------------------------------------------- the steps

    def _steps(self, item: DecodeItem, programs: Programs, out: jax.Array) -> tuple[jax.Array, State]:
        """Runs every step of an item that has steps; returns (`out` plus P V, softmax state)."""
        tiles = self.begin(item)
        if self.scratch.query_full is not None:
            plgpu.barrier_wait(self.scratch.query_full.at[0])
        step = functools.partial(self._step, item, programs)
        return lax.fori_loop(i32(0), item.total, step, (tiles, out, self.setup.softmax.start))[1:]

    def _step(self, item: DecodeItem, programs: Programs, n: Scalar, carry: Carry) -> Carry:
        """S, softmax and P V of step n of the item; begins the copies of later steps."""
        setup, tile, scratch = self.setup, self.tile, self.scratch
        tiles, out, state = carry
        here, slot = tiles[0], slot_of(n, tile.stages)
        following = self.key_tile(item, n + tile.stages + 1)
        programs = programs.at_columns(here.start)
        key_scales, value_scales = self.scales(item, here.start)
        self.next_values(item, n, tiles)
        keys = self._widened(scratch.key.at[slot], scratch.wide_key)
        s = product_transposed(present(scratch.query), keys)
        self.next_keys(item, n, tiles)
        if key_scales:
            s = scaled_columns(s, key_scales)
        p, rescale, state = self.softmax(s, programs, state, here.number, here.start, item.end)
        out = setup.softmax.rescale(out, rescale)
        values = self._widened(scratch.value.at[slot], scratch.wide_value)
        # cp.async has written zeros past the end, TMA what lies there
        if setup.lengths and tile.copying == "tma" and tile.stored is None:
            rows = item.end - here.start
            when(rows < tile.block_kv)(lambda: self.copies.clear(values, rows))
        weights = scaled_columns(p, value_scales) if value_scales else p
        out = add_product(out, weights.astype(setup.plan.dtype), values)
        return (*tiles[1:], following), out, state

    def _widened(self, stored: Ref, wide: Ref | None) -> Ref:
        """The tile that is multiplied: `stored`, or `wide`, to which all threads write a quantised tile's numbers."""
        dtype = self.tile.stored
        if wide is None or dtype is None:
            return stored
        widen(stored, wide, dtype, self.setup.plan.dtype)
        self.copies.sync()
        return wide

    # ----------------------------------------------------------------- copies

    def begin(self, item: DecodeItem) -> tuple[KeyTile, ...]:
        """Begins the copies of an item's queries and first tiles; returns the tiles of its first `stages` + 1 steps.

        Keys of the first `stages` steps are copied, and values of all of these steps but the last.
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
        """Before S of each step: waits for the keys of step n, and copies the values of step n + stages - 1."""
        self._meet(self.scratch.key_full, n)
        self._copy(item, n + self.tile.stages - 1, tiles[-2], "value")

    def next_keys(self, item: DecodeItem, n: Scalar, tiles: tuple[KeyTile, ...]) -> None:
        """After S of each step: waits for the values of step n, and copies the keys of step n + stages."""
        self._meet(self.scratch.value_full, n)
        self._copy(item, n + self.tile.stages, tiles[-1], "key")

    def _meet(self, full: Ref | None, n: Scalar) -> None:
        """Waits for the tile of step n in a ring, and until all threads have read the other ring's last tile."""
        # groups of cp.async are counted, so only the two places of a step at the top of this file may call this
        stages = self.tile.stages
        self.copies.wait(None if full is None else full.at[slot_of(n, stages)], 2 * stages - 2)

    def key_tile(self, item: DecodeItem, n: Scalar) -> KeyTile:
        """The key tile of step n of the item; that of the last step for a step past it."""
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
        """Begins to copy the packed queries, in the group of the first keys; rows past the last become zeros."""
        source = self.inputs.query.at[item.b, item.kv_head, pl.ds(item.total * 0, ROWS)]
        arrived = None if self.scratch.query_full is None else self.scratch.query_full.at[0]
        self.copies.start(source, target, arrived, i32(self.tile.used_rows))

    def _copy(self, item: DecodeItem, n: Scalar, tile: KeyTile, ring: str) -> None:
        """Begins to copy the keys or values (`ring`) of step n to their free slot, and ends a group of copies."""
        source, target, full = {
            "key": (self.inputs.key, self.scratch.key, self.scratch.key_full),
            "value": (self.inputs.value, self.scratch.value, self.scratch.value_full),
        }[ring]

        def begin() -> None:
            slot = slot_of(n, self.tile.stages)
            arrived = None if full is None else full.at[slot]
            self._copy_tile(source, target.at[slot], arrived, item, tile)

        # the group is empty where the item has no step n
        when(n < item.total)(begin)
        self.copies.commit()

    @property
    def _plain(self) -> bool:
        """Whether slots of keys and values are bytes in row-major order (PlainArray)."""
        return self.tile.stored is not None and not self.tile.transposed

    def _copy_tile(self, source: Ref, target: Ref, arrived: Ref | None, item: DecodeItem, tile: KeyTile) -> None:
        """Begins the copies of a tile into a free slot: one, or one for each part of `page_rows` keys."""
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
                # A part past the last key copies the tile's first part instead: its own page need not exist, and
                # memory that was never written could hold NaN. For a number that is not in the cache, a page past the
                # end of the array is read, where TMA gives zeros.
                inside = key < item.end
                page = lax.select(inside, page, tile.pages[0])
                page = lax.select((page >= 0) & (page < setup.stored_pages), page, i32(setup.stored_pages))
                key, exists = lax.select(inside, key, tile.start), None
            else:
                # cp.async writes zeros for pages that are not in the cache and from `item.end` on
                page = lax.select(stored, page, i32(0))
                exists = lax.select(stored, lax.max(item.end - key, i32(0)), i32(0))
            part = rows_of(source, "BTNH", page, item.kv_head, lax.rem(key, i32(setup.page)), rows)
            self.copies.start(part, target.at[pl.ds(n * rows, rows)], arrived, exists, self._plain)
