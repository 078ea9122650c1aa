"""The forward pass of a call whose sequence is split, on one device, in stages (stages.py).

With s a stage, lse_s and out_s its row statistics and outputs over its own keys:

    lse = log sum_s exp(lse_s)  (and the sink, once)        out = sum_s exp(lse_s - lse) out_s

A stage without keys for a row has lse_s = -inf and weight 0, also where all stages are -inf. Expectations merge as
outputs do. Of a weighted plan outputs, totals and expectations add. Stages are merged in the order in which keys come,
which is the same in every run.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends import tile_math
from flexjax.context.device import RING_PARTS, OnDevice
from flexjax.context.exchange import Part as ShardPart
from flexjax.context.merge import Part, merged, rescaled
from flexjax.context.stages import Keys
from flexjax.plan.kernel_plan import Results

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Forward(OnDevice):
    """The forward pass of a call on one device, in Parts of this device's rows over some or all keys."""

    def forward(self) -> list[Array]:
        """This device's [out in the dtype of query, lse] and perhaps the other Results, in their order."""
        part = self._over_heads() if self.call.method == "all_to_all" else self.rows()
        out, rounding = tile_math.out_and_rounding(part.out, self.call.plan)
        return [x for x in (out, part.lse, part.top, rounding, part.sums) if x is not None]

    def rows(self) -> Part:
        """This device's rows over all keys and the sinks, for every method but "all_to_all"."""
        if self.call.checked:
            ways = [lambda m=m: tuple(self.with_method(m).rows()) for m in ("neighbours", "ring")]
            return Part(*lax.cond(self.nothing_missing(), *ways))
        if self.call.method == "all_gather":
            return self.over(self.exchange.gather(self.own), sinks=True, partial=False)
        if self.call.method == "neighbours":
            return self._with_neighbours()
        part = self._ring()
        if self.operands.sinks is not None:
            part = rescaled(part, jnp.logaddexp(part.lse, self.by_head(self.operands.sinks)))
        return self._finished(part)

    def _ring(self) -> Part:
        """The rows over all keys, without sinks, in the score dtype, by the method "ring"."""
        own, blocks = self.own, self.blocks_of_part
        if not blocks:
            return self._visited_by(own.arrays, self.nothing(), None)

        # long shards travel in parts, because a part takes less memory
        def one_part(part: Part, number: Array) -> tuple[Part, None]:
            which = ShardPart(number, blocks)
            return self._visited_by([self.exchange.part_of(x, which) for x in own.arrays], part, which), None

        return lax.scan(one_part, self.varying(self.nothing()), jnp.arange(RING_PARTS, dtype=jnp.int32))[0]

    def _visited_by(self, arrays: Sequence[Array], part: Part, which: ShardPart | None) -> Part:
        """`part` merged with the rows over the keys of all shards, or of part `which` of each, from the ring."""
        exchange = self.exchange

        def step(state: tuple[list[Array], Part], number: Array) -> tuple[tuple[list[Array], Part], None]:
            """Body of lax.scan. state: the keys that are on this device in step `number`, the results so far."""
            visiting, part = state
            coming = exchange.from_previous(visiting)
            return (coming, self.merged(part, self.over(exchange.visiting(visiting, number, which)))), None

        last = self.call.devices - 1
        state = self.varying((list(arrays), part))
        (visiting, part), _ = lax.scan(step, state, jnp.arange(last, dtype=jnp.int32))
        return self.merged(part, self.over(exchange.visiting(visiting, jnp.int32(last), which)))

    def _with_neighbours(self) -> Part:
        """The rows over own keys, while others travel, merged with the rows over received keys."""
        if not self.call.shifts:
            return self.over(self.own, sinks=True, partial=False)
        received = self.exchange.receive(self.own)
        if self.tables.visitors is None:
            return self._finished(self.merged(self.over(self.own, sinks=True), self.over(received)))
        # few rows visit received keys: a stage of their own over all their keys, and nothing is merged
        part = self.over(self.own, sinks=True, partial=False)
        device = self.visitors
        of_visitors = device.over(device.visited(received), sinks=True, partial=False)
        return Part(*map(self.put, part, of_visitors))

    def _over_heads(self) -> Part:
        """This device's rows over all keys and the sinks, by the method "all_to_all"."""
        device, _, back = self.over_heads()
        part = device.over(device.own, sinks=True, partial=False)
        return Part(*(typing.cast(typing.Any, x) if x is None else back(x, "query") for x in part))

    def over(self, keys: Keys, sinks: bool = False, partial: bool = True) -> Part:
        """The rows of one stage: over `keys` and the call's `sinks`; out in the score dtype if `partial`."""
        stage = self.stage(keys, sinks and self.operands.sinks is not None, partial)
        found = self.passes.forward.bind(*self.passes.alike(stage.flat), problem=stage.problem)
        results = Results.of(stage.problem.plan, found)
        out = results.out if results.rounding is None else results.float32_out
        return Part(out, results.lse, results.max_scores, results.expectations)

    def nothing(self) -> Part:
        """The results over no keys, to merge others with, in the score dtype."""
        plan = self.call.plan
        dtype = jnp.dtype(plan.score_dtype)
        rows = self.operands.query.shape[:3]
        lse = jnp.full(rows, plan.lse_without_keys, dtype)
        top = jnp.full(rows, -jnp.inf, dtype) if plan.max_scores else None
        sums = jnp.zeros((*rows, plan.expectations), dtype) if plan.expectations else None
        return Part(jnp.zeros((*rows, plan.value_dim), dtype), lse, top, sums)

    def merged(self, a: Part, b: Part) -> Part:
        return merged(a, b, self.call.plan.weighted)

    def _finished(self, part: Part) -> Part:
        plan = self.call.plan
        return part if plan.exact_captures else part._replace(out=part.out.astype(plan.dtype))
