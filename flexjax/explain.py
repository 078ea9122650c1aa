"""What a call will do and why: the traced mods, the block picture, the backend and every refusal, the work."""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AxisType

from flexjax import dispatch
from flexjax.attention import DEFAULTS, Arguments, Call, describe_call, prepare
from flexjax.backends import target as targets
from flexjax.backends.target import Target
from flexjax.block_mask.block_mask import BlockMask
from flexjax.dense import block_mask_of
from flexjax.errors import add_note_once, bad_argument
from flexjax.ir.program import AXES, Load, Program, classify_load
from flexjax.parallel.gathers import describe_devices
from flexjax.plan.kernel_plan import KernelPlan, Wanted

Array = jax.Array


def explain(
    query: Array,
    key: Array,
    value: Array,
    *,
    implementation: str | Sequence[str] | None = None,
    device: typing.Any = None,
    **arguments: object,
) -> str:
    """Text about `flex_attention(query, key, value, ...)` with the same arguments; nothing is computed.

    It has the shapes, each traced mod with the axes that its values depend on and how each load walks its array, the map of
    blocks, the backends that would run the forward pass, the backward pass and the gradients of captured arrays, with the
    refusals of those asked before, the tiles, how arrays that are split over a mesh divide the work and what of them is gathered,
    and the work: blocks visited, floating-point operations of the forward and the
    backward pass, bytes read and written at least.

    query, key, value, **arguments  as for flex_attention; arrays may be jax.ShapeDtypeStruct
    implementation  as for flex_attention
    device      where the call would run: a device, also one of a topology, or a platform ("cpu", "cuda", "tpu"), which is its
                first device here; by default the default device

    Raises what flex_attention would raise.
    """
    unknown = sorted(set(arguments) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"explain() got unexpected arguments {', '.join(unknown)}; it takes those of flex_attention.")
    arrays = {"query": query, "key": key, "value": value} | {n: arguments.get(n) for n in OPTIONAL_ARRAYS}
    abstract = {n: x for n, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}
    placed = {n: where for n, x in arrays.items() if (where := _sharding(x)) is not None}
    meshes = [where.mesh for where in placed.values() if isinstance(where, jax.sharding.NamedSharding)]
    automatic = any(mesh.size > 1 and AxisType.Explicit not in mesh.axis_types for mesh in meshes)
    target = _target(device)
    target = dataclasses.replace(target, automatic=automatic and target.platform == "tpu")
    if not abstract:
        return _text(implementation, target, arrays, arguments, placed)
    texts: list[str] = []
    text = lambda traced: texts.append(_text(implementation, target, arrays | traced, arguments, placed))
    jax.eval_shape(text, abstract)
    return texts[0]


OPTIONAL_ARRAYS = ("scale", "sinks", "dropout_key", "query_extra", "key_extra")


def _target(device: typing.Any) -> Target:
    if device is None:
        return targets.default()
    if isinstance(device, str):
        return targets.of_platform(device)
    if not hasattr(device, "device_kind"):
        raise bad_argument("device", repr(device), "a jax.Device, a platform or None", "For example 'tpu'.")
    return targets.of_device(device)


def _text(
    implementation: str | Sequence[str] | None, target: Target, arrays: dict, arguments: dict, placed: dict
) -> str:
    filled: Arguments = {**DEFAULTS, **arguments, **{n: arrays[n] for n in OPTIONAL_ARRAYS}}  # type: ignore[typeddict-item]
    main = (arrays["query"], arrays["key"], arrays["value"])
    try:
        call = prepare(*main, **filled)
        choice = _choice(call, dispatch.candidates(implementation), target)
    except Exception as error:
        add_note_once(error, describe_call("explain", *main, filled))
        raise
    sections = [
        _shapes(call.plan, isinstance(filled["scale"], Array)),
        *_programs(call),
        _blocks(call),
        choice,
        _devices(call, placed),
        _work(call),
    ]
    return "\n\n".join(s for s in sections if s)


def _shapes(plan: KernelPlan, captured_scale: bool) -> str:
    scale = "captured, multiplies the score" if captured_scale else f"{plan.scale:.6g}"
    return (
        f"attention  B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} D={plan.head_dim} "
        f"E={plan.value_dim} {plan.dtype} {plan.layout}  scale={scale}"
        + (f"  extra features R={plan.extra_dim}" if plan.extra_dim else "")
        + ("  sinks" if plan.has_sinks else "")
        + ("  dropout" if plan.dropout is not None else "")
    )


def _programs(call: Call) -> list[str]:
    out = []
    for name, program in (("score_mod", call.plan.score), ("mask_mod", call.plan.mask)):
        out.append(f"{name}: " + ("none" if program is None else describe(program)))
    if call.score is not None:
        made = call.score.derivative
        out[0] += "\n  derivative: " + (call.score.why_not if made is None else f"{len(made.steps)} steps")
    return out


def describe(program: Program) -> str:
    """The steps of a program, each with the axes of its value and the walk of its load."""
    lines = ["captures " + (", ".join(f"c{i} {c}" for i, c in enumerate(program.captures)) or "nothing")]
    body = program.key.splitlines()[1 : 1 + len(program.steps)]
    width = max((len(line) for line in body), default=0)
    for line, step in zip(body, program.steps, strict=True):
        axes = ",".join(a for a in AXES if a in step.outs[0].axes) or "-"
        walk = f"  {classify_load(step)}" if isinstance(step, Load) else ""
        lines.append(f"{line:<{width}}  [{axes}]{walk}")
    lines.append("  -> " + ", ".join(map(str, program.results)))
    return "\n".join(lines)


def _blocks(call: Call) -> str:
    mask = block_mask_of(call.plan, call.operands)
    if mask is None:
        return "blocks: no mask, every tile is visited"
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return f"blocks: {mask!r}, known when the program runs"
    batches, heads = mask.kv_num_blocks.shape[:2]
    first = mask if batches * heads == 1 else mask[0, 0]
    head = "" if batches * heads == 1 else f" (the first of {batches * heads})"
    return f"blocks{head}: █ full, ░ partial\n{first.to_string(48)}"


def _choice(call: Call, implementation: tuple[str, ...] | None, target: Target) -> str:
    """Who runs what, and why not those asked before; a sentence is there once."""
    run = dispatch.choose(call.plan, implementation, target)
    said = set(run.refusals)
    lines = [f"runs on: {run.backend.name}", *(f"  not {name}: {why}" for name, why in run.refusals)]
    tile_sizes = getattr(run.backend, "tile_sizes", None)
    if tile_sizes is not None:
        lines.append(f"  tiles: {tile_sizes(run.plan, target)}")
    score, operands = call.score, call.operands
    if score is not None and score.derivative is None:
        return "\n".join([*lines, f"backward pass: none. {score.why_not}"])
    derivative = None if score is None else score.derivative
    main = tuple(x is not None for x in operands[:6])
    learned = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in operands.score_captures)
    passes = [("backward pass", (False,) * len(learned))]
    passes += [("gradients of captured arrays", learned)] if any(learned) else []
    for name, captures in passes:
        run = dispatch.choose_backward(call.plan, implementation, target, Wanted._make((*main, captures)), derivative)
        lines.append(f"{name} on: {run.backend.name}")
        lines += [f"  not {other}: {why}" for other, why in run.refusals if (other, why) not in said]
        said |= set(run.refusals)
    return "\n".join(lines)


def _devices(call: Call, placed: dict) -> str:
    """How the work is split over the devices that the arrays are on. `placed`: the shardings of arrays by name."""
    operands, problem = call.operands, call.problem(None)
    of_main = tuple(placed.get(name) for name in operands._fields[:6])
    main = [where for x, where in zip(operands[:6], of_main, strict=True) if x is not None]
    flat = jax.tree.leaves(operands)
    return describe_devices(problem, flat, [*main, *map(_sharding, flat[len(main) :])])


def _sharding(x: typing.Any) -> jax.sharding.Sharding | None:
    known = isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not isinstance(x, core.Tracer)
    return x.sharding if known else None


def _work(call: Call) -> str:
    plan = call.plan
    mask = block_mask_of(call.plan, call.operands)
    if mask is None:
        visited, total, entries = 1, 1, plan.q_len * plan.kv_len
    elif any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return "work: depends on traced block lists"
    else:
        counts = [np.asarray(x).sum(dtype=np.int64) for x in (mask.kv_num_blocks, mask.full_kv_num_blocks)]
        visited, total = int(sum(counts)), mask.kv_num_blocks.size * mask.blocks[1]
        entries = _entries(mask)
    flops = 2.0 * plan.batch * plan.q_heads * entries * (plan.head_dim + plan.extra_dim + plan.value_dim)
    item = jnp.dtype(plan.dtype).itemsize
    query_side = plan.q_heads * plan.q_len * (plan.head_dim + plan.value_dim + plan.extra_dim)
    key_side = (
        plan.kv_heads * plan.kv_len * (plan.head_dim + plan.value_dim) + plan.extra_heads * plan.kv_len * plan.extra_dim
    )
    size = plan.batch * item * (query_side + key_side)
    lines = ["work:"]
    if mask is not None:
        lines.append(f"  blocks visited {visited} of {total} ({100 * visited / max(total, 1):.1f}%)")
    lines.append(f"  forward {flops / 1e9:.4g} GFLOP, backward {2.5 * flops / 1e9:.4g} GFLOP")
    lines.append(f"  query, key, value and out: {size / 1e6:.4g} MB")
    return "\n".join(lines)


def _entries(mask: BlockMask) -> float:
    """Positions of the visited blocks that exist, per batch entry and head."""
    rows, columns = mask.blocks
    tall, wide = mask.block_size
    heights = np.minimum(tall, mask.q_len - tall * np.arange(rows))
    total = 0
    lists = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    for num, index in ((np.asarray(n, np.int64), np.asarray(i)) for n, i in lists):
        listed = np.arange(index.shape[-1]) < num[..., None]
        at_end = (listed & (index == columns - 1)).any(-1)
        total += ((num * wide - at_end * (columns * wide - mask.kv_len)) * heights).sum()
    return total / max(1, math.prod(mask.kv_num_blocks.shape[:2]))
