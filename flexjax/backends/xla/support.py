"""The xla backend: plain JAX, runs everywhere, takes every plan."""

import jax

from flexjax.backends.xla.backward import backward
from flexjax.backends.xla.forward import forward
from flexjax.backends.xla.schedule import Schedule, choose
from flexjax.backends.xla.tangent import tangent
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.trace.mod_ir import Program


class XlaBackend:
    """Blockwise attention as XLA loops (see backends/base.py). It alone has forward mode."""

    name = "xla"

    def refuses(self, plan: KernelPlan) -> str | None:
        options, blocks = plan.options, plan.blocks
        if blocks is not None and options.block_q not in (None, blocks.block_q):
            return (
                f"xla visits whole blocks of the block mask: block_q={options.block_q} is not its query block "
                f"size {blocks.block_q}."
            )
        if blocks is not None and options.block_kv is not None and options.block_kv % blocks.block_kv:
            return (
                f"xla visits whole blocks of the block mask: block_kv={options.block_kv} is not a multiple of its "
                f"key block size {blocks.block_kv}."
            )
        return None

    def refuses_backward(self, plan: KernelPlan, wanted: Wanted, derivative: Program | None) -> str | None:
        return None

    def schedule(self, plan: KernelPlan) -> Schedule:
        """The tiles it will use."""
        return choose(plan)

    def forward(self, plan: KernelPlan, operands: Operands) -> Results:
        return forward(plan, operands)

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
        return backward(plan, operands, results, d_out, d_lse, wanted, derivative)

    def tangent(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        tangents: Gradients,
        derivative: Program | None,
    ) -> tuple[jax.Array, jax.Array]:
        return tangent(plan, operands, results, tangents, derivative)
