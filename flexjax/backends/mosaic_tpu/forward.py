"""The forward kernel: online softmax over the visited tiles of a row.

    grid step = one visited tile (query tile i, key tile j) of head h; all tiles of a row follow one another

Queries stand on sublanes, keys lie on lanes. The running maximum and sum are kept 128 lanes wide: the maximum the same in
every lane, the sum as 128 partial sums that meet only when the row ends. exp is taken to base 2, with the scale folded
into it where there is no score program.
"""

import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flexjax.backends import tile_math
from flexjax.backends.mosaic_tpu import layouts, vmem
from flexjax.backends.mosaic_tpu.feeds import Geometry, Operand
from flexjax.backends.mosaic_tpu.launch import Output, Refs, launch
from flexjax.backends.mosaic_tpu.modded import Modded, Part, keep_rows
from flexjax.backends.mosaic_tpu.tables import FULL, IDLE, Visit, make_order
from flexjax.backends.mosaic_tpu.tile_programs import LANES
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

LOG2E = math.log2(math.e)
F32 = jnp.float32
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


def precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """float32 operands are multiplied as float32, not as one bfloat16 pass."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def dot(a: jax.Array, b: jax.Array, dims: tuple) -> jax.Array:
    """A product with sums in float32."""
    if dims == NT and b.shape[0] == 1 and b.dtype != F32:
        # One row: Mosaic makes this a product of vectors, and gets their types wrong below float32.
        return dot(a, jnp.broadcast_to(b, (8, b.shape[1])), NT)[:, :1]
    return lax.dot_general(a, b, dims, preferred_element_type=F32, precision=precision(a.dtype))


def lane_sums(values: jax.Array) -> jax.Array:
    """(rows, columns) -> (rows, 128): partial sums that stay in their lane."""
    rows, cols = values.shape
    total = None
    for start in range(0, cols, LANES):
        piece = values[:, start : start + LANES]
        if piece.shape[1] < LANES:
            piece = jnp.concatenate([piece, jnp.zeros((rows, LANES - piece.shape[1]), values.dtype)], axis=1)
        total = piece if total is None else total + piece
    assert total is not None
    return total


def widen(state: jax.Array, cols: int) -> jax.Array:
    """(rows, 128) with equal lanes -> (rows, cols)."""
    if cols <= LANES:
        return state[:, :cols]
    return jnp.tile(state, (1, -(-cols // LANES)))[:, :cols]


def when_checked(visit: Visit, kinds: frozenset[int], body: Callable[[bool], None]) -> None:
    """Runs body(checked) as the kind of the visit asks; both forms exist only where both can happen."""
    assert callable(body)
    if not isinstance(visit.kind, jax.Array):
        body(visit.kind != FULL)
        return
    if FULL in kinds:
        pl.when(visit.kind == FULL)(lambda: body(False))
    pl.when((visit.kind != FULL) & (visit.kind != IDLE))(lambda: body(True))


def forward(plan: KernelPlan, operands: Operands, chip: vmem.Chip) -> Results:
    problem = layouts.problem_of(plan)
    tiles = vmem.forward_tiles(plan, chip)
    geometry = Geometry(plan.batch, plan.q_heads, plan.q_len, plan.kv_len, tiles.q, tiles.kv, q_axis=0)
    order = make_order(plan, geometry, problem.group, False, operands.lists)
    modded = Modded(plan, geometry, order, operands, plan.score, extra_prefetch=int(plan.has_sinks))
    group = np.int32(problem.group)
    raw = plan.score is None and plan.scale > 0
    biased = modded.separated is not None
    # What the running maximum is multiplied by to be in base 2; a separated score is in base 2 already.
    factor = np.float32(1.0 if biased else plan.scale * LOG2E if raw else LOG2E)
    natural = np.float32(math.log(2.0) if biased else plan.scale if raw else 1.0)
    ragged_kv = plan.kv_len % tiles.kv != 0
    guarded = plan.score is not None

    def at_query(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, i

    def at_key(*grid: jax.Array) -> tuple:
        b, h, _, j = order.where(*grid)
        return b, lax.div(h, group) if problem.group > 1 else h, j

    def at_line(*grid: jax.Array) -> tuple:
        b, h, i, _ = order.where(*grid)
        return b, h, np.int32(0), i

    def part_of_tile(refs: Refs, visit: Visit, part: Part, checked: bool) -> None:
        q_ref, k_ref, v_ref = refs.inputs
        m_ref, l_ref, acc_ref = refs.scratch
        _, _, col0, cols = part
        keys, values = k_ref[col0 : col0 + cols, :], v_ref[col0 : col0 + cols, :]
        x = dot(q_ref[...], keys, NT)
        if biased:
            assert modded.separated is not None
            bias = modded.bias(refs, visit, part)
            x = x * np.float32(plan.scale * modded.separated.scale * LOG2E)
            x = x if bias.tile is None else x + bias.tile
        elif not raw:
            x = modded.scores(refs, visit, part, x * np.float32(plan.scale))[0]
        valid = modded.valid(refs, visit, part) if checked else None
        if valid is not None:
            x = jnp.where(valid, x, -jnp.inf)
        m_before = m_ref[...]
        m = jnp.maximum(m_before, jnp.max(x, axis=1, keepdims=True))
        shift = m if modded.large else m * factor
        if valid is not None or guarded:
            shift = jnp.where(m == -jnp.inf, 0.0, shift)
        if modded.large:
            less = tile_math.large_distance(plan.score, x, widen(shift, cols))
            p, alpha = jnp.exp2(less * factor), jnp.exp2((m_before - shift) * factor)
        else:
            p = jnp.exp2((x if biased else x * factor) - widen(shift, cols))
            alpha = jnp.exp2(m_before * factor - shift)
        l_ref[...] = l_ref[...] * alpha + lane_sums(p)
        m_ref[...] = m
        r = modded.dropout(refs, visit, part)
        if r is not None:
            p = p * r if valid is None else jnp.where(valid, p * r, 0.0)
        if checked and ragged_kv:
            values = keep_rows(values, visit.j * np.int32(tiles.kv) + np.int32(col0), plan.kv_len)
        acc_ref[...] = acc_ref[...] * widen(alpha, acc_ref.shape[1]) + dot(p.astype(values.dtype), values, NN)

    def body(refs: Refs) -> None:
        visit = order.visit(refs.tables)
        m_ref, l_ref, acc_ref = refs.scratch

        @pl.when(visit.first)
        def _() -> None:
            m_ref[...] = jnp.full_like(m_ref, -jnp.inf)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype
            l_ref[...] = jnp.zeros_like(l_ref)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype
            acc_ref[...] = jnp.zeros_like(acc_ref)  # pyright: ignore[reportArgumentType]  # a reference has a shape and a dtype

        def all_parts(checked: bool) -> None:
            for col0 in range(0, tiles.kv, tiles.part):
                part_of_tile(refs, visit, (0, tiles.q, col0, min(tiles.part, tiles.kv - col0)), checked)

        when_checked(visit, order.kinds, all_parts)

        @pl.when(visit.last)
        def _() -> None:
            out_ref, lse_ref = refs.outputs[:2]
            m = m_ref[...]
            if biased:
                # The line of queries was left out: it is the same for a whole row.
                line = modded.bias(refs, visit, (0, tiles.q, 0, min(LANES, tiles.kv))).q_line
                m = m if line is None else jnp.where(m == -jnp.inf, m, m + line)
            m = m * natural
            total = jnp.broadcast_to(jnp.sum(l_ref[...], axis=1, keepdims=True), m.shape)
            if plan.max_scores:
                refs.outputs[2][...] = m[:, :1].reshape(1, tiles.q)
            shrink = jnp.ones_like(m)
            if plan.has_sinks:
                sink = refs.extra[0][visit.h]
                top = jnp.maximum(m, sink)
                top = jnp.where(top == -jnp.inf, 0.0, top)
                shrink = jnp.exp(m - top)
                total = total * shrink + jnp.exp(sink - top)
                m = top
            some = total != 0  # NaN shows
            inverse = jnp.where(some, shrink / jnp.where(some, total, 1.0), 0.0)
            out_ref[...] = (acc_ref[...] * widen(inverse, acc_ref.shape[1])).astype(out_ref.dtype)
            lse = jnp.where(some, m + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
            lse_ref[...] = lse[:, :1].reshape(1, tiles.q)

    q, k, v = layouts.fold(plan, operands)
    line = (plan.batch, plan.q_heads, 1, plan.q_len)
    line_spec = pl.BlockSpec((None, None, 1, tiles.q), at_line)
    outputs = [
        Output(problem.out.shape, plan.dtype, problem.out.spec(tiles.q, at_query)),
        Output(line, "float32", line_spec),
    ]
    if plan.max_scores:
        outputs.append(Output(line, "float32", line_spec))
    found = launch(
        "flexjax_forward",
        body,
        order,
        modded.feeds,
        [typing.cast(jax.Array, operands.sinks).astype(F32)] if plan.has_sinks else [],
        [
            Operand(q, problem.query.spec(tiles.q, at_query)),
            Operand(k, problem.key.spec(tiles.kv, at_key)),
            Operand(v, problem.value.spec(tiles.kv, at_key)),
        ],
        outputs,
        [
            pltpu.VMEM((tiles.q, LANES), F32),
            pltpu.VMEM((tiles.q, LANES), F32),
            pltpu.VMEM((tiles.q, plan.value_dim), F32),
        ],
        chip.vmem_limit,
        plan.options.interpret,
    )
    tokens_first = problem.tokens_first
    return Results(
        problem.out.unlay(found[0]),
        layouts.unrow(found[1], tokens_first),
        layouts.unrow(found[2], tokens_first) if plan.max_scores else None,
    )
