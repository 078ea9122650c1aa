"""Static sizes of the visit lists of a kernel: how many tile rows, how long, and how many launches they need.

A *tile row* is a run of the order (see visit_order.py): a row of tiles, or a column of tiles in a key-major order.

A TileGeometry has the sizes of the attention matrix and of its tiles.
"""

import dataclasses

from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

TABLE_BYTES = 640 << 10
"""SMEM that the lists of one launch may take, of 1 MiB."""
PAGES_BYTES = 640 << 10
"""SMEM that the page numbers of a call may take, four bytes each."""
LISTS_BESIDE_PAGES = 256 << 10
"""SMEM that the lists of one launch may take beside page numbers."""


@dataclasses.dataclass(frozen=True)
class ListShape:
    """Static sizes of the visit lists of one kernel (block_sparse_order.py).

    sub_blocks            how many mask blocks a tile has, (along q, along kv); 1 where a tile lies inside a block
    words                 int32 words of each of a tile's two bit sets of mask blocks; 0 where a tile lies inside one mask block
    rows                  tile rows in all, over the batch entries and heads that have block lists of their own
    longest_row           an upper bound of the tiles that one tile row visits, at least 1
    rows_per_launch       tile rows of one launch
    launches_hold_heads   whether no head is split between launches
    """

    sub_blocks: tuple[int, int]
    words: int
    rows: int
    longest_row: int
    rows_per_launch: int
    launches_hold_heads: bool

    @property
    def launches(self) -> int:
        """How many launches of the kernel visit all tile rows."""
        return cdiv(self.rows, self.rows_per_launch)


def block_layout(plan: KernelPlan, geometry: TileGeometry) -> BlockLayout | None:
    """The blocks by which a kernel decides what to visit, None if it visits every tile: without a block mask and without
    lengths.

    geometry   sizes of the matrix and of the tiles

    They are those of the plan's block mask. With lengths every batch entry has blocks of its own; without a block mask these
    are then the tiles of the kernel, all partial if the plan has a mask program, else full.
    """
    blocks, g = plan.blocks, geometry
    if not any(plan.lengths):
        return blocks
    if blocks is not None:
        return blocks.changed(batch=plan.batch)
    # (partial, full) widths of the lists of a query block, and of the transposed ones
    of_query, of_key = ((g.kv_tiles, 0), (g.q_tiles, 0)) if plan.mask is not None else ((0, g.kv_tiles), (0, g.q_tiles))
    return BlockLayout(plan.batch, 1, g.block_q, g.block_kv, *of_query, *of_key)


def list_shape(plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool) -> ListShape:
    """The sizes of the visit lists of one kernel, from the static widths of the block lists. The plan has blocks
    (`block_layout`).

    geometry    sizes of the matrix and of the tiles
    group       query heads of one key head
    key_major   whether a tile row is a column of tiles; if each query head has block lists of its own, the column has the tiles
                of the whole group

    One launch takes as many tile rows as TABLE_BYTES hold (LISTS_BESIDE_PAGES with keys in pages), where a list entry takes 8
    bytes and its two bit sets: all rows if they fit, else whole heads if one fits, else parts of a head, at least one row.
    """
    blocks, g = block_layout(plan, geometry), geometry
    assert blocks is not None
    r, c = max(1, g.block_q // blocks.block_q), max(1, g.block_kv // blocks.block_kv)
    words = 0 if r * c == 1 else cdiv(r, max(1, 32 // c))
    members = group if key_major and blocks.heads > 1 else 1
    if key_major:
        rows_per_head, columns = g.kv_tiles, g.q_tiles * members
        visited = c * (blocks.partial_t + blocks.full_t) * max(1, blocks.block_q // g.block_q) * members
    else:
        rows_per_head, columns = g.q_tiles, g.kv_tiles
        visited = r * (blocks.partial + blocks.full) * max(1, blocks.block_kv // g.block_kv)
    rows = blocks.batch * blocks.heads // members * rows_per_head
    longest_row = min(columns, max(1, visited))
    # All rows if they fit; else whole heads if one fits, because sums over a head must end in one launch.
    most = min(TABLE_BYTES, LISTS_BESIDE_PAGES) if plan.page else TABLE_BYTES
    fit = max(1, most // (4 * (2 + 2 * words) * longest_row))
    if fit >= rows:
        fit = rows
    elif fit >= rows_per_head:
        fit = fit // rows_per_head * rows_per_head
    return ListShape((r, c), words, rows, longest_row, fit, fit % rows_per_head == 0)
