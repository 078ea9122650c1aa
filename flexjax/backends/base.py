"""What a backend is, and how to add one.

To add a backend:
1. Make a folder `backends/<name>/` with `support.py` (this interface), and one file a kernel.
2. `refuses(plan, target)` says in a sentence why a plan cannot run there, from the two alone; None accepts.
3. `tile_candidates` lists tiles for autotuning; `refuses` refuses, by name, a tile that is asked for and cannot be had.
4. `forward` and `backward` take the plan, its operands and the target, and return what `Results` and `Gradients` document.
   `lowering` surrounds their lowering; most have nothing to do there (contextlib.nullcontext).
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
        """A sentence that says why this backend cannot run the plan on the target, None if it can. Pure.

        The target is of the backend's own platform, or any for the simulator. Without a target: why it can run it on none.
        """
        ...

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """A sentence that says why it cannot compute these gradients there, None if it can; xla then does. Pure."""
        ...

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Values for KernelOptions that are worth timing, of both passes, those that run by themselves first. Pure."""
        ...

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results: ...

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
        """Cotangents of the wanted operands; `derivative` is score_mod's derivative program (None: identity)."""
        ...

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """Surrounds the lowering of a pass into the module; what was lowered is a backend's to look after."""
        ...
