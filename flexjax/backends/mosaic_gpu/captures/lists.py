"""Lists of tiles for the gradients of captured arrays: each CTA sums the tiles of one list. A *visit* is one tile of
one head that the block mask lists (every tile where there is no block mask).

Visits are sorted by a key that depends on the load class (docs/glossary.md), and each list is a contiguous run of
visits with the same key:

    load class  key
    scalar      none: the visits of a head are cut into runs of equal length
    row         the row of tiles
    column      the column of tiles
    diagonal    row minus column; with `period` > 1 also the row modulo `period`. Under an origin of several runs the
                row and
                the column in the whole problem count (`whole`)
    tile        the tile itself

Batch entries and heads that read the same elements of the array can be *joined* into one list. If they also have the
same block mask, the list repeats its run for each of them. Otherwise their visits are sorted together, and each visit
names its head. Memory therefore grows with the entries of the block mask, counted once for heads that share one mask.

The number of lists fixes the order of the sums, so it follows from the problem alone, never from the GPU.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.block_mask.host_or_program import counts_of, module_of, not_folded, sort_together
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.ir.origin import Starts, key_positions, query_positions
from flexjax.plan.kernel_plan import BlockLists, KernelPlan
from flexjax.plan.known_lists import MOST_BLOCKS

LISTS_WANTED = 8 * 132
"""The number of lists that keeps a GPU busy: eight for each SM of an H100. The longest lists start first, so with eight
an SM no CTA runs long after the others. Every GPU gets the same number, because the order of sums depends on it.
"""
LARGEST_NUMBER = 1 << 31  # visits and tile codes are int32, so there may be fewer of them than this
MOST_DIAGONALS = 1 << 16
"""The most diagonals of tiles of a whole problem for which there are lists: those of 4 million tokens and tiles of 128.
"""
AFTER_ALL_KEYS = np.int32(np.iinfo(np.int32).max)
"""The key of a visit that does not exist, so that sorting puts it last."""


class TileLists(typing.NamedTuple, typing.Generic[Part]):
    """List n is visits[begin[n] : begin[n] + count[n]], once for each of `ListShape.repeats`.

    int32, arrays outside a kernel (of numpy if the block lists are known), Refs inside.

    head          [lists] the number b * N + h of the first head of each list
    begin, count  [lists] the run of visits
    head_offset   [visits] what a visit adds to the head number; None if every visit adds 0
    tile          [visits] 2 * (row * columns + column), plus 1 where the mask applies
    """

    head: Part
    begin: Part
    count: Part
    head_offset: Part | None
    tile: Part


@dataclasses.dataclass(frozen=True)
class ListShape:
    """What is known of the lists at compile time.

    kind            class of the load (`ir.classify_load`)
    tile            queries and keys of a tile, which is square
    rows, columns   tiles of a head: along the queries, along the keys
    batch, heads    batch entries and heads with lists of their own: 1 where those of the plan are joined
    keys            lists for each (batch entry, head)
    repeats         (batch entries, heads) for each of which a list repeats its run
    period          of a diagonal, in tiles
    whole           (rows, columns) of tiles of the whole problem, for diagonals of several runs; else None
    """

    kind: str
    tile: int
    rows: int
    columns: int
    batch: int
    heads: int
    keys: int
    repeats: tuple[int, int]
    period: int = 1
    whole: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.keys


def most_visits(plan: KernelPlan, tile: int) -> int:
    """Upper bound of the visits over all batch entries and query heads, for square tiles of `tile` tokens."""
    blocks = plan.blocks
    if blocks is None:
        tiles = cdiv(plan.q_len, tile) * cdiv(plan.kv_len, tile)
    else:
        entries = cdiv(plan.q_len, blocks.block_q) * (blocks.partial + blocks.full)
        tiles = entries * (blocks.block_q // tile) * (blocks.block_kv // tile)
    return plan.batch * plan.q_heads * tiles


def most_codes(plan: KernelPlan, tile: int) -> int:
    """A number above all tile codes in `TileLists.tile`."""
    return 2 * cdiv(plan.q_len, tile) * cdiv(plan.kv_len, tile)


def shape_for(
    plan: KernelPlan,
    kind: str,
    tile: int,
    shared: tuple[bool, bool],
    period: int = 1,
    whole: tuple[int, int] | None = None,
) -> ListShape:
    """The shape of the lists for a load of class `kind`: which heads are joined, and how many lists there are.

    shared   (whether batch entries, whether heads share the elements that the load reads)
    period   of a diagonal, in tiles (shift_invariance.py)
    whole    (rows, columns) of tiles of the whole problem, if lists are to be for its diagonals (`whole_tiles`)

    Scalar and tile loads always join those that share elements, others only where LISTS_WANTED lists are left. A scalar
    has as many lists as make LISTS_WANTED in all, but no more than it has visits.
    """
    rows, columns = cdiv(plan.q_len, tile), cdiv(plan.kv_len, tile)
    diagonals = (sum(whole or (rows, columns)) - 1) * period
    keys = {ir.ROW: rows, ir.COLUMN: columns, ir.DIAGONAL: diagonals, ir.TILE: rows * columns}
    lengths = [plan.batch, plan.q_heads]
    for axis in (1, 0):
        rest = math.prod(lengths) // lengths[axis]
        if shared[axis] and (kind in (ir.SCALAR, ir.TILE) or rest * keys[kind] >= LISTS_WANTED):
            lengths[axis] = 1
    batch, heads = lengths
    pattern = (1, 1) if plan.blocks is None else (plan.blocks.batch, plan.blocks.heads)
    repeats = [
        full if left < full and of == 1 else 1
        for full, left, of in zip((plan.batch, plan.q_heads), lengths, pattern, strict=True)
    ]
    if kind == ir.SCALAR:
        visits = most_visits(plan, tile) // (batch * heads * math.prod(repeats))
        count = max(1, min(cdiv(LISTS_WANTED, batch * heads), visits))
    else:
        count = keys[kind]
    return ListShape(kind, tile, rows, columns, batch, heads, count, (repeats[0], repeats[1]), period, whole)


def whole_tiles(plan: KernelPlan, tile: int) -> tuple[int, int] | None:
    """(rows, columns) of tiles of the whole problem, if each list can have the visits on a diagonal; else None.

    They can where the starts of all runs of the origin are multiples of the tile and the same for all batch entries,
    and MOST_DIAGONALS are enough, because more lists would mostly be empty.
    """
    origin, program = plan.origin, plan.score
    if origin is None or program is None or origin.aligned % tile or origin.rows > 1:
        return None
    lengths = [(program.inputs[axis].high or 0) + 1 for axis in (ir.Q, ir.KV)]
    rows, columns = (cdiv(length, tile) for length in lengths)
    return (rows, columns) if rows + columns <= MOST_DIAGONALS else None


def tile_lists(
    plan: KernelPlan, lists: BlockLists | None, shape: ListShape, starts: Starts | None = None
) -> TileLists[jax.Array]:
    """The lists of tiles for one launch of the capture kernel, as int32 arrays: numpy arrays if the block lists are
    known, or if there are none and a head has at most MOST_BLOCKS tiles; else in the caller's program.

    lists    None: every tile is visited
    starts   of the runs of an origin; read if `shape.whole` is given

    Within a list visits are in the order of heads, then tiles. A list may be empty.
    """
    row, column, masked, exists = _visits(plan, lists, shape)
    key = {
        ir.SCALAR: row * 0,
        ir.ROW: row,
        ir.COLUMN: column,
        ir.DIAGONAL: _diagonals(plan, shape, row, column, starts),
        ir.TILE: row * shape.columns + column,
    }[shape.kind]
    key = module_of(key, exists).where(exists, key, AFTER_ALL_KEYS)
    tile = (row * shape.columns + column) * 2 + masked
    merged = (key.shape[0] > shape.batch, key.shape[1] > shape.heads)
    parts = [key, _heads(plan, key.shape, merged), tile] if any(merged) else [key, tile]
    key, *offset, tile = sort_together(not_folded(*(_merge(x, merged) for x in parts)))
    xp = module_of(key)

    runs = 1 if shape.kind == ir.SCALAR else shape.keys
    counts = counts_of(key, runs)
    visits = key.shape[-1]
    begin = xp.cumsum(counts, axis=-1, dtype=np.int32) - counts
    begin = begin + (np.arange(key.shape[0] * key.shape[1], dtype=np.int32) * visits).reshape(*key.shape[:2], 1)
    if shape.kind == ir.SCALAR:
        size = -(-counts // shape.keys)
        before = xp.minimum(np.arange(shape.keys, dtype=np.int32) * size, counts)
        begin, counts = begin + before, xp.minimum(size, counts - before)
    full = (shape.batch, shape.heads, shape.keys)
    first = np.arange(shape.batch, dtype=np.int32)[:, None] * plan.q_heads + np.arange(shape.heads, dtype=np.int32)
    flat = lambda x: module_of(x).broadcast_to(x, full).reshape(-1)
    heads = offset[0].reshape(-1) if offset else None
    return TileLists(flat(first[..., None]), flat(begin), flat(counts), heads, tile.reshape(-1))


def _diagonals(
    plan: KernelPlan, shape: ListShape, row: jax.Array, column: jax.Array, starts: Starts | None
) -> jax.Array:
    """The number of the list of each tile, for lists of diagonals: 0 for the first row and the last column."""
    if shape.whole is None:
        return (row - column + shape.columns - 1) * shape.period + row % shape.period
    row, column = (
        of(plan.origin, starts, 0, at * shape.tile) // shape.tile
        for of, at in ((query_positions, row), (key_positions, column))
    )
    return row - column + shape.whole[1] - 1


def _visits(plan: KernelPlan, lists: BlockLists | None, shape: ListShape) -> tuple[jax.Array, ...]:
    """The visits of each head of the block mask: (row of tiles, column of tiles, 1 where the mask applies, whether the
    visit exists), each [batch, heads, visits] of the block mask, 1 and 1 without one.

    Block lists are padded to one width, so some visits do not exist, nor do those of tiles past the ends.
    """
    blocks = plan.blocks
    if blocks is None or lists is None:
        xp: typing.Any = np if shape.rows * shape.columns <= MOST_BLOCKS else jnp
        number = xp.arange(shape.rows * shape.columns, dtype=np.int32).reshape(1, 1, -1)
        masked = xp.full_like(number, int(plan.mask is not None))
        return number // shape.columns, number % shape.columns, masked, xp.ones_like(number, np.bool_)
    xp = module_of(*lists)
    per_q, per_kv = blocks.block_q // shape.tile, blocks.block_kv // shape.tile
    found = []
    for num, index, masked in ((lists.full_num, lists.full_index, 0), (lists.partial_num, lists.partial_index, 1)):
        if num is None or index is None:
            continue
        # [batch, heads, blocks of queries, entries of a list, tiles of queries in a block, tiles of keys in a block]
        numbers = lambda n, axis: np.arange(n, dtype=np.int32).reshape([-1 if a == axis else 1 for a in range(6)])
        row = numbers(index.shape[2], 2) * per_q + numbers(per_q, 4)
        column = index[..., None, None] * per_kv + numbers(per_kv, 5)
        exists = numbers(index.shape[3], 3) < num[..., None, None, None]
        exists = exists & (row < shape.rows) & (column < shape.columns)
        full = (*index.shape, per_q, per_kv)
        parts = (row, column, np.full((1,) * 6, masked, np.int32), exists)
        found.append([xp.broadcast_to(x, full).reshape(*full[:2], -1) for x in parts])
    nothing = [np.zeros((blocks.batch, blocks.heads, 1), t) for t in (np.int32, np.int32, np.int32, np.bool_)]
    return tuple(xp.concatenate(x, axis=-1) for x in zip(*(found or [nothing]), strict=True))


def _heads(plan: KernelPlan, shape: tuple[int, ...], merged: tuple[bool, bool]) -> jax.Array:
    """What each visit adds to the number b * N + h of the first head of its list, int32 [batch, heads, visits]."""
    b = np.arange(shape[0], dtype=np.int32)[:, None, None] * (plan.q_heads * merged[0])
    h = np.arange(shape[1], dtype=np.int32)[:, None] * int(merged[1])
    return np.broadcast_to(b + h, shape)  # pyright: ignore[reportReturnType]


def _merge(x: jax.Array, merged: tuple[bool, bool]) -> jax.Array:
    """[batch, heads, visits] with the axes that are joined folded into the last, batch entries first."""
    batch, heads, _ = x.shape
    if merged == (True, False):
        x = x.transpose(1, 0, 2)
    return x.reshape(1 if merged[0] else batch, 1 if merged[1] else heads, -1)
