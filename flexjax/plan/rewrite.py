"""A call written as another call, and a pass run through such steps.

    the call -> step 1 -> .. -> step n -> the kernel -> step n -> .. -> step 1 -> what the call returns

`rewrites/` has a file for each step that several backends may take; `Backend.rewrites` says which ones a backend takes.
"""

import typing
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, TangentInputs


class Rewrite(typing.NamedTuple):
    """One step: a call, and the new call that is run in its place. A field that is left out changes nothing."""

    plan: KernelPlan  # of the new call
    why: str  # what is rewritten, and why: a sentence for explain
    operands: Callable[[Operands], Operands] = lambda operands: operands  # the call's -> the new call's
    results: Callable[[Results, Operands], Results] = lambda results, operands: results  # the new call's -> the call's
    # of the backward pass, what the call gives -> what the new call gives, but for `operands`
    given: Callable[[BackwardInputs], BackwardInputs] = lambda given: given
    gradients: Callable[[Gradients, BackwardInputs], Gradients] = lambda gradients, given: gradients  # as `results`


Steps = tuple[Rewrite, ...]


def chain(plan: KernelPlan, *rewrites: Callable[[KernelPlan], Rewrite | None]) -> Steps:
    """The steps of a call, each made from the plan of the one before; those that are None are left out."""
    steps: Steps = ()
    for rewrite in rewrites:
        step = rewrite(last_plan(plan, steps))
        steps += () if step is None else (step,)
    return steps


def last_plan(plan: KernelPlan, steps: Steps) -> KernelPlan:
    """The plan that the kernel runs."""
    return steps[-1].plan if steps else plan


def last_operands(steps: Sequence[Rewrite], operands: Operands) -> Operands:
    """The operands that the kernel gets."""
    for step in steps:
        operands = step.operands(operands)
    return operands


def last_inputs(steps: Sequence[Rewrite], given: TangentInputs) -> TangentInputs:
    """What the kernel of forward mode gets: every step is linear in what may move, and none changes the results."""
    operands, tangents = given.operands, given.tangents
    zeros = lambda x, t: None if x is None else jnp.zeros_like(x) if t is None else t
    moved = operands._replace(
        **{name: zeros(getattr(operands, name), t) for name, t in zip(Operands._fields, tangents[:-1], strict=False)},
        score_captures=tuple(map(zeros, operands.score_captures, tangents.score_captures)),
    )
    made = last_operands(steps, moved)
    query, key = tangents.query, tangents.key
    if made.query_extra is None:  # extra features are a part of the head dim
        query = tangents.query_extra if query is None else query
        key = tangents.key_extra if key is None else key
    moves = tangents._replace(query=query, key=key)
    found = Gradients.of([x if t is not None else None for x, t in zip(made.movable, moves.flat, strict=True)])
    return given._replace(operands=last_operands(steps, operands), tangents=found)


def forward(steps: Steps, operands: Operands, kernel: Callable[[Operands], Results]) -> Results:
    """The forward pass of a call: its operands through the steps, the kernel, and results back through the steps."""
    if not steps:
        return kernel(operands)
    first, *rest = steps
    return first.results(forward(tuple(rest), first.operands(operands), kernel), operands)


def backward(steps: Steps, given: BackwardInputs, kernel: Callable[[BackwardInputs], Gradients]) -> Gradients:
    """The backward pass of a call, as `forward`."""
    if not steps:
        return kernel(given)
    first, *rest = steps
    operands = first.operands(given.operands)
    new = first.given(given)._replace(operands=operands)
    return first.gradients(backward(tuple(rest), new, kernel), given)
