"""What the warpgroups of a forward kernel share: operands, and all that is known before the kernel is traced."""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu import float8_products
from flexjax.backends.mosaic_gpu.forward_barriers import PingPong, SlotBarriers
from flexjax.backends.mosaic_gpu.forward_pages import KeyPages
from flexjax.backends.mosaic_gpu.forward_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.online_softmax import OnlineSoftmax
from flexjax.backends.mosaic_gpu.shared_memory import Part
from flexjax.backends.mosaic_gpu.tile_scheduler import MaskRows, ScheduledTile, TileScheduler
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

AnyTile = typing.TypeVar("AnyTile", bound=ScheduledTile)
"""The configuration of one of the forward kernels."""


class Inputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands in global memory. Lengths T, S and head dims D, E are padded (forward_arrays.py).

    query                  [parts * B, T, N, D] or [parts * B, N, T, D], parts as in float_parts.py
    key, value             [parts * B, S, M, D or E] or [parts * B, M, S, D or E]; in pages [P, page, M, D or E]; of float8 the value is
                           [B, M, E, S] (float8_products.py)
    sinks                  [N] float32 or None
    mask_rows              which key tiles are visited
    score, mask, dropout   captured arrays of the three programs
    counter                [1] int32 of the dynamic scheduler, which the kernel changes; None without it and in the
                           simulator
    origin                 the tables of an origin, of queries and of keys; () without one
    pages                  of keys in pages; None for contiguous ones
    """

    query: Part
    key: Part
    value: Part
    sinks: Part | None
    mask_rows: MaskRows
    score: tuple[Part, ...]
    mask: tuple[Part, ...]
    dropout: tuple[Part, ...]
    counter: Part | None = None
    origin: tuple[Part, ...] = ()
    pages: KeyPages[Part] | None = None


class Outputs(typing.NamedTuple, typing.Generic[Part]):
    """Results in global memory. T' is the padded number of queries, T'' that of whole query tiles; E is padded.

    out          [B, T', N, E] or [B, N, T', E] by the layout of the queries, in the plan's dtype
    lse          [B, N, T''] float32
    max_scores   row maxima in the shape of lse; None: not wanted
    rounding     what rounding took from out, in the shape and dtype of out; None: not wanted
    """

    out: Part
    lse: Part
    max_scores: Part | None
    rounding: Part | None


@dataclasses.dataclass(frozen=True)
class ForwardSetup(typing.Generic[AnyTile]):
    """The static part of a forward kernel.

    plan           of the call, with extra features joined to the head dim
    tile           the kernel's configuration
    interpret      whether the kernel runs in the simulator
    staged         the load of the score program that goes through shared memory; None: none does
    reference      static softmax reference (static_reference.py); None: the running maximum
    large_scores   scores may be too large to scale before the maximum is subtracted (analysis/large_scores.py)
    stored_pages   how many pages the pool has, where the kernel reads keys in pages; otherwise 0
    """

    plan: KernelPlan
    tile: AnyTile
    interpret: bool
    staged: ir.Load | None
    reference: float | None
    large_scores: bool
    stored_pages: int = 0

    @property
    def scheduler(self) -> TileScheduler:
        """The tile scheduler: which CTA computes which work item, and which key tiles that visits."""
        return TileScheduler(self.plan, self.tile)

    @property
    def softmax(self) -> OnlineSoftmax:
        """The OnlineSoftmax of one warpgroup's tile, [tile.rows, tile.block_kv]. Row maxima that are a result must not
        lag, so with them `lazy_rescale` is off.
        """
        tile = self.tile
        return OnlineSoftmax(
            shape=(tile.rows, tile.block_kv),
            lazy_rescale=tile.lazy_rescale and not self.plan.max_scores,
            reference=self.reference,
            polynomials=tile.polynomials,
            interpret=self.interpret,
            large_scores=self.large_scores,
            program=self.plan.score,
            whole_powers=self.plan.rounds_weights_alike,
            row_scaled=self.large_scores,
        )

    @property
    def may_overhang(self) -> bool:
        """Whether a tile on which the programs are evaluated may reach past the last query or the last key: the number of queries is no
        multiple of the larger of query tile and mask block, or that of keys no multiple of the larger of key tile and mask block
        (`KernelPlan.covered`). Loads then clamp their indices.
        """
        queries, keys = self.plan.covered(self.tile.block_q, self.tile.block_kv)
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys)

    @property
    def full_blocks_may_overhang(self) -> bool:
        """Whether a block of the mask's full list may reach past the last key; False without a block mask. Its last tiles are then steps
        that need the check of the last key.
        """
        blocks = self.plan.blocks
        return blocks is not None and blocks.full > 0 and self.plan.kv_len % blocks.block_kv > 0

    @property
    def keys_may_overhang(self) -> bool:
        """Whether some key tile that is visited may reach past the last key: the number of keys is no multiple of a key
        tile or of a mask block.
        """
        plan = self.plan
        return bool(
            plan.kv_len % self.tile.block_kv or (plan.blocks is not None and plan.kv_len % plan.blocks.block_kv)
        )

    @property
    def has_masked_steps(self) -> bool:
        """Whether some step needs the mask or visits keys past the last one: there is a mask_mod, the mask has partial
        blocks, or the number of keys is no multiple of a key tile or mask block.
        """
        plan = self.plan
        if plan.mask is not None or plan.kv_len % self.tile.block_kv:
            return True
        return plan.blocks is not None and (plan.blocks.partial > 0 or plan.kv_len % plan.blocks.block_kv > 0)


@dataclasses.dataclass(frozen=True)
class HopperSetup(ForwardSetup[ForwardTile]):
    """The static part of the forward kernel for Hopper, whose warpgroups have roles."""

    @property
    def softmax(self) -> OnlineSoftmax:
        """The OnlineSoftmax of one warpgroup's tile, for float8 weights as float8_products.py says."""
        made = super().softmax
        if not self.tile.float8:
            return made
        lift, rise = float8_products.LIFT, float8_products.RISE
        return dataclasses.replace(made, sums=not self.tile.sum_columns, below=lift, rise=rise)

    @property
    def slots(self) -> SlotBarriers:
        """The barriers by which consumers hand slots back to the producer."""
        return SlotBarriers(self.tile, self.interpret)

    @property
    def ping_pong(self) -> PingPong:
        """The barriers by which two consumers alternate."""
        return PingPong(self.tile, self.interpret)


def present(ref: Ref | None) -> Ref:
    """`ref` itself: an operand or a part of the scratch that may be None in general, but not in this configuration. Raises AssertionError
    for None.
    """
    assert ref is not None
    return ref
