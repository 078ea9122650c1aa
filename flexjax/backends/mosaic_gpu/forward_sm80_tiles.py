"""Which tile the forward kernel on mma.sync takes on a card: its configuration, its shared memory, the choice.

    forward_tile(plan, card)          the configuration that runs
    forward_candidates(plan, card)    all that fit the card, the plan, its block mask and the options, the expected best first
    forward_scratch(tile)             shared memory of a CTA, for the launch and for what fits

A warpgroup has 64 or 128 queries. With 128, each fragment of keys and values that it reads from shared memory serves two mma.sync, but
its sums take two registers for each column of the output, so above head dim 128 there are two warpgroups of 64. NOTES_sm80.md has the
reasons. Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.backends.mosaic_gpu.shared_memory import Part, SwizzledTiles, scratch_bytes
from flexjax.backends.mosaic_gpu.sm80_cards import Card, Copying, meeting_barrier, ring_barriers
from flexjax.backends.mosaic_gpu.warpgroup import WARPGROUP
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class MmaForwardTile:
    """One configuration of the forward kernel on mma.sync.

    groups                 warpgroups of a CTA, all of which copy and compute
    rows                   queries of one warpgroup: 64 or 128
    block_kv               keys of a tile
    stages                 slots of the ring of key tiles, and of that of value tiles
    head_dim, value_dim    head dims, rounded up to multiples of 16
    copying                how tiles come to shared memory
    lazy_rescale           the output is rescaled only when a row maximum has grown by a factor of 2^8
    reverse_kv             key tiles that need no mask are visited from the last to the first
    polynomials            how many of eight exponentials are polynomials instead of `ex2` instructions (exponential.py)
    page_rows              keys that one copy brings where keys are in pages: what a page and a warpgroup's share of a tile both
                           divide into; 0: no pages
    """

    groups: int
    rows: int
    block_kv: int
    stages: int
    head_dim: int
    value_dim: int
    copying: Copying
    lazy_rescale: bool = True
    reverse_kv: bool = False
    polynomials: int = 0
    page_rows: int = 0

    persistent = False
    dynamic_scheduler = False
    programs = 1  # a CTA for each query tile, so this is not read
    ctas = 1  # no clusters

    @property
    def block_q(self) -> int:
        """Queries of a CTA's tile."""
        return self.groups * self.rows

    @property
    def copies(self) -> int:
        """Copies of all warpgroups that fill one slot of keys or of values: one of each warpgroup, or for keys in pages one for each
        `page_rows` keys.
        """
        return self.block_kv // self.page_rows if self.page_rows else self.groups

    def in_pages(self, page: int) -> "MmaForwardTile":
        """The configuration for keys in pages of `page` tokens."""
        return dataclasses.replace(self, page_rows=math.gcd(page, self.block_kv // self.groups))

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.groups * WARPGROUP

    def resident_ctas(self, card: Card) -> int:
        """How many CTAs with this configuration an SM of the card holds, with 255 registers a thread; 0 where one does not fit."""
        return card.ctas(scratch_bytes(forward_scratch(self)), self.threads)


class MmaForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the forward kernel on mma.sync, for head dims D and E.

    query        [block_q, D]
    key, value   [stages, block_kv, D] and [stages, block_kv, E], rings of key and value tiles
    *_full       the barriers at which TMA's copies arrive, one for each slot; None with cp.async
    meeting      the barrier that stands for the CTA's in the simulator; None on the device
    """

    query: Part
    key: Part
    value: Part
    query_full: Part | None
    key_full: Part | None
    value_full: Part | None
    meeting: Part | None


def forward_scratch(tile: MmaForwardTile, dtype: str = "bfloat16", interpret: bool = False) -> MmaForwardScratch:
    """The shared memory of a CTA with the configuration `tile`, in the descriptions that `kernel_parts.launch` takes.

    dtype       of queries, keys and values, two bytes
    interpret   whether the kernel runs in the simulator
    """

    copying, groups = tile.copying, tile.groups
    return MmaForwardScratch(
        query=SwizzledTiles((tile.block_q, tile.head_dim), dtype),
        key=SwizzledTiles((tile.stages, tile.block_kv, tile.head_dim), dtype),
        value=SwizzledTiles((tile.stages, tile.block_kv, tile.value_dim), dtype),
        query_full=ring_barriers(copying, 1, groups),
        key_full=ring_barriers(copying, tile.stages, tile.copies),
        value_full=ring_barriers(copying, tile.stages, tile.copies),
        meeting=meeting_barrier(groups, interpret),
    )


def mma_dim(dim: int) -> int:
    """Head dim as mma.sync takes it: rounded up to a multiple of 16, at least 16."""
    return round_up(max(dim, 1), 16)


# ------------------------------------------------------------------- the choice


def forward_tile(plan: KernelPlan, card: Card) -> MmaForwardTile:
    """The configuration that runs a plan on a card: the first of `forward_candidates`. There is one, because `support.refuses`
    has checked it.
    """
    return forward_candidates(plan, card)[0]


def forward_candidates(plan: KernelPlan, card: Card) -> tuple[MmaForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit the card, the expected best first.

    Empty where the card, the block mask, the options (block_q, block_kv, num_stages) or an origin with several runs of queries, which
    query tiles must divide, allow none. One warpgroup of 128 queries comes first for head dims up to 128, then two of 64, then one of 64,
    which comes first for up to 64 queries unless block_q is set. Of tiles with the same warpgroups, those of which an SM holds two CTAs
    or more come first; then 64 keys before 128 (only up to head dim 64) and 32; then two stages before one and three.
    """
    head_dim, value_dim = mma_dim(plan.head_dim + plan.extra_dim), mma_dim(plan.value_dim)
    large = max(head_dim, value_dim)
    shapes = [(2, 64), (1, 64)] if large > 128 else [(1, 128), (2, 64), (1, 64)]
    if plan.q_len <= 64 and plan.options.block_q is None:
        shapes.sort(key=lambda shape: shape != (1, 64))
    keys = (64, 128, 32) if large <= 64 else (64, 32)
    origin, options, blocks = plan.origin, plan.options, plan.blocks
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    found: list[MmaForwardTile] = []
    for groups, rows in shapes:
        if run % (groups * rows) or not _allowed(groups * rows, options.block_q, blocks and blocks.block_q):
            continue
        for block_kv in keys:
            if not _allowed(block_kv, options.block_kv, blocks and blocks.block_kv):
                continue
            for stages in (2, 1, 3):
                if options.num_stages not in (None, stages):
                    continue
                found.append(MmaForwardTile(groups, rows, block_kv, stages, head_dim, value_dim, card.copying))
    fitting = [tile for tile in found if tile.resident_ctas(card)]
    order = {(tile.groups, tile.rows): n for n, tile in reversed(list(enumerate(fitting)))}
    # Of tiles with as many queries, those of which an SM holds two CTAs come first: one multiplies while the other does its softmax.
    fitting.sort(key=lambda tile: (order[tile.groups, tile.rows], min(2, tile.resident_ctas(card)) != 2))
    return tuple(fitting)


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether a tile of `size` tokens on one axis is allowed.

    option       the size that KernelOptions ask for; None: any
    mask_block   size of the mask's blocks on this axis, which the tile must divide; None: there is no block mask
    """
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)
