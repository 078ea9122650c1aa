"""vmap of attention as attention: a mapped axis of V becomes part of the batch, V * B entries, one launch.

Entry b of the folded problem is entry b % B of copy b // B. Arrays that lead with the batch are reshaped (broadcast first if
they are not mapped); programs read the captured arrays that are mapped at copy b // B. What cannot fold, mapped sinks and
arrays that a loop inside a mod reads whole, is mapped by a loop.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.problem import Problem
from flexjax.trace.fold import fold_batch
from flexjax.trace.mod_ir import Program

Array = jax.Array


class Folded(typing.NamedTuple):
    """Arguments, static side and parameters of the folded call, and how to take its results apart."""

    arguments: list[Array]
    problem: Problem
    unfold: Callable[[Sequence[Array]], list[Array]]


class CannotFold(Exception):
    """This call has to be mapped by a loop."""


def batch_rule(
    primitive: object, problem: Problem, flat: Sequence[Array], mapped: Sequence[bool], params: dict
) -> list:
    """Results with the mapped axis in front; `flat` has it in front where `mapped`."""
    size = next(x.shape[0] for x, m in zip(flat, mapped, strict=True) if m)
    try:
        folded = fold(problem, list(flat), list(mapped), size, params.get("wanted"))
    except CannotFold:
        return _loop(primitive, problem, flat, mapped, params)
    return folded.unfold(primitive.bind(*folded.arguments, problem=folded.problem, **params))


def _loop(primitive: object, problem: Problem, flat: Sequence[Array], mapped: Sequence[bool], params: dict) -> list:
    def one(parts: list[Array]) -> list[Array]:
        rest = iter(parts)
        whole = [next(rest) if m else x for x, m in zip(flat, mapped, strict=True)]
        return primitive.bind(*whole, problem=problem, **params)

    return lax.map(one, [x for x, m in zip(flat, mapped, strict=True) if m])


def fold(
    problem: Problem, flat: list[Array], mapped: list[bool], size: int, wanted: tuple[bool, ...] | None
) -> Folded:
    """Folds an axis of `size`. `flat` are the operands, then (tangent, backward) arrays that all move with an operand.

    wanted    for the backward primitive, which operands get a gradient: those gradients stay apart for each copy
    """
    plan = problem.plan
    n = problem.structure.num_leaves
    operands = jax.tree.unflatten(problem.structure, flat[:n])
    flags: Operands = jax.tree.unflatten(problem.structure, mapped[:n])
    if operands.sinks is not None and (flags.sinks or (wanted is not None and wanted[5])):
        raise CannotFold
    if len(flat) > n + 2 and wanted is None:
        raise CannotFold  # forward mode under vmap: the tangents of captures would need copies of their own
    mapped_scores = list(flags.score_captures)
    if wanted is not None:
        mapped_scores = [m or w for m, w in zip(mapped_scores, wanted[6:], strict=True)]
    score = _program(plan.score, size, plan.batch, mapped_scores)
    derivative = _program(problem.derivative, size, plan.batch, mapped_scores)
    mask = _program(plan.mask, size, plan.batch, flags.mask_captures)
    dropout = _program(plan.dropout, size, plan.batch, flags.dropout_captures)

    lead = lambda x, m: None if x is None else _lead(x, m, size)
    lists, lists_batch = _lists(plan, operands, flags, size)
    folded = Operands(
        *(lead(x, m) for x, m in zip(operands[:5], flags[:5], strict=True)),
        operands.sinks,
        tuple(
            x if m or not want else jnp.broadcast_to(x, (size, *x.shape))
            for x, m, want in zip(operands.score_captures, flags.score_captures, mapped_scores, strict=True)
        ),
        operands.mask_captures,
        operands.dropout_captures,
        lists,
    )
    rest = [lead(x, m) for x, m in zip(flat[n:], mapped[n:], strict=True)]
    blocks = None if plan.blocks is None else dataclasses.replace(plan.blocks, batch=lists_batch)
    new_plan = dataclasses.replace(
        plan, batch=size * plan.batch, score=score, mask=mask, dropout=dropout, blocks=blocks
    )
    new_problem = dataclasses.replace(problem, plan=new_plan, derivative=derivative)
    captures_from = None if wanted is None else sum(wanted[:6])

    def unfold(outs: Sequence[Array]) -> list[Array]:
        """Gradients of captures already have the axis in front."""
        led = outs if captures_from is None else outs[:captures_from]
        apart = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in led]
        return apart + list(outs[len(led) :])

    return Folded([*jax.tree.leaves(folded), *rest], new_problem, unfold)


def _program(program: Program | None, size: int, batch: int, mapped: Sequence[bool]) -> Program | None:
    if program is None or not (any(mapped) or program.reads("b")):
        return program
    if any(isinstance(a, int) and mapped[a] for call in program.calls for a in call.arguments):
        raise CannotFold
    return fold_batch(program, size, batch, mapped)


def _lead(x: Array, mapped: bool, size: int) -> Array:
    """[V, B, ...] or [B, ...] as [V * B, ...]."""
    whole = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return whole.reshape(size * whole.shape[1], *whole.shape[2:])


def _lists(plan: KernelPlan, operands: Operands, flags: Operands, size: int) -> tuple[object, int]:
    """The block lists for the folded batch and their batch size: still 1 where all copies and entries share them."""
    if operands.lists is None or plan.blocks is None:
        return operands.lists, 0
    if plan.blocks.batch == 1 and not any(jax.tree.leaves(flags.lists)):
        return operands.lists, 1

    def spread(x: Array, mapped: bool) -> Array:
        whole = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        whole = jnp.broadcast_to(whole, (size, plan.batch, *whole.shape[2:]))
        return whole.reshape(size * plan.batch, *whole.shape[2:])

    return jax.tree.map(spread, operands.lists, flags.lists), size * plan.batch
