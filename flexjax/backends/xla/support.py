"""The xla backend: attention in plain JAX, which runs every plan on every platform.

The methods that backends/base.py documents do here what it says; forward, backward and tangent are in the files of these names.
"""

import contextlib

import jax
from jax.interpreters import mlir

from flexjax.backends.base import BackwardInputs
from flexjax.backends.target import Target
from flexjax.backends.xla.backward import backward
from flexjax.backends.xla.forward import forward
from flexjax.backends.xla.larger_blocks import on_larger_blocks, plan_on_larger_blocks
from flexjax.backends.xla.tangent import tangent
from flexjax.backends.xla.tile_sizes import TileSizes, choose_tile_sizes, tile_candidates
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted


class XlaBackend:
    """Blockwise attention as XLA loops (see backends/base.py). The only backend with forward mode (`tangent`)."""

    name = "xla"

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """None: it runs every plan, and cuts a tile of the options that does not fit (tile_sizes.choose_tile_sizes)."""
        return None

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """None, whatever the arguments are: it computes all gradients of every plan, also where another backend refuses them."""
        return None

    def tile_sizes(self, plan: KernelPlan, target: Target) -> TileSizes:
        """The tiles with which the forward pass runs on the target, for `explain`."""
        return choose_tile_sizes(plan_on_larger_blocks(plan, target), target)

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """Tiles for autotuning, dicts of KernelOptions fields with the same tile for both passes, the default of the forward
        pass first.
        """
        return tile_candidates(plan_on_larger_blocks(plan, target), target)

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass of the plan: out, lse, and max_scores and rounding if it asks for them (Results). Unless the target is
        a CPU, its mask blocks are first merged to larger ones, or dropped where one would cover the attention matrix
        (larger_blocks.py).
        """
        return forward(*on_larger_blocks(plan, operands, target), target)

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands, in their shapes and dtypes; None for the others. Of a partial plan, those of
        query, key, value and extra features are in the dtype of scores. Mask blocks are first changed as for `forward`.

        given   operands, results, cotangents, what is wanted and the derivative program
        """
        plan, operands = on_larger_blocks(plan, given.operands, target, backward=True)
        return backward(plan, given._replace(operands=operands), target)

    def tangent(
        self,
        plan: KernelPlan,
        operands: Operands,
        results: Results,
        tangents: Gradients,
        derivative: Program | None,
        target: Target,
    ) -> tuple[jax.Array, jax.Array]:
        """(tangent of out, tangent of lse), in the shapes and dtypes of out and lse.

        results      of the forward pass
        tangents     of the operands, None where an operand has no tangent, which counts as 0
        derivative   program of score_mod's derivatives; None where score_mod is the identity
        """
        plan, operands = on_larger_blocks(plan, operands, target)
        return tangent(plan, operands, results, tangents, derivative, target)

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """An empty context: nothing about the lowered module changes."""
        return contextlib.nullcontext()
