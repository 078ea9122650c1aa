"""Functions that XLA's partitioner splits over devices by a rule of ours: jax.experimental.custom_partitioning.

Under jit over several devices the partitioner decides how arrays are split, after the program is lowered. A kernel, or a loop
whose steps depend on data, it can only run whole, on every device. `lower_with_rule` lowers a function as a call with

    sharding rule     how a split of one array carries over to the others: dimensions with one name are split alike
    partition         what one device computes of its parts of the arguments, once it is known how all arrays are split
"""

import contextlib
import hashlib
import itertools
import math
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

Array = jax.Array
Mesh = jax.sharding.AbstractMesh
Names = tuple[str, ...]
"""Axes of a mesh, the outermost first."""
Spec = tuple[Names, ...]
"""The axes that split each dimension of an array."""


# ------------------------------------------------------------------- which programs are split


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

    XLA asks what one device computes in a thread of its own, which has the global settings only.
    """
    now: typing.Any = jax.config
    x64, precision = now.jax_enable_x64, now.jax_default_matmul_precision
    promotion = now.jax_numpy_dtype_promotion

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


# ------------------------------------------------------------------- how arrays are split


def names_of(part: object) -> Names:
    """The axes of an entry of a PartitionSpec."""
    return () if part is None else tuple(part) if isinstance(part, tuple) else (part,)  # type: ignore[return-value]


def _spec(x: typing.Any) -> Spec:
    """Of an array; nothing is split where the older partitioner does not know yet."""
    parts = () if x.sharding is None else x.sharding.spec
    return (*map(names_of, parts), *[()] * (len(x.shape) - len(parts)))


def widest(dim: str, size: int, dims: Sequence[str], specs: Sequence[Spec], mesh: Mesh, taken: Names = ()) -> Names:
    """The axes of the first array whose dimension `dim` is split over most devices.

    Axes count up to the first that is `taken`, or that makes parts of `size` unequal.
    """
    found: Names = ()
    count = lambda names: math.prod(mesh.shape[name] for name in names)
    for names, spec in zip(dims, specs, strict=True):
        if dim in names.split():
            found = max(found, _even(spec[names.split().index(dim)], size, mesh, taken), key=count)
    return found


def _even(names: Names, size: int, mesh: Mesh, taken: Names) -> Names:
    found: Names = ()
    for name in names:
        size, rest = divmod(size, mesh.shape[name])
        if rest or name in taken:
            break
        found = (*found, name)
    return found


# ------------------------------------------------------------------- the rule


class Rule(typing.NamedTuple):
    """How a function is split. `Any` stands for what `choose` returns.

    arguments, results   a name for each dimension of each array, e.g. "b t h d"
    choose     (names of arrays, their specs) -> how to split the work
    spec       (how, names of an array) -> how that array is split then
    on_device  (how, parts of the arguments) -> parts of the results
    look       (how, arguments as shapes, their specs), called once before on_device
    text       what the function is; two functions that compute other things have other texts, in every process
    """

    arguments: Sequence[str]
    results: Sequence[str]
    choose: Callable[[Sequence[str], Sequence[Spec]], typing.Any]
    spec: Callable[[typing.Any, str], PartitionSpec]
    on_device: Callable[..., list[Array]]
    look: Callable[[typing.Any, Sequence[typing.Any], Sequence[Spec]], None]
    text: str


def lower_with_rule(
    ctx: mlir.LoweringRuleContext,
    mesh: Mesh,
    function: Callable[..., list[Array]],
    rule: Rule,
    flat: Sequence[typing.Any],
) -> typing.Any:
    """Lowers `function` as a call that the partitioner splits over the devices of `mesh`."""
    settings = settings_now()
    call = custom_partitioning(lambda *flat: function(*flat))

    def shardings(mesh: typing.Any, how: typing.Any, dims: Sequence[str]) -> list[NamedSharding]:
        return [NamedSharding(mesh, rule.spec(how, names)) for names in dims]

    def infer(mesh: typing.Any, operands: Sequence[typing.Any], _: object) -> list[NamedSharding]:
        return shardings(mesh, rule.choose(rule.arguments, list(map(_spec, operands))), rule.results)

    def partition(mesh: typing.Any, operands: Sequence[typing.Any], outs: Sequence[typing.Any]) -> tuple:
        specs = [_spec(x) for x in (*operands, *outs)]
        how = rule.choose((*rule.arguments, *rule.results), specs)
        rule.look(how, operands, specs[: len(operands)])

        def on_device(*flat: Array) -> list[Array]:
            with settings():
                return rule.on_device(how, *flat)

        return mesh, on_device, shardings(mesh, how, rule.results), tuple(shardings(mesh, how, rule.arguments))

    mapping = lambda dims: tuple(ArrayMapping(*names.split()) for names in dims)
    shardy = SdyShardingRule(mapping(rule.arguments), mapping(rule.results))
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=shardy)
    # Only the count and the platform of these devices matter: the partitioner numbers the devices of the program.
    client = ctx.module_context.backend
    devices = itertools.cycle(jax.devices() if client is None else client.devices())
    where = mlir.ShardingContext(mesh.size, tuple(itertools.islice(devices, mesh.size)), mesh)
    inside = ctx.replace(module_context=ctx.module_context.replace(axis_context=where))
    outs = mlir.lower_fun(call, multiple_results=True)(inside, *flat)
    # In the text of the program the rule is but an address: without this, the persistent cache could take another call's code.
    with ctx.module_context.context:
        text = mlir.ir.StringAttr.get(hashlib.sha256(rule.text.encode()).hexdigest())
        outs[0].owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"flexjax_call": text})
    return outs
