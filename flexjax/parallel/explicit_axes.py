"""Attention whose arrays are split over explicit mesh axes: every device computes its share of the batch and the heads.

Explicit axes (AxisType.Explicit) are those whose splits are part of the types of arrays. The type of query says over which axes
its batch and its heads are split. `split_work` runs the call inside `jax.shard_map` over the explicit axes of that mesh, and each
device gets what split.py says.

Arrays that are already split this way need no collective. All other arrays are resharded on the way in: a query that is
split over its tokens or its head dim is gathered. The results are resharded to the split of query. The gradients follow
from shard_map: an array that several devices read gets the sum of their gradients, and each cotangent is split as its
primal is.

The mesh axes that are not explicit are left to auto_axes.py, or to a shard_map around the call.

A Split says over which mesh axes the batch and the heads of the work are split.

A plan (KernelPlan) is everything static about one call; operands are its arrays; a problem is a plan with the derivative program
of score_mod and the backends to ask (plan/problem.py).
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flexjax.parallel.gathers import warn_of_gathers
from flexjax.parallel.split import Split, arranged, operand_dims, share_of, spec_of
from flexjax.partition import Mesh, names_of
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import Operands, Results
from flexjax.plan.problem import Problem

Array = jax.Array
Run = Callable[[Problem, Operands], Results]


def explicit_names(mesh: Mesh) -> frozenset[str]:
    """The names of the explicit axes of the mesh."""
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in named if kind == AxisType.Explicit)


def split_of(query: Array, layout: str) -> Split | None:
    """The explicit axes that split the batch and the query heads of `query`, as a Split; None if its mesh has no explicit axis.

    layout   of query, "BTNH" or "BNTH"
    """
    where = jax.typeof(query).sharding
    if not explicit_names(where.mesh):
        return None
    parts = [names_of(part) for part in where.spec]
    return Split(where.mesh, parts[0], parts[2 if layout == "BTNH" else 1])


def split_work(problem: Problem, operands: Operands, split: Split, run: Run) -> Results:
    """The results of the whole call `problem`: runs `run` on every device of the mesh with the device's share of the operands.

    split   over which explicit axes the batch and the heads of the work are split: those that split query
    run     computes the forward pass of one device from the problem and the operands of its share

    Arrays that are split otherwise than the work are resharded first, with a FallbackWarning if that gathers them. The batch,
    token and head dimensions of the results are split as those of query; the last dimension of out is whole.
    """
    flat = jax.tree.leaves(operands)
    given = [jax.typeof(x).sharding.spec for x in flat]
    warn_of_gathers(problem, split, flat, [tuple(map(names_of, spec)) for spec in given])
    return Results(*_compiled(problem, split, PartitionSpec(*given[0][:3]), run, tuned.state())(*flat))


@functools.lru_cache(maxsize=512)
def _compiled(
    problem: Problem, split: Split, spec: PartitionSpec, run: Run, measured: object
) -> Callable[..., Results]:
    """A jitted function from the flat list of operands to the Results, which runs `run` on each device's share; cached. `rounding` of the
    Results is None.

    Eager calls also go through jit: without it, shard_map would run one operation at a time, and would refuse arrays that are on no mesh.

    spec       how the first three dimensions of query are split; those of the results become split like them
    run        computes the forward pass of one device from the problem and the operands of its share
    measured   `tuned.state()`, which changes with the measured tiles; the call is compiled again for other tiles
    """
    plan = problem.plan
    specs = [spec_of(plan, dims, split) for dims in operand_dims(problem)]
    out, stats = (spec_of(plan, arranged(plan, dims), split) for dims in ("b t h e", "b t h"))
    put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(split.mesh, spec))

    def share(*flat: Array) -> list[Array]:
        """Runs on one device: out, lse and, if there are any, max_scores of its share, from its parts of the operands."""
        results = run(*share_of(problem, problem.operands(flat), split))
        return [x for x in results if x is not None]

    def call(*flat: Array) -> Results:
        """The Results of the whole call from whole operands: reshards them, maps `share`, reshards the results to `spec`."""
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=tuple(specs),
            out_specs=[out, stats, *[stats] * plan.max_scores],
            axis_names=set(explicit_names(split.mesh)),
        )
        outs = mapped(*(put(x, spec) for x, spec in zip(flat, specs, strict=True)))
        wanted = [PartitionSpec(*spec, *[None] * (x.ndim - 3)) for x in outs]
        return Results(*map(put, outs, wanted), *[None] * (3 - len(outs)))

    return jax.jit(call)
