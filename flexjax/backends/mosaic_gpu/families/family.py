"""A family of kernels: what those for one kind of card refuse, which run a call, and how they are launched.

    Hopper    hopper.py     WGMMA and TMA
    Mma       mma.py        mma.sync, which every card has
    Tcgen05   tcgen05.py    tcgen05 where it has a kernel for the pass, else mma.sync

choose_family.py says which one runs a call; no other file knows compute capabilities.
"""

import typing

import jax

from flexjax.backends.base import WorkItems
from flexjax.backends.mosaic_gpu.tangent.tiles import Moving
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs


class Family(typing.Protocol):
    """The kernels for one kind of card. A plan has the blocks of the user's block mask and its lengths, except in
    `forward` and `backward`, which run the last plan of `MosaicGpu.rewrites`.
    """

    @property
    def kernels(self) -> str:
        """The kernels as the subject of a sentence: "The GPU kernels"."""
        ...

    def refuses(self, plan: KernelPlan) -> str | None:
        """Why no kernel runs a plan whose arrays and programs kernels can take, in a sentence; None if some do."""
        ...

    def refuses_invariant(self, plan: KernelPlan) -> str | None:
        """Why no kernel runs an invariant plan in the canonical order (plan/invariant.py), in a sentence; None if one
        does.
        """
        ...

    def refuses_float8(self, plan: KernelPlan) -> str | None:
        """Why no kernel multiplies the float8 operands of a plan as they are, in a sentence; None if one does."""
        ...

    def refuses_decode(self, plan: KernelPlan) -> str | None:
        """Why the decode kernel cannot run a plan, in a sentence without a subject; None if it can."""
        ...

    def decodes(self, plan: KernelPlan) -> bool:
        """Whether the decode kernel runs the forward pass, and not the forward kernel."""
        ...

    def blocks(self, plan: KernelPlan, block_q: int, block_kv: int, backward: bool) -> tuple[int, int]:
        """(queries, keys) of the mask blocks that the kernels of a pass visit in place of blocks of multiples of 64."""
        ...

    def block_unit(self, plan: KernelPlan) -> int:
        """What sizes of blocks are multiples of, in tokens, where `blocks` returns them as they are in both passes."""
        ...

    def candidates(self, plan: KernelPlan) -> list[dict[str, int]]:
        """The tiles that are worth timing, the one that runs first, as `Backend.tile_candidates` returns them."""
        ...

    def work_items(self, plan: KernelPlan, target: Target) -> WorkItems | None:
        """The work items of the decode kernel; None where the forward kernel runs."""
        ...

    def describe_forward(self, plan: KernelPlan) -> str:
        """The kernel of the forward pass with its tile, queries x keys, as text: "forward 128 x 128"."""
        ...

    def describe_backward(self, plan: KernelPlan) -> str:
        """The kernels of the gradients of q, k and v with their tiles, as text: "dQ 128 x 64, dK/dV 64 x 128"."""
        ...

    def refuses_tangent(self, plan: KernelPlan, moving: Moving) -> str | None:
        """Why no kernel of forward mode runs a plan that `refuses` accepts, in a sentence; None if one does."""
        ...

    def describe_tangent(self, plan: KernelPlan) -> str:
        """The kernel of forward mode where query, key and value move, with its tile, as text: "tangent 128 x 64"."""
        ...

    def forward(self, plan: KernelPlan, operands: Operands, sms: int) -> Results:
        """Runs the kernel of the forward pass. No result depends on `sms`, the number of SMs of the GPU."""
        ...

    def backward(self, plan: KernelPlan, given: BackwardInputs) -> Gradients:
        """Runs the kernels of the backward pass: the gradients of the wanted operands, None for the others."""
        ...

    def tangent(self, plan: KernelPlan, given: TangentInputs, sms: int) -> tuple[jax.Array, jax.Array]:
        """Runs the kernel of forward mode: the tangents of out and lse, or of the total."""
        ...
