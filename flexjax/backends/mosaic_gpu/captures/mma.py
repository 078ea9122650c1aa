"""The kernel of kernel.py by mma.sync: the gradient of one captured array, summed over lists of tiles.

A CTA has one or two warpgroups of 64 queries each and no copying warpgroup. Of each visited tile it copies Q and dO to
a slot, and K and V in parts of `CaptureKernel.part_keys` keys to slots of their own; while one part is computed, the
next is copied where there are two slots. What happens with g says `ListCta`, which both families share.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath
from flexjax.backends.mosaic_gpu.captures import tiles as captures_tiles
from flexjax.backends.mosaic_gpu.captures.kernel import (
    CaptureFamily,
    CaptureInputs,
    CaptureKernel,
    CaptureOutputs,
    Carry,
    Cotangent,
    ListCta,
    ListVisit,
)
from flexjax.backends.mosaic_gpu.captures.tiles import ROWS, MmaScratch, MmaSlots
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, launch, rows_of, slot_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.mma_products import product_transposed


def launch_mma(kernel: CaptureKernel, inputs: CaptureInputs[jax.Array], card: Card) -> CaptureOutputs[jax.Array]:
    """Launches the kernel with one CTA for each list, the longest lists first."""
    plan, groups = kernel.plan, kernel.groups
    slots = captures_tiles.mma_slots(plan, card, kernel.private)

    def run(inputs: CaptureInputs[Ref], outputs: CaptureOutputs[Ref], scratch: MmaScratch[Ref]) -> None:
        list_number = inputs.order[lax.axis_index("program")]
        steps = kernel.steps(inputs.lists, list_number)
        copies = Copies(card.copying, groups, scratch.meeting)
        own = ListCta(kernel, inputs, outputs, list_number, steps, scratch.private)
        _Cta(own, slots, copies, scratch).compute()

    return launch(
        run,
        inputs,
        kernel.output(inputs),
        captures_tiles.mma_scratch(plan, slots, card.copying, kernel.private),
        name="flexjax_capture_gradient",
        programs=inputs.lists.count.shape[0],
        warpgroups=groups,
    )


def captures_of_card(card: Card) -> CaptureFamily:
    launch = functools.partial(launch_mma, card=card)
    return CaptureFamily(
        launch, captures_tiles.keys_of_part, functools.partial(captures_tiles.mma_private_sums, card=card)
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
    """One CTA inside the kernel, as one of its warpgroups sees it."""

    list: ListCta
    slots: MmaSlots
    copies: Copies
    scratch: MmaScratch[Ref]

    @property
    def kernel(self) -> CaptureKernel:
        return self.list.kernel

    def compute(self) -> None:
        """Computes g of this warpgroup's queries in every visit of the list, and does with g what `Sink` says."""
        kernel, group = self.kernel, self.copies.group
        self.list.clear(group)
        first, second = self.list.visit(0), self.list.visit(1)

        @when(self.list.steps > 0)
        def begin() -> None:
            self.fetch_queries(first, jnp.int32(0))
            self.fetch_keys(first, 0, jnp.int32(0))

        self.copies.commit()
        carry = Carry(kernel.zero_sums(), first, second, self.list.statistics(first, group))
        found = lax.fori_loop(0, self.list.steps, self.step, carry)
        self.list.write(found.sums, group)

    def step(self, i: Scalar, carry: Carry) -> Carry:
        """Makes the i-th visit, adds g of all parts of the tile, and starts the copies of what follows."""
        kernel, group = self.kernel, self.copies.group
        sums, now, upcoming, (lse2, delta) = carry
        # read early, to hide latency
        later, upcoming_statistics = self.list.visit(i + 2), self.list.statistics(upcoming, group)
        b, h, q0, kv0 = kernel.corner(now)
        rows = kernel.math.at_rows(b, h, q0 + group * ROWS, self.list.inputs.captures)
        q_slot, more = slot_of(i, self.slots.queries), i + 1 < self.list.steps
        for part in range(kernel.parts):
            number, last = i * kernel.parts + part, part == kernel.parts - 1
            k_slot = slot_of(number, self.slots.keys)
            tile = rows.at_columns(kv0 + part * kernel.part_keys, (now.code & 1) == 1)
            self.wait(q_slot if part == 0 else None, k_slot)
            if self.slots.queries > 1 and part == 0:
                when(more)(lambda: self.fetch_queries(upcoming, i + 1))
            if self.slots.keys > 1:
                self.fetch_next_keys(now, upcoming, more, part, number)
            self.copies.commit()
            g = self.load_cotangents(tile, q_slot, k_slot, lse2, delta)
            if self.slots.keys == 1 or (last and self.slots.queries == 1):
                self.copies.sync()
                if last and self.slots.queries == 1:
                    when(more)(lambda: self.fetch_queries(upcoming, i + 1))
                if self.slots.keys == 1:
                    self.fetch_next_keys(now, upcoming, more, part, number)
                self.copies.commit()
            if kernel.scatters_each_tile:
                self.list.scatter(b, h, q0 + group * ROWS, kv0 + part * kernel.part_keys, g.whole, group)
                continue
            sums = kernel.add(sums, part, g)
        return Carry(sums, upcoming, later, upcoming_statistics)

    def load_cotangents(
        self, tile: ColumnMath, q_slot: Scalar, k_slot: Scalar, lse2: jax.Array, delta: jax.Array
    ) -> Cotangent:
        """S = Q K^T and dP = dO V^T of one part of a tile, and from them g, [ROWS, part_keys] float32. After `wait`."""
        kernel, scratch = self.kernel, self.scratch
        own = pl.ds(self.copies.group * ROWS, ROWS)
        s = product_transposed(scratch.query.at[q_slot, own], scratch.key.at[k_slot])
        found = tile.probabilities(s, lse2)
        dp = product_transposed(scratch.d_out.at[q_slot, own], scratch.value.at[k_slot])
        (g,) = found.load_cotangents(dp, kernel.math.broadcast(delta, "q"))
        return Cotangent(g, found.scale)

    # ------------------------------------------------------------- copies

    def wait(self, q_slot: Scalar | None, k_slot: Scalar) -> None:
        """Waits until the tiles in these slots have arrived, and until every warpgroup of the CTA is here, so that
        slots that all have read before may be overwritten.

        q_slot   None: Q and dO were waited for before
        """
        scratch = self.scratch
        if q_slot is not None and scratch.query_full is not None:
            plgpu.barrier_wait(scratch.query_full.at[q_slot])
        self.copies.wait(None if scratch.key_full is None else scratch.key_full.at[k_slot], 0)

    def fetch_next_keys(self, now: ListVisit, upcoming: ListVisit, more: Scalar, part: int, number: Scalar) -> None:
        """Starts the copies of K and V of the next part, in this visit or in `upcoming`; none after the last.

        number   of part `part`, counted over all visits of the CTA
        """
        if part + 1 < self.kernel.parts:
            self.fetch_keys(now, part + 1, number + 1)
        else:
            when(more)(lambda: self.fetch_keys(upcoming, 0, number + 1))

    def fetch_queries(self, visit: ListVisit, number: Scalar) -> None:
        """Starts the copies of Q and dO of a visit to their slots, which must be free; the caller commits."""
        kernel, tokens, scratch = self.kernel, self.list.inputs.tokens, self.scratch
        b, h, q0, _ = kernel.corner(visit)
        slot = slot_of(number, self.slots.queries)
        for source, target in ((tokens.query, scratch.query), (tokens.d_out, scratch.d_out)):
            rows = rows_of(source, kernel.plan.layout, b, h, q0, target.shape[1])
            self._copy(rows, target, scratch.query_full, slot, kernel.plan.q_len - q0)

    def fetch_keys(self, visit: ListVisit, part: int, number: Scalar) -> None:
        """Starts the copies of K and V of one part of a visit, as `fetch_queries`; `number` counts all parts."""
        kernel, tokens, scratch = self.kernel, self.list.inputs.tokens, self.scratch
        b, h, _, kv0 = kernel.corner(visit)
        start, slot = kv0 + part * kernel.part_keys, slot_of(number, self.slots.keys)
        h_kv = lax.div(h, jnp.int32(kernel.plan.group))
        for source, target in ((tokens.key, scratch.key), (tokens.value, scratch.value)):
            rows = rows_of(source, kernel.plan.layout, b, h_kv, start, target.shape[1])
            self._copy(rows, target, scratch.key_full, slot, kernel.plan.kv_len - start)

    def _copy(self, source: Ref, target: Ref, full: Ref | None, slot: Scalar, exist: Scalar) -> None:
        """Starts the copy of this warpgroup's share of one tile, of which `exist` rows exist, and does not wait."""
        self.copies.start(source, target.at[slot], None if full is None else full.at[slot], exist)
