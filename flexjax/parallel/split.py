"""A call whose batch and heads are split over mesh axes: how its arrays are split, and what one device computes.

explicit_axes.py and auto_axes.py find out over which axes the work is split. A device needs for its share of it:

    query, sinks          its batch entries and query heads
    key, value            its batch entries and the key heads that its query heads read
    block lists           those of its batch entries and heads
    lengths               those of its batch entries
    captured arrays       its entries of each dimension that the mods index with plain b or h, all entries of the others
    programs              rewritten to add the share's start to b and h, so that mods see the indices of the whole call

"Axes" are those of the mesh, "dimensions" those of arrays. `params` are the parameters of a primitive beside its
problem: `moving` of the tangent, which movable operands have a tangent; of the backward pass `wanted`, which get a
gradient, and `has_lse`, whether lse has a cotangent.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from flexjax.ir.origin import Starts
from flexjax.ir.program import Program
from flexjax.ir.split_axes import Share, share_of_program, split_dims
from flexjax.partition import Mesh, Names, Spec, names_of, widest
from flexjax.plan.kernel_plan import KernelPlan, Lengths, Operands
from flexjax.plan.problem import Problem

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of a mesh the work of a call is split."""

    mesh: Mesh  # abstract: names and sizes of the axes
    batch: Names  # the outermost first
    heads: Names  # of the query heads, the outermost first
    keys: Names | None = None  # first axes of `heads`, for fewer key heads than query heads; None: all
    extras: Names | None = None  # the same for the heads of key_extra, where their number is another

    @property
    def axes(self) -> dict[str, Names]:
        """The axes of the batch ("b") and of the query heads ("h")."""
        return {"b": self.batch, "h": self.heads}

    def count(self, names: Names) -> int:
        """The number of parts that a split over the axes `names` makes."""
        return math.prod(self.mesh.shape[name] for name in names)


# ------------------------------------------------------------------- how arrays are split


def operand_dims(problem: Problem) -> list[str]:
    """For each operand of the flat list the names of its dimensions. One name is one size and one split:

        b  batch      t  queries      h  query heads      d  head dim            r  extra features
        m  key heads  s  keys         x  extra key heads  e  head dim of value

    Key heads are "h" where there are as many as query heads, extra key heads "h" or "m". A dimension of a captured
    array is "b" or "h" if the programs index it with plain b or h alone. All others have names of their own.
    """
    plan = problem.plan
    present = problem.arrange(range(problem.structure.num_leaves))
    key_heads = "h" if plan.kv_heads == plan.q_heads else "m"
    extra_heads = {plan.q_heads: "h", plan.kv_heads: key_heads}.get(plan.extra_heads, "x")
    sizes = {"b": plan.batch, "h": plan.q_heads}
    lists = plan.blocks
    counts = "" if lists is None else f"{'b' if lists.batch > 1 else 'list_b'} {'h' if lists.heads > 1 else 'list_h'} "

    def captured(name: str, *programs: Program | None) -> tuple[str, ...]:
        """The dimension names of each captured array of programs that share their captures, such as "mask0_1"."""
        found = enumerate(split_dims(_given(*programs), sizes))
        return tuple(" ".join(dim or f"{name}{i}_{at}" for at, dim in enumerate(dims)) for i, dims in found)

    tree_of: typing.Any = Operands
    starts_of: typing.Any = Starts
    named = tree_of(
        query=arranged(plan, "b t h d"),
        key=arranged(plan, f"b s {key_heads} d"),
        value=arranged(plan, f"b s {key_heads} e"),
        query_extra=None if present.query_extra is None else arranged(plan, "b t h r"),
        key_extra=None if present.key_extra is None else arranged(plan, f"b s {extra_heads} r"),
        sinks=None if present.sinks is None else "h",
        score_captures=captured("score", *problem.programs),
        mask_captures=captured("mask", plan.mask),
        dropout_captures=captured("dropout", plan.dropout),
        lists=None
        if present.lists is None
        else present.lists._make(
            None if x is None else counts + ("rows" if name.endswith("num") else f"rows {name}")  # [.., rows(, width)]
            for name, x in zip(present.lists._fields, present.lists, strict=True)
        ),
        origin=None if plan.origin is None else starts_of(*plan.origin.table_dims),
        lengths=None if present.lengths is None else Lengths._make(None if x is None else "b" for x in present.lengths),
        documents=None if present.documents is None else "b offsets",
    )
    return jax.tree.leaves(named)


def arranged(plan: KernelPlan, dims: str) -> str:
    """`dims`, the names of an array's dimensions in layout BTNH ("b t h d"), reordered for the plan's layout."""
    batch, tokens, heads, *rest = dims.split()
    return " ".join((batch, tokens, heads, *rest) if plan.layout == "BTNH" else (batch, heads, tokens, *rest))


def spec_of(plan: KernelPlan, dims: str, split: Split) -> PartitionSpec:
    """How an array with dimensions `dims`, such as "b t h d", is split for the work; tokens and features are whole."""
    axes = {
        "b": split.batch,
        "h": split.heads,
        "m": key_axes(plan, split, plan.kv_heads),
        "x": key_axes(plan, split, plan.extra_heads) if plan.extra_heads else (),
    }
    return PartitionSpec(*(axes.get(dim) or None for dim in dims.split()))


def _given(*programs: Program | None) -> tuple[Program, ...]:
    return tuple(p for p in programs if p is not None)


def choose_split(plan: KernelPlan, mesh: Mesh, dims: Sequence[str], specs: Sequence[Spec]) -> Split:
    """Which mesh axes split the batch, the query heads and the key heads of a call, from how its arrays are split.

    The batch is split as in the array whose batch is split over most devices, and the query heads likewise, over other
    axes. If no array has its query heads split, the axes of the key heads split them. Axes count up to the first that
    would make the shares unequal. Heads of key and key_extra are split over the leading axes that they share with the
    query heads, because splitting their gradients over others would take another collective.
    """

    batch = widest("b", plan.batch, dims, specs, mesh)
    keys = widest("m", plan.kv_heads, dims, specs, mesh, batch)
    heads = widest("h", plan.q_heads, dims, specs, mesh, batch) or keys
    extras = widest("x", plan.extra_heads, dims, specs, mesh, batch)
    return Split(mesh, batch, heads, _leading(heads, keys), _leading(heads, extras))


def _leading(a: Names, b: Names) -> Names:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(name for name, _ in same)


def key_axes(plan: KernelPlan, split: Split, heads: int) -> Names:
    """The axes that split an operand with `heads` heads: a prefix of those of the query heads."""
    # or of `split.keys` (`split.extras`) if that is given and there are fewer heads than query heads
    fewer = split.keys if heads == plan.kv_heads else split.extras
    axes = split.heads if fewer is None or heads == plan.q_heads else fewer
    while heads % split.count(axes):
        axes = axes[:-1]
    return axes


# ------------------------------------------------------------------- a device's share


def share_of(problem: Problem, operands: Operands, split: Split) -> tuple[Problem, Operands]:
    """The problem and the operands of this device's share, from its parts of the operands. Runs on each device.

    Key, value and key_extra get the heads that the share's query heads read. Captured arrays are followed by int32
    scalars where a program needs the index at which the share begins in the batch or the heads.
    """
    plan = problem.plan
    share = Share(plan.batch, split.count(split.batch), plan.q_heads, split.count(split.heads))
    score = share_of_program(problem.programs, share)
    mask, dropout = (share_of_program(_given(p), share) for p in (plan.mask, plan.dropout))
    starts = {
        "b": lambda: _place(split.batch) * share.entries["b"],
        "h": lambda: _place(split.heads) * share.entries["h"],
    }
    with_starts = lambda arrays, part: (*arrays, *(starts[axis]() for axis in part.starts))
    first = lambda part: part.programs[0] if part.programs else None
    cut = functools.partial(own_key_heads, plan, split)
    key, value = cut(operands.key, plan.kv_heads), cut(operands.value, plan.kv_heads)
    key_extra = None if operands.key_extra is None else cut(operands.key_extra, plan.extra_heads)
    heads = 2 if plan.layout == "BTNH" else 1
    blocks = plan.blocks
    if blocks is not None:
        fewer = lambda count, axis: count if count == 1 else share.entries[axis]
        blocks = dataclasses.replace(blocks, batch=fewer(blocks.batch, "b"), heads=fewer(blocks.heads, "h"))
    origin = plan.origin
    if origin is not None and origin.rows > 1:
        origin = dataclasses.replace(origin, rows=share.entries["b"])
    own_plan = dataclasses.replace(
        plan,
        batch=share.entries["b"],
        q_heads=share.entries["h"],
        kv_heads=key.shape[heads],
        extra_heads=0 if key_extra is None else key_extra.shape[heads],
        mask=first(mask),
        dropout=first(dropout),
        blocks=blocks,
        origin=origin,
    )
    own = operands._replace(
        key=key,
        value=value,
        key_extra=key_extra,
        score_captures=with_starts(operands.score_captures, score),
        mask_captures=with_starts(operands.mask_captures, mask),
        dropout_captures=with_starts(operands.dropout_captures, dropout),
    )
    return problem.with_programs(score.programs, own_plan, own), own


def _place(names: Names) -> Array:
    """The index of this device along the axes `names` taken together, the first axis outermost; an int32 scalar."""
    return lax.axis_index(names).astype(jnp.int32)


def sum_over_shared_axes(gradients: Sequence[Array], specs: Sequence[PartitionSpec], work: Names) -> list[Array]:
    """One device's gradients, each summed (psum) over the axes of the `work` that do not split its operand."""
    results = list(gradients)
    over: dict[Names, list[int]] = {}
    # Along such an axis all devices hold the same part of the operand, each with the gradient from its own work.
    # Gradients over the same axes share a collective.
    for i, spec in enumerate(specs):
        apart = {name for part in spec for name in names_of(part)}
        over.setdefault(tuple(name for name in work if name not in apart), []).append(i)
    for axes, which in over.items():
        if axes:
            for i, total in zip(which, lax.psum([results[i] for i in which], axes), strict=True):
                results[i] = total
    return results


def cut_to_own_heads(problem: Problem, split: Split) -> Callable[[Array, int], Array]:
    """A function (x, place) -> x with this device's own key heads, if operand number `place` has key heads."""
    plan, places = problem.plan, problem.arrange(range(problem.structure.num_leaves))
    heads = {places.key: plan.kv_heads, places.value: plan.kv_heads, places.key_extra: plan.extra_heads}
    return lambda x, place: own_key_heads(plan, split, x, heads[place]) if place in heads else x


def gradients_of_parts(
    problem: Problem,
    split: Split,
    flat: Sequence[Array],
    places: Sequence[int],
    gradients: Sequence[Array],
    specs: Sequence[PartitionSpec],
    work: Names,
) -> list[Array]:
    """The gradients of this device's parts of operands, from those of its share, summed over devices."""
    cut = cut_to_own_heads(problem, split)
    # the share has the key heads that the device reads; other heads of its part get 0
    back = lambda g, place: jax.linear_transpose(lambda x: cut(x, place), flat[place])(g)[0]
    found = [back(g, place) for g, place in zip(gradients, places, strict=True)]
    return sum_over_shared_axes(found, specs, work)


# ------------------------------------------------------------------- the primitives of a call


def moved_places(problem: Problem, params: Mapping[str, typing.Any]) -> list[int]:
    """The indices in the flat list of the operands that have a tangent or get a gradient; [] for the forward pass."""
    flags = params.get("moving", params.get("wanted", ()))
    places = problem.arrange(range(problem.structure.num_leaves)).movable
    return [place for place, flag in zip(places, flags, strict=False) if flag]


def primitive_dims(
    problem: Problem, params: Mapping[str, typing.Any], tables: Sequence[str] = (), residuals: int = 2
) -> tuple[list[str], list[str]]:
    """The dimension names, such as "b t h d", of (each argument of a primitive, each result); see Problem.residuals."""
    plan, operands = problem.plan, operand_dims(problem)
    out, stats = arranged(plan, "b t h e"), arranged(plan, "b t h")
    sums = [f"{stats} functions"] * (plan.expectations > 0)
    fixed, kept = [*operands, *tables], [out, stats, *[out] * plan.exact_captures, *sums][:residuals]
    moved = [operands[place] for place in moved_places(problem, params)]
    if "moving" in params:
        return [*fixed, *kept, *moved], [out, stats, *sums]
    if "wanted" in params:
        return [*fixed, *kept, out, *[stats] * params["has_lse"], *sums], moved
    return fixed, [out, stats, *[stats] * plan.max_scores, *[out] * plan.returns_rounding, *sums]


def with_starts(params: Mapping[str, typing.Any], added: int) -> dict[str, typing.Any]:
    """The parameters for a share whose programs capture `added` more arrays, without tangents and gradients."""
    return {k: (*x, *[False] * added) if k in ("moving", "wanted") else x for k, x in params.items()}


def own_key_heads(plan: KernelPlan, split: Split, x: Array, heads: int) -> Array:
    """The key heads that this device's query heads read, selected from x, its part of key, value or key_extra.

    Fewer axes may split the key heads than the query heads (`key_axes`). The query heads are then cut into runs of
    gcd(query heads of one key head, query heads of a device), each run reads one key head, and the result has a copy of
    it for each run. `heads` counts those of x on all devices together.
    """
    own_axes = key_axes(plan, split, heads)
    rest = split.heads[len(own_axes) :]
    if not rest:
        return x
    group, own = plan.q_heads // heads, plan.q_heads // split.count(split.heads)
    each = math.gcd(group, own)
    axis = 2 if plan.layout == "BTNH" else 1
    first = _place(rest) * own
    runs: Sequence[Array] = [
        lax.dynamic_slice_in_dim(x, (first + run * each) // group, 1, axis) for run in range(own // each)
    ]
    return jnp.concatenate(runs, axis)
