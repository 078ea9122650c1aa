"""Around the forward kernel: who takes which tile of queries, what it visits, and who may go on when.

Hand-over of slots and turns uses hardware named barriers on the device. The simulator knows none, so there ordinary
barriers stand in and no turns are taken.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.branch import cond, when
from flexjax.backends.mosaic_gpu.tiles import ForwardTile
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

WARPGROUP = 128
L2_SHARE = 24e6  # bytes of keys and values that stay in the L2 beside everything else
Scalar = typing.Any
Ref = typing.Any


def i32(value: typing.Any) -> jax.Array:
    return jnp.asarray(value, jnp.int32)


class Arrays(typing.NamedTuple):
    """What the kernel reads, in global memory."""

    query: Ref
    key: Ref
    value: Ref
    sinks: Ref | None
    order: Ref | None  # rows of the block mask, longest first
    lists: BlockLists | None  # `flat`
    score: tuple[Ref, ...]
    mask: tuple[Ref, ...]
    dropout: tuple[Ref, ...]
    drawn: Ref | None = None  # counter of the tiles taken so far


class Shared(typing.NamedTuple):
    """Shared memory and barriers."""

    query: Ref
    key: Ref
    value: Ref
    out: Ref
    query_full: Ref
    key_full: Ref
    value_full: Ref
    query_free: Ref | None  # simulator only, as are the next two
    key_free: Ref | None
    value_free: Ref | None
    staged: Ref | None  # tiles of a captured array, and its barriers
    staged_full: Ref | None
    staged_free: Ref | None
    box: Ref | None  # items from the queue, one a slot of queries


class Item(typing.NamedTuple):
    """One tile of queries: where it lies and what it visits."""

    b: Scalar
    h: Scalar
    q_tile: Scalar
    row: Scalar  # of the block lists, counted over batches and heads; 0 where there are none
    plain: Scalar  # steps without a mask
    full: Scalar  # steps of the full list: the plain ones, then those that hang over the end
    total: Scalar


# ------------------------------------------------------------------- synchronisation


@dataclasses.dataclass(frozen=True)
class Signals:
    """Who may go on: slots handed back by the computing warpgroups, and the turns between two of them."""

    tile: ForwardTile
    interpret: bool

    def _named(self, operation: str, number: typing.Any, threads: int) -> None:
        if isinstance(number, int):

            @plgpu.inline_mgpu()
            def fixed(_: typing.Any) -> None:
                mgpu.utils.inline_ptx(f"bar.{operation} {number}, {threads};", has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11

            fixed()  # pyright: ignore[reportCallIssue]  # the context argument is filled in
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
        def moving(_: typing.Any, which: typing.Any) -> None:
            mgpu.utils.inline_ptx(f"bar.{operation} $0, {threads};", which.registers.flat[0], has_side_effects=True)  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11

        moving(i32(number))  # pyright: ignore[reportCallIssue]  # the context argument is filled in

    @property
    def _slot_threads(self) -> int:
        return (self.tile.groups + 1) * WARPGROUP

    def _number(self, what: str, slot: typing.Any) -> typing.Any:
        keys, values = self.tile.stages, self.tile.value_stages
        queries = 3 + keys + values
        staged = queries + self.tile.query_slots
        first = {"turn": 0, "key": 3, "value": 3 + keys, "query": queries, "staged": staged}[what]
        return self.tile.first_named_barrier + first + slot

    def release(self, what: str, barrier: Ref | None, slot: typing.Any) -> None:
        """A computing warpgroup has read the slot."""
        if self.interpret:
            plgpu.commit_smem()  # the stand-ins read it as ordinary memory
            assert barrier is not None
            plgpu.barrier_arrive(barrier.at[slot])
        else:
            self._named("arrive", self._number(what, slot), self._slot_threads)

    def acquire(self, what: str, barrier: Ref | None, slot: typing.Any) -> None:
        """The copying warpgroup waits until every reader has released the slot."""
        if self.interpret:
            assert barrier is not None
            plgpu.barrier_wait(barrier.at[slot])
        else:
            self._named("sync", self._number(what, slot), self._slot_threads)

    # Turns. Warpgroup g takes its turn at barrier g and gives the turn at barrier 1 - g. With staggered steps both take as
    # many turns as they give and alternate strictly from the first tile to the last. With whole steps a turn begins at
    # P V and ends after the next Q K^T, so each tile of queries begins with a turn of warpgroup 0; the third barrier keeps
    # it from giving a turn of the next tile before warpgroup 1 has taken the last of this one.

    @property
    def taking_turns(self) -> bool:
        return self.tile.turns and not self.interpret

    def give_turn(self, group: typing.Any) -> None:
        if self.taking_turns:
            self._named("arrive", self._number("turn", 1 - group), 2 * WARPGROUP)

    def take_turn(self, group: typing.Any) -> None:
        if self.taking_turns:
            self._named("sync", self._number("turn", group), 2 * WARPGROUP)

    def first_turn(self, group: typing.Any) -> None:
        if self.taking_turns and self.tile.overlap:
            when(group == 1)(lambda: self.give_turn(1))

    def begin_tile(self, group: typing.Any, first: typing.Any) -> None:
        if self.taking_turns:
            third = self._number("turn", 2)
            when(group == 1)(lambda: self.take_turn(1))
            when((group == 0) & ~first)(lambda: self._named("sync", third, 2 * WARPGROUP))

    def end_tile(self, group: typing.Any) -> None:
        if self.taking_turns:
            third = self._number("turn", 2)
            when(group == 0)(lambda: self.give_turn(0))
            when(group == 1)(lambda: self._named("arrive", third, 2 * WARPGROUP))


# ------------------------------------------------------------------- the work


def flat(lists: BlockLists | None) -> BlockLists | None:
    """The lists as the kernel takes them, each in one dimension."""
    return None if lists is None else BlockLists(*(None if x is None else x.reshape(-1) for x in lists))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which program takes which tile of queries, and what that tile visits."""

    plan: KernelPlan
    tile: ForwardTile

    @property
    def q_tiles(self) -> int:
        """Tiles of queries; whole rows of the block mask, so some may lie wholly past the end."""
        whole = self.tile.block_q if self.plan.blocks is None else self.plan.blocks.block_q
        return -(-self.plan.q_len // whole) * (whole // self.tile.block_q)

    @property
    def items(self) -> int:
        return self.plan.batch * self.plan.q_heads * self.q_tiles

    @property
    def programs(self) -> int:
        return min(self.items, self.tile.programs) if self.tile.persistent or self.tile.queue else self.items

    @property
    def heads_at_once(self) -> int:
        """Heads (of all batches) whose tiles run side by side: a persistent grid mixes all, the longest rows first; the
        other kind goes on to the next few heads only when these are done, so that their keys and values stay in the L2."""
        plan = self.plan
        heads = plan.batch * plan.q_heads
        if self.tile.persistent:
            return heads
        head_bytes = plan.kv_len * (self.tile.head_dim + self.tile.value_dim) * 2 / plan.group
        return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * head_bytes <= L2_SHARE))

    def order(self, lists: BlockLists | None) -> jax.Array | None:
        """Rows of the block mask, the longest first; broadcast dims are not expanded, so this is small.

        Persistent: numbers of rows of the whole mask. Otherwise: of rows within each (batch, head) of it.
        """
        if self.plan.blocks is None or lists is None:
            return None
        shape = (self.plan.blocks.batch, self.plan.blocks.heads, -(-self.plan.q_len // self.plan.blocks.block_q))
        visits = jnp.zeros(shape, jnp.int32)  # a mask known to be empty has neither list
        for number in (lists.partial_num, lists.full_num):
            visits = visits if number is None else visits + number
        if self.tile.persistent:
            visits = visits.reshape(1, 1, -1)
        return jnp.argsort(-visits, axis=-1, stable=True).astype(jnp.int32).reshape(-1)

    def position(self, turn: Scalar) -> Scalar:
        """Number of the item that this program takes at its `turn`: to and fro, so that lengths even out."""
        program = lax.axis_index("program")
        if self.programs == self.items:
            return program
        back = i32(self.programs - 1) - program
        return turn * self.programs + jnp.where(turn % 2 == 0, program, back)

    def turns(self) -> Scalar:
        rounds, rest = divmod(self.items, self.programs)
        if not rest:
            return i32(rounds)
        last = self.position(i32(rounds))
        return i32(rounds) + jnp.where(last < self.items, i32(1), i32(0))

    @property
    def blank(self) -> Item:
        """The structure of an item."""
        return Item(0, 0, 0, 0, 0, 0, 0)

    def item(self, arrays: Arrays, number: Scalar) -> Item:
        """The tile of queries with that number, in the order in which they are taken."""
        plan = self.plan
        if plan.blocks is None:
            q_tile = lax.rem(number, i32(self.q_tiles))
            head = lax.div(number, i32(self.q_tiles))
            b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
            total = i32(-(-plan.kv_len // self.tile.block_kv))
            plain = i32(0) if plan.mask is not None else i32(plan.kv_len // self.tile.block_kv)
            return Item(b, h, q_tile, i32(0), plain, plain, total)
        blocks = plan.blocks
        assert arrays.order is not None
        assert arrays.lists is not None
        inner = blocks.block_q // self.tile.block_q
        rows = -(-plan.q_len // blocks.block_q)
        if self.tile.persistent:
            batches, heads = (plan.batch if blocks.batch == 1 else 1), (plan.q_heads if blocks.heads == 1 else 1)
            repeats = batches * heads * inner
            entry = arrays.order[lax.div(number, i32(repeats))]
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
            place = lax.div(rest, i32(together * inner))
            row = arrays.order[(list_b * blocks.heads + list_h) * rows + place]
            q_tile = row * inner + lax.rem(lax.div(rest, i32(together)), i32(inner))
        at = (list_b * blocks.heads + list_h) * rows + row
        per_block = i32(blocks.block_kv // self.tile.block_kv)
        full = i32(0) if arrays.lists.full_num is None else arrays.lists.full_num[at]
        partial = i32(0) if arrays.lists.partial_num is None else arrays.lists.partial_num[at]
        if blocks.block_q * rows != plan.q_len and inner > 1:  # a sub-tile wholly past the end does nothing
            inside = q_tile * self.tile.block_q < plan.q_len
            full, partial = jnp.where(inside, full, 0), jnp.where(inside, partial, 0)
        plain = full * per_block
        spill = -(-plan.kv_len // blocks.block_kv) * blocks.block_kv - plan.kv_len
        if spill and arrays.lists.full_index is not None:
            last = arrays.lists.full_index[at * blocks.full + lax.max(full - 1, i32(0))]
            hangs = (full > 0) & (last == plan.kv_len // blocks.block_kv)
            plain = plain - jnp.where(hangs, i32(-(-spill // self.tile.block_kv)), i32(0))
        return Item(b, h, q_tile, at, plain, full * per_block, (full + partial) * per_block)

    def kv_start(self, arrays: Arrays, item: Item, step: Scalar, in_full: bool | None = None) -> Scalar:
        """First key of the tile visited at `step`; `in_full` says which list that is in, where the caller knows.

        A step outside of that list reads some legal place of it. `reverse`: under a causal mask the largest scores of most biases
        by distance are among the last keys, and found first they save rescaling what was summed before.
        """
        if self.tile.reverse and in_full is not False:
            back = item.plain - 1 - step
            step = back if in_full else jnp.where(step < item.plain, back, step)
        if self.plan.blocks is None:
            return step * self.tile.block_kv
        blocks, lists = self.plan.blocks, arrays.lists
        assert lists is not None
        per_block = blocks.block_kv // self.tile.block_kv

        def read(index: Ref, width: int, place: Scalar) -> Scalar:
            block = place if per_block == 1 else lax.div(place, i32(per_block))
            block = lax.min(lax.max(block, i32(0)), i32(width - 1))
            start = index[item.row * width + block] * blocks.block_kv
            return start if per_block == 1 else start + lax.rem(place, i32(per_block)) * self.tile.block_kv

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
