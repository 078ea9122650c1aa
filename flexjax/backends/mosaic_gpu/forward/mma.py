"""The forward kernel on mma.sync (compute capability 8.x, 10.x and 12.x; on 9.0 where the call asks): operands, launch,
results.

A CTA computes one tile of queries of one head. All of its warpgroups copy and compute (mma_rows.py); no CTA waits for
another. mma_tiles.py chooses the configuration, and tile_scheduler.py orders the CTAs.
"""

import dataclasses

import jax

from flexjax.backends.mosaic_gpu.forward import arrays as forward_arrays
from flexjax.backends.mosaic_gpu.forward.mma_rows import MmaRows
from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardScratch, MmaForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.forward.pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.machine.clipped_copies import PIECE_ROWS, clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, launch, pad
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Setup = ForwardSetup[MmaForwardTile]


def forward(
    plan: KernelPlan, operands: Operands, tile: MmaForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel; `support.refuses` must have answered None.

    pages   of a plan whose keys lie in pages, or are read as if they did; None for other contiguous keys
    """
    setup = Setup(plan, tile, None)
    if pages is not None:
        tile = tile.in_pages(plan.page)
        setup = dataclasses.replace(setup, tile=tile, stored_pages=operands.key.shape[0])
    inputs = _inputs(setup, operands, pages)

    def kernel(inputs: ForwardInputs[Ref], outputs: ForwardOutputs[Ref], scratch: MmaForwardScratch[Ref]) -> None:
        clip_rows()
        MmaRows.of(setup, inputs, outputs, scratch).compute()

    outputs: ForwardOutputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, plan.dtype),
        name="flexjax_forward_mma",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups,
        simulated=plan.options.interpret,
    )
    return forward_arrays.results_from(plan, outputs)


def _inputs(setup: Setup, operands: Operands, pages: KeyPages[jax.Array] | None) -> ForwardInputs[jax.Array]:
    """The operands as the kernel reads them; the pool of `pages`, if any, takes the place of key and value."""
    tile, layout = setup.tile, setup.plan.layout
    # The threads that copy by TMA also compute, and spill where arrays have any length. cp.async takes any length.
    q_length, kv_length = forward_arrays.padded_lengths(setup, PIECE_ROWS if tile.copying == "tma" else 1)
    if pages is None:
        key = pad(operands.key, layout, kv_length, tile.head_dim)
        value = pad(operands.value, layout, kv_length, tile.value_dim)
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (tile.head_dim, tile.value_dim))
    query = pad(operands.query, layout, q_length, tile.head_dim)
    return forward_arrays.inputs_of(setup, operands, query, key, value)._replace(pages=pages)
