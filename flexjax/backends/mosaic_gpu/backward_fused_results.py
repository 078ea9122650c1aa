"""What happens to the results of the fused backward kernel after it: dQ tiles become dQ in the layout of the queries, and partial dK and
dV are added where several CTAs share a key tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.mosaic_gpu.backward_fused_tiles import GROUPS, ROWS
from flexjax.plan.kernel_plan import KernelPlan


def gather_dq(plan: KernelPlan, sums: int, queries: int, tiles: jax.Array, query: jax.Array) -> jax.Array:
    """dQ in the layout, length and dtype of the padded queries: partial sums added in order in float32, multiplied by
    the scale.

    plan      of the call
    sums      partial dQ sums of a head (dq_order.py)
    queries   of a query tile
    tiles     [B * N * sums * query tiles, GROUPS * ROWS, columns] float32, as the kernel adds them: the halves of the two
              computing warpgroups one below the other, which are halves of the queries or, with tiles of 64 queries, of the
              columns
    query     the padded queries, [B, T', N, D] or [B, N, T', D]; tokens past the query tiles get zeros
    """
    parts = GROUPS * ROWS // queries
    tiles = tiles.reshape(plan.batch, plan.q_heads, sums, -1, parts, queries, tiles.shape[-1])
    total = tiles[:, :, 0]
    for n in range(1, sums):
        total = total + tiles[:, :, n]
    total = (total * plan.scale).astype(query.dtype)
    time, heads = (1, 2) if plan.layout == "BTNH" else (2, 1)
    order = (0, 2, 4, 1, 3, 5) if plan.layout == "BTNH" else (0, 1, 2, 4, 3, 5)
    shape = [plan.batch, 0, 0, parts * total.shape[-1]]
    shape[time], shape[heads] = total.shape[2] * queries, plan.q_heads
    return _with_length(total.transpose(order).reshape(shape), query.shape[time], time)


def spread_shape(plan: KernelPlan, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of partial dK or dV: that of the padded keys or values with the key heads of `plan` (`FusedKernel.spread`)."""
    heads = 2 if plan.layout == "BTNH" else 1
    return (*shape[:heads], plan.kv_heads, *shape[heads + 1 :])


def sum_shares(plan: KernelPlan, x: jax.Array, shares: int) -> jax.Array:
    """dK or dV from the partial results of the CTAs that share a key tile, adjacent key heads of `plan`; added in float32. Each part was rounded
    to 16 bits, as gradients of repeated keys are. In bfloat16 that is an error of 1.7e-3 of the parts (rms), beside the few 1e-3 of dS in 16 bits. In
    float16 a part above 65504 is infinite.

    x        [B, S', M * shares, D] or [B, M * shares, S', D]; returned with M heads and in its dtype
    shares   `FusedKernel.shares`
    """
    if shares == 1:
        return x
    heads = 2 if plan.layout == "BTNH" else 1
    parts = x.reshape(*x.shape[:heads], -1, shares, *x.shape[heads + 1 :])
    return parts.astype(jnp.float32).sum(heads + 1).astype(x.dtype)


def _with_length(x: jax.Array, length: int, axis: int) -> jax.Array:
    """x cut, or padded with zeros at the end, to `length` along `axis`."""
    have = x.shape[axis]
    if have >= length:
        return lax.slice_in_dim(x, 0, length, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - have)
    return jnp.pad(x, widths)
