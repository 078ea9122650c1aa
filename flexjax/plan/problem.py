"""The static parameter of the JAX primitives of a call: its plan, derivative of score_mod and allowed backends."""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax

from flexjax.errors import ModError
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands

Array = jax.Array


RULE_OF_SUMS = (
    "`score_mod` reads a captured array through a derivative rule that is not linear in the cotangent, of an "
    "argument that is not another at each entry of the attention matrix: jax would apply the rule to a sum over "
    "entries, which is known only when the backward pass ends. Apply the function to the whole array outside the "
    "mod, where the rule gets the gradient of the array, or hand it the score too."
)
NO_TANGENT = (
    "`score_mod` has a derivative rule that is not linear in the cotangent, so it has no tangent (jvp, linearize, "
    "jacfwd). Use reverse mode, or write a linear rule with jax.custom_jvp."
)


class After(typing.NamedTuple):
    """`derivative`, `again` and `refused` of a Problem that is being differentiated."""

    derivative: Program | None
    again: Program | str | None
    refused: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static parameter of the primitives of passes/autodiff.py; their operands are a flat list of arrays."""

    plan: KernelPlan
    derivative: Program | None  # of score_mod: (score, d score / d raw score, d score / d each load); None without
    # why score_mod has no derivative: the message of an error, about "`score_mod`" whatever `functions` are
    why_not: str
    # names of backends in the order in which they are asked; None: the default order
    implementation: tuple[str, ...] | None
    structure: typing.Any  # jax tree structure of the Operands; it has a leaf for each array of the call
    # the derivative with derivative rules in it, for second derivatives; a sentence that says why there are none. Not
    # compared: passes are compiled for `derivative`, and the text of a rule differs each time that it is traced
    again: Program | str | None = dataclasses.field(default=None, compare=False)
    # the derivatives in a call that is being differentiated, where jax differentiates the forward function of
    # jax.custom_vjp
    after: "After | None" = dataclasses.field(default=None, compare=False)
    refused: frozenset[int] = frozenset()  # numbers of captured arrays of score_mod that have no gradient
    call: str = dataclasses.field(default="", compare=False)  # the user's call in a line, for errors and warnings
    # the user's line, which an error that says `why_not` ends with
    place: str = dataclasses.field(default="", compare=False)
    # which arguments of the user are in the programs, as errors name them between backticks
    functions: str = dataclasses.field(default="score_mod", compare=False)
    # enters the settings of jax under which the call is lowered, where another thread lowers a device's share of it
    settings: Callable[[], contextlib.AbstractContextManager] = dataclasses.field(
        default=contextlib.nullcontext, compare=False
    )

    def operands(self, flat: Sequence[Array]) -> Operands:
        """The inverse of jax.tree.leaves."""
        return jax.tree.unflatten(self.structure, flat)

    def arrange(self, flat: Sequence[object]) -> typing.Any:
        """The Operands with the n-th object of `flat` in place of the n-th array."""
        return jax.tree.unflatten(self.structure, flat)

    def differentiable(self) -> "Problem":
        """This problem with plan.differentiable set; the kernels of GPUs and TPUs refuse such a plan."""
        if isinstance(self.again, str):
            raise ValueError(
                f"The second derivative of `{self.functions}` keeps its derivative rules, which do not fit: "
                + self._named(self.again)
            )
        plan = dataclasses.replace(self.plan, differentiable=True)
        return dataclasses.replace(self, plan=plan, derivative=self.again or self.derivative)

    @property
    def residuals(self) -> int:
        """How many arrays of the forward pass the other passes get: out, lse, rounding and expectations, as there are.

        None of a weighted plan, whose other passes read neither: nothing is kept, or computed again, for them.
        """
        return 0 if self.plan.weighted else 2 + self.plan.exact_captures + (self.plan.expectations > 0)

    def for_captures(self) -> "Problem":
        """This problem with plan.exact_captures set, if inputs have 16 bits and a backward pass forms delta of out."""
        if self.plan.dtype not in ("bfloat16", "float16") or self.plan.weighted:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, exact_captures=True))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of score_mod, which have the same captured arrays."""
        return tuple(p for p in self._slots if isinstance(p, Program))

    @property
    def _slots(self) -> tuple[Program | str | None, ...]:
        """All that may be in `programs`."""
        after = self.after or After(None, None, frozenset())
        return self.plan.score, self.derivative, self.again, after.derivative, after.again

    def with_programs(self, programs: Sequence[Program], plan: KernelPlan, operands: Operands) -> "Problem":
        """This problem for another plan, in which `programs` take the place of `self.programs`."""
        rest = iter(programs)
        score, derivative, again, *then = (next(rest) if isinstance(p, Program) else p for p in self._slots)
        first = typing.cast(Program | None, then[0])
        after = None if self.after is None else After(first, then[1], self.after.refused)
        plan = dataclasses.replace(plan, score=score)
        structure = jax.tree.structure(operands)
        return dataclasses.replace(
            self, plan=plan, derivative=derivative, again=again, after=after, structure=structure
        )

    def differentiated(self) -> "Problem":
        """This problem as jax runs it while it is differentiated."""
        after = self.after
        if after is None:
            return self
        return dataclasses.replace(
            self, derivative=after.derivative, again=after.again, refused=after.refused, after=None
        )

    def needed_derivative(self, captures: Sequence[bool] = ()) -> Program | None:
        """score_mod's derivative program for a pass that needs it; `captures`: by which arrays it differentiates."""
        if self.plan.score is not None and self.derivative is None:
            raise ModError(self._named(self.why_not) + self.place)
        if any(captures[i] for i in self.refused if i < len(captures)):
            raise ValueError(self._named(RULE_OF_SUMS))
        return self.derivative

    def linear_derivative(self) -> Program | None:
        """score_mod's derivative program for forward mode; ValueError if it takes a cotangent."""
        if self.refused or (self.derivative is not None and self.derivative.takes_cotangent):
            raise ValueError(self._named(NO_TANGENT))
        return self.derivative

    def _named(self, text: str) -> str:
        """A text about `score_mod` that names what the user gave."""
        return text.replace("`score_mod`", f"`{self.functions}`")
