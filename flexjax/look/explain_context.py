"""What `explain` says about a call with `context=`: how keys travel, what a device receives, work and stages.

The call is built as flex_attention builds it (context/call.py). Each stage says which backend runs it.
"""

import numpy as np
from jax.core import Tracer

from flexjax.backends.target import Target
from flexjax.context.call import Built
from flexjax.context.stages import plan_of_stage
from flexjax.parallel.gathers import bytes_text
from flexjax.passes import dispatch
from flexjax.plan.kernel_plan import BlockLayout


def describe_context(built: Built, implementation: tuple[str, ...] | None, target: Target) -> str:
    """The section about devices: axes and method, layout, what each device receives, size and backend of each stage.

    Raises NotImplementedError if no backend runs a stage.
    """
    call, layout = built.call, built.placed.layout
    asked = built.placed.context.method
    lines = [
        f"devices: the sequence over {' and '.join(f'{name} {size}' for name, size in call.mesh)}, method {call.method}"
        + (" (auto)" if asked == "auto" else ""),
        *(f"  {line}" for line in str(layout).splitlines()),
    ]
    if layout.devices > 1:
        lines += ["  " + line for line in _received(built)]
    if call.checked:
        lines.append("  where the mask needs a block that the layout does not send, all devices take the ring instead")
    stages, said = _stages(built), set()
    merged = call.method == "ring" or (len(stages) > 1 and built.tables.visitors is None)
    for number, (name, rows, columns, blocks) in enumerate(stages, 1):
        plan = plan_of_stage(call.plan, call.block_size, rows, columns, blocks, call.plan.has_sinks, partial=merged)
        run = dispatch.choose(plan, implementation, target)
        sizes = f"{rows * call.block_size[0]} queries x {columns * call.block_size[1]} keys"
        lines.append(f"  stage {number}: {name}, {sizes} a device, on {run.backend.name}")
        lines += [f"    not {other}: {why}" for other, why in run.refusals if (other, why) not in said]
        said |= set(run.refusals)
    return "\n".join(lines)


def _received(built: Built) -> list[str]:
    """Lines on the key blocks and bytes that a device receives in the forward pass, and what the backward pass adds."""
    call, plan, n = built.call, built.call.plan, built.call.devices
    batch, heads = (1, 1) if built.placed.split is None else (
        built.placed.split.count(built.placed.split.batch), built.placed.split.count(built.placed.split.heads)
    )  # fmt: skip
    features = plan.kv_heads * (plan.head_dim + plan.value_dim) + plan.extra_heads * plan.extra_dim
    size = np.dtype(plan.dtype).itemsize
    block = plan.batch * call.block_size[1] * features * size // (batch * heads)
    own = built.tables.key_blocks.shape[1]
    if call.method == "all_to_all":
        rows = built.tables.query_blocks.shape[1] * call.block_size[0] * plan.q_heads
        rows *= plan.batch * (plan.head_dim + plan.value_dim + plan.extra_dim) * size // (batch * heads)
        whole = (rows + own * block) * (n - 1) // n
        return [
            f"each device receives {bytes_text(whole)} of query, key, value and out in 2 all-to-alls between tokens "
            "and heads"
        ]
    blocks, how = (n - 1) * own, "in one all-gather" if call.method == "all_gather" else f"in {n - 1} steps of a ring"
    if call.method == "neighbours":
        widths = [x.shape[1] for x in built.tables.received]
        blocks = sum(widths)
        if not blocks:
            return ["no device receives keys"]
        places = ", ".join(map(str, call.shifts))
        how = f"in {len(widths)} round{'s' * (len(widths) > 1)} (from {places} place{'s' * (places != '1')} before it)"
    share = blocks / max(1, (n - 1) * own)
    return [
        f"each device receives {blocks} key blocks, {bytes_text(blocks * block)} of keys and values "
        f"({plan.batch // batch} batch entries, {plan.kv_heads // heads} key heads), {how}: {share:.3f} of an "
        f"all-gather{_filled(built)}",
        "the backward pass receives them again and sends their gradients back in float32",
    ]


def _filled(built: Built) -> str:
    """The end of a sentence: how many of the received key blocks a device needs, if messages are padded, or ""."""
    rounds = built.decision.rounds
    if rounds is None or any(isinstance(x, Tracer) for x in rounds.received):
        return ""
    needed = sum(np.count_nonzero(np.asarray(x) >= 0, 1) for x in rounds.received)
    low, high = int(np.min(needed)), int(np.max(needed))
    if low == rounds.width:
        return ""
    each = str(low) if low == high else f"{low} to {high}"
    return f". Of the blocks {each} are needed: all messages of a round are as wide as its widest"


def _stages(built: Built) -> list[tuple[str, int, int, BlockLayout]]:
    """The stages: (what it computes, query blocks of a device, key blocks, the layout of its lists)."""
    call, tables = built.call, built.tables
    rows, own = tables.query_blocks.shape[1], tables.key_blocks.shape[1]
    n = call.devices
    if call.method == "all_to_all":
        found = [(f"all tokens of 1/{n} of the heads", rows * n, own * n)]
    elif call.method == "all_gather":
        found = [("own queries, all keys", rows, own * n)]
    elif call.method == "ring":
        found = [(f"own queries, the keys of one device, {n} times, merged by lse", rows, own)]
    elif not call.shifts:
        found = [("own queries, own keys", rows, own)]
    else:
        received = sum(x.shape[1] for x in tables.received)
        if tables.visitors is None:
            found = [
                ("own queries, own keys, while others travel", rows, own),
                ("own queries, received keys, merged by lse", rows, received),
            ]
        else:
            few, also = tables.visitors.queries.shape[1], tables.visitors.keys.shape[1]
            found = [
                ("queries that visit own keys alone, while others travel", rows, own),
                ("queries that visit received keys, with all keys that they visit", few, received + also),
            ]
    mask, known = call.plan.mask, call.blocks
    batch, heads = (
        n if mask is not None and mask.reads(axis) else 1
        for axis, n in (("b", call.plan.batch), ("h", call.plan.q_heads))
    )
    return [
        (name, q, k, known[i] if i < len(known) else BlockLayout(batch, heads, *call.block_size, k, k, q, q))
        for i, (name, q, k) in enumerate(found)
    ]
