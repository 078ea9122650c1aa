"""The dk/dv kernel, with dq where its sums fit VMEM, and the gradients of columns.

    grid step = one visited tile; all query tiles (and heads of the group) of a key tile follow one another

Keys stand on sublanes and queries lie on lanes here: p and ds come out transposed, as the two products need them, and what
belongs to a query (lse, delta) is a line that broadcasts for free.

`with_query` makes this the whole backward pass: ds is there anyway, so dq costs one product more instead of a second kernel
that computes scores, exp and dO . V again. The sums of dq, float32 for all queries of the group, stay in VMEM for as long as
a key head lasts; vmem.fuses says for which lengths.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends.mosaic_tpu import layouts, vmem
from flexjax.backends.mosaic_tpu.backward import Saved
from flexjax.backends.mosaic_tpu.backward_tile import tile_gradients
from flexjax.backends.mosaic_tpu.feeds import Geometry, Operand
from flexjax.backends.mosaic_tpu.forward import F32, NN, NT, dot, when_checked
from flexjax.backends.mosaic_tpu.launch import Output, Refs, launch
from flexjax.backends.mosaic_tpu.modded import Modded, Part, keep_rows
from flexjax.backends.mosaic_tpu.tables import Visit, make_order
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

ZERO = np.int32(0)
TN = (((0,), (0,)), ((), ()))


def dkv_kernel(
    plan: KernelPlan,
    operands: Operands,
    saved: Saved,
    derivative: Program | None,
    columns: tuple[int, ...],
    want_kv: bool,
    with_query: bool,
    tiles: vmem.Tiles,
    chip: vmem.Chip,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, dict[int, jax.Array]]:
    """(dq, dk, dv laid as query, key and value, or None; {gradient number: [B, N, S] sums of column reads})."""
    problem = layouts.problem_of(plan)
    geometry = Geometry(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, q_axis=1)
    order = make_order(plan, geometry, problem.group, True, operands.lists)
    ragged_q = plan.q_len % tiles.q != 0
    modded = Modded(plan, geometry, order, operands, derivative, bound_q=ragged_q, wanted_loads=bool(columns))
    group = np.int32(problem.group)
    ragged_kv = plan.kv_len % tiles.kv != 0
    first_sum = (2 if want_kv else 0) + int(with_query)
    at_dq = first_sum - 1
    head_layout = problem.query

    def at_query(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, i

    def at_key(*grid: jax.Array) -> tuple:
        b, h, _, j = order.where(*grid)
        return b, lax.div(h, group) if problem.group > 1 else h, j

    def at_line(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, np.int32(0), i

    def at_group(*grid: jax.Array) -> tuple:
        b, m, _ = at_key(*grid)
        return (b, ZERO, m) if head_layout.lanes else (b, m, ZERO, ZERO)

    def at_column(*grid: jax.Array) -> tuple:
        b, m, j = at_key(*grid)
        return b, m, np.int32(0), np.int32(0), j

    def part_of_tile(refs: Refs, visit: Visit, part: Part, checked: bool) -> None:
        q_ref, k_ref, v_ref, d_out_ref, lse_ref, shift_ref = refs.inputs
        _, _, col0, cols = part
        lanes = slice(col0, col0 + cols)
        queries, d_out = q_ref[lanes, :], d_out_ref[lanes, :]
        if checked and ragged_q:
            start = visit.i * np.int32(tiles.q) + np.int32(col0)
            queries, d_out = (keep_rows(x, start, plan.q_len) for x in (queries, d_out))
        qk = dot(k_ref[...], queries, NT)
        dp = dot(v_ref[...], d_out, NT)
        grads = tile_gradients(
            modded, refs, visit, part, checked, qk, dp, lse_ref[:, lanes], shift_ref[:, lanes], columns
        )
        if want_kv:
            dk_acc, dv_acc = refs.scratch[:2]
            dv_acc[...] += dot(grads.p.astype(d_out.dtype), d_out, NN)
            dk_acc[...] += dot(grads.ds.astype(queries.dtype), queries, NN)
        if with_query:
            keys = k_ref[...]
            if checked and ragged_kv:
                keys = keep_rows(keys, visit.j * np.int32(tiles.kv), plan.kv_len)
            rows: slice | pl.Slice = slice(col0, col0 + cols)
            if geometry.q_tiles > 1:
                start = visit.i * np.int32(tiles.q) + np.int32(col0)
                rows = pl.ds(pl.multiple_of(start, math.gcd(tiles.q, col0)), cols)
            dq_acc = refs.scratch[at_dq]
            dq_acc[visit.member, rows, :] += dot(grads.ds.astype(keys.dtype), keys, TN)
        for place, n in enumerate(columns):
            sums = jnp.sum(grads.loads[n], axis=1, keepdims=True).reshape(1, tiles.kv)
            ref = refs.scratch[first_sum + place]
            ref[visit.member] += sums

    def body(refs: Refs) -> None:
        visit = order.visit(refs.tables)

        @pl.when(visit.first)
        def _() -> None:
            for place, ref in enumerate(refs.scratch):
                if not with_query or place != at_dq:
                    ref[...] = jnp.zeros_like(ref)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        if with_query:

            @pl.when(visit.first & (visit.j == 0))
            def _() -> None:
                refs.scratch[at_dq][...] = jnp.zeros_like(refs.scratch[at_dq])  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        def all_parts(checked: bool) -> None:
            for col0 in range(0, tiles.q, tiles.part):
                part_of_tile(refs, visit, (0, tiles.kv, col0, min(tiles.part, tiles.q - col0)), checked)

        when_checked(visit, order.kinds, all_parts)

        @pl.when(visit.last)
        def _() -> None:
            if want_kv:
                dk_ref, dv_ref = refs.outputs[:2]
                dk_ref[...] = (refs.scratch[0][...] * np.float32(plan.scale)).astype(dk_ref.dtype)
                dv_ref[...] = refs.scratch[1][...].astype(dv_ref.dtype)
            for place in range(len(columns)):
                refs.outputs[first_sum + place][...] = refs.scratch[first_sum + place][...]

        if with_query:

            @pl.when(visit.last & (visit.j == np.int32(geometry.kv_tiles - 1)))
            def _() -> None:
                dq_ref = refs.outputs[at_dq]
                for member in range(problem.group):
                    dq = refs.scratch[at_dq][member, : plan.q_len, :] * np.float32(plan.scale)
                    if head_layout.lanes:
                        dq_ref[:, member * problem.dim : (member + 1) * problem.dim] = dq.astype(dq_ref.dtype)
                    else:
                        dq_ref[member] = dq.astype(dq_ref.dtype)

    line_spec = pl.BlockSpec((None, None, 1, tiles.q), at_line)
    outputs = []
    scratch = []
    if want_kv:
        outputs = [
            Output(problem.key.shape, plan.dtype, problem.key.spec(tiles.kv, at_key)),
            Output(problem.value.shape, plan.dtype, problem.value.spec(tiles.kv, at_key)),
        ]
        scratch = [pltpu.VMEM((tiles.kv, problem.dim), F32), pltpu.VMEM((tiles.kv, problem.value_dim), F32)]
    if with_query:
        group_block = (
            (None, plan.q_len, problem.group * problem.dim)
            if head_layout.lanes
            else (None, problem.group, plan.q_len, problem.dim)
        )
        outputs.append(Output(head_layout.shape, plan.dtype, pl.BlockSpec(group_block, at_group)))
        scratch.append(pltpu.VMEM((problem.group, geometry.q_tiles * tiles.q, problem.dim), F32))
    shape = (plan.batch, problem.kv_heads, problem.group, 1, plan.kv_len)
    column_spec = pl.BlockSpec((None, None, problem.group, 1, tiles.kv), at_column)
    outputs += [Output(shape, "float32", column_spec) for _ in columns]
    scratch += [pltpu.VMEM((problem.group, 1, tiles.kv), F32) for _ in columns]
    found = launch(
        "flexjax_dkv",
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
    dk, dv = (found[0], found[1]) if want_kv else (None, None)
    sums = {
        n: array.reshape(plan.batch, plan.q_heads, plan.kv_len)
        for n, array in zip(columns, found[first_sum:], strict=True)
    }
    dq = found[at_dq] if with_query else None
    return dq, dk, dv, sums
