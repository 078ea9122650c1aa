"""Loops over the tiles of the xla backend, guided by the lists of a block mask.

A *tile row* is one query block of one group of batch entries and query heads. Tile rows run one after another. Each step of a
tile row, a *visit*, computes the tile of `chunk` key blocks. The key blocks of the full list come first, `chunk` at a time and
unmasked; the rest of the full list follows together with the partial list, masked. Loops end where the lists end, so an empty
block costs nothing, whether the lists are constants or traced.

TileSizes are the sizes of a tile and how many there are, BlockLists the arrays of the block mask.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.tile import Region
from flexjax.backends.xla.tile_sizes import TileSizes
from flexjax.ir.origin import NOWHERE, Placed, key_positions, query_positions
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

Array = jax.Array
Carry = typing.TypeVar("Carry")


class TileRow(typing.NamedTuple):
    """Which query block, batch entries and query heads one tile row computes, and the key blocks of its lists.

    b0, h0     int32 scalars: index of the first batch entry and of the first query head
    q_block    int32 scalar: number of the query block
    *_num      int32 scalar: how many key blocks the query block's full (partial) list has
    *_index    int32 [width]: the numbers of these key blocks, ascending

    The last four are None where there is no such list, and all of them where every block is visited.
    """

    b0: Array
    h0: Array
    q_block: Array
    full_num: Array | None
    full_index: Array | None
    partial_num: Array | None
    partial_index: Array | None


def row_at(plan: KernelPlan, sizes: TileSizes, lists: BlockLists | None, step: Array) -> TileRow:
    """The tile row with number `step` (int32 scalar) of 0 .. sizes.steps - 1: query blocks run fastest, then groups of heads,
    then groups of batch entries. `lists` are those of the operands.
    """
    row = step % sizes.rows
    group = step // sizes.rows
    h0 = (group % sizes.head_groups) * sizes.heads
    b0 = (group // sizes.head_groups) * sizes.batch
    if lists is None or plan.blocks is None:
        return TileRow(b0, h0, row, None, None, None, None)
    at = (b0 if plan.blocks.batch > 1 else 0, h0 if plan.blocks.heads > 1 else 0, row)
    picked = [None if x is None else x[at] for x in lists[:4]]
    return TileRow(b0, h0, row, picked[2], picked[3], picked[0], picked[1])


class BlockVisit(typing.NamedTuple):
    """The key blocks, int32 [chunk], that one step of a tile row computes.

    blocks  numbers of the key blocks
    valid   bool [chunk]: which of `blocks` count, since the last visit of a row may have fewer. None: all of them count, and
            under a block mask all of them are full, so the mask program is not applied
    whole   bool [chunk]: which of `blocks` are from the full list, so that the mask program is not applied to them; None if
            `valid` is None
    """

    blocks: Array
    valid: Array | None
    whole: Array | None


def region_of(sizes: TileSizes, row: TileRow, blocks: Array, placed: Placed = NOWHERE) -> Region:
    """The rectangles of the attention matrix where the queries of a tile row meet key blocks.

    blocks   int32 [n]: numbers of the key blocks
    placed   where queries and keys lie in the whole problem; by default the region counts rows of the call
    """
    return Region(
        row.b0,
        sizes.batch,
        row.h0,
        sizes.heads,
        query_positions(*placed, row.b0, row.q_block * sizes.block_q),
        sizes.block_q,
        key_positions(*placed, row.b0, blocks * sizes.block_kv),
        sizes.block_kv,
    )


def walk(
    plan: KernelPlan, sizes: TileSizes, row: TileRow, body: Callable[[Carry, BlockVisit], Carry], carry: Carry
) -> Carry:
    """Folds `body` over the visits of a tile row: carry = body(carry, visit) for each visit in turn; returns the last carry.

    Without a block mask, every key block is visited by itself. With one, only the blocks of the row's lists are, `chunk` at a
    time (see the top of this file).
    """
    if plan.blocks is None:
        visit = lambda t: BlockVisit(jnp.asarray(t, jnp.int32)[None], None, None)
        return _loop(plan, sizes.columns, sizes.columns, lambda t, c: body(c, visit(t)), carry)
    chunk = sizes.chunk
    num_full = jnp.int32(0) if row.full_num is None else row.full_num
    num_partial = jnp.int32(0) if row.partial_num is None else row.partial_num
    if row.full_index is not None:
        full_index = row.full_index
        at_once = lambda t: BlockVisit(lax.dynamic_slice(full_index, (t * chunk,), (chunk,)), None, None)
        most = row.full_index.shape[0] // chunk
        carry = _loop(plan, num_full // chunk, most, lambda t, c: body(c, at_once(t)), carry)
    left = num_full % chunk
    total = left + num_partial

    def remaining(t: Array) -> BlockVisit:
        """The visit with number t (int32 scalar) among those after the whole chunks of the full list: first the blocks that are
        left of the full list, then those of the partial list.
        """
        place = t * chunk + jnp.arange(chunk, dtype=jnp.int32)
        whole = place < left
        blocks = jnp.zeros(chunk, jnp.int32)
        if row.partial_index is not None:
            blocks = row.partial_index.at[place - left].get(mode="clip")
        if row.full_index is not None:
            full = row.full_index.at[num_full - left + place].get(mode="clip")
            blocks = jnp.where(whole, full, blocks)
        return BlockVisit(blocks, place < total, whole)

    widest = (plan.blocks.partial if row.partial_index is not None else 0) + (
        chunk - 1 if row.full_index is not None else 0
    )
    return _loop(plan, -(-total // chunk), -(-widest // chunk), lambda t, c: body(c, remaining(t)), carry)


def _loop(
    plan: KernelPlan, count: Array | int, most: int, body: Callable[[Array, Carry], Carry], carry: Carry
) -> Carry:
    """Runs carry = body(t, carry) for t = 0 .. count - 1 and returns the last carry.

    count   how many rounds, possibly traced
    most    a static upper bound of `count`

    For a differentiable plan the loop has the static length `most`, because reverse mode needs it, and skips rounds past
    `count`.
    """
    if most == 0:
        return carry
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    if not plan.differentiable:
        return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)

    def round_(state: Carry, t: Array) -> tuple[Carry, None]:
        """Round t of a scan: the body if t < count, else nothing."""
        return lax.cond(t < count, lambda s: body(t, s), lambda s: s, state), None

    return lax.scan(round_, carry, jnp.arange(most, dtype=jnp.int32))[0]
