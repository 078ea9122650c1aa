"""Row statistics of the backward pass, lse and delta = rowsum(dO * O) - d_lse, with a kernel for the rowsum.

XLA fuses a rowsum with the operations around it, and the order of the additions follows the fusion: the last bits of
the same call inside lax.scan then differ from those alone. A kernel has one order. It reads O and dO once.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.machine import kernel_parts, registers
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, i32, launch, load, rows_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Copying
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers, Part, SwizzledTiles, dtype_name
from flexjax.backends.tile_math import LOG2E
from flexjax.plan.kernel_plan import KernelPlan, Results

ROWS = 64  # queries of a CTA
COLUMNS = 64  # features that are read to registers at once


def row_statistics(
    plan: KernelPlan, results: Results, d_out: jax.Array, d_lse: jax.Array | None, copying: Copying = "tma"
) -> jax.Array:
    """lse2 and delta of every query, in this order: [B, N, 2, T'] float32, heads first in every layout.

    T' is `common.whole_len` of the queries. Where scores may be too large to scale, lse takes the place of lse2. Of a
    weighted plan delta is minus the cotangent of the total, and lse2 is 0.
    """
    if plan.weighted:
        total = jnp.zeros(results.lse.shape) if d_lse is None else d_lse
        total = jnp.swapaxes(total, 1, 2) if plan.layout == "BTNH" else total
        widths = ((0, 0), (0, 0), (0, common.whole_len(plan, "q") - plan.q_len))
        delta = -jnp.pad(total.astype(jnp.float32), widths)
        return jnp.stack([jnp.zeros_like(delta), delta], axis=2)
    pad = lambda x: common.pad(x, plan, "q", unit=1)
    rounding = None if results.rounding is None else pad(results.rounding)
    delta = row_dots(plan, pad(results.out), pad(d_out), rounding, copying)
    lse = results.lse.astype(jnp.float32)
    d_lse = None if d_lse is None else d_lse.astype(jnp.float32)
    if plan.layout == "BTNH":
        lse, d_lse = jnp.swapaxes(lse, 1, 2), None if d_lse is None else jnp.swapaxes(d_lse, 1, 2)
    widths = ((0, 0), (0, 0), (0, delta.shape[2] - plan.q_len))
    if d_lse is not None:
        delta = delta - jnp.pad(d_lse, widths)
    lse = jnp.pad(lse, widths, constant_values=-jnp.inf)
    # no visible key and no sink, or past the end: lse2 = +inf makes the probabilities 0
    dead = jnp.isneginf(lse)
    delta = jnp.where(dead, 0.0, delta)
    lse2 = jnp.where(dead, jnp.inf, lse if may_be_large(plan.score) else lse * LOG2E)
    return jnp.stack([lse2, delta], axis=2)


class StatisticsInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands of the kernel, all padded [B, T, N, E] or [B, N, T, E]."""

    out: Part  # the result of the forward pass
    d_out: Part  # its cotangent dO
    rounding: Part | None  # what rounding took from `out`: O is out + rounding


class StatisticsOutputs(typing.NamedTuple, typing.Generic[Part]):
    dots: Part


class StatisticsScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA: one tile [ROWS, E] of each operand."""

    out: Part
    d_out: Part
    rounding: Part | None
    arrived: Part | None  # all copies by TMA; None with cp.async


def row_dots(
    plan: KernelPlan, out: jax.Array, d_out: jax.Array, rounding: jax.Array | None = None, copying: Copying = "tma"
) -> jax.Array:
    """rowsum(dO * O) of every query, [B, N, T'] float32, T' being `common.whole_len`; 0 past the end.

    O is `out`, or out + rounding; `out`, `d_out` and `rounding` are padded by `common.pad`.
    """
    length, dim = common.whole_len(plan, "q"), out.shape[-1]
    tiles, operands = length // ROWS, 2 if rounding is None else 3
    copies = Copies(copying, 1, None)
    columns = [(start, min(COLUMNS, dim - start)) for start in range(0, dim, COLUMNS)]

    def kernel(inputs: StatisticsInputs[Ref], outputs: StatisticsOutputs[Ref], scratch: StatisticsScratch[Ref]) -> None:
        clip_rows(aligned=True)
        program = lax.axis_index("program")
        head, start = lax.div(program, i32(tiles)), lax.rem(program, i32(tiles)) * ROWS
        b, h = lax.div(head, i32(plan.q_heads)), lax.rem(head, i32(plan.q_heads))
        for source, target in zip(inputs, scratch, strict=False):
            if source is None or target is None:
                continue
            copies.start(rows_of(source, plan.layout, b, h, start, ROWS), target, scratch.arrived, plan.q_len - start)
        if scratch.arrived is not None:
            plgpu.barrier_wait(scratch.arrived)
        else:
            copies.commit()
            copies.wait(None, 0)
        total = None
        # the sum takes the features in rising order
        for first, width in columns:
            o, do, *rest = [
                load(tile.at[:, pl.ds(first, width)], registers.TILE, optimized=False).astype(jnp.float32)
                for tile in (scratch.out, scratch.d_out, scratch.rounding)
                if tile is not None
            ]
            dots = jnp.sum((o + rest[0] if rest else o) * do, axis=1)
            total = dots if total is None else total + dots
        outputs.dots.at[b, h, pl.ds(start, ROWS)][...] = total

    tile = SwizzledTiles((ROWS, dim), dtype_name(out.dtype))
    results: StatisticsOutputs[jax.Array] = launch(
        kernel,
        StatisticsInputs(out, d_out, rounding),
        StatisticsOutputs(kernel_parts.output((plan.batch, plan.q_heads, length), jnp.float32, out)),
        StatisticsScratch(
            tile, tile, None if rounding is None else tile, Barriers(arrivals=operands) if copying == "tma" else None
        ),
        name="flexjax_row_dots",
        programs=plan.batch * plan.q_heads * tiles,
        warpgroups=1,
    )
    return results.dots
