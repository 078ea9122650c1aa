"""The lists of a block mask whose arrays are traced: a primitive, of which each of several devices makes its share.

Lists of more than transpose.LARGE blocks are kept as bits, because traced lists are as wide as there are key blocks:
a call expands them (block_mask/transpose.py) for as long as it runs.

A device classifies the blocks of its batch entries and heads from its entries of each array that the mask indexes with
plain b or h (ir/split_axes.py). Over automatic axes the primitive has a partitioning rule; without one XLA gathers the
parts of the devices at many steps, also inside loops. Over explicit axes the same rule is applied by jax.shard_map.

The "four list arrays" are kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices of parts.py; here the
indices are as wide as there are key blocks. "Arrays" are these, or the bits of the partial and of the full blocks.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flexjax import partition
from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, compiled_bits, compiled_traced
from flexjax.block_mask.transpose import FULL, PARTIAL
from flexjax.integers import cdiv
from flexjax.ir.split_axes import Share, share_of_program, split_dims
from flexjax.mod_tools.settings import own
from flexjax.partition import Mesh, Names, Rule, Spec

Array = jax.Array
Split = dict[str, Names]  # the axes over which the batch ("b") and the heads ("h") are split


def traced_lists(mask: BlockedMask, captures: Sequence[Array], exact: bool, work: Split | None = None) -> list[Array]:
    """The arrays of a mask, computed on the device; several devices make those of their shares.

    They have the name "flexjax_lists", for policies of jax.checkpoint. `work` has the explicit mesh axes that split
    the batch and the heads of the call; None: those that split the captures.
    """
    return [checkpoint_name(x, "flexjax_lists") for x in _traced_lists(mask, captures, exact, work)]


def _traced_lists(mask: BlockedMask, captures: Sequence[Array], exact: bool, work: Split | None) -> list[Array]:
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in captures)]
    bits = math.prod((*mask.heads, *mask.counts)) > transpose.LARGE
    for mesh in meshes:
        if partition.explicit_names(mesh):
            return _over_explicit_axes(mask, captures, exact, bits, mesh, work)
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    run = _lists if kinds - {AxisType.Auto} else block_lists_p.bind  # the primitive has a rule for automatic axes only
    return run(*captures, mask=mask, exact=exact, bits=bits)


def _lists(*captures: Array, mask: BlockedMask, exact: bool, bits: bool) -> list[Array]:
    """What the primitive computes."""
    return [*compiled_bits(mask, exact)(captures)] if bits else lists_of_classes(compiled_traced(mask, exact)(captures))


@jax.jit  # one program also where each operation would be one, inside shard_map that is not jitted
def lists_of_classes(classes: Array) -> list[Array]:
    """The four list arrays of blocks with these classes, int8 [B, H, q blocks, kv blocks]."""
    return [*transpose.lists_of(classes == PARTIAL), *transpose.lists_of(classes == FULL)]


# ------------------------------------------------------------------- the primitive

block_lists_p = Primitive("flexjax_block_lists")
block_lists_p.multiple_results = True


@block_lists_p.def_abstract_eval
def _types(*captures: core.ShapedArray, mask: BlockedMask, exact: bool, bits: bool) -> list[core.ShapedArray]:
    """The types of the arrays: on the mesh of the captured arrays, split over no axis."""
    heads, (rows, columns) = mask.heads, mask.counts
    where = captures[0].sharding
    spread = lambda shape: where.update(spec=PartitionSpec(*[None] * len(shape)))
    shapes = [(*heads, rows, cdiv(columns, transpose.WORD))] if bits else [(*heads, rows), (*heads, rows, columns)]
    dtype = jnp.uint32 if bits else jnp.int32
    return [core.ShapedArray(shape, dtype, sharding=spread(shape)) for shape in shapes] * 2


@functools.lru_cache(maxsize=256)
def _compiled(**params: typing.Any) -> Callable[..., list[Array]]:
    return jax.jit(functools.partial(_lists, **params))


@block_lists_p.def_impl
@own
def _run(*captures: Array, **params: typing.Any) -> list[Array]:
    """Evaluates the primitive outside of jit, by the compiled function, also under disable_jit."""
    with jax.disable_jit(False):
        return _compiled(**params)(*captures)


def _jvp(captures: Sequence[Array], _: object, **params: typing.Any) -> tuple[list[Array], list]:
    outs = block_lists_p.bind(*captures, **params)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


@own
def _batch(
    captures: Sequence[Array], dims: Sequence[int | None], **params: typing.Any
) -> tuple[list[Array], list[int]]:
    """The vmap rule: maps the plain code, not the primitive, over the mapped axes."""
    outs = jax.vmap(functools.partial(_lists, **params), in_axes=tuple(dims))(*captures)
    return outs, [0] * len(outs)


@own
def _lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, **params: typing.Any) -> typing.Any:
    """The lowering rule: a call with the partitioning rule where XLA's partitioner uses rules, else inlined."""
    how = partition.how_split(ctx, ctx.module_context.platforms[0])
    if not isinstance(how, Mesh):  # where there is no rule, the call that takes the lists says what that means
        return mlir.lower_fun(functools.partial(_lists, **params), multiple_results=True)(ctx, *flat)
    return partition.lower_with_rule(ctx, how, functools.partial(_lists, **params), _rule(how, **params), flat)


ad.primitive_jvps[block_lists_p] = _jvp
batching.primitive_batchers[block_lists_p] = _batch
mlir.register_lowering(block_lists_p, _lower)


# ------------------------------------------------------------------- the rule


def _rule(mesh: Mesh, mask: BlockedMask, exact: bool, bits: bool) -> Rule:
    """The partitioning rule of the primitive on a mesh of automatic axes.

    The batch and the heads of the lists are split as those of the captured arrays are. Rows and columns of blocks are
    never split.
    """
    program, heads, origin = mask.program, mask.heads, mask.origin
    captured = enumerate(split_dims((program,), {"b": heads[0], "h": heads[1]}))
    arguments = [" ".join(dim or f"c{i}_{at}" for at, dim in enumerate(dims)) for i, dims in captured]
    if origin is not None:
        arguments += origin.table_dims

    def choose(dims: Sequence[str], specs: Sequence[Spec]) -> Split:
        """The axes of the array whose batch (heads) is split over most devices; no axis splits both."""
        batch = partition.widest("b", heads[0], dims, specs, mesh)
        return {"b": batch, "h": partition.widest("h", heads[1], dims, specs, mesh, batch)}

    def on_device(split: Split, *captures: Array) -> list[Array]:
        """The arrays of one device's batch entries and heads, from its parts of the captured arrays."""
        shares = {axis: math.prod(mesh.shape[name] for name in names) for axis, names in split.items()}
        share = Share(heads[0], shares["b"], heads[1], shares["h"])
        own = share_of_program((program,), share)
        starts = [lax.axis_index(split[axis]).astype(jnp.int32) * share.entries[axis] for axis in own.starts]
        own_heads = (share.entries["b"], share.entries["h"])
        own_mask = mask._replace(program=own.programs[0], heads=own_heads)
        if origin is not None and origin.rows > 1:
            own_mask = own_mask._replace(origin=dataclasses.replace(origin, rows=own_heads[0]))
        read, tables = (captures, ()) if origin is None else (captures[:-2], captures[-2:])
        arrays = (*read, *starts, *tables)
        return _lists(*arrays, mask=own_mask, exact=exact, bits=bits)

    return Rule(
        arguments,
        (["b h rows words"] if bits else ["b h rows", "b h rows columns"]) * 2,
        choose=choose,
        spec=lambda split, dims: PartitionSpec(*(split.get(dim) or None for dim in dims.split())),
        on_device=on_device,
        look=lambda split, operands, specs: None,
        text=f"block lists {program.key} {heads} {mask.sizes} {exact} {bits} {origin}",
    )


# ------------------------------------------------------------------- explicit axes


def _over_explicit_axes(
    mask: BlockedMask, captures: Sequence[Array], exact: bool, bits: bool, mesh: Mesh, work: Split | None
) -> list[Array]:
    """`traced_lists` over the explicit axes of `mesh`."""
    rule = _rule(mesh, mask, exact, bits)
    specs = [(*map(partition.names_of, jax.typeof(x).sharding.spec),) for x in captures]
    split = rule.choose(rule.arguments, specs)
    if work is not None:
        split = {axis: work[axis] if n > 1 else () for axis, n in zip("bh", mask.heads, strict=True)}
    return _mapped(mask, exact, bits, mesh, tuple(split.items()))(*captures)


@functools.lru_cache(maxsize=256)
def _mapped(
    mask: BlockedMask, exact: bool, bits: bool, mesh: Mesh, split: tuple[tuple[str, Names], ...]
) -> Callable[..., list[Array]]:
    """A compiled function of the captures, split in any way, to the arrays, split by `split`."""
    rule, how = _rule(mesh, mask, exact, bits), dict(split)
    given, made = ([rule.spec(how, dims) for dims in names] for names in (rule.arguments, rule.results))

    def call(*captures: Array) -> list[Array]:
        around = jax.sharding.get_abstract_mesh()
        share = jax.shard_map(
            functools.partial(rule.on_device, how),
            mesh=mesh if around.empty else None,
            in_specs=tuple(given),
            out_specs=made,
            axis_names=set(partition.explicit_names(mesh)),
        )
        put = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec))
        return share(*map(put, captures, given))

    return jax.jit(call)
