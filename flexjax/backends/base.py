"""The interface of a backend: one way to run a plan; and how to add a backend.

To add a backend:
1. Make a folder `backends/<name>/` with `support.py` (this interface), one file for each kernel, and NOTES.md.
2. `refuses(plan, target)` returns a sentence that says why the plan cannot run on the target, or None to accept it.
3. `tile_candidates` returns tiles for autotuning; `refuses` refuses a tile that the options ask for and that cannot run.
4. `forward` and `backward` take the plan, its operands and the target, and return what `Results` and `Gradients` document.
   `lowering` returns a context in which they are lowered; most backends return contextlib.nullcontext().
5. Import only plan, block_mask types, ir, analysis, trace and tile_math; never attention, dispatch or another backend.
6. Name it in `dispatch.py`'s table, and add a thin test file that puts it through `tests/backends/conformance.py`.
"""

import contextlib
import typing

import jax
from jax.interpreters import mlir

from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted


class Backend(typing.Protocol):
    """One way to run a plan."""

    name: str

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """A sentence that says why this backend cannot run the plan on the target; None if it can. Pure.

        The target is of the backend's own platform; in the simulator it may be any. Without a target the sentence says why the
        backend can run the plan on no target.
        """
        ...

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """A sentence that says why this backend cannot compute the wanted gradients of a plan that it accepted; None if it can.

        xla computes refused gradients. `derivative` is as in `backward`. Pure.
        """
        ...

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Tiles for autotuning: values of the block fields of KernelOptions for both passes, the default tiles first. Pure."""
        ...

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass (see Results)."""
        ...

    def backward(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        d_out: jax.Array,
        d_lse: jax.Array | None,
        wanted: Wanted,
        derivative: Program | None,
        target: Target,
    ) -> Gradients:
        """Cotangents of the wanted operands.

        results      of the forward pass
        d_out        cotangent of out, in its shape; d_lse: of lse, None for zero
        derivative   program of score_mod's derivatives; None where score_mod is the identity
        """
        ...

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """A context in which a pass is lowered into the module, for backends that change or check the lowered module."""
        ...
