"""The backward pass on Hopper: which operands its kernels get, and what is computed around them.

    1. row statistics (row_statistics.py)
    2. dQ, dK, dV: the fused kernel, or a dQ kernel and a dK/dV kernel. The dQ kernel also writes the gradients of some
       captured arrays (direct gradients, pair_bias.py)
    3. the gradients of the other captured arrays (capture_gradients.py), and that of the sinks (backward_gradients.py, by XLA)

The formulas are at the top of backward_common.py; choose_kernel.py decides which kernels run; support.py refuses
plans that no kernel runs. Extra features are appended to the head dim of queries and keys before the kernels, and their
gradients are cut off after them.
"""

import jax

from flexjax.backends.base import BackwardInputs
from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu import choose_kernel, tile_visits
from flexjax.backends.mosaic_gpu.backward_dkv_tiles import DkvTiles, SplitDkvTiles
from flexjax.backends.mosaic_gpu.backward_gradients import captured_gradients, gradients_of
from flexjax.backends.mosaic_gpu.backward_sm90_dkv import backward_dkv
from flexjax.backends.mosaic_gpu.backward_sm90_dkv_split import backward_dkv_split
from flexjax.backends.mosaic_gpu.backward_sm90_dq import backward_dq
from flexjax.backends.mosaic_gpu.backward_sm90_fused import backward_fused
from flexjax.backends.mosaic_gpu.float_parts import join, parts_of
from flexjax.backends.mosaic_gpu.kernel_parts import join_extra
from flexjax.backends.mosaic_gpu.pair_bias import dense_bias_plan, padded_captures
from flexjax.backends.mosaic_gpu.row_statistics import row_statistics
from flexjax.plan.kernel_plan import Gradients, KernelPlan


def backward(plan: KernelPlan, given: BackwardInputs) -> Gradients:
    """Runs the backward pass on Hopper: the gradients of the wanted operands, each in the shape and dtype of its
    operand; None for the others.

    plan    of the call, with mask blocks that the kernels visit, and without lengths and pages (`kernel_plans.for_kernels`); its extra
            features are joined to the head dim here
    given   operands and results of the forward pass, cotangents of the results, which gradients are wanted, and
            score_mod with its derivatives

    The fused kernel runs only if gradients on both sides, queries and keys or values, are wanted. Otherwise a kernel
    runs only if one of its gradients is wanted. The dQ kernel also writes the direct gradients of captured arrays
    (pair_bias.py), so it may run although dQ is not wanted; capture_gradients.py sums the other ones.
    """
    operands, wanted, derivative = given.operands, given.wanted, given.derivative
    d_out = given.d_out.astype(operands.query.dtype)
    stats = row_statistics(plan, given.results, d_out, given.d_lse)
    joined_plan, joined = join_extra(plan, operands)
    tokens = common.padded_tokens(joined_plan, joined, d_out, stats, unit=1)
    bias = dense_bias_plan(joined_plan, derivative, wanted.score_captures)
    captures = padded_captures(joined_plan, bias, common.captures_of(operands))

    d_query = d_key = d_value = None
    direct: dict[int, jax.Array] = {}  # direct gradients (pair_bias.py), by the number of the captured array
    want_query, want_keys = wanted.query or wanted.query_extra, wanted.key or wanted.value or wanted.key_extra
    by_query = tile_visits.visit_lists(plan, operands.lists, transposed=False)
    by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
    call = common.BackwardCall(joined_plan, derivative, tokens, captures)
    kernels = choose_kernel.backward_kernels(joined_plan, bias.types, all_gradients=want_query and want_keys)
    if isinstance(kernels, choose_kernel.FusedKernel):
        d_query, d_key, d_value = backward_fused(call, by_key, kernels)
    else:
        if want_query or bias.direct_gradients:
            d_query, arrays = backward_dq(call, by_query, kernels.dq, bias)
            d_query = join(d_query, parts_of(plan))
            direct = {one.capture: one.gradient(plan, a) for one, a in zip(bias.direct_gradients, arrays, strict=True)}
        dkv = kernels.dkv
        if want_keys and isinstance(dkv, SplitDkvTiles):
            d_key, d_value = (join(x, parts_of(plan)) for x in backward_dkv_split(call, by_key, dkv))
        elif want_keys and isinstance(dkv, DkvTiles):
            d_key, d_value = (join(x, parts_of(plan)) for x in backward_dkv(call, by_key, dkv, bias))

    captured = captured_gradients(joined_plan, operands, tokens, wanted, derivative, bias, direct)
    return gradients_of(plan, operands, stats, wanted, d_query, d_key, d_value, captured)
