"""The xla backend: attention in plain JAX, which runs every plan on every platform."""

import jax

from flexjax.backends.base import ForwardMode
from flexjax.backends.target import Target
from flexjax.backends.xla import canonical, larger_blocks
from flexjax.backends.xla.backward import backward
from flexjax.backends.xla.forward import forward
from flexjax.backends.xla.tangent import tangent
from flexjax.backends.xla.tile_sizes import TileSizes, choose_tile_sizes, tile_candidates
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs
from flexjax.plan.rewrite import Steps, chain, last_plan


class XlaBackend(ForwardMode):
    """Blockwise attention as XLA loops (see backends/base.py). It refuses no plan, gradient or tangent, and cuts a tile
    of the options that does not fit (tile_sizes.choose_tile_sizes).
    """

    name = "xla"

    def rewrites(self, plan: KernelPlan, target: Target, backward: bool = False) -> Steps:
        """Unless the target is a CPU, mask blocks are merged to larger ones, or dropped."""
        return chain(plan, lambda plan: larger_blocks.rewrite(plan, target, backward))

    def tile_sizes(self, plan: KernelPlan, target: Target) -> TileSizes | str:
        """The tiles with which the forward pass runs on the target, for `explain`."""
        return invariant.TILES if plan.options.invariant else self._sizes(plan, target)

    def _sizes(self, plan: KernelPlan, target: Target) -> TileSizes:
        return choose_tile_sizes(last_plan(plan, self.rewrites(plan, target)), target)

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Tiles for autotuning, the same for both passes; the default of the forward pass is first."""
        return tile_candidates(last_plan(plan, self.rewrites(plan, target)), target)

    def reads(self, plan: KernelPlan, target: Target) -> str | None:
        if not plan.page or plan.options.invariant:
            return None
        sizes = self._sizes(plan, target)
        items = f"{sizes.steps} work item{'s' * (sizes.steps != 1)} (tile rows), one after the other"
        return f"{items}, {sizes.chunk * sizes.block_kv} keys a step; keys are not split"

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass of the plan: out, lse, and max_scores and rounding if it asks for them (Results)."""
        return canonical.forward(plan, operands) if plan.options.invariant else forward(plan, operands, target)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands.

        Of a partial plan, those of query, key, value and extra features are in the dtype of scores.
        """
        return backward(plan, given, target)

    def tangent(self, plan: KernelPlan, given: TangentInputs, target: Target) -> tuple[jax.Array, ...]:
        return tangent(plan, given, target)
