"""The work items of the decode kernel: which chunk of keys each CTA sums, and which key tiles of it are visited.

A work item is one chunk of the keys of one key head of one batch entry, for all packed queries of that head. Items are
numbered with the key head fastest, because in the layout BTNH the heads of a key lie side by side in memory, then
chunks, then batch entries. CTA p takes items p, p + P, p + 2 P, ... of P CTAs.

Batch entries with many packed rows over pages are tiles of the queries of one request, or of requests that share a
prefix (paged/rows.py). There chunks are numbered first and batch entries within them (`chunks_first`), so that CTAs
read the same keys at the same time, all but one of them from the L2.

With lengths only the chunks that begin before the end of their batch entry are numbered, so that CTAs get equally many
whatever the lengths are; with an interval of visible keys (intervals.py), only those from its first key on. With
another block mask the tiles that an item visits come from lists of tiles, made from the mask's block lists, and CTAs
take only items that visit a tile.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import DecodeTile
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Scalar, i32
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.block_mask import transpose
from flexjax.integers import cdiv, round_up
from flexjax.plan.kernel_plan import BlockLists, KernelPlan


class DecodeItem(typing.NamedTuple):
    """One work item."""

    b: Scalar  # batch entry
    kv_head: Scalar
    chunk: Scalar  # number of the chunk in the batch entry
    total: Scalar  # how many key tiles it visits
    end: Scalar  # the batch entry's keys from this number on do not exist, or are hidden from all its queries
    row: Scalar  # number of its list in `Work.tile_num` and `Work.tile_index`
    skipped: Scalar  # key tiles of the chunk before the first that it visits; 0 with tile lists


class Work(typing.NamedTuple, typing.Generic[Part]):
    """The arrays from which the kernel reads its work items, int32 in global memory.

    Lists of tiles exist for a block mask that is no interval, over the batch entries and key heads with lists (`rows`).
    """

    lengths: Part | None  # [B] `DecodeItem.end`, at most the keys of the array; None if all exist
    begin: Part | None  # [B] the first key tile that each batch entry visits; None: 0
    # [B + 1] chunks of all batch entries before this one; with `order` [chunks + 1], batch entries of all chunks before
    first: Part | None
    order: Part | None  # [B] the batch entries, those with most chunks first (`DecodeItems.chunks_first`)
    tile_num: Part | None  # [rows * chunks] how many tiles of each chunk are visited
    tile_index: Part | None  # [rows * chunks * tiles of a chunk] ascending; those past tile_num are arbitrary
    visiting: Part | None  # [items] the items that visit any tile, ascending; those past `count` are arbitrary
    count: Part | None  # [1] how many items visit any tile


@dataclasses.dataclass(frozen=True)
class DecodeItems:
    """The work items of a call."""

    plan: KernelPlan  # without its block mask where the visible keys of each batch entry are an interval (intervals.py)
    tile: DecodeTile
    lengths: bool  # whether each batch entry has an end of its own (`DecodeItem.end`)

    @property
    def chunks(self) -> int:
        """Chunks of the keys of a batch entry of full length."""
        return decode_hopper_tiles.chunks(self.plan, self.tile)

    @property
    def most(self) -> int:
        """Number of items of the call, at full lengths."""
        return self.plan.batch * self.plan.kv_heads * self.chunks

    @property
    def programs(self) -> int:
        """Number of CTAs of the grid."""
        return min(self.most, self.tile.programs)

    @property
    def list_shape(self) -> tuple[int, int]:
        """(batch entries, key heads) that have tile lists of their own; 1 on an axis where one list serves all."""
        blocks = self.plan.blocks
        if blocks is None:
            return 1, 1
        batch = self.plan.batch if blocks.batch > 1 or self.lengths else 1
        return batch, self.plan.kv_heads if blocks.heads > 1 else 1

    @property
    def stored_keys(self) -> int:
        """The keys of the plan, rounded up to the `copy_rows` of the tile: where the last tile ends."""
        return round_up(self.plan.kv_len, self.tile.copy_rows)

    @property
    def tiles_may_overhang(self) -> bool:
        """Whether some key tile reaches past the last key of the plan, even if it begins earlier (`start`)."""
        return self.plan.kv_len % self.tile.copy_rows > 0 or self.stored_keys < self.tile.block_kv

    @property
    def chunks_first(self) -> bool:
        """Whether items are numbered by chunks first, for many packed rows over pages."""
        return self.plan.page > 0 and self.tile.used_rows >= decode_hopper_tiles.FEW_ROWS and self.plan.batch > 1

    @property
    def has_limits(self) -> bool:
        """Whether keys of a tile may have to be hidden: past `DecodeItem.end`, or of the tile before (`start`)."""
        return self.lengths or self.plan.kv_len % self.tile.block_kv > 0

    # ----------------------------------------------------------------- outside the kernel

    def work(
        self, lengths: jax.Array | None, lists: BlockLists | None, first: jax.Array | None = None
    ) -> Work[jax.Array]:
        """The arrays from which the kernel reads its work items, computed by XLA before the kernel.

        `lengths` is `DecodeItem.end` of each batch entry, [B], None exactly where the field `lengths` is False; `first`
        the first visible key, [B].
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
        """Whether each key tile has a key that the block lists name: [*list_shape, chunks, tiles of a chunk]."""
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
        """Which chunks have a partial result: bool [B or 1, M or 1, chunks]; None if all have one."""
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
        """The last chunk with a partial result, int32 [B or 1, M or 1, 1]; any chunk where there is none."""
        # arithmetic that XLA fuses with the merge; a maximum over `live` is a kernel of its own
        if work.tile_num is None and work.lengths is not None:
            return jnp.maximum(work.lengths - 1, 0)[:, None, None] // self.tile.chunk
        return jnp.where(live, jnp.arange(self.chunks, dtype=jnp.int32), 0).max(-1, keepdims=True)

    # ----------------------------------------------------------------- in the kernel

    def turns(self, work: Work) -> Scalar:
        """How many work items this CTA takes, read inside the kernel."""
        items = i32(self.most)
        if work.count is not None:
            items = work.count[0]
        elif work.first is not None:
            items = work.first[self.chunks if work.order is not None else self.plan.batch] * i32(self.plan.kv_heads)
        left = items - lax.axis_index("program") + i32(self.programs - 1)
        return lax.div(lax.max(left, i32(0)), i32(self.programs))

    def item(self, work: Work, turn: Scalar) -> DecodeItem:
        """The work item that is number `turn`, from 0, of this CTA; read inside the kernel."""
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
        """The last index below `size` with first[index] <= number, by a binary search; `first` ascends from 0."""
        found, step = i32(0), 1 << (size - 1).bit_length()
        while step > 1:
            step //= 2
            candidate = lax.min(found + step, i32(size - 1))
            found = jnp.where(first[candidate] <= number, candidate, found)
        return found

    @staticmethod
    def next_step(first_step: Scalar, item: DecodeItem) -> Scalar:
        """The number, counted over the items of this CTA, of the first step of the item after `item`."""
        # First steps are even, so that the same warpgroup always reads a slot of the rings: a thread knows the phase of
        # a barrier only from its own waits at it.
        return first_step + item.total + (item.total & i32(1))

    def tile_number(self, work: Work, item: DecodeItem, step: Scalar) -> Scalar:
        """The number of the key tile that the item visits at `step`, from the first key of the batch entry on."""
        if work.tile_index is not None:
            return work.tile_index[item.row * self.tile.tiles_of_chunk + step]
        return item.chunk * self.tile.tiles_of_chunk + item.skipped + step

    def start(self, number: Scalar) -> Scalar:
        """The first key that is copied for a key tile; the last tile begins earlier, to end with the stored keys.

        The caller hides the keys that the tile before it has too. An array shorter than a tile is copied from key 0.
        """
        start = number * self.tile.block_kv
        if self.stored_keys % self.tile.block_kv == 0:
            return start
        return lax.min(start, i32(max(0, self.stored_keys - self.tile.block_kv)))
