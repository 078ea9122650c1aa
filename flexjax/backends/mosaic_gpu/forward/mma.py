"""The forward kernel on mma.sync (compute capability 8.x, 10.x, 12.x; 9.0 where asked for): its launch.

A CTA computes one tile of queries of one head. All of its warpgroups copy and compute (mma_rows.py); no CTA waits for
another. mma_tiles.py chooses the configuration, and tile_scheduler.py orders the CTAs.
"""

from flexjax.backends.mosaic_gpu.forward.launch import inputs_for, launch_forward
from flexjax.backends.mosaic_gpu.forward.mma_rows import MmaRows
from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardScratch, MmaForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.machine.clipped_copies import PIECE_ROWS, clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: MmaForwardTile) -> Results:
    """Runs the forward kernel; `support.refuses` must have answered None."""
    setup = ForwardSetup(plan, tile)
    # The threads that copy by TMA also compute, and spill where arrays have any length. cp.async takes any length.
    inputs = inputs_for(setup, operands, PIECE_ROWS if tile.copying == "tma" else 1, tile.copying)

    def kernel(inputs: ForwardInputs[Ref], outputs: ForwardOutputs[Ref], scratch: MmaForwardScratch[Ref]) -> None:
        clip_rows()
        MmaRows.of(setup, inputs, outputs, scratch).compute()

    scratch = forward_scratch(tile, plan.dtype)
    return launch_forward(setup, inputs, kernel, scratch, name="flexjax_forward_mma", warpgroups=tile.groups)
