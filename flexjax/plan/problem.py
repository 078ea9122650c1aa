"""The static parameter of the JAX primitives of a call: the plan, the derivative of its score_mod, and the allowed backends.

The operands of a primitive are a flat list of arrays. `Problem.structure` says which field of Operands each array belongs to.
"""

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

    plan             of the call
    derivative       score_mod's derivative program (score, d score / d raw score, d score / d each load); None where there is
                     no score_mod or no derivative of it
    why_not          why score_mod has no derivative: the message of an error; "" where it has one or there is no score_mod
    implementation   names of backends in the order in which they are asked once the platform is known; None: the default order
    structure        jax tree structure of the Operands; it has a leaf for each array of the call
    call             the user's call in a line, for errors and warnings; two problems that differ in it alone are equal
    settings         enters the settings of jax under which the call is lowered, where another thread lowers a device's share of
                     it (parallel/auto_axes.py); not compared either
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
        """The Operands whose leaves are the arrays of the flat list; the inverse of jax.tree.leaves."""
        return jax.tree.unflatten(self.structure, flat)

    def arrange(self, flat: Sequence[object]) -> typing.Any:
        """An Operands tuple with the objects of `flat` in place of the arrays: the n-th object stands where the n-th leaf does.

        `arrange(range(n))` says, for each operand, its index in the flat list; None for an operand that the call lacks.
        """
        return jax.tree.unflatten(self.structure, flat)

    def differentiable(self) -> "Problem":
        """This problem with plan.differentiable set: the xla backend then runs loops of known length, which jax can
        differentiate in reverse mode. The kernels of GPUs and TPUs refuse such a plan.
        """
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, differentiable=True))

    @property
    def residuals(self) -> int:
        """How many arrays of the forward pass the tangent and backward passes get: 2 (out and lse), or 3 with rounding if the plan has
        `exact_captures`.
        """
        return 2 + self.plan.exact_captures

    def for_captures(self) -> "Problem":
        """This problem with plan.exact_captures set, for a call whose captured arrays are differentiated; itself if inputs have
        more than 16 bits.
        """
        if self.plan.dtype not in ("bfloat16", "float16"):
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, exact_captures=True))

    def needed_derivative(self) -> Program | None:
        """score_mod's derivative program for a pass that needs it; None without score_mod.

        Raises ValueError with `why_not` if there is a score_mod and its derivative is missing.
        """
        if self.plan.score is not None and self.derivative is None:
            raise ValueError(self.why_not)
        return self.derivative
