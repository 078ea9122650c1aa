"""vmap of attention as attention: a mapped axis of V becomes part of the batch, V * B entries, one launch.

Entry b of the folded problem is entry b % B of copy b // B. Arrays that lead with the batch are reshaped (broadcast first if
they are not mapped); programs read the captured arrays that are mapped at copy b // B. Sinks that differ between the copies are
joined to the folded result afterwards. What cannot fold, a mapped array that a loop inside a mod reads whole, is mapped by a
loop.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from flexjax.backends import tile_math
from flexjax.ir.fold_vmap import fold_batch
from flexjax.ir.program import Program
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.plan.problem import Problem

Array = jax.Array

SINKS, FIRST_CAPTURE = 5, 6
"""Places in Operands.movable, Gradients and Wanted."""


class Folded(typing.NamedTuple):
    """Arguments and static side of the folded call, and how to take its results apart."""

    arguments: list[Array]
    problem: Problem
    unfold: Callable[[Sequence[Array]], list[Array]]


class CannotFold(Exception):
    """This call has to be mapped by a loop."""


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A mapped call of one of the primitives of autodiff.py.

    flat     operands, then for tangent and backward out and lse, then the tangents or the cotangents of out and lse; the mapped
             axis, of `size`, is in front where `axes` says so
    moving   tangent: which movable operands have a tangent
    wanted   backward: which of them get a gradient, apart for each copy
    """

    primitive: Primitive
    problem: Problem
    flat: tuple[Array, ...]
    axes: tuple[bool, ...]
    size: int
    params: dict[str, typing.Any]

    @property
    def operands(self) -> Operands:
        return self.problem.operands(self.flat[: self.leaves])

    @property
    def flags(self) -> typing.Any:
        """Which operands are mapped."""
        return self.problem.arrange(self.axes[: self.leaves])

    @property
    def leaves(self) -> int:
        return self.problem.structure.num_leaves

    @property
    def moving(self) -> tuple[bool, ...] | None:
        return self.params.get("moving")

    @property
    def wanted(self) -> tuple[bool, ...] | None:
        return self.params.get("wanted")

    def tangent_place(self, movable: int) -> int | None:
        """Where in `flat` the tangent of a movable operand is; None if it does not move."""
        if self.moving is None or not self.moving[movable]:
            return None
        return self.leaves + 2 + sum(self.moving[:movable])


def batch_rule(
    primitive: Primitive, problem: Problem, flat: Sequence[Array], axes: Sequence[bool], params: dict
) -> list:
    """Results with the mapped axis in front; `flat` has it in front where `axes`."""
    size = next(x.shape[0] for x, m in zip(flat, axes, strict=True) if m)
    call = Mapped(primitive, problem, tuple(flat), tuple(axes), size, params)
    sinks_differ = call.flags.sinks or any(flags is not None and flags[SINKS] for flags in (call.moving, call.wanted))
    return _with_sinks(call) if sinks_differ else _run(call)


def _run(call: Mapped) -> list[Array]:
    try:
        folded = fold(call)
    except CannotFold:
        return _loop(call)
    return folded.unfold(call.primitive.bind(*folded.arguments, problem=folded.problem, **call.params))


def _loop(call: Mapped) -> list[Array]:
    def one(parts: list[Array]) -> list[Array]:
        rest = iter(parts)
        whole = [next(rest) if m else x for x, m in zip(call.flat, call.axes, strict=True)]
        return call.primitive.bind(*whole, problem=call.problem, **call.params)

    return lax.map(one, [x for x, m in zip(call.flat, call.axes, strict=True) if m])


def fold(call: Mapped) -> Folded:
    """The folded call. Raises CannotFold."""
    problem, plan, size, operands, flags = call.problem, call.problem.plan, call.size, call.operands, call.flags
    captures = range(len(operands.score_captures))
    tangents = [call.tangent_place(FIRST_CAPTURE + i) for i in captures]
    # A captured array has a copy for each entry of the axis if it is mapped, or its tangent is, or its gradient must be.
    apart = [
        flags.score_captures[i]
        or (call.wanted is not None and call.wanted[FIRST_CAPTURE + i])
        or any(place == tangents[i] and mapped for place, mapped in enumerate(call.axes))
        for i in captures
    ]
    score = _program(plan.score, size, plan.batch, apart)
    derivative = _program(problem.derivative, size, plan.batch, apart)
    mask = _program(plan.mask, size, plan.batch, flags.mask_captures)
    dropout = _program(plan.dropout, size, plan.batch, flags.dropout_captures)

    lead = lambda x, m: None if x is None else _lead(x, m, size)
    copies = lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape))
    lists, lists_batch = _lists(plan, operands, flags, size)
    folded = operands._replace(
        **{n: lead(getattr(operands, n), getattr(flags, n)) for n in Operands._fields[:SINKS]},
        score_captures=tuple(
            copies(x, flags.score_captures[i]) if apart[i] else x for i, x in enumerate(operands.score_captures)
        ),
        lists=lists,
    )
    rest = []
    for place in range(call.leaves, len(call.flat)):
        x, m = call.flat[place], call.axes[place]
        if place in tangents:
            rest.append(copies(x, m) if apart[tangents.index(place)] else x)
        else:
            rest.append(_lead(x, m, size))
    blocks = None if plan.blocks is None else dataclasses.replace(plan.blocks, batch=lists_batch)
    new_plan = dataclasses.replace(
        plan, batch=size * plan.batch, score=score, mask=mask, dropout=dropout, blocks=blocks
    )
    new_problem = dataclasses.replace(problem, plan=new_plan, derivative=derivative)
    led = None if call.wanted is None else sum(call.wanted[:FIRST_CAPTURE])

    def unfold(outs: Sequence[Array]) -> list[Array]:
        """Gradients of captures already have the axis in front."""
        split = [x.reshape(size, plan.batch, *x.shape[1:]) for x in outs[:led]]
        return split + list(outs[len(split) :])

    return Folded([*jax.tree.leaves(folded), *rest], new_problem, unfold)


# ------------------------------------------------------------------- sinks that differ between copies


def _with_sinks(call: Mapped) -> list[Array]:
    """The folded call without its sinks, which then join the softmax as the column that they are."""
    problem, plan, params = call.problem, call.problem.plan, dict(call.params)
    sinks_place = problem.arrange(range(call.leaves)).sinks
    drop = {sinks_place}
    for name in ("moving", "wanted"):
        if name in params:
            params[name] = tuple(f and i != SINKS for i, f in enumerate(params[name]))
    tangent_place = call.tangent_place(SINKS)
    if tangent_place is not None:
        drop.add(tangent_place)
    bare = dataclasses.replace(
        problem,
        plan=dataclasses.replace(plan, has_sinks=False),
        structure=jax.tree.structure(call.operands._replace(sinks=None)),
    )
    keep = [i for i in range(len(call.flat)) if i not in drop]
    flat, axes = tuple(call.flat[i] for i in keep), tuple(call.axes[i] for i in keep)
    if not any(params.get("moving") or params.get("wanted") or (True,)):
        outs = [] if call.moving is None else [jnp.zeros_like(x)[None] for x in _out_and_lse(call)]
    elif any(axes):
        outs = _run(Mapped(call.primitive, bare, flat, axes, call.size, params))
    else:
        outs = [x[None] for x in call.primitive.bind(*flat, problem=bare, **params)]

    wide = lambda x, m: (x if m else x[None]).astype(plan.score_dtype)
    place = lambda i: wide(call.flat[i], call.axes[i])
    spread = lambda x: x[:, None, None, :] if plan.layout == "BTNH" else x[:, None, :, None]
    sinks = spread(place(sinks_place))
    whole = lambda x: jnp.broadcast_to(x, (call.size, *x.shape[1:]))
    if call.moving is None and call.wanted is None:
        out, lse = join_sinks(outs[0], outs[1], sinks)
        return [whole(x) for x in (out, lse, *outs[2:])]
    out, lse = place(call.leaves), place(call.leaves + 1)
    weight = tile_math.probabilities(sinks, lse)
    if call.moving is not None:
        moved = weight * (0 if tangent_place is None else spread(place(tangent_place)))
        t_out = outs[0] - (out * moved[..., None]).astype(outs[0].dtype)
        return [whole(t_out), whole(outs[1] + moved)]
    outs, wanted = [whole(x) for x in outs], call.wanted
    if wanted is not None and wanted[SINKS]:
        delta = (place(call.leaves + 2) * out).sum(-1)
        if call.params["has_lse"]:
            delta = delta - place(call.leaves + 3)
        heads = (1, 2) if plan.layout == "BTNH" else (1, 3)
        gradient = -(weight * delta).sum(heads)
        outs.insert(sum(wanted[:SINKS]), whole(gradient).astype(call.flat[sinks_place].dtype))
    return outs


def _out_and_lse(call: Mapped) -> list[Array]:
    """out and lse of one copy, for their shapes."""
    return [call.flat[i][0] if call.axes[i] else call.flat[i] for i in (call.leaves, call.leaves + 1)]


def join_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """out [.., E] and lse [..] of a softmax with one more column, of logits `sinks` (broadcast to lse) and no value."""
    top = lax.stop_gradient(tile_math.finite_or_zero(jnp.maximum(lse, sinks)))
    weight = jnp.exp(lse - top)
    total = weight + jnp.exp(sinks - top)
    empty = total == 0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    joined = jnp.where(empty, jnp.full_like(total, -jnp.inf), top + jnp.log(safe))
    return (out * (weight / safe)[..., None]).astype(out.dtype), joined


# ------------------------------------------------------------------- the folded parts


def _program(program: Program | None, size: int, batch: int, mapped: Sequence[bool]) -> Program | None:
    if program is None or size * batch == 0 or not (any(mapped) or program.reads("b")):
        return program
    if any(isinstance(a, int) and mapped[a] for call in program.calls for a in call.arguments):
        raise CannotFold
    return fold_batch(program, size, batch, mapped)


def _lead(x: Array, mapped: bool, size: int) -> Array:
    """[V, B, ...] or [B, ...] as [V * B, ...]."""
    whole = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return whole.reshape(size * whole.shape[1], *whole.shape[2:])


def _lists(plan: KernelPlan, operands: Operands, flags: Operands, size: int) -> tuple[typing.Any, int]:
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
