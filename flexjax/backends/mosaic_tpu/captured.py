"""From what the kernels summed to the gradient of each captured array.

A read's cotangents arrive summed over everything its index does not depend on inside a head. What remains is to add them
up over batch and heads where the index does not depend on those, and to put them where the index points: addition at an
index, once per distinct position, which XLA does in a fixed order.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_tpu import outside
from flexjax.ir import program as ir
from flexjax.ir.program import Load, Program
from flexjax.plan.kernel_plan import KernelPlan


def load_of(derivative: Program, number: int) -> Load:
    """The read that gradient `number` belongs to."""
    step = derivative.steps[derivative.gradients[number]]
    assert isinstance(step, Load)
    return step


def kinds_wanted(derivative: Program | None, wanted: Sequence[bool]) -> dict[int, str]:
    """{gradient number: how its load walks the array} of the arrays that want one."""
    if derivative is None:
        return {}
    found = {}
    for number in range(len(derivative.gradients)):
        load = load_of(derivative, number)
        if wanted[load.capture]:
            found[number] = ir.classify_load(load).kind
    return found


def gather_gradients(
    plan: KernelPlan,
    derivative: Program | None,
    captures: Sequence[jax.Array],
    wanted: Sequence[bool],
    sums: dict[int, jax.Array],
) -> tuple[jax.Array | None, ...]:
    """The gradient of every captured array that wants one, in its dtype."""
    totals = [jnp.zeros(c.shape, jnp.float32) if w else None for c, w in zip(captures, wanted, strict=True)]
    for number, values in sorted(sums.items()):
        assert derivative is not None
        load = load_of(derivative, number)
        total = totals[load.capture]
        assert total is not None
        totals[load.capture] = total + _scattered(plan, derivative, captures, load, values)
    return tuple(None if t is None else t.astype(c.dtype) for t, c in zip(totals, captures, strict=True))


def _scattered(
    plan: KernelPlan, derivative: Program, captures: Sequence[jax.Array], load: Load, values: jax.Array
) -> jax.Array:
    """The values, of rank 3 or 4 with batch and heads in front, added up where the load reads."""
    kind = ir.classify_load(load).kind
    batch, heads, q_len, kv_len = plan.batch, plan.q_heads, plan.q_len, plan.kv_len
    if kind == ir.SCALAR:
        values, grid = values.sum((2, 3), keepdims=True), outside.whole_grid(batch, heads, 1, 1)
    elif kind == ir.ROW:
        values, grid = jnp.swapaxes(values, 2, 3), outside.whole_grid(batch, heads, q_len, 1)
    elif kind == ir.COLUMN:
        values, grid = values[:, :, None, :], outside.whole_grid(batch, heads, 1, kv_len)
    elif kind == ir.DIAGONAL:
        values, grid = values[..., None], outside.diagonal_grid(batch, heads, q_len, kv_len)
    else:
        grid = outside.whole_grid(batch, heads, q_len, kv_len)
    used = frozenset().union(*(ir.axes_of(a) for a in load.index))
    values = values.sum(tuple(d for d, name in ((0, "b"), (1, "h")) if name not in used), keepdims=True)
    shape = captures[load.capture].shape
    if not shape:
        return values.sum()
    index = outside.evaluate(derivative, captures, grid, load.index)
    index = [jnp.broadcast_to(i[: values.shape[0], : values.shape[1]], values.shape) for i in index]
    return jnp.zeros(shape, jnp.float32).at[tuple(index)].add(values)
