"""The order in which CTAs add their dQ tiles to memory, so that the same inputs give the same bits.

In the fused backward kernel a CTA owns one key tile and adds a dQ tile to memory for every query tile that it visits.
Float32 addition is not associative, so reproducible bits need a fixed order of additions at every query tile.

No kernel of this project waits for a CTA that may not have started: a CTA that waits holds its SM, and if the awaited
CTA needs that SM, the GPU hangs. Here every awaited CTA has started, by construction. Each CTA draws a start number
from an atomic counter as its first action. The start number determines its key tile, and with the key tile its rank
among the key tiles of its head. A CTA waits at a query tile for the CTAs of lower rank that add to the same dQ sum of
this query tile. Lower ranks have lower start numbers, hence have started; the CTA with the lowest unfinished start
number waits for nobody. One resident CTA is enough for progress, and the order depends neither on the number of SMs nor
on where CTAs run.

    ticket(rank, query tile) = how many lower ranks of the same sum visit this query tile

A hand-off takes about one step (a step is the work of one CTA on one query tile). Ranks of one sum therefore walk the
queries in the same direction, each one step behind the previous rank, and the last of the CTAs that start together
begins late. Three choices keep that start-up delay small. `order_for` makes them from the problem alone, never from the
GPU, so the bits are the same on every GPU:

    heads     key heads side by side in launch order: CTAs next to each other in launch order do not wait for each other
    sums      partial dQ sums of a head: rank r adds to sum r % sums, and the sums are added up at the end
    downward  if True, queries are walked from the last to the first, and key tile 0 has rank 0. Under a causal mask the
              CTAs with the most work then start first, and no long CTA runs alone at the end. If False, queries are
              walked from the first to the last, and the last key tile has rank 0. Under a window mask, a document mask, or a
              causal mask with many CTAs, a CTA then begins at query tiles to which no lower rank adds

FlashAttention-3 orders its additions by key block too; "DASH" (arXiv 2601.21824) discusses such schedules. The numbers
below are from an event simulation and from measurements, see LOG_backward.md.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu.reference_gpu import REFERENCE_SMS as REFERENCE_SMS
from flexjax.block_mask.host_or_program import module_of
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

HANDOFF = 1.05
"""Steps from one addition to the next at the same query tile: the addition, the signal and the signal's latency. 2.5 us on an H100, where a
step of 64 queries at head dim 128 takes 2.2 us and one of 128 queries at 64 takes 2.7."""
BYTES_PER_STEP = 6.6e6
"""Bytes that memory moves during one step: 2.2 us at 3 TB/s."""
HEADS, L2_BYTES = 4, 40e6
"""The most key heads side by side: HEADS, or more where the Q, dO and dQ of more heads fit L2_BYTES. For 8192 x 128, full, 8 heads are 3%
slower than 4 and 16 heads 27%.
"""
MOST_UPWARD_DELAY = 0.1
"""The modelled delay up to which an upward order is taken under a causal-like mask whose query tiles are as long as its key tiles."""
MOST_SUMS = 8
"""The most partial dQ sums of a head."""


class DqOrder(typing.NamedTuple):
    """In which order the CTAs of the fused backward kernel add their dQ tiles to memory. Key tile and rank of a CTA
    follow from its start number (`assignment_of`).

    heads      key heads side by side in launch order
    sums       partial dQ sums of a head: the key tile of rank r adds to sum r % sums, and the sums are added up at the
               end
    downward   True: queries are walked from the last to the first, and key tile 0 has rank 0. False: from the first to
               the last, and the last key tile has rank 0
    delay      time that the fixed order is modelled to add, relative to the kernel's time without it. Downward: the start-up delay or
               additions one after the other, and the bytes of partial sums; upward under a causal-like mask: SMs that idle at the end;
               other masks: 0, not modelled
    """

    heads: int
    sums: int
    downward: bool
    delay: float


def is_full(plan: KernelPlan) -> bool:
    """Whether all queries read all keys: there is neither a mask nor a block mask."""
    return plan.blocks is None and plan.mask is None


def is_triangle(plan: KernelPlan) -> bool:
    """Whether there is a block mask whose mask_mod is causal-like, by a pattern of its program: the last visible key
    grows with the query. False for block lists without a mask_mod.
    """
    return plan.blocks is not None and plan.mask is not None and patterns.is_causal_like(plan.mask)


def order_for(plan: KernelPlan, q_tiles: int, kv_tiles: int) -> DqOrder:
    """The order of dQ additions with the smallest modelled delay, for heads of `q_tiles` x `kv_tiles` tiles.

    For full and causal-like masks it is downward, with the number of partial sums that has the smallest modelled delay (of equal delays, the
    smallest number); for causal-like masks it is `_upward_order` where that has a delay of at most MOST_UPWARD_DELAY, query tiles are at
    least as long as key tiles, and there is neither score_mod nor dropout, so that dQ is late (backward_sm90_fused.py). Any other
    mask has unknown density: upward, one sum, and the delay is not modelled (0). The heads side by side are `heads_side_by_side` in each
    case.
    """
    heads = heads_side_by_side(plan)
    if not is_full(plan) and not is_triangle(plan):
        return DqOrder(heads, 1, downward=False, delay=0.0)
    made = [_modelled_order(plan, q_tiles, kv_tiles, heads, sums) for sums in _sums(kv_tiles)]
    best = min(made, key=lambda order: order.delay)
    tall = plan.q_len * kv_tiles >= plan.kv_len * q_tiles  # a query tile has as many tokens as a key tile, or more
    if is_triangle(plan) and tall and plan.score is None and plan.dropout is None:
        upward = _upward_order(plan, q_tiles, kv_tiles, heads)
        best = upward if upward.delay <= MOST_UPWARD_DELAY else best
    return best


def heads_side_by_side(plan: KernelPlan) -> int:
    """Key heads side by side in launch order, counted over all batch entries: at most HEADS, or as many as fit L2_BYTES if that is more;
    fewer if that makes the rounds of heads equally large.
    """
    key_heads = plan.batch * plan.kv_heads
    head_bytes = 8.0 * plan.group * plan.q_len * (plan.head_dim + plan.extra_dim)
    most = max(HEADS, int(L2_BYTES / max(head_bytes, 1.0)))
    return cdiv(key_heads, cdiv(key_heads, most))


def _upward_order(plan: KernelPlan, q_tiles: int, kv_tiles: int, heads: int) -> DqOrder:
    """The upward order for a causal-like mask: rank 0 is the last key tile, and each CTA begins at its own diagonal, to which no lower
    rank adds. So CTAs that start together do not wait for each other, but the longest CTAs of a head start last. In the downward order a
    CTA has one visit less than the rank before if tiles are square: those that start one visit later end together, so the next ranks
    start together and wait again, in every round of CTAs. With half as many queries a tile it has two less, which is longer than a
    hand-off.

    q_tiles, kv_tiles   tiles of a query head and of a key head
    heads               key heads side by side

    The delay is that of the end, relative to the kernel's time without it: on average half of the longest CTA, during which other SMs
    idle.
    """
    steps = float(q_tiles * plan.group)
    time = max(steps, plan.batch * plan.kv_heads * kv_tiles * steps * 0.5 / REFERENCE_SMS)
    return DqOrder(heads, 1, downward=False, delay=0.5 * steps / time)


def _sums(kv_tiles: int) -> list[int]:
    """The numbers of partial dQ sums of a head to choose from: powers of two up to MOST_SUMS and to `kv_tiles`, the
    number of key tiles of a head; at least 1.
    """
    return [n for n in (1, 2, 4, MOST_SUMS) if n <= max(kv_tiles, 1)]


def _modelled_order(plan: KernelPlan, q_tiles: int, kv_tiles: int, heads: int, sums: int) -> DqOrder:
    """The downward order with these choices, and its modelled start-up delay.

    q_tiles, kv_tiles   tiles of a query head and of a key head
    heads               key heads side by side
    sums                partial dQ sums of a head

    The delay, relative to the kernel's time without it, is the larger of two plus a third: HANDOFF steps for each CTA
    of a sum that starts together with the last one; by how much the additions to one query tile, one after the other,
    take longer than the kernel; and the memory traffic of the partial sums after the first. A causal-like mask has no
    start-up delay where all CTAs run at once.
    """
    key_heads, density = plan.batch * plan.kv_heads, 0.5 if is_triangle(plan) else 1.0
    steps = q_tiles * plan.group  # of the longest CTA
    ctas = key_heads * kv_tiles
    time = max(float(steps), ctas * steps * density / REFERENCE_SMS)
    # The last of the CTAs of one sum that start together waits for all others. If all CTAs of a group of heads fit
    # the GPU, this happens for each round of CTAs, otherwise once.
    begin = HANDOFF * min(kv_tiles, REFERENCE_SMS / heads) / sums
    if heads * kv_tiles <= REFERENCE_SMS:
        begin *= max(1.0, ctas / REFERENCE_SMS)
    if density < 1.0 and ctas <= REFERENCE_SMS:
        begin = 0.0  # a CTA that begins late has less work by as much
    # all ranks of a sum add to a query tile one after the other
    chain = cdiv(key_heads, heads) * cdiv(kv_tiles, sums) * HANDOFF if heads * kv_tiles > REFERENCE_SMS else 0.0
    written = 4.0 * plan.batch * plan.q_heads * plan.q_len * (plan.head_dim + plan.extra_dim) * (sums - 1)
    added = max(begin, chain - time) + written / BYTES_PER_STEP
    return DqOrder(heads, sums, downward=True, delay=added / time)


# ------------------------------------------------------------------- inside the kernel


class Assignment(typing.NamedTuple):
    """What a CTA of the fused kernel owns in a fixed order, int32 scalars.

    key_head   counted over all batch entries
    key_tile   number of the key tile in its head
    rank       place of the key tile among those of its head in the order of additions
    """

    key_head: jax.Array
    key_tile: jax.Array
    rank: jax.Array


def assignment_of(start: jax.Array, order: DqOrder, kv_tiles: int, key_heads: int) -> Assignment:
    """What the CTA with this start number owns. CTAs take `order.heads` heads at a time, the last time the heads that
    are left, and among these rank 0 of each head, then rank 1 of each, and so on.

    start       how many CTAs started before this one, int32 scalar
    kv_tiles    key tiles of a head
    key_heads   key heads over all batch entries

    The key tile is the rank in a downward order; otherwise rank 0 has the last key tile.
    """
    i32 = jnp.int32
    together = i32(order.heads * kv_tiles)
    first = jax.lax.div(start, together) * i32(order.heads)
    here = jax.lax.min(i32(order.heads), i32(key_heads) - first)
    within = jax.lax.rem(start, together)
    rank = jax.lax.div(within, here)
    key_tile = rank if order.downward else i32(kv_tiles - 1) - rank
    return Assignment(first + jax.lax.rem(within, here), key_tile, rank)


def tickets(visited: jax.Array, order: DqOrder) -> jax.Array:
    """The ticket of each (key tile, query tile) that is visited: [..., key tiles, query tiles] int32. It is the number
    of visiting key tiles of lower rank whose rank is the same modulo `order.sums`.

    visited   1 where the key tile visits the query tile, else 0, in the same shape

    Entries that are not visited have numbers without meaning.
    """
    *lead, kv_tiles, q_tiles = visited.shape
    xp = module_of(visited)
    by_rank = visited if order.downward else xp.flip(visited, -2)
    rounds = cdiv(kv_tiles, order.sums)
    widths = [(0, 0)] * len(lead) + [(0, rounds * order.sums - kv_tiles), (0, 0)]
    in_sums = xp.pad(by_rank, widths).reshape(*lead, rounds, order.sums, q_tiles)
    before = (xp.cumsum(in_sums, -3, dtype=np.int32) - in_sums).reshape(*lead, -1, q_tiles)[..., :kv_tiles, :]
    return before if order.downward else xp.flip(before, -2)
