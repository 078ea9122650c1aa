"""The gradients of a call from what its backward kernels computed, on every card.

The gradients of the kernels are padded, and have extra features in the head dim of queries and keys. Here they are cut; the gradients
of captured arrays and of the sinks are added.
"""

import jax
import jax.numpy as jnp

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu import backward_common as common
from flexjax.backends.mosaic_gpu.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.sm80_cards import Card
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import Gradients, KernelPlan, Operands, Wanted


def gradients_of(
    plan: KernelPlan,
    operands: Operands,
    stats: jax.Array,
    wanted: Wanted,
    d_query: jax.Array | None,
    d_key: jax.Array | None,
    d_value: jax.Array | None,
    captured: tuple[jax.Array | None, ...],
) -> Gradients:
    """The gradients of a call from what its kernels computed: cut to the sizes of the call, the extra features apart
    from the head dim, and with the gradient of the sinks; None for those that are not wanted.

    plan                      of the call, with extra features apart
    operands                  of the call, of which the sinks are read
    stats                     row statistics (row_statistics.py), read for the sinks alone
    wanted                    which gradients are returned; others are None even if they were computed
    d_query, d_key, d_value   padded, with extra features in the head dim; None for those that are not computed
    captured                  of the captured arrays of score_mod, returned as they are
    """
    d_query, d_query_extra = _split_extra(plan, d_query, plan.q_len)
    d_key, d_key_extra = _split_extra(plan, d_key, plan.kv_len)
    if d_key_extra is not None:
        d_key_extra = _sum_over_sharing_heads(plan, d_key_extra)
    return Gradients(
        query=d_query if wanted.query else None,
        key=d_key if wanted.key else None,
        value=_cut(plan, d_value, plan.kv_len, 0, plan.value_dim) if wanted.value and d_value is not None else None,
        query_extra=d_query_extra if wanted.query_extra else None,
        key_extra=d_key_extra if wanted.key_extra else None,
        sinks=sinks_gradient(plan, operands.sinks, stats) if wanted.sinks and operands.sinks is not None else None,
        score_captures=captured,
    )


def sinks_gradient(plan: KernelPlan, sinks: jax.Array, stats: jax.Array) -> jax.Array:
    """The gradient of the sinks, [N], in their dtype: d sink_n = sum over batch entries and rows of
    exp(sink_n - lse) * (d_lse - rowsum(dO * O)).

    plan    of the call; only whether its scores may be large is read
    sinks   [N]
    stats   [B, N, 2, T'] row statistics (row_statistics.py), whose delta is rowsum(dO * O) - d_lse. Their lse2 is lse
            itself where scores may be large

    A row that sees no key has lse = sink_n and O = 0, so it adds its d_lse. Rows past the end, and rows whose lse is -inf
    because their sink is -inf too, add nothing.
    """
    lse2, delta = stats[:, :, 0], stats[:, :, 1]
    sink = sinks.astype(jnp.float32)[None, :, None]
    weight = jnp.exp(sink - lse2) if may_be_large(plan.score) else jnp.exp2(sink * LOG2E - lse2)
    return -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)


def captured_gradients(
    plan: KernelPlan,
    operands: Operands,
    tokens: common.Tokens[jax.Array],
    wanted: Wanted,
    derivative: ir.Program | None,
    bias: DenseBiasPlan,
    direct: dict[int, jax.Array],
    card: Card | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradient of each captured array of score_mod, in the shape and dtype of the array: from `direct` where it is there, else summed
    by the capture kernel, which runs only if such arrays are wanted.

    plan         with extra features joined to the head dim
    operands     of the call
    tokens       padded arrays over tokens, with the row statistics
    wanted       which gradients are asked for
    derivative   score_mod with its derivatives; None without a score_mod
    bias         says which array is staged
    direct       gradients that the dQ kernel wrote, of wanted arrays alone, by the number of the captured array; in the shape and dtype of
                 the array (`DirectGradient.gradient`)
    card         whose mma.sync kernels run; None: those for Hopper do

    The tuple has an entry for each of operands.score_captures, in their order: None where the gradient is not wanted. It is empty without
    a score_mod. The arrays that mask_mod and dropout capture have no gradients.
    """
    left = tuple(want and n not in direct for n, want in enumerate(wanted.score_captures))
    if derivative is None or not any(left):
        return tuple(direct.get(n) for n in range(len(operands.score_captures)))
    from flexjax.backends.mosaic_gpu.capture_gradients import capture_gradients

    summed = capture_gradients(plan, operands, tokens, left, derivative, bias, card)
    return tuple(direct.get(n, found) for n, found in enumerate(summed))


# ------------------------------------------------------------------- extra features leave the head dim


def _cut(plan: KernelPlan, x: jax.Array, length: int, first: int, last: int) -> jax.Array:
    """x, [B, T', N, D'] or [B, N, T', D'], cut to its first `length` tokens and to the features `first` to `last` -
    1.
    """
    x = x[:, :length] if plan.layout == "BTNH" else x[:, :, :length]
    return x[..., first:last]


def _split_extra(plan: KernelPlan, x: jax.Array | None, length: int) -> tuple[jax.Array | None, jax.Array | None]:
    """(features of the head dim, extra features) of a gradient whose features are joined; None for extra features
    that the plan lacks.

    plan     with extra features apart, which says how many features of either kind there are
    x        [B, T', N, D'] or [B, N, T', D'], padded; None gives (None, None)
    length   tokens of the results
    """
    if x is None:
        return None, None
    main = _cut(plan, x, length, 0, plan.head_dim)
    return main, _cut(plan, x, length, plan.head_dim, plan.head_dim + plan.extra_dim) if plan.extra_dim else None


def _sum_over_sharing_heads(plan: KernelPlan, x: jax.Array) -> jax.Array:
    """The gradient of key_extra from that of every key head: sums, in float32, over the adjacent key heads that share
    extra features.

    x   [B, S, M, R] or [B, M, S, R]; the result has extra_heads in place of M and the dtype of x
    """
    axis = 2 if plan.layout == "BTNH" else 1
    shape = (*x.shape[:axis], plan.extra_heads, plan.kv_heads // plan.extra_heads, *x.shape[axis + 1 :])
    return jnp.sum(x.astype(jnp.float32).reshape(shape), axis=axis + 1).astype(x.dtype)
