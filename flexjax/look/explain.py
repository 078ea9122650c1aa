"""`explain`: what a call of flex_attention will do and why, as text, without computing it.

The text is made of sections, one for each function below. A Target is the device that the call would run on.
`implementation` are names of backends to ask, in order; None: the default order.
"""

import contextlib
import dataclasses
import html
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AxisType

from flexjax.backends import target as targets
from flexjax.backends.base import ForwardMode
from flexjax.backends.reference.support import block_mask_of
from flexjax.backends.target import Device, Target
from flexjax.block_mask import picture
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.slice import take
from flexjax.block_mask.transpose import EMPTY, FULL
from flexjax.call.arguments import (
    Arguments,
    Keywords,
    arrays_of,
    check_keywords,
    describe_call,
    refuse_unknown_keywords,
)
from flexjax.call.expectations import functions_of
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.context.call import Given, build
from flexjax.context.context_parallel import ContextParallel
from flexjax.errors import ModError, add_note_once, bad_argument, public
from flexjax.ir.origin import OriginLayout
from flexjax.look import cards
from flexjax.look.explain_context import describe_context
from flexjax.look.explain_programs import capture_names, describe, input_names
from flexjax.look.explain_tolerance import describe_tolerance
from flexjax.look.explain_work import describe_work
from flexjax.mod_tools.settings import own
from flexjax.paged.cache import PagedCache
from flexjax.paged.call import PagedArguments, PagedKeywords, prepare_paged, text_of_paged
from flexjax.paged.shared_prefix import SharedPrefix
from flexjax.paged.table import PageTable
from flexjax.parallel.gathers import describe_devices
from flexjax.passes import dispatch
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import FIRST_CAPTURE, FLOAT8, KernelPlan, Wanted
from flexjax.trace.callbacks import run_callbacks
from flexjax.trace.trace_mod import AS_IF, trace_mask_mod, trace_score_mod
from flexjax.types import ArrayOrShape, AuxRequest, Implementations, Quantized, values_of

Array = jax.Array

# Platforms that `device` of explain may be, whether or not this process has such a device. That of the default device,
# which a plugin of jax may bring, is one too.
PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


class ExplainKeywords(Keywords[ArrayOrShape], total=False):
    """The keywords of flex_attention, and `cu_q_lens` and `shared`, which only paged_attention has."""

    cu_q_lens: ArrayOrShape | None
    shared: SharedPrefix | None


class Explanation(str):
    """The text of explain: a str that interactive sessions and notebooks show as it is printed."""

    __slots__ = ()
    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


@public
@own
def explain(
    query: ArrayOrShape | Quantized,
    key: ArrayOrShape | Quantized | PagedCache,
    value: ArrayOrShape | Quantized | PageTable,
    *,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    device: Device | str | None = None,
    context: ContextParallel | None = None,
    **arguments: typing.Unpack[ExplainKeywords],
) -> Explanation:
    """How `flex_attention(query, key, value, ...)`, or `paged_attention(query, cache, table, ...)`, would run, as text.

    The text has the shapes; each traced mod, with the axes that its values depend on and how it reads each captured
    array (scalar, slice or gather); a picture of the blocks of the mask; the backends of the forward pass, the backward
    pass and the gradients of captured arrays, with the refusal of each backend asked before; the tiles; how arrays that
    are split over a mesh divide the work, and the bytes that are gathered; the blocks visited, floating-point
    operations and bytes.

    query, key, value, return_aux, implementation, **arguments
                as for flex_attention. Or a query, a PagedCache and a PageTable, and the keywords of paged_attention.
                Each array may be a jax.ShapeDtypeStruct
    device      where the call would run: a jax.Device, also of an ahead-of-time topology; the name of a card or chip
                ("h100", "a100", "b200", "v5e", ..), which need not be here; or a platform ("cpu", "cuda", "tpu"), which
                means its first device here; without one, name `implementation` too. None: the default device
    context     as for flex_attention. The text then says how keys travel, what each device receives, its work and its
                stages

    For paged_attention the text says which bytes of the cache are read and how: in work items, in place, or gathered
    first. A call of two passes (`shared`, cu_q_lens) has a text for each. Where a decode kernel runs a call, the text
    has the splits, the CTAs and, for Hopper, the time and bandwidth that are predicted for an H200.

    Raises what flex_attention (paged_attention) would raise, TypeError for a keyword that it does not have, and
    ValueError for `context` beside a cache in pages.

    Returns a str, which interactive sessions and notebooks show as print does.

    Example: print(flexjax.explain(q, k, v, mask_mod=flexjax.masks.causal))
    """
    if isinstance(key, PagedCache):
        if context is not None:
            raise bad_argument("context", "given for paged_attention", "None", "Its tokens are not split over devices.")
        refuse_unknown_keywords("explain", arguments, PagedKeywords.__annotations__, "paged_attention")
        own = typing.cast(PagedKeywords, arguments)
        paged = PagedArguments(
            typing.cast(ArrayOrShape, query), key, typing.cast(PageTable, value), return_aux=return_aux, **own
        )
        return Explanation(_explain_paged(paged, implementation, device))
    check_keywords("explain", typing.cast(dict, arguments))
    target = _target(device)
    given = Arguments(
        query,
        key,
        value,
        return_aux=return_aux,
        **arguments,  # pyright: ignore[reportArgumentType, reportCallIssue]
    )
    is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    abstract = {name: x for name, x in given.given().items() if any(map(is_shape, arrays_of(x)))}
    placed = {name: where for name, x in given.given().items() if (where := _sharding(values_of(x))) is not None}
    meshes = [where.mesh for where in placed.values() if isinstance(where, jax.sharding.NamedSharding)]
    automatic = any(mesh.size > 1 and AxisType.Explicit not in mesh.axis_types for mesh in meshes)
    target = dataclasses.replace(target, automatic=automatic and target.platform == "tpu")
    texts: list[str] = []

    def write(traced: dict[str, Array]) -> None:
        """Appends the text to `texts`; `traced`: tracers for the arguments that are shapes, by name."""
        filled = dataclasses.replace(given, **traced)
        try:
            names = dispatch.candidates(implementation)
            if context is not None:
                texts.append(_context(context, Given(filled, names, ""), target))
                return
            filled = _without_callbacks(filled, names)
            with jax.ensure_compile_time_eval():  # arrays that are given stay known beside shapes
                call = prepare(filled)
            texts.append(_text(call, names, target, filled, placed))
        except Exception as error:
            add_note_once(error, describe_call("explain", filled))
            raise

    around = contextlib.nullcontext()
    if context is not None and meshes and jax.sharding.get_abstract_mesh().empty:
        around = jax.sharding.use_abstract_mesh(meshes[0].abstract_mesh)
    with around:
        if abstract:
            jax.eval_shape(write, abstract)
        else:
            write({})
    return Explanation(texts[0])


def _without_callbacks(given: Arguments, names: tuple[str, ...] | None) -> Arguments:
    """The arguments, their mods without callbacks; ModError where a mod has some and another backend is asked too."""
    changed = {}  # a callback would run where known values are computed
    for name, trace in (("score_mod", trace_score_mod), ("mask_mod", trace_mask_mod)):
        mod = getattr(given, name)
        if not callable(mod):
            continue
        try:
            trace(mod, (1, 1, 1, 1))
        except ModError:
            with run_callbacks(names == (dispatch.REFERENCE,)):
                trace(mod, (1, 1, 1, 1))
            changed[name] = AS_IF[name]
    return dataclasses.replace(given, **changed)


def _explain_paged(given: PagedArguments, implementation: Implementations | None, device: Device | str | None) -> str:
    """The text about a call of paged_attention; with several passes a text for each, under "pass 1 of 2: NAME"."""
    target = _target(device)
    leaves, structure = jax.tree.flatten(vars(given))
    abstract = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    texts: list[str] = []

    def write(traced: list[Array]) -> None:
        """Appends the text of each pass to `texts`; `traced`: tracers for the shapes among the leaves, in order."""
        rest = iter(traced)
        filled = (next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
        arguments = PagedArguments(**jax.tree.unflatten(structure, filled))
        try:
            with jax.ensure_compile_time_eval():  # a table that is given keeps its lengths beside shapes
                parts = prepare_paged(arguments)
            names = dispatch.candidates(implementation)
            for number, part in enumerate(parts, 1):
                title = [f"pass {number} of {len(parts)}: {part.name}"] if parts[1:] else []
                texts.append("\n\n".join([*title, _text(part.call, names, target, arguments, {})]))
        except Exception as error:
            add_note_once(error, text_of_paged("explain", arguments))
            raise

    if abstract:
        jax.eval_shape(write, abstract)
    else:
        write([])
    return "\n\n".join(texts)


def _context(context: ContextParallel, given: Given, target: Target) -> str:
    """The whole text of a call with `context=`: its shapes, its mods, and the section about devices."""
    built = build(context, given)
    planned = dataclasses.replace(built.prepared, plan=dataclasses.replace(built.call.plan, origin=None))
    sections = [
        _shapes(planned.plan, isinstance(given.arguments.scale, Array)),
        *_programs(planned, given.arguments, PROGRAM_LINES[0]),
        describe_context(built, given.names, target),
    ]
    return "\n\n".join(sections)


def _target(device: Device | str | None) -> Target:
    """The target that the argument `device` of explain names, the default device for None. Raises ValueError."""
    if device is None:
        return targets.default()
    if isinstance(device, str) and (card := cards.named(device)) is not None:
        return card
    known_name = isinstance(device, str) and device in (*PLATFORMS, jax.default_backend())
    if not known_name and not hasattr(device, "device_kind"):
        names = [", ".join(map(repr, each)) for each in (PLATFORMS, cards.GPUS, cards.TPUS)]
        raise bad_argument(
            "device", repr(device), "a jax.Device, a platform, the name of a card or chip, or None",
            f"Platforms are {names[0]}; cards {names[1]}; chips {names[2]}.",
        )  # fmt: skip
    return targets.of_platform(device) if isinstance(device, str) else targets.of_device(device)


LINES = 40  # of the text of an ordinary call
PROGRAM_LINES = (8, 7, 6, 5, 4, 3)  # for the steps of a program: the most that leaves room for the picture
ROWS = 24  # of a picture of blocks
FEWEST_ROWS = 6


def _text(
    call: PreparedCall,
    implementation: tuple[str, ...] | None,
    target: Target,
    given: Arguments | PagedArguments,
    placed: dict[str, jax.sharding.Sharding],
) -> str:
    """The whole text of explain: its sections, with an empty line between them.

    given    the arguments of the call, whose mods have the names of captured arrays
    placed   the shardings of the arrays that have one, by name
    """
    paged = call.plan.page > 0
    head, run = _shapes(call.plan, isinstance(given.scale, Array)), dispatch.choose(call.plan, implementation, target)
    others = [
        describe_tolerance(call, run),
        _choice(call, implementation, target),
        "" if paged else _devices(call, placed),
        describe_work(call, run),
    ]
    for lines in PROGRAM_LINES:
        programs = _programs(call, given, lines)
        sections = [s for s in (head, *programs, *others) if s]
        # an empty line after each, and the four lines around a picture
        rows = LINES - sum(s.count("\n") + 2 for s in sections) - 4
        if rows >= FEWEST_ROWS:
            break
    blocks = "" if paged else _blocks(call, min(ROWS, max(FEWEST_ROWS, rows)))
    return "\n\n".join(s for s in (head, *programs, blocks, *others) if s)


def _shapes(plan: KernelPlan, captured_scale: bool) -> str:
    """The first line of the text: sizes, dtype, layout, scale and the optional features of the call."""
    scale = "captured, multiplies the score" if captured_scale else f"{plan.scale:.6g}"
    return (
        f"attention  B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} "
        f"D={plan.head_dim} E={plan.value_dim} {plan.input_dtype} {plan.layout}  scale={scale}"
        + (f"  extra features R={plan.extra_dim}" if plan.extra_dim else "")
        + ("" if plan.precision == "default" else f"  precision {plan.precision}")
        + ("  sinks" if plan.has_sinks else "")
        + ("  weights" if plan.weighted else "")
        + (f"  expectations of {plan.expectations}" if plan.expectations else "")
        + (("  value.scales" if plan.float8 else "  dropout") if plan.dropout is not None else "")
        + ("" if plan.origin is None else f"  origin of {_runs(plan.origin)}")
        + ("  query_seq_lengths" if plan.lengths[0] else "")
        + ("  key_value_seq_lengths" if plan.lengths[1] else "")
        + (f"  pages of {plan.page} tokens" if plan.page else "")
        + (f" of {plan.cache_dtype}" if plan.cache_dtype else "")
    )


def _runs(origin: OriginLayout) -> str:
    """The runs of an origin in words: "queries in 2 runs of 64 and keys in 1 run of 128"."""
    sides = (("queries", origin.query_runs, origin.query_run), ("keys", origin.key_runs, origin.key_run))
    each = " for each batch entry" if origin.rows > 1 else ""
    return " and ".join(f"{name} in {n} run{'s' * (n > 1)} of {run}" for name, n, run in sides) + each


def _programs(call: PreparedCall, given: Arguments | PagedArguments, lines: int) -> list[str]:
    """Two sections, as `describe` writes them: score_mod's program, with its derivative, and mask_mod's."""
    mask_mod = given.mask_mod or getattr(getattr(given, "block_mask", None), "mask_mod", None)
    mods = (given.score_mod, mask_mod)
    arrays = (call.operands.score_captures, call.operands.mask_captures)
    out = []
    for which, program in enumerate((call.plan.score, call.plan.mask)):
        name = ("score_mod", "mask_mod")[which]
        roots = {name: mods[which], "scale": given.scale} if which == 0 else {name: mods[which]}
        if which == 0 and call.weights is not None:  # one program has both
            roots["weights"] = call.weights.function
            name = "weights" if given.score_mod is None else "weights of score_mod"
        if which == 0 and (functions := functions_of(given.return_aux)):  # and their functions
            roots |= functions
            name += " and expectations"
        if program is None:
            out.append(f"{name}: none")
            continue
        inputs = input_names(mods[which], with_score=which == 0)
        out.append(f"{name}: " + describe(program, capture_names(roots, arrays[which], inputs), inputs, lines))
    if call.score is not None:
        made = call.score.derivative
        out[0] += "\n  derivative: " + (call.score.why_not if made is None else f"{len(made.steps)} steps")
    return out


def _blocks(call: PreparedCall, rows: int) -> str:
    """The section about blocks: a picture of the block mask's first batch entry and head, or of its entries if few."""
    mask = block_mask_of(call.plan, call.operands)
    if mask is None:
        return "blocks: no mask, every tile is visited"
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return f"blocks: {mask!r}, known when the program runs"
    batches, heads = mask.kv_num_blocks.shape[:2]
    with jax.ensure_compile_time_eval():  # the lists stay known beside shapes
        first = mask if batches * heads == 1 else BlockMask.of(take(mask, (0, 0), mask.mask_mod))
    head = "" if batches * heads == 1 else f" (the first of {batches * heads})"
    if 0 < call.plan.q_len <= DRAWN_BY_TOKEN and 0 < call.plan.kv_len <= DRAWN_BY_TOKEN:
        some = ", ░ in part" if max(call.plan.q_len, call.plan.kv_len) > rows else ""
        return f"blocks: {mask!r}\nentries{head}: █ visible{some}\n{_entries(first, rows)}"
    drawn = first.to_string(rows).split("\n", 2)[2]
    return f"blocks{head}: █ full, ░ partial\n{mask!r}\n{drawn}"


DRAWN_BY_TOKEN = 128  # up to this many queries and keys, the entries of a mask are drawn in place of its blocks


def _entries(mask: BlockMask, rows: int) -> str:
    """A framed picture of the entries of a mask with one batch entry and head, in at most `rows` rows and columns."""
    with jax.ensure_compile_time_eval():
        kept = np.asarray(mask.to_mask())[0, 0]
    cells = picture.shrink(np.where(kept, FULL, EMPTY).astype(np.int8), rows)
    rule = "─" * cells.shape[1]
    drawn = ("│" + "".join(picture.SHADES[int(c)] for c in row) + "│" for row in cells)
    return "\n".join([f"┌{rule}┐", *drawn, f"└{rule}┘"])


def _choice(call: PreparedCall, implementation: tuple[str, ...] | None, target: Target) -> str:
    """The section about backends: which one runs each pass, the refusals of those asked before it, and its tiles.

    The backward pass is asked for without and with the gradients of captured arrays. Raises NotImplementedError if no
    backend runs the forward pass.
    """
    run = dispatch.choose(call.plan, implementation, target)
    said = set(run.refusals)
    lines = [f"runs on: {run.backend.name}", *(f"  not {name}: {why}" for name, why in run.refusals)]
    tiles = run.backend.tile_sizes(run.plan, target)
    if tiles is not None:
        lines.append(f"  tiles: {tiles}")
    documents = call.operands.documents is not None or call.plan.page > 0
    refusal = dispatch.refuses(run.backend, invariant.as_invariant(run.plan), target)
    lines.append(f"  {invariant.describe(run.backend.name, run.plan, refusal, documents)}")
    steps = [step.why for step in run.every_step()]
    lines += [f"  {why}" for why in steps]
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
        lines += [f"  {step.why}" for step in run.every_step(backward=True) if step.why not in steps]
        steps += [step.why for step in run.every_step(backward=True)]
        said |= set(run.refusals)
    return "\n".join([*lines, *_forward_mode(call, implementation, target, Wanted.of((*main, *learned)), said)])


def _forward_mode(
    call: PreparedCall,
    implementation: tuple[str, ...] | None,
    target: Target,
    moving: Wanted,
    said: set[tuple[str, str]],
) -> list[str]:
    """The lines about forward mode, where all that may move does; `said`: refusals of the lines before."""
    derivative = None if call.score is None else call.score.derivative
    if call.plan.page or (derivative is not None and derivative.takes_cotangent):
        return []
    run = dispatch.choose_tangent(call.plan, implementation, target, moving, derivative)
    assert isinstance(run.backend, ForwardMode)
    kernel = run.backend.describe_tangent(run.plan, target)
    lines = [f"tangent (forward mode) on: {run.backend.name}{'' if kernel is None else f', {kernel}'}"]
    return lines + [f"  not {other}: {why}" for other, why in run.refusals if (other, why) not in said]


def _devices(call: PreparedCall, placed: dict[str, jax.sharding.Sharding]) -> str:
    """The section about devices: how the work is split over those that the arrays are on; "" if they are on one."""
    operands, problem = call.operands, call.problem(None)
    of_main = tuple(placed.get(name) for name in operands._fields[:FIRST_CAPTURE])
    main = [where for x, where in zip(operands[:FIRST_CAPTURE], of_main, strict=True) if x is not None]
    flat = jax.tree.leaves(operands)
    return describe_devices(problem, flat, [*main, *map(_sharding, flat[len(main) :])])


def _sharding(x: object) -> jax.sharding.Sharding | None:
    """The sharding of an array or ShapeDtypeStruct (which may have None); None for tracers and anything else."""
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    return x.sharding
