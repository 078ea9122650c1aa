"""What a backend is, and how to add one.

To add a backend:
1. Make a folder `backends/<name>/` with `support.py` (this interface), and one file a kernel.
2. `refuses(plan)` says in a sentence why a plan cannot run, from the plan alone; None accepts.
3. `tile_candidates` lists tiles for autotuning; `refuses` refuses, by name, a tile that is asked for and cannot be had.
4. `forward` and `backward` take the plan and its operands and return what `Results` and `Gradients` document. `lowering`
   surrounds their lowering; most have nothing to do there (contextlib.nullcontext).
5. Import only plan, block_mask types, trace, tile_math and runtime; never attention, dispatch or another backend.
6. Name it in `dispatch.py`'s table, and add a thin test file that puts it through `tests/backends/conformance.py`.
"""

import contextlib
import typing

import jax
from jax.interpreters import mlir

from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.trace.mod_ir import Program


class Backend(typing.Protocol):
    """One way to run a plan."""

    name: str

    def refuses(self, plan: KernelPlan) -> str | None:
        """A sentence that says why this backend cannot run the plan, None if it can. Pure."""
        ...

    def refuses_backward(self, plan: KernelPlan, wanted: Wanted, derivative: Program | None) -> str | None:
        """A sentence that says why it cannot compute these gradients, None if it can; xla then does. Pure."""
        ...

    def tile_candidates(self, plan: KernelPlan) -> list[dict[str, int]]:
        """Values for KernelOptions that are worth timing, of both passes, those that run by themselves first. Pure."""
        ...

    def forward(self, plan: KernelPlan, operands: Operands) -> Results: ...

    def backward(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        d_out: jax.Array,
        d_lse: jax.Array | None,
        wanted: Wanted,
        derivative: Program | None,
    ) -> Gradients:
        """Cotangents of the wanted operands; `derivative` is score_mod's derivative program (None: identity)."""
        ...

    def lowering(self, module: mlir.ModuleContext) -> contextlib.AbstractContextManager[None]:
        """Surrounds the lowering of a pass into the module; what was lowered is a backend's to look after."""
        ...
