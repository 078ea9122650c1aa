"""The kernel that sums the gradient of one captured array over lists of tiles (capture_lists.py).

One CTA works through one list. For each tile of the list, WGMMAs compute the scores and dP, and from them

    g = dsp * d mod / d load,    dsp = p * (dP - delta)

`Sink` says what happens to g:

    sums        added tile by tile in registers; the kernel writes one tile of sums for each list
    magnitudes  the same for |g|
    matrix      as sums, but each list's tile goes to its position in a [b, h, T, S] matrix
    places      added, in fixed point (fixed_point.py), to the elements of the array that the load's index names. Under
                a shift-invariant index (shift_invariance.py) the tiles of a list are summed in registers first

Each visited tile costs two matrix products: Q K^T and dO V^T.
"""

import dataclasses
import enum
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import fixed_point, memory
from flexjax.backends.mosaic_gpu.backward_tile_math import Captures, ColumnMath, TileMath
from flexjax.backends.mosaic_gpu.backward_tiles import SMEM_LIMIT
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.capture_lists import ListShape, TileLists
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.pair_bias_tiles import staging_for
from flexjax.backends.mosaic_gpu.tile_programs import TileProgram
from flexjax.ir import program as ir
from flexjax.ir.rewrite import with_results
from flexjax.plan.kernel_plan import KernelPlan

ROWS = 64
Ref = typing.Any


class Sink(enum.Enum):
    SUMS = "sums"
    MAGNITUDES = "magnitudes"
    MATRIX = "matrix"
    SCATTER = "places"


def warpgroups_for(plan: KernelPlan) -> int:
    """Compute warpgroups of 64 queries: two where 128 x 128 tiles fit shared memory and divide the mask's blocks."""
    dims = common.padded_dim(plan.head_dim) + common.padded_dim(plan.value_dim)
    blocks = plan.blocks
    wide = blocks is None or (blocks.block_q % 128 == 0 and blocks.block_kv % 128 == 0)
    return 2 if wide and dims <= 256 else 1


class RingDepths(typing.NamedTuple):
    """Ring depths: tiles of Q and dO, and tiles of 64 keys and values.

    `staged`: whether each Q slot also holds a tile of the staged array.
    """

    queries: int
    keys: int
    staged: bool


def ring_depths(groups: int, dim: int, value_dim: int, staged_bytes: int) -> RingDepths:
    """The deepest rings that fit shared memory. Staging an array takes precedence over deeper rings."""
    tile = groups * ROWS
    choices = [
        RingDepths(queries, keys, staged)
        for staged in ((True, False) if staged_bytes else (False,))
        for queries, keys in ((2, 2 * groups), (2, groups), (1, groups))
    ]

    def fits(rings: RingDepths) -> bool:
        operands = 2 * (dim + value_dim) * (rings.queries * tile + rings.keys * ROWS)
        return operands + rings.staged * rings.queries * tile * tile * staged_bytes + 1024 <= SMEM_LIMIT

    return next((r for r in choices if fits(r)), choices[-1])


@dataclasses.dataclass(frozen=True)
class CaptureKernel:
    """The kernel for one load, whose derivative is `derivative.results[2 + place]`.

    dtype   of what the kernel writes for SUMS and MATRIX
    """

    plan: KernelPlan
    derivative: ir.Program
    place: int
    shape: ListShape
    bias: DenseBiasPlan
    sink: Sink
    dtype: typing.Any = jnp.float32

    @property
    def groups(self) -> int:
        return self.shape.tile // ROWS

    @property
    def load(self) -> ir.Load:
        return typing.cast(ir.Load, self.derivative.steps[self.derivative.gradients[self.place]])

    @property
    def size(self) -> int:
        return int(np.prod(self.derivative.captures[self.load.capture].shape))

    @property
    def by_tile(self) -> bool:
        """Whether the kernel adds g of every tile to the array at once, without sums in registers."""
        return self.sink is Sink.SCATTER and self.shape.kind != ir.DIAGONAL

    @property
    def one_sum(self) -> bool:
        """Whether g is summed over keys later anyway, so that all key parts of a tile share one accumulator."""
        return self.shape.kind in (ir.SCALAR, ir.ROW)

    @property
    def mathematics(self) -> TileMath:
        tile = self.shape.tile
        return TileMath(self.plan, self.derivative, (ROWS, ROWS), "q", (tile, tile), gradients=(self.place,))

    # ------------------------------------------------------------- tile coordinates

    def steps(self, lists: TileLists, mine: jax.Array) -> jax.Array:
        batch, heads = self.shape.repeats
        return lists.count[mine] * (batch * heads)

    def visit(self, lists: TileLists, mine: jax.Array, steps: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(head number b * N + h, tile code) of the i-th visit of this list.

        Past the end of the list: those of the last visit. In an empty list: the list's first head, and tile code 0.
        """
        i = jnp.maximum(jnp.minimum(i, steps - 1), 0)
        head, (batch, heads) = lists.head[mine], self.shape.repeats
        if batch * heads > 1:
            count = jnp.maximum(lists.count[mine], 1)
            turn, i = lax.div(i, count), lax.rem(i, count)
            head = head + (turn if heads > 1 else turn * self.plan.q_heads)  # either all heads are joined or none
        at = lists.begin[mine] + i
        # `begin` of an empty list may lie past the last visit
        at = jnp.minimum(at, jnp.int32(lists.tile.shape[0] - 1))
        if lists.of is not None:
            head = head + jnp.where(steps > 0, lists.of[at], 0)
        return head, jnp.where(steps > 0, lists.tile[at], 0)

    def origin(self, visit: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Batch entry, head, first query, first key."""
        number, code = visit
        b, h = self.head(number)
        tile = lax.shift_right_logical(code, jnp.int32(1))
        row, column = _divided(tile, self.shape.columns)
        return b, h, row * self.shape.tile, column * self.shape.tile

    def head(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _divided(number, self.plan.q_heads)

    def first_tile(self, mine: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First query and first key of the first tile on this list's diagonal, even if the list does not visit it."""
        shape = self.shape
        diagonal, turn = _divided(lax.rem(mine, jnp.int32(shape.keys)), shape.period)
        difference = diagonal - (shape.columns - 1)
        row = jnp.maximum(difference, 0)
        row = row + lax.rem(turn + shape.period - lax.rem(row, jnp.int32(shape.period)), jnp.int32(shape.period))
        return row * shape.tile, (row - difference) * shape.tile

    def places(self, captured: Captures, b: jax.Array, h: jax.Array, row0: jax.Array, column0: jax.Array) -> jax.Array:
        """[64, 64] int32: for each query and key, the flat index of the array element that the load reads."""
        mathematics, plan, index = self.mathematics, self.plan, self.load.index
        program = TileProgram(
            with_results(self.derivative, index),
            captured.score,
            mathematics.shape,
            batch=b,
            head=h,
            edge=(plan.q_len, plan.kv_len) if mathematics.overhangs else None,
            results=tuple(n for n, a in enumerate(index) if ir.axes_of(a) - ir.UNIFORM),
            interpret=plan.options.interpret,
        )
        found = iter(program.at_rows(row0).at_cols(column0))
        lengths = self.derivative.captures[self.load.capture].shape
        total, scalar = None, jnp.int32(0)
        strides = [int(np.prod(lengths[n + 1 :])) for n in range(len(lengths))]
        for atom, length, stride in zip(index, lengths, strides, strict=True):
            if not ir.axes_of(atom) - ir.UNIFORM:
                (value,) = program.scalars((atom,))
                scalar = scalar + jnp.asarray(value, jnp.int32) * np.int32(stride)
                continue
            value = next(found).astype(jnp.int32)
            if mathematics.overhangs:
                value = jnp.minimum(jnp.maximum(value, np.int32(0)), np.int32(length - 1))
            value = value if stride == 1 else value * np.int32(stride)
            total = value if total is None else total + value
        assert total is not None
        return total + scalar

    # ------------------------------------------------------------- launch

    def run(
        self, given: common.Prepared, lists: TileLists, captures: Captures, total: jax.Array | None = None
    ) -> jax.Array:
        """The sums over the lists.

        SUMS, MAGNITUDES    [lists, tile, tile]
        MATRIX              [b, h, rows * tile, columns * tile]
        SCATTER              the array, flat, in float32. `total` bounds the sum of all |g| from above
        """
        simulated, shape, plan = self.plan.options.interpret, self.shape, self.plan
        count = lists.count.shape[0]
        dtype, like = given.query.dtype, given.query
        dim, value_dim = given.query.shape[-1], given.value.shape[-1]
        rings = ring_depths(self.groups, dim, value_dim, self.bias.bytes.staged)
        slots = int(rings.staged) * rings.queries
        staging = staging_for(plan, self.derivative, self.bias, slots, (shape.tile, shape.tile), self.groups)
        scratch = (
            common.tile_smem((rings.queries, shape.tile, dim), dtype),
            common.tile_smem((rings.keys, ROWS, dim), dtype),
            common.tile_smem((rings.keys, ROWS, value_dim), dtype),
            common.tile_smem((rings.queries, shape.tile, value_dim), dtype),
            plgpu.Barrier(num_barriers=rings.queries, num_arrivals=2 if staging is None else 3),
            plgpu.Barrier(num_barriers=rings.keys, num_arrivals=2),
            plgpu.Barrier(num_barriers=rings.queries, num_arrivals=self.groups),
            plgpu.Barrier(num_barriers=rings.keys, num_arrivals=self.groups),
            None if staging is None else staging.slot_memory(),
        )
        if self.sink is Sink.MATRIX:
            out = (shape.batch, shape.heads, shape.rows * shape.tile, shape.columns * shape.tile)
        elif self.sink is Sink.SCATTER:
            out = (count, self.groups, self.size)
        else:
            out = (count, shape.tile, shape.tile)
        by_atomics = self.sink is Sink.SCATTER and not simulated
        body = functools.partial(self._kernel, rings, staging)
        run = pl.kernel(
            lambda *refs: pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="wg"),
            out_type=() if by_atomics else memory.output(out, self.dtype, like),
            mesh=plgpu.Mesh(grid=(count,), grid_names=("program",), num_threads=self.groups + 1, thread_name="wg"),
            compiler_params=common.compiler_params(),
            interpret=plgpu.InterpretGPUParams() if simulated else False,  # pyright: ignore[reportAttributeAccessIssue]  # there from jax 0.11
            name="flexjax_capture_gradient",
        )
        order = jnp.argsort(-lists.count, stable=True).astype(jnp.int32)
        arguments = (*given, lists, order, captures)
        if self.sink is not Sink.SCATTER:
            return run(*arguments, None)  # pyright: ignore[reportCallIssue]  # takes what the kernel takes, with a mesh too
        assert total is not None
        factor = fixed_point.scale(total).reshape(1)
        if simulated:
            return run(*arguments, factor).sum((0, 1))  # pyright: ignore[reportCallIssue]  # as above
        words = jax.new_ref(jnp.zeros((self.size, 2), jnp.uint32))
        run(*arguments, factor, words)  # pyright: ignore[reportCallIssue]  # as above
        return fixed_point.decoded(jax.freeze(words), total)

    # ------------------------------------------------------------- the kernel

    def _kernel(
        self,
        rings: RingDepths,
        staging: typing.Any,
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        do_ref: Ref,
        stats_ref: Ref,
        lists: TileLists,
        order_ref: Ref,
        captured: Captures,
        factor_ref: Ref,
        target: Ref,
        q_smem: Ref,
        k_smem: Ref,
        v_smem: Ref,
        do_smem: Ref,
        q_full: Ref,
        k_full: Ref,
        q_free: Ref,
        k_free: Ref,
        bias_smem: Ref,
    ) -> None:
        plan, groups, tile = self.plan, self.groups, self.shape.tile
        interpret = plan.options.interpret
        mathematics = self.mathematics
        shape = mathematics.shape
        products = common.Products(interpret)
        rows_of = functools.partial(common.rows_of, layout=plan.layout)
        group = lax.axis_index("wg")
        mine = order_ref[lax.axis_index("program")]
        steps = self.steps(lists, mine)
        visit = functools.partial(self.visit, lists, mine, steps)

        def statistics(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """lse2 and delta of the queries of this warpgroup."""
            b, h, q0, _ = self.origin(at)
            own = pl.ds(q0 + group * ROWS, ROWS)
            read = lambda n: plgpu.load(stats_ref.at[b, h, n, own], layout=common.ALONG_ROWS, optimized=False)  # pyright: ignore[reportCallIssue]  # idx has a default from jax 0.11
            return read(0), read(1)

        def to_places(b: jax.Array, h: jax.Array, row0: jax.Array, column0: jax.Array, value: jax.Array) -> None:
            sums = target.at[mine, group] if interpret else target
            places = self.places(captured, b, h, row0 + group * ROWS, column0)
            fixed_point.add(sums, places, value, factor_ref[0], interpret)

        def compute() -> None:
            common.raise_register_limit(groups)
            if self.sink is Sink.SCATTER and interpret:
                target.at[mine, group][...] = jnp.zeros((self.size,), jnp.float32)
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), common.WGMMA)

            def step(i: jax.Array, carry: typing.Any) -> typing.Any:
                sums, (now, soon), (lse2, delta) = carry
                later, statistics_soon = visit(i + 2), statistics(soon)  # loads for the next steps, issued early
                b, h, q0, kv0 = self.origin(now)
                masked = (now[1] & 1) == 1
                rows_math = mathematics.at_rows(b, h, q0 + group * ROWS, captured)
                q_slot = common.slot_of(i, rings.queries)
                here = pl.ds(common.not_hoisted(group, interpret) * ROWS, ROWS)
                own_q, own_do = q_smem.at[q_slot, here], do_smem.at[q_slot, here]
                new = list(sums)
                for part in range(groups):
                    k_slot = common.not_hoisted(common.slot_of(i * groups + part, rings.keys), interpret)
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
                        if mathematics.starts_at_minus_delta:
                            products.start(dp_acc, -mathematics.broadcast(delta, "q"))
                        products.add(dp_acc, own_do, v_smem.at[k_slot], b_t=True)
                        s = products.read(s_acc, 1)
                        if staging is not None:
                            keys = pl.ds(part * ROWS, ROWS)
                            value = memory.load_staged(bias_smem.at[q_slot, here, keys], interpret)
                            tile_math = tile_math.with_loaded(staging.load, value)
                        found = tile_math.probabilities(s, lse2)
                        (factor,) = found.load_factors()
                        dp = products.read(dp_acc)
                        products.release(k_free.at[k_slot])
                        rest = None if mathematics.starts_at_minus_delta else mathematics.broadcast(delta, "q")
                        return found.cotangent(factor, dp, rest)

                    value = products.accumulators(g, shape, shape)
                    if self.by_tile:
                        to_places(b, h, q0, kv0 + part * ROWS, value)
                        continue
                    at = 0 if self.one_sum else part
                    new[at] = new[at] + (jnp.abs(value) if self.sink is Sink.MAGNITUDES else value)
                    if not interpret:  # the next part must not start earlier: too few registers
                        new = list(lax.optimization_barrier(tuple(new)))
                products.release(q_free.at[q_slot])
                return tuple(new), (soon, later), statistics_soon

            first = visit(jnp.int32(0))
            accumulators = 0 if self.by_tile else 1 if self.one_sum else groups
            begin = ((zero,) * accumulators, (first, visit(jnp.int32(1))), statistics(first))
            sums, _, _ = lax.fori_loop(0, steps, step, begin)
            if self.by_tile:
                return
            for part in range(groups):
                total = zero if self.one_sum and part else sums[part]
                if self.sink is Sink.SCATTER:

                    @when(steps > 0)
                    def _(part: int = part, total: jax.Array = total) -> None:
                        q0, kv0 = self.first_tile(mine)
                        to_places(*self.head(lists.head[mine]), q0, kv0 + part * ROWS, total)

                    continue
                own_rows, own_columns = pl.ds(group * ROWS, ROWS), pl.ds(part * ROWS, ROWS)
                out = target.at[mine, own_rows, own_columns]
                if self.sink is Sink.MATRIX:
                    head, at = _divided(mine, self.shape.rows * self.shape.columns)
                    b, h = _divided(head, self.shape.heads)
                    row, column = _divided(at, self.shape.columns)
                    own_rows = pl.ds(row * tile + group * ROWS, ROWS)
                    out = target.at[b, h, own_rows, pl.ds(column * tile + part * ROWS, ROWS)]
                out[...] = total.astype(self.dtype)

        def copy() -> None:
            common.lower_register_limit(groups)

            def step(i: jax.Array, visits: typing.Any) -> typing.Any:
                now, soon = visits
                later = visit(i + 2)
                b, h, q0, kv0 = self.origin(now)
                h_kv = lax.div(h, jnp.int32(plan.group))
                slot = common.slot_of(i, rings.queries)
                when(i >= rings.queries)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                own = functools.partial(rows_of, b=b, h=h, start=q0, size=tile)
                plgpu.copy_gmem_to_smem(own(q_ref), q_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(own(do_ref), do_smem.at[slot], q_full.at[slot])
                if staging is not None:
                    staging.fetch(bias_smem.at[slot], staging.source(captured, b, h), q0, kv0, q_full.at[slot])
                for part in range(groups):
                    number = i * groups + part
                    k_slot = common.slot_of(number, rings.keys)
                    when(number >= rings.keys)(lambda k_slot=k_slot: plgpu.barrier_wait(k_free.at[k_slot]))
                    visited = functools.partial(rows_of, b=b, h=h_kv, start=kv0 + part * ROWS, size=ROWS)
                    plgpu.copy_gmem_to_smem(visited(k_ref), k_smem.at[k_slot], k_full.at[k_slot])
                    plgpu.copy_gmem_to_smem(visited(v_ref), v_smem.at[k_slot], k_full.at[k_slot])
                return soon, later

            lax.fori_loop(0, steps, step, (visit(jnp.int32(0)), visit(jnp.int32(1))))
            common.wait_until_read(steps, (q_free, rings.queries))
            common.wait_until_read(steps * groups, (k_free, rings.keys))

        when(group < groups)(compute)
        when(group == groups)(copy)


def _divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a non-negative number."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
