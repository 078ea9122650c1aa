"""Gradients of the arrays that a score mod captured, on Hopper.

The gradient of `load_j` is the sum of

    g = dsp * d mod / d load_j,    dsp = p * (dP - delta)

over all places of the attention matrix that read the same element. A block of threads walks a fixed list of tiles whose
places correspond one to one, adds g tile by tile in registers, and writes one tile of sums:

    kind        tiles of one list                      what XLA sums in the result
    scalar,row  one row of tiles                       over keys (and queries)
    column      one column of tiles                    over queries
    diagonal    tiles with the same (q0 - kv0)         along the diagonals of the tile: 2 n - 1 sums
    tile        the batches and heads that share it    nothing

Lists of batches and heads that share an element are joined, as long as enough remain to keep the device busy. The order of
every sum is fixed. What is left, numbers for each (b, h) and query, key, difference or pair, goes to the places
that the load's index names: as it is where each dimension walks along one axis, by an addition to distinct places, or sorted
and summed run by run where places may repeat.
Costs two products a visited tile for each load with a gradient. Numbers for each query and key that no other load adds to
are written in the dtype of their array: as float32 they would be read and written once more, at the price of the products.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import memory
from flexjax.backends.mosaic_gpu.backward_pair import (
    Pair,
    gradient_loads,
    placed,
    plain_dims,
    simulated_captures,
    staging_for,
)
from flexjax.backends.mosaic_gpu.backward_sm90_tile import Captures, ColumnMath, TileMath, captures_of
from flexjax.backends.mosaic_gpu.backward_tiles import SMEM_LIMIT
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.trace import mod_ir
from flexjax.trace.on_tiles import apply_op

ROWS = 64
NONE = (1 << 31) - 1
MOST_REPEATED = 1 << 26  # places that are sorted at most
LISTS_EACH = 8  # lists for each multiprocessor: with as many, the longest first, none waits long for the last


def capture_gradients(
    plan: KernelPlan,
    operands: Operands,
    given: common.Prepared,
    wanted: tuple[bool, ...],
    derivative: mod_ir.Program,
    pair: Pair,
) -> tuple[jax.Array | None, ...]:
    """The gradient of each wanted captured array, None for the others."""
    totals: list[jax.Array | None] = [
        jnp.zeros(a.shape, jnp.float32) if want else None
        for a, want in zip(operands.score_captures, wanted, strict=True)
    ]
    captures = simulated_captures(plan, pair, captures_of(operands))
    for place, step in enumerate(derivative.gradients):
        load = typing.cast(mod_ir.Load, derivative.steps[step])
        total, slope = totals[load.capture], derivative.results[2 + place]
        if total is None or (isinstance(slope, mod_ir.Lit) and slope.value == 0):
            continue
        sums = _load_sums(plan, operands, given, captures, derivative, load, place, pair)
        totals[load.capture] = _add_at(plan, operands, derivative, load, sums, total)
    return tuple(None if t is None else t.astype(a.dtype) for t, a in zip(totals, operands.score_captures, strict=True))


def refuses(plan: KernelPlan, derivative: mod_ir.Program, wanted: tuple[bool, ...]) -> str | None:
    """Why a captured array's gradient cannot be had here, or None."""
    for step in derivative.gradients:
        load = typing.cast(mod_ir.Load, derivative.steps[step])
        if wanted[load.capture] and not _distinct(load) and _places(plan, load) > MOST_REPEATED:
            return (
                f"captured array {load.capture} is gathered at places that may repeat, and there are more than "
                f"{MOST_REPEATED} of them to sort for its gradient."
            )
    return None


# ------------------------------------------------------------------- sums over places that correspond


def _load_sums(
    plan: KernelPlan,
    operands: Operands,
    given: common.Prepared,
    captures: Captures,
    derivative: mod_ir.Program,
    load: mod_ir.Load,
    place: int,
    pair: Pair,
) -> jax.Array:
    """[b, h, ...] float32 (or what `_sum_type` says): b and h are 1 where the load does not depend on them; then T, S, T + S - 1, (T, S) or nothing."""
    kind = mod_ir.classify_load(load).kind
    axes = _axes(load)
    groups = _groups(plan)
    tile = groups * ROWS
    rows, columns = -(-plan.q_len // tile), -(-plan.kv_len // tile)
    codes = _tile_codes(plan, operands, tile, rows, columns)
    if kind == mod_ir.COLUMN:
        codes = codes.transpose(0, 1, 3, 2)
    elif kind == mod_ir.DIAGONAL:
        first = jnp.arange(rows + columns - 1)[:, None] - (columns - 1) + jnp.arange(columns)[None, :]
        inside = (first >= 0) & (first < rows)
        picked = codes[:, :, jnp.clip(first, 0, rows - 1), jnp.arange(columns)[None, :]]
        codes = jnp.where(inside, picked, NONE)
    elif kind == mod_ir.TILE:
        codes = codes[..., None]
    shared = [axis for axis, name in ((1, "h"), (0, "b")) if name not in axes]
    enough = 0 if kind == mod_ir.TILE else LISTS_EACH * common.multiprocessors()
    for axis in shared:
        if math.prod(codes.shape[:-1]) >= enough * codes.shape[axis]:
            codes = jnp.concatenate(jnp.split(codes, codes.shape[axis], axis), -1)
    lists = jnp.sort(codes.reshape(-1, codes.shape[-1]), axis=-1)
    sums = _summed_tiles(plan, derivative, given, captures, lists, groups, place, kind, rows, columns, pair)

    batch, heads = codes.shape[:2]
    if kind == mod_ir.TILE:
        sums = sums.reshape(batch, heads, rows * tile, columns * tile)
        return sums[:, :, : plan.q_len, : plan.kv_len]
    sums = sums.reshape(batch, heads, -1, tile, tile)
    if kind == mod_ir.COLUMN:
        out = sums.sum(3).reshape(batch, heads, -1)[..., : plan.kv_len]
    elif kind == mod_ir.ROW:
        out = sums.sum(4).reshape(batch, heads, -1)[..., : plan.q_len]
    elif kind == mod_ir.SCALAR:
        out = sums.sum((2, 3, 4))
    else:
        out = _join_windows(_diagonal_sums(sums))
        skip = (columns * tile - 1) - (plan.kv_len - 1)
        # a kernel of its own: drawn into the scatter below, the sums would be made one by one
        out = lax.optimization_barrier(out[..., skip : skip + plan.q_len + plan.kv_len - 1])
    return out.sum(tuple(shared), keepdims=True) if shared else out


def _diagonal_sums(tiles: jax.Array) -> jax.Array:
    """[..., n, n] to [..., 2n - 1]: sums over r - c = -(n - 1) .. n - 1."""
    n = tiles.shape[-1]
    flipped = jnp.pad(tiles[..., ::-1], [(0, 0)] * (tiles.ndim - 1) + [(0, n)])
    flat = flipped.reshape(*tiles.shape[:-2], n * 2 * n)[..., : n * (2 * n - 1)]
    return flat.reshape(*tiles.shape[:-2], n, 2 * n - 1).sum(-2)


def _join_windows(windows: jax.Array) -> jax.Array:
    """[..., d, 2n - 1] windows that begin n apart to one vector of n * (d + 1) - 1 numbers."""
    *head, count, width = windows.shape
    n = (width + 1) // 2
    padded = jnp.pad(windows, [(0, 0)] * (windows.ndim - 1) + [(0, 1)]).reshape(*head, count, 2, n)
    low = jnp.pad(padded[..., 0, :], [(0, 0)] * len(head) + [(0, 1), (0, 0)])
    high = jnp.pad(padded[..., 1, :], [(0, 0)] * len(head) + [(1, 0), (0, 0)])
    return (low + high).reshape(*head, (count + 1) * n)[..., : (count + 1) * n - 1]


def _groups(plan: KernelPlan) -> int:
    """Warpgroups of 64 queries: two where tiles of 128 x 128 fit shared memory and the blocks of the mask."""
    dims = common.padded_dim(plan.head_dim) + common.padded_dim(plan.value_dim)
    blocks = plan.blocks
    wide = blocks is None or (blocks.block_q % 128 == 0 and blocks.block_kv % 128 == 0)
    return 2 if wide and dims <= 256 else 1


class Rings(typing.NamedTuple):
    """Slots for tiles of queries and d_out (with them for tiles of a staged array), and for 64 keys and values."""

    queries: int
    keys: int
    staged: bool


def _rings(groups: int, dim: int, value_dim: int, staged_bytes: int) -> Rings:
    """The deepest rings that fit shared memory: a staged array before a second slot."""
    tile = groups * ROWS
    choices = [
        Rings(queries, keys, staged)
        for staged in ((True, False) if staged_bytes else (False,))
        for queries, keys in ((2, 2 * groups), (2, groups), (1, groups))
    ]

    def fits(rings: Rings) -> bool:
        operands = 2 * (dim + value_dim) * (rings.queries * tile + rings.keys * ROWS)
        return operands + rings.staged * rings.queries * tile * tile * staged_bytes + 1024 <= SMEM_LIMIT

    return next((r for r in choices if fits(r)), choices[-1])


def _sum_type(derivative: mod_ir.Program, place: int) -> typing.Any:
    """dtype of sums that are numbers for each query and key: that of the array where they are all of its gradient."""
    loads = gradient_loads(derivative)
    alone = sum(other.capture == loads[place].capture for other in loads) == 1
    direct = alone and plain_dims(loads[place]) is not None
    return derivative.captures[loads[place].capture].dtype if direct else jnp.float32


def _tile_codes(plan: KernelPlan, operands: Operands, tile: int, rows: int, columns: int) -> jax.Array:
    """[B, N, rows, columns] int32: number of the tile * 2 + (1 where the mask applies); NONE where nothing is visited."""
    batch, heads = plan.batch, plan.q_heads
    number = jnp.arange(batch * heads * rows * columns, dtype=jnp.int32).reshape(batch, heads, rows, columns) * 2
    blocks, lists = plan.blocks, operands.lists
    if blocks is None or lists is None:
        return number + int(plan.mask is not None)
    wide = -(-plan.kv_len // blocks.block_kv)
    state = jnp.zeros((blocks.batch, blocks.heads, -(-plan.q_len // blocks.block_q), wide), jnp.int32)
    for num, index, value in (
        (lists.full_num, lists.full_index, 1),
        (lists.partial_num, lists.partial_index, 2),
    ):
        if num is None or index is None:
            continue
        listed = jnp.arange(index.shape[-1]) < num[..., None]
        columns_of = jnp.where(listed, index, wide)
        b, h, i = (jnp.arange(n) for n in num.shape)
        at = (b[:, None, None, None], h[:, None, None], i[:, None], columns_of)
        state = state.at[at].set(value, mode="drop")
    state = jnp.repeat(jnp.repeat(state, blocks.block_q // tile, 2), blocks.block_kv // tile, 3)
    state = state[:, :, :rows, :columns]
    return jnp.where(state == 0, NONE, number + (state == 2))


def _summed_tiles(
    plan: KernelPlan,
    derivative: mod_ir.Program,
    given: common.Prepared,
    captures: Captures,
    lists: jax.Array,
    groups: int,
    place: int,
    kind: str,
    rows: int,
    columns: int,
    pair: Pair,
) -> jax.Array:
    """Sums of g over each list: [lists, tile, tile], or [lists / (rows * columns), rows * tile, columns * tile] for tiles."""
    tile, count = groups * ROWS, lists.shape[0]
    dtype = given.query.dtype
    dim, value_dim = given.query.shape[-1], given.value.shape[-1]
    num = jnp.sum(lists != NONE, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(-num, stable=True).astype(jnp.int32)
    mathematics = TileMath(plan, derivative, (ROWS, ROWS), "q", (tile, tile), gradients=(place,))
    products = common.Products(plan.options.interpret)
    rows_of = functools.partial(common.rows_of, layout=plan.layout)
    whole = kind == mod_ir.TILE
    one_sum = kind in (mod_ir.SCALAR, mod_ir.ROW)  # over keys: parts of a tile need no registers of their own
    out_shape = (count // (rows * columns), rows * tile, columns * tile) if whole else (count, tile, tile)
    out_dtype = _sum_type(derivative, place) if whole else jnp.float32
    rings = _rings(groups, dim, value_dim, pair.bytes.staged)
    staging = staging_for(plan, derivative, pair, int(rings.staged) * rings.queries, (tile, tile), groups)
    shape = mathematics.shape

    def kernel(
        q_ref: typing.Any,
        k_ref: typing.Any,
        v_ref: typing.Any,
        do_ref: typing.Any,
        stats_ref: typing.Any,
        num_ref: typing.Any,
        lists_ref: typing.Any,
        order_ref: typing.Any,
        captured: Captures,
        out_ref: typing.Any,
        q_smem: typing.Any,
        k_smem: typing.Any,
        v_smem: typing.Any,
        do_smem: typing.Any,
        q_full: typing.Any,
        k_full: typing.Any,
        q_free: typing.Any,
        k_free: typing.Any,
        pair_smem: typing.Any,
    ) -> None:
        group = lax.axis_index("wg")
        mine = order_ref[lax.axis_index("program")]
        steps = num_ref[mine]

        def code(i: jax.Array) -> jax.Array:
            """Of the i-th tile, of the last one where there are fewer; 0 in an empty list."""
            found = lists_ref[mine, jnp.maximum(jnp.minimum(i, steps - 1), 0)]
            return jnp.where(steps > 0, found, 0)

        def place(code: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Batch entry, head, first query, first key."""
            number = lax.shift_right_logical(code, jnp.int32(1))
            rest, column = lax.div(number, jnp.int32(columns)), lax.rem(number, jnp.int32(columns))
            rest, row = lax.div(rest, jnp.int32(rows)), lax.rem(rest, jnp.int32(rows))
            b, h = lax.div(rest, jnp.int32(plan.q_heads)), lax.rem(rest, jnp.int32(plan.q_heads))
            return b, h, row * tile, column * tile

        def statistics(code: jax.Array) -> tuple[jax.Array, jax.Array]:
            """lse2 and delta of the queries of this warpgroup."""
            b, h, q0, _ = place(code)
            own = pl.ds(q0 + group * ROWS, ROWS)
            read = lambda n: plgpu.load(stats_ref.at[b, h, n, own], layout=common.ALONG_ROWS, optimized=False)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
            return read(0), read(1)

        def compute() -> None:
            common.take_registers(groups)
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), common.WGMMA)

            def step(i: jax.Array, carry: typing.Any) -> typing.Any:
                sums, (now, soon), (lse2, delta) = carry
                later, statistics_soon = code(i + 2), statistics(soon)  # reads that nothing here waits for
                b, h, q0, kv0 = place(now)
                masked = (now & 1) == 1
                rows_math = mathematics.at_rows(b, h, q0 + group * ROWS, captured)
                q_slot = common.slot_of(i, rings.queries)
                here = pl.ds(common.not_hoisted(group, plan.options.interpret) * ROWS, ROWS)
                own_q, own_do = q_smem.at[q_slot, here], do_smem.at[q_slot, here]
                new = list(sums)
                for part in range(groups):
                    k_slot = common.not_hoisted(common.slot_of(i * groups + part, rings.keys), plan.options.interpret)
                    tile_math = rows_math.at_columns(kv0 + part * ROWS, masked)
                    if part == 0:
                        plgpu.barrier_wait(q_full.at[q_slot])
                    plgpu.barrier_wait(k_full.at[k_slot])

                    def g(
                        s_acc: typing.Any,
                        dp_acc: typing.Any,
                        k_slot: jax.Array = k_slot,
                        part: int = part,
                        tile_math: ColumnMath = tile_math,
                    ) -> jax.Array:
                        products.add(s_acc, own_q, k_smem.at[k_slot], b_t=True)
                        if mathematics.delta_first:
                            products.start(dp_acc, -mathematics.spread(delta, "q"))
                        products.add(dp_acc, own_do, v_smem.at[k_slot], b_t=True)
                        s = products.read(s_acc, 1)
                        if staging is not None:
                            keys = pl.ds(part * ROWS, ROWS)
                            value = memory.load_staged(pair_smem.at[q_slot, here, keys], plan.options.interpret)
                            tile_math = tile_math.holding(staging.load, value)
                        found = tile_math.probabilities(s, lse2)
                        (factor,) = found.factors_of_loads()
                        dp = products.read(dp_acc)
                        products.release(k_free.at[k_slot])
                        return found.cotangent(
                            factor, dp, None if mathematics.delta_first else mathematics.spread(delta, "q")
                        )

                    at = 0 if one_sum else part
                    new[at] = new[at] + products.accumulators(g, shape, shape)
                    if not plan.options.interpret:  # the next part may not begin before: registers would not do
                        new = list(lax.optimization_barrier(tuple(new)))
                products.release(q_free.at[q_slot])
                return tuple(new), (soon, later), statistics_soon

            first = code(jnp.int32(0))
            begin = ((zero,) * (1 if one_sum else groups), (first, code(jnp.int32(1))), statistics(first))
            sums, _, _ = lax.fori_loop(0, steps, step, begin)
            for part in range(groups):
                total = zero if one_sum and part else sums[part]
                if whole:
                    per = jnp.int32(rows * columns)
                    head, at = lax.div(mine, per), lax.rem(mine, per)
                    row0 = lax.div(at, jnp.int32(columns)) * tile + group * ROWS
                    column0 = lax.rem(at, jnp.int32(columns)) * tile + part * ROWS
                else:
                    head, row0, column0 = mine, group * ROWS, part * ROWS
                out_ref.at[head, pl.ds(row0, ROWS), pl.ds(column0, ROWS)][...] = total.astype(out_dtype)

        def copy() -> None:
            common.leave_registers(groups)

            def step(i: jax.Array, codes: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                now, soon = codes
                later = code(i + 2)
                b, h, q0, kv0 = place(now)
                h_kv = lax.div(h, jnp.int32(plan.group))
                slot = common.slot_of(i, rings.queries)
                when(i >= rings.queries)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                own = functools.partial(rows_of, b=b, h=h, start=q0, size=tile)
                plgpu.copy_gmem_to_smem(own(q_ref), q_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(own(do_ref), do_smem.at[slot], q_full.at[slot])
                if staging is not None:
                    staging.fetch(pair_smem.at[slot], staging.source(captured, b, h), q0, kv0, q_full.at[slot])
                for part in range(groups):
                    number = i * groups + part
                    k_slot = common.slot_of(number, rings.keys)
                    when(number >= rings.keys)(lambda k_slot=k_slot: plgpu.barrier_wait(k_free.at[k_slot]))
                    visited = functools.partial(rows_of, b=b, h=h_kv, start=kv0 + part * ROWS, size=ROWS)
                    plgpu.copy_gmem_to_smem(visited(k_ref), k_smem.at[k_slot], k_full.at[k_slot])
                    plgpu.copy_gmem_to_smem(visited(v_ref), v_smem.at[k_slot], k_full.at[k_slot])
                return soon, later

            lax.fori_loop(0, steps, step, (code(jnp.int32(0)), code(jnp.int32(1))))
            common.drain(steps, (q_free, rings.queries))
            common.drain(steps * groups, (k_free, rings.keys))

        when(group < groups)(compute)
        when(group == groups)(copy)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out_shape, out_dtype),
        scratch_types=[
            common.tile_smem((rings.queries, tile, dim), dtype),
            common.tile_smem((rings.keys, ROWS, dim), dtype),
            common.tile_smem((rings.keys, ROWS, value_dim), dtype),
            common.tile_smem((rings.queries, tile, value_dim), dtype),
            plgpu.Barrier(num_barriers=rings.queries, num_arrivals=2 if staging is None else 3),
            plgpu.Barrier(num_barriers=rings.keys, num_arrivals=2),
            plgpu.Barrier(num_barriers=rings.queries, num_arrivals=groups),
            plgpu.Barrier(num_barriers=rings.keys, num_arrivals=groups),
            None if staging is None else staging.slot_memory(),
        ],
        grid=(count,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=common.compiler_params(),
        interpret=plgpu.InterpretGPUParams() if plan.options.interpret else None,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
        kernel_name="flexjax_capture_gradient",
    )
    return run(*given, num, lists, order, captures)


# ------------------------------------------------------------------- sums to the places that the index names


def _axes(load: mod_ir.Load) -> frozenset[str]:
    return frozenset().union(*(mod_ir.axes_of(a) for a in load.index))


def _distinct(load: mod_ir.Load) -> bool:
    """Whether different (b, h, position) name different elements: each axis walks a dimension of its own, in steps of one."""
    found = set()
    for atom in load.index:
        axes = mod_ir.axes_of(atom)
        if not axes:
            continue
        linear = atom.linear if isinstance(atom, mod_ir.Val) else None
        if linear is None or len(axes) != 1 or linear.uniform:
            return False
        steps = {"b": linear.b, "h": linear.h, "q": linear.q, "kv": linear.kv, "delta": linear.q}
        if abs(steps[next(iter(axes))]) != 1:
            return False
        found |= axes
    return found == _axes(load)


def _places(plan: KernelPlan, load: mod_ir.Load) -> int:
    lengths = {
        "b": plan.batch,
        "h": plan.q_heads,
        "q": plan.q_len,
        "kv": plan.kv_len,
        "delta": plan.q_len + plan.kv_len - 1,
    }
    return math.prod(lengths[a] for a in _axes(load))


POSITIONS = {mod_ir.SCALAR: (2, 3), mod_ir.ROW: (3,), mod_ir.COLUMN: (2,), mod_ir.TILE: ()}
"""The axes of [b, h, q, kv] that sums of a kind of load lack."""


def _add_at(
    plan: KernelPlan,
    operands: Operands,
    derivative: mod_ir.Program,
    load: mod_ir.Load,
    sums: jax.Array,
    total: jax.Array,
) -> jax.Array:
    if not load.index:
        return total + sums.sum()
    dims, kind = plain_dims(load), mod_ir.classify_load(load).kind
    if (
        dims is not None and kind in POSITIONS
    ):  # no index, no scatter: for a pair bias they would cost more than the kernels
        found = placed(jnp.expand_dims(sums, POSITIONS[kind]), dims, total.shape)
        return found if found.dtype != total.dtype else total + found
    index = [jnp.broadcast_to(i, sums.shape) for i in _indices(plan, operands, derivative, load, sums.ndim)]
    if _distinct(load):
        return total.at[tuple(index)].add(sums, mode="drop", unique_indices=True)
    if sums.size > MOST_REPEATED:
        raise NotImplementedError(refuses(plan, derivative, (True,) * len(derivative.captures)) or "too many places")
    flat = jnp.zeros(sums.shape, jnp.int32)
    for i, n in zip(index, total.shape, strict=True):
        flat = flat * n + jnp.clip(i, 0, n - 1)
    return total + _sum_runs(flat.ravel(), sums.ravel(), total.size).reshape(total.shape)


def _sum_runs(place: jax.Array, value: jax.Array, size: int) -> jax.Array:
    """[size] sums of the values by place, in one fixed order: sorted, then added run by run."""
    place, value = lax.sort((place, value), num_keys=1, is_stable=True)

    def join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return b[0], jnp.where(a[0] == b[0], a[1] + b[1], b[1])

    _, running = lax.associative_scan(join, (place, value))
    last = jnp.concatenate([place[1:] != place[:-1], jnp.ones((1,), bool)])
    at = jnp.where(last, place, size + jnp.arange(place.shape[0]))
    return jnp.zeros((size,), value.dtype).at[at].set(running, mode="drop", unique_indices=True)


def _indices(
    plan: KernelPlan, operands: Operands, derivative: mod_ir.Program, load: mod_ir.Load, rank: int
) -> list[jax.Array]:
    """The index of the load for all (b, h, position), as arrays that broadcast to [b, h, ...]."""
    kind, axes = mod_ir.classify_load(load).kind, _axes(load)
    shape = lambda n, at: jnp.arange(n, dtype=jnp.int32).reshape([-1 if d == at else 1 for d in range(rank)])
    zero = jnp.zeros((1,) * rank, jnp.int32)
    q = kv = zero
    if kind == mod_ir.ROW:
        q = shape(plan.q_len, 2)
    elif kind == mod_ir.COLUMN:
        kv = shape(plan.kv_len, 2)
    elif kind == mod_ir.DIAGONAL:
        difference = shape(plan.q_len + plan.kv_len - 1, 2) - (plan.kv_len - 1)
        q = jnp.maximum(difference, 0)
        kv = q - difference
    elif kind == mod_ir.TILE:
        q, kv = shape(plan.q_len, 2), shape(plan.kv_len, 3)
    env: dict[int, jax.Array] = {
        mod_ir.B: shape(plan.batch, 0) if "b" in axes else zero,
        mod_ir.H: shape(plan.q_heads, 1) if "h" in axes else zero,
        mod_ir.Q: q,
        mod_ir.KV: kv,
    }

    def read(atom: mod_ir.Atom) -> jax.Array:
        if isinstance(atom, mod_ir.Lit):
            return jnp.full((1,) * rank, atom.value, jnp.dtype(atom.dtype))
        return env[atom.id]

    needed = mod_ir.uses(derivative.steps, load.index)
    for step in derivative.steps:
        if not any(o.id in needed for o in step.outs):
            continue
        if isinstance(step, mod_ir.Op):
            operands_ = jnp.broadcast_arrays(*(read(a) for a in step.inputs))
            env[step.out.id] = apply_op(step, operands_)
        elif isinstance(step, mod_ir.Load):
            env[step.out.id] = operands.score_captures[step.capture][tuple(read(a) for a in step.index)]
        else:
            raise NotImplementedError(
                f"`{step.name}` in the index of a captured array has no gradient on this backend."
            )
    return [read(a) for a in load.index]
