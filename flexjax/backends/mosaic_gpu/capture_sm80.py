"""The kernel of capture_kernel.py by mma.sync: the gradient of one captured array, summed over lists of tiles.

A CTA has one or two warpgroups of 64 queries each and no copying warpgroup. Of each visited tile it copies Q and dO to a slot, and
K and V in parts of `CaptureKernel.part_keys` keys to slots of their own; while one part is computed, the next is copied where there
are two slots. What happens with g says `ListCta`, which both families share.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import capture_tiles
from flexjax.backends.mosaic_gpu.backward_tile_math import ColumnMath
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.capture_kernel import (
    CaptureKernel,
    Carry,
    Cotangent,
    Inputs,
    ListCta,
    Outputs,
    Visit,
)
from flexjax.backends.mosaic_gpu.capture_tiles import ROWS, MmaScratch, MmaSlots
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, Scalar, launch, rows_of, slot_of
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.backends.mosaic_gpu.sm80_copies import Copies
from flexjax.backends.mosaic_gpu.sm80_products import product_transposed


def launch_mma(kernel: CaptureKernel, inputs: Inputs[jax.Array], card: Card) -> Outputs[jax.Array]:
    """Launches the kernel of a card with one CTA for each list, the longest lists first; returns what it wrote:
    `Outputs.sums`, None for SCATTER on the device, which adds to `inputs.words`.

    kernel   what is known at compile time: the load, the shape of the lists, the sink
    inputs   the operands
    card     whose mma.sync kernel runs: it says how tiles are copied and how many slots fit
    """
    plan, groups = kernel.plan, kernel.groups
    slots = capture_tiles.mma_slots(plan, card)

    def run(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: MmaScratch[Ref]) -> None:
        """The kernel on the Refs `inputs`, `outputs` and `scratch`: finds the list of this CTA, of those with most visits first, and
        runs the calling warpgroup (`_Cta.compute`).
        """
        list_number = inputs.order[lax.axis_index("program")]
        steps = kernel.steps(inputs.lists, list_number)
        copies = Copies(card.copying, groups, plan.options.interpret, scratch.meeting)
        _Cta(ListCta(kernel, inputs, outputs, list_number, steps), slots, copies, scratch).compute()

    return launch(
        run,
        inputs,
        kernel.output(inputs),
        capture_tiles.mma_scratch(plan, slots, card.copying),
        name="flexjax_capture_gradient",
        programs=inputs.lists.count.shape[0],
        warpgroups=groups,
        interpret=plan.options.interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Cta:
    """One CTA inside the kernel, as one of its warpgroups sees it. A visit is one tile of the list, whose keys come in
    parts of `CaptureKernel.part_keys`; g is what the kernel sums.

    list      the list that it works through
    slots     of tiles
    copies    how tiles are copied
    scratch   Refs to shared memory
    """

    list: ListCta
    slots: MmaSlots
    copies: Copies
    scratch: MmaScratch[Ref]

    @property
    def kernel(self) -> CaptureKernel:
        """What is known at compile time."""
        return self.list.kernel

    def compute(self) -> None:
        """Computes g of this warpgroup's queries in every visit of the list, and does with g what `Sink` says. Sums in
        registers are written after the last visit, zeros for an empty list. For SCATTER in the simulator it first
        writes zeros to its array.
        """
        kernel, group = self.kernel, self.copies.group
        self.list.clear(group)
        first, second = self.list.visit(0), self.list.visit(1)

        @when(self.list.steps > 0)
        def begin() -> None:
            """Starts the copies of Q and dO of the first visit, and of K and V of its first part."""
            self.fetch_queries(first, jnp.int32(0))
            self.fetch_keys(first, 0, jnp.int32(0))

        self.copies.commit()
        carry = Carry(kernel.zero_sums(), first, second, self.list.statistics(first, group))
        found = lax.fori_loop(0, self.list.steps, self.step, carry)
        if not kernel.scatters_each_tile:
            self.list.write(found.sums, group)

    def step(self, i: Scalar, carry: Carry) -> Carry:
        """Makes the i-th visit: g of all parts of the tile, added to the sums (|g| for MAGNITUDES) or, for SCATTER
        without sums, to the array. It waits for the tiles of each part and starts the copies of what follows. It reads
        the visit after the next and the next statistics early, to hide latency.

        carry   of this visit; that of the next is returned
        """
        kernel, group = self.kernel, self.copies.group
        sums, now, upcoming, (lse2, delta) = carry
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
        """Computes S = Q K^T and dP = dO V^T of one part of a tile from shared memory, and from them g, [ROWS,
        part_keys] float32, as `Probabilities.load_cotangents` gives it, with dropout and, where both passes round the
        weights, rounded weights. The tiles must have arrived (`wait`).

        tile             the part, from whose scores P is computed
        q_slot, k_slot   slots of the tile's queries and of the part's keys
        lse2, delta      [ROWS] row statistics
        """
        kernel, scratch, interpret = self.kernel, self.scratch, self.list.interpret
        own = pl.ds(self.copies.group * ROWS, ROWS)
        s = product_transposed(scratch.query.at[q_slot, own], scratch.key.at[k_slot], interpret)
        found = tile.probabilities(s, lse2)
        dp = product_transposed(scratch.d_out.at[q_slot, own], scratch.value.at[k_slot], interpret)
        (g,) = found.load_cotangents(dp, kernel.math.broadcast(delta, "q"))
        return Cotangent(g, found.scale)

    # ------------------------------------------------------------- copies

    def wait(self, q_slot: Scalar | None, k_slot: Scalar) -> None:
        """Waits until the tiles in these slots have arrived, and until every warpgroup of the CTA is here; so the slots
        that all have read before may be overwritten afterwards.

        q_slot   slot of Q and dO; None: they were waited for before
        k_slot   slot of K and V of a part
        """
        scratch = self.scratch
        if q_slot is not None and scratch.query_full is not None:
            plgpu.barrier_wait(scratch.query_full.at[q_slot])
        self.copies.wait(None if scratch.key_full is None else scratch.key_full.at[k_slot], 0)

    def fetch_next_keys(self, now: Visit, upcoming: Visit, more: Scalar, part: int, number: Scalar) -> None:
        """Starts the copies of K and V of the part after part `part` of the visit `now`: after its last part, those of
        the first part of the visit `upcoming`; nothing after the last part of the last visit.

        more     whether there is a visit `upcoming`
        number   of part `part`, counted over all visits of the CTA
        """
        if part + 1 < self.kernel.parts:
            self.fetch_keys(now, part + 1, number + 1)
        else:
            when(more)(lambda: self.fetch_keys(upcoming, 0, number + 1))

    def fetch_queries(self, visit: Visit, number: Scalar) -> None:
        """Starts the copies of Q and dO of a visit to their slots. The slots must be free, and the caller ends the group of
        copies (`Copies.commit`).

        number   of the visit in its list, which gives the slot
        """
        kernel, tokens, scratch = self.kernel, self.list.inputs.tokens, self.scratch
        b, h, q0, _ = kernel.corner(visit)
        slot = slot_of(number, self.slots.queries)
        for source, target in ((tokens.query, scratch.query), (tokens.d_out, scratch.d_out)):
            rows = rows_of(source, kernel.plan.layout, b, h, q0, target.shape[1])
            self._copy(rows, target, scratch.query_full, slot, kernel.plan.q_len - q0)

    def fetch_keys(self, visit: Visit, part: int, number: Scalar) -> None:
        """Starts the copies of K and V of one part of a visit to their slots. The slots must be free, and the caller ends the
        group of copies (`Copies.commit`).

        part     number of the part in the tile
        number   of the part over all visits of the CTA, which gives the slot
        """
        kernel, tokens, scratch = self.kernel, self.list.inputs.tokens, self.scratch
        b, h, _, kv0 = kernel.corner(visit)
        start, slot = kv0 + part * kernel.part_keys, slot_of(number, self.slots.keys)
        h_kv = lax.div(h, jnp.int32(kernel.plan.group))
        for source, target in ((tokens.key, scratch.key), (tokens.value, scratch.value)):
            rows = rows_of(source, kernel.plan.layout, b, h_kv, start, target.shape[1])
            self._copy(rows, target, scratch.key_full, slot, kernel.plan.kv_len - start)

    def _copy(self, source: Ref, target: Ref, full: Ref | None, slot: Scalar, exist: Scalar) -> None:
        """Starts the copy of this warpgroup's share of one tile to slot `slot` of `target`, and does not wait.

        source   the tile in global memory
        target   the slots in shared memory
        full     the barriers of the slots; None with cp.async
        exist    how many rows of the tile exist; with cp.async the others are filled with zeros
        """
        self.copies.start(source, target.at[slot], None if full is None else full.at[slot], exist)
