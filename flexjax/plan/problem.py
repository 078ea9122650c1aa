"""The static side of a call: a plan, the derivative of its score_mod, and who may run it."""

import dataclasses
import typing
from collections.abc import Sequence

import jax

from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the primitives of autodiff.py carry as their parameter.

    derivative      score_mod's derivative program, None where there is no score_mod or it has none; then `why_not` says why
    implementation  names of backends in the order in which they are asked once the platform is known; None: the default order
    structure       tree of the operands
    call            the user's call in a line, for errors and warnings; two problems that differ in it alone are equal
    """

    plan: KernelPlan
    derivative: Program | None
    why_not: str
    implementation: tuple[str, ...] | None
    structure: typing.Any
    call: str = dataclasses.field(default="", compare=False)

    def operands(self, flat: Sequence[Array]) -> Operands:
        return jax.tree.unflatten(self.structure, flat)

    def arrange(self, flat: Sequence[object]) -> typing.Any:
        """Other things, one for each array, in the places of the operands."""
        return jax.tree.unflatten(self.structure, flat)

    def differentiable(self) -> "Problem":
        """The same with loops of known length, which reverse mode can cross; xla alone has them."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, differentiable=True))

    def needed_derivative(self) -> Program | None:
        if self.plan.score is not None and self.derivative is None:
            raise ValueError(self.why_not)
        return self.derivative
