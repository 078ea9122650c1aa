"""The kernels for Hopper (compute capability 9.0): WGMMA, tiles copied by TMA.

Each choice follows from the plan alone, never from the GPU: the same call gives the same bits on every GPU
(choose_kernel.py).
"""

import dataclasses

import jax

from flexjax.backends.base import WorkItems
from flexjax.backends.mosaic_gpu.backward import hopper_dq_tiles
from flexjax.backends.mosaic_gpu.backward import hopper_tiles as backward_hopper_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import SplitDkvTiles
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.decode import hopper_tiles as decode_hopper_tiles
from flexjax.backends.mosaic_gpu.families import choose_kernel, float8_support
from flexjax.backends.mosaic_gpu.families.kernel_plans import kernel_plan
from flexjax.backends.mosaic_gpu.families.texts import no_tangent_tile, paired, work_items_text
from flexjax.backends.mosaic_gpu.forward import hopper_three_groups
from flexjax.backends.mosaic_gpu.forward import hopper_tiles as forward_hopper_tiles
from flexjax.backends.mosaic_gpu.machine.columns import ctas_of
from flexjax.backends.mosaic_gpu.tangent.tiles import TOKENS, Moving, TangentTile, tangent_tiles
from flexjax.backends.target import Target
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs


@dataclasses.dataclass(frozen=True)
class Hopper:
    """The family (family.py) of compute capability 9.0."""

    kernels = "The GPU kernels"

    def refuses(self, plan: KernelPlan) -> str | None:
        options, of_backward = plan.options, kernel_plan(plan, self, backward=True)
        plan = kernel_plan(plan, self)
        if not forward_hopper_tiles.forward_candidates(plan):
            asked = [f"{n}={getattr(options, n)}" for n in ("block_q", "block_kv", "num_stages") if getattr(options, n)]
            return (
                f"No tile fits head dims {plan.head_dim} and {plan.value_dim}"
                + (f" with {', '.join(asked)}" if asked else "")
                + (
                    ": the GPU kernels take block_q 64, 128 or 192, block_kv 64 or 128, num_stages 2 "
                    "to 4, dividing the mask's blocks."
                )
            )
        reason = backward_hopper_tiles.refuses(of_backward)
        if reason is None and not hopper_dq_tiles.dq_fits(of_backward, backward_hopper_tiles.NO_DENSE_BIAS):
            asked = f" with block_q_bwd={options.block_q_bwd}" if options.block_q_bwd else ""
            return f"No tile of the dQ kernel fits {plan.dtype} head dims {plan.head_dim} and {plan.value_dim}{asked}."
        return reason

    def refuses_invariant(self, plan: KernelPlan) -> str | None:
        dim = max(plan.head_dim, plan.value_dim)
        limits = {
            f"bfloat16 and float16, not {plan.dtype}": plan.dtype not in ("bfloat16", "float16"),
            f"head dims up to 256, not {dim}": dim > 256,
            f"at most {invariant.SPLIT} keys, not {plan.kv_len}": plan.kv_len > invariant.SPLIT,
            "no origin.key": plan.keys_begin_elsewhere,
            "no score_mod beside origin.documents": plan.documents > 0 and plan.score is not None,
        }
        found = [text for text, over in limits.items() if over]
        return f"With kernel_options.invariant the GPU kernels take {found[0]}." if found else None

    def refuses_float8(self, plan: KernelPlan) -> str | None:
        return float8_support.refuses(plan)

    def refuses_decode(self, plan: KernelPlan) -> str | None:
        return decode_hopper_tiles.decode_refuses(plan)

    def decodes(self, plan: KernelPlan) -> bool:
        return choose_kernel.decode_kernel(plan) is not None

    def blocks(self, plan: KernelPlan, block_q: int, block_kv: int, backward: bool) -> tuple[int, int]:
        """Those of three consumer warpgroups where these run (forward/hopper_three_groups.py), else as they are."""
        own = None if backward else hopper_three_groups.mask_blocks(plan)
        if plan.options.invariant and not backward:
            keys = forward_hopper_tiles.invariant_keys(plan)
            block_kv = block_kv if block_kv % keys == 0 else keys
        return own or (block_q, block_kv)

    def block_unit(self, plan: KernelPlan) -> int:
        return 64

    def candidates(self, plan: KernelPlan) -> list[dict[str, int]]:
        backward = choose_kernel.backward_candidates(kernel_plan(plan, self, backward=True))
        return paired([] if self.decodes(plan) else self._forward_candidates(plan), backward)

    def _forward_candidates(self, plan: KernelPlan) -> list[tuple[int, int, int]]:
        """(block_q, block_kv, stages). Those of three consumer warpgroups on mask blocks of their own come first."""
        tiles, own = (
            forward_hopper_tiles.forward_candidates(kernel_plan(plan, self)),
            hopper_three_groups.mask_blocks(plan),
        )
        if own is not None and plan.options.block_q is None:
            tiles = tuple(t for t in tiles if (t.block_q, t.block_kv) == own)
            others = dataclasses.replace(plan, options=dataclasses.replace(plan.options, block_q=128))
            tiles += forward_hopper_tiles.forward_candidates(kernel_plan(others, self))
        return list(dict.fromkeys((t.block_q, t.block_kv, t.stages) for t in tiles))

    def work_items(self, plan: KernelPlan, target: Target) -> WorkItems | None:
        tile = choose_kernel.decode_kernel(plan)
        return None if tile is None else WorkItems(tile.chunk, tile.programs, as_on_h200=True)

    def describe_forward(self, plan: KernelPlan) -> str:
        """Also why the decode kernel does not run where it would be the faster one."""
        decode = choose_kernel.decode_kernel(plan)
        if decode is not None:
            return work_items_text(plan, decode)
        tile = choose_kernel.forward_kernel(kernel_plan(plan, self))
        text, few = f"forward {tile.block_q} x {tile.block_kv}", plan.q_len * plan.group <= decode_hopper_tiles.ROWS
        why = self.refuses_decode(plan)
        faster = few and choose_kernel.decode_is_faster(plan)
        return text if why is None or not faster else f"{text} (not the decode kernel: {why})"

    def describe_backward(self, plan: KernelPlan) -> str:
        """For instance "fused 64 x 128, dQ added in any order", or "dQ 128 x 64, split dK/dV 64 x 64"."""
        plan = kernel_plan(plan, self, backward=True)
        shared = ", columns shared by clusters of two CTAs" if ctas_of(plan) > 1 else ""
        chosen = choose_kernel.backward_kernels(plan)
        if isinstance(chosen, FusedKernel):
            order = "a fixed order" if chosen.ordered else "any order"
            shares = "" if chosen.shares == 1 else f", {chosen.shares} CTAs for each key tile"
            size = f"{chosen.tiles.queries} x {backward_hopper_tiles.FUSED_KEYS}"
            return f"fused {size}, dQ added in {order}{shares}{shared}"
        dq, dkv = chosen
        if isinstance(dkv, SplitDkvTiles):
            last = f"split dK/dV {dkv.queries} x {backward_hopper_tiles.SPLIT_KEYS}"
        else:
            last = f"dK/dV {dkv.queries} x {dkv.rows * dkv.groups}"
        return f"dQ {dq.rows * dq.groups} x {dq.keys}, {last}{shared}"

    def refuses_tangent(self, plan: KernelPlan, moving: Moving) -> str | None:
        plan = kernel_plan(plan, self, backward=True)
        if ctas_of(plan) > 1 or not self.tangent_tiles(plan, moving):
            return no_tangent_tile(plan)
        return None

    def describe_tangent(self, plan: KernelPlan) -> str:
        tile = self.tangent_tiles(kernel_plan(plan, self, backward=True), TOKENS)[0]
        return f"tangent by WGMMA {tile.block_q} x {tile.block_kv}"

    def tangent_tiles(self, plan: KernelPlan, moving: Moving) -> tuple[TangentTile, ...]:
        return tangent_tiles(plan, moving)

    def forward(self, plan: KernelPlan, operands: Operands, sms: int) -> Results:
        decode = choose_kernel.decode_kernel(plan)
        if decode is not None:
            from flexjax.backends.mosaic_gpu.decode import hopper as decode_hopper

            return decode_hopper.forward(plan, operands, dataclasses.replace(decode, programs=sms))
        from flexjax.backends.mosaic_gpu.forward import hopper as forward_hopper

        tile = dataclasses.replace(choose_kernel.forward_kernel(plan), programs=sms)
        return forward_hopper.forward(plan, operands, tile)

    def backward(self, plan: KernelPlan, given: BackwardInputs) -> Gradients:
        from flexjax.backends.mosaic_gpu.families import hopper_backward

        return hopper_backward.backward(plan, given)

    def tangent(self, plan: KernelPlan, given: TangentInputs, sms: int) -> tuple[jax.Array, jax.Array]:
        from flexjax.backends.mosaic_gpu.tangent import hopper as kernel
        from flexjax.backends.mosaic_gpu.tangent.call import TangentCall

        call = TangentCall.of(plan, given)
        tile = dataclasses.replace(self.tangent_tiles(call.plan, call.moving)[0], programs=sms)
        return kernel.tangent(call, given, tile)


HOPPER = Hopper()
