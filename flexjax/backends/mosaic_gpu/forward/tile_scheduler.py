"""The forward kernel's tile scheduler: which CTA computes which query tile, and which key tiles that visits.

A work item is one query tile of one head of one batch entry. Work items are numbered in the order in which they start:

    without a block mask   head by head, query tiles ascending
    with one               rows of the mask with most visits first. With a persistent grid over all heads; otherwise
                           within a few heads at a time, whose keys and values fit the L2 (`heads_at_once`)

CTAs take work items in one of three ways:

    one each               the grid has a CTA for each work item; the hardware starts them in order
    persistent             as many CTAs as SMs; of P CTAs, CTA p takes items p, 2 P - 1 - p, 2 P + p, ..., because every
                           second round in reverse order gives CTAs about equal work
    dynamic scheduler      as many CTAs as SMs; each takes its first item by its own number, and the producer takes all
                           others from an atomic counter in global memory, ahead of the consumers, and passes them on
                           through a mailbox (`put`, `get`)

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

from flexjax.backends.mosaic_gpu.forward.hopper_tiles import MAILBOX_WORDS
from flexjax.backends.mosaic_gpu.machine import atomic_counter, dq_order
from flexjax.backends.mosaic_gpu.machine.branch import cond
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, i32
from flexjax.backends.mosaic_gpu.machine.simulator import device_op
from flexjax.block_mask.host_or_program import flat_constant, largest_first, module_of
from flexjax.block_mask.transpose import EMPTY, FULL
from flexjax.integers import cdiv, round_up
from flexjax.plan.kernel_plan import BlockLists, KernelPlan
from flexjax.rewrites.mask_blocks import classes_of_plan

L2_SHARE = 24e6  # bytes of keys and values that stay in the L2 beside everything else
FEW_HEADS, L2_SHARE_OF_FEW = 4, 36e6
"""Heads side by side may have more bytes under a mask that is not causal-like: its rows visit few of the keys."""
NO_LISTS = BlockLists(None, None, None, None)
COUNTER_RESULT = MAILBOX_WORDS - 1
"""Word of the first mailbox through which one thread passes a number from the atomic counter to its warpgroup."""


class ScheduledTile(typing.Protocol):
    """What the scheduler and the shared forward code read of a configuration; ForwardTile documents the fields."""

    @property
    def block_q(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def ctas(self) -> int: ...

    @property
    def block_kv(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def lazy_rescale(self) -> bool: ...

    @property
    def polynomials(self) -> int: ...

    @property
    def persistent(self) -> bool: ...

    @property
    def dynamic_scheduler(self) -> bool: ...

    @property
    def reverse_kv(self) -> bool: ...

    @property
    def programs(self) -> int: ...


class WorkItem(typing.NamedTuple):
    """One query tile and its visits; int32 scalars. A visit is a step of the kernel: one key tile."""

    b: Scalar  # batch entry
    h: Scalar  # query head
    q_tile: Scalar  # number of the query tile within the head
    row: Scalar  # row of the block lists, counted over their batch entries and heads; 0 without a block mask
    unmasked: Scalar  # visits that need no mask; they come first
    full: Scalar  # visits of the full list: the unmasked ones, then tiles that reach past the last key
    total: Scalar  # all visits


class Visits(typing.NamedTuple):
    """Both lists of an invariant call in one, in the order in which a query tile visits them: int32, of one dimension.

    A *run* is neighbouring visits that are all masked or all unmasked. With documents a visit is a tile, else a block.
    """

    first: jax.Array  # 2 * number of the key block, or `packed` tile, plus 1 for masked steps
    end: jax.Array  # the place after the run of this place
    number: jax.Array | None  # how many visits a row has; None: those of both lists


PACKED = 256


def packed(first: typing.Any, count: typing.Any) -> typing.Any:
    """A key tile of a document as one number: its first key, and how many of its keys are of the document."""
    return first * PACKED + count


class MaskRows(typing.NamedTuple):
    """The block mask as the scheduler reads it: arrays before the kernel, Refs inside; None without a block mask."""

    order: jax.Array | None  # rows of the mask, those with most visits first (`TileScheduler.order`)
    lists: BlockLists | None  # of one dimension each (`flat`)
    visits: Visits | None = None  # of an invariant call


def flat(lists: BlockLists | None) -> BlockLists | None:
    """The block lists with each array reshaped to one dimension; known lists get one element more (`flat_constant`)."""
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
        return self.plan.batch * self.plan.q_heads * self.q_tiles

    @property
    def programs(self) -> int:
        return (
            min(self.items, self.tile.programs) if self.tile.persistent or self.tile.dynamic_scheduler else self.items
        )

    @property
    def heads_at_once(self) -> int:
        """Query heads, over all batch entries, whose work items have neighbouring numbers.

        A persistent grid mixes all heads, so that the longest rows start first; others keep the keys of few in the L2.
        """
        plan = self.plan
        heads = plan.batch * plan.q_heads
        if self.tile.persistent:
            return heads
        # At two bytes an element; a key head counts once for all of its query heads.
        head_bytes = plan.kv_len * (self.tile.head_dim + self.tile.value_dim) * self.tile.ctas * 2 / plan.group
        parts = self.tile.dynamic_scheduler and plan.blocks is not None and not dq_order.is_triangle(plan)
        share = lambda n: L2_SHARE_OF_FEW if parts and n <= FEW_HEADS else L2_SHARE
        return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * head_bytes <= share(n)))

    def order(self, lists: BlockLists | None) -> jax.Array | None:
        """Rows of the block mask (query blocks), most visits first, equal ones by number; None without a block mask.

        int32 [Bm * Nm * R] (`flat_constant`), for the mask's batch and head dims and R query blocks of a head. In a
        persistent grid one sorted list of numbers (b * Nm + h) * R + row; otherwise one of 0 to R - 1 for each (b, h).
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

    @property
    def in_order(self) -> bool:
        """Whether key tiles are visited by their numbers, masked or not: all ascending, or with `reverse_kv` all
        descending (plan/invariant.py). Masked and unmasked steps then come in runs.
        """
        return self.plan.options.invariant

    def visits(self, lists: BlockLists | None, documents: jax.Array | None = None) -> Visits | None:
        """The visits of each row of the lists; None for a call whose unmasked steps come first.

        documents   `Operands.documents`
        """
        blocks = self.plan.blocks
        if not self.in_order or blocks is None or lists is None:
            return None
        xp, rows, total = module_of(*lists), [], None
        none = 2 * packed(self.plan.kv_len + 1, 0)  # above every visit
        if documents is not None:
            hit, found = self._tiles_of_documents(lists, documents)
            xp, rows, total = jnp, [jnp.where(hit, -found if self.tile.reverse_kv else found, none)], hit.sum(-1)
            lists = NO_LISTS
        past_end = self.plan.kv_len // blocks.block_kv  # a block that reaches past the last key, if there is one
        for masked, number, index in ((1, *lists[:2]), (0, *lists[2:])):
            if number is None or index is None:
                continue
            found = 2 * index + (masked or xp.where(index == past_end, 1, 0))
            there = xp.arange(index.shape[-1], dtype=np.int32) < number[..., None]
            rows.append(xp.where(there, -found if self.tile.reverse_kv else found, none))
        if not rows:
            return None
        entry: typing.Any = abs(xp.sort(xp.concatenate(rows, -1), axis=-1))
        width = entry.shape[-1]
        entry = xp.where(entry == none, 0, entry)
        last = xp.concatenate([entry[..., 1:] % 2 != entry[..., :-1] % 2, xp.ones_like(entry[..., :1], bool)], -1)
        ends: typing.Any = xp.where(last, xp.arange(1, width + 1, dtype=np.int32), np.int32(width))[..., ::-1]
        ends = np.minimum.accumulate(ends, -1) if xp is np else lax.cummin(ends, ends.ndim - 1)
        counts = None if total is None else total.astype(np.int32).reshape(-1)
        first, end = (flat_constant(x.astype(np.int32)) for x in (entry, ends[..., ::-1]))
        return Visits(first, end, counts)

    def _tiles_of_documents(self, lists: BlockLists, documents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(whether a row of the lists visits a tile, `Visits.first` of the tile) of the key tiles of all documents, by
        their first keys: [batch, heads, rows, tiles].
        """
        plan, blocks, keys = self.plan, self.plan.blocks, self.tile.block_kv
        assert blocks is not None
        offsets, classes = documents[: blocks.batch], jnp.asarray(classes_of_plan(plan, lists))
        before = jnp.cumsum(-(-jnp.diff(offsets, prepend=offsets[:, :1]) // keys), 1)  # tiles of earlier documents
        tile = jnp.arange(self._visits_of_row, dtype=jnp.int32)
        number = jnp.minimum((before[:, 1:, None] <= tile).sum(1, dtype=jnp.int32), plan.documents - 1)
        at = lambda x: jnp.take_along_axis(x, number, 1)
        first = jnp.clip(at(offsets) + (tile - at(before)) * keys, 0, plan.kv_len - 1)
        of_block = lambda key: jnp.take_along_axis(
            classes, jnp.broadcast_to((key // blocks.block_kv)[:, None, None], (*classes.shape[:3], len(tile))), -1
        )
        ends = of_block(first), of_block(jnp.minimum(first + keys, plan.kv_len) - 1)
        exists = (tile < before[:, -1:])[:, None, None]
        hit = exists & ((ends[0] != EMPTY) | (ends[1] != EMPTY))
        count = jnp.clip(jnp.take_along_axis(offsets, number + 1, 1) - first, 0, keys)
        whole = (ends[0] == FULL) & (ends[1] == FULL) & (count == keys)[:, None, None]
        found = 2 * packed(first, count)[:, None, None]
        return hit, jnp.where(whole, found, found + 1)

    @property
    def _visits_of_row(self) -> int:
        blocks = self.plan.blocks
        if self.plan.documents:
            return cdiv(self.plan.kv_len, self.tile.block_kv) + self.plan.documents
        return 0 if blocks is None else blocks.partial + blocks.full

    @property
    def _tiles_of_visit(self) -> int:
        blocks = self.plan.blocks
        return 1 if blocks is None or self.plan.documents else blocks.block_kv // self.tile.block_kv

    def run_end(self, mask: MaskRows, item: WorkItem, step: Scalar, masked: bool) -> Scalar:
        """The step after the run from `step` on, whose steps are all masked or all not; `step` if it is of another
        kind, or past the last one.
        """
        if self.plan.blocks is None:
            # the last tile is masked, or all are
            border = item.total - item.unmasked if self.tile.reverse_kv else item.unmasked
            if masked == self.tile.reverse_kv:  # these come first
                return lax.max(step, border)
            return jnp.where(step < border, step, item.total)
        assert mask.visits is not None
        per_block = i32(self._tiles_of_visit)
        place = lax.min(lax.div(step, per_block), i32(self._visits_of_row - 1)) + item.row * self._visits_of_row
        same = lax.rem(mask.visits.first[place], i32(2)) == int(masked)
        return jnp.where(same, lax.max(step, lax.min(mask.visits.end[place] * per_block, item.total)), step)

    # ----------------------------------------------------------------- a fixed share of the items

    def number(self, turn: Scalar) -> Scalar:
        """Number in the call of work item `turn` of this CTA, perhaps past the last one."""
        program = lax.axis_index("program")
        if self.programs == self.items:
            return program
        back = i32(self.programs - 1) - program
        return turn * self.programs + jnp.where(turn % 2 == 0, program, back)

    def turns(self) -> Scalar:
        """How many work items this CTA takes, without the dynamic scheduler."""
        rounds, rest = divmod(self.items, self.programs)
        if not rest:
            return i32(rounds)
        last = self.number(i32(rounds))
        return i32(rounds) + jnp.where(last < self.items, i32(1), i32(0))

    # ----------------------------------------------------------------- what an item is, and what it visits

    def item(self, mask: MaskRows, number: Scalar) -> WorkItem:
        """The work item `number`, read from the block mask inside the kernel; visits are unmasked, full or partial."""
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
        if mask.visits is not None and mask.visits.number is not None:
            total = jnp.where(q_tile * self.tile.block_q < plan.q_len, mask.visits.number[at], i32(0))
            return WorkItem(b, h, q_tile, at, i32(0), i32(0), total)
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
        """(batch entry, head, query tile of the head, row of the block lists) of a work item under a block mask."""
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

        in_full   the list of the step, where the caller knows it; outside of that list the result means nothing
        """
        if self.in_order:
            return self._start_in_order(mask, item, step)
        # Under a causal mask most biases by distance have their largest scores at the last keys: once the maximum is
        # found, the output is not rescaled again.
        if self.tile.reverse_kv and in_full is not False:
            back = item.unmasked - 1 - step
            step = back if in_full else jnp.where(step < item.unmasked, back, step)
        if self.plan.blocks is None:
            return step * self.tile.block_kv
        blocks, lists = self.plan.blocks, mask.lists
        assert lists is not None
        per_block = blocks.block_kv // self.tile.block_kv

        def read(index: jax.Array | None, width: int, position: Scalar) -> Scalar:
            """First key of the tile at `position` of the item's row of a flat list of `width` blocks a row."""
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

    def packed_start(self, mask: MaskRows, item: WorkItem, step: Scalar) -> Scalar:
        """`kv_start` of a call with documents, `packed` with how many keys of the tile are of its document."""
        return self._start_in_order(mask, item, step, pack=True)

    def _start_in_order(self, mask: MaskRows, item: WorkItem, step: Scalar, pack: bool = False) -> Scalar:
        if self.plan.blocks is None:
            return (item.total - 1 - step if self.tile.reverse_kv else step) * self.tile.block_kv
        if mask.visits is None:
            return step
        per_block = i32(self._tiles_of_visit)
        place = lax.min(lax.max(lax.div(step, per_block), i32(0)), i32(self._visits_of_row - 1))
        block = lax.div(mask.visits.first[item.row * self._visits_of_row + place], i32(2))
        if self.plan.documents:
            return block if pack else lax.div(block, i32(PACKED))
        inside = lax.rem(step, per_block)
        inside = per_block - 1 - inside if self.tile.reverse_kv else inside
        return (block * per_block + inside) * self.tile.block_kv


# ------------------------------------------------------------------- the dynamic scheduler


@device_op
def new_counter(programs: int) -> jax.Array | None:
    """The atomic counter, a Ref of [1] int32, from `programs` on, because CTA p takes work item p first."""
    return typing.cast(jax.Array, jax.new_ref(jnp.full((1,), programs, jnp.int32)))


@device_op
def next_number(counter: Ref | None, mailbox: Ref, number: Scalar, programs: int) -> Scalar:
    """Number of this CTA's next work item, perhaps past the last; called by the whole producer warpgroup."""
    assert counter is not None
    return atomic_counter.take(counter.at[pl.ds(0, 1)], mailbox.at[pl.ds(COUNTER_RESULT, 1)])


def put(mailbox: Ref, slot: Scalar, item: WorkItem | None) -> None:
    """In the producer: writes an item, or None, to the mailbox of a free query slot, before the queries' copy."""
    first = slot * i32(MAILBOX_WORDS)
    if item is None:
        mailbox[first] = i32(0)
        return
    mailbox[first] = i32(1)
    for n, value in enumerate(item):
        mailbox[first + i32(1 + n)] = i32(value)


def get(mailbox: Ref, slot: Scalar) -> tuple[Scalar, WorkItem]:
    """In a consumer, once the queries have arrived: (whether there is an item, the item) from their mailbox."""
    first = slot * i32(MAILBOX_WORDS)
    found = [mailbox[first + i32(1 + n)] for n in range(len(WorkItem._fields))]
    return mailbox[first] != 0, WorkItem(*found)
