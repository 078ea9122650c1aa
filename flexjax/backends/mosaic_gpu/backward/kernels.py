"""Which kernels run the backward pass on Hopper, with their sizes."""

import typing

from flexjax.backends.mosaic_gpu.backward import hopper_fused_choice
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import DkvTiles, SplitDkvTiles
from flexjax.backends.mosaic_gpu.backward.hopper_dq_tiles import DqTiles
from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import FusedTiles
from flexjax.plan.kernel_plan import KernelPlan


class TwoKernels(typing.NamedTuple):
    """Sizes of a kernel for dQ and of one for dK and dV, the split one where `hopper_tiles.splits_dkv`."""

    dq: DqTiles
    dkv: DkvTiles | SplitDkvTiles


class FusedKernel(typing.NamedTuple):
    """dQ, dK and dV in one kernel."""

    tiles: FusedTiles
    ordered: bool  # whether CTAs add their dQ tiles in the fixed order of machine/dq_order.py
    shares: int = 1  # CTAs among which the query heads of a key tile are divided; their dK and dV are added

    def spread(self, plan: KernelPlan) -> KernelPlan:
        """The plan as the kernel's CTAs see it: `hopper_fused_choice.spread` with its `shares`."""
        return hopper_fused_choice.spread(plan, self.shares)
