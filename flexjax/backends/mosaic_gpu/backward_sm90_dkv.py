"""Gradients of keys and values on Hopper: each block of threads owns a tile of keys and walks the queries that read it.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q        (four products a tile)

Everything is transposed: keys are the rows of a tile, so P^T and dS^T come out of the accumulators in the registers where
the next product wants them, and the row statistics of the queries lie along columns. The query heads that share a key head
are walked one after another into the same accumulators: the sum over the group costs nothing and has one order.
Tiles of a captured array with a number for each query and key come and go with those of the queries, and are read across
their rows (pair_bias.py).
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu.backward_tile_math import Captures, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import DkvTiles
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.pair_bias_tiles import staging_for
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


def backward_dkv(
    plan: KernelPlan,
    derivative: ir.Program | None,
    given: common.Prepared,
    visit_lists: common.VisitLists,
    captures: Captures,
    tiles: DkvTiles,
    bias: DenseBiasPlan,
) -> tuple[jax.Array, jax.Array]:
    """(dK, dV) in the shapes of `given.key` and `given.value`."""
    dtype = given.key.dtype
    dim, value_dim = given.key.shape[-1], given.value.shape[-1]
    kv_tile = tiles.rows * tiles.groups
    kv_tiles = -(-plan.kv_len // kv_tile)
    visits = common.visits_for(plan, kv_tile, tiles.queries, transposed=True)
    order = common.longest_first(visits, visit_lists, kv_tiles)
    math = TileMath(plan, derivative, (tiles.rows, tiles.queries), "kv", (tiles.queries, tiles.rows * tiles.groups))
    staging = staging_for(plan, derivative, bias, tiles.staged_slots, (tiles.queries, kv_tile), tiles.groups, True)
    products = common.Products(plan.options.interpret)
    heads = plan.batch * plan.kv_heads
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
        dk_ref: typing.Any,
        dv_ref: typing.Any,
        q_smem: typing.Any,
        do_smem: typing.Any,
        stats_smem: typing.Any,
        k_smem: typing.Any,
        v_smem: typing.Any,
        q_full: typing.Any,
        do_full: typing.Any,
        kv_full: typing.Any,
        q_free: typing.Any,
        do_free: typing.Any,
        ring: typing.Any,
    ) -> None:
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        rank, head_index = common.tile_and_head(program, kv_tiles, heads, tiles.head_major)
        b, h_kv = lax.div(head_index, jnp.int32(plan.kv_heads)), lax.rem(head_index, jnp.int32(plan.kv_heads))
        if order_ref is None:
            tile = rank
        else:
            first = h_kv * plan.group
            tile = order_ref[b if visits.batch > 1 else 0, first if visits.heads > 1 else 0, rank]

        each_head = functools.partial(
            common.for_each_visit,
            plan=plan,
            visits=visits,
            lists=lists,
            b=b,
            h_kv=h_kv,
            tile=tile,
            size=tiles.queries,
        )

        def compute() -> None:
            common.raise_register_limit(tiles.groups)
            kv0 = tile * kv_tile + group * tiles.rows
            own_k, own_v = k_smem.at[group], v_smem.at[group]
            plgpu.copy_gmem_to_smem(rows_of(k_ref, b=b, h=h_kv, start=kv0, size=tiles.rows), own_k, kv_full.at[group])
            plgpu.copy_gmem_to_smem(rows_of(v_ref, b=b, h=h_kv, start=kv0, size=tiles.rows), own_v, kv_full.at[group])
            plgpu.barrier_wait(kv_full.at[group])

            def accumulate(dk_acc: typing.Any, dv_acc: typing.Any) -> tuple[jax.Array, jax.Array]:
                def step(rows: RowMath, h: jax.Array, q0: jax.Array, at: jax.Array, masked: bool) -> None:
                    q_slot, do_slot = (
                        common.slot_of(at, tiles.query_slots),
                        common.slot_of(at, tiles.out_slots),
                    )
                    q_tile, do_tile = q_smem.at[q_slot], do_smem.at[do_slot]

                    tile_math = rows.at_columns(q0, masked)
                    here = common.not_hoisted(group, plan.options.interpret)
                    own_k, own_v = k_smem.at[here], v_smem.at[here]

                    def scores(s_acc: typing.Any, dp_acc: typing.Any) -> jax.Array:
                        plgpu.barrier_wait(q_full.at[q_slot])
                        products.add(s_acc, own_k, q_tile, b_t=True)
                        delta = plgpu.load(stats_smem.at[q_slot, 1], layout=common.ALONG_COLUMNS)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                        delta = math.broadcast(delta, "q")
                        if math.starts_at_minus_delta:
                            products.start(dp_acc, -delta)
                        plgpu.barrier_wait(do_full.at[do_slot])
                        products.add(dp_acc, own_v, do_tile, b_t=True)
                        lse2 = plgpu.load(stats_smem.at[q_slot, 0], layout=common.ALONG_COLUMNS)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                        s = products.read(s_acc, 1)
                        held = tile_math if staging is None else staging.read_staged(tile_math, ring, q_slot, group)
                        found = held.probabilities(s, lse2)
                        weights, factor = found.weights().astype(dtype), found.factor()
                        products.add(dv_acc, weights, do_tile)
                        dp = products.read(dp_acc, 1)
                        return found.cotangent(factor, dp, None if math.starts_at_minus_delta else delta)

                    ds = products.accumulators(scores, math.shape, math.shape)
                    products.add(dk_acc, ds.astype(dtype), q_tile)
                    products.wait(1)
                    products.release(do_free.at[do_slot])
                    products.wait(0)
                    products.release(q_free.at[q_slot])

                each_head(lambda h: math.at_rows(b, h, kv0, captured), step)
                return products.read(dk_acc) * plan.scale, products.read(dv_acc)

            dk, dv = products.accumulators(accumulate, (tiles.rows, dim), (tiles.rows, value_dim))
            own_k[...] = dk.astype(dtype)
            own_v[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_k, rows_of(dk_ref, b=b, h=h_kv, start=kv0, size=tiles.rows))
            plgpu.copy_smem_to_gmem(own_v, rows_of(dv_ref, b=b, h=h_kv, start=kv0, size=tiles.rows))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def copy() -> None:
            common.lower_register_limit(tiles.groups)

            def step(pairs: typing.Any, h: jax.Array, q0: jax.Array, at: jax.Array, masked: bool) -> None:
                q_slot, do_slot = common.slot_of(at, tiles.query_slots), common.slot_of(at, tiles.out_slots)
                when(at >= tiles.query_slots)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                queries = pl.ds(q0, tiles.queries)
                plgpu.copy_gmem_to_smem(
                    rows_of(q_ref, b=b, h=h, start=q0, size=tiles.queries),
                    q_smem.at[q_slot],
                    q_full.at[q_slot],
                )
                plgpu.copy_gmem_to_smem(stats_ref.at[b, h, :, queries], stats_smem.at[q_slot], q_full.at[q_slot])
                if staging is not None:
                    staging.fetch(ring.at[q_slot], pairs, q0, tile * kv_tile, q_full.at[q_slot])
                when(at >= tiles.out_slots)(lambda: plgpu.barrier_wait(do_free.at[do_slot]))
                plgpu.copy_gmem_to_smem(
                    rows_of(do_ref, b=b, h=h, start=q0, size=tiles.queries),
                    do_smem.at[do_slot],
                    do_full.at[do_slot],
                )

            total = each_head(lambda h: None if staging is None else staging.source(captured, b, h), step)
            common.wait_until_read(total, (q_free, tiles.query_slots), (do_free, tiles.out_slots))

        when(group < tiles.groups)(compute)
        when(group == tiles.groups)(copy)

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(given.key.shape, dtype),
            jax.ShapeDtypeStruct(given.value.shape, dtype),
        ),
        scratch_types=[
            common.tile_smem((tiles.query_slots, tiles.queries, dim), dtype),
            common.tile_smem((tiles.out_slots, tiles.queries, value_dim), dtype),
            plgpu.SMEM((tiles.query_slots, 2, tiles.queries), jnp.float32),
            common.tile_smem((tiles.groups, tiles.rows, dim), dtype),
            common.tile_smem((tiles.groups, tiles.rows, value_dim), dtype),
            plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=2 if staging is None else 3),
            plgpu.Barrier(num_barriers=tiles.out_slots),
            plgpu.Barrier(num_barriers=tiles.groups, num_arrivals=2),
            plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=tiles.groups),
            plgpu.Barrier(num_barriers=tiles.out_slots, num_arrivals=tiles.groups),
            None if staging is None else staging.slot_memory(),
        ],
        grid=(kv_tiles * heads,),
        grid_names=("program",),
        num_threads=tiles.groups + 1,
        thread_name="wg",
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if plan.options.interpret else None,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        kernel_name="flexjax_backward_dkv",
    )
    return run(*given, visit_lists, order, captures)
