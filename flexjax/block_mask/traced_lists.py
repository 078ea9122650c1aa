"""The lists of a block mask whose arrays are traced: a primitive, so that over several devices each makes those of its share.

A device classifies the blocks of its batch entries and heads from its entries of each array that the mask indexes with plain b
or h (ir/split_axes.py). Without a rule of ours XLA gathers the parts of the devices at many steps, also inside loops.

The "four list arrays" are kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices of parts.py; here the indices are as
wide as there are key blocks. The static parameters of the primitive are those of `traced_lists`.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, PartitionSpec

from flexjax import partition
from flexjax.block_mask import transpose
from flexjax.block_mask.classify import BlockedMask, compiled_traced
from flexjax.block_mask.transpose import FULL, PARTIAL
from flexjax.ir.split_axes import Share, share_of_program, split_dims
from flexjax.partition import Mesh, Names, Rule, Spec

Array = jax.Array
Split = dict[str, Names]
"""The axes over which the batch ("b") and the heads ("h") are split."""


def traced_lists(mask: BlockedMask, captures: Sequence[Array], exact: bool) -> list[Array]:
    """The four list arrays of a mask, computed on the device by the primitive below.

    captures   the arrays that the mask program reads, followed by the tables of its origin
    exact      whether blocks that the analysis cannot decide are evaluated entry by entry

    Where a mesh has axes that are not automatic, the same code runs without the primitive, which has a rule for automatic axes
    only.
    """
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in captures)]
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    run = _lists if kinds - {AxisType.Auto} else block_lists_p.bind
    return run(*captures, mask=mask, exact=exact)


def lists_of_whole_arrays(mask: BlockedMask, captures: Sequence[Array], exact: bool) -> list[Array]:
    """The four list arrays of a mask, computed on the device by plain code without the partitioning rule.

    captures   the arrays that the mask program reads, followed by the tables of its origin; no mesh axis splits them
    exact      whether blocks that the analysis cannot decide are evaluated entry by entry
    """
    return _lists(*captures, mask=mask, exact=exact)


def _lists(*captures: Array, mask: BlockedMask, exact: bool) -> list[Array]:
    """What the primitive computes: classifies all blocks of the mask, and returns the four list arrays of the classes.

    captures   the arrays that the mask program reads, followed by the tables of its origin
    exact      whether uncertain blocks are evaluated entry by entry; False: they count as partial
    """
    return lists_of_classes(compiled_traced(mask, exact)(captures))


@jax.jit  # one program also where each operation would be one, inside shard_map that is not jitted
def lists_of_classes(classes: Array) -> list[Array]:
    """The four list arrays of the blocks whose classes are `classes`, int8 [B, H, q blocks, kv blocks]."""
    return [*transpose.lists_of(classes == PARTIAL), *transpose.lists_of(classes == FULL)]


# ------------------------------------------------------------------- the primitive

block_lists_p = Primitive("flexjax_block_lists")
block_lists_p.multiple_results = True


@block_lists_p.def_abstract_eval
def _types(*captures: core.ShapedArray, mask: BlockedMask, exact: bool) -> list[core.ShapedArray]:
    """The types of the four list arrays, for abstract evaluation: on the mesh of the captured arrays, split over no axis. They do not
    depend on `exact`.
    """
    heads, (rows, columns) = mask.heads, mask.counts
    where = captures[0].sharding
    spread = lambda shape: where.update(spec=PartitionSpec(*[None] * len(shape)))
    pair = [
        core.ShapedArray(shape, jnp.int32, sharding=spread(shape))
        for shape in ((*heads, rows), (*heads, rows, columns))
    ]
    return pair * 2


@functools.lru_cache(maxsize=256)
def _compiled(**params: typing.Any) -> Callable[..., list[Array]]:
    """`_lists` with these static parameters as a compiled function of the captures, for calls outside of jit."""
    return jax.jit(functools.partial(_lists, **params))


@block_lists_p.def_impl
def _run(*captures: Array, **params: typing.Any) -> list[Array]:
    """Evaluates the primitive outside of jit: the four list arrays of `captures`, by the compiled function, also under disable_jit."""
    with jax.disable_jit(False):
        return _compiled(**params)(*captures)


def _jvp(captures: Sequence[Array], _: object, **params: typing.Any) -> tuple[list[Array], list]:
    """The jvp rule: (the four list arrays, zero tangents for each), because lists are integers. The tangents of the captures are not
    read.
    """
    outs = block_lists_p.bind(*captures, **params)
    return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


def _batch(
    captures: Sequence[Array], dims: Sequence[int | None], **params: typing.Any
) -> tuple[list[Array], list[int]]:
    """The vmap rule: maps the plain code, not the primitive, over the mapped axes. Returns (the four list arrays, their mapped axes, all
    0).

    captures   the operands of the primitive
    dims       the mapped axis of each, None for one that is not mapped
    """
    outs = jax.vmap(functools.partial(_lists, **params), in_axes=tuple(dims))(*captures)
    return outs, [0] * len(outs)


def _lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, **params: typing.Any) -> typing.Any:
    """The lowering rule: `_lists` as a call with the partitioning rule if XLA's partitioner splits the program by rules, else inlined.
    Returns the lowered four list arrays (MLIR values).

    ctx, flat   the context of the lowering rule, and the lowered captures
    params      the static parameters, mask and exact
    """
    how = partition.how_split(ctx, ctx.module_context.platforms[0])
    if not isinstance(how, Mesh):  # where there is no rule, the call that takes the lists says what that means
        return mlir.lower_fun(functools.partial(_lists, **params), multiple_results=True)(ctx, *flat)
    return partition.lower_with_rule(ctx, how, functools.partial(_lists, **params), _rule(how, **params), flat)


ad.primitive_jvps[block_lists_p] = _jvp
batching.primitive_batchers[block_lists_p] = _batch
mlir.register_lowering(block_lists_p, _lower)


# ------------------------------------------------------------------- the rule


def _rule(mesh: Mesh, mask: BlockedMask, exact: bool) -> Rule:
    """The partitioning rule (partition.Rule) of the primitive with these static parameters on a mesh of automatic axes.

    mesh          the mesh, whose axes may split batch ("b") and heads ("h")
    mask, exact   the static parameters, as in `traced_lists`

    The batch and the heads of the lists are split as those of the captured arrays are, and each device makes the lists of its share. Rows
    and columns of blocks are never split.
    """
    program, heads, origin = mask.program, mask.heads, mask.origin
    captured = enumerate(split_dims((program,), {"b": heads[0], "h": heads[1]}))
    arguments = [" ".join(dim or f"c{i}_{at}" for at, dim in enumerate(dims)) for i, dims in captured]
    if origin is not None:
        arguments += origin.table_dims

    def choose(dims: Sequence[str], specs: Sequence[Spec]) -> Split:
        """How batch and heads of the lists are split, for `spec` and `on_device`: {"b": axes, "h": axes}, () where nothing splits them.
        The axes are those of the array whose batch (heads) is split over most devices; no axis splits both.

        dims, specs   for each array the names of its dimensions and the axes that split them
        """
        batch = partition.widest("b", heads[0], dims, specs, mesh)
        return {"b": batch, "h": partition.widest("h", heads[1], dims, specs, mesh, batch)}

    def on_device(split: Split, *captures: Array) -> list[Array]:
        """The four list arrays of one device's batch entries and heads, from its parts of the captured arrays.

        split      the axes that `choose` has returned
        captures   its parts of the arrays that the mask program reads, followed by those of the tables of the origin
        """
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
        return _lists(*arrays, mask=own_mask, exact=exact)

    return Rule(
        arguments,
        ["b h rows", "b h rows columns"] * 2,
        choose=choose,
        spec=lambda split, dims: PartitionSpec(*(split.get(dim) or None for dim in dims.split())),
        on_device=on_device,
        look=lambda split, operands, specs: None,
        text=f"block lists {program.key} {heads} {mask.sizes} {exact} {origin}",
    )
