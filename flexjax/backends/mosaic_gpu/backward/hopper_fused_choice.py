"""Whether the fused kernel of Hopper runs a plan, how many CTAs share a key tile, and in which order they add to dQ.

Every answer follows from the plan alone (families/choose_kernel.py says why); the numbers are measured ones of
lab/logs/hopper_backward.md.
"""

import dataclasses

from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import FusedTiles, fused_tiles
from flexjax.backends.mosaic_gpu.backward.hopper_tiles import FUSED_KEYS
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.integers import cdiv
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

MOST_TICKETS = 1 << 22
"""The most (query tile, key tile) pairs, over all masks of a call, whose tickets (machine/dq_order.py) are kept."""
MOST_DELAY, MOST_DELAY_UNGROUPED = 0.12, 1.0
"""The largest `DqOrder.delay` at which the fused kernel in a fixed order beats two kernels: with grouped heads;
without. The model overestimates the second: 0.54 was 0.12 when measured.
"""
MOST_DELAY_WHERE_TWO_ARE_SLOW = 0.35
"""The same with grouped heads where two kernels are slow: for calls that do not fill the reference GPU, and for
score_mods that load arrays over queries or keys, which two kernels evaluate twice.
"""
LONG_CAUSAL = 2048  # keys from which any order is faster than a fixed one under a causal-like mask
ENOUGH_CTAS = 4  # CTAs wanted for each SM. With fewer, several CTAs share the query heads of a key tile


def spread(plan: KernelPlan, shares: int) -> KernelPlan:
    """The plan with `shares` times the key heads: each CTA of a key tile counts as a key head."""
    return dataclasses.replace(plan, kv_heads=plan.kv_heads * shares)


def shares_of(plan: KernelPlan) -> int:
    """CTAs among which the query heads of a key tile are divided, a divisor of the group.

    For full and causal-like masks it is the smallest divisor with which there are ENOUGH_CTAS for each SM of the
    reference GPU, else the largest: with one CTA for each key tile the GPU idles while a few long CTAs finish.
    """
    # the partial dK and dV, in 16 bits, may take at most the bytes of one float32 sum of dQ
    fit = [
        n
        for n in range(1, plan.group + 1)
        if plan.group % n == 0 and (n == 1 or n * plan.kv_len <= plan.group * plan.q_len)
    ]
    if not dq_order.is_full(plan) and not dq_order.is_triangle(plan):
        return fit[-1]  # of unequal documents, say, where one CTA for a whole group takes 1.7 times as long
    ctas = plan.batch * plan.kv_heads * cdiv(plan.kv_len, FUSED_KEYS)
    return next((n for n in fit if ctas * n >= ENOUGH_CTAS * dq_order.REFERENCE_SMS), fit[-1])


def fused_is_faster(plan: KernelPlan) -> bool:
    """Whether the fused kernel, with five products a tile, is expected to beat two kernels with seven in all."""
    if ir.TILE in _load_kinds(plan) or parts_of(plan) > 1:
        return False
    if not plan.options.deterministic and plan.group == 1:
        return True
    fused = fused_tiles(plan)
    return fused is not None and ordered_dq_is_fast(plan, fused)


def adds_in_order(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel adds to dQ in a fixed order: where asked to (`deterministic`), or where that is faster.

    A fixed order needs no zeroed memory, because the first addition to a dQ tile is a store. Under a long causal-like
    mask with a key head for each query head, CTAs stay close together without waiting, and any order is faster.
    """
    if plan.options.deterministic:
        return True
    long_causal = plan.group == 1 and dq_order.is_triangle(plan) and plan.kv_len >= LONG_CAUSAL
    return not long_causal and ordered_dq_is_fast(plan, tiles)


def _dq_order(plan: KernelPlan, tiles: FusedTiles) -> dq_order.DqOrder:
    return dq_order.order_for(plan, cdiv(plan.q_len, tiles.queries), cdiv(plan.kv_len, FUSED_KEYS))


def ordered_dq_is_fast(plan: KernelPlan, tiles: FusedTiles) -> bool:
    """Whether the fused kernel in a fixed order beats two kernels, by the model of machine/dq_order.py."""
    if not _tickets_fit(plan, tiles.queries):
        return False
    # this kernel spills 288 bytes, and was not timed
    if plan.dropout is not None and plan.group > 1 and dq_order.is_triangle(plan):
        return False
    order = _dq_order(plan, tiles)
    fills_gpu = plan.batch * plan.kv_heads * cdiv(plan.kv_len, FUSED_KEYS) > dq_order.REFERENCE_SMS
    two_are_slow = not fills_gpu or bool(_load_kinds(plan) - {ir.SCALAR})
    if plan.group == 1:
        return order.delay <= MOST_DELAY_UNGROUPED
    return order.delay <= (MOST_DELAY_WHERE_TWO_ARE_SLOW if two_are_slow else MOST_DELAY)


def _tickets_fit(plan: KernelPlan, queries: int) -> bool:
    """Whether the tickets of all masks of the call are at most MOST_TICKETS; `queries` are those of a query tile."""
    q_tiles, kv_tiles = cdiv(plan.q_len, queries), cdiv(plan.kv_len, FUSED_KEYS)
    masks = plan.blocks.batch * plan.blocks.heads if plan.blocks is not None else 0
    return masks * q_tiles * kv_tiles <= MOST_TICKETS


def _load_kinds(plan: KernelPlan) -> set[str]:
    """The load classes (`ir.classify_load`) of score_mod's loads of captured arrays."""
    return set() if plan.score is None else {ir.classify_load(load).kind for load in plan.score.loads}
