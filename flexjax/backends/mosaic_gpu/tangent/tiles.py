"""Which tiles the tangent kernels take: their configurations, and the choice.

A tangent kernel keeps the tangents of queries, keys and values beside them in shared memory, and scores and their
tangents beside the output in registers, so that its tiles are smaller than those of a forward kernel. Options for the
tiles of the other passes do not bind it. Nothing here imports Mosaic.
"""

import dataclasses
import typing

from flexjax.backends.mosaic_gpu.forward.hopper_tiles import ForwardTile, wgmma_dim
from flexjax.backends.mosaic_gpu.forward.mma_tiles import MmaForwardTile, mma_dim
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.mma_cards import Card
from flexjax.plan.kernel_plan import KernelPlan


class Moving(typing.NamedTuple):
    """What has a tangent."""

    query: bool
    key: bool
    value: bool
    loads: bool  # the score has one through captured arrays

    @property
    def score(self) -> bool:
        """Whether the product of queries and keys has a tangent."""
        return self.query or self.key


TOKENS = Moving(True, True, True, loads=False)


@dataclasses.dataclass(frozen=True)
class TangentTile(ForwardTile):
    """One configuration of the kernel for Hopper."""

    moving: Moving = TOKENS

    @property
    def query_parts(self) -> int:
        return self.parts * (1 + self.moving.query)

    @property
    def key_parts(self) -> int:
        return self.parts * (1 + self.moving.key)

    @property
    def value_parts(self) -> int:
        return self.parts * (1 + self.moving.value)


@dataclasses.dataclass(frozen=True)
class MmaTangentTile(MmaForwardTile):
    """One configuration of the kernel on mma.sync."""

    moving: Moving = TOKENS

    @property
    def query_parts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 + self.moving.query

    @property
    def key_parts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 + self.moving.key

    @property
    def value_parts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 + self.moving.value


def tangent_tiles(plan: KernelPlan, moving: Moving) -> tuple[TangentTile, ...]:
    """Configurations of the kernel for Hopper that fit a plan, the expected best first."""
    dims = wgmma_dim(plan.head_dim + plan.extra_dim), wgmma_dim(plan.value_dim)
    made = [
        TangentTile(
            groups, 64, keys, stages, value_stages, *dims, out_slots=out_slots, ping_pong=False, overlap=False,
            persistent=False, dynamic_scheduler=True, parts=parts_of(plan), moving=moving,
        )
        for groups in (2, 1)
        for keys in ((128, 64) if max(dims) <= 64 and not moving.loads else (64,))
        for stages, value_stages, out_slots in ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
    ]  # fmt: skip
    return tuple(tile for tile in made if tile.fits and _divides(plan, tile.block_q, tile.block_kv))


def mma_tangent_tiles(plan: KernelPlan, moving: Moving, card: Card) -> tuple[MmaTangentTile, ...]:
    """Configurations of the kernel on mma.sync that fit a plan and a card, the expected best first."""
    dims = mma_dim(plan.head_dim + plan.extra_dim), mma_dim(plan.value_dim)
    # Elements of captured arrays and of their tangents take registers too.
    sizes = (64, 32, 16) if max(dims) <= (64 if moving.loads else 128) else (32, 16)
    made = [
        MmaTangentTile(groups, 64, keys, stages, *dims, card.copying, moving=moving)
        for groups in (2, 1)
        for keys in sizes
        for stages in (2, 1)
    ]
    fitting = (tile for tile in made if tile.resident_ctas(card))
    return tuple(tile for tile in fitting if _divides(plan, tile.block_q, tile.block_kv))


def _divides(plan: KernelPlan, queries: int, keys: int) -> bool:
    """Whether tiles divide the blocks of the mask and the runs of an origin."""
    blocks, origin = plan.blocks, plan.origin
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    return run % queries == 0 and (blocks is None or (blocks.block_q % queries == 0 and blocks.block_kv % keys == 0))
