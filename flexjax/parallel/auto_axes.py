"""Attention over automatic mesh axes: every device computes its share of the batch and the heads.

Automatic axes (AxisType.Auto) are those over which XLA's partitioner decides how arrays are split, when it compiles.
`rule_of` is the partitioning rule (flexjax/partition.py) of a primitive of passes/autodiff.py. Only splits of the batch
and the heads are kept; the partitioner gathers what is split otherwise (gathers.py says so).
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
from flexjax.plan.tuned import call_text

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SplitPrimitive:
    """A primitive of passes/autodiff.py with its parameters, before it is split."""

    primitive: Primitive
    problem: Problem  # of the whole call
    params: Mapping[str, typing.Any]  # beside the problem, see split.py

    def dims(self) -> tuple[list[str], list[str]]:
        """The dimension names, such as "b t h d", of (each argument of the primitive, each result)."""
        return primitive_dims(self.problem, self.params, residuals=self.problem.residuals)

    def on_share(self, split: Split, *flat: Array) -> list[Array]:
        """One device's parts of the results: binds the same primitive on its share. The partitioner calls it."""
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


def rule_of(call: SplitPrimitive, mesh: Mesh, device: str | None) -> Rule:
    """The partitioning rule of a primitive of passes/autodiff.py on a mesh of automatic axes, on devices of a kind."""
    problem, plan = call.problem, call.problem.plan
    arguments, results = call.dims()

    def look(split: Split, operands: Sequence[typing.Any], specs: Sequence[Spec]) -> None:
        """Warns if the forward pass gathers operands."""
        if not call.params:  # the forward pass, which is in every program
            warn_of_gathers(problem, split, operands, specs)

    derivative = None if problem.derivative is None else problem.derivative.key
    parts = (
        call.primitive.name,
        call_text(plan, device),
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
