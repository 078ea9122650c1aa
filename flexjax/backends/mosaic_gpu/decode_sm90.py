"""The decode kernel for Hopper: attention of few queries over many keys, at the speed of memory.

The query heads of a key head are packed as rows of one tile of 64, so that each key is read once; keys are cut into chunks
at fixed positions, so that one request fills the GPU. decode_tiles.py says which calls come here. A CTA is a producer
warpgroup (decode_sm90_producer.py), which copies by TMA, and two consumer warpgroups (decode_sm90_consumer.py, for 8-bit caches and few
rows decode_sm90_byte_consumer.py), which compute. They share DecodeSetup. decode_items.py assigns chunks to CTAs;
decode_call.py prepares the operands, and merges the partial results of all chunks. NOTES_decode.md estimates the speed.
"""

import jax
from jax import lax

from flexjax.backends.mosaic_gpu import clipped_copies
from flexjax.backends.mosaic_gpu.branch import when
from flexjax.backends.mosaic_gpu.decode_call import merged, partial_results, prepared
from flexjax.backends.mosaic_gpu.decode_setup import DecodeInputs, DecodeOutputs
from flexjax.backends.mosaic_gpu.decode_sm90_byte_consumer import ByteConsumer
from flexjax.backends.mosaic_gpu.decode_sm90_consumer import DecodeConsumer
from flexjax.backends.mosaic_gpu.decode_sm90_producer import DecodeProducer
from flexjax.backends.mosaic_gpu.decode_tiles import DecodeScratch, DecodeTile, decode_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, launch
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: DecodeTile) -> Results:
    """Runs the decode kernel and merges its partial results: out in the dtype `plan.out_dtype`, lse and, where the plan wants them, row
    maxima (else None), in the plan's layout.

    plan, operands   of the call, with the blocks and block lists of the user's block mask
    tile             from `choose_kernel.decode_kernel(plan)`; its number of CTAs may differ

    `support.refuses` and `decode_tiles.decode_refuses(plan)` must have answered None.
    """
    setup, inputs, query_lengths = prepared(plan, operands, tile)

    def kernel(inputs: DecodeInputs[Ref], outputs: DecodeOutputs[Ref], scratch: DecodeScratch[Ref]) -> None:
        """The decode kernel: runs one warpgroup of a CTA, a consumer or, as the last of them, the producer."""
        clipped_copies.clip_rows(setup.interpret)
        role = lax.axis_index("wg")
        consumer = ByteConsumer if tile.transposed else DecodeConsumer
        when(role < tile.groups)(consumer(setup, inputs, outputs, scratch).run)
        when(role == tile.groups)(DecodeProducer(setup, inputs, scratch).run)

    results: DecodeOutputs[jax.Array] = launch(
        kernel,
        inputs,
        partial_results(setup, inputs.query),
        decode_scratch(tile, plan.dtype),
        name="flexjax_forward_decode",
        programs=setup.items.programs,
        warpgroups=tile.groups + 1,
        interpret=setup.interpret,
    )
    return merged(plan, setup, inputs.work, results, operands.sinks, query_lengths)
