"""The order of the visits: which tile of the attention matrix a grid step works on, and what it must check there.

With block lists, all visited tiles of a head are laid out in one ragged list, row of tiles after row of tiles, in SMEM by
scalar prefetch; its length bounds the grid at run time, so an empty tile costs neither a grid step nor a copy. A row
without any tile keeps one idle step that writes zeros and copies nothing (it names the tile before it again). The list
covers the batch and head dimensions that the block mask has; those it broadcasts over are plain grid dimensions.

Longer than other files by a line or two: making the list and reading it back in the kernel belong side by side.

A tile holds several blocks of the mask where those are smaller than what the matrix unit wants. Then each entry carries
two bit sets: which of its blocks are on, and which are full.

Lists that do not fit SMEM are cut into chunks of whole tile rows; the kernel runs once a chunk in a loop, writing its rows
of the outputs in place.

    entry     int32, two per visit: the row (batch, head, tile row), and tile column | kind << 26 | first << 28 | last << 29
    kind      IDLE: write zeros for the row; FULL: nothing to check; PARTIAL: mask and bounds; EDGE: full, bounds only
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_tpu.feeds import Geometry
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

IDLE, FULL, PARTIAL, EDGE = range(4)
TABLE_BYTES = 640 << 10
"""SMEM that the lists of one launch may take."""

_COLUMN_BITS = 26


@dataclasses.dataclass
class Visit:
    """One grid step: batch, query head, query tile, key tile; whether it opens or closes its row; what to check."""

    b: jax.Array
    h: jax.Array
    i: jax.Array
    j: jax.Array
    first: jax.Array
    last: jax.Array
    kind: jax.Array | int
    words: tuple[jax.Array, ...] = ()
    member: jax.Array | int = 0


class Order:
    """The visits of one kernel. `by_keys` makes rows of key tiles and columns of query tiles, all heads of a group in a row.

    grid        of one chunk, given its number of visits
    prefetch    how many prefetched arrays the order has
    where       index-map side: (batch, query head, query tile, key tile)
    visit       kernel side
    arrays      what the prefetched arrays are made of
    """

    geometry: Geometry
    group: int
    by_keys: bool
    kinds: frozenset[int]
    sub_blocks: tuple[int, int] = (1, 1)

    chunks = 1
    prefetch = 0
    arrays: tuple[jax.Array, ...] = ()


class DenseOrder(Order):
    """Every tile, in plain grid dimensions: no lists."""

    def __init__(self, plan: KernelPlan, geometry: Geometry, group: int, by_keys: bool):
        self.geometry, self.group, self.by_keys = geometry, group, by_keys
        g = geometry
        self.ragged = bool(g.kv_len % g.block_kv or g.q_len % g.block_q)
        if plan.mask is not None:
            self.kinds = frozenset({PARTIAL})
        elif self.ragged:
            self.kinds = frozenset({FULL, EDGE})
        else:
            self.kinds = frozenset({FULL})

    def grid(self, count: jax.Array | None) -> tuple:
        g = self.geometry
        if self.by_keys:
            return (g.batch, g.heads // self.group, g.kv_tiles, g.q_tiles, self.group)
        return (g.batch, g.heads, g.q_tiles, g.kv_tiles)

    def semantics(self) -> tuple[str, ...]:
        return ("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")[: 5 if self.by_keys else 4]

    def where(self, *grid: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        if self.by_keys:
            b, m, j, i, member = grid[:5]
            return b, m * np.int32(self.group) + member, i, j
        b, h, i, j = grid[:4]
        return b, h, i, j

    def tables(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        return (), None

    def kind(self, i: jax.Array, j: jax.Array) -> jax.Array | int:
        if len(self.kinds) == 1:
            (only,) = self.kinds
            return only
        g = self.geometry
        over = []
        if g.q_len % g.block_q:
            over.append(i == np.int32(g.q_tiles - 1))
        if g.kv_len % g.block_kv:
            over.append(j == np.int32(g.kv_tiles - 1))
        return jnp.where(functools.reduce(jnp.logical_or, over), np.int32(EDGE), np.int32(FULL))

    def visit(self, tables: Sequence[jax.Ref]) -> Visit:
        ids = [pl.program_id(n) for n in range(5 if self.by_keys else 4)]
        b, h, i, j = self.where(*ids)
        g = self.geometry
        if self.by_keys:
            member = ids[4]
            first = (i == 0) & (member == 0)
            last = (i == np.int32(g.q_tiles - 1)) & (member == np.int32(self.group - 1))
        else:
            member, first, last = 0, j == 0, j == np.int32(g.kv_tiles - 1)
        return Visit(b, h, i, j, first, last, self.kind(i, j), (), member)


class ListedOrder(Order):
    """The visits that the block lists name."""

    prefetch = 3

    def __init__(self, plan: KernelPlan, geometry: Geometry, group: int, by_keys: bool, lists: BlockLists):
        self.geometry, self.group, self.by_keys = geometry, group, by_keys
        blocks, g = plan.blocks, geometry
        assert blocks is not None
        self.list_batch, self.list_heads = blocks.batch, blocks.heads
        self.ragged = bool(g.kv_len % g.block_kv or g.q_len % g.block_q)
        self.kinds = frozenset({IDLE, FULL, PARTIAL, EDGE})
        self.shape = list_shape(plan, geometry, group, by_keys)
        self.sub_blocks, self.words = self.shape.sub_blocks, self.shape.words
        self.rows_a_word = max(1, 32 // self.sub_blocks[1])
        self.block_sizes = (min(blocks.block_q, g.block_q), min(blocks.block_kv, g.block_kv))

        state, on, full = self._tile_states(plan, lists)
        if by_keys:
            state, on, full = (self._transposed(x) for x in (state, on, full))
        columns = state.shape[3]
        self.columns = columns
        self.tile_rows = state.shape[2]
        self.row_heads = state.shape[1]
        rows = self.shape.rows
        self.wide, self.rows_a_chunk, self.chunks = self.shape.wide, self.shape.rows_a_chunk, self.shape.chunks
        self.rows = rows
        pad = self.chunks * self.rows_a_chunk - rows
        self._state = jnp.pad(state.reshape(rows, columns), ((0, pad), (0, 0)))
        self._on = [jnp.pad(w.reshape(rows, columns), ((0, pad), (0, 0))) for w in jnp.moveaxis(on, -1, 0)]
        self._full = [jnp.pad(w.reshape(rows, columns), ((0, pad), (0, 0))) for w in jnp.moveaxis(full, -1, 0)]
        self.arrays = (self._state, *self._on, *self._full)

    def _tile_states(self, plan: KernelPlan, lists: BlockLists) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[list batch, list heads, q tiles, kv tiles] kinds, and the two bit sets with a last dimension of words."""
        blocks, g = plan.blocks, self.geometry
        assert blocks is not None
        q_blocks, kv_blocks = -(-g.q_len // blocks.block_q), -(-g.kv_len // blocks.block_kv)
        fine = jnp.zeros((blocks.batch, blocks.heads, q_blocks, kv_blocks), jnp.int8)
        pairs = ((lists.partial_num, lists.partial_index, 1), (lists.full_num, lists.full_index, 2))
        for count, index, mark in pairs:
            if count is not None and index is not None and index.shape[-1]:
                fine = _mark(fine, count, index, mark)
        r, c = self.sub_blocks
        for dim, tile, block, tiles in (
            (2, g.block_q, blocks.block_q, g.q_tiles),
            (3, g.block_kv, blocks.block_kv, g.kv_tiles),
        ):
            if block > tile:
                fine = lax.slice_in_dim(jnp.repeat(fine, block // tile, axis=dim), 0, tiles, axis=dim)
        pads = [(0, 0), (0, 0), (0, g.q_tiles * r - fine.shape[2]), (0, g.kv_tiles * c - fine.shape[3])]
        fine = jnp.pad(fine, pads).reshape(blocks.batch, blocks.heads, g.q_tiles, r, g.kv_tiles, c)
        some, every = jnp.any(fine > 0, (3, 5)), jnp.all(fine == 2, (3, 5))
        state = jnp.where(every, FULL, jnp.where(some, PARTIAL, IDLE))
        over = jnp.zeros((g.q_tiles, g.kv_tiles), bool)
        if g.q_len % g.block_q:
            over = over.at[-1, :].set(True)
        if g.kv_len % g.block_kv:
            over = over.at[:, -1].set(True)
        state = jnp.where(every & over, EDGE, state).astype(jnp.int32)
        words_on, words_full = [], []
        for w in range(self.words):
            rows = fine[:, :, :, w * self.rows_a_word : (w + 1) * self.rows_a_word]
            place = jnp.arange(rows.shape[3], dtype=jnp.uint32)[:, None, None] * np.uint32(c) + jnp.arange(
                c, dtype=jnp.uint32
            )
            for words, hit in ((words_on, rows > 0), (words_full, rows == 2)):
                bits = jnp.where(hit, jnp.uint32(1) << place, jnp.uint32(0)).sum((3, 5), dtype=jnp.uint32)
                words.append(lax.bitcast_convert_type(bits, jnp.int32))
        empty = jnp.zeros((*state.shape, 0), jnp.int32)
        pack = lambda words: jnp.stack(words, -1) if words else empty
        return state, pack(words_on), pack(words_full)

    def _transposed(self, x: jax.Array) -> jax.Array:
        """[batch, heads, q, kv, ...] -> [batch, kv heads or 1, kv, group * q, ...]."""
        b, n, q, k = x.shape[:4]
        members = self.group if self.list_heads > 1 else 1
        x = x.reshape(b, n // members, members, q, k, *x.shape[4:])
        x = jnp.moveaxis(x, 4, 2)
        return x.reshape(b, n // members, k, members * q, *x.shape[5:])

    # ------------------------------------------------------------------ the lists of a chunk

    def tables(self, chunk: jax.Array | int) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Prefetched arrays of a chunk, and its number of visits."""
        take = lambda x: lax.dynamic_slice_in_dim(x, chunk * self.rows_a_chunk, self.rows_a_chunk, 0)
        if self.chunks == 1:
            take = lambda x: x
        state = take(self._state)
        real = jnp.arange(self.rows_a_chunk) + chunk * self.rows_a_chunk < self.rows
        visited = state > 0
        empty = ~jnp.any(visited, axis=1) & real
        listed = (visited & real[:, None]).at[:, 0].set(jnp.where(empty, True, (visited & real[:, None])[:, 0]))
        flat = listed.reshape(-1)
        size = self.rows_a_chunk * self.wide
        (place,) = jnp.nonzero(flat, size=size, fill_value=0)
        place = place.astype(jnp.int32)
        count = jnp.sum(flat, dtype=jnp.int32)
        row, column = place // np.int32(self.columns), place % np.int32(self.columns)
        kind = state.reshape(-1)[place]
        at = jnp.arange(size, dtype=jnp.int32)
        # An idle step names the column of the last real one before it.
        source = lax.cummax(jnp.where(kind > 0, at, 0))
        column = column[source]
        before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), row[:-1]])
        after = jnp.concatenate([row[1:], jnp.full((1,), -1, jnp.int32)])
        first = (row != before).astype(jnp.int32)
        last = ((row != after) | (at == count - 1)).astype(jnp.int32)
        packed = column | (kind << _COLUMN_BITS) | (first << 28) | (last << 29)
        row = row + jnp.asarray(chunk * self.rows_a_chunk, jnp.int32)
        words = [take(w).reshape(-1)[place] for pair in zip(self._on, self._full, strict=True) for w in pair]
        bits = jnp.stack(words).astype(jnp.int32) if words else jnp.zeros((1, 1), jnp.int32)
        return (row, packed, bits), count

    def grid(self, count: jax.Array | None) -> tuple:
        g = self.geometry
        batch = g.batch if self.list_batch == 1 else 1
        if self.by_keys:
            members = self.group if self.list_heads == 1 else 1
            return (batch, g.heads // self.group if self.list_heads == 1 else 1, count, members)
        return (batch, g.heads if self.list_heads == 1 else 1, count)

    def semantics(self) -> tuple[str, ...]:
        return ("parallel", "parallel", "arbitrary", "arbitrary")[: 4 if self.by_keys else 3]

    def _decode(self, grid: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> tuple:
        b, head = grid[0], grid[1]
        tile = row
        if self.list_batch * self.row_heads > 1:
            tile, rest = lax.rem(row, np.int32(self.tile_rows)), lax.div(row, np.int32(self.tile_rows))
            if self.row_heads > 1:
                head = lax.rem(rest, np.int32(self.row_heads))
                rest = lax.div(rest, np.int32(self.row_heads))
            if self.list_batch > 1:
                b = rest
        if not self.by_keys:
            return b, head, tile, column, np.int32(0)
        if self.list_heads == 1:
            member, i = grid[3], column
        else:
            tiles = np.int32(self.geometry.q_tiles)
            member, i = lax.div(column, tiles), lax.rem(column, tiles)
        return b, head * np.int32(self.group) + member, i, tile, member

    def where(self, *grid_and_tables: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        dims = 4 if self.by_keys else 3
        rows, packed = grid_and_tables[dims : dims + 2]
        v = grid_and_tables[2]
        column = packed[v] & np.int32((1 << _COLUMN_BITS) - 1)
        return self._decode(grid_and_tables, rows[v], column)[:4]

    def visit(self, tables: Sequence[jax.Ref]) -> Visit:
        rows, packed, bits = tables[:3]
        ids = [pl.program_id(n) for n in range(4 if self.by_keys else 3)]
        v = ids[2]
        entry = packed[v]
        b, h, i, j, member = self._decode(ids, rows[v], entry & np.int32((1 << _COLUMN_BITS) - 1))
        first, last = (entry >> 28) & 1 == 1, (entry >> 29) & 1 == 1
        if self.by_keys and self.list_heads == 1:
            first = first & (member == 0)
            last = last & (member == np.int32(self.group - 1))
        words = tuple(bits[n, v] for n in range(2 * self.words))
        return Visit(b, h, i, j, first, last, (entry >> _COLUMN_BITS) & 3, words, member)

    # ------------------------------------------------------------------ the bit sets on a tile

    def block_bits(self, visit: Visit, part: tuple[int, int, int, int]) -> tuple[jax.Array, jax.Array] | None:
        """(on, full) as booleans on the part of the tile; None where the kind says it all."""
        if not self.words:
            return None
        row0, rows, col0, cols = part
        r, c = self.sub_blocks
        block_q, block_kv = self.block_sizes
        q_axis = self.geometry.q_axis
        stand, lie = (block_q, block_kv) if q_axis == 0 else (block_kv, block_q)
        lane = lax.broadcasted_iota(jnp.int32, (1, cols), 1) + np.int32(col0)
        lane_block = lane >> (lie.bit_length() - 1) if lie & (lie - 1) == 0 else lane // lie
        found: tuple[list[jax.Array], list[jax.Array]] = ([], [])
        start = row0
        while start < row0 + rows:
            block = start // stand
            end = min((block + 1) * stand, row0 + rows)
            for which in range(2):
                bit = self._row_bits(visit, which, block, lane_block, q_axis, r, c)
                found[which].append(jnp.broadcast_to(bit, (end - start, cols)))
            start = end
        join = lambda pieces: pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
        on, full = (join(pieces) != 0 for pieces in found)
        return on, full

    def _row_bits(
        self, visit: Visit, which: int, block: int, lane_block: jax.Array, q_axis: int, r: int, c: int
    ) -> jax.Array:
        """(1, columns) int32, 1 where the block of that lane, in the given row of blocks, is in the set."""
        if q_axis == 0:
            word, shift = divmod(block, self.rows_a_word)
            return (visit.words[2 * word + which] >> (lane_block + np.int32(shift * c))) & 1
        bits = None
        for word in range(self.words):
            inside = lane_block - np.int32(word * self.rows_a_word)
            shift = jnp.clip(inside * np.int32(c) + np.int32(block), 0, 31)
            mine = (visit.words[2 * word + which] >> shift) & 1
            bits = mine if bits is None else jnp.where(inside >= 0, mine, bits)
        assert bits is not None
        return bits


@dataclasses.dataclass(frozen=True)
class ListShape:
    """Static shape of the lists of a kernel.

    sub_blocks    blocks of the mask in a tile, (query, key)
    words         int32 words of each of the two bit sets, 0 where a tile is inside one block
    rows, wide    tile rows in all, and the most tiles that one can have
    rows_a_chunk  tile rows of one launch; whole_heads: no head is split between launches
    """

    sub_blocks: tuple[int, int]
    words: int
    rows: int
    wide: int
    rows_a_chunk: int
    whole_heads: bool

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.rows_a_chunk)


def list_shape(plan: KernelPlan, geometry: Geometry, group: int, by_keys: bool) -> ListShape:
    blocks, g = plan.blocks, geometry
    assert blocks is not None
    r, c = max(1, g.block_q // blocks.block_q), max(1, g.block_kv // blocks.block_kv)
    words = 0 if r * c == 1 else -(-r // max(1, 32 // c))
    members = group if by_keys and blocks.heads > 1 else 1
    if by_keys:
        head_rows, columns = g.kv_tiles, g.q_tiles * members
        listed = c * (blocks.partial_t + blocks.full_t) * max(1, blocks.block_q // g.block_q) * members
    else:
        head_rows, columns = g.q_tiles, g.kv_tiles
        listed = r * (blocks.partial + blocks.full) * max(1, blocks.block_kv // g.block_kv)
    rows = blocks.batch * blocks.heads // members * head_rows
    wide = min(columns, max(1, listed))
    # All rows that fit; whole heads where one fits, so that what a head sums up ends in one launch.
    fit = max(1, TABLE_BYTES // (4 * (2 + 2 * words) * wide))
    if fit >= rows:
        fit = rows
    elif fit >= head_rows:
        fit = fit // head_rows * head_rows
    return ListShape((r, c), words, rows, wide, fit, fit % head_rows == 0)


def _mark(fine: jax.Array, count: jax.Array, index: jax.Array, mark: int) -> jax.Array:
    """fine[b, h, q block, index[b, h, q block, :count]] = mark."""
    width = index.shape[-1]
    kept = jnp.arange(width, dtype=jnp.int32) < count[..., None]
    target = jnp.where(kept, index, fine.shape[-1])
    rows = fine.reshape(-1, fine.shape[-1])
    target = target.reshape(rows.shape[0], width)
    lines = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    marked = rows.at[lines, target].max(jnp.int8(mark), mode="drop")
    return marked.reshape(fine.shape)


def make_order(
    plan: KernelPlan, geometry: Geometry, group: int, by_keys: bool, lists: BlockLists | None
) -> DenseOrder | ListedOrder:
    if plan.blocks is None:
        return DenseOrder(plan, geometry, group, by_keys)
    assert lists is not None
    return ListedOrder(plan, geometry, group, by_keys, lists)
