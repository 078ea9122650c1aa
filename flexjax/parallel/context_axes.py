"""A call whose sequence is split, over the axes of a mesh: shard_map for explicit axes, a partitioning rule for automatic ones.

In both, the batch and the heads may be split over other axes of the mesh at the same time (split.py). A device then computes its
batch entries, heads and blocks (context_forward.py, context_backward.py), and gradients of what several devices share are summed over them.
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
from flexjax.parallel.context_parallel import ContextCall, Tables, Visitors
from flexjax.parallel.explicit_axes import explicit_names
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
from flexjax.partition import Mesh, Names, NoRule, Rule, Spec
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import BlockLists, Operands
from flexjax.plan.tuned import plan_text, versions

Array = jax.Array
Run = Callable[[ContextCall, Sequence[Array]], list[Array]]


def dims_of(call: ContextCall) -> tuple[list[str], list[str]]:
    """(for each operand, for each array of the tables) the names of its dimensions in one text, such as "b t h d" or "devices q_blocks",
    both in the order of the flat lists.
    """
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
    """The names of the dimensions of the array `name`, a field of BlockLists, in the lists of stage number `stage`, such as
    "steps devices list_b0 list_h0 rows0 width_full_index0"; counts have no width.
    """
    width = "" if name.endswith("num") else f" width_{name}{stage}"
    return f"steps devices list_b{stage} list_h{stage} rows{stage}{width}"


def spec_with_tokens(call: ContextCall, dims: str, split: Split, axes: Names) -> PartitionSpec:
    """How an array is split: its batch and heads as `split` says, its tokens over the axes of the sequence, all else not at all.

    dims   the names of its dimensions, such as "b t h d": "b" batch, "h", "m" and "x" heads, "t" and "s" tokens (see `operand_dims`)
    axes   of the sequence; () if the call runs on one device
    """
    parts = spec_of(call.plan, dims, split)
    return PartitionSpec(
        *(axes or None if dim in ("t", "s") else part for dim, part in zip(dims.split(), parts, strict=True))
    )


def share_on(call: ContextCall, flat: Sequence[Array], split: Split) -> tuple[ContextCall, list[Array]]:
    """(the call, the flat list of operands and tables) of this device's batch entries and heads. Runs on each device.

    flat    this device's parts of the operands and tables of `call`, as a flat list. `Tables.classes` is still that of all batch entries
            and heads; the new one is that of this device's
    split   over which axes the batch and the heads are split
    """
    n = call.problem.structure.num_leaves
    problem, operands = share_of(call.problem, call.problem.operands(flat[:n]), split)
    tables = call.tables(flat[n:])
    classes = tables.classes
    for axis, names in enumerate((split.batch, split.heads)):
        if classes is not None and names and classes.shape[axis] > 1:
            each = classes.shape[axis] // split.count(names)
            classes = lax.dynamic_slice_in_dim(classes, lax.axis_index(names) * each, each, axis)
    tables = tables._replace(classes=classes)
    return dataclasses.replace(call, problem=problem), [*jax.tree.leaves(operands), *jax.tree.leaves(tables)]


# ------------------------------------------------------------------- explicit axes


def split_work(call: ContextCall, operands: Operands, tables: Tables, split: Split, run: Run) -> list[Array]:
    """The results of a call over explicit axes, [out, lse] and, if the plan asks for it, max_scores: calls `run` on every device with the
    call and the arrays of its share.

    operands, tables   whole arrays; those that are split otherwise than the work are resharded
    split              over which axes the batch and the heads are split
    run                from the call and the flat list of operands and tables of one device to its results

    The results are split as query is, their tokens over the axes of the sequence.
    """
    flat = [*jax.tree.leaves(operands), *jax.tree.leaves(tables)]
    return list(_compiled(call, split, run, tuned.state())(*flat))


@functools.lru_cache(maxsize=256)
def _compiled(call: ContextCall, split: Split, run: Run, measured: object) -> Callable[..., list[Array]]:
    """The call as a jitted function from the flat list of whole operands and tables to the list [out, lse] and, if the plan asks for it,
    max_scores; cached.

    split      over which axes the batch and the heads are split
    run        from the call and the flat list of operands and tables of one device to its results
    measured   `tuned.state()`, which changes with the measured tiles; the call is compiled again for other tiles
    """
    operand_names, table_names = dims_of(call)
    specs = [spec_with_tokens(call, dims, split, call.axes) for dims in (*operand_names, *table_names)]
    out, stats = (spec_with_tokens(call, arranged(call.plan, dims), split, call.axes) for dims in ("b t h e", "b t h"))

    def share(*flat: Array) -> list[Array]:
        """Runs on one device: its parts of the results, from its parts of the operands and tables."""
        return run(*share_on(call, flat, split))

    def whole(*flat: Array) -> list[Array]:
        """The list of results of the whole call from whole arrays: reshards them as `share` needs them and maps `share` over the explicit
        axes. The results are split as query is.
        """
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=tuple(specs),
            out_specs=[out, stats, *[stats] * call.plan.max_scores],
            axis_names=set(explicit_names(split.mesh)),
        )
        put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(split.mesh, spec))
        return mapped(*(put(x, spec) for x, spec in zip(flat, specs, strict=True)))

    return jax.jit(whole)


# ------------------------------------------------------------------- automatic axes


def manual_shape(ctx: mlir.LoweringRuleContext) -> Mapping[str, int]:
    """The sizes, by name, of the mesh axes that a shard_map around the primitive has made manual; {} without one.

    ctx   of the lowering rule of the primitive
    """
    where = ctx.module_context.axis_context
    if not isinstance(where, mlir.SPMDAxisContext):
        return {}
    shape = where.mesh.shape
    return {str(name): size for name, size in shape.items() if not where.manual_axes or name in where.manual_axes}


@dataclasses.dataclass(frozen=True)
class AutoCall:
    """A primitive of context_primitives.py with its parameters, on global arrays.

    primitive   forward, tangent or backward
    function    what it computes on one device: function(*flat, call=, **params)
    call        the static part of the call
    params      the parameters of the primitive beside `call`
    axes        the axes of the sequence in the mesh of the rule
    mesh        (name, size) of the same axes, in the order of that mesh
    """

    primitive: Primitive
    function: Callable[..., list[Array]]
    call: ContextCall
    params: Mapping[str, typing.Any]
    axes: Names
    mesh: tuple[tuple[str, int], ...]

    def dims(self) -> tuple[list[str], list[str]]:
        """For each argument of the primitive, and for each of its results, the names of its dimensions, such as "b t h d".

        The arguments are the operands and the tables; for tangent and backward then out and lse, and the tangents of the operands that
        have one or the cotangents of out and, with has_lse, of lse. The results are out, lse and, where the plan has them, max_scores and
        rounding; the tangents of out and lse; or the gradients of the wanted operands.
        """
        return primitive_dims(self.call.problem, self.params, tables=dims_of(self.call)[1])

    def choose(self, mesh: Mesh, dims: Sequence[str], specs: Sequence[Spec]) -> Split:
        """The axes that split the batch and the heads, by `choose_split`, but never the axes of the sequence.

        mesh          of the rule
        dims, specs   for each array the names of its dimensions and the axes that split them

        For the method "all_to_all" the last axes of the heads are left out until the devices of the sequence divide the heads that
        each share has.
        """
        plan = self.call.plan
        others = [tuple(tuple(n for n in part if n not in self.axes) for part in spec) for spec in specs]
        split = choose_split(plan, mesh, dims, others)
        if self.call.method == "all_to_all":
            heads = [n for n in (plan.q_heads, plan.kv_heads, plan.extra_heads) if n]
            while split.heads and any(n % (split.count(split.heads) * self.call.devices) for n in heads):
                split = Split(split.mesh, split.batch, split.heads[:-1], None)
        return split

    def on_device(self, split: Split, *flat: Array) -> list[Array]:
        """One device's parts of the results, from its parts of the arguments. The partitioner calls it on each device.

        split   which axes split the batch and the heads
        flat    the device's parts of the primitive's arguments, as a flat list

        Gradients are summed over the devices that hold the same part of an operand.
        """
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
            rest = (*rest[:2], *(cut(x, place) for x, place in zip(rest[2:], places, strict=True)))
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
    """Lowers a primitive of context_primitives.py on global arrays, as a call with a partitioning rule; returns the results.

    ctx        the context of the lowering rule that calls this function
    flat       the lowered arguments (MLIR values)
    function   what the primitive computes on one device: function(*flat, call=, **params)
    params     the parameters of the primitive beside the call

    Raises NotImplementedError where XLA asks no partitioning rule (`partition.how_split`), and if the program is not split over a mesh
    that has the axes of the sequence.
    """
    how = partition.how_split(ctx, ctx.module_context.platforms[0])
    if isinstance(how, NoRule):
        raise NotImplementedError(
            "A call with context= over automatic mesh axes needs a partitioning rule of XLA, which exported programs, programs for TPUs "
            "and jax.shard_map over some axes of a mesh do not have. Make the axes explicit (jax.make_mesh with AxisType.Explicit, then "
            f"jax.set_mesh), or call it inside jax.shard_map over all axes. {call.problem.call}"
        )
    axes = () if how is None else tuple(n for axis in call.axes for n in how.axis_names if n.split(".")[0] == axis)
    if how is None or Split(how, (), ()).count(axes) != call.devices:
        raise NotImplementedError(
            f"A call with context= over {' and '.join(call.axes)} is lowered for a program that is not split over the mesh that was "
            f"set when it was traced. Run it with arrays on that mesh. {call.problem.call}"
        )
    settings = partition.settings_now()
    shared = dataclasses.replace(call, problem=dataclasses.replace(call.problem, settings=settings))
    auto = AutoCall(
        primitive, function, shared, params, axes, tuple((n, how.shape[n]) for n in how.axis_names if n in axes)
    )
    arguments, results = auto.dims()
    derivative = None if call.problem.derivative is None else call.problem.derivative.key
    static = [getattr(call, f.name) for f in dataclasses.fields(call) if f.name != "problem"]
    text = (versions(), primitive.name, plan_text(call.plan), derivative, str(static), sorted(params.items()))
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
