"""The forward kernel on tcgen05 (compute capability 10.x, Blackwell of data centers): operands, launch, results.

A CTA computes one or two tiles of 128 queries of one head. Each has a warpgroup that computes the softmax (forward_sm100_rows.py); one
more warpgroup copies by TMA and issues the products (forward_sm100_issue.py), whose sums lie in tensor memory. The configuration is
forward_sm100_tiles.py's matter, and the order of CTAs tile_scheduler.py's.

In the simulator (`interpret`) lengths are padded to whole tiles, because it does not fill in zeros past the end of an array.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import kernel_parts, memory, tile_scheduler
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_sm90 import TMA_ROWS, without_padding
from flexjax.backends.mosaic_gpu.forward_sm100_issue import IssuingWarps
from flexjax.backends.mosaic_gpu.forward_sm100_rows import SoftmaxRows
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, join_extra, launch, pad
from flexjax.backends.mosaic_gpu.shared_memory import round_up
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.backends.mosaic_gpu.tile_scheduler import MaskRows
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Setup = ForwardSetup[Tcgen05ForwardTile]


def forward(plan: KernelPlan, operands: Operands, tile: Tcgen05ForwardTile) -> Results:
    """Runs the forward kernel: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None),
    in the plan's layout.

    tile   one of `forward_candidates(plan)`, whose head dim includes the extra features

    `support.refuses` must have answered None. out is [B, T, N, E] or [B, N, T, E] in the plan's dtype, lse and row maxima are
    [B, T, N] or [B, N, T] float32; padding of the operands is cut off.
    """
    plan, operands = join_extra(plan, operands)
    setup = Setup(plan, tile, plan.options.interpret, None, static_reference(plan), may_be_large(plan.score))
    inputs = _inputs(setup, operands)
    scheduler = setup.scheduler
    stats = kernel_parts.output((plan.batch, plan.q_heads, scheduler.q_tiles * tile.block_q), jnp.float32, inputs.query)
    out = kernel_parts.output((*inputs.query.shape[:3], tile.value_dim), plan.dtype, inputs.query)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Tcgen05ForwardScratch[Ref]) -> None:
        """The forward kernel: runs one warpgroup of a CTA, one of a query tile or, as the last of them, the issuing one."""
        role = lax.axis_index("wg")
        when(role < tile.groups)(lambda: SoftmaxRows.of(setup, inputs, outputs, scratch).compute())
        when(role == tile.groups)(IssuingWarps(setup, inputs, scratch).run)

    results: Outputs[jax.Array] = launch(
        kernel,
        inputs,
        Outputs(
            out=out,
            lse=stats,
            max_scores=stats if plan.max_scores else None,
            rounding=out if plan.writes_rounding else None,
        ),
        forward_scratch(tile, plan.dtype),
        name="flexjax_forward_tcgen05",
        programs=scheduler.programs,
        warpgroups=tile.groups + 1,
        interpret=setup.interpret,
    )
    max_scores = None if results.max_scores is None else without_padding(results.max_scores, plan)
    lengths = (plan.q_len, plan.q_heads) if plan.layout == "BTNH" else (plan.q_heads, plan.q_len)
    cut = lambda x: x[:, : lengths[0], : lengths[1], : plan.value_dim]
    rounding = None if results.rounding is None else cut(results.rounding)
    return Results(cut(results.out), without_padding(results.lse, plan), max_scores, rounding)


def _inputs(setup: Setup, operands: Operands) -> Inputs[jax.Array]:
    """The operands in the form in which the kernel reads them.

    Head dims are padded with zeros, lengths to TMA_ROWS, in the simulator to whole tiles. Block lists are flat, captured arrays as
    `memory.kernel_operand` makes them, those of the mask left out without a mask program.
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
    return Inputs(
        query=pad(operands.query, plan.layout, q_length, tile.head_dim),
        key=pad(operands.key, plan.layout, kv_length, tile.head_dim),
        value=pad(operands.value, plan.layout, kv_length, tile.value_dim),
        sinks=operands.sinks,
        mask_rows=MaskRows(scheduler.order(operands.lists), tile_scheduler.flat(operands.lists)),
        score=score,
        mask=mask,
        dropout=dropout,
        origin=() if operands.origin is None else tuple(operands.origin),
    )
