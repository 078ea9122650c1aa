"""Turns the sums of the backward kernels into the gradient of each captured array.

The kernels sum the cotangents of a load over everything inside a head on which its index does not depend. This file
adds those sums over batch and heads where the index does not depend on them, and scatter-adds them where the index
points, once for each distinct position, which XLA does in a fixed order. Load n is the n-th of `derivative.gradients`,
and has a load class (docs/glossary.md).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flexjax.backends.mosaic_tpu import hoisted
from flexjax.ir import program as ir
from flexjax.ir.origin import Placed
from flexjax.ir.program import Load, Program
from flexjax.plan.kernel_plan import KernelPlan


def load_of(derivative: Program, number: int) -> Load:
    """Load `number` of derivative.gradients; result 2 + number of the program is the derivative of the score by it."""
    step = derivative.steps[derivative.gradients[number]]
    assert isinstance(step, Load)
    return step


def wanted_load_kinds(derivative: Program | None, wanted: Sequence[bool]) -> dict[int, str]:
    """{n: load class} of the loads whose captured array has `wanted` True; {} without a derivative program."""
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
    placed: Placed,
) -> tuple[jax.Array | None, ...]:
    """The gradient of every wanted captured array in its shape and dtype, None for the others.

    sums   {n: sums of the cotangents of load n}, float32. By load class: scalar and row [B, N, 1, T], column [B, N, S],
           diagonal [B, N, S + T - 1] by ascending q - kv, tile [B, N, T, S]
    """
    totals = [jnp.zeros(c.shape, jnp.float32) if w else None for c, w in zip(captures, wanted, strict=True)]
    for number, values in sorted(sums.items()):
        assert derivative is not None
        load = load_of(derivative, number)
        total = totals[load.capture]
        assert total is not None
        totals[load.capture] = total + _scattered(plan, derivative, captures, load, values, placed)
    return tuple(None if t is None else t.astype(c.dtype) for t, c in zip(totals, captures, strict=True))


def _scattered(
    plan: KernelPlan, derivative: Program, captures: Sequence[jax.Array], load: Load, values: jax.Array, placed: Placed
) -> jax.Array:
    """`values`, the sums of one load (see `gather_gradients`), scatter-added into zeros of its array's shape."""
    kind = ir.classify_load(load).kind
    batch, heads, q_len, kv_len = plan.batch, plan.q_heads, plan.q_len, plan.kv_len
    if kind == ir.SCALAR:
        values, grid = values.sum((2, 3), keepdims=True), hoisted.whole_grid(batch, heads, 1, 1, placed)
    elif kind == ir.ROW:
        values, grid = jnp.swapaxes(values, 2, 3), hoisted.whole_grid(batch, heads, q_len, 1, placed)
    elif kind == ir.COLUMN:
        values, grid = values[:, :, None, :], hoisted.whole_grid(batch, heads, 1, kv_len, placed)
    elif kind == ir.DIAGONAL:
        values, grid = values[..., None], hoisted.diagonal_grid(batch, heads, q_len, kv_len, placed)
    else:
        grid = hoisted.whole_grid(batch, heads, q_len, kv_len, placed)
    used = frozenset().union(*(ir.axes_of(a) for a in load.index))
    # positions of queries or keys that differ between batch entries make the index depend on b
    if plan.origin is not None and plan.origin.differs_by_entry(used):
        used |= {"b"}
    values = values.sum(tuple(d for d, name in ((0, "b"), (1, "h")) if name not in used), keepdims=True)
    shape = captures[load.capture].shape
    if not shape:
        return values.sum()
    index = hoisted.evaluate(derivative, captures, grid, load.index)
    index = [jnp.broadcast_to(i[: values.shape[0], : values.shape[1]], values.shape) for i in index]
    return jnp.zeros(shape, jnp.float32).at[tuple(index)].add(values)
