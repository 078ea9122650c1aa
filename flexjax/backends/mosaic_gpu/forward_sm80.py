"""The forward kernel on mma.sync (compute capability 8.x, 10.x and 12.x; on 9.0 where the call asks): operands, launch, results.

A CTA computes one tile of queries of one head. All of its warpgroups copy and compute (forward_sm80_rows.py); no CTA waits for
another. The configuration is forward_sm80_tiles.py's matter, and the order of CTAs tile_scheduler.py's.

In the simulator (`interpret`) plain dots stand in for the products, and lengths are padded to whole tiles, because it does not fill in
zeros past the end of an array.
"""

import dataclasses

import jax

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import forward_arrays
from flexjax.backends.mosaic_gpu.clipped_copies import PIECE_ROWS, clip_rows
from flexjax.backends.mosaic_gpu.forward_pages import KeyPages, pools_for
from flexjax.backends.mosaic_gpu.forward_setup import ForwardSetup, Inputs, Outputs
from flexjax.backends.mosaic_gpu.forward_sm80_rows import MmaRows
from flexjax.backends.mosaic_gpu.forward_sm80_tiles import MmaForwardScratch, MmaForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, join_extra, launch, pad
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results

Setup = ForwardSetup[MmaForwardTile]


def forward(
    plan: KernelPlan, operands: Operands, tile: MmaForwardTile, pages: KeyPages[jax.Array] | None = None
) -> Results:
    """Runs the forward kernel: out, lse and, where the plan wants them, row maxima and what rounding took from out (else None),
    in the plan's layout.

    tile    one of `forward_candidates`, whose head dim includes the extra features
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

    def kernel(inputs: Inputs[Ref], outputs: Outputs[Ref], scratch: MmaForwardScratch[Ref]) -> None:
        """The forward kernel, in each warpgroup of a CTA: computes its rows of the CTA's work item from `inputs`, and writes them to
        `outputs`.
        """
        clip_rows(setup.interpret)
        MmaRows.of(setup, inputs, outputs, scratch).compute()

    outputs: Outputs[jax.Array] = launch(
        kernel,
        inputs,
        forward_arrays.outputs_for(setup, inputs.query),
        forward_scratch(tile, plan.dtype, setup.interpret),
        name="flexjax_forward_mma",
        programs=setup.scheduler.programs,
        warpgroups=tile.groups,
        interpret=setup.interpret,
    )
    return forward_arrays.results_from(plan, outputs)


def _inputs(setup: Setup, operands: Operands, pages: KeyPages[jax.Array] | None) -> Inputs[jax.Array]:
    """The operands in the form in which the kernel reads them (`forward_arrays.inputs_of`).

    operands   of the call, with extra features joined to the head dim
    pages      of keys in pages, whose pool takes the place of key and value; None for contiguous keys

    Head dims are padded with zeros, lengths as `forward_arrays.padded_lengths` says, queries to PIECE_ROWS where TMA copies; cp.async reads
    arrays of any length.
    """
    tile, layout = setup.tile, setup.plan.layout
    q_length, kv_length = forward_arrays.padded_lengths(setup, PIECE_ROWS if tile.copying == "tma" else 1)
    if pages is None:
        key = pad(operands.key, layout, kv_length, tile.head_dim)
        value = pad(operands.value, layout, kv_length, tile.value_dim)
    else:
        key, value, pages = pools_for(setup.plan, operands, pages, (tile.head_dim, tile.value_dim), setup.interpret)
    query = pad(operands.query, layout, q_length, tile.head_dim)
    return forward_arrays.inputs_of(setup, operands, query, key, value)._replace(pages=pages)
