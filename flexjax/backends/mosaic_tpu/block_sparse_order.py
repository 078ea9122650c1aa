"""Visits only the tiles that block lists name, from one ragged list in SMEM.

The visited tiles of all tile rows follow one another in the list; the launch prefetches it to SMEM, and its length,
known at run time, bounds the grid. So an empty tile costs neither a grid step nor a copy. A tile row without any tile
keeps one idle visit, which writes zeros and names the tile of the visit before it, so that nothing is copied. The list
covers the batch and head dimensions that the block mask has; those over which it broadcasts are plain grid dimensions.

    rows     int32 [visits]              the tile row: (batch, head, tile) in row-major order, over all launches
    packed   int32 [visits]              column | kind << 26 | first << 28 | last << 29 | another visit follows << 30
    bits     int32 [2 * words, visits]   for each word, the blocks of the tile that are on, then those that are full

The two bit sets exist where a tile holds several blocks of the mask; blocks are "on" if they are partial or full. Lists
that do not fit SMEM are cut into chunks of whole tile rows; the kernel runs once a chunk, and each launch writes its
rows of the outputs in place.

A tile row is one query tile with its key tiles, or in a key-major order one key tile with its query tiles; columns
number its tiles.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.list_shape import block_layout, list_shape
from flexjax.backends.mosaic_tpu.tile_programs import Strip
from flexjax.backends.mosaic_tpu.visit_order import EDGE, FULL, IDLE, PARTIAL, DenseOrder, TileVisit, VisitOrder
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Operands
from flexjax.plan.lengths import NONE

_COLUMN_BITS = 26  # bits of an entry of `packed` that hold the tile column


def make_order(plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool, operands: Operands) -> VisitOrder:
    """The order of a kernel's visits: dense without block lists and lengths, block-sparse with them."""
    if block_layout(plan, geometry) is None:
        return DenseOrder(plan, geometry, group, key_major)
    return BlockSparseOrder(plan, geometry, group, key_major, operands)


class BlockSparseOrder(VisitOrder):
    """The visits that the block lists name (without block lists: all), without tiles past a length.

    Grid: (b, h, visits), or (b, key head, visits, group member) if key-major; b and heads are 1 where the lists have
    that dimension.
    """

    prefetched = 3

    def __init__(self, plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool, operands: Operands):
        """Computes the kind and the bit sets of every tile, from which `prefetch_arrays` makes the visit lists."""
        self.geometry, self.group, self.key_major = geometry, group, key_major
        blocks, g = block_layout(plan, geometry), geometry
        assert blocks is not None
        self.blocks = blocks
        self.list_batch, self.list_heads = blocks.batch, blocks.heads
        self.overhang = bool(g.kv_len % g.block_kv or g.q_len % g.block_q or any(plan.lengths))
        self.kinds = frozenset({IDLE, FULL, PARTIAL, EDGE})
        self.shape = list_shape(plan, geometry, group, key_major)
        # mask blocks of a tile (along q, along kv)
        self.sub_blocks, self.words = self.shape.sub_blocks, self.shape.words
        self.block_rows_per_word = max(1, 32 // self.sub_blocks[1])  # rows of mask blocks in a word
        # (queries, keys) of a mask block, or of the tile where that is smaller
        self.block_sizes = (min(blocks.block_q, g.block_q), min(blocks.block_kv, g.block_kv))

        kind, on, full = self._tile_states(plan, operands)
        if key_major:
            kind, on, full = (self._transposed(x) for x in (kind, on, full))
        # heads of the visit lists: key heads if the lists of a group are joined
        _, self.row_heads, self.tile_rows, self.columns = kind.shape
        rows = self.shape.rows
        self.chunks = self.shape.launches
        # tile rows are padded to a whole number of launches
        padding = self.chunks * self.shape.rows_per_launch - rows
        flat = lambda x: jnp.pad(x.reshape(rows, self.columns), ((0, padding), (0, 0)))
        self._kinds = flat(kind)
        self._on = [flat(w) for w in jnp.moveaxis(on, -1, 0)]
        self._full = [flat(w) for w in jnp.moveaxis(full, -1, 0)]
        self.arrays = (self._kinds, *self._on, *self._full)

    # ------------------------------------------------------------------ what each tile is, from the block lists

    def _tile_states(self, plan: KernelPlan, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(kinds, bits of blocks that are on, bits of full blocks) of all tiles, from block lists and lengths.

        Kinds are those of visit_order.py, int32 [list batch, list heads, q tiles, kv tiles]; a tile past a length is
        IDLE. The bit sets are int32 with one more dimension, of `words`, which may be 0.
        """
        g = self.geometry
        marks = self._sub_block_marks(plan, operands.lists)
        some, every = jnp.any(marks > 0, (3, 5)), jnp.all(marks == 2, (3, 5))
        over = jnp.zeros((g.q_tiles, g.kv_tiles), bool)
        if g.q_len % g.block_q:
            over = over.at[-1, :].set(True)
        if g.kv_len % g.block_kv:
            over = over.at[:, -1].set(True)
        for length, tiles, block, shape in zip(
            operands.lengths or NONE, (g.q_tiles, g.kv_tiles), (g.block_q, g.block_kv), ((-1, 1), (1, -1)), strict=True
        ):
            if length is not None:
                starts = (jnp.arange(tiles, dtype=jnp.int32) * block).reshape(1, 1, *shape)
                ends = length[:, None, None, None]
                over = over | (starts + block > ends)
                some, every = (x & (starts < ends) for x in (some, every))
        kind = jnp.where(every, FULL, jnp.where(some, PARTIAL, IDLE))
        kind = jnp.where(every & over, EDGE, kind).astype(jnp.int32)
        c = self.sub_blocks[1]
        words_on, words_full = [], []
        for w in range(self.words):
            rows = marks[:, :, :, w * self.block_rows_per_word : (w + 1) * self.block_rows_per_word]
            bit = jnp.arange(rows.shape[3], dtype=jnp.uint32)[:, None, None] * np.uint32(c) + jnp.arange(
                c, dtype=jnp.uint32
            )
            for words, hit in ((words_on, rows > 0), (words_full, rows == 2)):
                bits = jnp.where(hit, jnp.uint32(1) << bit, jnp.uint32(0)).sum((3, 5), dtype=jnp.uint32)
                words.append(lax.bitcast_convert_type(bits, jnp.int32))
        empty = jnp.zeros((*kind.shape, 0), jnp.int32)
        pack = lambda words: jnp.stack(words, -1) if words else empty
        return kind, pack(words_on), pack(words_full)

    def _sub_block_marks(self, plan: KernelPlan, lists: BlockLists | None) -> jax.Array:
        """The mark of each mask block of each tile, int8 [list batch, list heads, q tiles, r, kv tiles, c].

        Marks are 0 for empty, 1 for partial and 2 for full blocks, and 0 past the last block of the mask. A tile inside
        a larger block has that block's mark.
        """
        blocks, g = self.blocks, self.geometry
        q_blocks, kv_blocks = cdiv(g.q_len, blocks.block_q), cdiv(g.kv_len, blocks.block_kv)
        if lists is None:  # with lengths alone, every tile is a block
            marks = jnp.full((blocks.batch, blocks.heads, q_blocks, kv_blocks), 1 if blocks.partial else 2, jnp.int8)
            return marks[:, :, :, None, :, None]
        list_batch = blocks.batch if plan.blocks is None else plan.blocks.batch
        marks = jnp.zeros((list_batch, blocks.heads, q_blocks, kv_blocks), jnp.int8)
        pairs = ((lists.partial_num, lists.partial_index, 1), (lists.full_num, lists.full_index, 2))
        for count, index, mark in pairs:
            if count is not None and index is not None and index.shape[-1]:
                marks = _mark(marks, count, index, mark)
        marks = jnp.broadcast_to(marks, (blocks.batch, *marks.shape[1:]))
        r, c = self.sub_blocks
        for dim, tile, block, tiles in (
            (2, g.block_q, blocks.block_q, g.q_tiles),
            (3, g.block_kv, blocks.block_kv, g.kv_tiles),
        ):
            if block > tile:
                marks = lax.slice_in_dim(jnp.repeat(marks, block // tile, axis=dim), 0, tiles, axis=dim)
        pads = [(0, 0), (0, 0), (0, g.q_tiles * r - marks.shape[2]), (0, g.kv_tiles * c - marks.shape[3])]
        return jnp.pad(marks, pads).reshape(blocks.batch, blocks.heads, g.q_tiles, r, g.kv_tiles, c)

    def _transposed(self, x: jax.Array) -> jax.Array:
        """From [batch, heads, q tiles, kv tiles, ...] to [batch, key heads, kv tiles, group * q tiles, ...].

        If all query heads share their lists, heads are 1 and the group counts as 1.
        """
        b, n, q, k = x.shape[:4]
        members = self.group if self.list_heads > 1 else 1
        x = x.reshape(b, n // members, members, q, k, *x.shape[4:])
        x = jnp.moveaxis(x, 4, 2)
        return x.reshape(b, n // members, k, members * q, *x.shape[5:])

    # ------------------------------------------------------------------ the lists of a chunk

    def prefetch_arrays(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The visit lists (rows, packed, bits) of a launch, and its number of visits."""
        rows_per_launch = self.shape.rows_per_launch
        take = lambda x: lax.dynamic_slice_in_dim(x, chunk * rows_per_launch, rows_per_launch, 0)
        if self.chunks == 1:
            take = lambda x: x
        kinds = take(self._kinds)
        real = jnp.arange(rows_per_launch) + chunk * rows_per_launch < self.shape.rows
        on = kinds > 0
        empty = ~jnp.any(on, axis=1) & real
        visited = (on & real[:, None]).at[:, 0].set(jnp.where(empty, True, (on & real[:, None])[:, 0]))
        flat = visited.reshape(-1)
        size = rows_per_launch * self.shape.longest_row
        (tile,) = jnp.nonzero(flat, size=size, fill_value=0)
        tile = tile.astype(jnp.int32)
        count = jnp.sum(flat, dtype=jnp.int32)
        row, column = tile // np.int32(self.columns), tile % np.int32(self.columns)
        kind = kinds.reshape(-1)[tile]
        at = jnp.arange(size, dtype=jnp.int32)
        # An idle visit names the column of the last visit before it that is not idle.
        source = lax.cummax(jnp.where(kind > 0, at, 0))
        column = column[source]
        before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), row[:-1]])
        after = jnp.concatenate([row[1:], jnp.full((1,), -1, jnp.int32)])
        first = (row != before).astype(jnp.int32)
        last = ((row != after) | (at == count - 1)).astype(jnp.int32)
        follows = (at < count - 1).astype(jnp.int32)
        packed = column | (kind << _COLUMN_BITS) | (first << 28) | (last << 29) | (follows << 30)
        row = row + jnp.asarray(chunk * rows_per_launch, jnp.int32)
        words = [take(w).reshape(-1)[tile] for pair in zip(self._on, self._full, strict=True) for w in pair]
        # without bit sets, `bits` is a placeholder
        bits = jnp.stack(words).astype(jnp.int32) if words else jnp.zeros((1, 1), jnp.int32)
        return (row, packed, bits), count

    def grid(self, visits: jax.Array | None) -> tuple:
        """(b, h, visits), or (b, key head, visits, group member); `visits`, int32 [], is known at run time."""
        g = self.geometry
        # The lists enumerate the dimensions that they have.
        batch = g.batch if self.list_batch == 1 else 1
        if self.key_major:
            members = self.group if self.list_heads == 1 else 1
            return (batch, g.heads // self.group if self.list_heads == 1 else 1, visits, members)
        return (batch, g.heads if self.list_heads == 1 else 1, visits)

    def semantics(self) -> tuple[str, ...]:
        return ("parallel", "parallel", "arbitrary", "arbitrary")[: 4 if self.key_major else 3]

    # ------------------------------------------------------------------ from a list entry to a tile

    def _decode(self, grid: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> tuple:
        """(batch entry, query head, query tile, key tile, group member) of a list entry in a grid step.

        Where the lists of a group are joined, a column is member * q_tiles + query tile. Query-major: member 0.
        """
        b, head = grid[0], grid[1]
        tile = row
        if self.list_batch * self.row_heads > 1:
            tile, rest = lax.rem(row, np.int32(self.tile_rows)), lax.div(row, np.int32(self.tile_rows))
            if self.row_heads > 1:
                head = lax.rem(rest, np.int32(self.row_heads))
                rest = lax.div(rest, np.int32(self.row_heads))
            if self.list_batch > 1:
                b = rest
        if not self.key_major:
            return b, head, tile, column, np.int32(0)
        if self.list_heads == 1:
            member, i = grid[3], column
        else:
            tiles = np.int32(self.geometry.q_tiles)
            member, i = lax.div(column, tiles), lax.rem(column, tiles)
        return b, head * np.int32(self.group) + member, i, tile, member

    def tile_at(self, *grid_and_tables: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """In an index map: (batch entry, query head, query tile, key tile) of a grid step."""
        dims = 4 if self.key_major else 3
        rows, packed = grid_and_tables[dims : dims + 2]
        v = grid_and_tables[2]
        column = packed[v] & np.int32((1 << _COLUMN_BITS) - 1)
        return self._decode(grid_and_tables, rows[v], column)[:4]

    def visit(self, tables: Sequence[jax.Ref]) -> TileVisit:
        """In a kernel: the visit of this grid step, from the references (rows, packed, bits) in SMEM."""
        rows, packed, bits = tables[:3]
        ids = [pl.program_id(n) for n in range(4 if self.key_major else 3)]
        v = ids[2]
        entry = packed[v]
        b, h, i, j, member = self._decode(ids, rows[v], entry & np.int32((1 << _COLUMN_BITS) - 1))
        first, last = (entry >> 28) & 1 == 1, (entry >> 29) & 1 == 1
        # One list for all heads: a run spans the group.
        if self.key_major and self.list_heads == 1:
            first = first & (member == 0)
            last = last & (member == np.int32(self.group - 1))
        words = tuple(bits[n, v] for n in range(2 * self.words))
        return TileVisit(b, h, i, j, first, last, (entry >> _COLUMN_BITS) & 3, words, member, v)

    def keys_of_visit(self, tables: Sequence[jax.Ref], v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """In a kernel: (batch entry, key tile, kind) of visit v, for a query-major order of a plan with one head, as
        one with keys in pages.

        An idle visit names the key tile of the last visit before it that is not idle; the caller must not copy for it.
        """
        rows, packed = tables[:2]
        entry = packed[v]
        zero = jnp.int32(0)
        b, _, _, j, _ = self._decode((zero, zero), rows[v], entry & np.int32((1 << _COLUMN_BITS) - 1))
        return b, j, (entry >> _COLUMN_BITS) & 3

    def visit_follows(self, tables: Sequence[jax.Ref], v: jax.Array) -> jax.Array:
        """In a kernel: whether the launch has a visit after v."""
        return (tables[1][v] >> 30) & 1 == 1

    # ------------------------------------------------------------------ the bit sets on a tile

    def block_bits(self, visit: TileVisit, strip: Strip) -> tuple[jax.Array, jax.Array] | None:
        """(on, full), bool (rows, cols): entries of a strip in blocks that are on, or full; None without bit sets."""
        if not self.words:
            return None
        block_q, block_kv = self.block_sizes
        rows_of_block, lanes_of_block = (block_q, block_kv) if self.geometry.q_axis == 0 else (block_kv, block_q)
        lane = lax.broadcasted_iota(jnp.int32, (1, strip.cols), 1) + np.int32(strip.col0)
        power = lanes_of_block & (lanes_of_block - 1) == 0
        # `//` of jax takes the sign of both, which Pallas lowers only where it knows the chip
        lane_block = (
            lane >> (lanes_of_block.bit_length() - 1) if power else lax.div(lane, jnp.full_like(lane, lanes_of_block))
        )
        found: tuple[list[jax.Array], list[jax.Array]] = ([], [])
        start = 0
        while start < strip.rows:
            block = start // rows_of_block
            end = min((block + 1) * rows_of_block, strip.rows)
            for which in range(2):
                bit = self._row_bits(visit, which, block, lane_block)
                found[which].append(jnp.broadcast_to(bit, (end - start, strip.cols)))
            start = end
        join = lambda pieces: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
        on, full = (join(pieces) != 0 for pieces in found)
        return on, full

    def _row_bits(self, visit: TileVisit, which: int, block: int, lane_block: jax.Array) -> jax.Array:
        """int32 (1, columns): for each lane of a strip 1 if its mask block is in a bit set of the visited tile, else 0.

        which   0: blocks that are on; 1: full blocks
        block   number of the mask block along the sublanes of the tile, as `lane_block` is along the lanes
        """
        c = self.sub_blocks[1]
        if self.geometry.q_axis == 0:
            word, shift = divmod(block, self.block_rows_per_word)
            return (visit.bit_words[2 * word + which] >> (lane_block + np.int32(shift * c))) & 1
        bits = None
        for word in range(self.words):
            inside = lane_block - np.int32(word * self.block_rows_per_word)
            shift = jnp.clip(inside * np.int32(c) + np.int32(block), 0, 31)
            in_word = (visit.bit_words[2 * word + which] >> shift) & 1
            bits = in_word if bits is None else jnp.where(inside >= 0, in_word, bits)
        assert bits is not None
        return bits


def _mark(marks: jax.Array, count: jax.Array, index: jax.Array, mark: int) -> jax.Array:
    """`marks`, int8 [b, h, q blocks, kv blocks], raised to `mark` at the blocks of one pair of lists."""
    width = index.shape[-1]
    kept = jnp.arange(width, dtype=jnp.int32) < count[..., None]
    target = jnp.where(kept, index, marks.shape[-1])
    rows = marks.reshape(-1, marks.shape[-1])
    target = target.reshape(rows.shape[0], width)
    lines = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    marked = rows.at[lines, target].max(jnp.int8(mark), mode="drop")
    return marked.reshape(marks.shape)
