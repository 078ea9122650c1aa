"""A call whose sequence is split, on one device: forward, tangent and backward pass, in stages (context_stages.py).

With s a stage, lse_s and out_s its row statistics and outputs over its own keys:

    lse = log sum_s exp(lse_s)  (and the sink, once)        out = sum_s exp(lse_s - lse) out_s

A stage without keys for a row has lse_s = -inf and weight 0, also where all stages are -inf. Gradients need no merge: with the lse and
out of the whole row, the backward pass of a stage computes the terms of its keys in

    dq = sum_s dq_s       dk, dv: of the stage's own keys      captured arrays: sum_s      dsink = sum_rows exp(sink - lse) (dlse - delta)

and the tangent pass likewise. Sums run over stages in the order in which keys come, which is the same in every run.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from flexjax.block_mask.transpose import EMPTY
from flexjax.parallel.context_exchange import Exchange, exchange_on
from flexjax.parallel.context_exchange import Part as ShardPart
from flexjax.parallel.context_merge import Part, merged, weight_of
from flexjax.parallel.context_parallel import ContextCall, Tables, Visitors
from flexjax.parallel.context_stages import (
    Keys,
    Stage,
    add_blocks,
    at_head,
    classes_on,
    put_blocks,
    stage_of,
    take_blocks,
    token_axis,
)
from flexjax.plan.kernel_plan import Operands

Array = jax.Array

QUERY, KEY, VALUE, QUERY_EXTRA, KEY_EXTRA, SINKS, FIRST_CAPTURE = range(7)
"""Places in Operands.movable."""
OVER_KEYS = (KEY, VALUE, KEY_EXTRA)

RING_PARTS, PART_BLOCKS = 4, 64
"""Parts of a long shard that go round the ring one after the other, and key blocks that a part has at least."""


class Passes(typing.NamedTuple):
    """The primitives of autodiff.py, and `alike`, which casts arrays to vary over the same mesh axes (autodiff.varying_alike)."""

    forward: Primitive
    tangent: Primitive
    backward: Primitive
    alike: Callable[[Sequence[Array]], list[Array]]


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A call on one device: its arrays are those of its batch entries, heads and tokens."""

    passes: Passes
    call: ContextCall
    operands: Operands
    tables: Tables

    @classmethod
    def of(cls, passes: Passes, call: ContextCall, flat: Sequence[Array]) -> "OnDevice":
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
        return stage_of(
            self.call, self.call.problem, self.operands, self.tables, self.exchange.me, keys, sinks, partial
        )

    def with_method(self, method: str) -> "OnDevice":
        return dataclasses.replace(self, call=dataclasses.replace(self.call, method=method, checked=False))

    def nothing_missing(self) -> Array:
        """bool: whether every device has or receives all key blocks that its queries visit; the same on all devices."""
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

    # ------------------------------------------------------------------ forward

    def forward(self) -> list[Array]:
        """out in the dtype of query, lse and, if the plan asks for it, max_scores."""
        part = self._over_heads() if self.call.method == "all_to_all" else self.rows()
        return [x for x in part if x is not None]

    def rows(self) -> Part:
        """The rows over all keys and the sinks, out in the dtype of query."""
        if self.call.checked:
            ways = [lambda m=m: tuple(self.with_method(m).rows()) for m in ("neighbours", "ring")]
            return Part(*lax.cond(self.nothing_missing(), *ways))
        if self.call.method == "all_gather":
            return self.over(self.exchange.gather(self.own), sinks=True, partial=False)
        if self.call.method == "neighbours":
            return self._with_neighbours()
        part = self._ring()
        if self.operands.sinks is not None:
            lse = jnp.logaddexp(part.lse, self._by_head(self.operands.sinks))
            part = part._replace(out=weight_of(part.lse, lse)[..., None] * part.out, lse=lse)
        return self._finished(part)

    def _ring(self) -> Part:
        """The rows over the keys that go round; for long shards in parts one after the other, which take less memory."""
        own, blocks = self.own, self._blocks_of_part
        if not blocks:
            return self._visited_by(own.arrays, self.nothing(), None)

        def one_part(part: Part, number: Array) -> tuple[Part, None]:
            which = ShardPart(number, blocks)
            return self._visited_by([self.exchange.part_of(x, which) for x in own.arrays], part, which), None

        return lax.scan(one_part, self.varying(self.nothing()), jnp.arange(RING_PARTS, dtype=jnp.int32))[0]

    @property
    def _blocks_of_part(self) -> int:
        """Key blocks of a part of a shard that goes round the ring; 0 where whole shards go."""
        blocks = self.tables.key_blocks.shape[1]
        in_parts = self.tables.lists is None and blocks >= RING_PARTS * PART_BLOCKS and blocks % RING_PARTS == 0
        return blocks // RING_PARTS if in_parts else 0

    def _visited_by(self, arrays: Sequence[Array], part: Part, which: ShardPart | None) -> Part:
        """The rows of `part` with all shards (or one part of each) that go round, beginning with `arrays`, the own one."""
        exchange = self.exchange

        def step(state: tuple[list[Array], Part], number: Array) -> tuple[tuple[list[Array], Part], None]:
            visiting, part = state
            coming = exchange.next(visiting)
            return (coming, merged(part, self.over(exchange.visiting(visiting, number, which)))), None

        last = self.call.devices - 1
        state = self.varying((list(arrays), part))
        (visiting, part), _ = lax.scan(step, state, jnp.arange(last, dtype=jnp.int32))
        return merged(part, self.over(exchange.visiting(visiting, jnp.int32(last), which)))

    def _with_neighbours(self) -> Part:
        """The rows over own keys while others travel, then over received keys; or rows that visit those in a stage of their own."""
        if not self.call.shifts:
            return self.over(self.own, sinks=True, partial=False)
        received = self.exchange.receive(self.own)
        if self.tables.visitors is None:
            return self._finished(merged(self.over(self.own, sinks=True), self.over(received)))
        part = self.over(self.own, sinks=True, partial=False)
        device = self.visitors
        of_visitors = device.over(device.visited(received), sinks=True, partial=False)
        return Part(*map(self.put, part, of_visitors))

    def _finished(self, part: Part) -> Part:
        return part._replace(out=part.out.astype(self.call.plan.dtype))

    @functools.cached_property
    def visitors(self) -> "OnDevice":
        """The device with only those of its query blocks that visit received keys."""
        operands, visitors = self.operands, typing.cast(Visitors, self.tables.visitors)
        query, query_extra = map(self.taken, (operands.query, operands.query_extra))
        own = operands._replace(query=query, query_extra=query_extra)
        return dataclasses.replace(self, operands=own, tables=self.tables._replace(query_blocks=visitors.query_blocks))

    def visited(self, received: Keys) -> Keys:
        """The keys of the visitors: the received blocks, then the own ones that they visit."""
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
        """The rows of an array over queries that visit received keys."""
        if x is None:
            return None
        slots = typing.cast(Visitors, self.tables.visitors).queries[self.exchange.me]
        return take_blocks(self.call.plan, x, slots, self.call.block_size[0])

    def put(self, x: typing.Any, new: typing.Any) -> typing.Any:
        """x with the rows that visit received keys replaced."""
        if x is None:
            return None
        slots = typing.cast(Visitors, self.tables.visitors).queries[self.exchange.me]
        return put_blocks(self.call.plan, x, slots, self.call.block_size[0], new)

    def over(self, keys: Keys, sinks: bool = False, partial: bool = True) -> Part:
        """The rows over some keys and, if asked, the sinks."""
        stage = self.stage(keys, sinks and self.operands.sinks is not None, partial)
        out, lse, *top = self.passes.forward.bind(*self.passes.alike(stage.flat), problem=stage.problem)
        return Part(out, lse, top[0] if top else None)

    def nothing(self) -> Part:
        """The rows over no keys."""
        plan = self.call.plan
        dtype = jnp.dtype(plan.score_dtype)
        rows = self.operands.query.shape[:3]
        none = jnp.full(rows, -jnp.inf, dtype)
        return Part(jnp.zeros((*rows, plan.value_dim), dtype), none, none if plan.max_scores else None)

    def varying(self, tree: typing.Any) -> typing.Any:
        """The arrays of a tree, cast to vary over the mesh axes that the operands vary over."""
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, self.passes.alike([self.operands.query, *leaves])[1:])

    def _by_head(self, sinks: Array) -> Array:
        sinks = sinks.astype(self.call.plan.score_dtype)
        return sinks if token_axis(self.call.plan) == 1 else sinks[:, None]

    # ------------------------------------------------------------------ backward

    def backward(
        self, out: Array, lse: Array, d_out: Array, d_lse: Array | None, wanted: tuple[bool, ...]
    ) -> list[Array]:
        """The gradients of the wanted operands, in the order of Operands.movable and in their dtypes."""
        # Without the barrier XLA would find that the forward pass received the same keys, and keep them in memory until now.
        own, d_out = lax.optimization_barrier((self.own.arrays, d_out))
        fresh = self.operands._replace(key=own[0], value=own[1], key_extra=own[2] if len(own) == 3 else None)
        return dataclasses.replace(self, operands=fresh)._gradients(out, lse, d_out, d_lse, wanted)

    def _gradients(
        self, out: Array, lse: Array, d_out: Array, d_lse: Array | None, wanted: tuple[bool, ...]
    ) -> list[Array]:
        cotangents = [out, lse, d_out, *([] if d_lse is None else [d_lse])]
        of_stages = tuple(w and place != SINKS for place, w in enumerate(wanted))
        sums: dict[int, Array] = dict(zip(_places(of_stages), self.sums(cotangents, of_stages), strict=True))
        if wanted[SINKS]:
            sums[SINKS] = self._of_sinks(cotangents)
        movable = self.operands.movable
        return [sums[place].astype(typing.cast(Array, movable[place]).dtype) for place in _places(wanted)]

    def sums(self, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        """The gradients of the wanted operands in float32; sinks are none of them."""
        if not any(wanted):
            return []
        if self.call.checked:
            ways = [lambda m=m: self.with_method(m).sums(cotangents, wanted) for m in ("neighbours", "ring")]
            return lax.cond(self.nothing_missing(), *ways)
        if self.call.method == "all_to_all":
            return self._backward_over_heads(cotangents, wanted)
        exchange, travels = self.exchange, [i for i, p in enumerate(_places(wanted)) if p in OVER_KEYS]
        if self.call.method == "all_gather":
            found = self.backward_over(exchange.gather(self.own), cotangents, wanted)
            back = exchange.scatter_sums([found[i] for i in travels]) if travels else []
            return _replaced(found, travels, back)
        if self.call.method == "neighbours":
            return self._backward_with_neighbours(cotangents, wanted, travels)
        return self._backward_ring(cotangents, wanted, travels)

    def _backward_with_neighbours(
        self, cotangents: Sequence[Array], wanted: tuple[bool, ...], travels: list[int]
    ) -> list[Array]:
        if not self.call.shifts:
            return self.backward_over(self.own, cotangents, wanted)
        if self.tables.visitors is not None:
            return self._backward_with_visitors(cotangents, wanted, travels)
        received = self.exchange.receive(self.own)
        found = self.backward_over(self.own, cotangents, wanted)
        others = self.backward_over(received, cotangents, wanted)
        sums = [a if i in travels else a + b for i, (a, b) in enumerate(zip(found, others, strict=True))]
        rounds = self.exchange.give_back([others[i] for i in travels]) if travels else []
        for send, arrived in zip(self.tables.send, rounds, strict=False):
            slots = send[self.exchange.me]
            for i, new in zip(travels, arrived, strict=True):
                sums[i] = add_blocks(self.call.plan, sums[i], slots, self.call.block_size[1], new)
        return sums

    def _backward_with_visitors(
        self, cotangents: Sequence[Array], wanted: tuple[bool, ...], travels: list[int]
    ) -> list[Array]:
        """Each row of queries belongs to one stage. Own keys get terms from both and from other devices, in `changed` blocks."""
        exchange, visitors, device = self.exchange, typing.cast(Visitors, self.tables.visitors), self.visitors
        keys = device.visited(exchange.receive(self.own))
        found = self.backward_over(self.own, cotangents, wanted)
        others = device.backward_over(keys, [self.taken(x) for x in cotangents], wanted)
        plan, size, axis = self.call.plan, self.call.block_size[1], token_axis(self.call.plan)
        movable = [typing.cast(Array, self.operands.movable[p]) for p in _places(wanted)]
        first = sum(x.shape[1] for x in self.tables.received) * size
        received, own = (
            (
                {i: x for i, x in zip(travels, of, strict=True)}
                for of in zip(*(jnp.split(others[i], [first], axis) for i in travels), strict=True)
            )
            if travels
            else ({}, {})
        )
        rounds = exchange.give_back([received[i] for i in travels]) if travels else []
        terms = [[own[i] for i in travels], *rounds]
        sums = []
        for i, (a, b) in enumerate(zip(found, others, strict=True)):
            if i not in travels:
                over_queries = _places(wanted)[i] in (QUERY, QUERY_EXTRA)
                sums.append(self.put(a.astype(movable[i].dtype), b.astype(movable[i].dtype)) if over_queries else a + b)
                continue
            slots = visitors.changed[exchange.me]
            total = take_blocks(plan, a, slots, size)
            for place, new in zip(visitors.places, terms, strict=True):
                total = add_blocks(plan, total, place[exchange.me], size, new[travels.index(i)])
            sums.append(put_blocks(plan, a.astype(movable[i].dtype), slots, size, total.astype(movable[i].dtype)))
        return sums

    def _backward_ring(self, cotangents: Sequence[Array], wanted: tuple[bool, ...], travels: list[int]) -> list[Array]:
        """The ring, for long shards in parts one after the other, because what travels in float32 is large."""
        own, blocks = self.own, self._blocks_of_part
        if not blocks:
            return self._around(own, cotangents, wanted, travels)
        exchange, places = self.exchange, _places(wanted)
        stay = [i for i in range(len(places)) if i not in travels]
        movable = [typing.cast(Array, self.operands.movable[p]) for p in places]

        def one_part(state: tuple[list[Array], list[Array]], number: Array) -> tuple:
            part = ShardPart(number, blocks)
            arrays = [exchange.part_of(x, part) for x in own.arrays]
            keys = exchange.visiting(arrays, 0, part)
            found = self._around(keys, cotangents, wanted, travels, part, state[1])
            back = [
                exchange.with_part(x, part, found[i].astype(x.dtype)) for x, i in zip(state[0], travels, strict=True)
            ]
            return (back, [found[i] for i in stay]), None

        wide = lambda x: jnp.promote_types(x.dtype, self.call.plan.score_dtype)
        start = (
            [jnp.zeros_like(movable[i]) for i in travels],
            [jnp.zeros(movable[i].shape, wide(movable[i])) for i in stay],
        )
        (back, kept), _ = lax.scan(one_part, self.varying(start), jnp.arange(RING_PARTS, dtype=jnp.int32))
        found = dict(zip(stay, kept, strict=True)) | dict(zip(travels, back, strict=True))
        return [found[i] for i in range(len(places))]

    def _around(
        self,
        own: Keys,
        cotangents: Sequence[Array],
        wanted: tuple[bool, ...],
        travels: list[int],
        part: ShardPart | None = None,
        kept: Sequence[Array] | None = None,
    ) -> list[Array]:
        """The gradients of visiting keys go round with them, a step behind, and are home after as many steps as devices.

        kept   what the gradients that do not travel are added to
        """
        exchange = self.exchange
        stay = [i for i in range(sum(wanted)) if i not in travels]
        first = self.backward_over(own, cotangents, wanted)

        def step(state: tuple[list[Array], list[Array], list[Array]], number: Array) -> tuple:
            visiting, sent, kept = state
            arrived, coming = exchange.next(sent), exchange.next(visiting)
            found = self.backward_over(exchange.visiting(visiting, number, part), cotangents, wanted)
            add = lambda totals, places: [a + found[i] for a, i in zip(totals, places, strict=True)]
            return (coming, add(arrived, travels), add(kept, stay)), None

        staying = [first[i] for i in stay]
        staying = staying if kept is None else [a + b for a, b in zip(kept, staying, strict=True)]
        start = (exchange.next(own.arrays), [first[i] for i in travels], staying)
        numbers = jnp.arange(1, self.call.devices, dtype=jnp.int32)
        (_, sent, staying), _ = lax.scan(step, self.varying(start), numbers)
        found = dict(zip(stay, staying, strict=True)) | dict(zip(travels, exchange.next(sent), strict=True))
        return [found[i] for i in range(len(first))]

    def backward_over(self, keys: Keys, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        """The terms of some keys in the gradients of the wanted operands, in float32."""
        stage = self.stage(keys)
        params = {"problem": stage.problem, "wanted": wanted, "has_lse": len(cotangents) == 4}
        return self.passes.backward.bind(*self.passes.alike([*stage.flat, *cotangents]), **params)

    def _of_sinks(self, cotangents: Sequence[Array]) -> Array:
        """The gradient of the sinks, [N] float32."""
        sinks = self._by_head(typing.cast(Array, self.operands.sinks))
        out, lse, d_out, *d_lse = cotangents
        delta = jnp.sum(d_out.astype(lse.dtype) * out.astype(lse.dtype), -1)
        delta = delta - d_lse[0] if d_lse else delta
        return -jnp.sum(weight_of(sinks, lse) * delta, (0, token_axis(self.call.plan)))

    # ------------------------------------------------------------------ tangent

    def tangent(self, out: Array, lse: Array, tangents: Sequence[Array], moving: tuple[bool, ...]) -> list[Array]:
        """The tangents of out and lse: one stage over all keys, which are gathered, because forward mode runs on xla."""
        if self.call.method == "all_to_all":
            return self.with_method("all_gather").tangent(out, lse, tangents, moving)
        exchange, places = self.exchange, _places(moving)
        of = dict(zip(places, tangents, strict=True))
        over_keys = {p: of[p] for p in places if p in OVER_KEYS}
        t_sinks = of.pop(SINKS, None)
        if over_keys:
            packed = exchange.in_order(
                exchange.all_gather(exchange.pack(list(over_keys.values()))), self.tables.key_blocks
            )
            of |= dict(zip(over_keys, exchange.unpack(packed, list(over_keys.values())), strict=True))
        device = dataclasses.replace(self, tables=self.tables._replace(lists=None))  # lists are those of other stages
        stage = device.stage(exchange.gather(self.own))
        of_stage = tuple(m and place != SINKS for place, m in enumerate(moving))
        dtype = lse.dtype
        t_out, t_lse = jnp.zeros(out.shape, dtype), jnp.zeros_like(lse)
        if any(of_stage):
            flat = self.passes.alike([*stage.flat, out, lse, *(of[p] for p in _places(of_stage))])
            t_out, t_lse = self.passes.tangent.bind(*flat, problem=stage.problem, moving=of_stage)
        if t_sinks is not None:
            sinks = self._by_head(typing.cast(Array, self.operands.sinks))
            of_sink = weight_of(sinks, lse) * self._by_head(t_sinks)
            t_out, t_lse = t_out.astype(dtype) - out.astype(dtype) * of_sink[..., None], t_lse + of_sink
        return [t_out.astype(out.dtype), t_lse]

    # ------------------------------------------------------------------ all_to_all

    def _heads(self) -> "tuple[OnDevice, Callable, Callable]":
        """The call with all tokens of a part of the heads, and functions that take arrays over queries or keys there and back."""
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
            key=there(operands.key, "key"), value=there(operands.value, "key"), key_extra=there(operands.key_extra, "key"),
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
        return OnDevice(self.passes, alone, own, tables), there, back

    def _over_heads(self) -> Part:
        """The rows over all keys, with sinks; out travels in the dtype of query."""
        device, _, back = self._heads()
        part = device.over(device.own, sinks=True, partial=False)
        there = [back(x, "query") for x in part if x is not None]
        return Part(there[0], there[1], there[2] if part.top is not None else None)

    def _backward_over_heads(self, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        device, there, back = self._heads()
        extra = len(device.operands.score_captures) - len(self.operands.score_captures)
        found = device.backward_over(device.own, [there(x, "query") for x in cotangents], (*wanted, *[False] * extra))
        side = dict.fromkeys(OVER_KEYS, "key") | dict.fromkeys((QUERY, QUERY_EXTRA), "query")
        return [back(g, side[p]) if p in side else g for p, g in zip(_places(wanted), found, strict=True)]


def _places(flags: Sequence[bool]) -> list[int]:
    return [place for place, flag in enumerate(flags) if flag]


def _replaced(values: Sequence[Array], places: Sequence[int], new: Sequence[Array]) -> list[Array]:
    found = dict(enumerate(values)) | dict(zip(places, new, strict=True))
    return [found[i] for i in range(len(values))]


def _manual_axes() -> tuple[str, ...]:
    """The mesh axes that shard_map around this code has made manual."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
