"""What surrounds the fused backward kernel: what is known of it at compile time, and what XLA makes of its results."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from flexjax.backends.mosaic_gpu.backward.hopper_fused_tiles import GROUPS, ROWS, FusedTiles
from flexjax.backends.mosaic_gpu.backward.hopper_fused_visits import FusedVisits
from flexjax.backends.mosaic_gpu.backward.tile_math import TileMath
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.dq_order import DqOrder
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class FusedSetup:
    """What is known of the kernel at compile time."""

    plan: KernelPlan  # extra features joined to the head dim, `shares` times the key heads
    math: TileMath
    tiles: FusedTiles
    order: DqOrder | None  # of the additions to dQ, None for any order
    kv_tiles: int  # of a key head
    q_tiles: int  # of a query head
    shares: int = 1  # CTAs among which the query heads of a key tile are divided

    @property
    def visits(self) -> FusedVisits:
        return FusedVisits(self.plan, self.order, self.q_tiles, self.rows_serve_all_heads)

    @property
    def sums(self) -> int:
        """Number of partial dQ sums of a head (machine/dq_order.py)."""
        return 1 if self.order is None else self.order.sums

    @property
    def dq_tiles(self) -> int:
        """Number of dQ tiles in memory."""
        return self.plan.batch * self.plan.q_heads * self.sums * self.q_tiles

    @property
    def starts_together(self) -> bool:
        """Whether the products S^T and dP^T of a visit are started one right after the other."""
        return self.math.starts_at_minus_delta and not self.dq_is_late

    @property
    def dq_is_late(self) -> bool:
        """Whether the product for dQ of a visit is issued one visit later (see the top of hopper_fused.py)."""
        return self.plan.score is None and self.plan.dropout is None

    @property
    def by_runs(self) -> bool:
        """Whether visits with and without the mask have loops of their own."""
        # causal at d128, bytes spilled: sigmoid weights 340 -> 16, entropy 364 -> 304; a plain score_mod 76 -> 228.
        # Retention, which reads an array, is 16% slower with two loops on an H200
        reads = self.plan.score is not None and bool(self.plan.score.captures)
        return self.dq_is_late or self.plan.crowded or (self.plan.weighted and not reads)

    @property
    def writes_ds_first(self) -> bool:
        """Whether dS^T of a visit is written to shared memory before the product for dV starts."""
        # A fence waits until the thread's stores have ended, 350 clocks where it follows them; the start of a product
        # takes 120 clocks meanwhile. With tiles of 64 queries that product starts earlier anyway. Masks of documents
        # spill more this way.
        measured = dq_order.is_full(self.plan) or dq_order.is_triangle(self.plan)
        return self.dq_is_late and self.tiles.dq_by_queries and measured

    @property
    def rows_serve_all_heads(self) -> bool:
        """Whether what the mods compute of a CTA's keys serves all query heads that read them."""
        programs = [p for p in (self.math.derivative, self.plan.mask) if p is not None]
        reads_head = any(isinstance(a, ir.Val) and a.id == ir.H for p in programs for a in ir.walk_atoms(p))
        # row vectors of dropout would take registers that the loop needs (496 bytes spilled)
        return self.plan.dropout is None and not reads_head


# ------------------------------------------------------------------- its results


def gather_dq(plan: KernelPlan, sums: int, queries: int, tiles: jax.Array, query: jax.Array) -> jax.Array:
    """dQ in the shape and dtype of the padded queries: partial sums added in order in float32, times the scale.

    `tiles` is [B * N * sums * query tiles, GROUPS * ROWS, columns] float32. The halves of the two computing warpgroups
    lie one below the other; they are halves of the queries or, with tiles of 64 queries, of the columns.
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
    """The shape of partial dK or dV: that of the padded keys or values with the key heads of `plan`."""
    heads = 2 if plan.layout == "BTNH" else 1
    return (*shape[:heads], plan.kv_heads, *shape[heads + 1 :])


def sum_shares(plan: KernelPlan, x: jax.Array, shares: int) -> jax.Array:
    """dK or dV, with M heads, from the parts of `shares` CTAs, [B, S', M * shares, D] or [B, M * shares, S', D].

    Each part was rounded to 16 bits, as gradients of repeated keys are; in float16 a part above 65504 is infinite.
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
