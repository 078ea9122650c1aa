"""Attention whose arrays are split over automatic mesh axes: every device computes its share of the batch and the heads.

Automatic axes (AxisType.Auto) are those over which XLA's partitioner decides how arrays are split, when it compiles. `rule_of` is
the partitioning rule (flexjax/partition.py) of a primitive of autodiff.py. A device runs the same primitive on its share
(split.py), and gradients of what several devices share are summed over them.

Only splits of the batch and the heads are kept; the partitioner gathers what is split otherwise (gathers.py says so).

A Split says over which mesh axes the batch and the heads of the work are split.

A plan (KernelPlan) is everything static about one call; operands are its arrays; a problem is a plan with the derivative program
of score_mod and the backends to ask (plan/problem.py).
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import Primitive

from flexjax.parallel.gathers import warn_of_gathers
from flexjax.parallel.split import (
    Split,
    choose_split,
    cut_to_own_heads,
    gradients_of_parts,
    moved_places,
    primitive_dims,
    share_of,
    spec_of,
    with_starts,
)
from flexjax.partition import Mesh, Rule, Spec
from flexjax.plan.problem import Problem
from flexjax.plan.tuned import plan_text, versions

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """A primitive of autodiff.py with its parameters: one forward pass, tangent or backward pass, before it is split.

    problem  the primitive's static parameter, of the whole call
    params   its other parameters: {} for forward; `moving` (which movable operands have a tangent) for tangent; `wanted` (which of them get
             a gradient) and `has_lse` for backward

    The arguments of the primitive are the operands; for tangent and backward also out, lse and, where captured gradients are exact,
    rounding; then the tangents of the moving operands, or the cotangents of out and, with has_lse, of lse.
    """

    primitive: Primitive
    problem: Problem
    params: Mapping[str, typing.Any]

    def dims(self) -> tuple[list[str], list[str]]:
        """For each argument of the primitive, and for each of its results, the names of its dimensions, such as "b t h d".

        `operand_dims` (split.py) lists the names. Dimensions with one name have one size and are split alike. The arguments are those
        of the class. The results are out, lse and, where the plan has them, max_scores and rounding for forward; the tangents of out
        and lse for tangent; the gradients of the wanted operands for backward. All are in the order of the plan's layout.
        """
        return primitive_dims(self.problem, self.params, rounding=self.problem.plan.exact_captures)

    def on_share(self, split: Split, *flat: Array) -> list[Array]:
        """The results of one device's share of the call: binds the same primitive on that share.

        Called on each device, by the partitioner.

        split   over which axes the batch and the heads are split
        flat    the device's parts of the arguments of the primitive

        Returns the device's parts of the results. A gradient has the shape of the device's part of its operand (a
        device that uses some of its key heads has 0 for the others) and is summed over the devices that hold the same
        part.
        """
        problem, n = self.problem, self.problem.structure.num_leaves
        own_problem, own = share_of(problem, problem.operands(flat[:n]), split)
        starts = len(own.score_captures) - len(problem.operands(flat[:n]).score_captures)
        bind = functools.partial(self.primitive.bind, problem=own_problem, **with_starts(self.params, starts))
        rest, places = flat[n:], moved_places(problem, self.params)
        if "moving" in self.params:
            cut, fixed = cut_to_own_heads(problem, split), problem.residuals
            rest = (*rest[:fixed], *(cut(x, place) for x, place in zip(rest[fixed:], places, strict=True)))
        results = bind(*jax.tree.leaves(own), *rest)
        if "wanted" not in self.params:
            return results
        specs = [spec_of(problem.plan, dims, split) for dims in self.dims()[1]]
        return gradients_of_parts(problem, split, flat, places, results, specs, (*split.batch, *split.heads))


def rule_of(call: Call, mesh: Mesh) -> Rule:
    """The partitioning rule of one primitive of autodiff.py on a mesh of automatic axes.

    The rule names the dimensions of all arguments and results, chooses the axes that split the batch and the heads
    (`choose_split`), and computes one device's share by the same primitive (`Call.on_share`). Its text has everything that the
    results depend on, because the compilation cache compares the text and not the rule. The rule of a forward pass also warns of
    operands that are gathered (gathers.py).
    """
    problem, plan = call.problem, call.problem.plan
    arguments, results = call.dims()

    def look(split: Split, operands: Sequence[typing.Any], specs: Sequence[Spec]) -> None:
        """Warns if the forward pass gathers operands, which are given as shapes, split by `specs`, while the work is split by `split`;
        nothing in tangent and backward passes.
        """
        if not call.params:  # the forward pass, which is in every program
            warn_of_gathers(problem, split, operands, specs)

    derivative = None if problem.derivative is None else problem.derivative.key
    parts = (
        versions(),
        call.primitive.name,
        plan_text(plan),
        derivative,
        problem.implementation,
        sorted(call.params.items()),
    )
    return Rule(
        arguments,
        results,
        choose=lambda dims, specs: choose_split(plan, mesh, dims, specs),
        spec=lambda split, dims: spec_of(plan, dims, split),
        on_device=call.on_share,
        look=look,
        text=repr(parts),
    )
