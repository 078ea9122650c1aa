"""The kernels on mma.sync: compute capability 8.0 to 12.1, on 9.0 where asked for. Tiles depend on the card."""

import dataclasses
from collections.abc import Sequence

import jax

from flexjax.backends.base import WorkItems
from flexjax.backends.mosaic_gpu.backward import mma_tiles as backward_mma_tiles
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.decode import mma_tiles as decode_mma_tiles
from flexjax.backends.mosaic_gpu.decode.mma_tiles import MmaDecodeTile
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
from flexjax.backends.mosaic_gpu.families.texts import no_tangent_tile, paired, work_items_text
from flexjax.backends.mosaic_gpu.forward import mma_tiles as forward_mma_tiles
from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardTile
from flexjax.backends.mosaic_gpu.forward.tcgen05_tiles import Tcgen05ForwardTile
from flexjax.backends.mosaic_gpu.machine.columns import WIDEST_CTA, ctas_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import CARDS, Card
from flexjax.backends.mosaic_gpu.tangent.tiles import TOKENS, MmaTangentTile, Moving, mma_tangent_tiles
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import FLOAT8, BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs

SIZES = ("block_q", "block_kv", "num_stages")  # the options of the forward kernel


@dataclasses.dataclass(frozen=True)
class Mma:
    """The family (family.py) on mma.sync of a card."""

    card: Card

    kernels = "The GPU kernels on mma.sync"
    taken = "block_q 64 or 128, block_kv 32, 64 or 128, num_stages 1 to 3"

    def forward_tiles(self, plan: KernelPlan) -> Sequence[MmaForwardTile | Tcgen05ForwardTile]:
        """The tiles of the forward kernel that fit, the best first; `plan` has the blocks that it visits."""
        return forward_mma_tiles.forward_candidates(plan, self.card)

    def refuses(self, plan: KernelPlan) -> str | None:
        given, plan = plan, kernel_plan(plan, self)
        if plan.dtype == "float32":
            return f"{self.kernels} take bfloat16 and float16 inputs, not float32."
        if ctas_of(plan) > 1:
            dims = f"{plan.head_dim + plan.extra_dim} and {plan.value_dim}"
            return f"{self.kernels} take head dims up to {WIDEST_CTA}, not {dims}."
        if plan.options.split is not None and given.q_len * given.group <= decode_hopper_tiles.ROWS:
            reason = self.refuses_decode(given)
            if reason is not None:
                asked = f"kernel_options.split={plan.options.split!r}"
                return f"{self.kernels} do not split the keys of this call ({asked}): {reason[0].lower()}{reason[1:]}"
        if not self.forward_tiles(plan):
            asked = [f"{n}={getattr(plan.options, n)}" for n in SIZES if getattr(plan.options, n)]
            return (
                f"No tile fits head dims {plan.head_dim} and {plan.value_dim} on {self.card}"
                + (f" with {', '.join(asked)}" if asked else "")
                + f": the {self.kernels.removeprefix('The ')} take {self.taken}, dividing the mask's blocks."
            )
        return backward_mma_tiles.refuses(kernel_plan(given, self, backward=True), self.card)

    def refuses_invariant(self, plan: KernelPlan) -> str:
        return f"{self.kernels} have no canonical order (kernel_options.invariant) yet; those for Hopper do."

    def refuses_float8(self, plan: KernelPlan) -> str | None:
        return f"Only the kernel for Hopper multiplies {FLOAT8}."

    def refuses_decode(self, plan: KernelPlan) -> str | None:
        return decode_mma_tiles.mma_decode_refuses(plan, self.card)

    def decodes(self, plan: KernelPlan) -> bool:
        return choose_kernel.mma_decode_kernel(plan, self.card) is not None

    def blocks(self, plan: KernelPlan, block_q: int, block_kv: int, backward: bool) -> tuple[int, int]:
        return block_q, block_kv

    def block_unit(self, plan: KernelPlan) -> int:
        return 64

    def candidates(self, plan: KernelPlan) -> list[dict[str, int]]:
        forward = dict.fromkeys((t.block_q, t.block_kv, t.stages) for t in self.forward_tiles(kernel_plan(plan, self)))
        return paired([] if self.decodes(plan) else list(forward), self.backward_candidates(plan))

    def backward_candidates(self, plan: KernelPlan) -> list[tuple[int, int]]:
        """(block_q_bwd, block_kv_bwd), the best first."""
        plan = kernel_plan(plan, self, backward=True)
        queries = dict.fromkeys(t.owned for t in backward_mma_tiles.dq_candidates(plan, self.card))
        keys = dict.fromkeys(t.owned for t in backward_mma_tiles.dkv_candidates(plan, self.card))
        return [(q, kv) for q in queries for kv in keys]

    def work_items(self, plan: KernelPlan, target: Target) -> WorkItems | None:
        tile = choose_kernel.mma_decode_kernel(plan, self.card)
        if tile is None:
            return None
        ctas = (target.cores or tile.programs) * tile.resident_ctas(self.card)
        return WorkItems(tile.chunk, ctas, as_on_h200=self.card is CARDS["9.0"])

    def describe_forward(self, plan: KernelPlan) -> str:
        """Also the way of copying, slots of the rings, and how many CTAs an SM holds."""
        tile = choose_kernel.mma_decode_kernel(plan, self.card)
        if tile is not None:
            text = work_items_text(plan, tile)
        else:
            tile = forward_mma_tiles.forward_tile(kernel_plan(plan, self), self.card)
            text = f"forward {tile.block_q} x {tile.block_kv}"
        copying = f"mma.sync with {self.card.copying} for {self.card}"
        return f"{copying}: {text}, {self._occupancy(tile)}"

    def _occupancy(self, tile: MmaForwardTile | MmaDecodeTile) -> str:
        """For instance "2 stages, two CTAs on an SM"."""
        ctas = tile.resident_ctas(self.card)
        fits = {1: "one CTA", 2: "two CTAs"}.get(ctas, f"{ctas} CTAs")
        return f"{tile.stages} {'stage' if tile.stages == 1 else 'stages'}, {fits} on an SM"

    def describe_backward(self, plan: KernelPlan) -> str:
        dq, dkv = choose_kernel.mma_backward_kernels(kernel_plan(plan, self, backward=True), self.card)
        return f"dQ {dq.owned} x {dq.visited}, dK/dV {dkv.visited} x {dkv.owned}"

    def refuses_tangent(self, plan: KernelPlan, moving: Moving) -> str | None:
        plan = kernel_plan(plan, self, backward=True)
        if ctas_of(plan) > 1 or not self.tangent_tiles(plan, moving):
            return no_tangent_tile(plan)
        return None

    def describe_tangent(self, plan: KernelPlan) -> str:
        tile = self.tangent_tiles(kernel_plan(plan, self, backward=True), TOKENS)[0]
        return f"tangent by mma.sync {tile.block_q} x {tile.block_kv}"

    def tangent_tiles(self, plan: KernelPlan, moving: Moving) -> tuple[MmaTangentTile, ...]:
        return mma_tangent_tiles(plan, moving, self.card)

    def forward(self, plan: KernelPlan, operands: Operands, sms: int) -> Results:
        decode = choose_kernel.mma_decode_kernel(plan, self.card)
        if decode is None:
            return self.forward_by_tiles(plan, operands, sms)
        from flexjax.backends.mosaic_gpu.decode import mma as decode_mma

        decode = dataclasses.replace(decode, programs=sms * decode.resident_ctas(self.card))
        return decode_mma.forward(plan, operands, decode)

    def forward_by_tiles(self, plan: KernelPlan, operands: Operands, sms: int) -> Results:
        """Runs the forward kernel, for calls that the decode kernel does not run."""
        from flexjax.backends.mosaic_gpu.forward import mma as forward_mma

        return forward_mma.forward(plan, operands, forward_mma_tiles.forward_tile(plan, self.card))

    def backward(self, plan: KernelPlan, given: BackwardInputs) -> Gradients:
        from flexjax.backends.mosaic_gpu.families import mma_backward

        return mma_backward.backward(plan, given, self.card)

    def tangent(self, plan: KernelPlan, given: TangentInputs, sms: int) -> tuple[jax.Array, jax.Array]:
        from flexjax.backends.mosaic_gpu.tangent import mma as kernel
        from flexjax.backends.mosaic_gpu.tangent.call import TangentCall

        call = TangentCall.of(plan, given)
        tile = self.tangent_tiles(call.plan, call.moving)[0]
        return kernel.tangent(call, given, tile)
