"""The gradients of a call from what its backward kernels computed, of every family."""

import jax
import jax.numpy as jnp

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_gpu.backward import common
from flexjax.backends.mosaic_gpu.backward.pair_bias import DenseBiasPlan
from flexjax.backends.mosaic_gpu.captures.kernel import CaptureFamily
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
    """The wanted gradients of a call from the padded ones of its kernels, cut to its sizes, and that of the sinks.

    stats      row statistics (backward/row_statistics.py), read for the sinks alone
    captured   of the captured arrays of score_mod, returned as they are
    """
    return Gradients(
        query=_cut(plan, d_query, plan.q_len, plan.head_dim, wanted.query),
        key=_cut(plan, d_key, plan.kv_len, plan.head_dim, wanted.key),
        value=_cut(plan, d_value, plan.kv_len, plan.value_dim, wanted.value),
        query_extra=None,
        key_extra=None,
        sinks=sinks_gradient(plan, operands.sinks, stats) if wanted.sinks and operands.sinks is not None else None,
        score_captures=captured,
    )


def sinks_gradient(plan: KernelPlan, sinks: jax.Array, stats: jax.Array) -> jax.Array:
    """d sink_n = sum over batch entries and rows of exp(sink_n - lse) * (d_lse - rowsum(dO * O)), [N].

    stats   [B, N, 2, T'], with delta = rowsum(dO * O) - d_lse; lse2 is lse itself where scores may be large

    A row that sees no key has lse = sink_n and O = 0, so it adds its d_lse. Rows past the end, and rows whose lse is
    -inf because their sink is -inf too, add nothing.
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
    family: CaptureFamily,
) -> tuple[jax.Array | None, ...]:
    """The gradient of each captured array of score_mod, None where it is not wanted; () without a score_mod.

    direct   gradients that the dQ kernel wrote, by the number of the captured array (`DirectGradient.gradient`)
    family   whose kernel sums the others
    """
    left = tuple(want and n not in direct for n, want in enumerate(wanted.score_captures))
    if derivative is None or not any(left):
        return tuple(direct.get(n) for n in range(len(operands.score_captures)))
    from flexjax.backends.mosaic_gpu.captures.gradients import capture_gradients

    summed = capture_gradients(plan, operands, tokens, left, derivative, bias, family)
    return tuple(direct.get(n, found) for n, found in enumerate(summed))


def _cut(plan: KernelPlan, x: jax.Array | None, length: int, dim: int, want: bool) -> jax.Array | None:
    """[B, T', N, D'] or [B, N, T', D'] cut to the first tokens and features; None unless it is there and wanted."""
    if x is None or not want:
        return None
    return (x[:, :length] if plan.layout == "BTNH" else x[:, :, :length])[..., :dim]
