"""Attention whose arrays are split over explicit mesh axes: every device computes its share of the batch and the heads.

The type of query says over which axes its batch and its heads are split. `split_work` runs the call inside
`jax.shard_map` over the explicit axes of that mesh, and each device gets

    query, sinks          its batch entries and query heads
    key, value            its batch entries and the key heads that its query heads read
    block lists           those of its batch entries and heads
    captured arrays       its entries of each dimension that the mods index with plain b or h, all entries of the others
    the programs          rewritten to add the share's start to b and h, so that mods see the indices of the whole call

Arrays that are already split this way need no collective. All other arrays are resharded on the way in: a query that is
split over its tokens or its head dim is gathered. The results are resharded to the split of query. The gradients follow
from shard_map: an array that several devices read gets the sum of their gradients, and each cotangent is split as its
primal is.

The mesh axes that are not explicit are left to the partitioner, or to a shard_map around the call.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flexjax.ir.program import Program
from flexjax.ir.split_axes import Share, share_of_program, split_dims
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Operands, Results
from flexjax.plan.problem import Problem

Array = jax.Array
Mesh = jax.sharding.AbstractMesh
Names = tuple[str, ...]
Run = Callable[[Problem, Operands], Results]


@dataclasses.dataclass(frozen=True)
class Split:
    """How query is split.

    mesh, spec   of query's type; `spec` holds the first three dimensions, of [B, T, N, D] or [B, N, T, D]
    batch        the explicit axes over which the batch is split
    heads        the explicit axes over which the query heads are split
    """

    mesh: Mesh
    spec: PartitionSpec
    batch: Names
    heads: Names

    def count(self, names: Names) -> int:
        """The number of devices along the axes."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def explicit(self) -> frozenset[str]:
        return explicit_names(self.mesh)


def explicit_names(mesh: Mesh) -> frozenset[str]:
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in named if kind == AxisType.Explicit)


def split_of(query: Array, layout: str) -> Split | None:
    """The split of query; None if its mesh has no explicit axis."""
    where = jax.typeof(query).sharding
    explicit = explicit_names(where.mesh)
    if not explicit:
        return None
    parts = [_names(part) for part in where.spec]
    heads = 2 if layout == "BTNH" else 1
    return Split(where.mesh, PartitionSpec(*where.spec[:3]), parts[0], parts[heads])


def _names(part: object) -> Names:
    return () if part is None else tuple(part) if isinstance(part, tuple) else (part,)  # type: ignore[return-value]


def split_work(problem: Problem, operands: Operands, split: Split, run: Run) -> Results:
    """Calls `run` on every device with the device's share. The results are split as query is, but for its head dim."""
    return Results(*_compiled(problem, split, run, tuned.state())(*jax.tree.leaves(operands)))


@functools.lru_cache(maxsize=512)
def _compiled(problem: Problem, split: Split, run: Run, measured: object) -> Callable[..., Results]:
    """The call as a jitted function, also for eager calls: without jit, shard_map would run one operation at a time,
    and would refuse arrays that are on no mesh. `measured`: which measured tiles there are; others compile anew.
    """
    specs = _specs(problem, split)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    of_stats = _by_layout(problem.plan, split.batch, split.heads)[:3]
    result_specs = [PartitionSpec(*of_stats, *rest) for rest in ((None,), (), ())][: 2 + problem.plan.max_scores]
    put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(split.mesh, spec))

    def share(*flat: Array) -> list[Array]:
        results = run(*_share(problem, problem.operands(flat), split))
        return [x for x in results if x is not None]

    def call(*flat: Array) -> Results:
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=tuple(leaves),
            out_specs=result_specs,
            axis_names=set(split.explicit),
        )
        outs = mapped(*(put(x, spec) for x, spec in zip(flat, leaves, strict=True)))
        wanted = [PartitionSpec(*split.spec, *[None] * (x.ndim - 3)) for x in outs]
        out, lse, *top = map(put, outs, wanted)
        return Results(out, lse, top[0] if top else None)

    return jax.jit(call)


# ------------------------------------------------------------------- partition specs


def _by_layout(plan: KernelPlan, batch: Names, heads: Names) -> tuple[Names | None, ...]:
    """The entries of a PartitionSpec for [B, T, N, D] or [B, N, T, D]."""
    entries = (batch or None, None, heads or None, None)
    return entries if plan.layout == "BTNH" else (entries[0], entries[2], entries[1], entries[3])


def _specs(problem: Problem, split: Split) -> typing.Any:
    """The operands with a PartitionSpec in place of each array."""
    tree_of: typing.Any = Operands
    plan = problem.plan
    present = problem.arrange(range(problem.structure.num_leaves))
    main = lambda names: PartitionSpec(*_by_layout(plan, split.batch, names))
    sizes = {"b": plan.batch, "h": plan.q_heads}
    captured = lambda programs: tuple(
        PartitionSpec(*(_axes_of(split, dim) for dim in dims)) for dims in split_dims(programs, sizes)
    )
    lists = None
    if plan.blocks is not None:
        head = (split.batch if plan.blocks.batch > 1 else (), split.heads if plan.blocks.heads > 1 else ())
        lists = BlockLists._make(
            None if x is None else PartitionSpec(*(n or None for n in head)) for x in present.lists
        )
    return tree_of(
        query=main(split.heads),
        key=main(_key_axes(split, plan.kv_heads)),
        value=main(_key_axes(split, plan.kv_heads)),
        query_extra=None if present.query_extra is None else main(split.heads),
        key_extra=None if present.key_extra is None else main(_key_axes(split, plan.extra_heads)),
        sinks=None if present.sinks is None else PartitionSpec(split.heads or None),
        score_captures=captured(_score_programs(problem)),
        mask_captures=captured(_given(plan.mask)),
        dropout_captures=captured(_given(plan.dropout)),
        lists=lists,
    )


def _axes_of(split: Split, dim: str | None) -> Names | None:
    return {"b": split.batch, "h": split.heads, None: ()}[dim] or None


def _score_programs(problem: Problem) -> tuple[Program, ...]:
    """The program of score_mod and the program of its derivative, which read the same captured arrays."""
    return _given(problem.plan.score, problem.derivative)


def _given(*programs: Program | None) -> tuple[Program, ...]:
    return tuple(p for p in programs if p is not None)


def _key_axes(split: Split, heads: int) -> Names:
    """The axes that split the key heads: the longest prefix of the query heads' axes that divides `heads` evenly."""
    count = len(split.heads)
    while heads % split.count(split.heads[:count]):
        count -= 1
    return split.heads[:count]


# ------------------------------------------------------------------- a device's share


def _share(problem: Problem, operands: Operands, split: Split) -> tuple[Problem, Operands]:
    """The problem and the operands of this device, from the `operands` that shard_map passes to the device."""
    plan = problem.plan
    share = Share(plan.batch, split.count(split.batch), plan.q_heads, split.count(split.heads))
    score = share_of_program(_score_programs(problem), share)
    mask, dropout = (share_of_program(_given(p), share) for p in (plan.mask, plan.dropout))
    starts = {
        "b": lambda: _place(split.batch) * share.entries["b"],
        "h": lambda: _place(split.heads) * share.entries["h"],
    }
    with_starts = lambda arrays, part: (*arrays, *(starts[axis]() for axis in part.starts))
    first = lambda part: part.programs[0] if part.programs else None
    cut = functools.partial(_own_heads, plan, split)
    key, value = cut(operands.key, plan.kv_heads), cut(operands.value, plan.kv_heads)
    key_extra = None if operands.key_extra is None else cut(operands.key_extra, plan.extra_heads)
    heads = 2 if plan.layout == "BTNH" else 1
    blocks = plan.blocks
    if blocks is not None:
        fewer = lambda count, axis: count if count == 1 else share.entries[axis]
        blocks = dataclasses.replace(blocks, batch=fewer(blocks.batch, "b"), heads=fewer(blocks.heads, "h"))
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
    """The index of this device's share along the axes, int32."""
    return lax.axis_index(names).astype(jnp.int32)


def _own_heads(plan: KernelPlan, split: Split, x: Array, heads: int) -> Array:
    """The key heads that this device's query heads read, selected from the key heads that the device has.

    Fewer axes may split the key heads than the query heads (`_key_axes`). Then every run of `each` consecutive query
    heads of a device reads one key head, and the device gets one copy of that key head for each run. A device whose
    query heads all belong to one group gets a single key head.
    """
    own_axes = _key_axes(split, heads)
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
