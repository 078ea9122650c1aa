"""What a call will do and why: the traced mods, the block picture, the backend and every refusal, the work."""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax import dispatch
from flexjax.attention import DEFAULTS, Arguments, Call, describe_call, prepare
from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.parts import parts_of
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.trace.mod_ir import AXES, Load, Program, classify_load

Array = jax.Array


def explain(query: Array, key: Array, value: Array, *, implementation: object = None, **arguments: object) -> str:
    """Text about `flex_attention(query, key, value, ...)` with the same arguments; nothing is computed.

    It has the shapes, each traced mod with the axes that its values depend on and how each load walks its array, the map of
    blocks, the backend that would run with the refusals of those asked before it, its tiles, and the work: blocks visited,
    floating-point operations of the forward and the backward pass, bytes read and written at least.

    Arrays may be jax.ShapeDtypeStruct. Raises what flex_attention would raise.
    """
    unknown = sorted(set(arguments) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"explain() got unexpected arguments {', '.join(unknown)}; it takes those of flex_attention.")
    arrays = {"query": query, "key": key, "value": value} | {n: arguments.get(n) for n in OPTIONAL_ARRAYS}
    abstract = {n: x for n, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}
    if not abstract:
        return _text(implementation, arrays, arguments)
    texts: list[str] = []
    jax.eval_shape(lambda traced: texts.append(_text(implementation, arrays | traced, arguments)), abstract)
    return texts[0]


OPTIONAL_ARRAYS = ("sinks", "dropout_key", "query_extra", "key_extra")


def _text(implementation: object, arrays: dict, arguments: dict) -> str:
    filled: Arguments = {**DEFAULTS, **arguments, **{n: arrays[n] for n in OPTIONAL_ARRAYS}}  # type: ignore[typeddict-item]
    main = (arrays["query"], arrays["key"], arrays["value"])
    try:
        call = prepare(*main, **filled)
        choice = dispatch.choose(call.plan, implementation)  # type: ignore[arg-type]
    except Exception as error:
        error.add_note(describe_call("explain", *main, filled))
        raise
    sections = [_shapes(call.plan), *_programs(call), _blocks(call), _choice(choice, call.plan), _work(call)]
    return "\n\n".join(s for s in sections if s)


def _shapes(plan: KernelPlan) -> str:
    return (
        f"attention  B={plan.batch} N={plan.q_heads} M={plan.kv_heads} T={plan.q_len} S={plan.kv_len} D={plan.head_dim} "
        f"E={plan.value_dim} {plan.dtype} {plan.layout}  scale={plan.scale:.6g}"
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
    mask = block_mask_of(call)
    if mask is None:
        return "blocks: no mask, every tile is visited"
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(mask)):
        return f"blocks: {mask!r}, known when the program runs"
    batches, heads = mask.kv_num_blocks.shape[:2]
    first = mask if batches * heads == 1 else mask[0, 0]
    head = "" if batches * heads == 1 else f" (the first of {batches * heads})"
    return f"blocks{head}: █ full, ░ partial\n{first.to_string(48)}"


def block_mask_of(call: Call) -> BlockMask | None:
    """The block mask of a prepared call."""
    plan, lists = call.plan, call.operands.lists
    if plan.blocks is None or lists is None:
        return None
    blocks = plan.blocks
    shape = (blocks.batch, blocks.heads, -(-plan.q_len // blocks.block_q))
    # of numpy: jnp would trace them under jit
    empty: typing.Any = (np.zeros(shape, np.int32), np.zeros((*shape, 0), np.int32)) * 2
    arrays = [e if x is None else x for x, e in zip(lists, empty, strict=True)]
    sizes, widths = (blocks.block_q, blocks.block_kv), (blocks.partial_t, blocks.full_t)
    captures = tuple(call.operands.mask_captures)
    lengths = (plan.q_len, plan.kv_len)
    return BlockMask.of(parts_of(arrays, captures, plan.mask, lengths, sizes, widths, blocks.from_user_lists))


def _choice(choice: dispatch.Choice, plan: KernelPlan) -> str:
    lines = [f"runs on: {choice.name}"]
    lines += [f"  not {name}: {why}" for name, why in choice.refusals]
    if choice.name != dispatch.REFERENCE:
        schedule = getattr(dispatch.backend(choice.name), "schedule", None)
        if schedule is not None:
            lines.append(f"  tiles: {schedule(dispatch.with_measured_tiles(plan, choice.name))}")
    return "\n".join(lines)


def _work(call: Call) -> str:
    plan = call.plan
    mask = block_mask_of(call)
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
