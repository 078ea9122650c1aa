"""Which tile the forward kernel on mma.sync takes on a card: its configuration, its shared memory, the choice.

    forward_tile(plan, card)          the configuration that runs
    forward_candidates(plan, card)    all that fit the card, the plan and the options, the expected best first
    forward_scratch(tile)             shared memory of a CTA, for the launch and for what fits

A warpgroup has 64 or 128 queries. With 128, each fragment of keys and values that it reads from shared memory serves
two mma.sync, but its sums take two registers for each column of the output, so above head dim 128 there are two
warpgroups of 64 (lab/notes/mma.md). Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.backends.mosaic_gpu.machine.mma_cards import Card, Copying, meeting_barrier, ring_barriers
from flexjax.backends.mosaic_gpu.machine.shared_memory import Part, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.machine.warpgroup import WARPGROUP
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class MmaForwardTile:
    """One configuration of the forward kernel on mma.sync."""

    groups: int  # warpgroups of a CTA, all of which copy and compute
    rows: int  # queries of one warpgroup: 64 or 128
    block_kv: int
    stages: int  # slots of the ring of key tiles, and of that of value tiles
    head_dim: int  # rounded up to a multiple of 16
    value_dim: int  # likewise
    copying: Copying
    lazy_rescale: bool = True  # the output is rescaled only when a row maximum has grown by a factor of 2^8
    reverse_kv: bool = False  # key tiles that need no mask are visited from the last to the first
    polynomials: int = 0  # of eight exponentials, how many are polynomials instead of `ex2` (machine/exponential.py)
    page_rows: int = 0  # keys in pages: keys that one copy brings; divides a page and a warpgroup's share

    # tiles in a slot: two where operands have tangents (tangent/)
    query_parts = 1
    key_parts = 1
    value_parts = 1

    persistent = False
    dynamic_scheduler = False
    programs = 1  # a CTA for each query tile, so this is not read
    ctas = 1  # no clusters

    @property
    def block_q(self) -> int:
        return self.groups * self.rows

    @property
    def copies(self) -> int:
        """Copies of all warpgroups that fill one slot of keys or of values."""
        return self.block_kv // self.page_rows if self.page_rows else self.groups

    @property
    def threads(self) -> int:
        return self.groups * WARPGROUP

    def resident_ctas(self, card: Card) -> int:
        """How many CTAs with this configuration an SM of the card holds, with 255 registers a thread."""
        return card.ctas(scratch_bytes(forward_scratch(self)), self.threads)


class MmaForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the forward kernel on mma.sync, for head dims D and E."""

    query: Part  # [query_parts * block_q, D]
    key: Part  # [stages * key_parts, block_kv, D], ring
    value: Part  # [stages * value_parts, block_kv, E], ring
    query_full: Part | None  # where TMA's copies arrive, one for each slot; None with cp.async
    key_full: Part | None
    value_full: Part | None
    meeting: Part | None  # stands for the CTA's barrier in the simulator; None on the device


def forward_scratch(tile: MmaForwardTile, dtype: str = "bfloat16") -> MmaForwardScratch:
    """The shared memory of a CTA, in the descriptions that `kernel_parts.launch` takes; `dtype` has two bytes."""
    copying, groups = tile.copying, tile.groups
    return MmaForwardScratch(
        query=SwizzledTiles((tile.block_q * tile.query_parts, tile.head_dim), dtype),
        key=SwizzledTiles((tile.stages * tile.key_parts, tile.block_kv, tile.head_dim), dtype),
        value=SwizzledTiles((tile.stages * tile.value_parts, tile.block_kv, tile.value_dim), dtype),
        query_full=ring_barriers(copying, 1, groups * tile.query_parts),
        key_full=ring_barriers(copying, tile.stages, tile.copies * tile.key_parts),
        value_full=ring_barriers(copying, tile.stages, tile.copies * tile.value_parts),
        meeting=meeting_barrier(groups),
    )


def mma_dim(dim: int) -> int:
    """Head dim as mma.sync takes it."""
    return round_up(max(dim, 1), 16)


# ------------------------------------------------------------------- the choice


def forward_tile(plan: KernelPlan, card: Card) -> MmaForwardTile:
    return forward_candidates(plan, card)[0]


def forward_candidates(plan: KernelPlan, card: Card) -> tuple[MmaForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit the card, the expected best first.

    Empty where the card, the block mask, the options or an origin, whose runs query tiles must divide, allow none. The
    order is by warpgroups, then by whether an SM holds two CTAs, then block_kv, then stages.
    """
    head_dim, value_dim = mma_dim(plan.head_dim + plan.extra_dim), mma_dim(plan.value_dim)
    large = max(head_dim, value_dim)
    shapes = [(2, 64), (1, 64)] if large > 128 else [(1, 128), (2, 64), (1, 64)]
    if (plan.q_len <= 64 or plan.crowded) and plan.options.block_q is None:
        shapes.sort(key=lambda shape: shape != (1, 64))
    keys = (64, 128, 32) if large <= 64 else (64, 32)
    if plan.crowded:
        keys = tuple(sorted(keys))
    origin, options, blocks = plan.origin, plan.options, plan.blocks
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    found: list[MmaForwardTile] = []
    for groups, rows in shapes:
        if run % (groups * rows) or not _allowed(groups * rows, options.block_q, blocks and blocks.block_q):
            continue
        for block_kv in keys:
            if not _allowed(block_kv, options.block_kv, blocks and blocks.block_kv):
                continue
            page_rows = math.gcd(plan.page, block_kv // groups) if plan.page else 0
            for stages in (2, 1, 3):
                if options.num_stages not in (None, stages):
                    continue
                sizes = (groups, rows, block_kv, stages, head_dim, value_dim)
                found.append(MmaForwardTile(*sizes, card.copying, page_rows=page_rows))
    fitting = [tile for tile in found if tile.resident_ctas(card)]
    order = {(tile.groups, tile.rows): n for n, tile in reversed(list(enumerate(fitting)))}
    # Of tiles with as many queries, those of which an SM holds two CTAs come first: one multiplies while the other does
    # its softmax.
    fitting.sort(key=lambda tile: (order[tile.groups, tile.rows], min(2, tile.resident_ctas(card)) != 2))
    return tuple(fitting)


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether the option and the size of mask blocks (None: any, no block mask) allow a tile of `size` tokens."""
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)
