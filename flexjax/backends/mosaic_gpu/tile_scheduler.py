"""The forward kernel's tile scheduler: which CTA computes which query tile, and which key tiles that visits.

A work item is one query tile of one head of one batch entry. Work items are numbered in the order in which they
should start:

    without a block mask   head by head, query tiles ascending
    with one               the rows of the mask with most visits first. With a persistent grid over all heads; otherwise within a
                           few heads at a time, whose keys and values fit the L2 (`heads_at_once`)

CTAs take work items in one of three ways:

    one each               the grid has a CTA for each work item; the hardware starts them in order
    persistent             as many CTAs as SMs; of P CTAs, CTA p takes items p, 2 P - 1 - p, 2 P + p, ...: every second round of
                           P items goes to the CTAs in reverse order, so that the CTAs get about equal work
    dynamic scheduler      as many CTAs as SMs; each takes its first item by its own number and all others from an atomic counter
                           in global memory. The producer does so while the consumers still work on the item before, and passes
                           the item on through a mailbox in shared memory (`put`, `get`)

A *turn* is the number of a work item among those of its CTA, from 0. In the simulator the dynamic scheduler gives CTA p
the items p, p + P, p + 2 P, ...; results do not depend on which CTA computes an item.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flexjax.backends.mosaic_gpu import atomic_counter, dq_order
from flexjax.backends.mosaic_gpu.branch import cond
from flexjax.backends.mosaic_gpu.forward_tiles import MAILBOX_WORDS
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, i32
from flexjax.block_mask.host_or_program import flat_constant, largest_first
from flexjax.integers import cdiv, round_up
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

L2_SHARE = 24e6
"""Bytes of keys and values that stay in the L2 beside everything else."""
FEW_HEADS, L2_SHARE_OF_FEW = 4, 36e6
"""Up to so many heads side by side may have so many bytes of keys and values under a mask that is not causal-like, because its rows mostly
visit few of the keys. 12 documents of 16384 tokens, in one run: 0.552 ms with 2 heads of 128, 0.544 with 4, 0.574 with 8."""
COUNTER_RESULT = MAILBOX_WORDS - 1
"""Word of the first mailbox through which one thread passes a number from the atomic counter to its warpgroup."""


class ScheduledTile(typing.Protocol):
    """What the scheduler, and what all forward kernels share, read of a kernel's configuration (ForwardTile documents the fields)."""

    @property
    def block_q(self) -> int:
        """Queries of a CTA's tile."""
        ...

    @property
    def rows(self) -> int:
        """Queries of one warpgroup."""
        ...

    @property
    def ctas(self) -> int:
        """CTAs of a cluster that share a tile; 1 without clusters."""
        ...

    @property
    def block_kv(self) -> int:
        """Keys of a tile."""
        ...

    @property
    def head_dim(self) -> int:
        """Head dim of queries and keys, padded."""
        ...

    @property
    def value_dim(self) -> int:
        """Head dim of values, padded."""
        ...

    @property
    def lazy_rescale(self) -> bool:
        """Whether the output is rescaled only where a row maximum exceeds the softmax reference by more than 8 powers of two."""
        ...

    @property
    def polynomials(self) -> int:
        """How many of eight exponentials are computed as polynomials instead of by `ex2` (exponential.py), 0 to 8."""
        ...

    @property
    def persistent(self) -> bool:
        """Whether a CTA takes a fixed share of all query tiles."""
        ...

    @property
    def dynamic_scheduler(self) -> bool:
        """Whether a CTA takes query tiles from an atomic counter."""
        ...

    @property
    def reverse_kv(self) -> bool:
        """Whether key tiles that need no mask are visited from the last to the first."""
        ...

    @property
    def programs(self) -> int:
        """The most CTAs of the grid where `persistent` or `dynamic_scheduler`. Not read in other grids, which have a CTA for each query
        tile.
        """
        ...


class WorkItem(typing.NamedTuple):
    """One query tile and its visits; int32 scalars. A visit is a step of the kernel: one key tile.

    b, h       batch entry and query head
    q_tile     number of the query tile within the head
    row        row of the block lists, counted over their batch entries and heads; 0 without a block mask
    unmasked   visits that need no mask; they come first
    full       visits of the full list: the unmasked ones, then tiles that reach past the last key. As `unmasked` without a block mask
    total      all visits
    """

    b: Scalar
    h: Scalar
    q_tile: Scalar
    row: Scalar
    unmasked: Scalar
    full: Scalar
    total: Scalar


class MaskRows(typing.NamedTuple):
    """The block mask as the scheduler reads it: arrays before the kernel, Refs inside.

    order   rows of the mask, those with most visits first (`TileScheduler.order`); None without a block mask
    lists   the lists in one dimension each (`flat`); None without a block mask
    """

    order: jax.Array | None
    lists: BlockLists | None


def flat(lists: BlockLists | None) -> BlockLists | None:
    """The block lists with each array reshaped to one dimension; known lists get one element more, -1 (`flat_constant`). None stays None."""
    return None if lists is None else BlockLists(*(None if x is None else flat_constant(x) for x in lists))


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Assigns the work items of `plan` to CTAs, for the kernel configuration `tile`."""

    plan: KernelPlan
    tile: ScheduledTile

    @property
    def q_tiles(self) -> int:
        """Query tiles of a head; they fill whole rows of the block mask, so some may lie wholly past the last query."""
        whole = self.tile.block_q if self.plan.blocks is None else self.plan.blocks.block_q
        return cdiv(self.plan.q_len, whole) * (whole // self.tile.block_q)

    @property
    def items(self) -> int:
        """Number of work items of the whole call."""
        return self.plan.batch * self.plan.q_heads * self.q_tiles

    @property
    def programs(self) -> int:
        """Number of CTAs of the grid: one for each work item; at most `ForwardTile.programs` with a persistent grid
        or the dynamic scheduler.
        """
        return (
            min(self.items, self.tile.programs) if self.tile.persistent or self.tile.dynamic_scheduler else self.items
        )

    @property
    def heads_at_once(self) -> int:
        """Number of query heads, counted over all batch entries, whose work items have neighbouring numbers.

        A persistent grid mixes all heads, so that the longest rows start first. In other grids the next heads start when these are done,
        so that the keys and values in use stay in the L2. Their number is then the largest divisor of the number of all heads for which
        the keys and values of so many heads, at two bytes an element, fit L2_SHARE, or 1; those of a key head count once for all of its
        query heads. With the dynamic scheduler and a mask that is not causal-like, up to FEW_HEADS heads may take L2_SHARE_OF_FEW.
        """
        plan = self.plan
        heads = plan.batch * plan.q_heads
        if self.tile.persistent:
            return heads
        head_bytes = plan.kv_len * (self.tile.head_dim + self.tile.value_dim) * self.tile.ctas * 2 / plan.group
        parts = self.tile.dynamic_scheduler and plan.blocks is not None and not dq_order.is_triangle(plan)
        share = lambda n: L2_SHARE_OF_FEW if parts and n <= FEW_HEADS else L2_SHARE
        return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * head_bytes <= share(n)))

    def order(self, lists: BlockLists | None) -> jax.Array | None:
        """Rows of the block mask (query blocks), sorted by number of visits, most first, equal ones by number; None
        without a block mask. A mask without lists has no visits.

        lists   the block lists of the call

        Returns int32 [Bm * Nm * R], with one element more if the lists are known (`flat_constant`): Bm and Nm are the
        mask's own batch and head dims (1 if the call broadcasts them), R is the number of query blocks of a head. In a
        persistent grid this is one sorted list of the row numbers (b * Nm + h) * R + row. Otherwise it has a list of R
        for each (b, h), sorted by itself, of row numbers 0 to R - 1.
        """
        if self.plan.blocks is None or lists is None:
            return None
        shape = (self.plan.blocks.batch, self.plan.blocks.heads, cdiv(self.plan.q_len, self.plan.blocks.block_q))
        visits = np.zeros(shape, np.int32)  # a mask known to be empty has neither list
        for number in (lists.partial_num, lists.full_num):
            visits = visits if number is None else number + visits
        if self.tile.persistent:
            visits = visits.reshape(1, 1, -1)
        return flat_constant(largest_first(visits))  # pyright: ignore[reportArgumentType]

    # ----------------------------------------------------------------- a fixed share of the items

    def number(self, turn: Scalar) -> Scalar:
        """Number in the whole call of the work item that is number `turn` of this CTA, without the dynamic scheduler;
        it may be past the last item.

        It is the number of the CTA where each item has one; in a persistent grid of P CTAs, CTA p takes items p, 2 P - 1 - p, 2 P + p, ....
        """
        program = lax.axis_index("program")
        if self.programs == self.items:
            return program
        back = i32(self.programs - 1) - program
        return turn * self.programs + jnp.where(turn % 2 == 0, program, back)

    def turns(self) -> Scalar:
        """How many work items this CTA takes, without the dynamic scheduler: items // CTAs, plus one if this CTA takes
        one of the items that remain.
        """
        rounds, rest = divmod(self.items, self.programs)
        if not rest:
            return i32(rounds)
        last = self.number(i32(rounds))
        return i32(rounds) + jnp.where(last < self.items, i32(1), i32(0))

    # ----------------------------------------------------------------- what an item is, and what it visits

    def item(self, mask: MaskRows, number: Scalar) -> WorkItem:
        """The work item with the number `number`, read from the block mask inside the kernel.

        Without a block mask it visits all key tiles; unmasked are none if the plan has a mask_mod, else all but one
        that reaches past the last key. With one it visits the full blocks of its row, then the partial ones; tiles of a
        full block that reach past the last key are masked. A query tile wholly past the last query visits nothing.
        """
        plan, blocks = self.plan, self.plan.blocks
        if blocks is None:
            q_tile = lax.rem(number, i32(self.q_tiles))
            head = lax.div(number, i32(self.q_tiles))
            b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
            total = i32(cdiv(plan.kv_len, self.tile.block_kv))
            unmasked = i32(0) if plan.mask is not None else i32(plan.kv_len // self.tile.block_kv)
            return WorkItem(b, h, q_tile, i32(0), unmasked, unmasked, total)
        assert mask.lists is not None
        inner = blocks.block_q // self.tile.block_q
        rows = cdiv(plan.q_len, blocks.block_q)
        b, h, q_tile, at = self._position_in_mask(mask, number)
        per_block = i32(blocks.block_kv // self.tile.block_kv)
        full = i32(0) if mask.lists.full_num is None else mask.lists.full_num[at]
        partial = i32(0) if mask.lists.partial_num is None else mask.lists.partial_num[at]
        if blocks.block_q * rows != plan.q_len and inner > 1:  # a query tile wholly past the last query visits nothing
            inside = q_tile * self.tile.block_q < plan.q_len
            full, partial = jnp.where(inside, full, 0), jnp.where(inside, partial, 0)
        unmasked = full * per_block
        past_end = round_up(plan.kv_len, blocks.block_kv) - plan.kv_len
        if past_end and mask.lists.full_index is not None:
            last = mask.lists.full_index[at * blocks.full + lax.max(full - 1, i32(0))]
            overhangs = (full > 0) & (last == plan.kv_len // blocks.block_kv)
            unmasked = unmasked - jnp.where(overhangs, i32(cdiv(past_end, self.tile.block_kv)), i32(0))
        return WorkItem(b, h, q_tile, at, unmasked, full * per_block, (full + partial) * per_block)

    def _position_in_mask(self, mask: MaskRows, number: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """(batch entry, head, query tile within the head, row of the block lists) of the work item with the number
        `number`, under a block mask.

        The row is counted over the batch entries and heads of the block lists, which have one for all where the call
        broadcasts them. A row has one work item for each of its query tiles, of each batch entry and head that reads
        it. Which row comes when is read from `mask.order`: in a persistent grid over all heads, otherwise for each
        head, `heads_at_once` heads side by side.
        """
        plan, blocks = self.plan, self.plan.blocks
        assert blocks is not None
        assert mask.order is not None
        inner = blocks.block_q // self.tile.block_q
        rows = cdiv(plan.q_len, blocks.block_q)
        if self.tile.persistent:
            batches, heads = (plan.batch if blocks.batch == 1 else 1), (plan.q_heads if blocks.heads == 1 else 1)
            repeats = batches * heads * inner
            entry = mask.order[lax.div(number, i32(repeats))]
            rest = lax.rem(number, i32(repeats))
            row = lax.rem(entry, i32(rows))
            list_b = lax.div(entry, i32(rows * blocks.heads))
            list_h = lax.rem(lax.div(entry, i32(rows)), i32(blocks.heads))
            h = lax.rem(rest, i32(heads)) if blocks.heads == 1 else list_h
            b = lax.rem(lax.div(rest, i32(heads)), i32(batches)) if blocks.batch == 1 else list_b
            q_tile = row * inner + lax.div(rest, i32(heads * batches))
        else:
            together = self.heads_at_once
            rest = lax.rem(number, i32(together * rows * inner))
            head = lax.div(number, i32(together * rows * inner)) * together + lax.rem(rest, i32(together))
            b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
            list_b, list_h = (b if blocks.batch > 1 else i32(0)), (h if blocks.heads > 1 else i32(0))
            rank = lax.div(rest, i32(together * inner))
            row = mask.order[(list_b * blocks.heads + list_h) * rows + rank]
            q_tile = row * inner + lax.rem(lax.div(rest, i32(together)), i32(inner))
        return b, h, q_tile, (list_b * blocks.heads + list_h) * rows + row

    def kv_start(self, mask: MaskRows, item: WorkItem, step: Scalar, in_full: bool | None = None) -> Scalar:
        """First key of the tile that the item visits at `step`.

        step      0 to item.total - 1
        in_full   whether the step is in the full list (True) or the partial list (False), where the caller knows; for a step outside of
                  that list the result means nothing and may be negative, so it must not be used to read keys. None: unknown

        Full blocks come first, then partial ones, in the order of their lists; without a block mask all tiles in order. With `reverse_kv`
        the unmasked tiles are visited from the last to the first: under a causal mask most biases by distance have their largest scores
        at the last keys, and once the maximum is found the output is not rescaled again. A mask with neither list has no visits, and the
        result means nothing.
        """
        if self.tile.reverse_kv and in_full is not False:
            back = item.unmasked - 1 - step
            step = back if in_full else jnp.where(step < item.unmasked, back, step)
        if self.plan.blocks is None:
            return step * self.tile.block_kv
        blocks, lists = self.plan.blocks, mask.lists
        assert lists is not None
        per_block = blocks.block_kv // self.tile.block_kv

        def read(index: jax.Array | None, width: int, position: Scalar) -> Scalar:
            """First key of the tile at `position` in the item's row of a block list.

            index      the flat block list, `width` blocks for each row
            position   counted in tiles, `per_block` for each block of the list; outside of the row the result means nothing, but nothing
                       is read past it
            """
            assert index is not None
            block = position if per_block == 1 else lax.div(position, i32(per_block))
            block = lax.min(lax.max(block, i32(0)), i32(width - 1))
            start = index[item.row * width + block] * blocks.block_kv
            return start if per_block == 1 else start + lax.rem(position, i32(per_block)) * self.tile.block_kv

        if lists.full_index is None and lists.partial_index is None:
            return step
        if lists.partial_index is None or (in_full and lists.full_index is not None):
            return read(lists.full_index, blocks.full, step)
        if lists.full_index is None or in_full is False:
            return read(lists.partial_index, blocks.partial, step - item.full)
        return cond(
            step < item.full,
            lambda: read(lists.full_index, blocks.full, step),
            lambda: read(lists.partial_index, blocks.partial, step - item.full),
        )


# ------------------------------------------------------------------- the dynamic scheduler


def new_counter(programs: int) -> jax.Array:
    """The atomic counter of the dynamic scheduler, [1] int32. It starts at `programs`, the number of CTAs, because CTA p
    takes work item p first, and all later items come from the counter.
    """
    return jnp.full((1,), programs, jnp.int32)


def next_number(counter: Ref | None, mailbox: Ref, number: Scalar, programs: int, interpret: bool) -> Scalar:
    """Number of the next work item of this CTA, from the counter, which it raises by 1; called by the whole producer warpgroup, once for
    each item. It may be past the last item, which means that there are no more.

    counter     as `new_counter` made it, in global memory; None in the simulator
    mailbox     shared memory, of which one word passes the number from the thread that asks to the others
    number      of the CTA's last work item, used in the simulator alone, where the next is `programs` later
    programs    CTAs of the grid
    interpret   whether the kernel runs in the simulator
    """
    if interpret or counter is None:
        return number + i32(programs)
    return atomic_counter.take(counter.at[pl.ds(0, 1)], mailbox.at[pl.ds(COUNTER_RESULT, 1)])


def put(mailbox: Ref, slot: Scalar, item: WorkItem | None) -> None:
    """In the producer: writes a work item to the mailbox of query slot `slot`; None: there are no more items. The consumers read it by
    `get` once the slot's queries have arrived, so it is called before the copy of the queries is started, in a slot that is free.

    The mailbox has MAILBOX_WORDS words for each slot: word 0 is 1 if there is an item, else 0, and the fields of the item follow, unwritten
    without one.
    """
    first = slot * i32(MAILBOX_WORDS)
    if item is None:
        mailbox[first] = i32(0)
        return
    mailbox[first] = i32(1)
    for n, value in enumerate(item):
        mailbox[first + i32(1 + n)] = i32(value)


def get(mailbox: Ref, slot: Scalar) -> tuple[Scalar, WorkItem]:
    """In a consumer: (whether there is an item, the item) from the mailbox of query slot `slot`, after the slot's queries have arrived.
    Without an item the fields of the second mean nothing.
    """
    first = slot * i32(MAILBOX_WORDS)
    found = [mailbox[first + i32(1 + n)] for n in range(len(WorkItem._fields))]
    return mailbox[first] != 0, WorkItem(*found)
