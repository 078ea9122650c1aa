"""The work items of the decode kernel: which chunk of keys each CTA sums, and which key tiles of it are visited.

A work item is one chunk of the keys of one key head of one batch entry, for all packed queries of that head. Items are
numbered with the key head fastest, because in the layout BTNH the heads of a key lie side by side in memory, then chunks,
then batch entries. CTA p takes items p, p + P, p + 2 P, ... of P CTAs.

With lengths only the chunks that begin before the end of their batch entry are numbered, so that the work is dealt out evenly
whatever the lengths are. With a block mask the tiles that an item visits come from lists of tiles, made of the mask's block
lists, and only items that visit any are dealt out.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.backends.mosaic_gpu import decode_tiles
from flexjax.backends.mosaic_gpu.decode_tiles import COPY_ROWS, DecodeTile
from flexjax.backends.mosaic_gpu.kernel_parts import Scalar, i32
from flexjax.backends.mosaic_gpu.shared_memory import Part, round_up
from flexjax.block_mask import transpose
from flexjax.plan.kernel_plan import BlockLists, KernelPlan


class DecodeItem(typing.NamedTuple):
    """One work item; int32 scalars.

    b, kv_head   batch entry and key head
    chunk        number of the chunk
    total        key tiles that it visits
    end          keys of the batch entry: those from there on do not exist
    row          row of the tile lists; 0 without them
    """

    b: Scalar
    kv_head: Scalar
    chunk: Scalar
    total: Scalar
    end: Scalar
    row: Scalar


class Work(typing.NamedTuple, typing.Generic[Part]):
    """What items are read from, int32 in global memory; None where the plan does without.

    lengths      [B], keys of each batch entry, at most those of the array
    first        [B + 1], how many chunks the batch entries before one have together
    tile_num     [rows * chunks], how many tiles of each chunk are visited
    tile_index   [rows * chunks * tiles of a chunk], their numbers, ascending; those past tile_num are arbitrary
    visiting     [items], the numbers of the items that visit any tile, ascending; those past `count` are arbitrary
    count        [1], how many these are
    """

    lengths: Part | None
    first: Part | None
    tile_num: Part | None
    tile_index: Part | None
    visiting: Part | None
    count: Part | None


@dataclasses.dataclass(frozen=True)
class DecodeItems:
    """The work items of a call.

    plan      of the call, with its block mask
    tile      the kernel's configuration
    lengths   whether batch entries have lengths of their own
    """

    plan: KernelPlan
    tile: DecodeTile
    lengths: bool

    @property
    def chunks(self) -> int:
        """Chunks of a batch entry of full length."""
        return decode_tiles.chunks(self.plan, self.tile)

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
        """(batch entries, key heads) that have tile lists of their own, 1 for one list for all."""
        blocks = self.plan.blocks
        if blocks is None:
            return 1, 1
        batch = self.plan.batch if blocks.batch > 1 or self.lengths else 1
        return batch, self.plan.kv_heads if blocks.heads > 1 else 1

    @property
    def stored_keys(self) -> int:
        """Rows of keys in memory: those of the plan, rounded up to COPY_ROWS."""
        return round_up(self.plan.kv_len, COPY_ROWS)

    @property
    def tiles_may_overhang(self) -> bool:
        """Whether the columns of some tile lie outside of the attention matrix. The last tile of an array that is no
        multiple of a tile begins earlier instead, so that it ends with the array, unless the array is too short.
        """
        return self.plan.kv_len % COPY_ROWS > 0 or self.stored_keys < self.tile.block_kv

    @property
    def has_limits(self) -> bool:
        """Whether some columns of a tile must be hidden: past the end of the keys, or in the tile before it too."""
        return self.lengths or self.plan.kv_len % self.tile.block_kv > 0

    # ----------------------------------------------------------------- outside the kernel

    def work(self, lengths: jax.Array | None, lists: BlockLists | None) -> Work[jax.Array]:
        """What the items of a call are read from.

        lengths   [B] int32 or None, keys of each batch entry
        lists     the block lists of the plan's block mask
        """
        found = Work(*[None] * len(Work._fields))
        if lengths is not None:
            lengths = jnp.clip(lengths.astype(jnp.int32), 0, self.plan.kv_len)
            found = found._replace(lengths=lengths)
        if lengths is not None and self.plan.blocks is None:
            chunks = (lengths + (self.tile.chunk - 1)) // self.tile.chunk
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
        """Whether any packed row visits a key tile: bool [*list_shape, chunks, tiles of a chunk]."""
        plan, tile, blocks = self.plan, self.tile, self.plan.blocks
        assert blocks is not None
        width = -(-plan.kv_len // blocks.block_kv)
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
        """Whether the items of a chunk visit anything and so have partial results: bool [B or 1, M or 1, chunks]; None
        if all do.
        """
        if work.tile_num is not None:
            return work.tile_num.reshape(*self.list_shape, self.chunks) > 0
        if work.lengths is not None:
            return (jnp.arange(self.chunks, dtype=jnp.int32) * self.tile.chunk < work.lengths[:, None])[:, None]
        return None

    # ----------------------------------------------------------------- in the kernel

    def turns(self, work: Work) -> Scalar:
        """How many items this CTA takes."""
        items = i32(self.most)
        if work.count is not None:
            items = work.count[0]
        elif work.first is not None:
            items = work.first[self.plan.batch] * i32(self.plan.kv_heads)
        left = items - lax.axis_index("program") + i32(self.programs - 1)
        return lax.div(lax.max(left, i32(0)), i32(self.programs))

    def item(self, work: Work, turn: Scalar) -> DecodeItem:
        """The item number `turn` of this CTA."""
        plan, tile = self.plan, self.tile
        number = turn * self.programs + lax.axis_index("program")
        if work.visiting is not None:
            number = work.visiting[number]
        kv_head, rest = lax.rem(number, i32(plan.kv_heads)), lax.div(number, i32(plan.kv_heads))
        if work.first is None:
            b, chunk = lax.div(rest, i32(self.chunks)), lax.rem(rest, i32(self.chunks))
        else:
            b = self._entry(work.first, rest)
            chunk = rest - work.first[b]
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
        return DecodeItem(b, kv_head, chunk, total, end, row)

    def _entry(self, first: typing.Any, number: Scalar) -> Scalar:
        """The batch entry that has chunk `number`, counted over all batch entries: the last whose first chunk is not
        beyond it. A binary search.
        """
        found, step = i32(0), 1 << (self.plan.batch - 1).bit_length()
        while step > 1:
            step //= 2
            candidate = lax.min(found + step, i32(self.plan.batch - 1))
            found = jnp.where(first[candidate] <= number, candidate, found)
        return found

    @staticmethod
    def next_step(first_step: Scalar, item: DecodeItem) -> Scalar:
        """The number of the first step of the item after `item`, whose own is `first_step`: even, so that the warpgroup
        that waits for a slot of the rings is the same each time. A thread counts the phases of a barrier by its own waits.
        """
        return first_step + item.total + (item.total & i32(1))

    def tile_number(self, work: Work, item: DecodeItem, step: Scalar) -> Scalar:
        """The number of the key tile that the item visits at `step`, counted from the first key."""
        if work.tile_index is not None:
            return work.tile_index[item.row * self.tile.tiles_of_chunk + step]
        return item.chunk * self.tile.tiles_of_chunk + step

    def start(self, number: Scalar) -> Scalar:
        """The first key in the slot of key tile `number`: the last tile of the array begins earlier where the array is
        no multiple of a tile, so that it ends with the array.
        """
        start = number * self.tile.block_kv
        if self.stored_keys % self.tile.block_kv == 0:
            return start
        return lax.min(start, i32(max(0, self.stored_keys - self.tile.block_kv)))
