"""Functions that XLA's partitioner splits over devices by a rule of ours: jax.experimental.custom_partitioning.

Under jit over several devices the partitioner decides how arrays are split, after the program is lowered. A kernel, or a loop
whose steps depend on data, it can only run whole, on every device. `lower_with_rule` lowers a function as a call with

    sharding rule     how a split of one array carries over to the others: dimensions with one name are split alike
    partition         what one device computes of its parts of the arguments, once it is known how all arrays are split

"Axes" are those of a mesh of devices, "dimensions" those of arrays. The names of an array's dimensions are one text, such as
"b t h d".

A Rule says how a function is split: names of dimensions, and functions that choose the split.
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
    """XLA splits the program over several devices but would not ask a rule of ours, so every device computes all of a call.

    why   the reason and what to do: whole sentences for a warning
    """

    why: str


def how_split(ctx: mlir.LoweringRuleContext, platform: str) -> Mesh | NoRule | None:
    """How XLA's partitioner splits the program that the lowering rule with context `ctx` is called for.

    platform   that the program is lowered for

    Returns one of three. A mesh: the partitioner splits the program over its devices by rules; each of its axes has prime size, because
    the partitioner may split an array over a part of an axis. NoRule: it splits the program without asking rules (on a TPU, in an
    exported program, inside a shard_map that leaves axes of more than one device to XLA). None: it does not split the program (one
    device, or a shard_map over all axes of more than one device).
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
    """The sentences of NoRule.why: that every device computes all of a call, why (`because`, a clause), and what to do about it
    (`todo`, an imperative).
    """
    return (
        f"Every device computes all of a call, and gathers first what is split: {because}. {todo}, to have the batch and the "
        "heads split."
    )


OF_PAGES = _whole(
    "keys in pages have no partitioning rule",
    "Use jax.shard_map over the requests or the heads, with origin=Origin(batch=..., head=...) for mods that read them",
)


def settings_now() -> Callable[[], contextlib.AbstractContextManager]:
    """A function that returns a context; the context applies, in any thread, jax settings as they are in this thread now.

    These are the settings that lowering depends on: x64 mode, precision of matrix products, dtype promotion. XLA asks what one
    device computes in a thread of its own, which has the global settings only.
    """
    now: typing.Any = jax.config
    x64, precision = now.jax_enable_x64, now.jax_default_matmul_precision
    promotion = now.jax_numpy_dtype_promotion

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        """The context with the settings of the thread that called settings_now."""
        with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.numpy_dtype_promotion(promotion):
            yield

    return settings


def _primes(number: int) -> Iterator[int]:
    """The prime factors of the number, ascending, each as often as it divides the number; none of a number below 2."""
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


# ------------------------------------------------------------------- how arrays are split


def names_of(part: object) -> Names:
    """The mesh axes in one entry of a PartitionSpec, which is None, a name or a tuple of names, as a tuple."""
    return () if part is None else tuple(part) if isinstance(part, tuple) else (part,)  # type: ignore[return-value]


def _spec(x: typing.Any) -> Spec:
    """The Spec of an array (or its shape) with a sharding; no dimension is split if the sharding is None, as before the older
    partitioner (GSPMD) knows it.
    """
    parts = () if x.sharding is None else x.sharding.spec
    return (*map(names_of, parts), *[()] * (len(x.shape) - len(parts)))


def widest(dim: str, size: int, dims: Sequence[str], specs: Sequence[Spec], mesh: Mesh, taken: Names = ()) -> Names:
    """The axes by which to split the dimension with the name `dim`: those of the array that splits it over most
    devices.

    size    of the dimension
    dims    for each array the names of its dimensions, one text such as "b t h d"; specs: for each array the axes that
            split each of them. An array without the dimension is skipped
    taken   axes that may not be used, because another dimension is split over them

    The axes of an array count up to the first one that is taken or that would split the dimension into unequal parts. Of several
    arrays that split it over equally many devices, the first decides. () if no array splits the dimension.
    """
    found: Names = ()
    count = lambda names: math.prod(mesh.shape[name] for name in names)
    for names, spec in zip(dims, specs, strict=True):
        if dim in names.split():
            found = max(found, _even(spec[names.split().index(dim)], size, mesh, taken), key=count)
    return found


def _even(names: Names, size: int, mesh: Mesh, taken: Names) -> Names:
    """The axes of `names` before the first that is taken, or that does not split into equal parts what the axes before it leave of
    `size`.
    """
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

    arguments, results   for each array the names of its dimensions, such as "b t h d"
    choose     (names of the dimensions of arrays, their specs) -> how to split the work: an object, `how` below, that only the
               functions of this rule read
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


def lower_with_rule(
    ctx: mlir.LoweringRuleContext,
    mesh: Mesh,
    function: Callable[..., list[Array]],
    rule: Rule,
    flat: Sequence[typing.Any],
) -> typing.Any:
    """Lowers `function` as a call that XLA's partitioner splits over the devices of `mesh` by `rule`; returns the
    lowered results (MLIR values).

    ctx        the context of the lowering rule that calls this function
    function   from the whole arguments to the list of results; it is lowered as it is where the partitioner splits nothing
    flat       the lowered arguments (MLIR values)

    The call carries a digest of `rule.text` as an attribute. What one device computes is lowered under jax's settings
    of this thread.
    """
    settings = settings_now()
    call = custom_partitioning(lambda *flat: function(*flat))

    def shardings(mesh: typing.Any, how: typing.Any, dims: Sequence[str]) -> list[NamedSharding]:
        """The shardings of arrays for the work split by `how`, in order.

        mesh   of the shardings
        how    what `rule.choose` returned
        dims   the names of the dimensions of each array
        """
        return [NamedSharding(mesh, rule.spec(how, names)) for names in dims]

    def infer(mesh: typing.Any, operands: Sequence[typing.Any], _: object) -> list[NamedSharding]:
        """The shardings of the results, from arguments with shardings (`operands`): the split that `rule.choose` finds for these
        arguments alone. The partitioner asks for them before `partition`.
        """
        return shardings(mesh, rule.choose(rule.arguments, list(map(_spec, operands))), rule.results)

    def partition(mesh: typing.Any, operands: Sequence[typing.Any], outs: Sequence[typing.Any]) -> tuple:
        """What custom_partitioning asks for: (mesh, what one device computes, shardings of the results, of the arguments).

        operands, outs   shapes of the arguments and results, with the shardings that the partitioner found
        """
        specs = [_spec(x) for x in (*operands, *outs)]
        how = rule.choose((*rule.arguments, *rule.results), specs)
        rule.look(how, operands, specs[: len(operands)])

        def on_device(*flat: Array) -> list[Array]:
            """The rule's `on_device`, under the settings of the thread that lowers the call."""
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
