"""How the xla backend cuts a problem into tiles and walks the lists of a block mask.

A *row* is one query block of one group of batch entries and heads. Rows run one after the other; within a row the key blocks
of the full list come first, `chunk` at a time without any masking, then what is left over together with the partial list,
masked. Loops end where the lists do, so an empty block costs nothing, whether the lists are constants or traced.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.target import Target
from flexjax.backends.xla.tile import Region
from flexjax.plan.kernel_plan import BlockLists, KernelPlan

Array = jax.Array
Carry = typing.TypeVar("Carry")

CPU_TILE = 1 << 18
"""Elements of a tile of scores that stay in a CPU's second-level cache with their companions, all heads together."""
CPU_LISTED_TILE = 1 << 16
"""The same where key blocks come from a list."""
CPU_CHUNK = 1 << 14
"""On a CPU, key blocks are taken several at a time up to so many elements: blocks apart must be copied together, and the last
step of a row computes those that are not there. Blocks of 128 one by one take 0.4 to 0.9 of the time that four at once do."""
ACCELERATOR_TILE = 1 << 24
MAX_CHUNK = 8
DENSE_BLOCK = 256
"""Tile of a problem without a block mask, on a CPU."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Static sizes. A tile is [batch, heads, block_q, chunk * block_kv]; `rows` query blocks, `columns` key blocks."""

    batch: int
    heads: int
    block_q: int
    block_kv: int
    chunk: int
    rows: int
    columns: int
    batch_groups: int
    head_groups: int

    @property
    def padded_q(self) -> int:
        return self.rows * self.block_q

    @property
    def padded_kv(self) -> int:
        return self.columns * self.block_kv

    @property
    def steps(self) -> int:
        return self.batch_groups * self.head_groups * self.rows


def choose(plan: KernelPlan, target: Target, backward: bool = False) -> Schedule:
    """The tiles of a pass: as many heads, batch entries and key blocks as fit the budget of the target's platform.

    A tile that the options ask for is cut to the lengths and, under a block mask, to whole blocks of it.
    """
    options = plan.options
    asked_q = options.block_q_bwd if backward else options.block_q
    asked_kv = options.block_kv_bwd if backward else options.block_kv
    on_cpu = target.platform == "cpu"
    listed = plan.blocks is not None
    budget = (CPU_LISTED_TILE if listed else CPU_TILE) if on_cpu else ACCELERATOR_TILE
    if plan.blocks is None:
        dense = DENSE_BLOCK if on_cpu else 512
        block_q = min(asked_q or even_block(plan.q_len, dense), max(plan.q_len, 1))
        block_kv = min(asked_kv or even_block(plan.kv_len, 2 * dense), max(plan.kv_len, 1))
        lists_batch = lists_heads = widest = 1
    else:
        # one row of blocks has no more queries than there are: a token of decoding is no block of 128
        block_q, block_kv = min(plan.blocks.block_q, max(plan.q_len, 1)), plan.blocks.block_kv
        lists_batch, lists_heads = plan.blocks.batch, plan.blocks.heads
        widest = max(plan.blocks.partial, plan.blocks.full, 1)
        if lists_heads == 1 and lists_batch == 1:
            widest = min(widest, -(-plan.kv_len // block_kv))
    area = block_q * block_kv
    groups = (plan.group, plan.q_heads // plan.extra_heads) if plan.extra_heads else (plan.group,)
    heads = 1 if lists_heads > 1 else largest_divisor(plan.q_heads, budget // area, groups)
    batch = 1
    if lists_batch == 1 and lists_heads == 1 and heads == plan.q_heads:
        batch = largest_divisor(plan.batch, budget // (area * heads))
    most = CPU_CHUNK if on_cpu else budget
    chunk = max(1, min(most // (area * heads * batch), widest, MAX_CHUNK)) if listed else 1
    if listed and asked_kv:
        chunk = max(1, min(asked_kv // block_kv, -(-plan.kv_len // block_kv)))
    return Schedule(
        batch,
        heads,
        block_q,
        block_kv,
        chunk,
        -(-plan.q_len // block_q),
        -(-plan.kv_len // block_kv),
        plan.batch // batch,
        plan.q_heads // heads,
    )


def tile_candidates(plan: KernelPlan, target: Target) -> list[dict[str, int]]:
    """Tiles for autotuning: with a block mask, how many of its blocks are taken at once; else squares and oblongs.

    Both passes of a candidate have the same tile.
    """
    default = choose(plan, target)
    width = default.chunk * default.block_kv
    if plan.blocks is not None:
        chunks = [d for d in (1, 2, 4, 8, 16) if d <= default.columns]
        shapes = [(default.block_q, d * default.block_kv) for d in chunks]
    else:
        sides = [side for side in (64, 128, 256, 512, 1024) if side < 2 * max(plan.q_len, plan.kv_len, 32)]
        shapes = [(even_block(plan.q_len, q), even_block(plan.kv_len, kv)) for q in sides for kv in (q, 2 * q)]
    return [
        {"block_q": q, "block_kv": kv, "block_q_bwd": q, "block_kv_bwd": kv}
        for q, kv in dict.fromkeys([(default.block_q, width), *shapes])
    ]


def even_block(length: int, most: int) -> int:
    """The block that cuts `length` into as few equal parts of at most `most` as possible."""
    parts = max(1, -(-length // most))
    return max(1, -(-length // parts))


def largest_divisor(number: int, most: int, groups: Sequence[int] = ()) -> int:
    """The largest divisor of `number` of at most `most` that is made of whole groups or lies within one, for each size of
    groups (heads that share a key head, heads that share a head of key_extra); at least 1."""
    fit = [d for d in range(1, number + 1) if number % d == 0 and all(d % g == 0 or g % d == 0 for g in groups)]
    return max([d for d in fit if d <= max(most, 1)], default=1)


class Row(typing.NamedTuple):
    """One row: first batch entry, head, key head and query, and its lists (None where every block is visited)."""

    b0: Array
    h0: Array
    m0: Array
    row: Array
    full_num: Array | None
    full_index: Array | None
    partial_num: Array | None
    partial_index: Array | None


def row_at(plan: KernelPlan, schedule: Schedule, lists: BlockLists | None, step: Array) -> Row:
    """The row of a step in 0 .. schedule.steps - 1."""
    row = step % schedule.rows
    group = step // schedule.rows
    h0 = (group % schedule.head_groups) * schedule.heads
    b0 = (group // schedule.head_groups) * schedule.batch
    m0 = h0 // plan.group
    if lists is None or plan.blocks is None:
        return Row(b0, h0, m0, row, None, None, None, None)
    at = (b0 if plan.blocks.batch > 1 else 0, h0 if plan.blocks.heads > 1 else 0, row)
    picked = [None if x is None else x[at] for x in lists[:4]]
    return Row(b0, h0, m0, row, picked[2], picked[3], picked[0], picked[1])


class Visit(typing.NamedTuple):
    """Key blocks of one step of a row. `valid` [chunk] says which entries count and `whole` [chunk] which need no mask; both
    None where all do."""

    blocks: Array
    valid: Array | None
    whole: Array | None


def region_of(schedule: Schedule, row: Row, blocks: Array) -> Region:
    return Region(
        row.b0,
        schedule.batch,
        row.h0,
        schedule.heads,
        row.row * schedule.block_q,
        schedule.block_q,
        (blocks * schedule.block_kv).astype(jnp.int32),
        schedule.block_kv,
    )


def walk(plan: KernelPlan, schedule: Schedule, row: Row, body: Callable[[Carry, Visit], Carry], carry: Carry) -> Carry:
    """Folds `body` over the visits of a row."""
    if plan.blocks is None:
        visit = lambda t: Visit(jnp.asarray(t, jnp.int32)[None], None, None)
        return _loop(plan, schedule.columns, schedule.columns, lambda t, c: body(c, visit(t)), carry)
    chunk = schedule.chunk
    num_full = jnp.int32(0) if row.full_num is None else row.full_num
    num_partial = jnp.int32(0) if row.partial_num is None else row.partial_num
    if row.full_index is not None:
        full_index = row.full_index
        at_once = lambda t: Visit(lax.dynamic_slice(full_index, (t * chunk,), (chunk,)), None, None)
        most = row.full_index.shape[0] // chunk
        carry = _loop(plan, num_full // chunk, most, lambda t, c: body(c, at_once(t)), carry)
    left = num_full % chunk
    total = left + num_partial

    def remaining(t: Array) -> Visit:
        place = t * chunk + jnp.arange(chunk, dtype=jnp.int32)
        whole = place < left
        blocks = jnp.zeros(chunk, jnp.int32)
        if row.partial_index is not None:
            blocks = row.partial_index.at[place - left].get(mode="clip")
        if row.full_index is not None:
            full = row.full_index.at[num_full - left + place].get(mode="clip")
            blocks = jnp.where(whole, full, blocks)
        return Visit(blocks, place < total, whole)

    widest = (plan.blocks.partial if row.partial_index is not None else 0) + (
        chunk - 1 if row.full_index is not None else 0
    )
    return _loop(plan, -(-total // chunk), -(-widest // chunk), lambda t, c: body(c, remaining(t)), carry)


def _loop(
    plan: KernelPlan, count: Array | int, most: int, body: Callable[[Array, Carry], Carry], carry: Carry
) -> Carry:
    """`count` rounds of at most `most`. Reverse mode needs a loop of known length: rounds past `count` do nothing."""
    if most == 0:
        return carry
    if isinstance(count, int) and count == 1:
        return body(jnp.int32(0), carry)
    if not plan.differentiable:
        return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)

    def round_(state: Carry, t: Array) -> tuple[Carry, None]:
        return lax.cond(t < count, lambda s: body(t, s), lambda s: s, state), None

    return lax.scan(round_, carry, jnp.arange(most, dtype=jnp.int32))[0]
