"""The forward kernel on tcgen05 (compute capability 10.x, Blackwell of data centers): operands, launch, results.

A CTA computes one or two tiles of 128 queries of one head. Each has a warpgroup that computes the softmax (forward_sm100_rows.py); one
more warpgroup copies by TMA and issues the products (forward_sm100_issue.py), whose sums lie in tensor memory. The configuration is
forward_sm100_tiles.py's matter, and the order of CTAs tile_scheduler.py's.

In the simulator (`interpret`) lengths are padded to whole tiles, because it does not fill in zeros past the end of an array.
"""

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import forward_arrays
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.forward_pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_sm100_issue import IssuingWarps
from flexjax.backends.mosaic_gpu.forward_sm100_rows import SoftmaxRows
from flexjax.backends.mosaic_gpu.forward_sm100_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, i32, join_extra, launch, pad
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Setup = ForwardSetup[Tcgen05ForwardTile]


def forward(
    plan: KernelPlan, operands: Operands, tile: Tcgen05ForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None),
    in the plan's layout.

    tile    one of `forward_candidates(plan)`, whose head dim includes the extra features
    pages   of a plan whose keys lie in pages, or are read as if they did; None for other contiguous keys

    `support.refuses` must have answered None. out is [B, T, N, E] or [B, N, T, E] in the plan's dtype, lse and row maxima are
    [B, T, N] or [B, N, T] float32; padding of the operands is cut off.
    """
    plan, operands = join_extra(plan, operands)
    setup = Setup(plan, tile, plan.options.interpret, None, static_reference(plan), may_be_large(plan.score))
    if pages is not None:
        tile = tile.in_pages(plan.page)
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: Tcgen05ForwardScratch[Ref]) -> None:
        """The forward kernel: runs one warpgroup of a CTA, one of a query tile or, as the last of them, the issuing one."""

        def softmax() -> None:
            """In the warpgroup of a query tile: raises its register limit if there are two of them, and computes its rows of every work
            item of the CTA.
            """
            if tile.groups > 1:
                plgpu.set_max_registers(tile.softmax_registers, action="increase")
            compute = lambda turn: SoftmaxRows.of(setup, inputs, outputs, scratch, turn).compute()
            if tile.persistent:
                pl.loop(i32(0), setup.scheduler.turns())(compute)
            else:
                compute(i32(0))

        clip_rows(setup.interpret, aligned=True)
        role = lax.axis_index("wg")
        when(role < tile.groups)(softmax)
        when(role == tile.groups)(IssuingWarps(setup, inputs, scratch).run)

    outputs: Outputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, plan.dtype),
        name="flexjax_forward_tcgen05",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups + 1,
        interpret=setup.interpret,
    )
    return forward_arrays.results_from(plan, outputs)


def _inputs(setup: Setup, operands: Operands, pages: KeyPages[jax.Array] | None) -> Inputs[jax.Array]:
    """The operands in the form in which the kernel reads them: head dims padded with zeros, lengths for
    the simulator alone (`forward_arrays.padded_lengths`).

    pages   of keys in pages, whose pool takes the place of key and value; None for contiguous keys
    """
    layout, tile = setup.plan.layout, setup.tile
    q_length, kv_length = forward_arrays.padded_lengths(setup, 1)
    query = pad(operands.query, layout, q_length, tile.head_dim)
    if pages is None:
        key = pad(operands.key, layout, kv_length, tile.head_dim)
        value = pad(operands.value, layout, kv_length, tile.value_dim)
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (tile.head_dim, tile.value_dim), setup.interpret)
    return forward_arrays.inputs_of(setup, operands, query, key, value)._replace(pages=pages)
