"""vmap of attention: the mapped axis, of V copies, becomes a part of the batch, V * B entries, and one kernel runs.

Entry b of the folded problem is entry b % B of copy b // B. Arrays whose first axis is the batch are reshaped, and
first broadcast if they are not mapped. Captured arrays that are mapped keep the axis of copies in front, and the
programs read them at copy b // B. Sinks that differ between copies join the folded result afterwards, because a plan
has one row of sinks. A loop over the copies runs in place of the folded call if a mod reads a mapped array as a whole
inside a loop of its own.

"Mapped" arguments are those that have the axis over which vmap maps; the others are shared by all copies.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from flexjax.backends import tile_math
from flexjax.ir.program import Program
from flexjax.passes.fold_operands import (
    CannotFold,
    fold_lengths,
    fold_lists,
    fold_origin,
    fold_pages,
    fold_program,
    into_batch,
)
from flexjax.plan.kernel_plan import FIRST_CAPTURE, SINKS, Operands, Results
from flexjax.plan.problem import Problem

Array = jax.Array


class Folded(typing.NamedTuple):
    """A mapped call rewritten as one call with V * B batch entries."""

    arguments: list[Array]
    problem: Problem
    # from the results of the folded call to those of the mapped call, with the axis of copies in front
    unfold: Callable[[Sequence[Array]], list[Array]]


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A call of a primitive of autodiff.py under vmap."""

    primitive: Primitive
    problem: Problem
    flat: tuple[Array, ...]  # the arguments of the primitive
    axes: tuple[bool, ...]  # which arguments are mapped; their mapped axis, of `size` copies, is in front
    size: int
    params: dict[str, typing.Any]  # parameters of the primitive beside the problem

    @property
    def operands(self) -> Operands:
        return self.problem.operands(self.flat[: self.leaves])

    @property
    def flags(self) -> typing.Any:
        """An Operands tuple that has, in place of each array, whether the array is mapped."""
        return self.problem.arrange(self.axes[: self.leaves])

    @property
    def leaves(self) -> int:
        return self.problem.structure.num_leaves

    @property
    def moving(self) -> tuple[bool, ...] | None:
        """Which movable operands have a tangent; None for forward and backward."""
        return self.params.get("moving")

    @property
    def wanted(self) -> tuple[bool, ...] | None:
        """Which movable operands get a gradient, each copy its own; None for forward and tangent."""
        return self.params.get("wanted")

    def tangent_index(self, movable: int) -> int | None:
        """The index in `flat` of the tangent of a movable operand; None if it has none."""
        if self.moving is None or not self.moving[movable]:
            return None
        return self.leaves + self.problem.residuals + sum(self.moving[:movable])


def batch_rule(
    primitive: Primitive, problem: Problem, flat: Sequence[Array], axes: Sequence[bool], params: dict
) -> list:
    """The vmap rule of the primitives; the mapped axis of arguments and results is in front."""
    size = next(x.shape[0] for x, m in zip(flat, axes, strict=True) if m)
    call = Mapped(primitive, problem, tuple(flat), tuple(axes), size, params)
    sinks_differ = call.flags.sinks or any(flags is not None and flags[SINKS] for flags in (call.moving, call.wanted))
    # a sink that joins the folded result later would round once more
    invariant = problem.plan.options.invariant and call.moving is None and call.wanted is None
    if sinks_differ and (problem.plan.expectations or invariant):
        return _loop(call)
    return _with_sinks(call) if sinks_differ else _run(call)


def _run(call: Mapped) -> list[Array]:
    """The results of a mapped call whose sinks are not mapped, by one folded call or by a loop."""
    try:
        folded = fold(call)
    except CannotFold:
        return _loop(call)
    return folded.unfold(call.primitive.bind(*folded.arguments, problem=folded.problem, **call.params))


def _loop(call: Mapped) -> list[Array]:
    """The results of a mapped call, by a loop that binds the primitive for one copy after the other."""

    def one(parts: list[Array]) -> list[Array]:
        rest = iter(parts)
        whole = [next(rest) if m else x for x, m in zip(call.flat, call.axes, strict=True)]
        return call.primitive.bind(*whole, problem=call.problem, **call.params)

    return lax.map(one, [x for x, m in zip(call.flat, call.axes, strict=True) if m])


def fold(call: Mapped) -> Folded:
    """Rewrites a mapped call, whose sinks are not mapped, as one call with V * B batch entries.

    Operands over the batch, out, lse, rounding, cotangents and the tangents of such operands get a first axis of V * B
    entries; block lists, origin, lengths and pages become those of fold_operands.py. Captured arrays of mask and
    dropout keep the axis that they have. Raises CannotFold if a program reads a mapped array as a whole.
    """
    problem, plan, size, operands, flags = call.problem, call.problem.plan, call.size, call.operands, call.flags
    captures = range(len(operands.score_captures))
    tangents = [call.tangent_index(FIRST_CAPTURE + i) for i in captures]
    # a captured array gets an axis of copies if it or its tangent is mapped, or if each copy wants its own gradient
    copied = [
        flags.score_captures[i]
        or (call.wanted is not None and call.wanted[FIRST_CAPTURE + i])
        or any(index == tangents[i] and mapped for index, mapped in enumerate(call.axes))
        for i in captures
    ]
    programs = [typing.cast(Program, fold_program(p, size, plan.batch, copied)) for p in problem.programs]
    mask = fold_program(plan.mask, size, plan.batch, flags.mask_captures)
    dropout = fold_program(plan.dropout, size, plan.batch, flags.dropout_captures)

    lead = lambda x, m: None if x is None else into_batch(x, m, size)
    copies = lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape))
    lists, lists_batch = fold_lists(plan, operands, flags, size)
    layout, origin = fold_origin(plan, operands, flags, size)
    pool = fold_pages(plan, operands, flags, size) if plan.page else {}
    folded = operands._replace(
        **{n: lead(getattr(operands, n), getattr(flags, n)) for n in Operands._fields[:SINKS] if n not in pool},
        **pool,
        score_captures=tuple(
            copies(x, flags.score_captures[i]) if copied[i] else x for i, x in enumerate(operands.score_captures)
        ),
        lists=lists,
        origin=origin,
        lengths=fold_lengths(operands.lengths, flags.lengths, size),
        documents=lead(operands.documents, flags.documents),
    )
    rest = []
    for index in range(call.leaves, len(call.flat)):
        x, m = call.flat[index], call.axes[index]
        if index in tangents:
            rest.append(copies(x, m) if copied[tangents.index(index)] else x)
        else:
            rest.append(into_batch(x, m, size))
    blocks = plan.blocks
    if blocks is not None and blocks.batch != lists_batch:
        blocks = blocks.changed(batch=lists_batch)
    new_plan = dataclasses.replace(
        plan,
        batch=size * plan.batch,
        mask=mask,
        dropout=dropout,
        blocks=blocks,
        origin=layout,
        stored_pages=folded.key.shape[0] if plan.page else 0,
    )
    new_problem = problem.with_programs(programs, new_plan, folded)
    with_batch = None if call.wanted is None else sum(call.wanted[:FIRST_CAPTURE])

    def unfold(outs: Sequence[Array]) -> list[Array]:
        """The first axis V * B becomes V, B; gradients of captured arrays have the axis of copies already."""
        split = [x.reshape(size, plan.batch, *x.shape[1:]) for x in outs[:with_batch]]
        return split + list(outs[len(split) :])

    return Folded([*jax.tree.leaves(folded), *rest], new_problem, unfold)


# ------------------------------------------------------------------- sinks that differ between copies


def _with_sinks(call: Mapped) -> list[Array]:
    """The results of a call whose sinks differ between copies: those without sinks, corrected.

    z is the logit of a sink, tz its tangent, and p = exp(z - lse) its probability. Rows of queries that do not exist
    have no sink: its logit is -inf there. Forward: `join_sinks` adds the column to out and lse. Tangent: the tangent of
    out loses out * p * tz, that of lse gains p * tz. Backward: the gradient of z is the sum over rows of -p * (d_out .
    out - d_lse); the others stay as they are.
    """
    problem, plan, params = call.problem, call.problem.plan, dict(call.params)
    sinks_index = problem.arrange(range(call.leaves)).sinks
    drop = {sinks_index}
    for name in ("moving", "wanted"):
        if name in params:
            params[name] = tuple(f and i != SINKS for i, f in enumerate(params[name]))
    sinks_tangent = call.tangent_index(SINKS)
    if sinks_tangent is not None:
        drop.add(sinks_tangent)
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

    argument = lambda i: (call.flat[i] if call.axes[i] else call.flat[i][None]).astype(plan.score_dtype)
    spread = lambda x: x[:, None, None, :] if plan.layout == "BTNH" else x[:, None, :, None]
    existing = _existing_rows(call)
    sinks = spread(argument(sinks_index))
    if existing is not None:
        sinks = jnp.where(existing, sinks, jnp.asarray(-jnp.inf, sinks.dtype))
    each_copy = lambda x: jnp.broadcast_to(x, (call.size, *x.shape[1:]))
    if call.moving is None and call.wanted is None:
        out, lse, *others = outs
        if not plan.returns_rounding:
            return [each_copy(x) for x in (*join_sinks(out, lse, sinks), *others)]
        whole, joined = join_sinks(Results(out, lse, None, others.pop()).float32_out, lse, sinks)
        whole, rounding = tile_math.out_and_rounding(whole, plan)
        return [each_copy(x) for x in (whole, joined, *others, rounding) if x is not None]
    out, lse, *rounding = map(argument, range(call.leaves, call.leaves + problem.residuals))
    out = out + rounding[0] if rounding else out
    weight = tile_math.probabilities(sinks, lse)
    if call.moving is not None:
        moved = weight * (0 if sinks_tangent is None else spread(argument(sinks_tangent)))
        t_out = outs[0] - (out * moved[..., None]).astype(outs[0].dtype)
        return [each_copy(t_out), each_copy(outs[1] + moved)]
    outs, wanted = [each_copy(x) for x in outs], call.wanted
    if wanted is not None and wanted[SINKS]:
        cotangents = call.leaves + problem.residuals
        delta = (argument(cotangents) * out).sum(-1)
        if call.params["has_lse"]:
            delta = delta - argument(cotangents + 1)
        if existing is not None:
            delta = jnp.where(existing, delta, jnp.zeros_like(delta))
        heads = (1, 2) if plan.layout == "BTNH" else (1, 3)
        gradient = -(weight * delta).sum(heads)
        outs.insert(sum(wanted[:SINKS]), each_copy(gradient).astype(call.flat[sinks_index].dtype))
    return outs


def _out_and_lse(call: Mapped) -> list[Array]:
    """out and lse of a tangent or backward pass for one copy, used for their shapes only."""
    return [call.flat[i][0] if call.axes[i] else call.flat[i] for i in (call.leaves, call.leaves + 1)]


def _existing_rows(call: Mapped) -> Array | None:
    """Which queries exist, bool [copies or 1, B, T, 1] ([.., B, 1, T] for BNTH); None without query lengths."""
    plan, lengths = call.problem.plan, call.operands.lengths
    if lengths is None or lengths.query is None:
        return None
    ends = lengths.query if call.flags.lengths.query else lengths.query[None]
    rows = jnp.arange(plan.q_len, dtype=jnp.int32)
    return (rows[:, None] if plan.layout == "BTNH" else rows) < ends[:, :, None, None]


def join_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """(out, lse), [.., E] and [..], of a softmax to which a column with the logits `sinks` and value 0 is added."""
    top = lax.stop_gradient(tile_math.finite_or_zero(jnp.maximum(lse, sinks)))
    weight = jnp.exp(lse - top)
    total = weight + jnp.exp(sinks - top)
    empty = total == 0
    safe = jnp.where(empty, jnp.ones_like(total), total)
    joined = jnp.where(empty, jnp.full_like(total, -jnp.inf), top + jnp.log(safe))
    return (out * (weight / safe)[..., None]).astype(out.dtype), joined
