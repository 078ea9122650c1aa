"""What both passes of a split sequence need on one device: its keys, its stages, its rows that visit received keys."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from flexjax.block_mask.transpose import EMPTY
from flexjax.context.context_parallel import ContextCall, Tables, Visitors
from flexjax.context.exchange import Exchange, exchange_on
from flexjax.context.stages import Keys, Stage, at_head, classes_on, put_blocks, stage_of, take_blocks, token_axis
from flexjax.plan.kernel_plan import Operands
from flexjax.varying import varying_as

Array = jax.Array

RING_PARTS, PART_BLOCKS = 4, 64  # parts of a long shard on the ring, key blocks of a part at least


class Passes(typing.NamedTuple):
    """The primitives of passes/autodiff.py."""

    forward: Primitive
    tangent: Primitive
    backward: Primitive
    alike: Callable[[Sequence[Array]], list[Array]]  # casts arrays to vary over the same mesh axes (varying.py)


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A call on one device; the base of the forward and the backward pass."""

    passes: Passes
    call: ContextCall
    operands: Operands  # of this device's batch entries, heads and tokens
    tables: Tables  # the same on every device

    @classmethod
    def of(cls, passes: Passes, call: ContextCall, flat: Sequence[Array]) -> typing.Self:
        """The call on this device; `flat`: its operands and tables, which may vary over different mesh axes."""
        n = call.problem.structure.num_leaves
        flat = passes.alike(flat)
        return cls(passes, call, call.problem.operands(flat[:n]), call.tables(flat[n:]))

    @functools.cached_property
    def exchange(self) -> Exchange:
        return exchange_on(self.call, self.tables)

    @property
    def own(self) -> Keys:
        return Keys(self.operands.key, self.operands.value, self.operands.key_extra, self.exchange.own_keys)

    def stage(self, keys: Keys, sinks: bool = False, partial: bool = True) -> Stage:
        """The stage of this device's queries with `keys`; `partial`: other stages' results will be added."""
        return stage_of(
            self.call, self.call.problem, self.operands, self.tables, self.exchange.me, keys, sinks, partial
        )

    def with_method(self, method: str) -> typing.Self:
        """The same call with another method and unchecked."""
        return dataclasses.replace(self, call=dataclasses.replace(self.call, method=method, checked=False))

    def nothing_missing(self) -> Array:
        """bool scalar: whether every device gets all key blocks that its queries visit. A collective."""
        exchange, count = self.exchange, self.tables.key_blocks.size
        numbers = jnp.arange(count, dtype=jnp.int32)
        captures = self.operands.mask_captures
        classes = classes_on(self.call, self.call.plan, captures, self.tables, exchange.own_queries, numbers)
        needed = jnp.any(classes != EMPTY, (0, 1, 2))
        had = jnp.zeros(count, bool).at[exchange.own_keys].set(True)
        for received in self.tables.received:
            had = had.at[jnp.where(received[exchange.me] < 0, count, received[exchange.me])].set(True, mode="drop")
        missing = jnp.any(needed & ~had).astype(jnp.int32)
        axes = tuple(dict.fromkeys((*self.call.axes, *_manual_axes())))
        vary = [name for name in axes if name not in jax.typeof(missing).mat.varying]
        if vary and jax.typeof(missing).mat.varying:
            missing = lax.pcast(missing, tuple(vary), to="varying")
        return lax.psum(missing, axes) == 0

    @functools.cached_property
    def visitors(self) -> typing.Self:
        """This device with only those of its query blocks that visit received keys. Its keys and sinks stay."""
        operands, visitors = self.operands, typing.cast(Visitors, self.tables.visitors)
        query, query_extra = map(self.taken, (operands.query, operands.query_extra))
        own = operands._replace(query=query, query_extra=query_extra)
        return dataclasses.replace(self, operands=own, tables=self.tables._replace(query_blocks=visitors.query_blocks))

    def visited(self, received: Keys) -> Keys:
        """The key blocks that the visitors visit: all of `received`, whose stage they keep, then own ones."""
        visitors, own = typing.cast(Visitors, self.tables.visitors), self.own
        slots, size = visitors.keys[self.exchange.me], self.call.block_size[1]
        axis = token_axis(self.call.plan)
        arrays = [
            jnp.concatenate([x, take_blocks(self.call.plan, y, slots, size)], axis)
            for x, y in zip(received.arrays, own.arrays, strict=True)
        ]
        numbers = jnp.concatenate([received.numbers, visitors.key_blocks[self.exchange.me]])
        return Keys(arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None, numbers, received.stage)

    def taken(self, x: typing.Any) -> typing.Any:
        """The query blocks of x, an array over queries, that visit received keys, one after the other."""
        if x is None:
            return None
        # Devices return equally many: copies of the last block fill the end. `put` drops them, the visitors' stage
        # hides them.
        slots = typing.cast(Visitors, self.tables.visitors).queries[self.exchange.me]
        return take_blocks(self.call.plan, x, slots, self.call.block_size[0])

    def put(self, x: typing.Any, new: typing.Any) -> typing.Any:
        """x, an array over queries, with the blocks that `taken` returns replaced by those of `new`; None for None."""
        if x is None:
            return None
        slots = typing.cast(Visitors, self.tables.visitors).queries[self.exchange.me]
        return put_blocks(self.call.plan, x, slots, self.call.block_size[0], new)

    def varying(self, tree: typing.Any) -> typing.Any:
        return varying_as(self.operands.query, tree)

    def by_head(self, sinks: Array) -> Array:
        """`sinks`, [N], in the score dtype and a shape that broadcasts to lse: [N] for BTNH, [N, 1] for BNTH."""
        sinks = sinks.astype(self.call.plan.score_dtype)
        return sinks if token_axis(self.call.plan) == 1 else sinks[:, None]

    @property
    def blocks_of_part(self) -> int:
        """How many key blocks travel around the ring together, one of RING_PARTS parts of a shard; 0: whole shards."""
        blocks = self.tables.key_blocks.shape[1]
        in_parts = self.tables.lists is None and blocks >= RING_PARTS * PART_BLOCKS and blocks % RING_PARTS == 0
        return blocks // RING_PARTS if in_parts else 0

    def over_heads(self) -> tuple[typing.Self, Callable, Callable]:
        """(the call on one device with all tokens of a part of the heads, there, back), for the method "all_to_all".

        there(x, side) turns an array over queries (side "query") or keys ("key") of this device's tokens and all heads
        into one of all tokens and this device's part of the heads. back(x, side) is its inverse. Both are collectives.
        """
        exchange, call, operands = self.exchange, self.call, self.operands
        sides = {
            "query": (self.tables.query_blocks, call.block_size[0]),
            "key": (self.tables.key_blocks, call.block_size[1]),
        }
        there = lambda x, side: None if x is None else exchange.to_heads(x, *sides[side])
        back = lambda x, side: exchange.to_tokens(x, *sides[side])
        n, plan = call.devices, call.plan
        own = operands._replace(
            query=there(operands.query, "query"), query_extra=there(operands.query_extra, "query"),
            key=there(operands.key, "key"), value=there(operands.value, "key"),
            key_extra=there(operands.key_extra, "key"),
        )  # fmt: skip
        problem, own = at_head(call.problem, own, exchange.me * (plan.q_heads // n), n)
        if own.sinks is not None:
            own = own._replace(
                sinks=lax.dynamic_slice_in_dim(own.sinks, exchange.me * (plan.q_heads // n), plan.q_heads // n)
            )
        everything = [jnp.arange(x.size, dtype=jnp.int32)[None] for x in self.tables[:2]]
        tables = self.tables._replace(query_blocks=everything[0], key_blocks=everything[1])
        if self.tables.classes is not None and self.tables.classes.shape[1] > 1:
            each = plan.q_heads // n
            tables = tables._replace(classes=lax.dynamic_slice_in_dim(self.tables.classes, exchange.me * each, each, 1))
        alone = dataclasses.replace(
            call, problem=problem, axes=(), devices=1, method="all_gather", structure=jax.tree.structure(tables)
        )
        return dataclasses.replace(self, call=alone, operands=own, tables=tables), there, back


def _manual_axes() -> tuple[str, ...]:
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
