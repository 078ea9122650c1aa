"""The backward pass by mma.sync, compute capability 8.0 to 12.x, and by tcgen05.

    row statistics -> dQ kernel, dK/dV kernel -> captured arrays, sinks (XLA)

The formulas are at the top of backward/common.py. No CTA waits for another one, and every sum has one order, so results
are the same bits each time.
"""

import jax

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward import tcgen05 as backward_tcgen05
from flexjax.backends.mosaic_gpu.backward.mma_dkv import backward_dkv
from flexjax.backends.mosaic_gpu.backward.mma_dq import backward_dq
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan, direct_gradients
from flexjax.backends.mosaic_gpu.backward.row_statistics import row_statistics
from flexjax.backends.mosaic_gpu.backward.tcgen05_tiles import Tcgen05Tiles
from flexjax.backends.mosaic_gpu.captures.mma import captures_of_card
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.backward_gradients import captured_gradients, gradients_of
from flexjax.backends.mosaic_gpu.machine.clipped_copies import PIECE_ROWS
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan


def backward(plan: KernelPlan, given: BackwardInputs, card: Card, tcgen05: Tcgen05Tiles | None = None) -> Gradients:
    """The gradients of the wanted operands, each in the shape and dtype of its operand; None for the others.

    plan      the last of `kernel_plans.backward_steps`
    tcgen05   sizes of the kernels on tcgen05 (backward/tcgen05.py); None: those on mma.sync run
    """
    operands, wanted, derivative = given.operands, given.wanted, given.derivative
    d_out = given.d_out.astype(operands.query.dtype)
    stats = row_statistics(plan, given.results, d_out, given.d_lse, card.copying)
    tokens = common.padded_tokens(plan, operands, d_out, stats, PIECE_ROWS)
    call = common.BackwardCall(plan, derivative, tokens, common.captures_of(operands))
    direct = direct_gradients(plan, derivative, wanted.score_captures)
    dq_tiles, dkv_tiles = choose_kernel.mma_backward_kernels(plan, card)

    d_query = d_key = d_value = None
    written: dict[int, jax.Array] = {}  # direct gradients, by the number of the captured array
    if wanted.query or direct:  # the dQ kernel also writes the direct gradients (backward/pair_bias.py)
        by_query = tile_visits.visit_lists(plan, operands.lists, transposed=False)
        if tcgen05 is not None:
            d_query, _, arrays = backward_tcgen05.backward_dq(call, by_query, tcgen05, direct)
        else:
            d_query, arrays = backward_dq(call, by_query, dq_tiles, direct)
        written = {one.capture: one.gradient(plan, a) for one, a in zip(direct, arrays, strict=True)}
    key, value = wanted.key, wanted.value
    if tcgen05 is not None and (key or value):
        by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
        d_key, d_value, _ = backward_tcgen05.backward_dkv(call, by_key, tcgen05)
    elif key or value:
        by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
        # once for each of dK and dV where both accumulators do not fit
        runs = [(key, value)] if dkv_tiles.joint(plan) else [run for run in ((key, False), (False, value)) if any(run)]
        for with_key, with_value in runs:
            found = backward_dkv(call, by_key, dkv_tiles, key=with_key, value=with_value)
            d_key, d_value = found.d_key if with_key else d_key, found.d_value if with_value else d_value
    captured = captured_gradients(
        plan, operands, tokens, wanted, derivative, DenseBiasPlan(), written, captures_of_card(card)
    )
    return gradients_of(plan, operands, stats, wanted, d_query, d_key, d_value, captured)
