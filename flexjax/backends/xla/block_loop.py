"""Loops over the tiles of the xla backend, guided by the lists of a block mask.

A *tile row* is one query block of one group of batch entries and heads. Tile rows run one after another. Within one, the key
blocks of the full list come first, `chunk` at a time and unmasked; the rest of the full list follows together with the partial
list, masked. Loops end where the lists end, so an empty block costs nothing, whether the lists are constants or traced.
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
    """One tile row (traced scalars).

    b0, h0    first batch entry and first query head
    q_block   number of the query block
    lists     counts and key blocks of the full and the partial list of the query block; None where every block is visited
    """

    b0: Array
    h0: Array
    q_block: Array
    full_num: Array | None
    full_index: Array | None
    partial_num: Array | None
    partial_index: Array | None


def row_at(plan: KernelPlan, sizes: TileSizes, lists: BlockLists | None, step: Array) -> TileRow:
    """The tile row with number `step` of 0 .. sizes.steps - 1."""
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

    valid   bool [chunk]: which of `blocks` are real, since the last step of a row may have fewer; None: all, and no mask
    whole   bool [chunk]: which are from the full list and need no mask; None with `valid`
    """

    blocks: Array
    valid: Array | None
    whole: Array | None


def region_of(sizes: TileSizes, row: TileRow, blocks: Array, placed: Placed = NOWHERE) -> Region:
    """The part of the attention matrix that a tile row and its key blocks cover; by default counted in rows of the call."""
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
    """Folds `body` over the visits of a tile row: carry -> body(carry, visit) for each visit in turn."""
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
        """Visit t of those after the whole chunks of the full list: what is left of it, then the partial list."""
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
    """Runs body(0, carry), body(1, ..) and so on, `count` times; `most` is a static bound of `count`.

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
        return lax.cond(t < count, lambda s: body(t, s), lambda s: s, state), None

    return lax.scan(round_, carry, jnp.arange(most, dtype=jnp.int32))[0]
