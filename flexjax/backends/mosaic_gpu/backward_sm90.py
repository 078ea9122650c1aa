"""The backward pass on Hopper: which kernels run, and what is computed around them.

    row statistics  ->  dQ kernel, dK/dV kernel  ->  captured arrays (capture_gradients.py), sinks (XLA)

The formulas are at the top of backward_sm90_common.py. `refuses` says in a sentence what these kernels cannot do.
"""

import dataclasses

import jax
import jax.numpy as jnp

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import backward_sm90_common as common
from flexjax.backends.mosaic_gpu import choose_kernel
from flexjax.backends.mosaic_gpu.backward_sm90_dkv import backward_dkv
from flexjax.backends.mosaic_gpu.backward_sm90_dkv_split import backward_dkv_split
from flexjax.backends.mosaic_gpu.backward_sm90_dq import backward_dq
from flexjax.backends.mosaic_gpu.backward_sm90_fused import backward_fused
from flexjax.backends.mosaic_gpu.backward_tile_math import captures_of
from flexjax.backends.mosaic_gpu.backward_tiles import DkvTiles, SplitDkvTiles
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan, dense_bias_plan, padded_captures
from flexjax.backends.mosaic_gpu.row_statistics import row_statistics
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Results, Wanted


def backward(
    plan: KernelPlan,
    operands: Operands,
    results: Results,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    wanted: Wanted,
    derivative: ir.Program | None,
) -> Gradients:
    """Cotangents of the operands. `derivative` is plan.score with its derivatives, None for the identity."""
    stats = row_statistics(plan, results, d_out.astype(operands.query.dtype), d_lse)
    joined_plan, joined = _join_extra(plan, operands)
    given = common.prepare(joined_plan, joined, d_out.astype(operands.query.dtype), stats)
    bias = dense_bias_plan(joined_plan, derivative, wanted.score_captures)
    captures = padded_captures(joined_plan, bias, captures_of(operands))

    d_query = d_key = d_value = None
    direct: dict[int, jax.Array] = {}  # gradients of captured arrays, by their number
    want_query, want_keys = wanted.query or wanted.query_extra, wanted.key or wanted.value or wanted.key_extra
    by_query = common.visit_lists(plan, operands.lists, transposed=False)
    by_key = common.visit_lists(plan, operands.lists, transposed=True)
    common_arguments = (joined_plan, derivative, given)
    kernels = choose_kernel.backward_kernels(joined_plan, bias.bytes, all_gradients=want_query and want_keys)
    if isinstance(kernels, choose_kernel.FusedKernel):
        d_query, d_key, d_value = backward_fused(*common_arguments, by_key, captures, kernels)
    else:
        if want_query or bias.direct_gradients:
            d_query, arrays = backward_dq(*common_arguments, by_query, captures, kernels.dq, bias)
            direct = {w.capture: w.gradient(plan, a) for w, a in zip(bias.direct_gradients, arrays, strict=True)}
        dkv = kernels.dkv
        if want_keys and isinstance(dkv, SplitDkvTiles):
            d_key, d_value = backward_dkv_split(*common_arguments, by_key, captures, dkv)
        elif want_keys and isinstance(dkv, DkvTiles):
            d_key, d_value = backward_dkv(*common_arguments, by_key, captures, dkv, bias)

    d_query, d_query_extra = _split(plan, d_query, plan.q_len)
    d_key, d_key_extra = _split(plan, d_key, plan.kv_len)
    if d_key_extra is not None:
        d_key_extra = _sum_to_heads(plan, d_key_extra)
    return Gradients(
        query=d_query if wanted.query else None,
        key=d_key if wanted.key else None,
        value=_cut(plan, d_value, plan.kv_len, 0, plan.value_dim) if wanted.value and d_value is not None else None,
        query_extra=d_query_extra if wanted.query_extra else None,
        key_extra=d_key_extra if wanted.key_extra else None,
        sinks=sinks_gradient(plan, operands.sinks, stats) if wanted.sinks and operands.sinks is not None else None,
        score_captures=_capture_gradients(joined_plan, operands, given, wanted, derivative, bias, direct),
    )


def sinks_gradient(plan: KernelPlan, sinks: jax.Array, stats: jax.Array) -> jax.Array:
    """d sink_n = sum over rows of exp(sink_n - lse) * (d_lse - rowsum(dO * O))."""
    lse2, delta = stats[:, :, 0], stats[:, :, 1]
    sink = sinks.astype(jnp.float32)[None, :, None]
    weight = jnp.exp(sink - lse2) if may_be_large(plan.score) else jnp.exp2(sink * common.LOG2E - lse2)
    return -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)


def _capture_gradients(
    plan: KernelPlan,
    operands: Operands,
    given: common.Prepared,
    wanted: Wanted,
    derivative: ir.Program | None,
    bias: DenseBiasPlan,
    direct: dict[int, jax.Array],
) -> tuple[jax.Array | None, ...]:
    left = tuple(want and n not in direct for n, want in enumerate(wanted.score_captures))
    if derivative is None or not any(left):
        return tuple(direct.get(n) for n in range(len(operands.score_captures)))
    from flexjax.backends.mosaic_gpu.capture_gradients import capture_gradients

    summed = capture_gradients(plan, operands, given, left, derivative, bias)
    return tuple(direct.get(n, found) for n, found in enumerate(summed))


# ------------------------------------------------------------------- extra features ride along in the head dim


def _join_extra(plan: KernelPlan, operands: Operands) -> tuple[KernelPlan, Operands]:
    if not plan.extra_dim or operands.query_extra is None or operands.key_extra is None:
        return plan, operands
    axis = 2 if plan.layout == "BTNH" else 1
    key_extra = jnp.repeat(operands.key_extra, plan.kv_heads // plan.extra_heads, axis=axis)
    query = jnp.concatenate([operands.query, operands.query_extra.astype(operands.query.dtype)], axis=-1)
    key = jnp.concatenate([operands.key, key_extra.astype(operands.key.dtype)], axis=-1)
    joined = dataclasses.replace(plan, head_dim=plan.head_dim + plan.extra_dim, extra_dim=0, extra_heads=0)
    return joined, operands._replace(query=query, key=key)


def _cut(plan: KernelPlan, x: jax.Array, length: int, first: int, last: int) -> jax.Array:
    x = x[:, :length] if plan.layout == "BTNH" else x[:, :, :length]
    return x[..., first:last]


def _split(plan: KernelPlan, x: jax.Array | None, length: int) -> tuple[jax.Array | None, jax.Array | None]:
    """The parts of a joined gradient that belong to the head dim and to the extra features."""
    if x is None:
        return None, None
    main = _cut(plan, x, length, 0, plan.head_dim)
    return main, _cut(plan, x, length, plan.head_dim, plan.head_dim + plan.extra_dim) if plan.extra_dim else None


def _sum_to_heads(plan: KernelPlan, x: jax.Array) -> jax.Array:
    """Sums the key heads that read the same extra features."""
    axis = 2 if plan.layout == "BTNH" else 1
    shape = (*x.shape[:axis], plan.extra_heads, plan.kv_heads // plan.extra_heads, *x.shape[axis + 1 :])
    return jnp.sum(x.astype(jnp.float32).reshape(shape), axis=axis + 1).astype(x.dtype)
