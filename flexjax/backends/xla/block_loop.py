"""Loops over the tiles of the xla backend, guided by the lists of a block mask.

A *tile row* is one query block of one group of batch entries and query heads. Tile rows run one after another. Each
step of a tile row, a *visit*, computes the tile of `chunk` key blocks. The key blocks of the full list come first,
`chunk` at a time and unmasked; the rest of the full list follows together with the partial list, masked. Loops end
where the lists end, so an empty block costs nothing, whether the lists are constants or traced.

With lengths (plan/lengths.py) the loops also end at the first block past the key length, and a tile row past the query
length has no visit. A block that straddles the key length of some batch entry of the tile row is left to the masked
part: its visit has `cut` set, so that the columns past the length are masked, and their keys and values zeroed.
"""

import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.xla.region import Region
from flexjax.backends.xla.tile_sizes import TileSizes
from flexjax.integers import cdiv
from flexjax.ir.origin import NOWHERE, Placed, key_positions, query_positions
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Lengths
from flexjax.plan.lengths import NONE

Array = jax.Array
Carry = typing.TypeVar("Carry")


class TileRow(typing.NamedTuple):
    """Which query block, batch entries and query heads one tile row computes, and the key blocks of its lists.

    All are int32 scalars but the indices, int32 [width]: ascending numbers of key blocks. Fields of a list are None
    where it does not exist. With key lengths, the numbers of the lists count only blocks with a key that exists in some
    batch entry of the tile row. With query lengths, `blocks` and these numbers are 0 where the tile row has no query
    that exists.
    """

    b0: Array  # the first batch entry
    h0: Array  # the first query head
    q_block: Array
    full_num: Array | None  # how many key blocks the full list has
    full_index: Array | None
    partial_num: Array | None  # how many key blocks the partial list has
    partial_index: Array | None
    blocks: Array | None = None  # how many key blocks have a key that exists; None without lengths
    uncut: Array | None = None  # how many lie before the shortest key length; None without key lengths
    uncut_full: Array | None = None  # how many blocks of the full list do; None without key lengths or that list


def row_at(
    plan: KernelPlan, sizes: TileSizes, lists: BlockLists | None, step: Array, lengths: Lengths = NONE
) -> TileRow:
    """The tile row with number `step` (int32 scalar) of 0 .. sizes.steps - 1.

    Query blocks run fastest, then groups of heads, then groups of batch entries.
    """
    row = step % sizes.rows
    group = step // sizes.rows
    h0 = (group % sizes.head_groups) * sizes.heads
    b0 = (group // sizes.head_groups) * sizes.batch
    if lists is None or plan.blocks is None:
        return _trimmed(TileRow(b0, h0, row, None, None, None, None), sizes, lengths)
    # lists with one batch entry or head are those of all
    at = (b0 if plan.blocks.batch > 1 else 0, h0 if plan.blocks.heads > 1 else 0, row)
    picked = [None if x is None else x[at] for x in lists[:4]]
    return _trimmed(TileRow(b0, h0, row, picked[2], picked[3], picked[0], picked[1]), sizes, lengths)


def _trimmed(row: TileRow, sizes: TileSizes, lengths: Lengths) -> TileRow:
    """The tile row with its counts set for the lengths of its batch entries, int32 [B]."""
    of_row = lambda x: lax.dynamic_slice(x, (row.b0,), (sizes.batch,))
    if lengths.key is None and lengths.query is None:
        return row
    blocks = jnp.int32(sizes.columns)
    if lengths.key is not None:
        ends = of_row(lengths.key)
        blocks = -(-ends.max() // sizes.block_kv)
        row = row._replace(uncut=ends.min() // sizes.block_kv)
    if lengths.query is not None:
        blocks = jnp.where(row.q_block * sizes.block_q < of_row(lengths.query).max(), blocks, 0)

    def number(num: Array | None, index: Array | None, end: Array) -> Array | None:
        """How many of the first `num` entries of an ascending list are below `end`."""
        if num is None or index is None:
            return None
        real = jnp.arange(index.shape[0], dtype=jnp.int32) < num
        return jnp.sum(real & (index < end), dtype=jnp.int32)

    return row._replace(
        full_num=number(row.full_num, row.full_index, blocks),
        partial_num=number(row.partial_num, row.partial_index, blocks),
        blocks=blocks,
        uncut_full=None if row.uncut is None else number(row.full_num, row.full_index, jnp.minimum(blocks, row.uncut)),
    )


class BlockVisit(typing.NamedTuple):
    """The key blocks that one step of a tile row computes: int32 [chunk], [tail] or [1]."""

    blocks: Array  # without a block mask they follow one another
    # bool [blocks]: which count, since the last visit of a row may have fewer. None: all, and under a block mask all
    # are full.
    valid: Array | None
    whole: Array | None  # bool [blocks]: from the full list, so that no mask is applied
    cut: bool = False  # key lengths may end inside of the blocks


def region_of(sizes: TileSizes, row: TileRow, blocks: Array, placed: Placed = NOWHERE) -> Region:
    """Where the queries of a tile row meet key blocks, in positions of `placed`, by default in rows of the call."""
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
    """Folds `body` over the visits of a tile row: carry = body(carry, visit); returns the last carry.

    With a block mask, only the blocks of the row's lists are visited: those of the full list first, `chunk` at a time
    and unmasked, then the rest of it with the partial list, `tail` at a time and masked. With key lengths, the first
    part ends before the first block that the shortest length of the tile row cuts.
    """
    if plan.blocks is None:
        return _walk_all(plan, sizes, row, body, carry)
    chunk, tail, cut = sizes.chunk, sizes.tail, row.uncut is not None
    num_full = jnp.int32(0) if row.full_num is None else row.full_num
    num_partial = jnp.int32(0) if row.partial_num is None else row.partial_num
    unmasked = (num_full if row.uncut_full is None else row.uncut_full) // chunk
    if row.full_index is not None:
        full_index = row.full_index
        at_once = lambda t: BlockVisit(lax.dynamic_slice(full_index, (t * chunk,), (chunk,)), None, None)
        most = row.full_index.shape[0] // chunk
        carry = _loop(plan, unmasked, most, lambda t, c: body(c, at_once(t)), carry)
    left = num_full - unmasked * chunk
    total = left + num_partial

    def remaining(t: Array) -> BlockVisit:
        """Visit t after the whole chunks of the full list: first what is left of it, then the partial list."""
        place = t * tail + jnp.arange(tail, dtype=jnp.int32)
        whole = place < left
        blocks = jnp.zeros(tail, jnp.int32)
        if row.partial_index is not None:
            blocks = row.partial_index.at[place - left].get(mode="clip")
        if row.full_index is not None:
            full = row.full_index.at[num_full - left + place].get(mode="clip")
            blocks = jnp.where(whole, full, blocks)
        return BlockVisit(blocks, place < total, whole, cut)

    widest = plan.blocks.partial if row.partial_index is not None else 0
    if row.full_index is not None:
        # one batch entry's length cuts one block; those of several may leave all blocks to this loop
        left_at_most = chunk - 1 + cut if sizes.batch == 1 else row.full_index.shape[0]
        widest += left_at_most if cut else chunk - 1
    return _loop(plan, -(-total // tail), cdiv(widest, tail), lambda t, c: body(c, remaining(t)), carry)


def _walk_all(
    plan: KernelPlan, sizes: TileSizes, row: TileRow, body: Callable[[Carry, BlockVisit], Carry], carry: Carry
) -> Carry:
    """`walk` without a block mask: over every key block, or over those with a key that exists, in ascending order.

    Visits of `chunk` blocks come first, then one block at a time. With key lengths, the first ones lie before the
    shortest length of the batch entries, and the others have `cut` True.
    """
    chunk, most, blocks, uncut = sizes.chunk, sizes.columns, row.blocks, row.uncut
    count = most if blocks is None else blocks
    cut = uncut is not None
    if uncut is not None:
        # if the call has one key block, that has `cut` True
        whole, most_whole = jnp.minimum(uncut, count) // chunk, 0 if most == 1 else most // chunk
    else:
        whole, most_whole = count // chunk, most // chunk
    if most_whole == 0:
        whole = 0
    together = lambda t: BlockVisit(jnp.asarray(t, jnp.int32) * chunk + jnp.arange(chunk, dtype=jnp.int32), None, None)
    carry = _loop(plan, whole, most_whole, lambda t, c: body(c, together(t)), carry)
    alone = lambda t: BlockVisit(jnp.asarray(whole * chunk + t, jnp.int32)[None], None, None, cut)
    # one batch entry's length leaves at most a chunk; those of several may leave all blocks
    left = most if cut and (sizes.batch > 1 or most_whole == 0) else chunk if cut else most - most_whole * chunk
    return _loop(plan, count - whole * chunk, left, lambda t, c: body(c, alone(t)), carry)


def _loop(
    plan: KernelPlan, count: Array | int, most: int, body: Callable[[Array, Carry], Carry], carry: Carry
) -> Carry:
    """carry = body(t, carry) for t = 0 .. count - 1; `most` is a static upper bound of `count`.

    For a differentiable plan the loop has the length `most`, for reverse mode, and skips rounds past `count`.
    """
    if most == 0:
        return carry
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    if not plan.differentiable:
        return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)

    def round_(state: Carry, t: Array) -> tuple[Carry, None]:
        return lax.cond(t < count, lambda s: body(t, s), lambda s: s, state), None

    return lax.scan(round_, carry, jnp.arange(most, dtype=jnp.int32))[0]
