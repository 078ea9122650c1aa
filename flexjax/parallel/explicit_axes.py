"""Attention over explicit mesh axes: every device computes its share of the batch and the heads.

Explicit axes (AxisType.Explicit) are those whose splits are part of the types of arrays. `split_work` runs the call
inside `jax.shard_map` over the axes that split the batch and heads of query. Arrays that are split otherwise are
resharded on the way in, and the results to the split of query. The gradient of an array that devices share is summed
by the transpose of the cast in varying.py, which `run` makes.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flexjax.parallel.gathers import warn_of_gathers
from flexjax.parallel.split import Split, arranged, operand_dims, share_of, spec_of
from flexjax.partition import explicit_names, names_of
from flexjax.plan import tuned
from flexjax.plan.kernel_plan import Operands, Results
from flexjax.plan.problem import Problem

Array = jax.Array
Run = Callable[[Problem, Operands], Results]


def split_of(query: Array, layout: str) -> Split | None:
    """The explicit axes that split the batch and the query heads; None if the mesh of `query` has no explicit axis."""
    where = jax.typeof(query).sharding
    if not explicit_names(where.mesh):
        return None
    parts = [names_of(part) for part in where.spec]
    return Split(where.mesh, parts[0], parts[2 if layout == "BTNH" else 1])


def split_work(problem: Problem, operands: Operands, split: Split, run: Run) -> Results:
    """The results of a call, split as query is: runs `run` on every device with its share of the work."""
    flat = jax.tree.leaves(operands)
    given = [jax.typeof(x).sharding.spec for x in flat]
    warn_of_gathers(problem, split, flat, [tuple(map(names_of, spec)) for spec in given])
    return _compiled(problem, split, PartitionSpec(*given[0][:3]), run, tuned.state())(*flat)


@functools.lru_cache(maxsize=512)
def _compiled(
    problem: Problem, split: Split, spec: PartitionSpec, run: Run, measured: object
) -> Callable[..., Results]:
    """A jitted function from flat operands to the Results, split by `spec`, which runs `run` on each device's share."""
    plan = problem.plan
    specs = [spec_of(plan, dims, split) for dims in operand_dims(problem)]
    out, stats, sums = (spec_of(plan, arranged(plan, dims), split) for dims in ("b t h e", "b t h", "b t h n"))
    put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(split.mesh, spec))

    def share(*flat: Array) -> list[Array]:
        results = run(*share_of(problem, problem.operands(flat), split))
        return [x for x in results if x is not None]

    def call(*flat: Array) -> Results:
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=tuple(specs),
            out_specs=[out, stats, *[stats] * plan.max_scores, *[sums] * (plan.expectations > 0)],
            axis_names=set(explicit_names(split.mesh)),
        )
        outs = mapped(*(put(x, spec) for x, spec in zip(flat, specs, strict=True)))
        wanted = [PartitionSpec(*spec, *[None] * (x.ndim - 3)) for x in outs]
        return Results.of(dataclasses.replace(plan, exact_captures=False), [*map(put, outs, wanted)])

    # eager calls go through jit too: shard_map alone runs one operation at a time and refuses arrays on no mesh
    return jax.jit(call)
