"""The work items of the decode kernel: which chunk of keys each CTA sums, and which key tiles of it are visited.

A work item is one chunk of the keys of one key head of one batch entry, for all packed queries of that head. Items are
numbered with the key head fastest, because in the layout BTNH the heads of a key lie side by side in memory, then chunks,
then batch entries. CTA p takes items p, p + P, p + 2 P, ... of P CTAs.

Batch entries with many packed rows over pages are tiles of the queries of one request, or of requests that share a prefix
(paged_rows.py): they read the same pages. There chunks are numbered first and batch entries within them (`chunks_first`), so that
CTAs read the same keys at the same time, all but one of them from the L2.

With lengths only the chunks that begin before the end of their batch entry are numbered, so that CTAs get equally many
whatever the lengths are; with an interval of visible keys (decode_intervals.py), only those from its first key on. With another
block mask the tiles that an item visits come from lists of tiles, made from the mask's block lists, and CTAs take only items
that visit a tile.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu import decode_tiles
from flexjax.backends.mosaic_gpu.decode_tiles import DecodeTile
from flexjax.backends.mosaic_gpu.kernel_parts import Scalar, i32
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.block_mask import transpose
from flexjax.integers import cdiv, round_up
from flexjax.plan.kernel_plan import BlockLists, KernelPlan


class DecodeItem(typing.NamedTuple):
    """One work item; int32 scalars.

    b, kv_head   batch entry and key head
    chunk        number of the chunk in the batch entry
    total        how many key tiles it visits
    end          keys of the batch entry from this number on do not exist or, where its visible keys are an interval
                 (decode_intervals.py), are hidden from all its queries
    row          number of its list in `Work.tile_num` and `Work.tile_index`; 0 without a block mask
    skipped      key tiles of the chunk before the first that it visits; 0 with tile lists
    """

    b: Scalar
    kv_head: Scalar
    chunk: Scalar
    total: Scalar
    end: Scalar
    row: Scalar
    skipped: Scalar


class Work(typing.NamedTuple, typing.Generic[Part]):
    """The arrays from which the kernel reads its work items, int32 in global memory.

    lengths   [B], `DecodeItem.end` of each batch entry, at most the keys of the array; None if all exist
    begin     [B], the number of the first key tile that each batch entry visits; None if that is 0
    first     [B + 1], how many chunks all batch entries before this one have; with `order` [chunks + 1], how many batch entries all
              chunks before this one have. None without lengths or with lists of tiles
    order     [B], the batch entries from the one with most chunks to that with fewest, where items are numbered by chunks first
              (`DecodeItems.chunks_first`); else None

    None without a block mask that has lists of tiles, otherwise over all batch entries and key heads that have lists of their own
    (`rows`):

    tile_num     [rows * chunks], how many tiles of each chunk are visited
    tile_index   [rows * chunks * tiles of a chunk], the numbers of these tiles, ascending; those past tile_num are arbitrary
    visiting     [items], the numbers of the items that visit any tile, ascending; those past `count` are arbitrary
    count        [1], how many items visit any tile
    """

    lengths: Part | None
    begin: Part | None
    first: Part | None
    order: Part | None
    tile_num: Part | None
    tile_index: Part | None
    visiting: Part | None
    count: Part | None


@dataclasses.dataclass(frozen=True)
class DecodeItems:
    """The work items of a call.

    plan      of the call; without its block mask where the visible keys of each batch entry are an interval (decode_intervals.py)
    tile      the kernel's configuration
    lengths   whether each batch entry has an end of its own (`DecodeItem.end`): lengths, or an interval of visible keys
    """

    plan: KernelPlan
    tile: DecodeTile
    lengths: bool

    @property
    def chunks(self) -> int:
        """Chunks of the keys of a batch entry of full length."""
        return decode_tiles.chunks(self.plan, self.tile)

    @property
    def most(self) -> int:
        """Number of items of the call, at full lengths."""
        return self.plan.batch * self.plan.kv_heads * self.chunks

    @property
    def programs(self) -> int:
        """Number of CTAs of the grid: `tile.programs`, or the number of items (`most`) if that is smaller."""
        return min(self.most, self.tile.programs)

    @property
    def list_shape(self) -> tuple[int, int]:
        """(batch entries, key heads) that have tile lists of their own; 1 on an axis where one list serves all, as without a block mask.
        With lengths each batch entry has its own.
        """
        blocks = self.plan.blocks
        if blocks is None:
            return 1, 1
        batch = self.plan.batch if blocks.batch > 1 or self.lengths else 1
        return batch, self.plan.kv_heads if blocks.heads > 1 else 1

    @property
    def stored_keys(self) -> int:
        """The keys of the plan, rounded up to the `copy_rows` of the tile: where the last tile ends. The array has as many
        rows in the simulator; on the device it has those of the plan, and copies give zeros for the others.
        """
        return round_up(self.plan.kv_len, self.tile.copy_rows)

    @property
    def tiles_may_overhang(self) -> bool:
        """Whether some key tile reaches past the last key of the plan: where the array is shorter than a tile, or no multiple
        of `copy_rows`. A last tile that would reach past the array begins earlier (`start`), so that it ends with the array, if
        the array has as many keys as a tile.
        """
        return self.plan.kv_len % self.tile.copy_rows > 0 or self.stored_keys < self.tile.block_kv

    @property
    def chunks_first(self) -> bool:
        """Whether items are numbered by chunks and, within a chunk, by batch entries: for many packed rows over pages, whose batch entries
        read the same pages. It applies only to a call with lengths, without a block mask, whose entries see keys from 0 on (`work`).
        """
        return self.plan.page > 0 and self.tile.used_rows >= decode_tiles.FEW_ROWS and self.plan.batch > 1

    @property
    def has_limits(self) -> bool:
        """Whether keys of a tile may have to be hidden: those from `DecodeItem.end` on, and in a last tile that begins earlier (`start`)
        those that the tile before it has visited.
        """
        return self.lengths or self.plan.kv_len % self.tile.block_kv > 0

    # ----------------------------------------------------------------- outside the kernel

    def work(
        self, lengths: jax.Array | None, lists: BlockLists | None, first: jax.Array | None = None
    ) -> Work[jax.Array]:
        """The arrays from which the kernel reads its work items, computed by XLA before the kernel.

        lengths   [B] int32, `DecodeItem.end` of each batch entry, clipped here to 0 and the keys of the array; None: all exist. None
                  exactly where the field `lengths` is False
        lists     the block lists of the plan's block mask; None without one
        first     [B] int32: the first visible key of each batch entry, for a plan without a block mask and beside `lengths`; None: 0
        """
        found = Work(*[None] * len(Work._fields))
        if lengths is not None:
            lengths = jnp.clip(lengths.astype(jnp.int32), 0, self.plan.kv_len)
            found = found._replace(lengths=lengths)
        if lengths is not None and self.plan.blocks is None:
            chunks = (lengths + (self.tile.chunk - 1)) // self.tile.chunk
            if first is not None:
                begin = first.astype(jnp.int32) // self.tile.block_kv
                found = found._replace(begin=begin)
                chunks = jnp.maximum(chunks - begin // self.tile.tiles_of_chunk, 0)
            if first is None and self.chunks_first:
                order = jnp.argsort(-chunks, stable=True).astype(jnp.int32)
                number = np.arange(self.chunks + 1, dtype=np.int32)[:, None]
                return found._replace(first=jnp.minimum(chunks, number).sum(1, dtype=jnp.int32), order=order)
            entry = np.arange(self.plan.batch)
            before = np.arange(self.plan.batch + 1)[:, None] > entry[None, :]  # a sum that XLA fuses with what it reads
            found = found._replace(first=jnp.where(before, chunks, 0).sum(1, dtype=jnp.int32))
        if self.plan.blocks is not None:
            assert lists is not None
            visited = self._visited(lists, lengths)
            number = visited.sum(-1, dtype=jnp.int32)
            index = jnp.argsort(~visited, axis=-1, stable=True).astype(jnp.int32)
            index = index + np.arange(self.chunks, dtype=np.int32)[:, None] * np.int32(self.tile.tiles_of_chunk)
            found = found._replace(tile_num=number.reshape(-1), tile_index=index.reshape(-1))
            shape = (self.plan.batch, self.chunks, self.plan.kv_heads)
            visits = jnp.broadcast_to(jnp.swapaxes(number > 0, 1, 2), shape).reshape(-1)
            items = np.arange(self.most, dtype=np.int32)
            order = jnp.sort(jnp.where(visits, items, items + np.int32(self.most)))
            found = found._replace(visiting=order, count=visits.sum(dtype=jnp.int32)[None])
        return found

    def _visited(self, lists: BlockLists, lengths: jax.Array | None) -> jax.Array:
        """Whether the block lists name any key of each key tile for any packed row, and the tile has keys that exist: bool [*list_shape,
        chunks, tiles of a chunk].

        lists     the block lists of the plan's block mask, with partial and full blocks; mask blocks may be of any size beside a tile
        lengths   [B] int32, keys of each batch entry, with which tiles that begin at or past them are False; None: all keys exist
        """
        plan, tile, blocks = self.plan, self.tile, self.plan.blocks
        assert blocks is not None
        width = cdiv(plan.kv_len, blocks.block_kv)
        flags = jnp.zeros((blocks.batch, blocks.heads, 1, width), jnp.bool_)
        for number, index in ((lists.partial_num, lists.partial_index), (lists.full_num, lists.full_index)):
            if number is not None and index is not None:
                flags = flags | transpose.flags_of_lists(number, index, width).astype(jnp.bool_)
        flags = flags.any(2)
        if blocks.heads > 1:
            flags = flags.reshape(blocks.batch, plan.kv_heads, plan.group, width).any(2)
        start = np.arange(self.chunks * tile.tiles_of_chunk) * tile.block_kv
        exists = start < plan.kv_len
        first = np.minimum(start, plan.kv_len - 1) // blocks.block_kv
        last = np.minimum(start + tile.block_kv - 1, plan.kv_len - 1) // blocks.block_kv
        covered = np.minimum(
            first[:, None] + np.arange(int((last - first).max()) + 1), np.maximum(first, last)[:, None]
        )
        visited = flags[..., covered].any(-1) & exists
        if lengths is not None:
            visited = visited & (start < lengths[:, None, None])
        return visited.reshape(*visited.shape[:2], self.chunks, tile.tiles_of_chunk)

    def live(self, work: Work[jax.Array]) -> jax.Array | None:
        """Whether there is a work item of each batch entry, key head and chunk, and so a partial result: bool [B or 1, M or 1, chunks], 1
        where all batch entries or heads agree; None if all have one. A work item of an entry whose interval of visible keys is empty may
        visit no tile; its partial result is that of no visible key.

        work   from the method `work`
        """
        if work.tile_num is not None:
            return work.tile_num.reshape(*self.list_shape, self.chunks) > 0
        if work.lengths is None:
            return None
        chunk = jnp.arange(self.chunks, dtype=jnp.int32)
        found = chunk * self.tile.chunk < work.lengths[:, None]
        if work.begin is not None:
            found = found & (chunk >= work.begin[:, None] // self.tile.tiles_of_chunk)
        return found[:, None]

    def last(self, work: Work[jax.Array], live: jax.Array) -> jax.Array:
        """The number of the last chunk with a partial result, int32 [B or 1, M or 1, 1]; any chunk where there is none. From lengths it is
        arithmetic that XLA fuses with the merge; a maximum over `live` is a kernel of its own.

        work   from the method `work`
        live   what the method `live` returns
        """
        if work.tile_num is None and work.lengths is not None:
            return jnp.maximum(work.lengths - 1, 0)[:, None, None] // self.tile.chunk
        return jnp.where(live, jnp.arange(self.chunks, dtype=jnp.int32), 0).max(-1, keepdims=True)

    # ----------------------------------------------------------------- in the kernel

    def turns(self, work: Work) -> Scalar:
        """How many work items this CTA takes, an int32 scalar, read inside the kernel; `item` describes number 0 to this number - 1.
        It is 0 for a CTA without items.

        work   from the method `work`, as Refs

        The items that exist (`Work.count` with lists of tiles, the last number of `Work.first` times the key heads with lengths,
        otherwise `most`) go round the `programs` CTAs of the grid: CTA p takes items p, p + programs, and so on.
        """
        items = i32(self.most)
        if work.count is not None:
            items = work.count[0]
        elif work.first is not None:
            items = work.first[self.chunks if work.order is not None else self.plan.batch] * i32(self.plan.kv_heads)
        left = items - lax.axis_index("program") + i32(self.programs - 1)
        return lax.div(lax.max(left, i32(0)), i32(self.programs))

    def item(self, work: Work, turn: Scalar) -> DecodeItem:
        """The work item that is number `turn`, from 0, of this CTA; read inside the kernel.

        work   from the method `work`, as Refs
        """
        plan, tile = self.plan, self.tile
        number = turn * self.programs + lax.axis_index("program")
        if work.visiting is not None:
            number = work.visiting[number]
        kv_head, rest = lax.rem(number, i32(plan.kv_heads)), lax.div(number, i32(plan.kv_heads))
        if work.first is None:
            b, chunk = lax.div(rest, i32(self.chunks)), lax.rem(rest, i32(self.chunks))
        elif work.order is not None:
            chunk = self._last_before(work.first, self.chunks, rest)
            b = work.order[rest - work.first[chunk]]
        else:
            b = self._last_before(work.first, self.plan.batch, rest)
            chunk = rest - work.first[b]
        skipped = i32(0)
        if work.begin is not None:
            begin = work.begin[b]
            chunk = chunk + lax.div(begin, i32(tile.tiles_of_chunk))
            skipped = lax.max(begin - chunk * tile.tiles_of_chunk, i32(0))
        end = i32(plan.kv_len) if work.lengths is None else work.lengths[b]
        row = i32(0)
        if work.tile_num is not None:
            batch, heads = self.list_shape
            at = (b if batch > 1 else i32(0)) * heads + (kv_head if heads > 1 else i32(0))
            row = at * self.chunks + chunk
            total = work.tile_num[row]
        else:
            left = end - chunk * tile.chunk + i32(tile.block_kv - 1)
            total = lax.min(lax.div(left, i32(tile.block_kv)), i32(tile.tiles_of_chunk))
            if work.begin is not None:
                total = lax.max(total - skipped, i32(0))
        return DecodeItem(b, kv_head, chunk, total, end, row, skipped)

    @staticmethod
    def _last_before(first: typing.Any, size: int, number: Scalar) -> Scalar:
        """The last index below `size` with first[index] <= number, by a binary search inside the kernel.

        first   a Ref whose numbers ascend from 0, `Work.first`
        """
        found, step = i32(0), 1 << (size - 1).bit_length()
        while step > 1:
            step //= 2
            candidate = lax.min(found + step, i32(size - 1))
            found = jnp.where(first[candidate] <= number, candidate, found)
        return found

    @staticmethod
    def next_step(first_step: Scalar, item: DecodeItem) -> Scalar:
        """The number, counted over the items of this CTA, of the first step of the item after `item`.

        first_step   the number of the first step of `item`

        An item with an odd number of steps is followed by an unused number, so that first steps are even: a slot of the
        rings is then always read by the same warpgroup. That is necessary because a thread knows the phase of a barrier
        only from its own waits at it.
        """
        return first_step + item.total + (item.total & i32(1))

    def tile_number(self, work: Work, item: DecodeItem, step: Scalar) -> Scalar:
        """The number of the key tile that the item visits at `step`; tiles are numbered from the first key of the batch
        entry on.

        work   from the method `work`, as Refs
        step   0 to item.total - 1
        """
        if work.tile_index is not None:
            return work.tile_index[item.row * self.tile.tiles_of_chunk + step]
        return item.chunk * self.tile.tiles_of_chunk + item.skipped + step

    def start(self, number: Scalar) -> Scalar:
        """The number, from the beginning of the array, of the first key that is copied for a key tile, an int32 scalar.

        number   of the key tile, counted from the beginning of the array (`tile_number`)

        It is number * block_kv, except in the last tile of an array whose `stored_keys` are no multiple of block_kv. That tile begins
        earlier, so that it ends with the stored keys, which are those of the plan rounded up to `copy_rows`; the caller hides the
        keys that the tile before it has too. An array shorter than a tile is copied from key 0, and the tile reaches past it.
        """
        start = number * self.tile.block_kv
        if self.stored_keys % self.tile.block_kv == 0:
            return start
        return lax.min(start, i32(max(0, self.stored_keys - self.tile.block_kv)))
