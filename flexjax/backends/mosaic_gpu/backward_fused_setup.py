"""What is known of the fused backward kernel at compile time: sizes, the order of additions, and which products overlap."""

import dataclasses

from flexjax.backends.mosaic_gpu import dq_order
from flexjax.backends.mosaic_gpu.backward_fused_tiles import FusedTiles
from flexjax.backends.mosaic_gpu.backward_fused_visits import FusedVisits
from flexjax.backends.mosaic_gpu.backward_tile_math import TileMath
from flexjax.backends.mosaic_gpu.dq_order import DqOrder
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class FusedSetup:
    """What is known of the kernel at compile time.

    plan       with extra features joined to the head dim, and `shares` times the key heads (`fused_choice.spread`)
    math       how a tile's P and dS are computed
    tiles      sizes of the kernel
    order      of the additions to dQ, None for any order
    kv_tiles   key tiles of a key head
    q_tiles    query tiles of a query head
    shares     CTAs among which the query heads of a key tile are divided
    """

    plan: KernelPlan
    math: TileMath
    tiles: FusedTiles
    order: DqOrder | None
    kv_tiles: int
    q_tiles: int
    shares: int = 1

    @property
    def simulated(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return self.plan.options.interpret

    @property
    def visits(self) -> FusedVisits:
        """Which query tiles each key tile visits."""
        return FusedVisits(self.plan, self.order, self.q_tiles, self.rows_serve_all_heads)

    @property
    def sums(self) -> int:
        """Number of partial dQ sums of a head (dq_order.py); 1 where additions are in any order."""
        return 1 if self.order is None else self.order.sums

    @property
    def dq_tiles(self) -> int:
        """Number of dQ tiles in memory: one for each batch entry, query head, partial sum and query tile."""
        return self.plan.batch * self.plan.q_heads * self.sums * self.q_tiles

    @property
    def starts_together(self) -> bool:
        """Whether the products S^T and dP^T of a visit are started one right after the other: where dQ is not late, and the accumulator of
        dP^T starts from -delta.
        """
        return self.math.starts_at_minus_delta and not self.dq_is_late

    @property
    def dq_is_late(self) -> bool:
        """Whether the product for dQ of a visit is issued one visit later (see the top of backward_sm90_fused.py): if there is neither
        score_mod nor dropout.
        """
        return self.plan.score is None and self.plan.dropout is None

    @property
    def writes_ds_first(self) -> bool:
        """Whether dS^T of a visit is written to shared memory before the product for dV starts: with tiles of 128 queries where dQ is late,
        for full and causal-like masks.

        A fence waits until the thread's stores have ended, 350 clocks where it follows them; the start of a product takes 120 clocks
        meanwhile. With tiles of 64 queries that product starts earlier anyway. Under masks of documents 240 bytes are spilled in place of 148.
        """
        measured = dq_order.is_full(self.plan) or dq_order.is_triangle(self.plan)
        return self.dq_is_late and self.tiles.dq_by_queries and measured

    @property
    def rows_serve_all_heads(self) -> bool:
        """Whether what the mods compute of a CTA's keys is the same for all query heads that read them: no step and no result reads the head.
        False with dropout, whose row vectors would take registers that the loop needs (496 bytes spilled).
        """
        programs = [p for p in (self.math.derivative, self.plan.mask) if p is not None]
        reads_head = any(isinstance(a, ir.Val) and a.id == ir.H for p in programs for a in ir.walk_atoms(p))
        return self.plan.dropout is None and not reads_head
