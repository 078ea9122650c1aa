"""A call of flex_attention with `context=`: its checks and its plan.

attention   the whole call: `build`, then `run` of context_primitives.py on the devices of the mesh (parallel/context_axes.py)
build       checks and plans it: traces the mask for the whole sequence, and chooses how keys travel (context_parallel.py)
place       the first step of `build`: finds the mesh, the layout and how the arrays lie
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AxisType

from flexjax import dispatch
from flexjax.block_mask.block_mask import BlockMask
from flexjax.check_arguments import both_masks
from flexjax.combine import and_masks
from flexjax.context_lengths import ExistingRows
from flexjax.context_mask import eager_if_known, mask_of_whole, trace_mask
from flexjax.context_primitives import run
from flexjax.errors import bad_argument
from flexjax.integers import round_up
from flexjax.ir.origin import OriginTable, table_of, table_of_runs
from flexjax.parallel import context_axes
from flexjax.parallel.context_layout import ContextLayout
from flexjax.parallel.context_lists import KnownLists, known_lists
from flexjax.parallel.context_parallel import (
    ContextCall,
    ContextParallel,
    Decision,
    Tables,
    check_context,
    decide,
    devices_of,
    is_known,
    layout_for,
)
from flexjax.parallel.explicit_axes import split_of
from flexjax.parallel.split import Split
from flexjax.partition import Mesh, names_of
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan, Operands, Results
from flexjax.plan.mask_blocks import classes_of_lists
from flexjax.plan.problem import Problem
from flexjax.prepare import Call, prepare
from flexjax.types import ArrayArgument, AuxRequest, MaskMod, Origin

Array = jax.Array


class Given(typing.NamedTuple):
    """The arguments of flex_attention, but `context`. Nothing is checked yet but `names`.

    arguments   the keywords of call_arguments.Arguments, by name; one that is missing has its default
    names       backends to ask, in order; None: the default order
    text        the user's call in a line
    """

    query: ArrayArgument
    key: ArrayArgument
    value: ArrayArgument
    return_aux: AuxRequest | None
    arguments: dict[str, typing.Any]
    names: tuple[str, ...] | None
    text: str


class Built(typing.NamedTuple):
    """A call with `context=` that is checked and planned.

    placed           where it runs
    prepared         the call without its mask (prepare.py)
    decision         how keys travel
    known            the block lists of its stages; None where the devices make them when the program runs
    call             what is static: the parameter of the primitives of context_primitives.py
    operands, tables the arrays of the call, and the arrays that say which blocks each device has, sends and receives
    existing         the rows that exist; None without lengths
    """

    placed: "Placed"
    prepared: Call
    decision: Decision
    known: KnownLists | None
    call: ContextCall
    operands: Operands
    tables: Tables
    existing: ExistingRows | None


def attention(context: object, given: Given) -> Results:
    """The Results of a call with `context=`, in the layout and rows of query; rounding is None, and max_scores unless the plan asks for
    it.

    context   the argument of that name, not checked yet
    given     the other arguments

    Raises ValueError for arguments that do not fit, NotImplementedError where no backend accepts the call.
    """
    placed, _, _, _, call, operands, tables, existing = build(context, given)
    if placed.kind == AxisType.Explicit:
        assert placed.split is not None
        outs = context_axes.split_work(call, operands, tables, placed.split, run)
    else:
        outs = run(call, [*jax.tree.leaves(operands), *jax.tree.leaves(tables)])
    results = Results(outs[0], outs[1], outs[2] if call.plan.max_scores else None)
    return results if existing is None else existing.results(results)


def build(context: object, given: Given) -> Built:
    """Checks and plans a call. The mask is traced here, for the whole sequence; `prepare` prepares the rest.

    context   the argument of that name, not checked yet

    With lengths, the operands over queries and keys hold 0 in the rows that do not exist, and the mask hides these.

    Raises ValueError for arguments that do not fit, and NotImplementedError if no backend accepts the plan, if the call names "reference"
    first, and for lengths beside a block mask of user lists.
    """
    arguments = dict(given.arguments)
    mask_mod, block_mask, origin = (arguments.pop(name, None) for name in ("mask_mod", "block_mask", "origin"))
    if mask_mod is not None and block_mask is not None:
        raise both_masks()
    query, key, value = map(jnp.asarray, given[:3])
    if query.dtype == FLOAT8:
        raise bad_argument("query", f"of dtype {FLOAT8} beside context=", "bfloat16", "Cast query, key and value.")
    layout_name = arguments.get("layout", "BTNH")
    origin = _origin_with(block_mask, origin)
    placed = place(context, query, key, layout_name, origin)
    axes = placed.context.axes if placed.kind == AxisType.Manual else ()
    dim = 1 if layout_name == "BTNH" else 2
    existing = ExistingRows.of(arguments, query.shape[0], placed.layout, axes, dim)
    if existing is not None:
        extras = {name: arguments.get(name) for name in ("query_extra", "key_extra")}
        given_extras = {name: None if x is None else jnp.asarray(x) for name, x in extras.items()}
        cut = existing.cut({"query": query, "key": key, "value": value, **given_extras})
        query, key, value = (typing.cast(Array, cut[name]) for name in ("query", "key", "value"))
        arguments |= {name: cut[name] for name in extras}
        arguments |= {"query_seq_lengths": None, "key_value_seq_lengths": None}
    call = prepare(query, key, value, return_aux=given.return_aux, origin=placed.origin, **arguments)
    dispatch.runs_everywhere(call.plan, given.names)
    if given.names and given.names[0] == dispatch.REFERENCE:
        raise NotImplementedError(
            "reference: It is dense and runs on one device; context= splits the sequence over several."
        )
    return _planned(placed, call, call.problem(given.names, given.text), mask_mod, block_mask, existing)


@dataclasses.dataclass(frozen=True)
class Placed:
    """Over which mesh axes a call with `context=` is split, and where its arrays lie.

    context   the argument context, checked
    kind      the type of the mesh axes of the sequence. Manual: inside shard_map, with arrays of one device; else arrays are global
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
    """Finds the mesh axes, the context layout, the split of batch and heads, and the origin of a call with `context=`.

    given         the argument context, not checked yet
    query, key    the call's arrays, inside shard_map those of one device. Their rank is not checked here
    layout_name   "BTNH" or "BNTH", the argument layout
    origin        that of the call; None without one

    Raises ValueError for mesh axes, context layouts and arrays that do not fit each other, and for an origin of queries or keys.
    """
    context = check_context(given)
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
        length if length % size == 0 else round_up(length, size)
        for length, size in zip((layout.q_len, layout.kv_len), layout.block_size, strict=True)
    )
    sizes = tuple((str(name), size) for name, size in mesh.shape.items() if name in context.axes)
    return Placed(context, kind, sizes, split, layout, _origin(origin, query.shape, rows, whole))


def _mesh_of(query: Array) -> Mesh:
    """The mesh that is set (jax.set_mesh, jax.shard_map), else that on which query lies; an empty one if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = jax.typeof(query).sharding.mesh
    if mesh.empty and not isinstance(query, core.Tracer):
        where = getattr(query, "sharding", None)
        mesh = where.mesh.abstract_mesh if isinstance(where, jax.sharding.NamedSharding) else mesh
    return mesh


def _check_split(name: str, x: Array, layout_name: str, context: ContextParallel) -> None:
    """Raises ValueError unless the explicit axes that split x, the argument `name`, fit the context: its tokens are split over the axes
    of the context or not at all, its batch and heads only over other axes, and its head dim not at all.

    layout_name   "BTNH" or "BNTH", which says where the tokens are
    """
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
    """The origin for which mods are traced: the batch and heads of the given origin, and one run of the whole sequence from 0.

    given   the argument origin, or the origin of the block mask
    shape   that of query
    rows    numbers of rows in the global arrays of query and key
    whole   lengths of queries and keys in the whole sequence, in whole blocks of the layout

    Raises ValueError if the given origin says where queries or keys lie, because the context does.
    """
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


# ------------------------------------------------------------------- the plan


def _planned(
    placed: Placed,
    prepared: Call,
    problem: Problem,
    mask_mod: MaskMod | None,
    mask: BlockMask | None,
    existing: ExistingRows | None,
) -> Built:
    """Plans the mask of a call, how keys travel and the tables of the devices: the last part of `build`, whose result it returns.

    placed              where the call runs
    prepared, problem   the call without its mask, and its problem
    mask_mod, mask      the argument mask_mod and the argument block_mask; at most one is not None
    existing            the rows that exist; None without lengths. Raises NotImplementedError for them beside a mask of user lists
    """
    layout, plan, operands = placed.layout, prepared.plan, prepared.operands
    lengths = (layout.q_len, layout.kv_len)
    classes = known = None
    if mask is not None:
        of_whole = mask_of_whole(mask, plan, lengths, placed.origin)
        if existing is not None and mask.lists_decide:
            raise NotImplementedError(
                "A call with context= takes no lengths beside a block mask from user lists (BlockMask.from_kv_blocks), whose full blocks "
                "no mask cuts. Hide tokens past a length with mask_mod, or pass lists without them."
            )
        mask_mod = of_whole
        with eager_if_known(mask):
            classes = classes_of_lists(mask, *layout.block_size) if mask.lists_decide else None
        if classes is not None and not isinstance(classes, core.Tracer):
            known = np.any(np.asarray(classes), axis=(0, 1), keepdims=True)[0, 0]
    if existing is not None:
        exists = existing.mask_mod(placed.origin)
        mask_mod = exists if mask_mod is None else and_masks(exists, mask_mod)
    traced = trace_mask(mask_mod, lengths, plan, placed.origin)
    own = plan if placed.split is None else _share(plan, placed.split)
    decision = decide(placed.context, layout, own, traced, (plan.batch, plan.q_heads), known)
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
    return Built(placed, prepared, decision, made, call, operands, tables, existing)


def _origin_with(mask: object, given: Origin | OriginTable | None) -> Origin | OriginTable | None:
    """The origin of a call: `given`, else that of its block mask or None. Raises ValueError if the mask's places queries or keys."""
    own = mask.origin if isinstance(mask, BlockMask) else None
    if own is not None and own.layout is not None:
        raise bad_argument(
            "block_mask",
            "made with an origin of queries or keys beside context",
            "one of the whole sequence",
            "context= places the sequence.",
        )
    return own if given is None else given


def _share(plan: KernelPlan, split: Split) -> KernelPlan:
    """The plan with the numbers of batch entries, query heads, key heads and heads of the extra features that one device has if `split`
    divides them; each at least 1, but 0 extra heads stay 0.
    """
    batch, heads = split.count(split.batch), split.count(split.heads)
    return dataclasses.replace(
        plan,
        batch=max(1, plan.batch // batch),
        q_heads=max(1, plan.q_heads // heads),
        kv_heads=max(1, plan.kv_heads // heads),
        extra_heads=plan.extra_heads and max(1, plan.extra_heads // heads),
    )
