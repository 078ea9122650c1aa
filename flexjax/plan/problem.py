"""The static side of a call: a plan, the derivative of its score_mod, and the backend that runs it."""

import dataclasses
import typing
from collections.abc import Sequence

import jax

from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.trace.mod_ir import Program

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the primitives of autodiff.py carry as their parameter.

    derivative   score_mod's derivative program, None where there is no score_mod or it has none; then `why_not` says why
    structure    tree of the operands
    """

    plan: KernelPlan
    derivative: Program | None
    why_not: str
    backend: str
    structure: typing.Any

    def operands(self, flat: Sequence[Array]) -> Operands:
        return jax.tree.unflatten(self.structure, flat)

    def arrange(self, flat: Sequence[object]) -> typing.Any:
        """Other things, one for each array, in the places of the operands."""
        return jax.tree.unflatten(self.structure, flat)

    def differentiable(self) -> "Problem":
        """The same on xla, with loops of known length."""
        plan = dataclasses.replace(self.plan, differentiable=True)
        return dataclasses.replace(self, plan=plan, backend="xla")

    def needed_derivative(self) -> Program | None:
        if self.plan.score is not None and self.derivative is None:
            raise ValueError(self.why_not)
        return self.derivative
