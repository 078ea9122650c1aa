"""All three gradients in one kernel on Hopper: the dK/dV kernel with a fifth product for dQ.

    S^T = K Q^T     dP^T = V dO^T     dV += P^T dO     dK += dS^T Q     dQ_tile = dS K, added to dQ in memory

Separate kernels need seven products a tile, this one five, at the price of adding every [queries, D] tile of dQ to float32
memory once for each tile of keys. Two compute warpgroups own 64 keys each. dQ sums over all keys of the block, so both put
their dS^T in shared memory, meet at a barrier, and each makes one half of dQ: 64 of 128 queries, or of 64 queries one half of
the columns. A third warpgroup copies tiles in, a fourth adds dQ tiles to memory with the copy engine, which takes no time from
the others.

Tiles of 128 queries (head dims 33 to 64, where the mod is light) halve what a step costs beside its products. Scores, dP, dK and dV
then take 192 of 232 registers: what is read of the row statistics is read when it is needed, and P is not multiplied, which keeps
a copy of it in registers, before dS is there.

The barrier keeps the two warpgroups in step, and the tensor cores idle where both compute probabilities. So the product for
dQ is issued a step later, beside the next scores, where registers allow (no mod) and additions are in any order: in a fixed order
the next CTA would wait a step longer. Tiles with and without a mask then have separate loops, because a branch between in-flight
WGMMAs forces a wait.

Order of the additions. With `deterministic=False` each tile is added when it is ready, unless a fixed order is faster. Otherwise
CTAs add in the order of dq_order.py: a start number from an atomic counter says which key tile a CTA owns, and every query tile
has a count of additions in memory that a CTA waits for. No CTA waits for one that may not have started.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import atomic_counter, dq_order, memory
from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu.backward_tile_math import Captures, RowMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.choose_kernel import FusedKernel
from flexjax.backends.mosaic_gpu.dq_order import DqOrder
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

GROUPS = 2
ROWS = 64
KV_TILE = FUSED_KEYS
DS_SLOTS = 2
BEYOND = 1 << 30
"""In place of what a list has past its end, so that it is sorted last."""
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 24  # twice each fill the register file


# ------------------------------------------------------------------- who visits what, and in which order


class Schedule(typing.NamedTuple):
    """Arrays over [batch or 1, heads or 1, key tiles, ...] (references inside the kernel).

    num     how many query tiles a key tile visits (None: all)
    steps   query tile * 2 + (1 where the mask applies), ascending (None: all)
    ticket  [.., key tiles, query tiles] see dq_order.py (None: any order, or all pairs are visited)
    work    [.., key tiles] key tiles by falling work, the launch order where additions are in any order (None: as numbered)
    """

    num: typing.Any
    steps: typing.Any
    ticket: typing.Any
    work: typing.Any


def schedule_for(
    plan: KernelPlan, arrays: common.VisitLists, kv_tiles: int, q_tiles: int, queries: int, order: DqOrder | None
) -> Schedule:
    """The visits of each key tile of FUSED_KEYS keys, in tiles of `queries`; `order` None: additions in any order."""
    visits = common.visits_for(plan, KV_TILE, queries, transposed=True)
    if not visits.lists:
        return Schedule(None, None, None, None)
    parts, nums = [], []
    for num, index, flag in (
        (arrays.full_num, arrays.full_index, 0),
        (arrays.partial_num, arrays.partial_index, 1),
    ):
        if num is None or index is None:
            continue
        valid = jnp.arange(index.shape[-1]) < num[..., None]
        parts.append(jnp.where(valid, index * 2 + flag, BEYOND))
        nums.append(num)
    if not parts:
        shape = (visits.batch, visits.heads, kv_tiles)
        none = jnp.zeros((*shape, q_tiles), jnp.int32) if order is not None else None
        return Schedule(jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, 1), jnp.int32), none, None)
    blocks = jnp.sort(jnp.concatenate(parts, axis=-1), axis=-1) if len(parts) > 1 else parts[0]
    num = sum(nums[1:], start=nums[0])
    inside = jnp.arange(visits.per_block, dtype=jnp.int32)
    steps = (blocks[..., None] // 2 * visits.per_block + inside) * 2 + (blocks[..., None] & 1)
    steps = jnp.where(blocks[..., None] == BEYOND, 0, steps).reshape(*blocks.shape[:-1], -1)
    spread = lambda x: jnp.repeat(x, visits.own_per_block, axis=2)[:, :, :kv_tiles]
    num, steps = spread(num * visits.per_block), spread(steps)
    if order is None:
        return Schedule(num, steps, None, jnp.argsort(-num, axis=-1, stable=True).astype(jnp.int32))
    query_tiles = jnp.where(jnp.arange(steps.shape[-1]) < num[..., None], steps // 2, q_tiles)
    batch, heads = num.shape[:2]
    at = (
        jnp.arange(batch)[:, None, None, None],
        jnp.arange(heads)[:, None, None],
        jnp.arange(kv_tiles)[:, None],
        query_tiles,
    )
    visited = jnp.zeros((batch, heads, kv_tiles, q_tiles + 1), jnp.int32).at[at].set(1)[..., :q_tiles]
    return Schedule(num, steps, dq_order.tickets(visited, order), None)


# ------------------------------------------------------------------- counts of additions in memory


def _wait_for_count(ref: typing.Any, index: jax.Array, value: jax.Array) -> None:
    """Until ref[index] is at least `value`; what was written before it was counted is then visible."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_: typing.Any, memory: typing.Any, least: typing.Any) -> None:
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(memory))
        semaphore.wait(least.registers.flat[0], decrement=False, memory_scope="gpu")

    wait(ref.at[pl.ds(index, 1)], value)  # pyright: ignore[reportCallIssue]  # the context argument is filled in


def _count(ref: typing.Any, index: jax.Array) -> None:
    """Adds one to ref[index], visible after what this warpgroup wrote before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_: typing.Any, memory: typing.Any) -> None:
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(memory))
        semaphore.signal(1, memory_scope="gpu")

    signal(ref.at[pl.ds(index, 1)])  # pyright: ignore[reportCallIssue]  # the context argument is filled in


# ------------------------------------------------------------------- the kernel


class Own(typing.NamedTuple):
    """What a CTA owns: batch entry, key head, key tile; the batch entry of its lists, and its rank (see dq_order.py)."""

    b: jax.Array
    h_kv: jax.Array
    mask_b: jax.Array
    tile: jax.Array
    rank: jax.Array


def backward_fused(
    plan: KernelPlan,
    derivative: ir.Program | None,
    given: common.Prepared,
    visit_lists: common.VisitLists,
    captures: Captures,
    chosen: FusedKernel,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV) in the shapes of `given`."""
    dtype = given.key.dtype
    dim, value_dim = given.key.shape[-1], given.value.shape[-1]
    tiles, ordered = chosen
    queries = tiles.queries
    kv_tiles, q_tiles = -(-plan.kv_len // KV_TILE), -(-plan.q_len // queries)
    if plan.blocks is not None:
        per_block = plan.blocks.block_q // queries
        q_tiles = -(-q_tiles // per_block) * per_block
    order = dq_order.order_for(plan, q_tiles, kv_tiles) if ordered else None
    sums = 1 if order is None else order.sums
    schedule = schedule_for(plan, visit_lists, kv_tiles, q_tiles, queries, order)
    simulated = plan.options.interpret
    math = TileMath(plan, derivative, (ROWS, queries), "kv", (queries, KV_TILE))
    products = common.Products(simulated)
    heads = plan.batch * plan.kv_heads
    rows_of = functools.partial(common.rows_of, layout=plan.layout)
    wide = queries == GROUPS * ROWS  # each compute warpgroup makes dQ of queries of its own
    width = dim if wide else dim // GROUPS
    dq_part, deferred = (ROWS, width), not ordered and plan.score is None and plan.dropout is None
    per_head = plan.blocks is not None and plan.blocks.heads > 1
    per_batch = plan.blocks is not None and plan.blocks.batch > 1
    tile_count = plan.batch * plan.q_heads * sums * q_tiles
    # In a fixed order the heads of a group visit a query tile one after the other: CTAs then stay one step apart.
    heads_inside = ordered and plan.group > 1 and not per_head

    def kernel(
        q_ref: typing.Any,
        k_ref: typing.Any,
        v_ref: typing.Any,
        do_ref: typing.Any,
        stats_ref: typing.Any,
        plan_of: Schedule,
        captured: Captures,
        dq_ref: typing.Any,
        count_ref: typing.Any,
        dk_ref: typing.Any,
        dv_ref: typing.Any,
        q_smem: typing.Any,
        do_smem: typing.Any,
        stats_smem: typing.Any,
        k_smem: typing.Any,
        v_smem: typing.Any,
        ds_smem: typing.Any,
        dq_smem: typing.Any,
        q_full: typing.Any,
        do_full: typing.Any,
        kv_full: typing.Any,
        q_free: typing.Any,
        do_free: typing.Any,
        ds_ready: typing.Any,
        dq_full: typing.Any,
        dq_free: typing.Any,
        started: typing.Any,
    ) -> None:
        group = lax.axis_index("wg")
        program = lax.axis_index("program")
        zero = jnp.int32(0)

        def claim(draws: bool = False) -> Own:
            """What this CTA owns; called first by each warpgroup, in its own branch: a barrier before the branches spills registers."""
            if order is None:
                tile, head_index = common.tile_and_head(program, kv_tiles, heads, tiles.head_major)
                rank = zero
            else:
                start = program
                if not simulated:
                    word = count_ref.at[pl.ds(tile_count + 1 + program, 1)]
                    if draws:
                        atomic_counter.take_start(count_ref.at[pl.ds(tile_count, 1)], word)
                        plgpu.barrier_arrive(started)
                    plgpu.barrier_wait(started)
                    start = atomic_counter.read_start(word)
                head_index, tile, rank = dq_order.assignment_of(start, order, kv_tiles, heads)
            b, h_kv = lax.div(head_index, jnp.int32(plan.kv_heads)), lax.rem(head_index, jnp.int32(plan.kv_heads))
            mask_b = b if per_batch else zero
            if plan_of.work is not None:
                tile = plan_of.work[mask_b, h_kv * plan.group if per_head else 0, tile]
            return Own(b, h_kv, mask_b, tile, rank)

        def each_step(
            own: Own,
            begin: typing.Callable[[jax.Array], typing.Any],
            step: typing.Callable[[typing.Any, jax.Array, jax.Array, jax.Array, typing.Any], None],
            by_runs: bool = False,
        ) -> jax.Array:
            """Calls step(begin(head), head, query tile, running number, masked) for all visits; returns their number.

            `masked` is traced, or with `by_runs` known: there is one loop for runs of visits without the mask, one for others.
            """

            _, h_kv, mask_b, tile, _ = own

            def one_head(g: jax.Array, before: jax.Array) -> jax.Array:
                h = h_kv * plan.group + g
                mask_h = h if per_head else zero
                state = None if heads_inside else begin(h)
                count = jnp.int32(q_tiles) if plan_of.num is None else plan_of.num[mask_b, mask_h, tile]
                turned = lambda i: count - 1 - i if order is not None and order.downward else i
                entry = lambda i: plan_of.steps[mask_b, mask_h, tile, turned(i)]
                is_masked = lambda entry: (entry & 1) == 1

                def visit(i: jax.Array, q_tile: jax.Array, masked: typing.Any) -> None:
                    if not heads_inside:
                        step(state, h, q_tile, before + i, masked)
                        return

                    @pl.loop(0, plan.group)
                    def _(g: jax.Array) -> None:
                        head = h_kv * plan.group + g
                        step(begin(head), head, q_tile, i * plan.group + g, masked)

                def run(masked: bool, here: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    """From visit number i on, whose entry was read: the number and entry of the first that is otherwise."""

                    def one(here: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                        following = entry(lax.min(here[0] + 1, count - 1))
                        visit(here[0], query_tile(here[1]), masked)
                        return here[0] + 1, following

                    return lax.while_loop(lambda here: (here[0] < count) & (is_masked(here[1]) == masked), one, here)

                query_tile = lambda entry: lax.shift_right_logical(entry, jnp.int32(1))
                if plan_of.num is None:
                    pl.loop(0, count)(lambda i: visit(i, turned(i), plan.mask is not None))
                elif by_runs:
                    both = lambda here: run(True, run(False, here))
                    lax.while_loop(lambda here: here[0] < count, both, (zero, entry(zero)))
                else:

                    @pl.loop(0, count)
                    def _(i: jax.Array) -> None:
                        now = entry(i)
                        visit(i, query_tile(now), is_masked(now))

                return before + count * (plan.group if heads_inside else 1)

            if plan.group == 1 or heads_inside:
                return one_head(zero, zero)
            return lax.fori_loop(0, plan.group, one_head, zero)

        def compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            own = claim()
            b, h_kv, tile = own.b, own.h_kv, own.tile
            kv0 = tile * KV_TILE + group * ROWS
            mine = pl.ds(group * ROWS, ROWS)
            own_k, own_v = k_smem.at[mine], v_smem.at[mine]
            plgpu.barrier_wait(kv_full)

            def make_dq(dq_acc: typing.Any, ds_slot: jax.Array) -> None:
                share = common.not_hoisted(group, simulated)
                if wide:
                    products.add(dq_acc, ds_smem.at[ds_slot, :, pl.ds(share * ROWS, ROWS)], k_smem, a_t=True)
                else:
                    columns = pl.ds(share * width, width)
                    products.add(dq_acc, ds_smem.at[ds_slot], k_smem.at[:, columns], a_t=True)

            def give_dq(dq: jax.Array, number: jax.Array) -> None:
                slot = common.slot_of(number, tiles.dq_slots)
                if deferred:  # a branch beside products in flight costs registers: the first waits are answered below
                    plgpu.barrier_wait(dq_free.at[slot])
                else:
                    when(number >= tiles.dq_slots)(lambda: plgpu.barrier_wait(dq_free.at[slot]))
                dq_smem.at[slot, pl.ds(group * ROWS, ROWS)][...] = dq
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_full.at[slot])

            def accumulate(dk_acc: typing.Any, dv_acc: typing.Any) -> tuple[jax.Array, jax.Array]:
                def step(rows: RowMath, h: jax.Array, q_tile: jax.Array, at: jax.Array, masked: typing.Any) -> None:
                    q_slot, do_slot = common.slot_of(at, tiles.query_slots), common.slot_of(at, tiles.out_slots)
                    ds_slot = common.slot_of(at, DS_SLOTS)
                    q_now, do_now = q_smem.at[q_slot], do_smem.at[do_slot]
                    tile_math = rows.at_columns(q_tile * queries, masked)
                    mine = pl.ds(common.not_hoisted(group, simulated) * ROWS, ROWS)
                    own_k, own_v = k_smem.at[mine], v_smem.at[mine]

                    def statistic(which: int) -> jax.Array:
                        numbers = stats_smem.at[q_slot, which]
                        return plgpu.load(numbers, layout=common.ALONG_COLUMNS)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11

                    def scores(s_acc: typing.Any) -> None:
                        plgpu.barrier_wait(q_full.at[q_slot])
                        products.add(s_acc, own_k, q_now, b_t=True)

                    def cotangents(s_acc: typing.Any, dp_acc: typing.Any) -> jax.Array:
                        delta = math.broadcast(statistic(1), "q")
                        if math.starts_at_minus_delta:
                            products.start(dp_acc, -delta)
                        plgpu.barrier_wait(do_full.at[do_slot])
                        products.add(dp_acc, own_v, do_now, b_t=True)
                        lse2 = None if wide else statistic(0)
                        s = products.read(s_acc, 1)
                        found = tile_math.probabilities(s, statistic(0) if lse2 is None else lse2)
                        weights, factor = found.weights().astype(dtype), found.factor()
                        add_to_dv = lambda: products.add(dv_acc, weights, do_now)
                        if not wide:
                            add_to_dv()
                        dp = products.read(dp_acc, 0 if wide else 1)
                        ds = found.cotangent(factor, dp, None if math.starts_at_minus_delta else delta).astype(dtype)
                        if wide:
                            add_to_dv()
                        return ds

                    def with_dq_before(s_acc: typing.Any, dq_acc: typing.Any) -> jax.Array:
                        scores(s_acc)
                        plgpu.barrier_wait(ds_ready)
                        make_dq(dq_acc, 1 - ds_slot)
                        give_dq(products.read(dq_acc), at)
                        return products.accumulators(functools.partial(cotangents, s_acc), math.shape)

                    def alone(s_acc: typing.Any, dp_acc: typing.Any) -> jax.Array:
                        scores(s_acc)
                        return cotangents(s_acc, dp_acc)

                    if deferred:
                        ds = products.accumulators(with_dq_before, math.shape, dq_part)
                    else:
                        ds = products.accumulators(alone, math.shape, math.shape)
                    ds_smem.at[ds_slot, mine][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_ready)
                    products.add(dk_acc, ds, q_now)
                    products.wait(0 if deferred else 1)
                    products.release(do_free.at[do_slot])
                    if deferred:
                        products.release(q_free.at[q_slot])
                        return
                    plgpu.barrier_wait(ds_ready)

                    def at_once(dq_acc: typing.Any) -> jax.Array:
                        make_dq(dq_acc, ds_slot)
                        products.wait(1)
                        products.release(q_free.at[q_slot])
                        return products.read(dq_acc)

                    give_dq(products.accumulators(at_once, dq_part), at)

                if deferred:
                    plgpu.barrier_arrive(ds_ready)  # for the first step, which finds no step before it
                total = each_step(own, lambda h: math.at_rows(b, h, kv0, captured), step, by_runs=deferred)
                if deferred:

                    def last(dq_acc: typing.Any) -> jax.Array:
                        plgpu.barrier_wait(ds_ready)
                        make_dq(dq_acc, common.slot_of(total + 1, DS_SLOTS))
                        return products.read(dq_acc)

                    give_dq(products.accumulators(last, dq_part), total)
                if simulated:  # which wants every barrier observed to the end
                    common.wait_until_read(total + deferred * tiles.dq_slots, (dq_free, tiles.dq_slots))
                return products.read(dk_acc) * plan.scale, products.read(dv_acc)

            dk, dv = products.accumulators(accumulate, (ROWS, dim), (ROWS, value_dim))
            plgpu.barrier_arrive(ds_ready)  # the other warpgroup reads all keys in its last product
            plgpu.barrier_wait(ds_ready)
            own_k[...] = dk.astype(dtype)
            own_v[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_k, rows_of(dk_ref, b=b, h=h_kv, start=kv0, size=ROWS))
            plgpu.copy_smem_to_gmem(own_v, rows_of(dv_ref, b=b, h=h_kv, start=kv0, size=ROWS))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def copy_in() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            own = claim(draws=True)
            b, h_kv, tile = own.b, own.h_kv, own.tile
            kv0 = tile * KV_TILE
            plgpu.copy_gmem_to_smem(rows_of(k_ref, b=b, h=h_kv, start=kv0, size=KV_TILE), k_smem, kv_full)
            plgpu.copy_gmem_to_smem(rows_of(v_ref, b=b, h=h_kv, start=kv0, size=KV_TILE), v_smem, kv_full)

            def step(_: None, h: jax.Array, q_tile: jax.Array, at: jax.Array, masked: typing.Any) -> None:
                q_slot, do_slot = common.slot_of(at, tiles.query_slots), common.slot_of(at, tiles.out_slots)
                q0 = q_tile * queries
                when(at >= tiles.query_slots)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                source = rows_of(q_ref, b=b, h=h, start=q0, size=queries)
                plgpu.copy_gmem_to_smem(source, q_smem.at[q_slot], q_full.at[q_slot])
                stats = stats_ref.at[b, h, :, pl.ds(q0, queries)]
                plgpu.copy_gmem_to_smem(stats, stats_smem.at[q_slot], q_full.at[q_slot])
                when(at >= tiles.out_slots)(lambda: plgpu.barrier_wait(do_free.at[do_slot]))
                source = rows_of(do_ref, b=b, h=h, start=q0, size=queries)
                plgpu.copy_gmem_to_smem(source, do_smem.at[do_slot], do_full.at[do_slot])

            total = each_step(own, lambda h: None, step)
            common.wait_until_read(total, (q_free, tiles.query_slots), (do_free, tiles.out_slots))

        def add_out() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            own = claim()
            b, mask_b, tile, rank = own.b, own.mask_b, own.tile, own.rank
            if deferred:
                for slot in range(tiles.dq_slots):
                    plgpu.barrier_arrive(dq_free.at[slot])
                plgpu.barrier_wait(dq_full.at[0])  # of no step: dropped
                plgpu.barrier_arrive(dq_free.at[0])

            def step(_: None, h: jax.Array, q_tile: jax.Array, at: jax.Array, masked: typing.Any) -> None:
                slot = common.slot_of(at + int(deferred), tiles.dq_slots)
                sum_number = (b * plan.q_heads + h) * sums + lax.rem(rank, jnp.int32(sums))
                number = sum_number * q_tiles + q_tile
                target = dq_ref.at[pl.ds(number * (GROUPS * ROWS), GROUPS * ROWS)]
                plgpu.barrier_wait(dq_full.at[slot])
                if simulated:
                    target[...] = target[...] + dq_smem[slot]
                    plgpu.barrier_arrive(dq_free.at[slot])
                    return
                if order is None:
                    plgpu.copy_smem_to_gmem(dq_smem.at[slot], target, reduction_op="add")
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(dq_free.at[slot])
                    return
                ticket = lax.div(rank, jnp.int32(sums))
                if plan_of.ticket is not None:
                    ticket = plan_of.ticket[mask_b, h if per_head else zero, tile, q_tile]
                _wait_for_count(count_ref, number, ticket)
                # what was in memory before the first addition means nothing
                when(ticket == 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem.at[slot], target))
                when(ticket != 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem.at[slot], target, reduction_op="add"))
                plgpu.wait_smem_to_gmem(0)
                _count(count_ref, number)
                plgpu.barrier_arrive(dq_free.at[slot])

            total = each_step(own, lambda h: None, step)
            if not simulated:
                plgpu.wait_smem_to_gmem(0)
            del total

        when(group < GROUPS)(compute)
        when(group == GROUPS)(copy_in)
        when(group == GROUPS + 1)(add_out)

    # a share of K's columns must be whole swizzled tiles, and a product wants one swizzle
    swizzle = min(128, 2 * width)
    scratch = (
        common.tile_smem((tiles.query_slots, queries, dim), dtype, swizzle),
        common.tile_smem((tiles.out_slots, queries, value_dim), dtype),
        plgpu.SMEM((tiles.query_slots, 2, queries), jnp.float32),
        common.tile_smem((KV_TILE, dim), dtype, swizzle),
        common.tile_smem((KV_TILE, value_dim), dtype),
        common.tile_smem((DS_SLOTS, KV_TILE, queries), dtype, swizzle),
        common.tile_smem((tiles.dq_slots, GROUPS * ROWS, width), jnp.float32),
        plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=2),
        plgpu.Barrier(num_barriers=tiles.out_slots),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=tiles.query_slots, num_arrivals=GROUPS),
        plgpu.Barrier(num_barriers=tiles.out_slots, num_arrivals=GROUPS),
        plgpu.Barrier(num_arrivals=GROUPS),
        plgpu.Barrier(num_barriers=tiles.dq_slots, num_arrivals=GROUPS),
        plgpu.Barrier(num_barriers=tiles.dq_slots),
        plgpu.Barrier(),
    )
    run = pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), *scratch, collective_axes="wg"),
        out_type=(
            memory.output(given.key.shape, dtype, given.key),
            memory.output(given.value.shape, dtype, given.key),
        ),
        mesh=plgpu.Mesh(grid=(kv_tiles * heads,), grid_names=("program",), num_threads=GROUPS + 2, thread_name="wg"),
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if simulated else False,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        name="flexjax_backward_fused",
    )
    dq_shape = (tile_count * GROUPS * ROWS, width)
    begins_empty = ordered and not simulated  # the first addition to a tile is a store
    dq_sum = jax.new_ref((lax.empty if begins_empty else jnp.zeros)(dq_shape, jnp.float32))
    # additions to each tile, CTAs that started, and the start number of each CTA
    counts = jax.new_ref(jnp.zeros((tile_count + 1 + kv_tiles * heads,), jnp.int32))
    dk, dv = run(*given, schedule, captures, dq_sum, counts)  # pyright: ignore[reportCallIssue]  # takes what the kernel takes, with a mesh too
    tiles_of_dq = jax.freeze(dq_sum).reshape(tile_count, GROUPS * ROWS, width)
    if begins_empty:  # a tile that nobody visited was never written
        tiles_of_dq = jnp.where(jax.freeze(counts)[:tile_count, None, None] > 0, tiles_of_dq, 0.0)
    return _gather_dq(plan, tiles_of_dq, given.query, queries, sums), dk, dv


def _gather_dq(plan: KernelPlan, tiles: jax.Array, query: jax.Array, queries: int, sums: int) -> jax.Array:
    """[B * N * sums * tiles, parts * queries, D / parts] float32 to the layout and dtype of the queries, added and scaled."""
    parts = GROUPS * ROWS // queries
    tiles = tiles.reshape(plan.batch, plan.q_heads, sums, -1, parts, queries, tiles.shape[-1])
    total = tiles[:, :, 0]
    for n in range(1, sums):
        total = total + tiles[:, :, n]
    total = (total * plan.scale).astype(query.dtype)
    time, heads = (1, 2) if plan.layout == "BTNH" else (2, 1)
    order = (0, 2, 4, 1, 3, 5) if plan.layout == "BTNH" else (0, 1, 2, 4, 3, 5)
    shape = [plan.batch, 0, 0, parts * total.shape[-1]]
    shape[time], shape[heads] = total.shape[2] * queries, plan.q_heads
    return _fit(total.transpose(order).reshape(shape), query.shape[time], time)


def _fit(x: jax.Array, length: int, axis: int) -> jax.Array:
    have = x.shape[axis]
    if have >= length:
        return lax.slice_in_dim(x, 0, length, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - have)
    return jnp.pad(x, widths)
