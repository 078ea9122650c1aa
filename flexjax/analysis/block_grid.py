"""The blocks of the attention matrix for which interval analysis is run, as arrays of their first and last positions.

A block is a rectangle of one batch entry, one head, `block_q` queries and `block_kv` keys, fewer at the end of the
matrix. `sizes` is (q_len, kv_len, block_q, block_kv). `placed` says where queries and keys lie in the whole problem; no
block straddles two of its runs.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flexjax.analysis.interval_values import Interval
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.ir.origin import NOWHERE, Placed, key_positions, query_positions

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """The blocks to analyse, as int32 arrays of four dims that broadcast to one number a block.

    Only the first dim may vary both b or h and queries or keys.
    """

    b: Array
    h: Array
    # positions of the first and the last query and key, both included
    q_first: Array
    q_last: Array
    kv_first: Array
    kv_last: Array
    # the largest number of queries and of keys of a block
    block_q: int
    block_kv: int

    def of(self, axis: int) -> Interval:
        """The interval of an input (ir.B, ir.H, ir.Q or ir.KV) in each block."""
        first = {ir.B: self.b, ir.H: self.h, ir.Q: self.q_first, ir.KV: self.kv_first}[axis]
        last = {ir.B: self.b, ir.H: self.h, ir.Q: self.q_last, ir.KV: self.kv_last}[axis]
        return Interval(first, last, True, True)


def block_grid(
    batch: int,
    heads: int,
    q_blocks: Array,
    kv_blocks: Array,
    sizes: tuple[int, int, int, int],
    placed: Placed = NOWHERE,
) -> BlockGrid:
    """The grid of the blocks with these numbers (int32 vectors): [batch, heads, q blocks, kv blocks]."""
    i32 = lambda n: jnp.arange(n, dtype=jnp.int32)
    along = lambda x, axis: jnp.reshape(x, tuple(-1 if i == axis else 1 for i in range(4)))
    return _grid((along(i32(batch), 0), along(i32(heads), 1), along(q_blocks, 2), along(kv_blocks, 3)), sizes, placed)


def block_tiles(places: Array, side: int, sizes: tuple[int, int, int, int], placed: Placed = NOWHERE) -> BlockGrid:
    """The grid of n squares of side x side blocks each, [n, 1, side, side]; `places` int32 [n, 4] counts squares."""
    b, h, q, kv = (places[:, i].reshape(-1, 1, 1, 1) for i in range(4))
    within = jnp.arange(side, dtype=jnp.int32)
    last = [max(0, cdiv(length, block) - 1) for length, block in zip(sizes[:2], sizes[2:], strict=True)]
    q_blocks = jnp.minimum(q * side + within[:, None], last[0])
    kv_blocks = jnp.minimum(kv * side + within, last[1])
    return _grid((b, h, q_blocks, kv_blocks), sizes, placed)


def _grid(blocks: tuple[Array, Array, Array, Array], sizes: tuple[int, int, int, int], placed: Placed) -> BlockGrid:
    """The grid of the blocks with these numbers (b, h, query block, key block), arrays of four dims."""
    b, h, q_blocks, kv_blocks = blocks
    q_len, kv_len, block_q, block_kv = sizes

    def edges(blocks: Array, size: int, length: int, of: Callable[..., Array]) -> tuple[Array, Array]:
        """Positions of the first and the last token of each block along one axis, which may end within a block."""
        first = blocks * size
        start = of(*placed, b, first)
        return start, start + (jnp.minimum(first, length - size) + (size - 1) - first)

    rows, columns = edges(q_blocks, block_q, q_len, query_positions), edges(kv_blocks, block_kv, kv_len, key_positions)
    return BlockGrid(b, h, *rows, *columns, block_q, block_kv)
