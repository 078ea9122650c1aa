"""A split sequence over the axes of a mesh: shard_map for explicit axes, a partitioning rule for automatic ones.

Other mesh axes may split the batch and the heads at the same time (parallel/split.py). Gradients of what several
devices share are summed over these devices.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from flexjax import partition
from flexjax.backends import target as targets
from flexjax.context.context_parallel import ContextCall, Tables, Visitors
from flexjax.parallel.split import (
    Split,
    arranged,
    choose_split,
    cut_to_own_heads,
    gradients_of_parts,
    moved_places,
    operand_dims,
    primitive_dims,
    share_of,
    spec_of,
    with_starts,
)
from flexjax.partition import Mesh, Names, NoRule, Rule, Spec, explicit_names
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import BlockLists, KernelPlan, Operands
from flexjax.plan.tuned import call_text

Array = jax.Array
Run = Callable[[ContextCall, Sequence[Array]], list[Array]]


def residuals(plan: KernelPlan) -> int:
    """How many results of the forward pass the tangent pass gets: out, lse and perhaps expectations."""
    return 2 + (plan.expectations > 0)


def dims_of(call: ContextCall) -> tuple[list[str], list[str]]:
    """The dimension names of (each operand, each array of the tables), such as "b t h d" or "devices q_blocks"."""
    tables = jax.tree.unflatten(call.structure, range(call.structure.num_leaves))
    of_rounds = lambda name: tuple(f"devices {name}{i}" for i in range(len(tables.send)))
    classes = None if tables.classes is None else "b_classes h_classes q_classes k_classes"
    lists = tables.lists and tuple(
        BlockLists(
            *(
                None if x is None else _list_dims(stage, name)
                for name, x in zip(BlockLists._fields, of_stage, strict=True)
            )
        )
        for stage, of_stage in enumerate(tables.lists)
    )
    visitors_of: typing.Any = Visitors
    visitors = tables.visitors and visitors_of(
        "devices visitors", "devices visitors", "devices visited", "devices visited", "devices changed",
        tuple(f"devices place{i}" for i in range(len(tables.visitors.places))),
    )  # fmt: skip
    tree_of: typing.Any = Tables
    named = tree_of(
        "devices q_blocks", "devices k_blocks", of_rounds("send"), of_rounds("received"), lists, visitors, classes
    )
    return operand_dims(call.problem), jax.tree.leaves(named)


def _list_dims(stage: int, name: str) -> typing.Any:
    """The dimension names of the field `name` of the BlockLists, such as "steps devices list_b0 list_h0 rows0"."""
    # counts have no width
    width = "" if name.endswith("num") else f" width_{name}{stage}"
    return f"steps devices list_b{stage} list_h{stage} rows{stage}{width}"


def spec_with_tokens(call: ContextCall, dims: str, split: Split, axes: Names) -> PartitionSpec:
    """The spec of an array with dimensions `dims`, such as "b t h d"; `axes` split the tokens, () on one device."""
    parts = spec_of(call.plan, dims, split)
    return PartitionSpec(
        *(axes or None if dim in ("t", "s") else part for dim, part in zip(dims.split(), parts, strict=True))
    )


def share_on(call: ContextCall, flat: Sequence[Array], split: Split) -> tuple[ContextCall, list[Array]]:
    """(call, flat operands and tables) of this device's share of the batch and heads, from its parts of the arrays."""
    n = call.problem.structure.num_leaves
    problem, operands = share_of(call.problem, call.problem.operands(flat[:n]), split)
    tables = call.tables(flat[n:])
    # the classes are not split: they are those of all batch entries and heads
    classes = tables.classes
    for axis, names in enumerate((split.batch, split.heads)):
        if classes is not None and names and classes.shape[axis] > 1:
            each = classes.shape[axis] // split.count(names)
            classes = lax.dynamic_slice_in_dim(classes, lax.axis_index(names) * each, each, axis)
    tables = tables._replace(classes=classes)
    return dataclasses.replace(call, problem=problem), [*jax.tree.leaves(operands), *jax.tree.leaves(tables)]


# ------------------------------------------------------------------- explicit axes


def split_work(call: ContextCall, operands: Operands, tables: Tables, split: Split, run: Run) -> list[Array]:
    """The flat Results of a call over explicit axes, split as query is: maps `run` over the devices.

    Operands and tables are whole arrays; those that are split otherwise than the work are resharded.
    """
    flat = [*jax.tree.leaves(operands), *jax.tree.leaves(tables)]
    return list(_compiled(call, split, run, tuned.state())(*flat))


# `measured` (`tuned.state()`) changes with the measured tiles: the call is then compiled again
@functools.lru_cache(maxsize=256)
def _compiled(call: ContextCall, split: Split, run: Run, measured: object) -> Callable[..., list[Array]]:
    """The call as a jitted function from flat whole operands and tables to the flat Results."""
    operand_names, table_names = dims_of(call)
    specs = [spec_with_tokens(call, dims, split, call.axes) for dims in (*operand_names, *table_names)]
    rows = ("b t h e", "b t h", "b t h n")
    out, stats, sums = (spec_with_tokens(call, arranged(call.plan, dims), split, call.axes) for dims in rows)

    def share(*flat: Array) -> list[Array]:
        return run(*share_on(call, flat, split))

    def whole(*flat: Array) -> list[Array]:
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=tuple(specs),
            out_specs=[out, stats, *[stats] * call.plan.max_scores, *[sums] * (call.plan.expectations > 0)],
            axis_names=set(explicit_names(split.mesh)),
        )
        put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(split.mesh, spec))
        return mapped(*(put(x, spec) for x, spec in zip(flat, specs, strict=True)))

    return jax.jit(whole)


# ------------------------------------------------------------------- automatic axes


def manual_shape(ctx: mlir.LoweringRuleContext) -> Mapping[str, int]:
    """The sizes, by name, of the mesh axes that a shard_map around the primitive has made manual; {} without one."""
    where = ctx.module_context.axis_context
    if not isinstance(where, mlir.SPMDAxisContext):
        return {}
    shape = where.mesh.shape
    return {str(name): size for name, size in shape.items() if not where.manual_axes or name in where.manual_axes}


@dataclasses.dataclass(frozen=True)
class AutoCall:
    """A primitive of primitives.py with its parameters, on global arrays."""

    primitive: Primitive
    function: Callable[..., list[Array]]  # what it computes on one device: function(*flat, call=, **params)
    call: ContextCall
    params: Mapping[str, typing.Any]
    axes: Names  # of the sequence, in the mesh of the rule
    mesh: tuple[tuple[str, int], ...]  # (name, size) of the same axes, in the order of that mesh

    def dims(self) -> tuple[list[str], list[str]]:
        """The dimension names, such as "b t h d", of (each argument of the primitive, each result)."""
        plan, tables = self.call.plan, dims_of(self.call)[1]
        if "moving" not in self.params and "wanted" not in self.params:
            return primitive_dims(self.call.problem, self.params, tables)
        # tangent and backward get a float32 out and no rounding
        problem = dataclasses.replace(self.call.problem, plan=dataclasses.replace(plan, exact_captures=False))
        return primitive_dims(problem, self.params, tables, residuals(plan) if "moving" in self.params else 2)

    def choose(self, mesh: Mesh, dims: Sequence[str], specs: Sequence[Spec]) -> Split:
        """The axes that split the batch and the heads, by `choose_split`, but never the axes of the sequence."""
        plan = self.call.plan
        others = [tuple(tuple(n for n in part if n not in self.axes) for part in spec) for spec in specs]
        split = choose_split(plan, mesh, dims, others)
        # all_to_all: the devices of the sequence must divide the heads of each share
        if self.call.method == "all_to_all":
            heads = [n for n in (plan.q_heads, plan.kv_heads, plan.extra_heads) if n]
            while split.heads and any(n % (split.count(split.heads) * self.call.devices) for n in heads):
                split = Split(split.mesh, split.batch, split.heads[:-1], None)
        return split

    def on_device(self, split: Split, *flat: Array) -> list[Array]:
        """One device's parts of the results, from those of the arguments. The partitioner calls it on each device."""
        call, problem = self.call, self.call.problem
        fixed = problem.structure.num_leaves + call.structure.num_leaves
        own_call, own = share_on(
            dataclasses.replace(call, axes=self.axes, mesh=self.mesh, is_global=False), flat[:fixed], split
        )
        captures = lambda problem: len(problem.arrange(range(problem.structure.num_leaves)).score_captures)
        params = with_starts(self.params, captures(own_call.problem) - captures(problem))
        rest, places = flat[fixed:], moved_places(problem, self.params)
        if "moving" in self.params:
            cut = cut_to_own_heads(problem, split)
            kept = residuals(call.plan)
            rest = (*rest[:kept], *(cut(x, place) for x, place in zip(rest[kept:], places, strict=True)))
        results = self.function(*own, *rest, call=own_call, **params)
        if "wanted" not in self.params:
            return results
        specs = [spec_with_tokens(call, dims, split, self.axes) for dims in self.dims()[1]]
        work = (*split.batch, *split.heads, *self.axes)
        return gradients_of_parts(problem, split, flat, places, results, specs, work)


def lower_with_rule(
    ctx: mlir.LoweringRuleContext,
    flat: Sequence[typing.Any],
    primitive: Primitive,
    function: Callable[..., list[Array]],
    call: ContextCall,
    params: Mapping[str, typing.Any],
) -> typing.Any:
    """Lowers a primitive of primitives.py on global arrays, as a call with a partitioning rule.

    Raises NotImplementedError where XLA asks no partitioning rule, and for a mesh without the axes of the sequence.
    """
    target = targets.of_lowering(ctx, ctx.module_context.platforms[0])
    how = partition.how_split(ctx, target.platform)
    if isinstance(how, NoRule):
        raise NotImplementedError(
            "A call with context= over automatic mesh axes needs a partitioning rule of XLA, which exported programs, "
            "programs for TPUs and jax.shard_map over some axes of a mesh do not have. Make the axes explicit "
            "(jax.make_mesh with AxisType.Explicit, then jax.set_mesh), or call it inside jax.shard_map over all "
            f"axes. {call.problem.call}"
        )
    axes = () if how is None else tuple(n for axis in call.axes for n in how.axis_names if n.split(".")[0] == axis)
    if how is None or Split(how, (), ()).count(axes) != call.devices:
        raise NotImplementedError(
            f"A call with context= over {' and '.join(call.axes)} is lowered for a program that is not split over the "
            f"mesh that was set when it was traced. Run it with arrays on that mesh. {call.problem.call}"
        )
    settings = partition.settings_now()
    shared = dataclasses.replace(call, problem=dataclasses.replace(call.problem, settings=settings))
    auto = AutoCall(
        primitive, function, shared, params, axes, tuple((n, how.shape[n]) for n in how.axis_names if n in axes)
    )
    arguments, results = auto.dims()
    derivative = None if call.problem.derivative is None else call.problem.derivative.key
    static = [getattr(call, f.name) for f in dataclasses.fields(call) if f.name != "problem"]
    text = (primitive.name, call_text(call.plan, target.kind), derivative, str(static), sorted(params.items()))
    rule = Rule(
        arguments,
        results,
        choose=lambda dims, specs: auto.choose(how, dims, specs),
        spec=lambda split, dims: spec_with_tokens(call, dims, split, axes),
        on_device=auto.on_device,
        look=lambda split, operands, specs: None,
        text=repr(text),
    )
    whole = functools.partial(primitive.bind, call=call, **params)
    return partition.lower_with_rule(ctx, how, whole, rule, flat)
