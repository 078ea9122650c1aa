"""Static sizes of the visit lists of a kernel: how many tile rows, how long, and how many launches they need.

A *tile row* is a run of the order (see visit_order.py): a row of tiles, or a column of tiles in a key-major order.
"""

import dataclasses

from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import BlockLayout, KernelPlan

TABLE_BYTES = 640 << 10  # bytes of SMEM that the lists of one launch may take, of 1 MiB
PAGES_BYTES = 640 << 10  # bytes of SMEM that the page numbers of a call may take, four each
LISTS_BESIDE_PAGES = 256 << 10  # bytes of SMEM that the lists of one launch may take beside page numbers


@dataclasses.dataclass(frozen=True)
class ListShape:
    """Static sizes of the visit lists of one kernel (block_sparse_order.py)."""

    sub_blocks: tuple[int, int]  # mask blocks of a tile (along q, along kv); 1 where a tile lies inside a block
    words: int  # int32 words of each of a tile's two bit sets of mask blocks; 0 where a tile lies inside one block
    rows: int  # tile rows in all, over the batch entries and heads that have block lists of their own
    longest_row: int  # an upper bound of the tiles that one tile row visits, at least 1
    rows_per_launch: int
    launches_hold_heads: bool  # whether no head is split between launches

    @property
    def launches(self) -> int:
        return cdiv(self.rows, self.rows_per_launch)


def block_layout(plan: KernelPlan, geometry: TileGeometry) -> BlockLayout | None:
    """The blocks by which a kernel decides what to visit; None if it visits every tile."""
    blocks, g = plan.blocks, geometry
    if not any(plan.lengths):
        return blocks
    # With lengths every batch entry has blocks of its own; without a block mask these are the tiles of the kernel.
    if blocks is not None:
        return blocks.changed(batch=plan.batch)
    # (partial, full) widths of the lists of a query block, and of the transposed ones
    of_query, of_key = ((g.kv_tiles, 0), (g.q_tiles, 0)) if plan.mask is not None else ((0, g.kv_tiles), (0, g.q_tiles))
    return BlockLayout(plan.batch, 1, g.block_q, g.block_kv, *of_query, *of_key)


def list_shape(plan: KernelPlan, geometry: TileGeometry, group: int, key_major: bool) -> ListShape:
    """The sizes of the visit lists of one kernel, from the static widths of the block lists; the plan has blocks.

    If each query head has block lists of its own, a column of a `key_major` order has the tiles of the whole group.
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
    # A list entry takes 8 bytes, and its two bit sets 8 bytes a word.
    # All rows if they fit; else whole heads if one fits, because sums over a head must end in one launch.
    most = min(TABLE_BYTES, LISTS_BESIDE_PAGES) if plan.page else TABLE_BYTES
    fit = max(1, most // (4 * (2 + 2 * words) * longest_row))
    if fit >= rows:
        fit = rows
    elif fit >= rows_per_head:
        fit = fit // rows_per_head * rows_per_head
    return ListShape((r, c), words, rows, longest_row, fit, fit % rows_per_head == 0)
