"""What the warpgroups of a forward kernel share: operands, and all that is known before the kernel is traced."""

import dataclasses
import functools
import typing

from flexjax.backends.mosaic_gpu.forward import hopper_float8
from flexjax.backends.mosaic_gpu.forward.hopper_barriers import PingPong, SlotBarriers
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardTile
from flexjax.backends.mosaic_gpu.forward.online_softmax import RunningMaximum, Softmax, softmax_of
from flexjax.backends.mosaic_gpu.forward.pages import KeyPages
from flexjax.backends.mosaic_gpu.forward.tile_scheduler import MaskRows, ScheduledTile, TileScheduler
from flexjax.backends.mosaic_gpu.machine.kernel_parts import Ref
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part
from flexjax.backends.mosaic_gpu.machine.thread_tiles import SMALL_ERROR
from flexjax.ir import program as ir
from flexjax.plan.kernel_plan import KernelPlan

AnyTile = typing.TypeVar("AnyTile", bound=ScheduledTile)  # the configuration of one of the forward kernels


class ForwardInputs(typing.NamedTuple, typing.Generic[Part]):
    """Operands in global memory. Lengths T, S and head dims D, E are padded (launch.py)."""

    query: Part  # [parts * B, T, N, D] or [parts * B, N, T, D], parts as in machine/float_parts.py
    key: Part  # [parts * B, S, M, D] or [parts * B, M, S, D]; in pages [P, page, M, D]
    value: Part  # likewise; of float8 [B, M, E, S] (hopper_float8.py)
    sinks: Part | None  # [N] float32
    mask_rows: MaskRows  # which key tiles are visited
    score: tuple[Part, ...]  # captured arrays of score_mod
    mask: tuple[Part, ...]
    dropout: tuple[Part, ...]
    counter: Part | None = None  # [1] int32 of the dynamic scheduler, which the kernel changes; None in the simulator
    origin: tuple[Part, ...] = ()  # the tables of an origin, of queries and of keys
    pages: KeyPages[Part] | None = None


class ForwardOutputs(typing.NamedTuple, typing.Generic[Part]):
    """Results in global memory: T' is the padded number of queries, T'' that of whole query tiles; E is padded."""

    out: Part  # [B, T', N, E] or [B, N, T', E], in the plan's dtype
    lse: Part  # [B, N, T''] float32
    max_scores: Part | None  # row maxima, like lse
    rounding: Part | None  # what rounding took from out, like out
    expectations: tuple[Part, ...] = ()  # like lse


@dataclasses.dataclass(frozen=True)
class ForwardSetup(typing.Generic[AnyTile]):
    """The static part of a forward kernel, for a plan with extra features joined to the head dim."""

    plan: KernelPlan
    tile: AnyTile
    staged: ir.Load | None = None  # the load of the score program that goes through shared memory

    @property
    def scheduler(self) -> TileScheduler:
        return TileScheduler(self.plan, self.tile)

    @functools.cached_property
    def softmax(self) -> Softmax:
        plan, tile = self.plan, self.tile
        return softmax_of(
            plan,
            (tile.rows, tile.block_kv),
            # row maxima that are a result must not lag; references that are a part of the bits may
            lazy_rescale=tile.lazy_rescale and (plan.options.invariant or not plan.max_scores),
            follows_top=plan.options.invariant and plan.max_scores,
            score=plan.score,
            polynomials=tile.polynomials,
            whole_powers=plan.whole_references,
            row_scaled=True,
        )

    @property
    def slack(self) -> float | None:
        """The relative error that weights may have beside the rounding of their dtype; None for a softmax."""
        if not self.plan.weighted:
            return None
        return 0.0 if self.plan.dtype == "float32" else SMALL_ERROR

    @property
    def keeps_factor(self) -> bool:
        """Whether a factor of all weights multiplies the results, and not each weight."""
        return self.plan.weighted and self.plan.dtype != "float16"  # whose exponent is too short for weights without it

    @property
    def may_overhang(self) -> bool:
        """Whether a tile may reach past the last query or key (`KernelPlan.covered`); loads then clamp indices."""
        queries, keys = self.plan.covered(self.tile.block_q, self.tile.block_kv)
        return bool(self.plan.q_len % queries or self.plan.kv_len % keys or self.plan.documents)

    @property
    def full_blocks_may_overhang(self) -> bool:
        """Whether a block of the full list may reach past the last key; its last tiles are then masked steps."""
        blocks = self.plan.blocks
        return blocks is not None and blocks.full > 0 and self.plan.kv_len % blocks.block_kv > 0

    @property
    def keys_may_overhang(self) -> bool:
        """Whether some key tile that is visited may reach past the last key."""
        plan = self.plan
        if plan.documents:  # the end of a tile's document is a part of its mask
            return False
        return bool(
            plan.kv_len % self.tile.block_kv or (plan.blocks is not None and plan.kv_len % plan.blocks.block_kv)
        )

    @property
    def has_masked_steps(self) -> bool:
        """Whether some step needs the mask or visits keys past the last one."""
        plan = self.plan
        if plan.mask is not None or plan.kv_len % self.tile.block_kv:
            return True
        return plan.blocks is not None and (plan.blocks.partial > 0 or plan.kv_len % plan.blocks.block_kv > 0)


@dataclasses.dataclass(frozen=True)
class HopperSetup(ForwardSetup[ForwardTile]):
    """The static part of the forward kernel for Hopper, whose warpgroups have roles."""

    @functools.cached_property
    def softmax(self) -> Softmax:
        """The softmax of one warpgroup's tile, for float8 weights as hopper_float8.py says."""
        made = super().softmax
        if not self.tile.float8:
            return made
        assert isinstance(made, RunningMaximum)
        lift, rise = hopper_float8.LIFT, hopper_float8.RISE
        return dataclasses.replace(made, sums=not self.tile.sum_columns, below=lift, rise=rise)

    @property
    def slots(self) -> SlotBarriers:
        return SlotBarriers(self.tile)

    @property
    def ping_pong(self) -> PingPong:
        return PingPong(self.tile)


def present(ref: Ref | None) -> Ref:
    """`ref`, an operand or a part of the scratch that is not None in this configuration."""
    assert ref is not None
    return ref
