"""The decode kernel for Hopper: attention of few queries over many keys, at the speed of memory.

The query heads of a key head are packed as rows of one tile of 64, so that each key is read once; keys are cut into
chunks at fixed positions, so that one request fills the GPU (split-KV). A CTA is a producer warpgroup
(hopper_producer.py), which copies by TMA, and two consumer warpgroups (hopper_consumer.py, for 8-bit caches and few
rows hopper_byte_consumer.py). items.py assigns chunks to CTAs; call.py prepares the operands, and merges the partial
results of all chunks. lab/notes/decode.md estimates the speed.
"""

from jax import lax

from flexjax.backends.mosaic_gpu.decode.call import launch_decode
from flexjax.backends.mosaic_gpu.decode.hopper_byte_consumer import ByteConsumer
from flexjax.backends.mosaic_gpu.decode.hopper_consumer import DecodeConsumer
from flexjax.backends.mosaic_gpu.decode.hopper_producer import DecodeProducer
from flexjax.backends.mosaic_gpu.decode.hopper_tiles import DecodeScratch, DecodeTile, decode_scratch
from flexjax.backends.mosaic_gpu.decode.setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.machine import clipped_copies
from flexjax.backends.mosaic_gpu.machine.branch import when
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: DecodeTile) -> Results:
    """Runs the decode kernel and merges its partial results, in the plan's layout; the plan must not be refused."""

    def kernel(
        setup: DecodeSetup, inputs: DecodeInputs[Ref], outputs: DecodeOutputs[Ref], scratch: DecodeScratch[Ref]
    ) -> None:
        clipped_copies.clip_rows()
        role = lax.axis_index("wg")
        consumer = ByteConsumer if tile.transposed else DecodeConsumer
        when(role < tile.groups)(consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(DecodeProducer(setup, inputs, scratch).run)

    scratch, warpgroups = decode_scratch(tile, plan.dtype), tile.groups + 1
    return launch_decode(plan, operands, tile, kernel, scratch, name="flexjax_forward_decode", warpgroups=warpgroups)
