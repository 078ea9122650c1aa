"""The forward kernel for Hopper (compute capability 9.0): its operands, its launch, and its results.

A CTA is one producer warpgroup (forward_producer.py), which copies by TMA, and one to three consumer warpgroups of 64 queries each
(forward_consumer.py), which compute by WGMMA. They share HopperSetup, everything that is known before the kernel is traced.
tile_scheduler.py assigns query tiles to CTAs, and forward_tiles.py chooses the configuration.

Products with an operand in registers and named barriers do not exist in the simulator (`interpret`), which uses plain dots
and mbarriers instead. Lengths are padded to whole tiles there, because the simulator does not fill in zeros past the end of
an array.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import kernel_parts, memory, partial_sums, staging, tile_scheduler
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.float_parts import part_dtype, split
from flexjax.backends.mosaic_gpu.forward_consumer import Consumer
from flexjax.backends.mosaic_gpu.forward_pages import KeyPages, pool_operand
from flexjax.backends.mosaic_gpu.forward_producer import Producer
from flexjax.backends.mosaic_gpu.forward_setup import HopperSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardScratch, ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, join_extra, launch, pad
from flexjax.backends.mosaic_gpu.shared_memory import round_up
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.backends.mosaic_gpu.tile_scheduler import MaskRows
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

TMA_ROWS = 8
"""Lengths of operands are multiples of this many rows; TMA fills in zeros past the end itself."""


def forward(
    plan: KernelPlan, operands: Operands, tile: ForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None),
    in the plan's layout.

    tile    one of `forward_candidates(plan)`, whose head dim includes the extra features
    pages   of a plan with keys in pages, which the kernel reads in place; None for contiguous keys

    `support.refuses(plan)` must have answered None. out is [B, T, N, E] or [B, N, T, E] in the plan's dtype, lse and
    row maxima are [B, T, N] or [B, N, T] float32; padding of the operands is cut off.
    """
    assert tile.fits, tile
    plan, operands = join_extra(plan, operands)
    setup = forward_setup(plan, tile)
    if pages is not None:
        tile = dataclasses.replace(tile, page_rows=math.gcd(plan.page, tile.block_kv))
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)
    scheduler = setup.scheduler
    stats = kernel_parts.output((plan.batch, plan.q_heads, scheduler.q_tiles * tile.block_q), jnp.float32, inputs.query)
    value_dim = tile.value_dim * tile.ctas
    out = kernel_parts.output((plan.batch, *inputs.query.shape[1:3], value_dim), plan.dtype, inputs.query)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: ForwardScratch[Ref]) -> None:
        """The forward kernel: runs one warpgroup of a CTA, a consumer or, as the last of them, the producer."""
        role = lax.axis_index("wg")
        partial_sums.begin(scratch.exchange, setup.interpret)
        when(role < tile.groups)(Consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(Producer(setup, inputs, scratch).run)
        partial_sums.end(scratch.exchange, setup.interpret)

    results: Outputs[jax.Array] = launch(
        kernel,
        inputs,
        Outputs(
            out=out,
            lse=stats,
            max_scores=stats if plan.max_scores else None,
            rounding=out if plan.writes_rounding else None,
        ),
        forward_scratch(tile, part_dtype(plan), setup.interpret),
        name="flexjax_forward",
        programs=scheduler.programs,
        warpgroups=tile.groups + 1,
        interpret=setup.interpret,
        ctas=tile.ctas,
    )
    max_scores = None if results.max_scores is None else without_padding(results.max_scores, plan)
    lengths = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    cut = lambda x: x[:, : lengths[0], : lengths[1], : plan.value_dim]
    rounding = None if results.rounding is None else cut(results.rounding)
    return Results(cut(results.out), without_padding(results.lse, plan), max_scores, rounding)


def forward_setup(plan: KernelPlan, tile: ForwardTile) -> HopperSetup:
    """What is known of the kernel before it is traced.

    plan   with extra features joined to the head dim
    tile   the kernel's configuration
    """
    staged = staging.staged_load(plan, plan.score) if tile.staged_slots else None
    return HopperSetup(plan, tile, plan.options.interpret, staged, static_reference(plan), may_be_large(plan.score))


def _inputs(setup: HopperSetup, operands: Operands, pages: KeyPages[jax.Array] | None) -> Inputs[jax.Array]:
    """The operands in the form in which the kernel reads them.

    Lengths and head dims are padded with zeros: lengths to multiples of TMA_ROWS, in the simulator to whole tiles.
    Queries, keys and values of float32 are split into parts (float_parts.py). Block lists are flat; captured arrays are
    as `memory.kernel_operand` makes them, and those of mask_mod are left out if the plan has no mask program. In the
    simulator the staged array is padded too. The dynamic scheduler gets a new counter, except in the simulator.
    """
    plan, tile, scheduler = setup.plan, setup.tile, setup.scheduler
    q_length, kv_length = round_up(plan.q_len, TMA_ROWS), round_up(plan.kv_len, TMA_ROWS)
    if setup.interpret:
        q_length = scheduler.q_tiles * tile.block_q
        kv_length = round_up(plan.kv_len, tile.block_kv if plan.blocks is None else plan.blocks.block_kv)
    score, mask, dropout = (
        tuple(memory.kernel_operand(x) for x in captures)
        for captures in (
            operands.score_captures,
            operands.mask_captures if plan.mask is not None else (),
            operands.dropout_captures,
        )
    )
    if setup.interpret and setup.staged is not None:
        whole = setup.staged.capture
        score = tuple(_whole_tiles(x, q_length, kv_length) if n == whole else x for n, x in enumerate(score))
    key_dim, value_dim = tile.head_dim * tile.ctas, tile.value_dim * tile.ctas
    if pages is None:
        key = split(pad(operands.key, plan.layout, kv_length, key_dim), tile.parts)
        value = split(pad(operands.value, plan.layout, kv_length, value_dim), tile.parts)
    else:
        key = pool_operand(operands.key, key_dim, setup.interpret)
        value = pool_operand(operands.value, value_dim, setup.interpret)
        pages = pages._replace(values=pad(pages.values, "BTNH", plan.page, value_dim))
    counter = None
    if tile.dynamic_scheduler and not setup.interpret:
        counter = typing.cast(jax.Array, jax.new_ref(tile_scheduler.new_counter(scheduler.programs)))
    return Inputs(
        query=split(pad(operands.query, plan.layout, q_length, key_dim), tile.parts),
        key=key,
        value=value,
        sinks=operands.sinks,
        mask_rows=MaskRows(scheduler.order(operands.lists), tile_scheduler.flat(operands.lists)),
        score=score,
        mask=mask,
        dropout=dropout,
        counter=counter,
        origin=() if operands.origin is None else tuple(operands.origin),
        pages=pages,
    )


def _whole_tiles(x: jax.Array, q_length: int, kv_length: int) -> jax.Array:
    """A staged array [..., T, S] with zeros appended up to these lengths, for the simulator, which does not fill in
    zeros past an end.
    """
    widths = [(0, 0)] * (x.ndim - 2) + [(0, max(0, q_length - x.shape[-2])), (0, max(0, kv_length - x.shape[-1]))]
    return jnp.pad(x, widths)


def without_padding(stats: jax.Array, plan: KernelPlan) -> jax.Array:
    """Row statistics [B, N, padded T] cut to T queries, as [B, T, N] or [B, N, T] by the plan's layout."""
    stats = stats[:, :, : plan.q_len]
    return jnp.swapaxes(stats, 1, 2) if plan.layout == "BTNH" else stats
