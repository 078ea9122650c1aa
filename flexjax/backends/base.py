"""The interface of a backend: one way to run a plan; and how to add a backend.

To add a backend:
  1. Make a folder `backends/<name>/` with `support.py` (this interface), and one file for each kernel; its notes are
     `lab/notes/<name>.md`.
  2. `refuses(plan, target)` returns a sentence that says why the plan cannot run on the target, or None to accept it.
  3. `tile_candidates` returns tiles for autotuning; `refuses` refuses a tile of the options that cannot run.
  4. `rewrites` says which other call runs in place of a plan (plan/rewrite.py). `forward` and `backward` take the plan
     of the last one, its operands and the target, and return what `Results` and `Gradients` document.
  5. Import only plan, rewrites, block_mask, trace, analysis, ir, integers, types, errors and varying, and of this
     folder base, target and tile_math; never attention, dispatch or another backend.
  6. Name it in `passes/dispatch.py`'s table, and add a thin test file that puts it through
     `tests/backends/conformance.py`.
"""

import contextlib
import dataclasses
import typing

import jax
from jax.interpreters import mlir

from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import (
    FLOAT8,
    BackwardInputs,
    Gradients,
    KernelPlan,
    Operands,
    Results,
    TangentInputs,
    Wanted,
)
from flexjax.plan.rewrite import Steps


def rule_not_linear(hardware: str) -> str:
    """The refusal of kernels for `hardware` of a derivative program that takes the cotangent of the new score."""
    return (
        f"The {hardware} kernels multiply the cotangent of the score by derivatives, and score_mod has a derivative "
        "rule that is not linear in the cotangent. A rule that scales the cotangent by a number that does not depend "
        "on it keeps the kernels."
    )


def refuses_gpu_options_and_float8(name: str, plan: KernelPlan) -> str | None:
    """The refusal, by the backend `name`, of float8 and of options for the kernels of a GPU; None for other plans."""
    if plan.float8:
        return f"{name} does not multiply {FLOAT8}."
    for field in dataclasses.fields(plan.options):
        value = getattr(plan.options, field.name)
        if "gpu" in field.metadata and value != field.default:
            return f"kernel_options.{field.name}={value!r} is for the kernels of mosaic_gpu; {name} has no such choice."
    return None


class WorkItems(typing.NamedTuple):
    """How a kernel for few queries divides the keys of a call."""

    chunk: int  # keys of a work item, of one key head of a batch entry
    ctas: int  # of a full grid
    as_on_h200: bool  # whether an H200's rates predict the time


class Backend(typing.Protocol):
    """One way to run a plan: a set of kernels, or plain JAX. A backend derives from this class and says what differs
    from a backend that refuses nothing and has one tile. `name` is what `implementation` calls it.
    """

    name: str
    simulates_in_jit: bool = (
        True  # whether kernels simulated by `kernel_options.interpret` may be part of a jitted function
    )
    slow_to_lower: bool = False  # whether a pass takes so long to lower that its module is kept for the next equal one

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """A sentence: why this backend cannot run the forward pass of the plan on the target; None if it can. Pure.

        The target is of the backend's own platform; in the simulator it may be any. Without a target the sentence says
        why none can run the plan.
        """
        return None

    def refuses_request(self, plan: KernelPlan) -> str | None:
        """A sentence: what product or instruction of the call this backend does not know; None if it knows all. Pure.

        It is not asked where the backend takes over a pass from another one.
        """
        return refuses_gpu_options_and_float8(self.name, plan)

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """A sentence: why this backend cannot compute these gradients of an accepted plan; None if it can. Pure.

        The backend xla then computes the whole backward pass.
        """
        return None

    def refuses_tangent(
        self, plan: KernelPlan, target: Target, moving: Wanted, derivative: Program | None
    ) -> str | None:
        """A sentence that says why this backend cannot compute the tangents of the results of a plan that it accepted,
        from tangents of the operands `moving`; None if it can, and is a `ForwardMode`. Pure.

        The backend xla then computes them.
        """
        return None

    def rewrites(self, plan: KernelPlan, target: Target, backward: bool = False) -> Steps:
        """The steps from an accepted plan to the call that a kernel of the pass runs; () for the plan itself. Pure."""
        return ()

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """The tiles that flexjax.autotune times for the plan: dicts from fields of KernelOptions (block_q, ...) to
        sizes, in tokens. Pure.

        autotune reads the fields of the two passes from every dict separately. The forward tile that runs without
        options comes first; so does the backward tile, except that xla gives the forward tile for both passes.
        """
        return []

    def tile_sizes(self, plan: KernelPlan, target: Target) -> object | None:
        """The tiles with which an accepted plan runs, which `flexjax.explain` prints; None if it does not say. Pure."""
        return None

    def reads(self, plan: KernelPlan, target: Target) -> WorkItems | str | None:
        """How an accepted forward pass reads keys and values, for `flexjax.explain`: the work items of a kernel for few
        queries; for other calls with keys in pages a sentence; None where there is nothing to say. Pure.
        """
        return None

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """The forward pass of the last plan of `rewrites`, as Results documents it."""
        ...

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """The gradients of the wanted operands, for the last plan of `rewrites`; None for the others.

        Those of a partial plan may be in the dtype of scores, and the caller casts them.
        """
        ...

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """A context in which a pass is lowered, for backends that change or check the MLIR module."""
        return contextlib.nullcontext()


@typing.runtime_checkable
class ForwardMode(Backend, typing.Protocol):
    """A backend that also has forward mode."""

    def tangent_steps(self, plan: KernelPlan, target: Target) -> Steps:
        """`rewrites` for `tangent`. Pure."""
        return self.rewrites(plan, target)

    def describe_tangent(self, plan: KernelPlan, target: Target) -> str | None:
        """The kernel of `tangent` with its tile, for `flexjax.explain`; None if there is nothing to say. Pure."""
        return None

    def tangent(self, plan: KernelPlan, given: TangentInputs, target: Target) -> tuple[jax.Array, ...]:
        """(tangent of out, of lse) and perhaps of expectations, in their shapes, for the last of `tangent_steps`."""
        ...
