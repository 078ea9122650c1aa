"""The backward pass on Hopper: which operands its kernels get, and what is computed around them.

    1. row statistics (backward/row_statistics.py)
    2. dQ, dK, dV: the fused kernel, or a dQ kernel and a dK/dV kernel. The dQ kernel also writes the gradients of some
       captured arrays (direct gradients, backward/pair_bias.py)
    3. the gradients of the other captured arrays (captures/gradients.py), and that of the sinks (by XLA)

The formulas are at the top of backward/common.py; choose_kernel.py decides which kernels run. Extra features are
appended to the head dim of queries and keys before the kernels, and their gradients are cut off after them
(rewrites/extra_features.py).
"""

import jax

from flexjax.backends.mosaic_gpu.backward import common, tile_visits
from flexjax.backends.mosaic_gpu.backward.hopper_dkv import backward_dkv
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_split import backward_dkv_split
from flexjax.backends.mosaic_gpu.backward.hopper_dkv_tiles import DkvTiles, SplitDkvTiles
from flexjax.backends.mosaic_gpu.backward.hopper_dq import backward_dq
from flexjax.backends.mosaic_gpu.backward.hopper_fused import backward_fused
from flexjax.backends.mosaic_gpu.backward.kernels import FusedKernel
from flexjax.backends.mosaic_gpu.backward.pair_bias import dense_bias_plan, padded_captures
from flexjax.backends.mosaic_gpu.backward.row_statistics import row_statistics
from flexjax.backends.mosaic_gpu.captures.hopper import CAPTURES
from flexjax.backends.mosaic_gpu.families import choose_kernel
from flexjax.backends.mosaic_gpu.families.backward_gradients import captured_gradients, gradients_of
from flexjax.backends.mosaic_gpu.machine.float_parts import join, parts_of
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan


def backward(plan: KernelPlan, given: BackwardInputs) -> Gradients:
    """The gradients of the wanted operands, None for the others; `plan`: the last of `kernel_plans.backward_steps`."""
    operands, wanted, derivative = given.operands, given.wanted, given.derivative
    d_out = given.d_out.astype(operands.query.dtype)
    stats = row_statistics(plan, given.results, d_out, given.d_lse)
    tokens = common.padded_tokens(plan, operands, d_out, stats, unit=1)
    bias = dense_bias_plan(plan, derivative, wanted.score_captures)
    captures = padded_captures(plan, bias, common.captures_of(operands))

    d_query = d_key = d_value = None
    direct: dict[int, jax.Array] = {}  # direct gradients (backward/pair_bias.py), by the number of the captured array
    want_query, want_keys = wanted.query, wanted.key or wanted.value
    by_query = tile_visits.visit_lists(plan, operands.lists, transposed=False)
    by_key = tile_visits.visit_lists(plan, operands.lists, transposed=True)
    call = common.BackwardCall(plan, derivative, tokens, captures)
    kernels = choose_kernel.backward_kernels(plan, bias.types, all_gradients=want_query and want_keys)
    # The fused kernel runs where gradients of queries and of keys or values are wanted, one of two kernels where one
    # of its gradients is.
    if isinstance(kernels, FusedKernel):
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

    captured = captured_gradients(plan, operands, tokens, wanted, derivative, bias, direct, CAPTURES)
    return gradients_of(plan, operands, stats, wanted, d_query, d_key, d_value, captured)
