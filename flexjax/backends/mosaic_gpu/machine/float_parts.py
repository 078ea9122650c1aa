"""How the kernels multiply float32: operands are sums of bfloat16 parts, products sums of products of parts.

    x = x0 + x1            x0 = bfloat16(x), x1 = bfloat16(x - x0)
    a b = a0 b1 + a1 b0 + a0 b0

WGMMA adds the products up in float32. What is left out, a1 b1 and the rounding of x1, is at most 2^-17 of a product,
where TF32 leaves out 2^-11. TF32 needs both operands of WGMMA with the contracted dimension innermost, which P V, dQ,
dK and dV do not have.

XLA splits arrays before the kernels; part n of batch entry b is at b + n * batch. In shared memory part n of slot s is
at s * parts + n. Tiles in registers (P, dS) are split in the kernel (`thread_tiles.tile_parts`). dQ, dK and dV leave in
parts, which XLA adds (`join`). Nothing here imports Mosaic.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.plan.kernel_plan import KernelPlan

Pairs = tuple[tuple[int, int], ...]
"""(part of the left operand, part of the right operand) of each product of parts, in the order of their addition."""


def parts_of(plan: KernelPlan) -> int:
    return 2 if plan.dtype == "float32" else 1


def part_dtype(plan: KernelPlan) -> str:
    """The dtype of the parts, which WGMMA multiplies."""
    return "bfloat16" if plan.dtype == "float32" else plan.input_dtype


def pairs_of(parts: int) -> Pairs:
    """The pairs (part of the left, part of the right operand) whose products are added, the smallest first."""
    # Products with m + n >= parts are smaller than the rounding.
    return tuple((n, total - n) for total in reversed(range(parts)) for n in range(total + 1))


def split(x: jax.Array, parts: int) -> jax.Array:
    """x, [B, ...] float32, as [parts * B, ...] bfloat16; infinities are in the first part, as inf - inf is NaN."""
    if parts == 1:
        return x
    found, rest = [], x
    for _ in range(parts):
        part = lax.reduce_precision(rest, 8, 7)  # a conversion to bfloat16 and back is one that XLA may leave out
        found.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(part), rest - part, 0.0)
    return jnp.concatenate(found)


def join(x: jax.Array, parts: int) -> jax.Array:
    """The parts [parts * B, ...] added up, [B, ...] float32; undoes `split` up to the rounding of the last part."""
    if parts == 1:
        return x
    found = jnp.split(x.astype(jnp.float32), parts)
    total = found[-1]
    for part in reversed(found[:-1]):
        total = total + part
    return total
