"""Gradients of keys and values on Hopper for head dims above 128: one warpgroup makes dV, the other dK.

    first:   S^T = K Q^T        P^T -> dV += P^T dO         and hands P^T * mod' to the second through shared memory
    second:  dP^T = V dO^T      dS^T -> dK += dS^T Q

An accumulator of 64 keys x 256 is 128 registers a thread, and one warpgroup has room for one. Split this way each
warpgroup has two of the four products, nothing is computed twice, and the hand-over is double buffered, so that the first
may be a tile ahead. The tile is transposed as in backward_sm90_dkv.py.
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
from flexjax.backends.mosaic_gpu.backward_tiles import SPLIT_KEYS, SPLIT_QUERIES, SplitDkvTiles
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

KEYS, QUERIES = SPLIT_KEYS, SPLIT_QUERIES
GROUPS = 2


def backward_dkv_split(
    plan: KernelPlan,
    derivative: ir.Program | None,
    given: common.Prepared,
    visit_lists: common.VisitLists,
    captures: Captures,
    tiles: SplitDkvTiles,
) -> tuple[jax.Array, jax.Array]:
    """(dK, dV) in the shapes of `given.key` and `given.value`."""
    dtype = given.key.dtype
    dim, value_dim = given.key.shape[-1], given.value.shape[-1]
    kv_tiles = -(-plan.kv_len // KEYS)
    visits = common.visits_for(plan, KEYS, QUERIES, transposed=True)
    order = common.longest_first(visits, visit_lists, kv_tiles)
    math = TileMath(plan, derivative, (KEYS, QUERIES), "kv", (QUERIES, KEYS))
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
        hand_smem: typing.Any,
        q_full: typing.Any,
        do_full: typing.Any,
        kv_full: typing.Any,
        q_free: typing.Any,
        do_free: typing.Any,
        hand_full: typing.Any,
        hand_free: typing.Any,
    ) -> None:
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        rank, head_index = common.tile_and_head(program, kv_tiles, heads, tiles.head_major)
        b, h_kv = lax.div(head_index, jnp.int32(plan.kv_heads)), lax.rem(head_index, jnp.int32(plan.kv_heads))
        tile = rank
        if order_ref is not None:
            tile = order_ref[b if visits.batch > 1 else 0, h_kv * plan.group if visits.heads > 1 else 0, rank]
        kv0 = tile * KEYS
        each_head = functools.partial(
            common.for_each_visit, plan=plan, visits=visits, lists=lists, b=b, h_kv=h_kv, tile=tile, size=QUERIES
        )
        slot_of = common.slot_of

        def make_dv() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_wait(kv_full.at[0])

            def accumulate(dv_acc: typing.Any) -> jax.Array:
                def step(rows: RowMath, h: jax.Array, q0: jax.Array, at: jax.Array, masked: bool) -> None:
                    q_slot, do_slot = slot_of(at, tiles.query_slots), slot_of(at, tiles.out_slots)
                    hand_slot = slot_of(at, tiles.p_slots)
                    tile_math = rows.at_columns(q0, masked)
                    own_k = k_smem.at[common.not_hoisted(jnp.int32(0), plan.options.interpret)]

                    def scores(s_acc: typing.Any) -> jax.Array:
                        plgpu.barrier_wait(q_full.at[q_slot])
                        products.add(s_acc, own_k, q_smem.at[q_slot], b_t=True)
                        lse2 = plgpu.load(stats_smem.at[q_slot, 0], layout=common.ALONG_COLUMNS)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                        s = products.read(s_acc)
                        products.release(q_free.at[q_slot])
                        found = tile_math.probabilities(s, lse2)
                        when(at >= tiles.p_slots)(lambda: plgpu.barrier_wait(hand_free.at[hand_slot]))
                        hand_smem.at[hand_slot][...] = found.factor()
                        plgpu.barrier_arrive(hand_full.at[hand_slot])
                        return found.weights().astype(dtype)

                    weights = products.accumulators(scores, math.shape)
                    plgpu.barrier_wait(do_full.at[do_slot])
                    products.add(dv_acc, weights, do_smem.at[do_slot])
                    products.wait(0)
                    products.release(do_free.at[do_slot])

                total = each_head(lambda h: math.at_rows(b, h, kv0, captured), step)
                if products.simulated:
                    common.wait_until_read(total, (hand_free, tiles.p_slots))
                return products.read(dv_acc)

            dv = products.accumulators(accumulate, (KEYS, value_dim))
            plgpu.barrier_arrive(kv_full.at[2])
            plgpu.barrier_wait(kv_full.at[2])  # the other warpgroup has read V for the last time
            v_smem.at[0][...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_smem.at[0], rows_of(dv_ref, b=b, h=h_kv, start=kv0, size=KEYS))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def make_dk() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_wait(kv_full.at[1])

            def accumulate(dk_acc: typing.Any) -> jax.Array:
                def step(rows: RowMath, h: jax.Array, q0: jax.Array, at: jax.Array, masked: bool) -> None:
                    q_slot, do_slot = slot_of(at, tiles.query_slots), slot_of(at, tiles.out_slots)
                    hand_slot = slot_of(at, tiles.p_slots)
                    own_v = v_smem.at[common.not_hoisted(jnp.int32(0), plan.options.interpret)]

                    def cotangents(dp_acc: typing.Any) -> jax.Array:
                        plgpu.barrier_wait(q_full.at[q_slot])
                        delta = plgpu.load(stats_smem.at[q_slot, 1], layout=common.ALONG_COLUMNS)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                        delta = math.broadcast(delta, "q")
                        if math.starts_at_minus_delta:
                            products.start(dp_acc, -delta)
                        plgpu.barrier_wait(do_full.at[do_slot])
                        products.add(dp_acc, own_v, do_smem.at[do_slot], b_t=True)
                        dp = products.read(dp_acc)
                        products.release(do_free.at[do_slot])
                        if not math.starts_at_minus_delta:
                            dp = dp * rows.at_columns(q0, False).dropout_multiplier() - delta
                        plgpu.barrier_wait(hand_full.at[hand_slot])
                        weight = plgpu.load(hand_smem.at[hand_slot], layout=common.WGMMA)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
                        plgpu.barrier_arrive(hand_free.at[hand_slot])
                        return (weight * dp).astype(dtype)

                    ds = products.accumulators(cotangents, math.shape)
                    products.add(dk_acc, ds, q_smem.at[q_slot])
                    products.wait(0)
                    products.release(q_free.at[q_slot])

                each_head(lambda h: math.at_rows(b, h, kv0, captured), step)
                return products.read(dk_acc) * plan.scale

            dk = products.accumulators(accumulate, (KEYS, dim))
            plgpu.barrier_arrive(kv_full.at[2])
            plgpu.barrier_wait(kv_full.at[2])  # the other warpgroup has read K for the last time
            k_smem.at[0][...] = dk.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem.at[0], rows_of(dk_ref, b=b, h=h_kv, start=kv0, size=KEYS))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def copy() -> None:
            plgpu.set_max_registers(24, action="decrease")
            for ref, smem, number in ((k_ref, k_smem, 0), (v_ref, v_smem, 1)):
                source = rows_of(ref, b=b, h=h_kv, start=kv0, size=KEYS)
                plgpu.copy_gmem_to_smem(source, smem.at[0], kv_full.at[number])
                plgpu.barrier_arrive(kv_full.at[number])

            def step(_: None, h: jax.Array, q0: jax.Array, at: jax.Array, masked: bool) -> None:
                q_slot, do_slot = slot_of(at, tiles.query_slots), slot_of(at, tiles.out_slots)
                when(at >= tiles.query_slots)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                source = rows_of(q_ref, b=b, h=h, start=q0, size=QUERIES)
                plgpu.copy_gmem_to_smem(source, q_smem.at[q_slot], q_full.at[q_slot])
                stats = stats_ref.at[b, h, :, pl.ds(q0, QUERIES)]
                plgpu.copy_gmem_to_smem(stats, stats_smem.at[q_slot], q_full.at[q_slot])
                when(at >= tiles.out_slots)(lambda: plgpu.barrier_wait(do_free.at[do_slot]))
                source = rows_of(do_ref, b=b, h=h, start=q0, size=QUERIES)
                plgpu.copy_gmem_to_smem(source, do_smem.at[do_slot], do_full.at[do_slot])

            total = each_head(lambda h: None, step)
            common.wait_until_read(total, (q_free, tiles.query_slots), (do_free, tiles.out_slots))

        when(group == 0)(make_dv)
        when(group == 1)(make_dk)
        when(group == 2)(copy)

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(given.key.shape, dtype),
            jax.ShapeDtypeStruct(given.value.shape, dtype),
        ),
        scratch_types=[
            common.tile_smem((tiles.query_slots, QUERIES, dim), dtype),
            common.tile_smem((tiles.out_slots, QUERIES, value_dim), dtype),
            plgpu.SMEM((tiles.query_slots, 2, QUERIES), jnp.float32),
            common.tile_smem((1, KEYS, dim), dtype),
            common.tile_smem((1, KEYS, value_dim), dtype),
            common.tile_smem((tiles.p_slots, KEYS, QUERIES), jnp.float32),
            plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=tiles.out_slots),
            plgpu.Barrier(num_barriers=3, num_arrivals=2),
            plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=GROUPS),
            plgpu.Barrier(num_barriers=tiles.out_slots, num_arrivals=GROUPS),
            plgpu.Barrier(num_barriers=tiles.p_slots),
            plgpu.Barrier(num_barriers=tiles.p_slots),
        ],
        grid=(kv_tiles * heads,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if plan.options.interpret else None,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        kernel_name="flexjax_backward_dkv_split",
    )
    return run(*given, visit_lists, order, captures)
