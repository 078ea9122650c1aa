"""A call whose batch and heads are split over mesh axes: how its arrays are split, and what one device computes.

explicit_axes.py and auto_axes.py find out over which axes the work is split. This file says what a device needs for its
share of it:

    query, sinks          its batch entries and query heads
    key, value            its batch entries and the key heads that its query heads read
    block lists           those of its batch entries and heads
    lengths               those of its batch entries
    captured arrays       its entries of each dimension that the mods index with plain b or h, all entries of the others
    programs              rewritten to add the share's start to b and h, so that mods see the indices of the whole call

A share is the part of the batch and heads that one device computes. "Axes" are those of the mesh, "dimensions" those of arrays.

`params` are the parameters of a forward, tangent or backward primitive beside its problem. Of the tangent: `moving`, which movable
operands have a tangent; of the backward pass: `wanted`, which movable operands get a gradient, and `has_lse`, whether there is a
cotangent of lse; of the forward pass: none.

A Split says over which mesh axes the batch and the heads of the work are split.

A plan (KernelPlan) is everything static about one call; operands are its arrays; a problem is a plan with the derivative program
of score_mod and the backends to ask (plan/problem.py).
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
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Lengths, Operands
from flexjax.plan.problem import Problem

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of a mesh the work of a call is split.

    mesh           an abstract mesh, which has the names and sizes of the axes
    batch, heads   the axes over which the batch and the query heads are split, the outermost first
    keys           the first axes of `heads`, over which the key heads may be split where there are fewer of them than query heads;
                   None: all of `heads`. `key_axes` leaves out the last ones until they divide the key heads
    extras         the same for the heads of key_extra, where their number is neither that of the query heads nor of the key heads
    """

    mesh: Mesh
    batch: Names
    heads: Names
    keys: Names | None = None
    extras: Names | None = None

    def count(self, names: Names) -> int:
        """The number of parts that a split over the axes `names` makes: the product of their sizes."""
        return math.prod(self.mesh.shape[name] for name in names)


# ------------------------------------------------------------------- how arrays are split


def operand_dims(problem: Problem) -> list[str]:
    """For each operand, in the order of the flat list, the names of its dimensions in one text, such as "b t h d".

    Dimensions with one name have one size and are split alike:

        b  batch      t  queries      h  query heads      d  head dim            r  extra features
        m  key heads  s  keys         x  extra key heads  e  head dim of value

    All other dimensions have names of their own. Key heads are "h" where there are as many as query heads; the heads of key_extra are "h"
    or "m" where they are as many as those. Block lists have "b" ("h") if each batch entry (query head) has lists of its own. A dimension
    of a captured array is "b" or "h" if the programs index it with plain b or h alone (`split_dims`).
    """
    plan = problem.plan
    present = problem.arrange(range(problem.structure.num_leaves))
    key_heads = "h" if plan.kv_heads == plan.q_heads else "m"
    extra_heads = {plan.q_heads: "h", plan.kv_heads: key_heads}.get(plan.extra_heads, "x")
    sizes = {"b": plan.batch, "h": plan.q_heads}
    lists = plan.blocks
    counts = "" if lists is None else f"{'b' if lists.batch > 1 else 'list_b'} {'h' if lists.heads > 1 else 'list_h'} "

    def captured(name: str, *programs: Program | None) -> tuple[str, ...]:
        """The names of the dimensions of each captured array of these programs, which share their captures.

        name   the first part of the dimensions' own names, such as "mask" in "mask0_1"
        """
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
        score_captures=captured("score", plan.score, problem.derivative),
        mask_captures=captured("mask", plan.mask),
        dropout_captures=captured("dropout", plan.dropout),
        lists=None
        if present.lists is None
        else BlockLists._make(
            None if x is None else counts + ("rows" if name.endswith("num") else f"rows {name}")  # [.., rows(, width)]
            for name, x in zip(BlockLists._fields, present.lists, strict=True)
        ),
        origin=None if plan.origin is None else starts_of(*plan.origin.table_dims),
        lengths=None if present.lengths is None else Lengths._make(None if x is None else "b" for x in present.lengths),
    )
    return jax.tree.leaves(named)


def arranged(plan: KernelPlan, dims: str) -> str:
    """`dims`, the names of an array's dimensions in layout BTNH ("b t h d"), reordered for the plan's layout ("b h t d")."""
    batch, tokens, heads, *rest = dims.split()
    return " ".join((batch, tokens, heads, *rest) if plan.layout == "BTNH" else (batch, heads, tokens, *rest))


def spec_of(plan: KernelPlan, dims: str, split: Split) -> PartitionSpec:
    """How an array is split for the work.

    dims   the names of the array's dimensions, such as "b t h d": "b" is split over split.batch and "h" (query heads) over split.heads;
           "m" (key heads) and "x" (heads of key_extra) over those axes of the heads that `key_axes` gives. All others stay whole
    """
    axes = {
        "b": split.batch,
        "h": split.heads,
        "m": key_axes(plan, split, plan.kv_heads),
        "x": key_axes(plan, split, plan.extra_heads) if plan.extra_heads else (),
    }
    return PartitionSpec(*(axes.get(dim) or None for dim in dims.split()))


def _given(*programs: Program | None) -> tuple[Program, ...]:
    """The programs that are not None."""
    return tuple(p for p in programs if p is not None)


def choose_split(plan: KernelPlan, mesh: Mesh, dims: Sequence[str], specs: Sequence[Spec]) -> Split:
    """Which mesh axes split the batch, the query heads and the key heads of a call, from how its arrays are split.

    dims    for each array the names of its dimensions, such as "b s m d": "b" is the batch, "h" query heads, "m" key heads where there
            are fewer, "x" heads of key_extra of another number
    specs   for each array the axes that split each of its dimensions

    The batch is split over the axes of the array whose batch is split over most devices (the first such array), and the query heads in
    the same way, but over no axis of the batch. If no array has its query heads split, they are split over the axes of the key heads.
    Axes count up to the first that would make the shares unequal. The key heads, and the heads of key_extra, are split over the leading
    axes that split them and the query heads alike. Over other axes they stay whole, because splitting their gradients would take another
    collective.
    """

    batch = widest("b", plan.batch, dims, specs, mesh)
    keys = widest("m", plan.kv_heads, dims, specs, mesh, batch)
    heads = widest("h", plan.q_heads, dims, specs, mesh, batch) or keys
    extras = widest("x", plan.extra_heads, dims, specs, mesh, batch)
    return Split(mesh, batch, heads, _leading(heads, keys), _leading(heads, extras))


def _leading(a: Names, b: Names) -> Names:
    """The axes with which both a and b begin."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(name for name, _ in same)


def key_axes(plan: KernelPlan, split: Split, heads: int) -> Names:
    """The axes that split an operand with `heads` heads (the key heads, or those of key_extra).

    They are the longest prefix of the query heads' axes (of `split.keys` or `split.extras` if that is given and there are fewer
    heads than query heads) whose number of devices divides `heads`.
    """
    fewer = split.keys if heads == plan.kv_heads else split.extras
    axes = split.heads if fewer is None or heads == plan.q_heads else fewer
    while heads % split.count(axes):
        axes = axes[:-1]
    return axes


# ------------------------------------------------------------------- a device's share


def share_of(problem: Problem, operands: Operands, split: Split) -> tuple[Problem, Operands]:
    """The problem and the operands of this device's share of a call. Runs on each device: inside shard_map, or in what a partitioning
    rule computes on a device.

    problem    of the whole call
    operands   this device's parts of the operands, split as `spec_of` says

    In the returned operands, key, value and key_extra have the heads that the share's query heads read (`own_key_heads`), and the
    captured arrays are followed by int32 scalars where a program needs the index at which the share begins in the batch or the heads.
    """
    plan = problem.plan
    share = Share(plan.batch, split.count(split.batch), plan.q_heads, split.count(split.heads))
    score = share_of_program(_given(plan.score, problem.derivative), share)
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
        score=None if plan.score is None else first(score),
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
    derivative = None if problem.derivative is None else score.programs[-1]
    structure = jax.tree.structure(own)
    return dataclasses.replace(problem, plan=own_plan, derivative=derivative, structure=structure), own


def _place(names: Names) -> Array:
    """The index of this device along the axes `names` taken together, the first axis outermost; an int32 scalar."""
    return lax.axis_index(names).astype(jnp.int32)


def sum_over_shared_axes(gradients: Sequence[Array], specs: Sequence[PartitionSpec], work: Names) -> list[Array]:
    """The gradients of one device, each summed (psum) over the axes that split the work but not the operand of the gradient.

    specs   of each gradient, and of its operand
    work    the axes that split the work

    Along such an axis all devices hold the same part of the operand, and each has the gradient from its own part of the work.
    Gradients that are summed over the same axes share a collective.
    """
    results = list(gradients)
    over: dict[Names, list[int]] = {}
    for i, spec in enumerate(specs):
        apart = {name for part in spec for name in names_of(part)}
        over.setdefault(tuple(name for name in work if name not in apart), []).append(i)
    for axes, which in over.items():
        if axes:
            for i, total in zip(which, lax.psum([results[i] for i in which], axes), strict=True):
                results[i] = total
    return results


def cut_to_own_heads(problem: Problem, split: Split) -> Callable[[Array, int], Array]:
    """A function (x, place) -> array. If the operand is key, value or key_extra, it returns those heads of x that this device's query
    heads read (`own_key_heads`), else x itself.

    x       this device's part of an operand, or of a tangent of it
    place   the index of the operand in the flat list
    """
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
    """The gradients of this device's parts of operands, from those of its share, summed over the devices that hold the same part.

    flat          this device's parts of the operands, as a flat list
    places        the index of each gradient's operand in it
    gradients     of the share: of operands with the key heads that the device reads; the other heads of its part have 0
    specs         how each operand is split
    work          the axes that split the work
    """
    cut = cut_to_own_heads(problem, split)
    back = lambda g, place: jax.linear_transpose(lambda x: cut(x, place), flat[place])(g)[0]
    found = [back(g, place) for g, place in zip(gradients, places, strict=True)]
    return sum_over_shared_axes(found, specs, work)


# ------------------------------------------------------------------- the primitives of a call


def moved_places(problem: Problem, params: Mapping[str, typing.Any]) -> list[int]:
    """The indices, in the flat list of operands, of those that have a tangent or get a gradient; [] for the forward pass."""
    flags = params.get("moving", params.get("wanted", ()))
    places = problem.arrange(range(problem.structure.num_leaves)).movable
    return [place for place, flag in zip(places, flags, strict=False) if flag]


def primitive_dims(
    problem: Problem, params: Mapping[str, typing.Any], tables: Sequence[str] = (), rounding: bool = False
) -> tuple[list[str], list[str]]:
    """For each argument of a primitive, and for each of its results, the names of its dimensions, such as "b t h d".

    tables     those of the arguments after the operands; () for a call whose sequence is not split
    rounding   whether tangent and backward have rounding after out and lse
    """
    plan, operands = problem.plan, operand_dims(problem)
    out, stats = arranged(plan, "b t h e"), arranged(plan, "b t h")
    fixed, residuals = [*operands, *tables], [out, stats, *[out] * rounding]
    moved = [operands[place] for place in moved_places(problem, params)]
    if "moving" in params:
        return [*fixed, *residuals, *moved], [out, stats]
    if "wanted" in params:
        return [*fixed, *residuals, out, *[stats] * params["has_lse"]], moved
    return fixed, [out, stats, *[stats] * plan.max_scores, *[out] * plan.returns_rounding]


def with_starts(params: Mapping[str, typing.Any], added: int) -> dict[str, typing.Any]:
    """The parameters for a share whose programs capture `added` more arrays, which have no tangents and get no gradients."""
    return {k: (*x, *[False] * added) if k in ("moving", "wanted") else x for k, x in params.items()}


def own_key_heads(plan: KernelPlan, split: Split, x: Array, heads: int) -> Array:
    """The key heads that this device's query heads read, selected from the key heads that the device has.

    x       this device's part of key, value or key_extra, or of a tangent of one of them, in the plan's layout
    heads   how many heads x has on all devices together

    Fewer axes may split the key heads than the query heads (`key_axes`). Then a device selects: its query heads are cut into runs of
    gcd(query heads of one key head, query heads of a device), each run reads one key head, and the result has one copy of that key head
    for each run, also where neighbouring runs read the same one. It has one head if the query heads of a device divide those of a key
    head. If the same axes split both, x is returned as it is.
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
