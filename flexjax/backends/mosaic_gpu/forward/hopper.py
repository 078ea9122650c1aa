"""The forward kernel for Hopper (compute capability 9.0): its operands, its launch, and its results.

A CTA has one to three consumer warpgroups of 64 queries each (hopper_consumer.py), which compute by WGMMA, and one
producer warpgroup (hopper_producer.py), which copies by TMA. tile_scheduler.py assigns query tiles to CTAs, and
hopper_tiles.py chooses the configuration.
"""

import jax
from jax import lax

from flexjax.backends.mosaic_gpu.forward import hopper_float8
from flexjax.backends.mosaic_gpu.forward.hopper_consumer import Consumer
from flexjax.backends.mosaic_gpu.forward.hopper_producer import Producer
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardScratch, ForwardTile, forward_scratch
from flexjax.backends.mosaic_gpu.forward.launch import inputs_for, launch_forward
from flexjax.backends.mosaic_gpu.forward.setup import ForwardInputs, ForwardOutputs, HopperSetup
from flexjax.backends.mosaic_gpu.machine import partial_sums
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.float_parts import part_dtype, split
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.programs import staging
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: ForwardTile) -> Results:
    """Runs the forward kernel; `support.refuses(plan)` must have answered None."""
    assert tile.fits, tile
    setup = HopperSetup(plan, tile, staging.staged_load(plan, plan.score) if tile.staged_slots else None)

    def kernel(inputs: ForwardInputs[Ref], outputs: ForwardOutputs[Ref], scratch: ForwardScratch[Ref]) -> None:
        clip_rows(aligned=True)
        role = lax.axis_index("wg")
        partial_sums.begin(scratch.exchange)
        when(role < tile.groups)(Consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(Producer(setup, inputs, scratch).run)
        partial_sums.end(scratch.exchange)

    scratch = forward_scratch(tile, part_dtype(plan))
    return launch_forward(
        setup, _inputs(setup, operands), kernel, scratch, name="flexjax_forward", warpgroups=tile.groups + 1
    )


def _inputs(setup: HopperSetup, operands: Operands) -> ForwardInputs[jax.Array]:
    """The operands in the parts that WGMMA multiplies."""
    inputs, tile = inputs_for(setup, operands), setup.tile
    query, key, value = (split(x, tile.parts) for x in inputs[:3])
    # WGMMA transposes no operands of 8 bits.
    value = hopper_float8.key_major(value, setup.plan.layout) if tile.float8 else value
    return inputs._replace(query=query, key=key, value=value)
