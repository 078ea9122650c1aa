"""The backward and the tangent pass of a call whose sequence is split, on one device, in stages (stages.py).

Gradients need no merge, because each stage s has the lse and out of the whole row:

    dq = sum_s dq_s       dk, dv: of the stage's own keys      captured arrays: sum_s
    dsink = sum_rows exp(sink - lse) (dlse - delta)

The tangent pass is the same. Sums run over stages in the order in which keys come, which is the same in every run.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.context.context_parallel import Visitors
from flexjax.context.device import RING_PARTS, OnDevice
from flexjax.context.exchange import Part as ShardPart
from flexjax.context.stages import Keys, add_blocks, put_blocks, take_blocks, token_axis
from flexjax.ir.program import Program
from flexjax.merge_states import weight_of
from flexjax.passes import expectations
from flexjax.plan.kernel_plan import KEY, KEY_EXTRA, QUERY, QUERY_EXTRA, SINKS, VALUE

Array = jax.Array

OVER_KEYS = (KEY, VALUE, KEY_EXTRA)  # of Operands.movable; gradients of these travel to the owners of the keys


@dataclasses.dataclass(frozen=True)
class Backward(OnDevice):
    """The gradients and the tangents of a call on one device.

    `cotangents` are out, lse, d_out and, unless it is zero, d_lse, to which `_capturing` adds those of expectations
    (passes/expectations.py). `wanted` says for each movable operand whether it gets a gradient. `travels` are the
    indices, among the wanted gradients, of those over keys.

    `sums` and its variants return the wanted gradients of all operands but the sinks, in the order of Operands.movable
    and in the score dtype. axes.py, or the transpose of shard_map, sums those of captured arrays over devices.
    """

    d_sums: Array | None = None  # cotangents of expectations, [.., n] of this device's rows; None: zero

    def backward(
        self, out: Array, lse: Array, d_out: Array, d_lse: Array | None, wanted: tuple[bool, ...]
    ) -> list[Array]:
        """The gradients of the wanted operands, in the order of Operands.movable and in the dtypes of the operands.

        out, lse   over all keys, [B, T, N, E] and [B, T, N] or, for BNTH, [B, N, T, E] and [B, N, T]; d_lse None: zero

        out is in float32 if the plan returns rounding. axes.py, or the transpose of shard_map, sums gradients of sinks
        and captured arrays over devices.
        """
        # without the barrier XLA finds that the forward pass received the same keys, and keeps them in memory until now
        own, d_out = lax.optimization_barrier((self.own.arrays, d_out))
        fresh = self.operands._replace(key=own[0], value=own[1], key_extra=own[2] if len(own) == 3 else None)
        return dataclasses.replace(self, operands=fresh)._gradients(out, lse, d_out, d_lse, wanted)

    def _gradients(
        self, out: Array, lse: Array, d_out: Array, d_lse: Array | None, wanted: tuple[bool, ...]
    ) -> list[Array]:
        """`backward` on a copy of this object whose keys XLA cannot identify with those of the forward pass."""
        cotangents = [out, lse, d_out, *([] if d_lse is None else [d_lse])]
        of_stages = tuple(w and place != SINKS for place, w in enumerate(wanted))
        sums: dict[int, Array] = dict(zip(_places(of_stages), self.sums(cotangents, of_stages), strict=True))
        if wanted[SINKS]:
            sums[SINKS] = self._of_sinks(cotangents)
        movable = self.operands.movable
        return [sums[place].astype(typing.cast(Array, movable[place]).dtype) for place in _places(wanted)]

    def sums(self, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        """The gradients of the wanted operands but the sinks (`wanted` is False for them), summed over all stages."""
        if not any(wanted):
            return []
        if self.call.checked:
            ways = [lambda m=m: self.with_method(m).sums(cotangents, wanted) for m in ("neighbours", "ring")]
            return lax.cond(self.nothing_missing(), *ways)
        if self.call.method == "all_to_all":
            return self._backward_over_heads(cotangents, wanted)
        if self.d_sums is not None:
            device = self._capturing()
            return device.sums(cotangents, device.none_more(wanted))
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
        """`sums` by "neighbours": a stage over own keys and one over received keys, whose gradients go back."""
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
        """`sums` by "neighbours" where few query blocks visit received keys (Visitors): each is in one of two stages.

        Gradients over queries and keys are returned in the dtypes of their operands.
        """
        exchange, visitors, device = self.exchange, typing.cast(Visitors, self.tables.visitors), self.visitors
        keys = device.visited(exchange.receive(self.own))
        found = self.backward_over(self.own, cotangents, wanted)
        others = device.backward_over(keys, [self.taken(x) for x in cotangents], wanted)
        plan, size, axis = self.call.plan, self.call.block_size[1], token_axis(self.call.plan)
        first = sum(x.shape[1] for x in self.tables.received) * size
        terms = []  # for each place in `visitors.places`, the gradients of these blocks of all arrays that travel
        if travels:
            received, own = zip(*(jnp.split(others[i], [first], axis) for i in travels), strict=True)
            terms = [own, *exchange.give_back(received)]
        slots, sums = visitors.changed[exchange.me], []
        for i, (place, a, b) in enumerate(zip(_places(wanted), found, others, strict=True)):
            dtype = typing.cast(Array, self.operands.movable[place]).dtype
            if place in (QUERY, QUERY_EXTRA):
                sums.append(self.put(a.astype(dtype), b.astype(dtype)))
            elif place in OVER_KEYS:
                total = take_blocks(plan, a, slots, size)
                for at, new in zip(visitors.places, terms, strict=True):
                    total = add_blocks(plan, total, at[exchange.me], size, new[travels.index(i)])
                sums.append(put_blocks(plan, a.astype(dtype), slots, size, total.astype(dtype)))
            else:
                sums.append(a + b)
        return sums

    def _backward_ring(self, cotangents: Sequence[Array], wanted: tuple[bool, ...], travels: list[int]) -> list[Array]:
        """`sums` by "ring"; with parts (`blocks_of_part`), the gradients of keys are in the dtypes of the keys."""
        own, blocks = self.own, self.blocks_of_part
        if not blocks:
            return self._around(own, cotangents, wanted, travels)
        exchange, places = self.exchange, _places(wanted)
        stay = [i for i in range(len(places)) if i not in travels]
        movable = [typing.cast(Array, self.operands.movable[p]) for p in places]

        # Long shards travel in parts because their gradients in float32 are large.
        def one_part(state: tuple[list[Array], list[Array]], number: Array) -> tuple:
            """Body of lax.scan. state: gradients of own keys in the dtypes of the keys, sums of those that stay."""
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
        """`sums` over the keys of all shards, or of `part` of each, which travel once around the ring. A collective.

        Gradients of keys follow the keys, a step behind, and end at the owner.
        `kept` are sums so far of the gradients that stay.
        """
        exchange = self.exchange
        stay = [i for i in range(sum(wanted)) if i not in travels]
        first = self.backward_over(own, cotangents, wanted)

        def step(state: tuple[list[Array], list[Array], list[Array]], number: Array) -> tuple:
            """Body of lax.scan. state: visiting keys, their gradients (one device behind), those that stay."""
            visiting, sent, kept = state
            arrived, coming = exchange.from_previous(sent), exchange.from_previous(visiting)
            found = self.backward_over(exchange.visiting(visiting, number, part), cotangents, wanted)
            add = lambda totals, places: [a + found[i] for a, i in zip(totals, places, strict=True)]
            return (coming, add(arrived, travels), add(kept, stay)), None

        staying = [first[i] for i in stay]
        staying = staying if kept is None else [a + b for a, b in zip(kept, staying, strict=True)]
        start = (exchange.from_previous(own.arrays), [first[i] for i in travels], staying)
        numbers = jnp.arange(1, self.call.devices, dtype=jnp.int32)
        (_, sent, staying), _ = lax.scan(step, self.varying(start), numbers)
        found = dict(zip(stay, staying, strict=True)) | dict(zip(travels, exchange.from_previous(sent), strict=True))
        return [found[i] for i in range(len(first))]

    def _capturing(self) -> typing.Self:
        """This device without expectations, whose derivative programs load their cotangents."""
        problem, numbers, size = self.call.problem, self.exchange.own_queries, self.call.block_size[0]
        length = typing.cast(Program, problem.derivative).sizes[2]
        # those of blocks that do not exist are dropped
        first = jnp.where(numbers < 0, length, numbers * size)
        at = (first[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        given = expectations.by_function(problem.plan, typing.cast(Array, self.d_sums))
        rows = [jnp.zeros((*x.shape[:2], length), x.dtype).at[:, :, at].set(x, mode="drop") for x in given]
        problem, operands = expectations.capturing(problem, self.operands, rows)
        call = dataclasses.replace(self.call, problem=problem)
        return dataclasses.replace(self, call=call, operands=operands, d_sums=None)

    def none_more(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """`wanted` of the operands of this device, some of whose captured arrays are not the caller's."""
        return (*wanted, *[False] * (len(self.operands.movable) - len(wanted)))

    def backward_over(self, keys: Keys, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        """The wanted gradients by one stage, in at least the score dtype; those over keys for the blocks of `keys`."""
        stage = self.stage(keys)
        params = {"problem": stage.problem, "wanted": wanted, "has_lse": len(cotangents) == 4}
        given = [*self._residuals(*cotangents[:2]), *cotangents[2:]]
        return self.passes.backward.bind(*self.passes.alike([*stage.flat, *given]), **params)

    def _residuals(self, out: Array, lse: Array) -> list[Array]:
        """[out in the plan's output dtype, lse] and perhaps what rounding took away, as `Problem.residuals` counts."""
        if self.call.plan.weighted:
            return []
        rounded, rounding = tile_math.out_and_rounding(out, self.call.plan)
        return [rounded, lse] if rounding is None else [rounded, lse, rounding]

    def _of_sinks(self, cotangents: Sequence[Array]) -> Array:
        """The gradient of the sinks, [N] in the score dtype, summed over this device's batch entries and rows."""
        sinks = self.by_head(typing.cast(Array, self.operands.sinks))
        out, lse, d_out, *d_lse = cotangents
        delta = jnp.sum(d_out.astype(lse.dtype) * out.astype(lse.dtype), -1)
        delta = delta - d_lse[0] if d_lse else delta
        return -jnp.sum(weight_of(sinks, lse) * delta, (0, token_axis(self.call.plan)))

    def tangent(self, kept: Sequence[Array], tangents: Sequence[Array], moving: tuple[bool, ...]) -> list[Array]:
        """The tangents of `kept`, out, lse and perhaps expectations, from those of the operands that are `moving`."""
        if self.call.method == "all_to_all":
            return self.with_method("all_gather").tangent(kept, tangents, moving)
        out, lse, *sums = kept
        # one stage over all keys, which are gathered: forward mode runs on xla and has no merge
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
        t_out, t_lse, *t_sums = jnp.zeros(out.shape, dtype), jnp.zeros_like(lse), *map(jnp.zeros_like, sums)
        if any(of_stage):
            results = [] if self.call.plan.weighted else [*self._residuals(out, lse), *sums]
            flat = self.passes.alike([*stage.flat, *results, *(of[p] for p in _places(of_stage))])
            t_out, t_lse, *t_sums = self.passes.tangent.bind(*flat, problem=stage.problem, moving=of_stage)
        if t_sinks is not None:
            sinks = self.by_head(typing.cast(Array, self.operands.sinks))
            of_sink = weight_of(sinks, lse) * self.by_head(t_sinks)
            t_out, t_lse = t_out.astype(dtype) - out.astype(dtype) * of_sink[..., None], t_lse + of_sink
            t_sums = [t - x * of_sink[..., None] for t, x in zip(t_sums, sums, strict=True)]
        return [t_out.astype(out.dtype), t_lse, *t_sums]

    def _backward_over_heads(self, cotangents: Sequence[Array], wanted: tuple[bool, ...]) -> list[Array]:
        """`sums` by "all_to_all": one stage over all tokens of a part of the heads."""
        device, there, back = self.over_heads()
        if self.d_sums is not None:
            device = dataclasses.replace(device, d_sums=there(self.d_sums, "query"))._capturing()
        given = [there(x, "query") for x in cotangents]
        found = device.backward_over(device.own, given, device.none_more(wanted))
        side = dict.fromkeys(OVER_KEYS, "key") | dict.fromkeys((QUERY, QUERY_EXTRA), "query")
        return [back(g, side[p]) if p in side else g for p, g in zip(_places(wanted), found, strict=True)]


def _places(flags: Sequence[bool]) -> list[int]:
    return [place for place, flag in enumerate(flags) if flag]


def _replaced(values: Sequence[Array], places: Sequence[int], new: Sequence[Array]) -> list[Array]:
    found = dict(enumerate(values)) | dict(zip(places, new, strict=True))
    return [found[i] for i in range(len(values))]
