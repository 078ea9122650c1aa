"""The forward kernel on tcgen05 (compute capability 10.x, Blackwell of data centers): operands, launch, results.

A CTA computes one or two tiles of 128 queries of one head. Each has a warpgroup that computes the softmax
(tcgen05_rows.py); one more warpgroup copies by TMA and issues the products (tcgen05_issue.py), whose sums lie in tensor
memory. tcgen05_tiles.py chooses the configuration, and tile_scheduler.py orders the CTAs.
"""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flexjax.backends.mosaic_gpu.forward.launch import inputs_for, launch_forward
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, ForwardSetup
from flexjax.backends.mosaic_gpu.forward.tcgen05_issue import IssuingWarps
from flexjax.backends.mosaic_gpu.forward.tcgen05_rows import SoftmaxRows
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardScratch, Tcgen05ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref, i32
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: Tcgen05ForwardTile) -> Results:
    """Runs the forward kernel; `support.refuses` must have answered None."""
    setup = ForwardSetup(plan, tile)

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

    inputs, scratch = inputs_for(setup, operands), forward_scratch(tile, plan.dtype)
    return launch_forward(setup, inputs, kernel, scratch, name="flexjax_forward_tcgen05", warpgroups=tile.groups + 1)
