"""The forward kernel on tcgen05 (compute capability 10.x, Blackwell of data centers): operands, launch, results.

A CTA computes one or two tiles of 128 queries of one head. Each has a warpgroup that computes the softmax
(tcgen05_rows.py); one more warpgroup copies by TMA and issues the products (tcgen05_issue.py), whose sums lie in tensor
memory. tcgen05_tiles.py chooses the configuration, and tile_scheduler.py orders the CTAs.
"""

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward import arrays as forward_arrays
from flexjax.backends.mosaic_gpu.forward.pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tcgen05_issue import IssuingWarps
from flexjax.backends.mosaic_gpu.forward.tcgen05_rows import SoftmaxRows
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, i32, launch, pad
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Setup = ForwardSetup[Tcgen05ForwardTile]


def forward(
    plan: KernelPlan, operands: Operands, tile: Tcgen05ForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel; `support.refuses` must have answered None.

    pages   of a plan whose keys lie in pages, or are read as if they did; None for other contiguous keys
    """
    setup = Setup(plan, tile, None)
    if pages is not None:
        tile = tile.in_pages(plan.page)
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)

    def kernel(inputs: ForwardInputs[Ref], outputs: ForwardOutputs[Ref], scratch: Tcgen05ForwardScratch[Ref]) -> None:
        def softmax() -> None:
            if tile.groups > 1:
                plgpu.set_max_registers(tile.softmax_registers, action="increase")
            compute = lambda turn: SoftmaxRows.of(setup, inputs, outputs, scratch, turn).compute()
            if tile.persistent:
                pl.loop(i32(0), setup.scheduler.turns())(compute)
            else:
                compute(i32(0))

        clip_rows(aligned=True)
        role = lax.axis_index("wg")
        when(role < tile.groups)(softmax)
        when(role == tile.groups)(IssuingWarps(setup, inputs, scratch).run)

    outputs: ForwardOutputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, plan.dtype),
        name="flexjax_forward_tcgen05",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups + 1,
        simulated=plan.options.interpret,
    )
    return forward_arrays.results_from(plan, outputs)


def _inputs(setup: Setup, operands: Operands, pages: KeyPages[jax.Array] | None) -> ForwardInputs[jax.Array]:
    """The operands as the kernel reads them; the pool of `pages`, if any, takes the place of key and value."""
    layout, tile = setup.plan.layout, setup.tile
    q_length, kv_length = forward_arrays.padded_lengths(setup, 1)
    query = pad(operands.query, layout, q_length, tile.head_dim)
    if pages is None:
        key = pad(operands.key, layout, kv_length, tile.head_dim)
        value = pad(operands.value, layout, kv_length, tile.value_dim)
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (tile.head_dim, tile.value_dim))
    return forward_arrays.inputs_of(setup, operands, query, key, value)._replace(pages=pages)
