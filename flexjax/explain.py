"""`explain`: what a call of flex_attention will do and why, as text, without computing it.

A Call (prepare.py) is a checked call of flex_attention: its plan (everything static about it), its operands (arrays) and the
traced score_mod. The text is made of sections, one for each function below. A Target is the device that the call would run on.
"""

import contextlib
import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AxisType

from flexjax import dispatch
from flexjax.backends import target as targets
from flexjax.backends.target import Device, Target
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.slice import take
from flexjax.call_arguments import Arguments, check_keywords, describe_call, refuse_unknown_keywords
from flexjax.context_call import Given, build
from flexjax.dense import block_mask_of
from flexjax.errors import add_note_once, bad_argument
from flexjax.explain_context import describe_context
from flexjax.explain_work import describe_split, describe_work
from flexjax.ir.origin import OriginLayout
from flexjax.ir.program import AXES, Load, Program, classify_load
from flexjax.paged.cache import PagedCache
from flexjax.paged.shared_prefix import SharedPrefix
from flexjax.paged.table import PageTable
from flexjax.paged_call import PagedArguments, prepare_paged, text_of_paged
from flexjax.parallel.context_parallel import ContextParallel
from flexjax.parallel.gathers import describe_devices
from flexjax.plan.kernel_plan import FIRST_CAPTURE, FLOAT8, KernelPlan, Wanted
from flexjax.prepare import Call, prepare
from flexjax.types import ArrayOrShape, AuxRequest, Implementations

Array = jax.Array

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
"""Names of platforms that `device` of explain may be, whether or not this process has such a device. That of the default device, which a
plugin of jax may bring, is one too."""


class ExplainArguments(Arguments[ArrayOrShape], total=False):
    """The keywords that `explain` takes: those of flex_attention, and `cu_q_lens` and `shared`, which only paged_attention has."""

    cu_q_lens: ArrayOrShape | None
    shared: SharedPrefix | None


def explain(
    query: ArrayOrShape,
    key: ArrayOrShape | PagedCache,
    value: ArrayOrShape | PageTable,
    *,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    device: Device | str | None = None,
    context: ContextParallel | None = None,
    **arguments: typing.Unpack[ExplainArguments],
) -> str:
    """A report on how `flex_attention(query, key, value, ...)`, or `paged_attention(query, cache, table, ...)`, with the same arguments
    would run; nothing is computed but block lists.

    The text has: the shapes; each traced mod, with the axes that its values depend on and the access pattern of each read of a
    captured array (scalar, slice or gather); a picture of the blocks of the mask; the backends that would run the forward pass, the
    backward pass and the gradients of captured arrays, with the refusal of each backend asked before; the tiles; how arrays that are split
    over a mesh divide the work, and the bytes of them that are gathered; and the work: blocks visited, floating-point operations
    of the forward and the backward pass, and the bytes of query, key, value and out.

    query, key, value, return_aux, implementation, **arguments
                as for flex_attention: score_mod, mask_mod, block_mask, scale, sinks, layout, kernel_options, dropout_rate,
                dropout_key, broadcast_dropout, query_extra, key_extra, query_seq_lengths,
                key_value_seq_lengths, origin, precision, query_scales, key_scales, value_scales. Or a query, a PagedCache and a
                PageTable, and the keywords of paged_attention. Each array, also in a cache or a table, may be a jax.ShapeDtypeStruct
    device      where the call would run: a jax.Device, also of an ahead-of-time topology, or a platform ("cpu", "cuda", "tpu"), which means
                the first device of that platform here; without one, the kernels of its cards are not known: name `implementation` too.
                None: the default device
    context     as for flex_attention. The text then says how keys travel, what each device receives, its work, and the stages that
                it computes, in place of the blocks of the mask; the mesh is the one that is set, or that of query

    For paged_attention, the text has no picture of blocks and nothing about devices, and its section about work has the bytes of the
    cache that are read and how: in work items, in place, or gathered first. With `shared`, and with cu_q_lens where a request may have
    many queries, it describes two passes, one after the other. Where a decode kernel runs a call, of flex_attention too, the text also
    has the splits of the keys and the number of CTAs and, for Hopper, the time and bandwidth that are predicted for an H200.

    Raises what flex_attention (paged_attention) would raise, and TypeError for a keyword that it does not have. ValueError for
    `context` beside a cache in pages.

    Example: print(flexjax.explain(q, k, v, mask_mod=flexjax.masks.causal))
    """
    if isinstance(key, PagedCache):
        if context is not None:
            raise bad_argument("context", "given for paged_attention", "None", "Its tokens are not split over devices.")
        own = typing.cast(dict[str, typing.Any], arguments)
        return _explain_paged(query, key, typing.cast(PageTable, value), return_aux, implementation, device, own)
    check_keywords("explain", typing.cast(dict, arguments))
    target = _target(device)
    given: dict[str, object] = {"query": query, "key": key, "value": value, **arguments}
    abstract = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    placed = {name: where for name, x in given.items() if (where := _sharding(x)) is not None}
    meshes = [where.mesh for where in placed.values() if isinstance(where, jax.sharding.NamedSharding)]
    automatic = any(mesh.size > 1 and AxisType.Explicit not in mesh.axis_types for mesh in meshes)
    target = dataclasses.replace(target, automatic=automatic and target.platform == "tpu")
    texts: list[str] = []

    def write(traced: dict[str, Array]) -> None:
        """Appends the text to `texts`; `traced`: tracers for the arguments that are shapes, by name. Errors get the call as a note."""
        filled: typing.Any = given | traced
        q, k, v = (filled.pop(name) for name in ("query", "key", "value"))
        try:
            if context is not None:
                names = dispatch.candidates(implementation)
                of_call = Given(q, k, v, return_aux, filled, names, "")
                texts.append(_context(context, of_call, target))
                return
            call = prepare(q, k, v, return_aux=return_aux, **filled)
            captured_scale = isinstance(filled.get("scale"), Array)
            texts.append(_text(call, dispatch.candidates(implementation), target, captured_scale, placed))
        except Exception as error:
            add_note_once(error, describe_call("explain", q, k, v, return_aux, filled))
            raise

    around = contextlib.nullcontext()
    if context is not None and meshes and jax.sharding.get_abstract_mesh().empty:
        around = jax.sharding.use_abstract_mesh(meshes[0].abstract_mesh)
    with around:
        if abstract:
            jax.eval_shape(write, abstract)
        else:
            write({})
    return texts[0]


def _explain_paged(
    query: ArrayOrShape,
    cache: PagedCache,
    table: PageTable,
    return_aux: AuxRequest | None,
    implementation: Implementations | None,
    device: Device | str | None,
    arguments: dict[str, typing.Any],
) -> str:
    """The text about a call of paged_attention, whose arrays may be jax.ShapeDtypeStructs; with several passes a text for each, under the
    title "pass 1 of 2: NAME".

    query, cache, table, return_aux   arguments of paged_attention
    implementation, device            arguments of `explain`
    arguments                         the other keywords of paged_attention, by name; TypeError for any that it does not have

    Raises what paged_attention raises, with the call as a note.
    """
    known = set(PagedArguments.__annotations__) - {"implementation"}
    refuse_unknown_keywords("explain", arguments, known, "paged_attention")
    target = _target(device)
    leaves, structure = jax.tree.flatten((query, cache, table, arguments))
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    texts: list[str] = []

    def write(traced: list[Array]) -> None:
        """Appends the text of each pass to `texts`; `traced`: tracers for the shapes among the leaves, in order. Errors get the call as
        a note.
        """
        rest = iter(traced)
        filled = (next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
        q, pool, pages, given = jax.tree.unflatten(structure, filled)
        try:
            with jax.ensure_compile_time_eval():  # a table that is given keeps its lengths beside shapes
                parts = prepare_paged(q, pool, pages, return_aux, given)
            names = dispatch.candidates(implementation)
            captured_scale = isinstance(given.get("scale"), Array)
            for number, part in enumerate(parts, 1):
                title = [f"pass {number} of {len(parts)}: {part.name}"] if parts[1:] else []
                texts.append("\n\n".join([*title, _text(part.call, names, target, captured_scale, {})]))
        except Exception as error:
            add_note_once(error, text_of_paged("explain", q, pool, pages, return_aux, given))
            raise

    if abstract:
        jax.eval_shape(write, abstract)
    else:
        write([])
    return "\n\n".join(texts)


def _context(context: ContextParallel, given: Given, target: Target) -> str:
    """The whole text of a call with `context=`: its shapes, its mods, and the section about devices.

    context, given   the argument context, and the other arguments
    target           the device that the call would run on
    """
    built = build(context, given)
    planned = dataclasses.replace(built.prepared, plan=dataclasses.replace(built.call.plan, origin=None))
    captured_scale = isinstance(given.arguments.get("scale"), Array)
    sections = [
        _shapes(planned.plan, captured_scale),
        *_programs(planned),
        describe_context(built, given.names, target),
    ]
    return "\n\n".join(sections)


def _target(device: Device | str | None) -> Target:
    """The target that the argument `device` of explain names: a device, a platform, or the default device for None.

    Raises ValueError for anything else.
    """
    if device is None:
        return targets.default()
    known_name = isinstance(device, str) and device in (*PLATFORMS, jax.default_backend())
    if not known_name and not hasattr(device, "device_kind"):
        platforms = ", ".join(map(repr, PLATFORMS))
        raise bad_argument("device", repr(device), "a jax.Device, a platform or None", f"Platforms are {platforms}.")
    return targets.of_platform(device) if isinstance(device, str) else targets.of_device(device)


def _text(
    call: Call,
    implementation: tuple[str, ...] | None,
    target: Target,
    captured_scale: bool,
    placed: dict[str, jax.sharding.Sharding],
) -> str:
    """The whole text of explain: its sections, with an empty line between them.

    implementation   names of backends to ask, in order; None: the default order
    target           the device that the call would run on
    captured_scale   whether scale is a jax scalar, which the program of score_mod reads and multiplies by
    placed           the shardings of the arrays that have one, by name
    """
    paged = call.plan.page > 0
    sections = [
        _shapes(call.plan, captured_scale),
        *_programs(call),
        "" if paged else _blocks(call),
        _choice(call, implementation, target),
        "" if paged else _devices(call, placed),
        describe_work(call, dispatch.choose(call.plan, implementation, target)),
    ]
    return "\n\n".join(s for s in sections if s)


def _shapes(plan: KernelPlan, captured_scale: bool) -> str:
    """The first line of the text: sizes by the shape letters of kernel_plan.py, dtype, layout, scale and those optional features that the
    call has: extra features, precision, sinks, dropout, origin, lengths, pages.

    captured_scale   whether scale is a jax scalar, for which the text has no number
    """
    scale = "captured, multiplies the score" if captured_scale else f"{plan.scale:.6g}"
    return (
        f"attention  B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} D={plan.head_dim} "
        f"E={plan.value_dim} {plan.input_dtype} {plan.layout}  scale={scale}"
        + (f"  extra features R={plan.extra_dim}" if plan.extra_dim else "")
        + ("" if plan.precision == "default" else f"  precision {plan.precision}")
        + ("  sinks" if plan.has_sinks else "")
        + (("  value_scales" if plan.float8 else "  dropout") if plan.dropout is not None else "")
        + ("" if plan.origin is None else f"  origin of {_runs(plan.origin)}")
        + ("  query_seq_lengths" if plan.lengths[0] else "")
        + ("  key_value_seq_lengths" if plan.lengths[1] else "")
        + (f"  pages of {plan.page} tokens" if plan.page else "")
        + (f" of {plan.cache_dtype}" if plan.cache_dtype else "")
    )


def _runs(origin: OriginLayout) -> str:
    """The runs of an origin in words: "queries in 2 runs of 64 and keys in 1 run of 128", with " for each batch entry" at the end if the
    entries have positions of their own.
    """
    sides = (("queries", origin.query_runs, origin.query_run), ("keys", origin.key_runs, origin.key_run))
    each = " for each batch entry" if origin.rows > 1 else ""
    return " and ".join(f"{name} in {n} run{'s' * (n > 1)} of {run}" for name, n, run in sides) + each


def _programs(call: Call) -> list[str]:
    """Two sections, a string each: score_mod's program and mask_mod's, as `describe` writes them, or "none".

    That of score_mod ends with the number of steps of its derivative program, or with why there is none.
    """
    out = []
    for name, program in (("score_mod", call.plan.score), ("mask_mod", call.plan.mask)):
        out.append(f"{name}: " + ("none" if program is None else describe(program)))
    if call.score is not None:
        made = call.score.derivative
        out[0] += "\n  derivative: " + (call.score.why_not if made is None else f"{len(made.steps)} steps")
    return out


def describe(program: Program) -> str:
    """A program as text: a line with its captured arrays, a line for each step, and a line with its results.

    The line of a step ends with the axes on which its value depends and, for a read of a captured array, with the load class.
    """
    lines = ["captures " + (", ".join(f"c{i} {c}" for i, c in enumerate(program.captures)) or "nothing")]
    body = program.key.splitlines()[1 : 1 + len(program.steps)]
    width = max((len(line) for line in body), default=0)
    for line, step in zip(body, program.steps, strict=True):
        axes = ",".join(a for a in AXES if a in step.outs[0].axes) or "-"
        load_class = f"  {classify_load(step)}" if isinstance(step, Load) else ""
        lines.append(f"{line:<{width}}  [{axes}]{load_class}")
    lines.append("  -> " + ", ".join(map(str, program.results)))
    return "\n".join(lines)


def _blocks(call: Call) -> str:
    """The section about blocks: a picture of the block mask, and of its entries if it is small (DRAWN_BY_TOKEN), for the first batch
    entry and head of the mask.

    If there is no mask, or an array of the block mask is traced (its lists, its origin, or an array that its program captures), a line
    says so in place of the picture.
    """
    mask = block_mask_of(call.plan, call.operands)
    if mask is None:
        return "blocks: no mask, every tile is visited"
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return f"blocks: {mask!r}, known when the program runs"
    batches, heads = mask.kv_num_blocks.shape[:2]
    first = mask if batches * heads == 1 else BlockMask.of(take(mask, (0, 0), mask.mask_mod))
    head = "" if batches * heads == 1 else f" (the first of {batches * heads})"
    picture = first.to_string(48).split("\n", 1)[1]
    text = f"blocks{head}: █ full, ░ partial\n{mask!r}\n{picture}"
    if 0 < call.plan.q_len <= DRAWN_BY_TOKEN and 0 < call.plan.kv_len <= DRAWN_BY_TOKEN:
        text += f"\nentries{head}: █ visible\n{_entries(first)}"
    return text


DRAWN_BY_TOKEN = 128
"""Up to this many queries and keys, the entries of a mask are drawn beside its blocks."""


def _entries(mask: BlockMask) -> str:
    """A framed picture of a mask with one batch entry and head: a line for each query, and in it a character for each key, `█` where the
    entry is visible and a space where it is hidden.
    """
    with jax.ensure_compile_time_eval():
        kept = np.asarray(mask.to_mask())[0, 0]
    rule = "─" * kept.shape[1]
    return "\n".join([f"┌{rule}┐", *("│" + "".join("█" if k else " " for k in row) + "│" for row in kept), f"└{rule}┘"])


def _choice(call: Call, implementation: tuple[str, ...] | None, target: Target) -> str:
    """The section about backends: which one runs each pass, the refusals of those asked before it, and, in the words of the backend of the
    forward pass, its tiles.

    implementation   names of backends to ask, in order; None: the default order

    The backward pass is asked for without and with the gradients of captured arrays; if score_mod has no derivative, a
    line says why instead. Each refusal is printed once. Raises NotImplementedError if no backend runs the forward pass.
    """
    run = dispatch.choose(call.plan, implementation, target)
    said = set(run.refusals)
    lines = [
        f"runs on: {run.backend.name}",
        *([f"  in {run.plan.dtype}: {run.why_widened}"] if run.why_widened else []),
        *(f"  not {name}: {why}" for name, why in run.refusals),
    ]
    tiles = run.backend.tile_sizes(run.plan, target)
    if tiles is not None:
        lines.append(f"  tiles: {tiles}")
    lines += describe_split(run)
    if call.plan.float8:
        return "\n".join([*lines, f"backward pass: none. {FLOAT8} inputs have no gradients."])
    score, operands = call.score, call.operands
    if score is not None and score.derivative is None:
        return "\n".join([*lines, f"backward pass: none. {score.why_not}"])
    derivative = None if score is None else score.derivative
    in_pages = ("key", "value") if call.plan.page else ()  # a cache has no gradient
    fields = operands._fields[:FIRST_CAPTURE]
    main = tuple(getattr(operands, name) is not None and name not in in_pages for name in fields)
    learned = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in operands.score_captures)
    passes = [("backward pass", (False,) * len(learned))]
    passes += [("gradients of captured arrays", learned)] if any(learned) else []
    for name, captures in passes:
        run = dispatch.choose_backward(call.plan, implementation, target, Wanted.of((*main, *captures)), derivative)
        lines.append(f"{name} on: {run.backend.name}")
        lines += [f"  not {other}: {why}" for other, why in run.refusals if (other, why) not in said]
        lines += describe_split(run)
        said |= set(run.refusals)
    return "\n".join(lines)


def _devices(call: Call, placed: dict[str, jax.sharding.Sharding]) -> str:
    """The section about devices: how the work is split over those that the arrays are on; "" if they are on one.

    placed   the shardings of the arguments that have one, by name
    """
    operands, problem = call.operands, call.problem(None)
    of_main = tuple(placed.get(name) for name in operands._fields[:FIRST_CAPTURE])
    main = [where for x, where in zip(operands[:FIRST_CAPTURE], of_main, strict=True) if x is not None]
    flat = jax.tree.leaves(operands)
    return describe_devices(problem, flat, [*main, *map(_sharding, flat[len(main) :])])


def _sharding(x: object) -> jax.sharding.Sharding | None:
    """The sharding of an array or ShapeDtypeStruct (which may have None); None for tracers and for anything else, such as numpy arrays."""
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    return x.sharding
