"""The backward pass by mma.sync, compute capability 8.0 to 12.x, and by tcgen05 where the call asks for that.

    row statistics -> dQ kernel, dK/dV kernel -> captured arrays, sinks (XLA)

With tcgen05 the kernels in the middle are those of backward_sm100.py, if they run the plan.

The formulas are at the top of backward_common.py. No CTA waits for another one, and every sum has one order, so results are the
same bits each time. What the kernels cannot run support.py refuses.
"""

import jax

from flexjax.backends.base import BackwardInputs
from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import backward_sm100, choose_kernel, sm100_support, tile_visits
from flexjax.backends.mosaic_gpu.backward_gradients import captured_gradients, gradients_of
from flexjax.backends.mosaic_gpu.backward_sm80_dkv import backward_dkv
from flexjax.backends.mosaic_gpu.backward_sm80_dq import backward_dq
from flexjax.backends.mosaic_gpu.clipped_copies import PIECE_ROWS
from flexjax.backends.mosaic_gpu.kernel_parts import join_extra
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan, direct_gradients
from flexjax.backends.mosaic_gpu.row_statistics import row_statistics
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.plan.kernel_plan import Gradients, KernelPlan


def backward(plan: KernelPlan, given: BackwardInputs, card: Card) -> Gradients:
    """Runs the backward pass by mma.sync or, where the options ask for that, by tcgen05: the gradients of the wanted operands, each in
    the shape and dtype of its operand; None for the others.

    plan    of the call, with mask blocks that the kernels visit, and without lengths and pages (`kernel_plans.for_kernels`); its extra
            features are joined to the head dim here
    given   operands and results of the forward pass, cotangents of the results, which gradients are wanted, and score_mod with its
            derivatives
    card    says how tiles are copied and which of them fit

    A kernel runs only if one of its gradients is wanted. The dQ kernel also writes the direct gradients of captured arrays
    (pair_bias.py), so it may run although dQ is not wanted; capture_gradients.py sums the other ones. The dK/dV kernel on mma.sync runs
    once for those of dK and dV that are wanted or, where both accumulators do not fit (`Tiles.joint`), once for each of them.
    """
    operands, wanted, derivative = given.operands, given.wanted, given.derivative
    d_out = given.d_out.astype(operands.query.dtype)
    stats = row_statistics(plan, given.results, d_out, given.d_lse, card.copying)
    joined_plan, joined = join_extra(plan, operands)
    tokens = common.padded_tokens(joined_plan, joined, d_out, stats, PIECE_ROWS)
    call = common.BackwardCall(joined_plan, derivative, tokens, common.captures_of(operands))
    direct = direct_gradients(joined_plan, derivative, wanted.score_captures)
    dq_tiles, dkv_tiles = choose_kernel.mma_backward_kernels(joined_plan, card)
    tcgen05 = sm100_support.backward_kernel(joined_plan)

    d_query = d_key = d_value = None
    written: dict[int, jax.Array] = {}  # direct gradients, by the number of the captured array
    if wanted.query or wanted.query_extra or direct:
        by_query = tile_visits.visit_lists(plan, operands.lists, transposed=False)
        if tcgen05 is not None:
            d_query, _, arrays = backward_sm100.backward_dq(call, by_query, tcgen05, direct)
        else:
            d_query, arrays = backward_dq(call, by_query, dq_tiles, direct)
        written = {one.capture: one.gradient(plan, a) for one, a in zip(direct, arrays, strict=True)}
    key, value = wanted.key or wanted.key_extra, wanted.value
    if tcgen05 is not None and (key or value):
        by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
        d_key, d_value, _ = backward_sm100.backward_dkv(call, by_key, tcgen05)
    elif key or value:
        by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
        runs = (
            [(key, value)]
            if dkv_tiles.joint(joined_plan)
            else [run for run in ((key, False), (False, value)) if any(run)]
        )
        for with_key, with_value in runs:
            found = backward_dkv(call, by_key, dkv_tiles, key=with_key, value=with_value)
            d_key, d_value = found.d_key if with_key else d_key, found.d_value if with_value else d_value
    captured = captured_gradients(joined_plan, operands, tokens, wanted, derivative, DenseBiasPlan(), written, card)
    return gradients_of(plan, operands, stats, wanted, d_query, d_key, d_value, captured)
