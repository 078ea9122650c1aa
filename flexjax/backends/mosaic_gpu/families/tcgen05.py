"""The kernels on tcgen05: compute capability 10.0 and 10.3, where the call asks for them.

What tcgen05 has no kernel for runs on mma.sync, which the same cards have: calls of few queries, the backward pass of
large head dims (backward/tcgen05_tiles.py), and gradients of captured arrays but for those that the dQ kernel writes
itself (backward/pair_bias.py).
"""

import dataclasses
from collections.abc import Sequence

from flexjax.backends.mosaic_gpu.backward.hopper_tiles import padded_dims
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import LARGEST_DIM, PAIR, TILE, backward_tiles, in_pairs
from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
from flexjax.backends.mosaic_gpu.families.mma import Mma
from flexjax.backends.mosaic_gpu.forward import tcgen05_tiles as forward_tcgen05_tiles
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.machine.shared_memory import TMEM_LANES
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results

CAPABILITIES = ("10.0", "10.3")  # compute capabilities with tcgen05


@dataclasses.dataclass(frozen=True)
class Tcgen05(Mma):
    """The family (family.py) on tcgen05 of a card, and on mma.sync for the rest."""

    kernels = "The GPU kernels on tcgen05"
    taken = "block_q 128 or 256, block_kv 64 or 128, num_stages 1 to 3"

    def forward_tiles(self, plan: KernelPlan) -> Sequence[Tcgen05ForwardTile]:
        return forward_tcgen05_tiles.forward_candidates(plan)

    def blocks(self, plan: KernelPlan, block_q: int, block_kv: int, backward: bool) -> tuple[int, int]:
        """Forward, queries as many as those of a CTA, or a multiple. Backward, multiples of a tile, of keys also of a
        pair of CTAs; as they are for head dims that run on mma.sync.
        """
        if not backward:
            queries = _queries_of_cta(plan)
            return (block_q if block_q % queries == 0 else queries), block_kv
        if max(padded_dims(plan)) > LARGEST_DIM:
            return block_q, block_kv
        whole_tiles = lambda block, tile: block if block % tile == 0 else tile
        pairs = in_pairs(plan) and not (plan.blocks is not None and plan.blocks.from_user_lists)
        return whole_tiles(block_q, TILE), whole_tiles(block_kv, PAIR * TILE if pairs else TILE)

    def block_unit(self, plan: KernelPlan) -> int:
        return max(TILE, plan.options.block_q or 0)

    def backward_candidates(self, plan: KernelPlan) -> list[tuple[int, int]]:
        """The tile of the kernels on tcgen05 comes first; the others run on mma.sync."""
        tiles, others = backward_tiles(kernel_plan(plan, self, backward=True)), super().backward_candidates(plan)
        return others if tiles is None else list(dict.fromkeys([(tiles.owned, tiles.owned), *others]))

    def describe_forward(self, plan: KernelPlan) -> str:
        if self.decodes(plan):
            return super().describe_forward(plan)
        tile = forward_tcgen05_tiles.describe(kernel_plan(plan, self))
        return f"tcgen05 for {self.card}: {tile}"

    def describe_backward(self, plan: KernelPlan) -> str:
        tiles = backward_tiles(kernel_plan(plan, self, backward=True))
        if tiles is None:
            return super().describe_backward(plan)
        return f"dQ and dK/dV {TILE} x {TILE} by tcgen05{', dK/dV in pairs of CTAs' if tiles.pairs else ''}"

    def forward_by_tiles(self, plan: KernelPlan, operands: Operands, sms: int) -> Results:
        from flexjax.backends.mosaic_gpu.forward import tcgen05 as forward_tcgen05

        tile = dataclasses.replace(forward_tcgen05_tiles.forward_tile(plan), programs=sms)
        return forward_tcgen05.forward(plan, operands, tile)

    def backward(self, plan: KernelPlan, given: BackwardInputs) -> Gradients:
        from flexjax.backends.mosaic_gpu.families import mma_backward

        return mma_backward.backward(plan, given, self.card, backward_tiles(plan))


def _queries_of_cta(plan: KernelPlan) -> int:
    """Queries of a CTA of the forward kernel: of two tiles, or of one."""
    origin, options, both = plan.origin, plan.options, 2 * TMEM_LANES
    # blocks larger than those of user lists would look up the class of the old block for each entry
    one_tile = plan.q_len <= TMEM_LANES or (plan.blocks is not None and plan.blocks.from_user_lists)
    if origin is not None and origin.query_runs > 1 and origin.query_run % both:
        one_tile = True
    return TMEM_LANES if (one_tile and options.block_q is None) or options.block_q == TMEM_LANES else both
