"""A call of flex_attention with `context=`: its checks and its plan.

attention   the whole call: `build`, then `run` of primitives.py on the devices of the mesh (axes.py)
build       checks and plans it: traces the mask of the whole sequence, chooses how keys travel
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

from flexjax.block_mask.block_mask import BlockMask, create_block_mask
from flexjax.block_mask.kept import without_small_blocks
from flexjax.call.arguments import Arguments
from flexjax.call.checks import both_masks, check_weights
from flexjax.call.expectations import functions_by_argument
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.call.tolerance import check_call, check_claim, weighted_score_mod
from flexjax.combine import and_masks
from flexjax.context import axes as context_axes
from flexjax.context.context_parallel import (
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
from flexjax.context.layout import ContextLayout
from flexjax.context.lengths import ExistingRows
from flexjax.context.lists import KnownLists, known_lists
from flexjax.context.mask import eager_if_known, mask_of_whole, trace_mask
from flexjax.context.primitives import run
from flexjax.errors import bad_argument
from flexjax.integers import round_up
from flexjax.ir.origin import OriginTable, table_of, table_of_runs
from flexjax.mod_tools.made_for import Reach, check_sizes
from flexjax.parallel.explicit_axes import split_of
from flexjax.parallel.split import Split
from flexjax.partition import Mesh, names_of
from flexjax.passes import dispatch
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan, Operands, Results
from flexjax.plan.problem import Problem
from flexjax.rewrites.mask_blocks import classes_of_lists
from flexjax.tolerance.static import indices_of
from flexjax.trace.lift_numpy import eager_without_mesh
from flexjax.trace.trace_mod import trace_score_mod
from flexjax.types import MaskMod, Origin, Quantized, values_of

Array = jax.Array


class Given(typing.NamedTuple):
    """What flex_attention was given, but `context`. Nothing is checked yet but `names`."""

    arguments: Arguments
    names: tuple[str, ...] | None  # backends to ask, in order; None: the default order
    text: str  # the user's call in a line


class Built(typing.NamedTuple):
    """A call with `context=` that is checked and planned."""

    placed: "Placed"
    prepared: PreparedCall  # without its mask
    decision: Decision
    known: KnownLists | None  # block lists of its stages; None where the devices make them when the program runs
    call: ContextCall
    operands: Operands
    tables: Tables
    existing: ExistingRows | None  # None without lengths


def attention(context: object, given: Given) -> Results:
    """The Results of a call with `context=`, in the layout and rows of query; rounding is None.

    Raises ValueError for arguments that do not fit, NotImplementedError where no backend accepts the call.
    """
    placed, _, _, _, call, operands, tables, existing = build(context, given)
    if placed.kind == AxisType.Explicit:
        assert placed.split is not None
        outs = context_axes.split_work(call, operands, tables, placed.split, run)
    else:
        outs = run(call, [*jax.tree.leaves(operands), *jax.tree.leaves(tables)])
    results = Results.of(call.plan, outs)
    return results if existing is None else existing.results(results, call.plan.lse_without_keys)


def build(context: object, given: Given) -> Built:
    """Checks and plans a call. The mask is traced here, for the whole sequence; `prepare` prepares the rest.

    Raises ValueError for arguments that do not fit. Raises NotImplementedError if no backend accepts the plan, if the
    call names "reference" first, and for lengths beside a block mask of user lists.
    """
    arguments = given.arguments
    mask_mod, block_mask = arguments.mask_mod, arguments.block_mask
    if mask_mod is not None and block_mask is not None:
        raise both_masks()
    query, key, value = (jnp.asarray(values_of(x)) for x in (arguments.query, arguments.key, arguments.value))
    for name in ("query", "key", "value"):
        if isinstance(getattr(arguments, name), Quantized):
            raise bad_argument(name, "a Quantized beside context=", "an array", "Multiply its values by its scales.")
    if query.dtype == FLOAT8:
        raise bad_argument("query", f"of dtype {FLOAT8} beside context=", "bfloat16", "Cast query, key and value.")
    layout_name = arguments.layout
    origin = _origin_with(block_mask, arguments.origin)
    placed = place(context, query, key, layout_name, origin)
    if arguments.tolerance is not None:
        arguments = _skipped(arguments, query, placed.layout)
        mask_mod, block_mask, given = arguments.mask_mod, arguments.block_mask, given._replace(arguments=arguments)
    axes = placed.context.axes if placed.kind == AxisType.Manual else ()
    dim = 1 if layout_name == "BTNH" else 2
    existing = ExistingRows.of(arguments, query.shape[0], placed.layout, axes, dim)
    # the operands hold 0 in rows that do not exist, and the mask hides these
    if existing is not None:
        extras = {name: getattr(arguments, name) for name in ("query_extra", "key_extra")}
        given_extras = {name: None if x is None else jnp.asarray(x) for name, x in extras.items()}
        cut: dict[str, typing.Any] = existing.cut({"query": query, "key": key, "value": value, **given_extras})
        arguments = dataclasses.replace(arguments, query_seq_lengths=None, key_value_seq_lengths=None, **cut)
    call = prepare(dataclasses.replace(arguments, mask_mod=None, block_mask=None, origin=placed.origin))
    if call.plan.options.invariant:
        raise NotImplementedError(invariant.refuses_parts("context"))
    if isinstance(block_mask, BlockMask) and block_mask.claim is not None:
        check_claim(block_mask.claim, given.arguments, call.plan.head_dim, call.plan.dtype, split=True)
    tokens = (None, None) if existing is not None else (placed.layout.q_len, placed.layout.kv_len)
    exact = (placed.origin.batch is None, placed.origin.head is None, True, True)
    reach = Reach((call.plan.batch, call.plan.q_heads, tokens[0], tokens[1]), exact)
    weights = None if call.weights is None else call.weights.function
    mods: dict[str, typing.Any] = {"score_mod": arguments.score_mod, "weights": weights, "mask_mod": mask_mod}
    for name, mod in (mods | functions_by_argument(arguments.return_aux)).items():
        check_sizes(name, mod, reach)
    dispatch.runs_everywhere(call.plan, given.names)
    if given.names and given.names[0] == dispatch.REFERENCE:
        raise NotImplementedError(
            "reference: It is dense and runs on one device; context= splits the sequence over several."
        )
    return _planned(placed, call, call.problem(given.names, given.text), mask_mod, block_mask, existing, reach)


def _skipped(arguments: Arguments, query: Array, layout: ContextLayout) -> Arguments:
    """The arguments with a block mask of the whole sequence in place of `tolerance`.

    Which keys travel is decided before their norms are known, so that `score_bound` and known arrays decide alone.
    Raises NotImplementedError where these do not.
    """
    heads = query.shape[2 if arguments.layout == "BTNH" else 1]
    sizes, aux, own = (query.shape[0], heads, layout.q_len, layout.kv_len), arguments.return_aux, arguments.block_mask
    names = ("query_extra", "query_seq_lengths", "key_value_seq_lengths", "origin")
    refused = {f"`{name}`": getattr(arguments, name) is not None for name in names} | {
        "score_bound of None": arguments.score_bound is None,
        "return_aux.lost": aux is not None and aux.lost,
        "a scale in an array": isinstance(arguments.scale, Array),
        "lists of a user": own is not None and own.lists_decide,
    }
    sentence = (
        "A call with context= takes no tolerance beside {}, because which keys travel is decided before their norms "
        "are known."
    )
    for what in (what for what, is_given in refused.items() if is_given):
        raise NotImplementedError(sentence.format(what))
    tolerance = check_call(arguments, sizes, str(query.dtype))
    left = dataclasses.replace(arguments, tolerance=None, score_bound=None)
    weighted = check_weights(arguments.weights, arguments.sinks, aux, str(query.dtype)) is not None
    score_mod = weighted_score_mod(arguments)
    if score_mod is None:
        return left
    score, everything = trace_score_mod(score_mod, sizes), lambda b, h, q_idx, kv_idx: q_idx >= 0
    with eager_without_mesh():
        if own is None:
            own = create_block_mask(arguments.mask_mod or everything, *sizes, block_size=layout.block_size)
        if any(isinstance(x, core.Tracer) for x in (*score.arrays, *jax.tree.leaves(own), arguments.score_bound)):
            raise NotImplementedError(sentence.format("traced arrays in mods"))
        counts = tuple(n if axis in indices_of(score.program) else None for axis, n in zip("bh", sizes, strict=False))
        bound, scale = arguments.score_bound, typing.cast(float | None, arguments.scale)
        made = without_small_blocks(own, score_mod, (counts[0], counts[1]), bound, tolerance, scale, weighted)
    return dataclasses.replace(left, mask_mod=None, block_mask=BlockMask.of(made))


@dataclasses.dataclass(frozen=True)
class Placed:
    """Over which mesh axes a call with `context=` is split, and where its arrays lie."""

    context: ContextParallel  # checked
    kind: AxisType  # of the mesh axes. Manual: inside shard_map, arrays of one device; else global arrays
    mesh: tuple[tuple[str, int], ...]  # (name, size) of the axes of the sequence, in the order of the mesh
    split: Split | None  # explicit axes that split batch and heads; None for other kinds
    layout: ContextLayout
    origin: OriginTable  # for tracing mods: batch, heads, and the lengths of the whole sequence


def place(given: object, query: Array, key: Array, layout_name: str, origin: Origin | OriginTable | None) -> Placed:
    """Finds the mesh axes, the layout, the split of batch and heads, and the origin of a call; checks no ranks.

    Raises ValueError for ones that do not fit each other, and for an origin of queries or keys.
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
    """The mesh that is set (jax.set_mesh, jax.shard_map), else that on which query lies, or an empty one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = jax.typeof(query).sharding.mesh
    if mesh.empty and not isinstance(query, core.Tracer):
        where = getattr(query, "sharding", None)
        mesh = where.mesh.abstract_mesh if isinstance(where, jax.sharding.NamedSharding) else mesh
    return mesh


def _check_split(name: str, x: Array, layout_name: str, context: ContextParallel) -> None:
    """Raises ValueError unless the axes of `context` split the tokens of x or nothing, and its head dim is whole."""
    spec = [names_of(part) for part in jax.typeof(x).sharding.spec]
    tokens = 1 if layout_name == "BTNH" else 2
    wrong = any(set(part) & set(context.axes) for dim, part in enumerate(spec) if dim != tokens)
    if wrong or spec[tokens] not in ((), context.axes) or spec[3]:
        raise bad_argument(
            name, f"split as {jax.typeof(x).sharding.spec}",
            f"its tokens split over {context.axis!r} or not at all, its batch and heads over other axes, its head dim "
            "whole",
            "Reshard it, or name other axes in context.",
        )  # fmt: skip


def _origin(
    given: Origin | OriginTable | None, shape: Sequence[int], rows: Sequence[int], whole: Sequence[int]
) -> OriginTable:
    """The origin for which mods are traced: given batch and heads, and one run of the whole sequence from 0.

    rows    of query and key in the global arrays
    whole   lengths of queries and keys in the whole sequence, in whole blocks of the layout
    """
    table = table_of(given, shape[0], (rows[0], rows[1]))
    # the context says where queries and keys lie
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
    prepared: PreparedCall,
    problem: Problem,
    mask_mod: MaskMod | None,
    mask: BlockMask | None,
    existing: ExistingRows | None,
    reach: Reach,
) -> Built:
    """Plans the mask of a call, how keys travel and the tables of the devices: the last part of `build`.

    At most one of mask_mod and mask is not None. `existing` are the rows that exist, None without lengths; raises
    NotImplementedError for them beside a mask of user lists.
    """
    layout, plan, operands = placed.layout, prepared.plan, prepared.operands
    lengths = (layout.q_len, layout.kv_len)
    classes = known = None
    if mask is not None:
        of_whole = mask_of_whole(mask, plan, lengths, placed.origin)
        if existing is not None and mask.lists_decide:
            raise NotImplementedError(
                "A call with context= takes no lengths beside a block mask from user lists "
                "(BlockMask.from_kv_blocks), whose full blocks no mask cuts. Hide tokens past a length with mask_mod, "
                "or pass lists without them."
            )
        mask_mod = of_whole
        with eager_if_known(mask):
            # what was left out by tolerance is not in the mask's program either
            listed = mask.lists_decide or mask.claim is not None
            classes = classes_of_lists(mask, *layout.block_size) if listed else None
        if classes is not None and not isinstance(classes, core.Tracer):
            known = np.any(np.asarray(classes), axis=(0, 1), keepdims=True)[0, 0]
    if existing is not None:
        exists = existing.mask_mod(placed.origin)
        mask_mod = exists if mask_mod is None else and_masks(exists, mask_mod)
    traced = trace_mask(mask_mod, lengths, plan, placed.origin, None if mask is not None else reach)
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
    """The origin `given`, else that of the block mask. Raises ValueError if the mask's places queries or keys."""
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
    """The plan of one device's share of the batch and heads, at least 1 of each (0 extra heads stay 0)."""
    batch, heads = split.count(split.batch), split.count(split.heads)
    return dataclasses.replace(
        plan,
        batch=max(1, plan.batch // batch),
        q_heads=max(1, plan.q_heads // heads),
        kv_heads=max(1, plan.kv_heads // heads),
        extra_heads=plan.extra_heads and max(1, plan.extra_heads // heads),
    )
