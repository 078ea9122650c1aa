"""The order in which CTAs add their dQ tiles to memory, so that the same inputs give the same bits.

In the fused backward kernel a CTA owns one key tile and adds a dQ tile to memory for every query tile that it visits.
Float32 addition is not associative, so reproducible bits need a fixed order of additions at every query tile.

A CTA that waits holds its SM, and if the awaited CTA has not started and needs that SM, the GPU hangs. So each CTA
draws a start number from an atomic counter as its first action, which determines its key tile and its rank among the
key tiles of its head. A CTA waits at a query tile for the CTAs of lower rank that add to the same dQ sum. Lower ranks
have lower start numbers, hence have started; the CTA with the lowest unfinished start number waits for nobody. One
resident CTA is enough for progress, and the order depends neither on the number of SMs nor on where CTAs run.

    ticket(rank, query tile) = how many lower ranks of the same sum visit this query tile

A hand-off takes about one step (the work of one CTA on one query tile). Ranks of one sum therefore walk the queries in
the same direction, each one step behind the previous rank, and the last of the CTAs that start together begins late.
`order_for` keeps that start-up delay small by the choices in DqOrder, from the problem alone, so the bits are the same
on every GPU.

Downward, under a causal mask, the CTAs with the most work start first, and no long CTA runs alone at the end. Upward,
under a window or document mask, or a causal mask with many CTAs, a CTA begins where no lower rank adds.

FlashAttention-3 orders its additions by key block too; "DASH" (arXiv 2601.21824) discusses such schedules. The numbers
below are from an event simulation and from measurements, see lab/logs/hopper_backward.md.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.analysis import patterns
from flexjax.backends.mosaic_gpu.machine.reference_gpu import REFERENCE_SMS as REFERENCE_SMS
from flexjax.block_mask.host_or_program import module_of
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan

HANDOFF = 1.05
"""Steps from one addition to the next at the same query tile: the addition, the signal and the signal's latency."""
BYTES_PER_STEP = 6.6e6  # bytes that memory moves during one step: 2.2 us at 3 TB/s
HEADS, L2_BYTES = 4, 40e6
"""The most key heads side by side: HEADS, or more where the Q, dO and dQ of more heads fit L2_BYTES."""
MOST_UPWARD_DELAY = 0.1  # the modelled delay up to which an upward order is taken under a causal-like mask
MOST_SUMS = 8  # the most partial dQ sums of a head


class DqOrder(typing.NamedTuple):
    """In which order the CTAs of the fused backward kernel add their dQ tiles to memory."""

    heads: int  # key heads side by side in launch order, which do not wait for each other
    sums: int  # partial dQ sums of a head: rank r adds to sum r % sums, and the sums are added up at the end
    downward: bool  # queries from the last to the first, and key tile 0 has rank 0; else both the other way round
    delay: float  # modelled, relative to the kernel's time without the fixed order


def is_full(plan: KernelPlan) -> bool:
    return plan.blocks is None and plan.mask is None


def is_triangle(plan: KernelPlan) -> bool:
    """Whether there is a block mask whose mask_mod is causal-like, by a pattern of its program."""
    return plan.blocks is not None and plan.mask is not None and patterns.is_causal_like(plan.mask)


def order_for(plan: KernelPlan, q_tiles: int, kv_tiles: int) -> DqOrder:
    """The order with the smallest modelled delay for heads of `q_tiles` x `kv_tiles` tiles.

    Full masks go downward, causal-like ones upward where the delay allows it. The density of other masks is unknown:
    they go upward, with delay 0.
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
    """Key heads side by side in launch order, counted over all batch entries."""
    key_heads = plan.batch * plan.kv_heads
    head_bytes = 8.0 * plan.group * plan.q_len * (plan.head_dim + plan.extra_dim)
    most = max(HEADS, int(L2_BYTES / max(head_bytes, 1.0)))
    return cdiv(key_heads, cdiv(key_heads, most))


def _upward_order(plan: KernelPlan, q_tiles: int, kv_tiles: int, heads: int) -> DqOrder:
    """The upward order for a causal-like mask: rank 0 is the last key tile, and each CTA begins at its own diagonal."""
    # no CTA waits for one that starts with it, but the longest start last: SMs idle half as long as they run
    steps = float(q_tiles * plan.group)
    time = max(steps, plan.batch * plan.kv_heads * kv_tiles * steps * 0.5 / REFERENCE_SMS)
    return DqOrder(heads, 1, downward=False, delay=0.5 * steps / time)


def _sums(kv_tiles: int) -> list[int]:
    """The numbers of partial dQ sums of a head to choose from."""
    return [n for n in (1, 2, 4, MOST_SUMS) if n <= max(kv_tiles, 1)]


def _modelled_order(plan: KernelPlan, q_tiles: int, kv_tiles: int, heads: int, sums: int) -> DqOrder:
    """The downward order with these choices, and its modelled start-up delay.

    The delay is the larger of two plus a third: HANDOFF steps for each CTA of a sum that starts together with the last
    one; by how much the additions to one query tile take longer than the kernel; and the traffic of the partial sums.
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
    # bytes of the partial sums after the first
    written = 4.0 * plan.batch * plan.q_heads * plan.q_len * (plan.head_dim + plan.extra_dim) * (sums - 1)
    added = max(begin, chain - time) + written / BYTES_PER_STEP
    return DqOrder(heads, sums, downward=True, delay=added / time)


# ------------------------------------------------------------------- inside the kernel


class Assignment(typing.NamedTuple):
    """What a CTA of the fused kernel owns in a fixed order, int32 scalars."""

    key_head: jax.Array  # counted over all batch entries
    key_tile: jax.Array  # number of the key tile in its head
    rank: jax.Array  # place of the key tile among those of its head in the order of additions


def assignment_of(start: jax.Array, order: DqOrder, kv_tiles: int, key_heads: int) -> Assignment:
    """What the CTA with the start number `start` owns: of `order.heads` heads at a time, rank 0 of each comes first."""
    i32 = jnp.int32
    together = i32(order.heads * kv_tiles)
    first = jax.lax.div(start, together) * i32(order.heads)
    here = jax.lax.min(i32(order.heads), i32(key_heads) - first)
    within = jax.lax.rem(start, together)
    rank = jax.lax.div(within, here)
    key_tile = rank if order.downward else i32(kv_tiles - 1) - rank
    return Assignment(first + jax.lax.rem(within, here), key_tile, rank)


def tickets(visited: jax.Array, order: DqOrder) -> jax.Array:
    """The ticket of each visited (key tile, query tile), [..., key tiles, query tiles] int32, where `visited` is 1."""
    *lead, kv_tiles, q_tiles = visited.shape
    xp = module_of(visited)
    by_rank = visited if order.downward else xp.flip(visited, -2)
    rounds = cdiv(kv_tiles, order.sums)
    widths = [(0, 0)] * len(lead) + [(0, rounds * order.sums - kv_tiles), (0, 0)]
    in_sums = xp.pad(by_rank, widths).reshape(*lead, rounds, order.sums, q_tiles)
    before = (xp.cumsum(in_sums, -3, dtype=np.int32) - in_sums).reshape(*lead, -1, q_tiles)[..., :kv_tiles, :]
    return before if order.downward else xp.flip(before, -2)
