"""The decode kernel on mma.sync (compute capability 8.x, 10.x and 12.x; on 9.0 where the call asks): operands, launch, results.

Work items, chunks of keys, packed rows and the merge of partial results are those of the kernel for Hopper (decode_call.py). A CTA is
one warpgroup that copies and computes (decode_sm80_consumer.py, for 8-bit caches and few packed rows decode_sm80_byte_consumer.py), and
an SM holds two of them where its shared memory allows. decode_sm80_tiles.py has the configuration.
"""

import jax

from flexjax.backends.mosaic_gpu.clipped_copies import clip_rows
from flexjax.backends.mosaic_gpu.decode_call import merged, partial_results, prepared
from flexjax.backends.mosaic_gpu.decode_setup import DecodeInputs, DecodeOutputs
from flexjax.backends.mosaic_gpu.decode_sm80_byte_consumer import MmaByteConsumer
from flexjax.backends.mosaic_gpu.decode_sm80_consumer import MmaDecodeConsumer
from flexjax.backends.mosaic_gpu.decode_sm80_tiles import MmaDecodeScratch, MmaDecodeTile, mma_decode_scratch
from flexjax.backends.mosaic_gpu.kernel_parts import Ref, launch
from flexjax.backends.mosaic_gpu.sm80_copies import Copies
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results


def forward(plan: KernelPlan, operands: Operands, tile: MmaDecodeTile) -> Results:
    """Runs the decode kernel on mma.sync and merges its partial results: out in the dtype `plan.out_dtype`, lse and, where the plan wants
    them, row maxima (else None), in the plan's layout.

    plan, operands   of the call, with the blocks and block lists of the user's block mask
    tile             from `choose_kernel.mma_decode_kernel`; its number of CTAs may differ

    `support.refuses` and `mma_decode_refuses` must have answered None.
    """
    setup, inputs, query_lengths = prepared(plan, operands, tile)
    copies = Copies(tile.copying, tile.groups, setup.interpret, None)

    def kernel(inputs: DecodeInputs[Ref], outputs: DecodeOutputs[Ref], scratch: MmaDecodeScratch[Ref]) -> None:
        """The decode kernel, in the only warpgroup of a CTA: computes every work item of the CTA from `inputs`, and writes the partial
        results to `outputs`.
        """
        clip_rows(setup.interpret)
        consumer = MmaByteConsumer if tile.transposed else MmaDecodeConsumer
        consumer(setup, inputs, outputs, tile, scratch, copies).run()

    results: DecodeOutputs[jax.Array] = launch(
        kernel,
        inputs,
        partial_results(setup, inputs.query),
        mma_decode_scratch(tile, plan.dtype),
        name="flexjax_forward_decode_mma",
        programs=setup.items.programs,
        warpgroups=1,
        interpret=setup.interpret,
    )
    return merged(plan, setup, inputs.work, results, operands.sinks, query_lengths)
