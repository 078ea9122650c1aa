"""The decode kernel on mma.sync (compute capability 8.x, 10.x and 12.x; on 9.0 where the call asks for it).

Work items, chunks of keys, packed rows and the merge of partial results are those of the kernel for Hopper (call.py). A
CTA is one warpgroup that copies and computes (mma_consumer.py, for 8-bit caches and few packed rows
mma_byte_consumer.py), and an SM holds two of them where its shared memory allows.
"""

from flexjax.backends.mosaic_gpu.decode.call import launch_decode
from flexjax.backends.mosaic_gpu.decode.mma_byte_consumer import MmaByteConsumer
from flexjax.backends.mosaic_gpu.decode.mma_consumer import MmaDecodeConsumer
from flexjax.backends.mosaic_gpu.decode.mma_tiles import MmaDecodeScratch, MmaDecodeTile, mma_decode_scratch
from flexjax.backends.mosaic_gpu.decode.setup import DecodeInputs, DecodeOutputs, DecodeSetup
from flexjax.backends.mosaic_gpu.machine.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.machine.mma_copies import Copies
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: MmaDecodeTile) -> Results:
    """Runs the decode kernel on mma.sync and merges its partial results; the plan must not be refused."""
    copies = Copies(tile.copying, tile.groups, None)

    def kernel(
        setup: DecodeSetup, inputs: DecodeInputs[Ref], outputs: DecodeOutputs[Ref], scratch: MmaDecodeScratch[Ref]
    ) -> None:
        clip_rows()
        consumer = MmaByteConsumer if tile.transposed else MmaDecodeConsumer
        consumer(setup, inputs, outputs, tile, scratch, copies).run()

    scratch = mma_decode_scratch(tile, plan.dtype)
    return launch_decode(
        plan, operands, tile, kernel, scratch, name="flexjax_forward_decode_mma", warpgroups=tile.groups
    )
