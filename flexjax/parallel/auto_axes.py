"""Attention whose arrays are split over automatic mesh axes: every device computes its share of the batch and the heads.

Under jit over several devices the partitioner of XLA decides how arrays are split, after the primitives of autodiff.py
are lowered. A kernel, and a loop over blocks too, it can only run whole, on every device. `lower_partitioned` lowers a
primitive as a call that the partitioner splits by our rule (jax.experimental.custom_partitioning):

    sharding rule     how a split of one array carries over to the others: by batch, heads, tokens and so on
    partition         what one device computes, once the partitioner knows how all arrays are split: the same primitive
                      on the device's share (split.py), and sums over devices of the gradients of what they share

Only splits of the batch and the heads are kept; the partitioner gathers what is split otherwise (gathers.py says so).

There is no such call in a program for one device, or inside a shard_map over all axes of the mesh. Where XLA splits the
program but would not ask the rule (`NoRule`), every device computes everything, and a warning says so.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from flexjax.parallel.gathers import warn_of_gathers
from flexjax.parallel.split import (
    Mesh,
    Names,
    Split,
    arranged,
    choose_split,
    names_of,
    operand_dims,
    own_key_heads,
    share_of,
    spec_of,
)
from flexjax.plan.problem import Problem
from flexjax.plan.tuned import plan_text, versions

Array = jax.Array


# ------------------------------------------------------------------- which programs


class NoRule(typing.NamedTuple):
    """The partitioner splits the program over several devices, but a rule of ours would not be asked; `why`: a sentence."""

    why: str


def how_split(ctx: mlir.LoweringRuleContext, platform: str) -> Mesh | NoRule | None:
    """How XLA's partitioner splits the program of a lowering: over this mesh, without a rule, or not at all (None).

    Each axis of the mesh has prime size, because the partitioner may split an array over a part of an axis.
    """
    module = ctx.module_context
    where = module.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        shape = where.mesh.shape
        others = [str(name) for name, size in shape.items() if size > 1 and name not in where.manual_axes]
        own = ", ".join(sorted(map(str, where.manual_axes)))
        because = f"jax.shard_map over the axes {own} leaves {', '.join(others)} to XLA, which has no partitioning rules inside it"
        return NoRule(_whole(because, "Pass jax.shard_map all axes")) if others else None
    if not isinstance(where, mlir.ShardingContext) or where.num_devices == 1:
        return None
    explicit = "Make the axes explicit (jax.make_mesh with AxisType.Explicit, then jax.set_mesh), or use jax.shard_map"
    if module.lowering_parameters.for_export:
        return NoRule(_whole("an exported program holds no partitioning rules", explicit))
    if platform == "tpu":
        return NoRule(_whole("XLA has no partitioning rules on a TPU", explicit))
    known = [where.abstract_mesh, jax.sharding.get_abstract_mesh()]
    known += [getattr(getattr(aval, "sharding", None), "mesh", None) for aval in ctx.avals_in]
    fits = (dict(mesh.shape) for mesh in known if mesh is not None and mesh.size == where.num_devices)
    shape = next(fits, {"devices": where.num_devices})
    axes = [(f"{name}.{i}", p) for name, size in shape.items() for i, p in enumerate(_primes(size))]
    return Mesh(tuple(p for _, p in axes), tuple(name for name, _ in axes))


def _whole(because: str, todo: str) -> str:
    return (
        f"Every device computes all of a call, and gathers first what is split: {because}. {todo}, to have the batch and the "
        "heads split."
    )


def settings_now() -> Callable[[], contextlib.AbstractContextManager]:
    """Enters, in any thread, what this thread has set of jax and lowering depends on.

    XLA may ask what one device computes in a thread of its own, which has the global settings only.
    """
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    promotion = jax.config.jax_numpy_dtype_promotion

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.numpy_dtype_promotion(promotion):
            yield

    return settings


def _primes(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


# ------------------------------------------------------------------- the arrays of a primitive


@dataclasses.dataclass(frozen=True)
class Call:
    """A primitive of autodiff.py with its parameters.

    params   of the tangent: moving; of the backward pass: wanted, has_lse
    """

    primitive: Primitive
    problem: Problem
    params: Mapping[str, typing.Any]

    @property
    def flags(self) -> tuple[bool, ...]:
        """Which movable operands have a tangent or get a gradient."""
        return self.params.get("moving", self.params.get("wanted", ()))

    @property
    def fingerprint(self) -> str:
        """A text that calls share only if they compute the same; it does not depend on the process."""
        problem, derivative = self.problem, self.problem.derivative
        text = plan_text(problem.plan), None if derivative is None else derivative.key
        parts = (versions(), self.primitive.name, text, problem.implementation, sorted(self.params.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def movable(self) -> list[int]:
        """The places, among the operands, of those that have a tangent or get a gradient."""
        places = self.problem.arrange(range(self.problem.structure.num_leaves)).movable
        return [place for place, flag in zip(places, self.flags, strict=False) if flag]

    def dims(self) -> tuple[list[str], list[str]]:
        """Names of the dimensions of each argument and of each result; see `operand_dims`."""
        plan, operands = self.problem.plan, operand_dims(self.problem)
        out, stats = arranged(plan, "b t h e"), arranged(plan, "b t h")
        moved = [operands[place] for place in self.movable]
        if "moving" in self.params:
            return [*operands, out, stats, *moved], [out, stats]
        if "wanted" in self.params:
            return [*operands, out, stats, out, *[stats] * self.params["has_lse"]], moved
        return operands, [out, stats, *[stats] * plan.max_scores]

    def on_share(self, split: Split, *flat: Array) -> list[Array]:
        """What one device computes of its parts of the arguments: its parts of the results."""
        problem, plan, n = self.problem, self.problem.plan, self.problem.structure.num_leaves
        own_problem, own = share_of(problem, problem.operands(flat[:n]), split)
        starts = len(own.score_captures) - len(problem.operands(flat[:n]).score_captures)
        flags = {name: (*self.params[name], *[False] * starts) for name in ("moving", "wanted") if name in self.params}
        bind = functools.partial(self.primitive.bind, problem=own_problem, **{**self.params, **flags})
        places = problem.arrange(range(n))
        heads = {places.key: plan.kv_heads, places.value: plan.kv_heads, places.key_extra: plan.extra_heads}
        cut = lambda x, place: own_key_heads(plan, split, x, heads[place]) if place in heads else x
        rest = flat[n:]
        if "moving" in self.params:
            rest = (*rest[:2], *(cut(x, place) for x, place in zip(rest[2:], self.movable, strict=True)))
        results = bind(*jax.tree.leaves(own), *rest)
        if "wanted" not in self.params:
            return results
        back = lambda g, place: jax.linear_transpose(lambda x: cut(x, place), flat[place])(g)[0]
        return self.summed(split, [back(g, place) for g, place in zip(results, self.movable, strict=True)])

    def summed(self, split: Split, gradients: Sequence[Array]) -> list[Array]:
        """Gradients, each summed over the devices that have the same part of its primal and other parts of the work."""
        plan, operands, results = self.problem.plan, operand_dims(self.problem), list(gradients)
        over: dict[Names, list[int]] = {}
        for i, place in enumerate(self.movable):
            apart = {name for part in spec_of(plan, operands[place], split) for name in names_of(part)}
            names = tuple(name for name in (*split.batch, *split.heads) if name not in apart)
            if names:
                over.setdefault(names, []).append(i)
        for names, which in over.items():
            for i, total in zip(which, lax.psum([results[i] for i in which], names), strict=True):
                results[i] = total
        return results


# ------------------------------------------------------------------- the rule


def lower_partitioned(ctx: mlir.LoweringRuleContext, mesh: Mesh, call: Call, flat: Sequence[typing.Any]) -> typing.Any:
    """Lowers a primitive as a call that the partitioner splits over the devices of `mesh`."""
    arguments, results = call.dims()
    settings = settings_now()
    call = dataclasses.replace(call, problem=dataclasses.replace(call.problem, settings=settings))
    bind = custom_partitioning(lambda *flat: call.primitive.bind(*flat, problem=call.problem, **call.params))

    def split_of(shapes: Sequence[typing.Any], dims: Sequence[str]) -> Split:
        return choose_split(call.problem.plan, mesh, dims, [_spec(x) for x in shapes])

    def shardings(mesh: typing.Any, split: Split, dims: Sequence[str]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(call.problem.plan, names, split)) for names in dims]

    def infer(mesh: typing.Any, operands: Sequence[typing.Any], _: object) -> list[NamedSharding]:
        return shardings(mesh, split_of(operands, arguments), results)

    def partition(mesh: typing.Any, operands: Sequence[typing.Any], outs: Sequence[typing.Any]) -> tuple:
        split = split_of((*operands, *outs), (*arguments, *results))
        if not call.flags:  # the forward pass, which is in every program
            warn_of_gathers(call.problem, split, operands, list(map(_spec, operands)))
        inputs = tuple(shardings(mesh, split, arguments))

        def on_share(*flat: Array) -> list[Array]:
            with settings():
                return call.on_share(split, *flat)

        return mesh, on_share, shardings(mesh, split, results), inputs

    mapping = lambda dims: ArrayMapping(*dims.split())
    rule = SdyShardingRule(tuple(map(mapping, arguments)), tuple(map(mapping, results)))
    bind.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    # Only the count and the platform of these devices matter: the partitioner numbers the devices of the program.
    client = ctx.module_context.backend
    devices = itertools.cycle(jax.devices() if client is None else client.devices())
    where = mlir.ShardingContext(mesh.size, tuple(itertools.islice(devices, mesh.size)), mesh)
    inside = ctx.replace(module_context=ctx.module_context.replace(axis_context=where))
    outs = mlir.lower_fun(bind, multiple_results=True)(inside, *flat)
    # In the text of the program the rule is but an address: without this, the persistent cache could take another call's code.
    with ctx.module_context.context:
        text = mlir.ir.StringAttr.get(call.fingerprint)
        outs[0].owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"flexjax_call": text})
    return outs


def _spec(x: typing.Any) -> tuple[Names, ...]:
    """The axes that split each dimension of an array; none where the older partitioner does not know yet."""
    parts = () if x.sharding is None else x.sharding.spec
    return (*map(names_of, parts), *[()] * (len(x.shape) - len(parts)))
