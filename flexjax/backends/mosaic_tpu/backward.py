"""The backward pass: which kernels run, what XLA computes before and after them.

Before: delta = rowsum(dO * O), and lse in the form that the kernels read. Then one kernel for everything where the sums
of dq fit VMEM, else a dq kernel and a dk/dv kernel. After: the gradients of captured arrays, of sinks, and of what
layouts.fold folded. The dq kernel also runs where a wanted gradient of a captured array has a read of another load
class than column.
"""

import jax
import jax.numpy as jnp

from flexjax.analysis.large_scores import may_be_large
from flexjax.backends.mosaic_tpu import capture_gradients, layouts, vmem
from flexjax.backends.mosaic_tpu.backward_dkv import dkv_kernel
from flexjax.backends.mosaic_tpu.backward_dq import dq_kernel
from flexjax.backends.mosaic_tpu.backward_tile import BackwardArrays, BackwardCall
from flexjax.backends.mosaic_tpu.geometry import TileGeometry
from flexjax.backends.mosaic_tpu.list_shape import block_layout, list_shape
from flexjax.backends.tile_math import LOG2E
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import BackwardInputs, Gradients, KernelPlan, Operands, Results, Wanted
from flexjax.plan.lengths import NONE, where_exists


def backward(plan: KernelPlan, given: BackwardInputs, chip: vmem.Chip) -> Gradients:
    """The gradients of the wanted operands in their shapes, None for the others; none is a refused one.

    Those of captured arrays and of sinks are in the dtypes of these, all others in the plan's dtype.
    """
    operands, results, d_out, d_lse, wanted, derivative = given
    shapes = layouts.FoldedShapes.of(plan)
    tiles = vmem.backward_tiles(plan, chip, derivative)
    folded = layouts.fold(plan, operands)
    if plan.weighted:
        delta = jnp.zeros(results.lse.shape, jnp.float32)
    else:
        delta = jnp.sum(d_out.astype(jnp.float32) * results.float32_out, axis=-1)
    shift = delta if d_lse is None else delta - d_lse.astype(jnp.float32)
    shift = where_exists(shift, (operands.lengths or NONE).query, plan)
    arrays = _kernel_arrays(plan, folded, results, d_out, shift)
    call = BackwardCall(plan, operands, arrays, derivative, tiles, chip)
    kinds = capture_gradients.wanted_load_kinds(derivative, wanted.score_captures)
    columns = tuple(n for n, kind in kinds.items() if kind == ir.COLUMN)
    others = {n: kind for n, kind in kinds.items() if kind != ir.COLUMN}

    dq = dk = dv = None
    sums: dict[int, jax.Array] = {}
    want_query = wanted.query or wanted.query_extra
    want_kv = wanted.key or wanted.key_extra or wanted.value
    geometry = TileGeometry.of(plan, tiles, q_axis=1)
    whole_heads = (
        block_layout(plan, geometry) is None or list_shape(plan, geometry, shapes.group, True).launches_hold_heads
    )
    dq_in_dkv = want_query and want_kv and not others and whole_heads
    dq_in_dkv = dq_in_dkv and vmem.dq_sums_fit(plan, tiles, derivative, chip)
    # A kernel runs only if one of its gradients is wanted.
    if others or (want_query and not dq_in_dkv):
        dq, sums = dq_kernel(call, others, want_query)
    if want_kv or columns:
        made = dkv_kernel(call, columns, want_kv, dq_in_dkv)
        dq, dk, dv = made.dq if dq_in_dkv else dq, made.dk, made.dv
        sums |= made.columns
    captures = capture_gradients.gather_gradients(
        plan, derivative, operands.score_captures, wanted.score_captures, sums, (plan.origin, operands.origin)
    )
    sinks = _sink_gradient(plan, operands, results, shift) if wanted.sinks and operands.sinks is not None else None
    return _unfolded(plan, operands, wanted, (dq, dk, dv), sinks, captures)


def _kernel_arrays(
    plan: KernelPlan,
    folded: tuple[jax.Array, jax.Array, jax.Array],
    results: Results,
    d_out: jax.Array,
    shift: jax.Array,
) -> BackwardArrays[jax.Array]:
    """The arrays that both backward kernels read; `folded` is (query, key, value) of layouts.fold.

    shift   delta - d_lse, float32 in the shape of lse
    """
    shapes = layouts.FoldedShapes.of(plan)
    lse = results.lse.astype(jnp.float32)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse if may_be_large(plan.score) else lse * jnp.float32(LOG2E))
    return BackwardArrays(
        *folded,
        shapes.out.to_kernel(d_out.astype(plan.dtype)),
        layouts.rows_to_kernel(lse, shapes.tokens_first),
        layouts.rows_to_kernel(shift, shapes.tokens_first),
    )


def _sink_gradient(plan: KernelPlan, operands: Operands, results: Results, shift: jax.Array) -> jax.Array:
    """The gradient of the sinks, [N] in their dtype, summed over batch and queries; `shift` is as in `_kernel_arrays`.

    A sink is a score of each row without a value: its cotangent in a row is -p * shift, p = exp(sink - lse).
    """
    assert operands.sinks is not None
    heads_last = plan.layout == "BTNH"
    sinks = operands.sinks.astype(jnp.float32)
    lse = results.lse.astype(jnp.float32)
    logits = sinks if heads_last else sinks[:, None]
    p = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)))
    return -jnp.sum(p * shift, (0, 1) if heads_last else (0, 2)).astype(operands.sinks.dtype)


def _unfolded(
    plan: KernelPlan,
    operands: Operands,
    wanted: Wanted,
    folded: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
    sinks: jax.Array | None,
    captures: tuple[jax.Array | None, ...],
) -> Gradients:
    """The gradients of all operands from those of the folded arrays, `folded` = (dq, dk, dv), None if not computed."""
    dq, dk, dv = folded
    shapes = layouts.FoldedShapes.of(plan)
    heads_dim = 2 if shapes.tokens_first else 1
    features, extra = slice(0, plan.head_dim), slice(plan.head_dim, None)

    def part(array: jax.Array | None, layout: layouts.HeadLayout, features: slice, heads: int) -> jax.Array | None:
        """These features of a folded gradient, summed down to the operand's heads."""
        if array is None:
            return None
        return layouts.sum_repeated_heads(layout.from_kernel(array)[..., features], heads, heads_dim)

    value = part(dv, shapes.value, slice(None), plan.kv_heads) if wanted.value else None
    has_extra = operands.query_extra is not None
    return Gradients(
        part(dq, shapes.query, features, plan.q_heads) if wanted.query else None,
        part(dk, shapes.key, features, plan.kv_heads) if wanted.key else None,
        value,
        part(dq, shapes.query, extra, plan.q_heads) if has_extra and wanted.query_extra else None,
        part(dk, shapes.key, extra, plan.extra_heads) if has_extra and wanted.key_extra else None,
        sinks,
        captures,
    )
