"""A call of flex_attention with `context=`: its checks, its plan, and its derivatives.

    attention the call, in the steps
    place     finds the mesh, the layout and how the arrays lie; traces the mask for the whole sequence
    attend    chooses how keys travel (parallel/context_parallel.py) and binds the call

The call is one differentiable function of its operands and tables, with rules of its own:

    forward   OnDevice.forward     inside shard_map; a primitive with a partitioning rule for automatic axes
    tangent   a primitive, linear in the tangents, whose transpose is
    backward  OnDevice.backward

Reverse mode therefore stores the operands of each device, out and lse, and nothing that a device received.
"""

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from flexjax import autodiff, dispatch
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.build import trace_placed_mask
from flexjax.check_arguments import both_masks, check_block_mask
from flexjax.combine import and_masks
from flexjax.errors import bad_argument
from flexjax.ir.origin import OriginTable, table_of, table_of_runs
from flexjax.parallel import context_axes
from flexjax.parallel.context_device import OnDevice, Passes
from flexjax.parallel.context_layout import ContextLayout
from flexjax.parallel.context_lists import known_lists
from flexjax.parallel.context_parallel import (
    ContextCall,
    ContextParallel,
    Tables,
    decide,
    devices_of,
    is_known,
    layout_for,
    refuse,
)
from flexjax.parallel.explicit_axes import split_of
from flexjax.parallel.split import Split
from flexjax.partition import Mesh, names_of
from flexjax.plan.kernel_plan import KernelPlan, Operands, Results
from flexjax.plan.mask_blocks import classes_of_lists
from flexjax.plan.problem import Problem
from flexjax.primitive import aval_like
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import TracedMod
from flexjax.types import ArrayArgument, AuxRequest, MaskMod, Origin

Array = jax.Array

PASSES = Passes(autodiff.forward_p, autodiff.tangent_p, autodiff.backward_p, autodiff.varying_alike)


class Given(typing.NamedTuple):
    """The arguments of flex_attention; `arguments`: the keywords that say what is computed."""

    query: ArrayArgument
    key: ArrayArgument
    value: ArrayArgument
    return_aux: AuxRequest | None
    arguments: dict[str, typing.Any]


class Prepared(typing.Protocol):
    """What `prepare` of prepare.py returns."""

    plan: KernelPlan
    operands: Operands

    def problem(self, implementation: tuple[str, ...] | None, text: str = "") -> Problem: ...


def attention(
    context: object, given: Given, names: tuple[str, ...] | None, text: str, prepare: typing.Callable[..., typing.Any]
) -> Results:
    """The results of a call with `context=`.

    names     backends to ask, in order
    text      the user's call in a line
    prepare   that of prepare.py. It prepares the call without its mask, which is traced here, for the whole sequence
    """
    arguments = dict(given.arguments)
    mask_mod, block_mask, origin = (arguments.pop(name) for name in ("mask_mod", "block_mask", "origin"))
    if mask_mod is not None and block_mask is not None:
        raise both_masks()
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if arguments[name] is not None:
            raise NotImplementedError(
                f"A call with context= takes no {name}, because its tokens are split over devices and permuted. Hide tokens past "
                "a length with mask_mod."
            )
    query, key, value = map(jnp.asarray, given[:3])
    placed = place(context, query, key, arguments.get("layout", "BTNH"), origin)
    call: Prepared = prepare(query, key, value, return_aux=given.return_aux, origin=placed.origin, **arguments)
    dispatch.runs_everywhere(call.plan, names)
    return attend(placed, call.plan, call.operands, call.problem(names, text), mask_mod, block_mask)


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a call with `context=` runs.

    kind      the type of the mesh axes of the sequence; Manual: inside shard_map
    mesh      (name, size) of the axes of the sequence, in the order of the mesh
    split     explicit axes that split batch and heads; None for other kinds
    layout    of the sequence
    origin    of the call's arrays, as far as mods are traced for it: batch, heads, and the lengths of the whole sequence
    """

    context: ContextParallel
    kind: AxisType
    mesh: tuple[tuple[str, int], ...]
    split: Split | None
    layout: ContextLayout
    origin: OriginTable


def place(given: object, query: Array, key: Array, layout_name: str, origin: Origin | OriginTable | None) -> Placed:
    """Where the call runs. Raises ValueError for axes, layouts and arrays that do not fit each other."""
    context = refuse(given)
    mesh = _mesh_of(query)
    devices = devices_of(context, mesh.shape)
    kinds = {kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in context.axes}
    if len(kinds) > 1:
        raise bad_argument(
            "context.axis", f"{context.axis!r}, of types {', '.join(sorted(k.name for k in kinds))}",
            "axes of one type", "Make them with the same AxisType.",
        )  # fmt: skip
    kind = kinds.pop()
    axis = 1 if layout_name == "BTNH" else 2
    share = devices if kind == AxisType.Manual else 1
    rows = tuple(x.shape[axis] * share if x.ndim == 4 else 0 for x in (query, key))
    layout = layout_for(context, devices, (rows[0], rows[1]))
    split = None
    if kind == AxisType.Explicit:
        for name, x in (("query", query), ("key", key)):
            _check_split(name, x, layout_name, context)
        split = split_of(query, layout_name) or Split(mesh, (), ())
    whole = tuple(
        length if length % size == 0 else -(-length // size) * size
        for length, size in zip((layout.q_len, layout.kv_len), layout.block_size, strict=True)
    )
    sizes = tuple((str(name), size) for name, size in mesh.shape.items() if name in context.axes)
    return Placed(context, kind, sizes, split, layout, _origin(origin, query.shape, rows, whole))


def _mesh_of(query: Array) -> Mesh:
    """The mesh that is set, or that of the array; an empty one if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = jax.typeof(query).sharding.mesh
    if mesh.empty and not isinstance(query, core.Tracer):
        where = getattr(query, "sharding", None)
        mesh = where.mesh.abstract_mesh if isinstance(where, jax.sharding.NamedSharding) else mesh
    return mesh


def _check_split(name: str, x: Array, layout_name: str, context: ContextParallel) -> None:
    """Raises ValueError if the array is split over the axes of the sequence elsewhere, or its tokens over other axes."""
    spec = [names_of(part) for part in jax.typeof(x).sharding.spec]
    tokens = 1 if layout_name == "BTNH" else 2
    wrong = any(set(part) & set(context.axes) for dim, part in enumerate(spec) if dim != tokens)
    if wrong or spec[tokens] not in ((), context.axes) or spec[3]:
        raise bad_argument(
            name, f"split as {jax.typeof(x).sharding.spec}",
            f"its tokens split over {context.axis!r} or not at all, its batch and heads over other axes, its head dim whole",
            "Reshard it, or name other axes in context.",
        )  # fmt: skip


def _origin(
    given: Origin | OriginTable | None, shape: Sequence[int], rows: Sequence[int], whole: Sequence[int]
) -> OriginTable:
    """The origin for which mods are traced. Raises ValueError if the given one says where queries or keys lie."""
    table = table_of(given, shape[0], (rows[0], rows[1]))
    if table is not None and table.layout is not None:
        raise bad_argument(
            "origin",
            "one of queries or keys beside context",
            "an origin of batch and heads",
            "context= places the sequence.",
        )
    zero = jnp.zeros((1, 1), jnp.int32)
    batches, heads = table.whole[:2] if table is not None else (1, 1)
    batch, head = (None, None) if table is None else (table.batch, table.head)
    sizes = (batches, heads, whole[0], whole[1])
    return table_of_runs(zero, zero, query_run=rows[0], key_run=rows[1], whole=sizes, batch=batch, head=head)


# ------------------------------------------------------------------- the call


def attend(
    placed: Placed,
    plan: KernelPlan,
    operands: Operands,
    problem: Problem,
    mask_mod: MaskMod | None,
    mask: BlockMask | None,
) -> Results:
    """The call of a plan that was prepared without its mask, for the arrays of `placed`."""
    layout = placed.layout
    if problem.implementation and problem.implementation[0] == dispatch.REFERENCE:
        raise NotImplementedError(
            "reference: It is dense and runs on one device; context= splits the sequence over several."
        )
    lengths = (layout.q_len, layout.kv_len)
    classes = known = None
    if mask is not None:
        _check_block_mask(mask, plan, lengths)
        traced_lists = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask))
        with contextlib.nullcontext() if traced_lists else eager_without_mesh():
            mask_mod = mask.mask_mod
            classes = classes_of_lists(mask, *layout.block_size) if mask.from_user_lists else None
        if classes is not None and not traced_lists:
            known = np.any(np.asarray(classes), axis=(0, 1), keepdims=True)[0, 0]
    traced = _trace(mask_mod, lengths, plan, placed.origin)
    own = plan if placed.split is None else _share(plan, placed.split)
    decision = decide(placed.context, layout, own, traced, known)
    rounds = decision.rounds
    send, received = ((), ()) if rounds is None else (rounds.send, rounds.received)
    blocks: typing.Any = (layout.query_blocks, layout.key_blocks, send, received)
    query_blocks, key_blocks, send, received = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), blocks)
    made = None
    if classes is None and is_known(layout, traced):
        made = known_lists(traced, layout, decision.method, rounds)
    lists = visitors = None
    if made is not None:
        lists, visitors = jax.tree.map(jnp.asarray, (tuple(stage.lists for stage in made.stages), made.visitors))
    tables = Tables(query_blocks, key_blocks, send, received, lists, visitors, classes)
    operands = operands._replace(mask_captures=tuple(traced.arrays), origin=None)
    plan = dataclasses.replace(plan, mask=traced.program, origin=None)
    problem = dataclasses.replace(problem, plan=plan, structure=jax.tree.structure(operands))
    axes = placed.context.axes if layout.devices > 1 else ()
    call = ContextCall(
        problem=problem,
        axes=axes,
        mesh=placed.mesh,
        devices=layout.devices,
        method=decision.method,
        lengths=lengths,
        block_size=layout.block_size,
        shifts=() if rounds is None else rounds.shifts,
        checked=decision.checked,
        blocks=() if made is None else tuple(stage.layout for stage in made.stages),
        is_global=placed.kind == AxisType.Auto,
        structure=jax.tree.structure(tables),
    )
    if placed.kind == AxisType.Explicit:
        assert placed.split is not None
        outs = context_axes.split_work(call, operands, tables, placed.split, run)
    else:
        outs = run(call, [*jax.tree.leaves(operands), *jax.tree.leaves(tables)])
    return Results(outs[0], outs[1], outs[2] if plan.max_scores else None)


def _check_block_mask(mask: BlockMask, plan: KernelPlan, lengths: tuple[int, int]) -> None:
    counts: typing.Any = dataclasses.replace(plan, q_len=lengths[0], kv_len=lengths[1])
    check_block_mask(mask, counts, plan.layout)
    if mask.origin is not None:
        raise bad_argument(
            "block_mask",
            "made with an origin beside context",
            "one of the whole sequence",
            "context= places the sequence.",
        )


def _share(plan: KernelPlan, split: Split) -> KernelPlan:
    """The plan with the counts of a device's batch entries and heads."""
    batch, heads = split.count(split.batch), split.count(split.heads)
    return dataclasses.replace(
        plan,
        batch=max(1, plan.batch // batch),
        q_heads=max(1, plan.q_heads // heads),
        kv_heads=max(1, plan.kv_heads // heads),
        extra_heads=plan.extra_heads and max(1, plan.extra_heads // heads),
    )


def _trace(mask_mod: MaskMod | None, lengths: tuple[int, int], plan: KernelPlan, origin: OriginTable) -> TracedMod:
    """The mask with the ends of the sequence, traced for its positions, where the last block reaches past an end."""

    def inside(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        on = jnp.asarray(True)
        if origin.whole[2] > lengths[0]:
            on = on & (q_idx < lengths[0])
        return on & (kv_idx < lengths[1]) if origin.whole[3] > lengths[1] else on

    sizes = (plan.batch, plan.q_heads, plan.q_len, plan.kv_len)
    ends = origin.whole[2:] != lengths
    if mask_mod is None:
        return trace_placed_mask(inside, sizes, origin)
    return trace_placed_mask(and_masks(inside, mask_mod) if ends else mask_mod, sizes, origin)


# ------------------------------------------------------------------- differentiation


def run(call: ContextCall, flat: Sequence[Array]) -> list[Array]:
    """out, lse and, if asked, max_scores, from the operands and the tables, flat."""
    return list(_compiled(call, *(flat if call.is_global else autodiff.varying_alike(flat))))


def _split(call: ContextCall, flat: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Operands and tables, and what follows them."""
    n = call.problem.structure.num_leaves + call.structure.num_leaves
    return list(flat[:n]), list(flat[n:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: ContextCall, *flat: Array) -> tuple[Array, ...]:
    if call.is_global:
        return tuple(forward_p.bind(*flat, call=call))
    return tuple(OnDevice.of(PASSES, call, flat).forward())


_compiled = jax.jit(_attend, static_argnums=0)
"""Under jit also where the call is not: inside shard_map, each operation would be a program of its own."""


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _jvp(call: ContextCall, primals: Sequence[Array], tangents: Sequence[object]) -> tuple[tuple, tuple]:
    out, lse, *top = _attend(call, *primals)
    out, lse = checkpoint_name(out, "flexjax_out"), checkpoint_name(lse, "flexjax_lse")
    indices = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    given = [None if i is None or isinstance(tangents[i], SymbolicZero) else tangents[i] for i in indices]
    moving = tuple(x is not None for x in given)
    if any(moving):
        fixed = [*primals, out, lse]
        moved = tangent_p.bind(*fixed, *(x for x in given if x is not None), call=call, moving=moving)
    else:
        moved = [jnp.zeros_like(out), jnp.zeros_like(lse)]
    return (out, lse, *top), (*moved, *map(jnp.zeros_like, top))


def _tangent(*flat: Array, call: ContextCall, moving: tuple[bool, ...]) -> list[Array]:
    fixed, (out, lse, *tangents) = _split(call, flat)
    return OnDevice.of(PASSES, call, fixed).tangent(out, lse, tangents, moving)


def _backward(*flat: Array, call: ContextCall, wanted: tuple[bool, ...], has_lse: bool) -> list[Array]:
    fixed, (out, lse, d_out, *d_lse) = _split(call, flat)
    return OnDevice.of(PASSES, call, fixed).backward(out, lse, d_out, d_lse[0] if has_lse else None, wanted)


def _tangent_transpose(
    cotangents: Sequence[Array | ad.Zero], *flat: typing.Any, call: ContextCall, moving: tuple[bool, ...]
) -> list:
    fixed, (out, lse, *linear) = _split(call, flat)
    d_out, d_lse = cotangents
    nothing: list = [None] * (len(fixed) + 2)
    if isinstance(d_out, ad.Zero) and isinstance(d_lse, ad.Zero):
        return nothing + [ad.Zero(x.aval) for x in linear]
    d_out = jnp.zeros_like(out) if isinstance(d_out, ad.Zero) else d_out
    given = [*fixed, out, lse, d_out, *([] if isinstance(d_lse, ad.Zero) else [d_lse])]
    run = backward_p.bind if call.is_global else _backward
    return nothing + list(run(*given, call=call, wanted=moving, has_lse=not isinstance(d_lse, ad.Zero)))


def _primitive(name: str, function: typing.Callable[..., list[Array]], types: typing.Callable[..., list]) -> Primitive:
    """A primitive that computes `function` on arrays of one device, or on global arrays under a partitioning rule."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, **params: types(avals, **params))
    primitive.def_impl(lambda *flat, **params: jax.jit(functools.partial(primitive.bind, **params))(*flat))

    def lower(ctx: mlir.LoweringRuleContext, *flat: typing.Any, call: ContextCall, **params: typing.Any) -> typing.Any:
        if call.is_global and call.axes:
            return context_axes.lower_with_rule(ctx, flat, primitive, function, call, params)
        sizes = [(name, size) for name, size in context_axes.manual_shape(ctx).items()]
        plain = [core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]  # type: ignore[attr-defined]
        jaxpr = jax.make_jaxpr(functools.partial(function, call=call, **params), axis_env=sizes)(*plain)
        inlined = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
        return inlined(ctx.replace(avals_in=plain), *flat)

    def differentiate(primals: Sequence[Array], tangents: Sequence[typing.Any], **params: typing.Any) -> tuple:
        if params["call"].is_global:
            raise NotImplementedError(
                "Second derivatives of a call with context= are not computed over automatic mesh axes. Make the axes explicit, or "
                "call it inside jax.shard_map."
            )
        return jax.jvp(functools.partial(function, **params), list(primals), list(map(ad.instantiate_zeros, tangents)))

    def batch(flat: Sequence[Array], dims: Sequence[int | None], **params: typing.Any) -> tuple:
        if params["call"].is_global:
            raise NotImplementedError(
                "A call with context= is not mapped by jax.vmap over automatic mesh axes. Make the mapped axis a part of the batch, "
                "make the axes explicit, or call it inside jax.shard_map."
            )
        outs = jax.vmap(functools.partial(function, **params), in_axes=tuple(dims))(*flat)
        return outs, [0] * len(outs)

    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    return primitive


def _forward(*flat: Array, call: ContextCall) -> list[Array]:
    return OnDevice.of(PASSES, call, flat).forward()


def _forward_types(avals: Sequence[core.ShapedArray], call: ContextCall) -> list[core.ShapedArray]:
    plan, query = call.plan, avals[0]
    rows = query.shape[:-1]
    stats = core.ShapedArray(rows, jnp.dtype(plan.score_dtype))
    found = [core.ShapedArray((*rows, plan.value_dim), query.dtype), stats, *[stats] * plan.max_scores]
    return [aval_like(query, x.shape, x.dtype) for x in found]


def _tangent_types(avals: Sequence[core.ShapedArray], call: ContextCall, moving: tuple[bool, ...]) -> list:
    call.problem.needed_derivative()
    return list(_split(call, avals)[1][:2])  # type: ignore[arg-type]


def _backward_types(
    avals: Sequence[core.ShapedArray], call: ContextCall, wanted: tuple[bool, ...], has_lse: bool
) -> list[core.ShapedArray]:
    places = call.problem.arrange(range(call.problem.structure.num_leaves)).movable
    return [avals[place] for place, want in zip(places, wanted, strict=True) if want]


forward_p = _primitive("flexjax_context_forward", _forward, _forward_types)
tangent_p = _primitive("flexjax_context_tangent", _tangent, _tangent_types)
backward_p = _primitive("flexjax_context_backward", _backward, _backward_types)
ad.primitive_transposes[tangent_p] = _tangent_transpose
