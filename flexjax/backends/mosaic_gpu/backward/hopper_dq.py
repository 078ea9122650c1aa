"""Gradient of the queries on Hopper: a CTA owns a tile of queries and visits tiles of keys.

    S = Q K^T      dP = dO V^T      dQ += dS K        (three products a tile; accumulators: S, dP, dQ)

Warpgroups 0 .. G - 1 compute, each on 64 queries of its own; the last warpgroup copies. Each slot of K and V is freed
when the last product that reads it is done: V after dP, K after dQ. The two rings may differ in depth, which head dim
256 needs. Tiles of a pair bias come through a third ring. A *direct gradient* is the gradient of a captured array with
an element for each (query, key); its tiles leave while the product for dQ runs (pair_bias.py, pair_bias_tiles.py).
Where that gradient is a sum over the batch, a CTA takes the same query tile of several batch entries, one after the
other for each key tile; `n` numbers them from 0.

q0 is the first query of a tile, kv0 the first key, `number` the running number of a visit. D is the padded head dim of
queries and keys; the formulas are at the top of common.py.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.common import BackwardCall, BackwardOperands, DqOutputs
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import DqScratch, DqTiles, dq_scratch
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.backward.pair_bias_tiles import (
    DirectGradientWriter,
    Staging,
    skipped_blocks,
    staging_for,
)
from flexjax.backends.mosaic_gpu.backward.probabilities import WeightReference
from flexjax.backends.mosaic_gpu.backward.tile_math import RowMath, TileCta, TileMath
from flexjax.backends.mosaic_gpu.backward.tile_visits import TileVisits, VisitCounts, VisitLists
from flexjax.backends.mosaic_gpu.machine import kernel_parts, partial_sums
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.backends.mosaic_gpu.machine.kernel_parts import (
    Ref,
    Scalar,
    arrive_read,
    copy_parts,
    launch,
    rows_of,
    slot_parts,
)
from flexjax.backends.mosaic_gpu.machine.partial_sums import PartialSums
from flexjax.integers import cdiv


def backward_dq(
    call: BackwardCall, lists: VisitLists[jax.Array], tiles: DqTiles, bias: DenseBiasPlan
) -> DqOutputs[jax.Array]:
    """dQ of a call, times scale, in parts in the shape of the padded queries, and the direct gradients of `bias`.

    The grid has a CTA for each query tile of each query head, of `tiles.batch_entries` batch entries together, or a
    cluster of CTAs that share the columns. Of a head, CTAs with the most visits start first.
    """
    plan, tokens = call.plan, call.tokens
    q_tile = tiles.rows * tiles.groups
    q_tiles = cdiv(plan.q_len, q_tile)
    visits = tile_visits.visits_for(plan, q_tile, tiles.keys, transposed=False)
    order = tile_visits.longest_first(visits, lists, q_tiles)
    loads = tuple(one.load_number for one in bias.direct_gradients)
    math = TileMath(plan, call.derivative, (tiles.rows, tiles.keys), "q", (q_tile, tiles.keys), loads_too=loads)
    staging = staging_for(plan, call.derivative, bias, tiles.staged_slots, (q_tile, tiles.keys), tiles.groups)
    skipped = skipped_blocks(plan, lists) if bias.direct_gradients else VisitLists()
    heads = plan.batch // tiles.batch_entries * plan.q_heads

    def kernel(inputs: BackwardOperands[Ref], outputs: DqOutputs[Ref], scratch: DqScratch[Ref]) -> None:
        clip_rows(aligned=True)
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        rank, head = tile_visits.tile_and_head(program, q_tiles, heads, tiles.head_major)
        b, h = lax.div(head, jnp.int32(plan.q_heads)), lax.rem(head, jnp.int32(plan.q_heads))
        b = b if tiles.batch_entries == 1 else b * tiles.batch_entries
        h_kv = lax.div(h, jnp.int32(plan.group))
        tile = visits.in_order(inputs.order, b, h, rank)
        counts = visits.counts(inputs.lists, b, h, tile)
        total = counts.unmasked + counts.masked
        cta = _Cta(math, tiles, staging, bias, visits, inputs, scratch, b, h, h_kv, tile, counts, total)
        partial_sums.begin(scratch.exchange)
        when(group < tiles.groups)(lambda: cta.compute(group, outputs))
        when(group == tiles.groups)(cta.copy)
        partial_sums.end(scratch.exchange)

    return launch(
        kernel,
        BackwardOperands(tokens, lists, order, call.captures, skipped),
        DqOutputs(
            kernel_parts.output(tokens.query.shape, tokens.query.dtype, tokens.query),
            tuple(kernel_parts.output(*one.output_shape(plan), tokens.query) for one in bias.direct_gradients),
        ),
        dq_scratch(plan, tiles, bias.types),
        name="flexjax_backward_dq",
        programs=q_tiles * heads,
        warpgroups=tiles.groups + 1,
        ctas=ctas_of(plan),
    )


class OwnQueries(typing.NamedTuple):
    """A computing warpgroup's queries of one batch entry."""

    lse2: jax.Array  # [rows] float32, as delta
    delta: jax.Array
    queries: tuple[Ref, ...]  # [rows, D] for each part, in shared memory
    gradient: tuple[Ref, ...]  # [rows, D] for each part, their dQ in global memory
    # where direct gradients take rounded weights: dS and dQ lack its scale until the end
    reference: WeightReference | None = None

    def scaled(self, tile: jax.Array) -> jax.Array:
        reference = self.reference
        return tile if reference is None else tile * lax.broadcast_in_dim(reference.scale, tile.shape, (0,))


@dataclasses.dataclass(frozen=True)
class _Cta(TileCta):
    """One CTA inside the kernel; it has the same query tile of one or several batch entries."""

    tiles: DqTiles
    staging: Staging | None
    bias: DenseBiasPlan
    visits: TileVisits
    inputs: BackwardOperands[Ref]
    scratch: DqScratch[Ref]
    b: Scalar  # the first of its batch entries
    h: Scalar
    h_kv: Scalar
    tile: Scalar
    counts: VisitCounts
    total: Scalar  # key tiles that it visits

    @property
    def entries(self) -> int:
        return self.tiles.batch_entries

    def batch_entry(self, n: int) -> Scalar:
        """The number in the call of the CTA's n-th batch entry."""
        return self.b if self.entries == 1 else self.b + n

    def own_slot(self, group: Scalar, n: int) -> Scalar:
        """The slot of warpgroup `group`'s Q and dO of the n-th batch entry."""
        return group if self.entries == 1 else group * self.entries + n

    def ring_number(self, visit: Scalar, n: int) -> Scalar:
        """The running number in the rings of K and V, where each visit takes one number for each batch entry."""
        return visit if self.entries == 1 else visit * self.entries + n

    def visit_number(self, i: Scalar, masked: bool) -> Scalar:
        """The running number of the i-th visit with (`masked`) or without the mask; those without come first."""
        return i + self.counts.unmasked if masked else i

    def key_tile(self, i: Scalar, masked: bool) -> Scalar:
        return self.visits.tile(self.inputs.lists, self.b, self.h, self.tile, i, masked)

    # --------------------------------------------------------------- computing warpgroups

    def compute(self, group: Scalar, outputs: DqOutputs[Ref]) -> None:
        """What computing warpgroup `group` does: dQ of its queries of each batch entry, and direct gradients."""
        math, tiles, plan = self.math, self.tiles, self.math.plan
        common.raise_register_limit(tiles.groups)
        q0 = self.tile * (tiles.rows * tiles.groups) + group * tiles.rows
        owned = [self.load_own(n, group, q0, outputs.d_query) for n in range(self.entries)]
        plgpu.barrier_wait(self.scratch.own_full.at[group])
        rows = [math.at_rows(self.batch_entry(n), self.h, q0, self.inputs.captures) for n in range(self.entries)]
        owned = [own._replace(reference=row.weight_reference(own.lse2)) for own, row in zip(owned, rows, strict=True)]
        gradients, buffers = self.bias.direct_gradients, self.scratch.direct_gradients
        writer = DirectGradientWriter(gradients, tiles, outputs.direct_gradients, buffers, group, self.b, self.h, q0)

        def accumulate(*dq_accs: Ref) -> list[jax.Array]:
            step = functools.partial(self.visit, group=group, owned=owned, rows=rows, dq_accs=dq_accs, writer=writer)
            pl.loop(0, self.counts.unmasked)(functools.partial(step, masked=False))
            if plan.mask is not None or plan.blocks is not None:
                pl.loop(0, self.counts.masked)(functools.partial(step, masked=True))
            return [own.scaled(self.products.read(acc) * plan.scale) for own, acc in zip(owned, dq_accs, strict=True)]

        dim = self.scratch.query.shape[-1]
        found = self.products.accumulators(accumulate, *((tiles.rows, dim),) * self.entries)
        writer.write_zeros(self.visits, self.inputs.skipped, self.tile)  # to the key tiles that are not visited
        for own, dq in zip(owned, found, strict=True):
            for queries, part in zip(own.queries, self.products.split(dq, self.scratch.query.dtype), strict=True):
                queries[...] = part
        plgpu.commit_smem()
        for own in owned:
            for queries, gradient in zip(own.queries, own.gradient, strict=True):
                plgpu.copy_smem_to_gmem(queries, gradient)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_own(self, n: int, group: Scalar, q0: Scalar, d_query: Ref) -> OwnQueries:
        """Starts the copies of the warpgroup's Q and dO of the n-th batch entry, which arrive at `own_full[group]`.

        Reads their row statistics to registers, and does not wait for the copies.
        """
        b, h, tokens, arrived = self.batch_entry(n), self.h, self.inputs.tokens, self.scratch.own_full.at[group]
        own = pl.ds(q0, self.tiles.rows)
        statistic = lambda which: kernel_parts.load(
            tokens.stats.at[b, h, which, own], common.ALONG_ROWS, optimized=False
        )
        lse2, delta = statistic(0), statistic(1)
        plan, parts = self.math.plan, self.parts
        own_tiles = lambda ring: slot_parts(ring, self.own_slot(group, n), parts)
        queries, d_out = own_tiles(self.scratch.query), own_tiles(self.scratch.d_out)
        copy_parts(plan, tokens.query, b, h, q0, queries, arrived)
        copy_parts(plan, tokens.d_out, b, h, q0, d_out, arrived)
        entries = (b, *(b + part * plan.batch for part in range(1, parts)))
        gradient = tuple(rows_of(d_query, plan.layout, entry, h, q0, *queries[0].shape) for entry in entries)
        return OwnQueries(lse2, delta, queries, gradient)

    def visit(
        self,
        i: Scalar,
        masked: bool,
        *,
        group: Scalar,
        owned: list[OwnQueries],
        rows: list[RowMath],
        dq_accs: tuple[Ref, ...],
        writer: DirectGradientWriter,
    ) -> None:
        """The i-th visit with (`masked`) or without the mask: adds a key tile to dQ of every batch entry."""
        number, kv0 = self.visit_number(i, masked), self.key_tile(i, masked) * self.tiles.keys
        sums: tuple[jax.Array, ...] = ()
        for n in range(self.entries):
            tile = VisitedTile(n, number, kv0, masked, group)
            gradients, k_slot = self.add_to_dq(tile, owned[n], rows[n], dq_accs[n])
            # direct gradients are summed over the batch entries in float32 and written once
            sums = tuple(a + b for a, b in zip(sums, gradients, strict=True)) if n else gradients
            if n == self.entries - 1:
                writer.write(sums, kv0)
            self.products.wait(0)
            arrive_read(self.scratch.key_free.at[k_slot])

    def add_to_dq(
        self, visited: "VisitedTile", own: OwnQueries, rows: RowMath, dq_acc: Ref
    ) -> tuple[tuple[jax.Array, ...], Scalar]:
        """Starts dQ += dS K for a tile; returns its direct gradients, [rows, keys] float32, and the slot to free."""
        n, number, kv0, masked, group = visited
        math, tiles, scratch, products = self.math, self.tiles, self.scratch, self.products
        slot = lambda slots: common.not_hoisted(common.slot_of(self.ring_number(number, n), slots))
        k_slot, v_slot = slot(tiles.key_slots), slot(tiles.value_slots)
        tile_math = rows.at_columns(kv0, masked)
        here = self.own_slot(common.not_hoisted(group), n)
        own_q, own_do = (slot_parts(ring, here, self.parts) for ring in (scratch.query, scratch.d_out))
        keys, values = slot_parts(scratch.key, k_slot, self.parts), slot_parts(scratch.value, v_slot, self.parts)
        sums = PartialSums(scratch.exchange, group)

        def score_cotangents(s_acc: Ref, dp_acc: Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            """(dS, the cotangents of what the load of each direct gradient read), each [rows, keys] float32."""
            plgpu.barrier_wait(scratch.key_full.at[k_slot])
            products.add(s_acc, own_q, keys, b_t=True)
            if math.starts_at_minus_delta:
                products.start(dp_acc, -math.broadcast(partial_sums.in_first_cta(scratch.exchange, own.delta), "q"))
            plgpu.barrier_wait(scratch.value_full.at[v_slot])
            products.add(dp_acc, own_do, values, b_t=True)
            tile = tile_math
            if self.staging is not None and scratch.staged is not None:
                first, last = n == 0, n == self.entries - 1
                tile = self.staging.read_from_ring(tile, scratch.staged, number, group, first, last)
            s = sums.total(products.read(s_acc, 1), 0)  # two exchanges a visit
            found = tile.probabilities(s, own.lse2, own.reference)
            factor = found.factor()
            dp = products.read(dp_acc, 0)
            arrive_read(scratch.value_free.at[v_slot])
            dp = sums.total(dp, 1)
            delta = None if math.starts_at_minus_delta else math.broadcast(own.delta, "q")
            ds, gradients = found.cotangents(factor, dp, delta)
            return ds, tuple(own.scaled(g) for g in gradients)

        ds, gradients = products.accumulators(score_cotangents, math.shape, math.shape)
        products.add(dq_acc, products.split(ds, scratch.key.dtype), keys)
        return gradients, k_slot

    # --------------------------------------------------------------- the copying warpgroup

    def copy(self) -> None:
        """What the copying warpgroup does: it fills the rings for every visit, and waits until all were read."""
        common.lower_register_limit(self.tiles.groups)
        source = None if self.staging is None else self.staging.source(self.inputs.captures, self.b, self.h)
        pl.loop(0, self.counts.unmasked)(functools.partial(self.copy_visit, masked=False, source=source))
        pl.loop(0, self.counts.masked)(functools.partial(self.copy_visit, masked=True, source=source))
        scratch, tiles = self.scratch, self.tiles
        rings = (scratch.key_free, tiles.key_slots), (scratch.value_free, tiles.value_slots)
        common.wait_until_read(self.ring_number(self.total, 0), *rings)
        if scratch.staged is not None:
            common.wait_until_read(self.total, (scratch.staged.free, tiles.staged_slots))

    def copy_visit(self, i: Scalar, masked: bool, source: Ref | None) -> None:
        """Starts the copies of K and V of each batch entry, and one staged tile of `source`, [query, key]."""
        tiles, scratch, tokens = self.tiles, self.scratch, self.inputs.tokens
        visit, key_tile = self.visit_number(i, masked), self.key_tile(i, masked)
        for n in range(self.entries):
            for array, ring, full, free, slots in (
                (tokens.key, scratch.key, scratch.key_full, scratch.key_free, tiles.key_slots),
                (tokens.value, scratch.value, scratch.value_full, scratch.value_free, tiles.value_slots),
            ):
                number = self.ring_number(visit, n)
                slot = common.slot_of(number, slots)
                when(number >= slots)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
                targets = slot_parts(ring, slot, self.parts)
                copy_parts(
                    self.math.plan, array, self.batch_entry(n), self.h_kv, key_tile * tiles.keys, targets, full.at[slot]
                )
            if self.staging is not None and scratch.staged is not None and source is not None and n == 0:
                q0 = self.tile * (tiles.rows * tiles.groups)
                self.staging.copy(scratch.staged, source, q0, key_tile * tiles.keys, visit)


class VisitedTile(typing.NamedTuple):
    """A key tile as a computing warpgroup visits it."""

    batch_entry: int  # which of the CTA's batch entries, from 0
    visit_number: Scalar  # running number of the visit
    kv0: Scalar
    masked: bool
    group: Scalar
