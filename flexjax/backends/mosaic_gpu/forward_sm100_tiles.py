"""Which tile the forward kernel on tcgen05 takes: its configuration, its shared and tensor memory, the choice.

    forward_tile(plan)          the configuration that runs
    forward_candidates(plan)    all that fit the plan, its block mask and the options, the expected best first
    forward_scratch(tile)       shared and tensor memory of a CTA, for the launch and for what fits

A CTA has one or two query tiles of 128 rows, each with a warpgroup of its own. With two, the tensor cores multiply for one while the
other does its softmax. Tensor memory has 512 columns: a query tile takes one column for each key of a key tile and one for each
column of the output, so above value head dim 128 there is one query tile. NOTES_sm100.md has the reasons. Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.backends.mosaic_gpu.shared_memory import (
    TMEM_COLUMNS,
    TMEM_LANES,
    Barriers,
    OverlaidTensorTiles,
    Part,
    SwizzledTiles,
    TensorTiles,
    fits,
    tmem_columns,
)
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import KernelPlan

COPIED_ROWS = 16
"""Rows of a query tile that one copy brings to shared memory (sm100_tiles.py)."""
POLYNOMIALS = 2
"""Of eight exponentials so many are polynomials: at head dim 128 `ex2` alone would take as long as the products (NOTES_sm100.md). None
under dropout, whose random numbers take many instructions of their own.
"""
WIDEST_HEAD = 256
"""The largest head dim: an instruction of tcgen05 has at most 256 columns."""


@dataclasses.dataclass(frozen=True)
class Tcgen05ForwardTile:
    """One configuration of the forward kernel on tcgen05.

    groups                 query tiles of a CTA, and warpgroups that compute on them: 1 or 2
    block_kv               keys of a tile: 64 or 128
    stages                 slots of the ring of key tiles, and of that of value tiles
    head_dim, value_dim    head dims, rounded up (`tcgen05_dim`)
    lazy_rescale           the output is rescaled only when a row maximum has grown by a factor of 2^8
    reverse_kv             key tiles that need no mask are visited from the last to the first
    polynomials            how many of eight exponentials are polynomials instead of `ex2` instructions (exponential.py)
    persistent             a CTA computes several work items (tile_scheduler.py), and copies and multiplies for the next one while the
                           results of one are written
    programs               CTAs of the grid where `persistent`
    page_rows              keys that one copy brings where keys are in pages: what a page and a tile both divide into; 0: no pages
    """

    groups: int
    block_kv: int
    stages: int
    head_dim: int
    value_dim: int
    lazy_rescale: bool = True
    reverse_kv: bool = False
    polynomials: int = 0
    persistent: bool = False
    programs: int = 1
    page_rows: int = 0

    rows = TMEM_LANES
    dynamic_scheduler = False
    ctas = 1  # no clusters
    softmax_registers = 224
    """Registers of a thread of the warpgroups that compute, where there are two of them."""
    issuing_registers = 64
    """Registers of a thread of the warpgroup that copies and issues products, beside two others."""

    @property
    def block_q(self) -> int:
        """Queries of a CTA."""
        return self.groups * self.rows

    @property
    def copies(self) -> int:
        """Copies that fill one slot of keys or of values: one, or for keys in pages one for each `page_rows` keys."""
        return self.block_kv // self.page_rows if self.page_rows else 1

    def in_pages(self, page: int) -> "Tcgen05ForwardTile":
        """The configuration for keys in pages of `page` tokens."""
        return dataclasses.replace(self, page_rows=math.gcd(page, self.block_kv))

    @property
    def fits(self) -> bool:
        """Whether a CTA has room for this configuration in shared memory and in tensor memory (TMEM_COLUMNS)."""
        scratch = forward_scratch(self)
        return fits(scratch) and tmem_columns(scratch) <= TMEM_COLUMNS


class Tcgen05ForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared and tensor memory of a CTA of the forward kernel on tcgen05, for head dims D and E.

    query                [block_q, D]; the rows of a query tile in the order of sm100_tiles.py
    key, value           [stages, block_kv, D] and [stages, block_kv, E], rings of key and value tiles
    scores_and_weights   tensor memory: a pair of S, [groups, 128, block_kv] float32, and P over it, [groups, 128, 2 block_kv] of which
                         the first half is used, so that P of a query tile begins where its S begins
    out                  tensor memory: [groups, 128, E] float32, the sum of P V
    query_full           [groups] TMA: the queries of a tile have arrived, COPIED_ROWS rows at each arrival
    query_free           tcgen05.commit: the products of a work item have completed; None where a CTA has one work item
    key_full, value_full      [stages] TMA: a slot is full, after `copies` arrivals
    key_free, value_free      [stages] tcgen05.commit: the products that read a slot have completed
    scores_full          [groups] tcgen05.commit: S of a step is there, and P V of the step before
    weights_full         [groups] the warpgroup: P of a step is there, and the output is rescaled
    out_full             [groups] tcgen05.commit: P V of the last step has completed
    """

    query: Part
    key: Part
    value: Part
    scores_and_weights: Part
    out: Part
    query_full: Part
    query_free: Part | None
    key_full: Part
    key_free: Part
    value_full: Part
    value_free: Part
    scores_full: Part
    weights_full: Part
    out_full: Part


def forward_scratch(tile: Tcgen05ForwardTile, dtype: str = "bfloat16") -> Tcgen05ForwardScratch:
    """The shared and tensor memory of a CTA with this configuration, in the descriptions that `kernel_parts.launch` takes.

    dtype   of queries, keys and values, two bytes
    """
    groups, keys, stages = tile.groups, tile.block_kv, tile.stages
    by_tma = Barriers(stages, arrivals=tile.copies)
    by_tcgen05, of_groups = Barriers(stages, tcgen05=True), Barriers(groups, tcgen05=True)
    return Tcgen05ForwardScratch(
        query=SwizzledTiles((tile.block_q, tile.head_dim), dtype),
        key=SwizzledTiles((stages, keys, tile.head_dim), dtype),
        value=SwizzledTiles((stages, keys, tile.value_dim), dtype),
        scores_and_weights=OverlaidTensorTiles(
            TensorTiles((groups, TMEM_LANES, keys), "float32"), TensorTiles((groups, TMEM_LANES, 2 * keys), dtype)
        ),
        out=TensorTiles((groups, TMEM_LANES, tile.value_dim), "float32"),
        query_full=Barriers(groups, arrivals=TMEM_LANES // COPIED_ROWS),
        query_free=Barriers(1, tcgen05=True) if tile.persistent else None,
        key_full=by_tma,
        key_free=by_tcgen05,
        value_full=by_tma,
        value_free=by_tcgen05,
        scores_full=of_groups,
        weights_full=of_groups,
        out_full=of_groups,
    )


def tcgen05_dim(dim: int) -> int:
    """Head dim as the kernel takes it: rounded up to 16, 32, or a multiple of 64, so that a row is one piece of a swizzle or several of
    128 bytes.
    """
    return 16 if dim <= 16 else 32 if dim <= 32 else round_up(dim, 64)


# ------------------------------------------------------------------- the choice


def forward_tile(plan: KernelPlan) -> Tcgen05ForwardTile:
    """The configuration that runs a plan: the first of `forward_candidates`. There is one, because `support.refuses` has checked it."""
    return forward_candidates(plan)[0]


def describe(plan: KernelPlan) -> str:
    """The configuration that runs a plan as text: "forward 256 x 128, 2 stages"."""
    tile = forward_tile(plan)
    return f"forward {tile.block_q} x {tile.block_kv}, {tile.stages} {'stage' if tile.stages == 1 else 'stages'}"


def forward_candidates(plan: KernelPlan) -> tuple[Tcgen05ForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit, the expected best first.

    Empty where head dims above WIDEST_HEAD, the block mask, the options (block_q, block_kv, num_stages) or an origin with several runs of
    queries, which query tiles must divide, allow none. Two query tiles come first, except for calls of at most 128 queries; then tiles of
    128 keys before 64, except under score_mod, mask_mod and dropout together, whose tiles of 128 would not fit the registers of a thread;
    then three stages before two and one. Without a block mask all work items take equally long, and a grid of two query tiles is
    persistent.
    """
    head_dim, value_dim = tcgen05_dim(plan.head_dim + plan.extra_dim), tcgen05_dim(plan.value_dim)
    if max(head_dim, value_dim) > WIDEST_HEAD:
        return ()
    origin, options, blocks = plan.origin, plan.options, plan.blocks
    three_programs = None not in (plan.score, plan.mask, plan.dropout)
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    found: list[Tcgen05ForwardTile] = []
    for groups in (1, 2) if plan.q_len <= TMEM_LANES else (2, 1):
        rows = groups * TMEM_LANES
        if run % rows or not _allowed(rows, options.block_q, blocks and blocks.block_q):
            continue
        for block_kv in (64, 128) if three_programs else (128, 64):
            if not _allowed(block_kv, options.block_kv, blocks and blocks.block_kv):
                continue
            stages = (options.num_stages,) if options.num_stages is not None else (3, 2, 1)
            persistent = groups > 1 and blocks is None
            polynomials = POLYNOMIALS if plan.dropout is None else 0
            one = Tcgen05ForwardTile(
                groups, block_kv, 1, head_dim, value_dim, polynomials=polynomials, persistent=persistent
            )
            found += [dataclasses.replace(one, stages=n) for n in stages]
    return tuple(tile for tile in found if tile.fits)


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether a tile of `size` tokens on one axis is allowed.

    option       the size that KernelOptions ask for; None: any
    mask_block   size of the mask's blocks on this axis, which the tile must divide; None: there is no block mask
    """
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)
