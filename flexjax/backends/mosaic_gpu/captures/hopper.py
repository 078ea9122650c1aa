"""The kernel of kernel.py for Hopper: the gradient of one captured array, summed over lists of tiles.

A CTA has one or two computing warpgroups, of 64 queries each, and a copying warpgroup, which fills rings of slots in
shared memory: a slot of the query ring has Q and dO of a visited tile, a slot of the key ring K and V of one part of
ROWS keys. What happens with g says `ListCta`, which both families share.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.backward.pair_bias_tiles import Staging, staging_for
from flexjax.backends.mosaic_gpu.backward.tile_math import ColumnMath, TileCta
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
from flexjax.backends.mosaic_gpu.captures.tiles import (
    ROWS,
    CaptureScratch,
    RingDepths,
    capture_scratch,
    private_sums,
    ring_depths,
)
from flexjax.backends.mosaic_gpu.machine import memory, partial_sums
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, Scalar, arrive_read, copy_parts, launch, slot_parts
from flexjax.backends.mosaic_gpu.machine.partial_sums import PartialSums
from flexjax.backends.mosaic_gpu.machine.shared_memory import dtype_name
from flexjax.backends.mosaic_gpu.machine.simulator import ordered


def launch_hopper(kernel: CaptureKernel, inputs: CaptureInputs[jax.Array]) -> CaptureOutputs[jax.Array]:
    """Launches the kernel with one CTA, or cluster, for each list, the longest lists first. The array of `kernel.bias`
    is staged where `ring_depths` finds room.
    """
    plan, tokens, bias, groups = kernel.plan, inputs.tokens, kernel.bias.types, kernel.groups
    parts, ctas = parts_of(plan), ctas_of(plan)
    dims, dtype = (tokens.query.shape[-1] // ctas, tokens.value.shape[-1] // ctas), dtype_name(tokens.query.dtype)
    rings = ring_depths(groups, dims, dtype, bias.staged, parts, ctas, kernel.private)
    slots, tile = int(rings.staged) * rings.queries, kernel.shape.tile
    staging = staging_for(plan, kernel.derivative, kernel.bias, slots, (tile, tile), groups)

    def run(inputs: CaptureInputs[Ref], outputs: CaptureOutputs[Ref], scratch: CaptureScratch[Ref]) -> None:
        clip_rows(aligned=True)
        group = lax.axis_index("wg")
        list_number = inputs.order[lax.axis_index("program")]
        steps = kernel.steps(inputs.lists, list_number)
        own = ListCta(kernel, inputs, outputs, list_number, steps, scratch.private)
        cta = _Cta(kernel.math, own, rings, staging, scratch)
        partial_sums.begin(scratch.exchange)
        when(group < groups)(lambda: cta.compute(group))
        when(group == groups)(cta.copy)
        partial_sums.end(scratch.exchange)

    return launch(
        run,
        inputs,
        kernel.output(inputs),
        capture_scratch(groups, rings, dims, dtype, bias.staged, parts, ctas, kernel.private),
        name="flexjax_capture_gradient",
        programs=inputs.lists.count.shape[0],
        warpgroups=groups + 1,
        ctas=ctas,
    )


CAPTURES = CaptureFamily(launch_hopper, lambda plan: ROWS, private_sums)


class OwnTile(typing.NamedTuple):
    """One part of a visited tile, as a computing warpgroup reads it."""

    q_slot: Scalar
    k_slot: Scalar
    rows: slice | pl.Slice
    part: int
    lse2: jax.Array
    delta: jax.Array
    group: Scalar


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel for Hopper: computing warpgroups, and as the last one the copying warpgroup."""

    list: ListCta
    rings: RingDepths
    staging: Staging | None
    scratch: CaptureScratch[Ref]

    @property
    def kernel(self) -> CaptureKernel:
        return self.list.kernel

    @property
    def writes(self) -> Scalar | bool:
        """Whether this CTA writes to global memory what both CTAs of a cluster have computed; True, a Python bool,
        where a CTA has all columns.
        """
        return partial_sums.first_cta(self.scratch.exchange)

    # ------------------------------------------------------------- computing warpgroups

    def compute(self, group: Scalar) -> None:
        """Computes g of the warpgroup's queries in every visit of the list, and does with g what `Sink` says. In a
        cluster both CTAs compute, and only the first writes.
        """
        kernel = self.kernel
        common.raise_register_limit(kernel.groups)
        when(self.writes)(functools.partial(self.list.clear, group))
        first = self.list.visit(0)
        statistics = self.list.statistics(first, group)
        begin = Carry(kernel.zero_sums(), first, self.list.visit(1), statistics)
        found = lax.fori_loop(0, self.list.steps, functools.partial(self.step, group=group), begin)
        when(self.writes)(functools.partial(self.list.write, found.sums, group))

    def step(self, i: Scalar, carry: Carry, group: Scalar) -> Carry:
        """Makes the i-th visit: waits for the tiles, adds g of all parts of the tile, and frees their slots."""
        kernel, rings, scratch = self.kernel, self.rings, self.scratch
        sums, now, upcoming, (lse2, delta) = carry
        # loads for the next steps, issued early
        later, upcoming_statistics = self.list.visit(i + 2), self.list.statistics(upcoming, group)
        b, h, q0, kv0 = kernel.corner(now)
        masked = (now.code & 1) == 1
        rows = kernel.math.at_rows(b, h, q0 + group * ROWS, self.list.inputs.captures)
        q_slot = common.slot_of(i, rings.queries)
        here = pl.ds(common.not_hoisted(jnp.asarray(group, jnp.int32)) * ROWS, ROWS)
        for part in range(kernel.parts):
            number = i * kernel.parts + part
            k_slot = common.not_hoisted(common.slot_of(number, rings.keys))
            tile = rows.at_columns(kv0 + part * ROWS, masked)
            if part == 0:
                plgpu.barrier_wait(scratch.query_full.at[q_slot])
            plgpu.barrier_wait(scratch.key_full.at[k_slot])
            own = OwnTile(q_slot, k_slot, here, part, lse2, delta, group)
            cotangents = functools.partial(self.load_cotangents, tile=tile, own=own)
            g = Cotangent(*self.products.accumulators(cotangents, (ROWS, ROWS), (ROWS, ROWS)))
            if kernel.scatters_each_tile:
                place = b, h, q0 + group * ROWS, kv0 + part * ROWS
                when(self.writes)(functools.partial(self.list.scatter, *place, g.whole, group))
                continue
            sums = kernel.add(sums, part, g)
            sums = ordered(sums)  # the next part must not start earlier: too few registers
        return Carry(sums, upcoming, later, upcoming_statistics)

    def load_cotangents(self, s_acc: Ref, dp_acc: Ref, tile: ColumnMath, own: OwnTile) -> Cotangent:
        """S = Q K^T and dP = dO V^T of one part of a tile by WGMMAs, and from them g, [ROWS, ROWS]. The copies must
        have arrived; it releases the slot of keys and values, in the last part also that of queries.

        s_acc, dp_acc   accumulators for S and dP, 0 at the start
        """
        math, scratch, products = self.kernel.math, self.scratch, self.products
        rows_of = lambda ring: slot_parts(ring, own.q_slot, self.parts, own.rows)
        keys_of = lambda ring: slot_parts(ring, own.k_slot, self.parts)
        products.add(s_acc, rows_of(scratch.query), keys_of(scratch.key), b_t=True)
        if math.starts_at_minus_delta:
            products.start(dp_acc, -math.broadcast(partial_sums.in_first_cta(scratch.exchange, own.delta), "q"))
        products.add(dp_acc, rows_of(scratch.d_out), keys_of(scratch.value), b_t=True)
        sums = PartialSums(scratch.exchange, own.group)
        s = sums.total(products.read(s_acc, 1), 0)  # two exchanges a part
        if self.staging is not None and scratch.staged is not None:
            keys = pl.ds(own.part * ROWS, ROWS)
            value = memory.load_staged(scratch.staged.at[own.q_slot, own.rows, keys])
            tile = tile.with_loaded(self.staging.load, value)
        found = tile.probabilities(s, own.lse2)
        dp = products.read(dp_acc)
        arrive_read(scratch.key_free.at[own.k_slot])
        if own.part == self.kernel.parts - 1:
            arrive_read(scratch.query_free.at[own.q_slot])
        dp = sums.total(dp, 1)
        delta = None if math.starts_at_minus_delta else math.broadcast(own.delta, "q")
        (g,) = found.load_cotangents(dp, delta)
        return Cotangent(g, found.scale)

    # ------------------------------------------------------------- the copying warpgroup

    def copy(self) -> None:
        """The copying warpgroup: copies what every visit of the list reads into the rings, and waits until all of it
        was read.
        """
        kernel = self.kernel
        common.lower_register_limit(kernel.groups)
        lax.fori_loop(0, self.list.steps, self.copy_visit, (self.list.visit(0), self.list.visit(1)))
        common.wait_until_read(self.list.steps, (self.scratch.query_free, self.rings.queries))
        common.wait_until_read(self.list.steps * kernel.parts, (self.scratch.key_free, self.rings.keys))

    def copy_visit(self, i: Scalar, visits: tuple[ListVisit, ListVisit]) -> tuple[ListVisit, ListVisit]:
        """Starts the copies of the i-th visit, once their slots are free; K and V in parts of ROWS keys.

        visits   (visit i, visit i + 1); (visit i + 1, visit i + 2) is returned
        """
        kernel, rings, scratch, tokens = self.kernel, self.rings, self.scratch, self.list.inputs.tokens
        now, upcoming = visits
        later = self.list.visit(i + 2)
        b, h, q0, kv0 = kernel.corner(now)
        h_kv = lax.div(h, jnp.int32(kernel.plan.group))
        slot = common.slot_of(i, rings.queries)
        when(i >= rings.queries)(lambda: plgpu.barrier_wait(scratch.query_free.at[slot]))
        for source, ring in ((tokens.query, scratch.query), (tokens.d_out, scratch.d_out)):
            tile = slot_parts(ring, slot, self.parts)
            copy_parts(kernel.plan, source, b, h, q0, tile, scratch.query_full.at[slot])
        if self.staging is not None and scratch.staged is not None:
            source = self.staging.source(self.list.inputs.captures, b, h)
            self.staging.fetch(scratch.staged.at[slot], source, q0, kv0, scratch.query_full.at[slot])
        for part in range(kernel.parts):
            number = i * kernel.parts + part
            k_slot = common.slot_of(number, rings.keys)
            when(number >= rings.keys)(lambda k_slot=k_slot: plgpu.barrier_wait(scratch.key_free.at[k_slot]))
            start = kv0 + part * ROWS
            for source, ring in ((tokens.key, scratch.key), (tokens.value, scratch.value)):
                tile = slot_parts(ring, k_slot, self.parts)
                copy_parts(kernel.plan, source, b, h_kv, start, tile, scratch.key_full.at[k_slot])
        return upcoming, later
