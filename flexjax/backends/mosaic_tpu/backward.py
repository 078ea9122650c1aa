"""The dq kernel, and with it every captured gradient that is not a column's.

Grid and orientation are those of the forward pass: all key tiles of a row of query tiles follow one another, queries stand
on sublanes. Besides dq it accumulates, per captured read:

    scalar, row   sums along the keys, [B, N, 1, T]; a scalar's are added up outside
    diagonal      sums along diagonals, [B, N, 8, diagonals], in VMEM for as long as a head lasts (toeplitz_sums)
    tile          the entries themselves, [B, N, T, S], block by block
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu import layouts, tile_programs, vmem
from flexjax.backends.mosaic_tpu.backward_tile import tile_gradients
from flexjax.backends.mosaic_tpu.feeds import Geometry, Operand
from flexjax.backends.mosaic_tpu.forward import F32, NN, NT, dot, lane_sums, when_checked
from flexjax.backends.mosaic_tpu.launch import Output, Refs, launch
from flexjax.backends.mosaic_tpu.modded import Modded, Part, keep_rows
from flexjax.backends.mosaic_tpu.tables import IDLE, Visit, make_order
from flexjax.backends.mosaic_tpu.tile_programs import LANES
from flexjax.ir import program as ir
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands


@dataclasses.dataclass(frozen=True)
class Saved:
    """What both backward kernels read beside the operands, laid for kernels.

    lse is to base 2 (not where scores may be far out), +inf where nothing was on (so that exp2 gives 0); shift is
    delta - d_lse; both [B, N, 1, T].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    lse: jax.Array
    shift: jax.Array


def dq_kernel(
    plan: KernelPlan,
    operands: Operands,
    saved: Saved,
    derivative: Program | None,
    wanted: dict[int, str],
    want_query: bool,
    tiles: vmem.Tiles,
    chip: vmem.Chip,
) -> tuple[jax.Array | None, dict[int, jax.Array]]:
    """(dq laid as the query or None, {gradient number: sums}); `wanted` maps gradient numbers to load kinds."""
    problem = layouts.problem_of(plan)
    geometry = Geometry(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, q_axis=0)
    order = make_order(plan, geometry, problem.group, False, operands.lists)
    rows = [n for n, kind in wanted.items() if kind in (ir.SCALAR, ir.ROW)]
    slants = [n for n, kind in wanted.items() if kind == ir.DIAGONAL]
    spread = [n for n, kind in wanted.items() if kind == ir.TILE]
    numbers = (*rows, *slants, *spread)
    modded = Modded(
        plan, geometry, order, operands, derivative, bound_q=bool(slants or spread), wanted_loads=bool(numbers)
    )
    group = np.int32(problem.group)
    ragged_kv = plan.kv_len % tiles.kv != 0

    def at_query(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, i

    def at_key(*grid: jax.Array) -> tuple:
        b, h, _, j = order.where(*grid)
        return b, lax.div(h, group) if problem.group > 1 else h, j

    def at_line(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, np.int32(0), i

    def at_head(*grid: jax.Array) -> tuple:
        b, h, _, _ = order.where(*grid)
        return b, h, np.int32(0), np.int32(0)

    def part_of_tile(refs: Refs, visit: Visit, part: Part, checked: bool) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, shift_ref = refs.inputs
        _, _, col0, cols = part
        keys, values = k_ref[col0 : col0 + cols, :], v_ref[col0 : col0 + cols, :]
        qk = dot(q_ref[...], keys, NT)
        dp = dot(d_out_ref[...], values, NT)
        lse, shift = (ref[...].reshape(tiles.q, 1) for ref in (lse_ref, shift_ref))
        grads = tile_gradients(modded, refs, visit, part, checked, qk, dp, lse, shift, numbers)
        if want_query:
            if checked and ragged_kv:
                keys = keep_rows(keys, visit.j * np.int32(tiles.kv) + np.int32(col0), plan.kv_len)
            acc = refs.scratch[0]
            acc[...] += dot(grads.ds.astype(keys.dtype), keys, NN)
        for place, n in enumerate(rows):
            sums = refs.scratch[int(want_query) + place]
            sums[...] += lane_sums(grads.loads[n])
        outputs = refs.outputs[int(want_query) + len(rows) :]
        for place, n in enumerate(slants):
            band = tile_programs.toeplitz_sums(grads.loads[n], geometry.window, tiles.q + col0)
            start = pl.multiple_of(geometry.window_start(visit.i, visit.j), LANES)
            at = (slice(None), pl.ds(start, geometry.window))
            outputs[place][at] += band
        for place, n in enumerate(spread):
            outputs[len(slants) + place][:, col0 : col0 + cols] = grads.loads[n]

    def body(refs: Refs) -> None:
        visit = order.visit(refs.tables)
        outputs = refs.outputs[int(want_query) + len(rows) :]

        @pl.when(visit.first)
        def _() -> None:
            for ref in refs.scratch:
                ref[...] = jnp.zeros_like(ref)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        if slants:

            @pl.when(visit.first & (visit.i == 0))
            def _() -> None:
                for place in range(len(slants)):
                    outputs[place][...] = jnp.zeros_like(outputs[place])  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        if spread and IDLE in order.kinds:

            @pl.when(visit.kind == IDLE)
            def _() -> None:
                for place in range(len(spread)):
                    ref = outputs[len(slants) + place]
                    ref[...] = jnp.zeros_like(ref)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        def all_parts(checked: bool) -> None:
            for col0 in range(0, tiles.kv, tiles.part):
                part_of_tile(refs, visit, (0, tiles.q, col0, min(tiles.part, tiles.kv - col0)), checked)

        when_checked(visit, order.kinds, all_parts)

        @pl.when(visit.last)
        def _() -> None:
            if want_query:
                dq_ref = refs.outputs[0]
                dq_ref[...] = (refs.scratch[0][...] * np.float32(plan.scale)).astype(dq_ref.dtype)
            for place in range(len(rows)):
                sums = jnp.sum(refs.scratch[int(want_query) + place][...], axis=1, keepdims=True)
                refs.outputs[int(want_query) + place][...] = sums.reshape(1, tiles.q)

    line_spec = pl.BlockSpec((None, None, 1, tiles.q), at_line)
    line = (plan.batch, plan.q_heads, 1, plan.q_len)
    outputs = [Output(problem.query.shape, plan.dtype, problem.query.spec(tiles.q, at_query))] if want_query else []
    outputs += [Output(line, "float32", line_spec) for _ in rows]
    slant = (plan.batch, plan.q_heads, tile_programs.SKEW, geometry.diagonals)
    outputs += [Output(slant, "float32", pl.BlockSpec((None, None, *slant[2:]), at_head)) for _ in slants]
    whole = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    at_tile = lambda *grid: order.where(*grid)
    tile_spec = pl.BlockSpec((None, None, tiles.q, tiles.kv), at_tile)
    outputs += [Output(whole, "float32", tile_spec, zeroed=plan.blocks is not None) for _ in spread]
    scratch = [pltpu.VMEM((tiles.q, problem.dim), F32)] if want_query else []
    scratch += [pltpu.VMEM((tiles.q, LANES), F32) for _ in rows]
    found = launch(
        "flexjax_dq",
        body,
        order,
        modded.feeds,
        [],
        [
            Operand(saved.q, problem.query.spec(tiles.q, at_query)),
            Operand(saved.k, problem.key.spec(tiles.kv, at_key)),
            Operand(saved.v, problem.value.spec(tiles.kv, at_key)),
            Operand(saved.d_out, problem.out.spec(tiles.q, at_query)),
            Operand(saved.lse, line_spec),
            Operand(saved.shift, line_spec),
        ],
        outputs,
        scratch,
        chip.vmem_limit,
        plan.options.interpret,
    )
    dq = found.pop(0) if want_query else None
    sums: dict[int, jax.Array] = {}
    for n, array in zip(numbers, found, strict=True):
        sums[n] = _unskewed(array, geometry) if n in slants else array
    return dq, sums


def _unskewed(array: jax.Array, geometry: Geometry) -> jax.Array:
    """[B, N, 8, diagonals] -> [B, N, kv_len + q_len - 1]: the transpose of tile_programs.skewed."""
    length = array.shape[-1]
    total = sum(jnp.pad(array[:, :, r, r:], ((0, 0), (0, 0), (0, r)))[..., :length] for r in range(tile_programs.SKEW))
    return geometry.unlay_diagonals(typing.cast(jax.Array, total))
