"""Gradient of the queries on Hopper: each block of threads owns a tile of queries and walks the keys on its list.

    S = Q K^T      dP = dO V^T      dQ += dS K        (three products a tile; accumulators: S, dP, dQ)

Warpgroups 0..n-1 compute, each on its own 64 queries; the last one copies. Keys and values share a ring of slots in the
order K0 V0 K1 V1 ..., each slot released as soon as the last product that reads it is done: V after dP, K after dQ. An odd
number of slots therefore works too, which is what head dim 256 needs. Tiles of a captured array with a number for each
query and key have a ring of their own, and tiles of its gradient leave while dQ's product runs (pair_bias.py). Where that
gradient is a sum over the batch, a block of threads takes all entries of a tile of queries together, one after the other.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu.backward_tile_math import Captures, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import DqTiles
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.pair_bias_tiles import (
    DirectGradientWriter,
    StagedRing,
    gradient_buffers,
    skipped_blocks,
    staging_for,
)
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


class Own(typing.NamedTuple):
    """What a warpgroup keeps of its queries of one batch entry: row statistics, shared memory, where dQ goes."""

    lse2: jax.Array
    delta: jax.Array
    queries: typing.Any
    gradient: typing.Any


def backward_dq(
    plan: KernelPlan,
    derivative: ir.Program | None,
    given: common.Prepared,
    visit_lists: common.VisitLists,
    captures: Captures,
    tiles: DqTiles,
    bias: DenseBiasPlan,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """dQ in the shape of `given.query`, and the gradients of `bias.direct_gradients`."""
    dtype = given.query.dtype
    dim, value_dim = given.query.shape[-1], given.value.shape[-1]
    q_tile = tiles.rows * tiles.groups
    q_tiles = -(-plan.q_len // q_tile)
    visits = common.visits_for(plan, q_tile, tiles.keys, transposed=False)
    order = common.longest_first(visits, visit_lists, q_tiles)
    math = TileMath(
        plan,
        derivative,
        (tiles.rows, tiles.keys),
        "q",
        (q_tile, tiles.keys),
        also=tuple(one.load_number for one in bias.direct_gradients),
    )
    staging = staging_for(plan, derivative, bias, tiles.staged_slots, (q_tile, tiles.keys), tiles.groups)
    empty = skipped_blocks(plan, visit_lists) if bias.direct_gradients else common.VisitLists(None, None, None, None)
    products = common.Products(plan.options.interpret)
    entries = tiles.batch_entries
    heads = plan.batch // entries * plan.q_heads
    rows_of = functools.partial(common.rows_of, layout=plan.layout)

    def kernel(
        q_ref: typing.Any,
        k_ref: typing.Any,
        v_ref: typing.Any,
        do_ref: typing.Any,
        stats_ref: typing.Any,
        lists: common.VisitLists,
        order_ref: typing.Any,
        captured: Captures,
        empty_refs: common.VisitLists,
        dq_ref: typing.Any,
        direct_refs: tuple[typing.Any, ...],
        q_smem: typing.Any,
        do_smem: typing.Any,
        k_smem: typing.Any,
        v_smem: typing.Any,
        q_full: typing.Any,
        k_full: typing.Any,
        v_full: typing.Any,
        k_free: typing.Any,
        v_free: typing.Any,
        ring: StagedRing,
        direct_smem: tuple[typing.Any, ...],
    ) -> None:
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        rank, head_index = common.tile_and_head(program, q_tiles, heads, tiles.head_major)
        b, h = lax.div(head_index, jnp.int32(plan.q_heads)), lax.rem(head_index, jnp.int32(plan.q_heads))
        b = b if entries == 1 else b * entries
        h_kv = lax.div(h, jnp.int32(plan.group))
        tile = rank
        if order_ref is not None:
            tile = order_ref[b if visits.batch > 1 else 0, h if visits.heads > 1 else 0, rank]
        counts = visits.counts(lists, b, h, tile)
        total = counts.unmasked + counts.masked
        entry_of = lambda start, n: start if entries == 1 else start + n
        part_of = lambda group, n: group if entries == 1 else group * entries + n
        nth = lambda at, n: at if entries == 1 else at * entries + n

        def compute() -> None:
            common.raise_register_limit(tiles.groups)
            q0 = tile * q_tile + group * tiles.rows
            mine = pl.ds(q0, tiles.rows)

            def own(n: int) -> Own:
                """Loads the n-th batch entry's queries."""
                at = entry_of(b, n)
                lse2 = plgpu.load(stats_ref.at[at, h, 0, mine], layout=common.ALONG_ROWS, optimized=False)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                delta = plgpu.load(stats_ref.at[at, h, 1, mine], layout=common.ALONG_ROWS, optimized=False)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                own_q, own_do = q_smem.at[part_of(group, n)], do_smem.at[part_of(group, n)]
                rows = functools.partial(rows_of, b=at, h=h, start=q0, size=tiles.rows)
                plgpu.copy_gmem_to_smem(rows(q_ref), own_q, q_full.at[group])
                plgpu.copy_gmem_to_smem(rows(do_ref), own_do, q_full.at[group])
                return Own(lse2, delta, own_q, rows(dq_ref))

            owned = [own(n) for n in range(entries)]
            plgpu.barrier_wait(q_full.at[group])
            rows = [math.at_rows(entry_of(b, n), h, q0, captured) for n in range(entries)]
            writer = DirectGradientWriter(bias.direct_gradients, tiles, direct_refs, direct_smem, group, b, h, q0)

            def accumulate(*dq_accs: typing.Any) -> list[jax.Array]:
                def step(i: jax.Array, masked: bool) -> None:
                    at = i + counts.unmasked if masked else i
                    kv0 = visits.tile(lists, b, h, tile, i, masked) * tiles.keys
                    sums: tuple[jax.Array, ...] = ()
                    for n in range(entries):
                        others, k_slot = one_entry(n, at, kv0, masked)
                        sums = tuple(a + b for a, b in zip(sums, others, strict=True)) if n else others
                        if n == entries - 1:
                            writer.write(sums, kv0)
                        products.wait(0)
                        products.release(k_free.at[k_slot])

                def one_entry(
                    n: int, at: jax.Array, kv0: jax.Array, masked: bool
                ) -> tuple[tuple[jax.Array, ...], jax.Array]:
                    """Starts the last product of a step; the gradients of captured arrays and the slot of the keys."""
                    lse2, delta = owned[n].lse2, owned[n].delta
                    k_slot = common.not_hoisted(common.slot_of(nth(at, n), tiles.key_slots), plan.options.interpret)
                    v_slot = common.not_hoisted(common.slot_of(nth(at, n), tiles.value_slots), plan.options.interpret)
                    tile_math = rows[n].at_columns(kv0, masked)
                    here = part_of(common.not_hoisted(group, plan.options.interpret), n)
                    own_q, own_do = q_smem.at[here], do_smem.at[here]

                    def scores(s_acc: typing.Any, dp_acc: typing.Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
                        plgpu.barrier_wait(k_full.at[k_slot])
                        products.add(s_acc, own_q, k_smem.at[k_slot], b_t=True)
                        if math.starts_at_minus_delta:
                            products.start(dp_acc, -math.broadcast(delta, "q"))
                        plgpu.barrier_wait(v_full.at[v_slot])
                        products.add(dp_acc, own_do, v_smem.at[v_slot], b_t=True)
                        held = tile_math
                        if staging is not None:
                            held = staging.read_from_ring(held, ring, at, group, n == 0, n == entries - 1)
                        s = products.read(s_acc, 1)
                        found = held.probabilities(s, lse2)
                        factor, factors = found.factor(), found.load_factors()
                        dp = products.read(dp_acc, 0)
                        products.release(v_free.at[v_slot])
                        before = None if math.starts_at_minus_delta else math.broadcast(delta, "q")
                        ds = found.cotangent(factor, dp, before)
                        return ds, tuple(ds if f is factor else found.cotangent(f, dp, before) for f in factors)

                    ds, others = products.accumulators(scores, math.shape, math.shape)
                    products.add(dq_accs[n], ds.astype(dtype), k_smem.at[k_slot])
                    return others, k_slot

                pl.loop(0, counts.unmasked)(functools.partial(step, masked=False))
                if plan.mask is not None or plan.blocks is not None:
                    pl.loop(0, counts.masked)(functools.partial(step, masked=True))
                return [products.read(acc) * plan.scale for acc in dq_accs]

            found = products.accumulators(accumulate, *((tiles.rows, dim),) * entries)
            writer.write_zeros(visits, empty_refs, tile)
            for mine_, dq in zip(owned, found, strict=True):
                mine_.queries[...] = dq.astype(dtype)
            plgpu.commit_smem()
            for mine_ in owned:
                plgpu.copy_smem_to_gmem(mine_.queries, mine_.gradient)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def copy() -> None:
            common.lower_register_limit(tiles.groups)
            source = None if staging is None else staging.source(captured, b, h)

            def step(i: jax.Array, masked: bool) -> None:
                at = i + counts.unmasked if masked else i
                key_tile = visits.tile(lists, b, h, tile, i, masked)
                for n in range(entries):
                    for ref, smem, full, free, slots in (
                        (k_ref, k_smem, k_full, k_free, tiles.key_slots),
                        (v_ref, v_smem, v_full, v_free, tiles.value_slots),
                    ):
                        number = nth(at, n)
                        slot = common.slot_of(number, slots)
                        when(number >= slots)(lambda free=free, slot=slot: plgpu.barrier_wait(free.at[slot]))
                        rows = rows_of(ref, b=entry_of(b, n), h=h_kv, start=key_tile * tiles.keys, size=tiles.keys)
                        plgpu.copy_gmem_to_smem(rows, smem.at[slot], full.at[slot])
                    if staging is not None and n == 0:
                        staging.copy(ring, source, tile * q_tile, key_tile * tiles.keys, at)

            pl.loop(0, counts.unmasked)(functools.partial(step, masked=False))
            pl.loop(0, counts.masked)(functools.partial(step, masked=True))
            staged = () if staging is None else ((ring.free, tiles.staged_slots),)
            tiles_read = nth(total, 0)
            common.wait_until_read(tiles_read, (k_free, tiles.key_slots), (v_free, tiles.value_slots))
            common.wait_until_read(total, *staged)

        when(group < tiles.groups)(compute)
        when(group == tiles.groups)(copy)

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(given.query.shape, dtype),
            tuple(one.out_type(plan) for one in bias.direct_gradients),
        ),
        scratch_types=[
            common.tile_smem((tiles.groups * entries, tiles.rows, dim), dtype),
            common.tile_smem((tiles.groups * entries, tiles.rows, value_dim), dtype),
            common.tile_smem((tiles.key_slots, tiles.keys, dim), dtype),
            common.tile_smem((tiles.value_slots, tiles.keys, value_dim), dtype),
            plgpu.Barrier(num_barriers=tiles.groups, num_arrivals=2 * entries),
            plgpu.Barrier(num_barriers=tiles.key_slots),
            plgpu.Barrier(num_barriers=tiles.value_slots),
            plgpu.Barrier(num_barriers=tiles.key_slots, num_arrivals=tiles.groups),
            plgpu.Barrier(num_barriers=tiles.value_slots, num_arrivals=tiles.groups),
            StagedRing() if staging is None else staging.scratch(),
            gradient_buffers(bias.direct_gradients, tiles),
        ],
        grid=(q_tiles * heads,),
        grid_names=("program",),
        num_threads=tiles.groups + 1,
        thread_name="wg",
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if plan.options.interpret else None,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        kernel_name="flexjax_backward_dq",
    )
    return run(*given, visit_lists, order, captures, empty)
