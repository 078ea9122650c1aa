"""Whether the fused backward kernel of Hopper runs a plan, how many CTAs share a key tile, and in which order they add to dQ.

choose_kernel.py asks it, and passes plans to `fused_is_faster` and `adds_in_order` as `spread` makes them. Every answer follows from the
plan alone (choose_kernel.py says why); the numbers are measured ones of LOG_backward.md.
"""

import dataclasses

from flexjax.backends.mosaic_gpu import dq_order
from flexjax.backends.mosaic_gpu.backward_fused_tiles import FusedTiles, fused_tiles
from flexjax.backends.mosaic_gpu.backward_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.float_parts import parts_of
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

MOST_TICKETS = 1 << 22
"""The most (query tile, key tile) pairs, over all masks of a problem, whose tickets (dq_order.py) are kept in memory."""
MOST_DELAY, MOST_DELAY_UNGROUPED = 0.12, 1.0
"""The largest `DqOrder.delay` at which the fused kernel in a fixed order beats two kernels, which multiply 1.4 times as much: with
grouped heads; where each query head has a key head. The model overestimates the second: 0.54 was 0.12 when measured."""
MOST_DELAY_WHERE_TWO_ARE_SLOW = 0.35
"""The same with grouped heads where two kernels are slow: for problems that do not fill the reference GPU once, and for score_mods that load
arrays over queries or keys, which two kernels evaluate twice."""
LONG_CAUSAL = 2048
"""Keys from which any order is faster than a fixed one under a causal-like mask; with 256 keys any order takes 1.17 times as long."""
ENOUGH_CTAS = 4
"""CTAs wanted for each SM. With fewer, several CTAs share the query heads of a key tile."""


def spread(plan: KernelPlan, shares: int) -> KernelPlan:
    """The plan with `shares` times the key heads: each CTA of a key tile counts as a key head, and adjacent ones read the same keys and
    values.
    """
    return dataclasses.replace(plan, kv_heads=plan.kv_heads * shares)


def shares_of(plan: KernelPlan) -> int:
    """CTAs among which the query heads of a key tile are divided, a divisor of the group; 1: one CTA has them all.

    For full and causal-like masks it is the smallest divisor with which there are ENOUGH_CTAS for each SM of the reference GPU, else the
    largest: with one CTA for each key tile the GPU idles while a few long CTAs finish. Under other masks, of unequal documents say, it is
    the largest: one CTA for a whole group takes 1.7 times as long as a CTA for each query head.

    Divisors with which the partial dK and dV, in 16 bits, would together take more bytes than one float32 sum of dQ do not count, as with
    more keys than queries. That sum takes 4.3 GB with 64 query heads of 128 and 131072 tokens.
    """
    fit = [
        n
        for n in range(1, plan.group + 1)
        if plan.group % n == 0 and (n == 1 or n * plan.kv_len <= plan.group * plan.q_len)
    ]
    if not dq_order.is_full(plan) and not dq_order.is_triangle(plan):
        return fit[-1]
    ctas = plan.batch * plan.kv_heads * cdiv(plan.kv_len, FUSED_KEYS)
    return next((n for n in fit if ctas * n >= ENOUGH_CTAS * dq_order.REFERENCE_SMS), fit[-1])


def fused_is_faster(plan: KernelPlan) -> bool:
    """Whether the fused kernel, with five products a tile, is expected to beat two kernels with seven in all.

    False for float32, and for a score_mod that loads an element for each (query, key). Otherwise True where additions to dQ may be in
    any order and each query head has a key head, even if no tile of the fused kernel fits; else by `ordered_dq_is_fast`, and False if
    none fits.
    """
    if ir.TILE in _load_kinds(plan) or parts_of(plan) > 1:
        return False
    if not plan.options.deterministic and plan.group == 1:
        return True
    fused = fused_tiles(plan)
    return fused is not None and ordered_dq_is_fast(plan, fused)


def adds_in_order(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel adds to dQ in a fixed order: where the options ask for the same bits each time
    (`deterministic`), or where a fixed order is faster than any order.

    tiles   sizes of the fused kernel

    A fixed order is faster where `ordered_dq_is_fast`, because the first addition to a dQ tile is a store, so that memory need not be
    zeroed first. Any order is faster where all of these hold: a causal-like mask, LONG_CAUSAL keys or more, and a key head for each query
    head (after `spread`). Then CTAs stay close together without waiting, and a fixed order costs 5% in the median
    at head dims 64 and 128.
    """
    if plan.options.deterministic:
        return True
    long_causal = plan.group == 1 and dq_order.is_triangle(plan) and plan.kv_len >= LONG_CAUSAL
    return not long_causal and ordered_dq_is_fast(plan, tiles)


def _dq_order(plan: KernelPlan, tiles: FusedTiles) -> dq_order.DqOrder:
    """The fixed order of additions to dQ by the fused kernel with these tiles."""
    return dq_order.order_for(plan, cdiv(plan.q_len, tiles.queries), cdiv(plan.kv_len, FUSED_KEYS))


def ordered_dq_is_fast(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel in a fixed order beats two kernels, by the model of dq_order.py and by measurement.

    tiles   sizes of the fused kernel

    It does where the tickets fit memory and `DqOrder.delay` is at most MOST_DELAY_UNGROUPED or, with grouped heads, MOST_DELAY, or
    MOST_DELAY_WHERE_TWO_ARE_SLOW if the CTAs do not fill the reference GPU or score_mod loads more than scalars. False with dropout, grouped
    heads and a causal-like mask together: that kernel spills 288 bytes, and was not timed.
    """
    if not _tickets_fit(plan, tiles.queries):
        return False
    if plan.dropout is not None and plan.group > 1 and dq_order.is_triangle(plan):
        return False
    order = _dq_order(plan, tiles)
    fills_gpu = plan.batch * plan.kv_heads * cdiv(plan.kv_len, FUSED_KEYS) > dq_order.REFERENCE_SMS
    two_are_slow = not fills_gpu or bool(_load_kinds(plan) - {ir.SCALAR})
    if plan.group == 1:
        return order.delay <= MOST_DELAY_UNGROUPED
    return order.delay <= (MOST_DELAY_WHERE_TWO_ARE_SLOW if two_are_slow else MOST_DELAY)


def _tickets_fit(plan: KernelPlan, queries: int) -> bool:
    """Whether the tickets of all masks of the call, one number for each (query tile, key tile), are at most
    MOST_TICKETS; True without a block mask, which needs no tickets.

    queries   of a query tile; a key tile has FUSED_KEYS keys
    """
    q_tiles, kv_tiles = cdiv(plan.q_len, queries), cdiv(plan.kv_len, FUSED_KEYS)
    masks = plan.blocks.batch * plan.blocks.heads if plan.blocks is not None else 0
    return masks * q_tiles * kv_tiles <= MOST_TICKETS


def _load_kinds(plan: KernelPlan) -> set[str]:
    """The set of load classes ("scalar", "row", "column", "diagonal", "tile"; `ir.classify_load`) of score_mod's loads of
    captured arrays; empty without a score_mod.
    """
    return set() if plan.score is None else {ir.classify_load(load).kind for load in plan.score.loads}
