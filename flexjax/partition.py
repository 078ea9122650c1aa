"""Functions that XLA's partitioner splits over devices by a rule of ours: jax.experimental.custom_partitioning.

Under jit the partitioner decides how arrays are split after the program is lowered. It runs a kernel, or a loop whose
steps depend on data, whole on every device, unless the kernel is a call with

    sharding rule     how a split of one array carries over to the others: dimensions with one name are split alike
    partition         what one device computes of its parts of the arguments, once the split of all arrays is known

"Axes" are those of a mesh of devices, "dimensions" those of arrays, named by one text such as "b t h d".
"""

import contextlib
import functools
import hashlib
import itertools
import math
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
from jax import core
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array
Mesh = jax.sharding.AbstractMesh
Names = tuple[str, ...]  # axes of a mesh, the outermost first
Spec = tuple[Names, ...]  # the axes that split each dimension of an array


# ------------------------------------------------------------------- which programs are split


class NoRule(typing.NamedTuple):
    """XLA splits the program over devices without asking a rule of ours: every device computes all of a call."""

    why: str


def how_split(ctx: mlir.LoweringRuleContext, platform: str) -> Mesh | NoRule | None:
    """How XLA's partitioner splits the program that is lowered with `ctx` for `platform`.

    A mesh: by rules, over its devices. NoRule: without asking rules. None: not at all.
    """
    module = ctx.module_context
    where = module.axis_context
    if isinstance(where, mlir.SPMDAxisContext):
        shape = where.mesh.shape
        others = [str(name) for name, size in shape.items() if size > 1 and name not in where.manual_axes]
        own = ", ".join(sorted(map(str, where.manual_axes)))
        because = (
            f"jax.shard_map over the axes {own} leaves {', '.join(others)} to XLA, "
            "which has no partitioning rules inside it"
        )
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
    # axes of prime size, because the partitioner may split an array over a part of an axis
    return Mesh(tuple(p for _, p in axes), tuple(name for name, _ in axes))


def _whole(because: str, todo: str) -> str:
    """The sentences of NoRule.why: `because` is a clause, `todo` an imperative."""
    return (
        f"Every device computes all of a call, and gathers first what is split: {because}. {todo}, to have the batch "
        "and the heads split."
    )


OF_PAGES = _whole(
    "keys in pages have no partitioning rule",
    "Use jax.shard_map over the requests or the heads, with origin=Origin(batch=..., head=...) for mods that read them",
)


def settings_now() -> Callable[[], contextlib.AbstractContextManager]:
    """A function that returns a context, which applies in any thread jax's settings of this thread now."""
    # XLA asks what one device computes in a thread of its own, which has the global settings only
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


def explicit_names(mesh: Mesh) -> frozenset[str]:
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in named if kind == AxisType.Explicit)


def names_of(part: object) -> Names:
    """The mesh axes in one entry of a PartitionSpec: None, a name or a tuple of names."""
    return () if part is None else tuple(part) if isinstance(part, tuple) else (part,)  # type: ignore[return-value]


def _spec(x: typing.Any) -> Spec:
    """The Spec of an array or its shape."""
    # the older partitioner (GSPMD) passes None before it knows the sharding
    parts = () if x.sharding is None else x.sharding.spec
    return (*map(names_of, parts), *[()] * (len(x.shape) - len(parts)))


def widest(dim: str, size: int, dims: Sequence[str], specs: Sequence[Spec], mesh: Mesh, taken: Names = ()) -> Names:
    """The axes of the array that splits the dimension `dim` over most devices, up to the first that is taken or uneven.

    dims    for each array the names of its dimensions, such as "b t h d"; `specs` has its axes
    taken   axes that split another dimension
    """
    found: Names = ()
    count = lambda names: math.prod(mesh.shape[name] for name in names)
    for names, spec in zip(dims, specs, strict=True):
        if dim in names.split():
            found = max(found, _even(spec[names.split().index(dim)], size, mesh, taken), key=count)
    return found


def _even(names: Names, size: int, mesh: Mesh, taken: Names) -> Names:
    """The axes of `names` before the first that is taken or does not divide what the axes before it leave of `size`."""
    found: Names = ()
    for name in names:
        size, rest = divmod(size, mesh.shape[name])
        if rest or name in taken:
            break
        found = (*found, name)
    return found


# ------------------------------------------------------------------- the rule


class Rule(typing.NamedTuple):
    """The rule by which the partitioner splits a function over devices.

    choose     (names of the dimensions of arrays, their specs) -> `how` the work is split, read by this rule alone
    spec       (how, names of an array's dimensions) -> how the array is split for that work
    on_device  (how, parts of the arguments) -> parts of the results: what one device computes
    look       (how, arguments as shapes, their specs), called once before on_device; for warnings
    text       what the function is; two functions that compute other things have other texts, in every process
    """

    arguments: Sequence[str]
    results: Sequence[str]
    choose: Callable[[Sequence[str], Sequence[Spec]], typing.Any]
    spec: Callable[[typing.Any, str], PartitionSpec]
    on_device: Callable[..., list[Array]]
    look: Callable[[typing.Any, Sequence[typing.Any], Sequence[Spec]], None]
    text: str


# What one device computes is traced and lowered where the user called jit: on a mesh with explicit axes jax 0.11.2
# would constrain each array to that mesh, inside a program of one device, which XLA refuses.
device_work_p = Primitive("flexjax_device_work")
device_work_p.multiple_results = True
no_mesh = lambda: jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
_plain = lambda x: core.ShapedArray(x.shape, x.dtype)


@device_work_p.def_abstract_eval
def _(*avals: core.ShapedArray, work: typing.Any, settings: object) -> list[core.ShapedArray]:
    return list(map(_plain, work.out_avals))


def _lower_device_work(
    ctx: mlir.LoweringRuleContext,
    *flat: typing.Any,
    work: typing.Any,
    settings: Callable[[], contextlib.AbstractContextManager],
) -> typing.Any:
    with settings(), no_mesh():
        inside = ctx.replace(avals_in=list(map(_plain, ctx.avals_in)))
        return mlir.lower_fun(jaxpr_as_fun(work), multiple_results=True)(inside, *flat)


mlir.register_lowering(device_work_p, _lower_device_work)


def lower_with_rule(
    ctx: mlir.LoweringRuleContext,
    mesh: Mesh,
    function: Callable[..., list[Array]],
    rule: Rule,
    flat: Sequence[typing.Any],
) -> typing.Any:
    """Lowers `function` of the `flat` MLIR values as a call that the partitioner splits over `mesh` by `rule`."""
    settings = settings_now()
    call = custom_partitioning(lambda *flat: function(*flat))

    def shardings(mesh: typing.Any, how: typing.Any, dims: Sequence[str]) -> list[NamedSharding]:
        return [NamedSharding(mesh, rule.spec(how, names)) for names in dims]

    def infer(mesh: typing.Any, operands: Sequence[typing.Any], _: object) -> list[NamedSharding]:
        # the partitioner asks for the shardings of the results before `partition`
        return shardings(mesh, rule.choose(rule.arguments, list(map(_spec, operands))), rule.results)

    def partition(mesh: typing.Any, operands: Sequence[typing.Any], outs: Sequence[typing.Any]) -> tuple:
        # custom_partitioning wants (mesh, what one device computes, shardings of the results, of the arguments)
        specs = [_spec(x) for x in (*operands, *outs)]
        how = rule.choose((*rule.arguments, *rule.results), specs)
        rule.look(how, operands, specs[: len(operands)])

        def on_device(*flat: Array) -> list[Array]:
            with settings(), no_mesh():
                work = jax.make_jaxpr(functools.partial(rule.on_device, how))(*map(_plain, flat))
            return device_work_p.bind(*flat, work=work, settings=settings)

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
    # In the text of the program the rule is but an address: without this, the persistent cache could take the code of
    # another call.
    with ctx.module_context.context:
        text = mlir.ir.StringAttr.get(hashlib.sha256(rule.text.encode()).hexdigest())
        outs[0].owner.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"flexjax_call": text})
    return outs
