"""The static parameter of the JAX primitives of a call: the plan, the derivative of its score_mod, and the allowed backends."""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax

from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static parameter that the primitives of autodiff.py carry.

    derivative      score_mod's derivative program, None where there is no score_mod or it has none; then `why_not` says why
    implementation  names of backends in the order in which they are asked once the platform is known; None: the default order
    structure       tree of the operands
    call            the user's call in a line, for errors and warnings; two problems that differ in it alone are equal
    settings        enters the settings of jax under which the call is lowered, where another thread lowers a device's
                    share of it (parallel/auto_axes.py); not compared either
    """

    plan: KernelPlan
    derivative: Program | None
    why_not: str
    implementation: tuple[str, ...] | None
    structure: typing.Any
    call: str = dataclasses.field(default="", compare=False)
    settings: Callable[[], contextlib.AbstractContextManager] = dataclasses.field(
        default=contextlib.nullcontext, compare=False
    )

    def operands(self, flat: Sequence[Array]) -> Operands:
        return jax.tree.unflatten(self.structure, flat)

    def arrange(self, flat: Sequence[object]) -> typing.Any:
        """Objects given for each array, arranged as the fields of Operands are."""
        return jax.tree.unflatten(self.structure, flat)

    def differentiable(self) -> "Problem":
        """The problem with loops of known length, which jax differentiates in reverse mode; only xla has such loops."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, differentiable=True))

    def needed_derivative(self) -> Program | None:
        if self.plan.score is not None and self.derivative is None:
            raise ValueError(self.why_not)
        return self.derivative
