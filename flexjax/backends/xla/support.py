"""The xla backend: plain JAX, runs everywhere, takes every plan."""

import contextlib

import jax
from jax.interpreters import mlir

from flexjax.backends.target import Target
from flexjax.backends.xla.backward import backward
from flexjax.backends.xla.forward import forward
from flexjax.backends.xla.schedule import Schedule, choose, tile_candidates
from flexjax.backends.xla.tangent import tangent
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted


class XlaBackend:
    """Blockwise attention as XLA loops (see backends/base.py). It alone has forward mode."""

    name = "xla"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """Never: a tile of the options that does not suit its loops gives way to one that does (schedule.choose)."""
        return None

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        return None

    def schedule(self, plan: KernelPlan, target: Target) -> Schedule:
        """The tiles it will use in the forward pass."""
        return choose(plan, target)

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Values for KernelOptions that are worth timing, the default's own first."""
        return tile_candidates(plan, target)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        return forward(plan, operands, target)

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
        return backward(plan, operands, results, d_out, d_lse, wanted, derivative, target)

    def tangent(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        tangents: Gradients,
        derivative: Program | None,
        target: Target,
    ) -> tuple[jax.Array, jax.Array]:
        return tangent(plan, operands, results, tangents, derivative, target)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
