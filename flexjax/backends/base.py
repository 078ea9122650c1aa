"""The interface of a backend: one way to run a plan; and how to add a backend.

To add a backend:
1. Make a folder `backends/<name>/` with `support.py` (this interface), one file for each kernel, and NOTES.md.
2. `refuses(plan, target)` returns a sentence that says why the plan cannot run on the target, or None to accept it.
3. `tile_candidates` returns tiles for autotuning; `refuses` refuses a tile that the options ask for and that cannot run.
4. `forward` and `backward` take the plan, its operands and the target, and return what `Results` and `Gradients` document.
   `lowering` returns a context in which they are lowered; most backends return contextlib.nullcontext().
5. Import only plan, block_mask, trace, analysis, ir, integers, types, errors and varying, and of this folder base, target and tile_math;
   never attention, dispatch or another backend.
6. Name it in `dispatch.py`'s table, and add a thin test file that puts it through `tests/backends/conformance.py`.

A plan is everything static about one attention call, operands are its arrays (plan/kernel_plan.py), and a target is the device
that the call is lowered for (target.py). A pure method depends on its arguments alone and has no side effects.
"""

import contextlib
import typing

import jax
from jax.interpreters import mlir

from flexjax.backends.target import Target
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted


class BackwardInputs(typing.NamedTuple):
    """What a backward pass gets beside the plan.

    operands       of the call
    results        of the forward pass; max_scores may be None
    d_out, d_lse   cotangents of out and lse, in their shapes; d_lse None for zero
    wanted         which operands get a gradient
    derivative     program of score_mod's derivatives (score, d score / d raw score, d score / d each load of a captured array of
                   floats); None where score_mod is the identity
    """

    operands: Operands
    results: Results
    d_out: jax.Array
    d_lse: jax.Array | None
    wanted: Wanted
    derivative: Program | None


class Backend(typing.Protocol):
    """One way to run a plan: a set of kernels, or plain JAX. `name` is what `implementation` calls it."""

    name: str

    def refuses(self, plan: KernelPlan, target: Target | None) -> str | None:
        """A sentence that says why this backend cannot run the forward pass of the plan on the target; None if it can. Pure.

        The target is of the backend's own platform; in the simulator it may be any. Without a target the question is whether some
        target can run the plan: the sentence says why none can.
        """
        ...

    def refuses_backward(
        self, plan: KernelPlan, target: Target, wanted: Wanted, derivative: Program | None
    ) -> str | None:
        """A sentence that says why this backend cannot compute the wanted gradients of a plan that it accepted; None if it can.

        The backend xla then computes the whole backward pass. Pure.

        wanted       which operands get a gradient
        derivative   program of score_mod's derivatives, as in `backward`
        """
        ...

    def tile_candidates(self, plan: KernelPlan, target: Target) -> list[dict[str, int]]:
        """The tiles that flexjax.autotune times for the plan, each a dict from fields of KernelOptions (block_q, block_kv, num_stages,
        block_q_bwd, block_kv_bwd) to sizes, in tokens except num_stages.

        plan     of the call; tiles that its options fix may be in the dicts, autotune leaves them out
        target   the device

        autotune reads the fields of the two passes from every dict separately; a dict without a pass's fields leaves nothing to
        choose in it. The forward tile that runs without options comes first; so does the backward tile, except that xla gives the
        forward tile for both passes. Pure.
        """
        ...

    def tile_sizes(self, plan: KernelPlan, target: Target) -> object | None:
        """The tiles with which an accepted plan runs on the target; `flexjax.explain` prints their text. None if the backend has no tiles or
        does not say. Pure.
        """
        ...

    def forward(self, plan: KernelPlan, operands: Operands, target: Target) -> Results:
        """Computes the forward pass: out, lse and, if the plan asks for them, max_scores and rounding, as Results documents
        them. The plan is one that `refuses` accepts.
        """
        ...

    def backward(self, plan: KernelPlan, given: BackwardInputs, target: Target) -> Gradients:
        """Computes the backward pass: the gradients of the wanted operands, in their shapes and dtypes; None for the others.
        Those of a partial plan may be in the dtype of scores, and the caller casts them.

        given   the operands, results and cotangents, what is wanted, and the derivative program
        """
        ...

    def lowering(self, module: mlir.ModuleContext, target: Target) -> contextlib.AbstractContextManager[None]:
        """A context in which a pass is lowered for the target into the MLIR module, for backends that change or check what is
        lowered; contextlib.nullcontext() for all others.
        """
        ...
