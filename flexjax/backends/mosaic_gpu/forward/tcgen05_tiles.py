"""Which tile the forward kernel on tcgen05 takes: its configuration, its shared and tensor memory, the choice.

    forward_tile(plan)          the configuration that runs
    forward_candidates(plan)    all that fit the plan, its block mask and the options, the expected best first
    forward_scratch(tile)       shared and tensor memory of a CTA, for the launch and for what fits

A CTA has one or two query tiles of 128 rows, each with a warpgroup of its own. With two, the tensor cores multiply for
one while the other does its softmax. Tensor memory has 512 columns: a query tile takes one for each key of a key tile
and one for each column of the output, so above value head dim 128 there is one query tile (lab/notes/tcgen05.md).
Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.analysis.patterns import fills_registers
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    COPIED_ROWS,
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

POLYNOMIALS = 2  # polynomials of eight exponentials: at head dim 128 `ex2` alone would take as long as the products
WIDEST_HEAD = 256  # the largest head dim: an instruction of tcgen05 has at most 256 columns


@dataclasses.dataclass(frozen=True)
class Tcgen05ForwardTile:
    """One configuration of the forward kernel on tcgen05."""

    groups: int  # query tiles of a CTA, and warpgroups that compute on them: 1 or 2
    block_kv: int  # keys of a tile: 64 or 128
    stages: int  # slots of the ring of key tiles, and of that of value tiles
    head_dim: int  # rounded up (`tcgen05_dim`)
    value_dim: int  # likewise
    lazy_rescale: bool = True  # the output is rescaled only when a row maximum has grown by a factor of 2^8
    reverse_kv: bool = False  # key tiles that need no mask are visited from the last to the first
    polynomials: int = 0  # of eight exponentials, how many are polynomials instead of `ex2` (machine/exponential.py)
    persistent: bool = False  # a CTA begins its next work item while the results of one are written
    programs: int = 1  # CTAs of the grid where `persistent`
    page_rows: int = 0  # keys in pages: keys that one copy brings, a divisor of a page and a tile; 0: no pages

    rows = TMEM_LANES
    dynamic_scheduler = False
    ctas = 1  # no clusters
    softmax_registers = 224  # registers of a thread of the warpgroups that compute, where there are two of them
    issuing_registers = 64  # registers of a thread of the warpgroup that copies and issues products, beside two others

    @property
    def block_q(self) -> int:
        return self.groups * self.rows

    @property
    def copies(self) -> int:
        """Copies that fill one slot of keys or of values."""
        return self.block_kv // self.page_rows if self.page_rows else 1

    @property
    def fits(self) -> bool:
        """Whether a CTA has room for this configuration in shared memory and in tensor memory."""
        scratch = forward_scratch(self)
        return fits(scratch) and tmem_columns(scratch) <= TMEM_COLUMNS


class Tcgen05ForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared and tensor memory of a CTA of the forward kernel on tcgen05, for head dims D and E."""

    query: Part  # [block_q, D], rows in the order of machine/tcgen05_tiles.py
    key: Part  # [stages, block_kv, D], ring
    value: Part  # [stages, block_kv, E], ring
    # Tensor memory: S, [groups, 128, block_kv] float32, and over it P, [groups, 128, 2 block_kv], of which the first
    # half is used, so that P of a query tile begins where its S begins.
    scores_and_weights: Part
    out: Part  # tensor memory: [groups, 128, E] float32, the sum of P V
    query_full: Part  # [groups] TMA: queries have arrived, COPIED_ROWS rows at each arrival
    query_free: Part | None  # tcgen05.commit: the products of a work item have completed; None: a CTA has one item
    key_full: Part  # [stages] TMA: a slot is full, after `copies` arrivals
    key_free: Part  # [stages] tcgen05.commit: the products that read a slot have completed
    value_full: Part
    value_free: Part
    scores_full: Part  # [groups] tcgen05.commit: S of a step is there, and P V of the step before
    weights_full: Part  # [groups] the warpgroup: P of a step is there, and the output is rescaled
    out_full: Part  # [groups] tcgen05.commit: P V of the last step has completed


def forward_scratch(tile: Tcgen05ForwardTile, dtype: str = "bfloat16") -> Tcgen05ForwardScratch:
    """Shared and tensor memory of a CTA, for `kernel_parts.launch`; `dtype` is that of the operands."""
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
    """Head dim as the kernel takes it, so that a row is one piece of a swizzle or several of 128 bytes."""
    return 16 if dim <= 16 else 32 if dim <= 32 else round_up(dim, 64)


# ------------------------------------------------------------------- the choice


def forward_tile(plan: KernelPlan) -> Tcgen05ForwardTile:
    return forward_candidates(plan)[0]


def describe(plan: KernelPlan) -> str:
    tile = forward_tile(plan)
    return f"forward {tile.block_q} x {tile.block_kv}, {tile.stages} {'stage' if tile.stages == 1 else 'stages'}"


def forward_candidates(plan: KernelPlan) -> tuple[Tcgen05ForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit, the expected best first.

    Empty where head dims, the block mask, the options or an origin, whose runs query tiles must divide, allow none. The
    order is by query tiles, then block_kv, then stages.
    """
    head_dim, value_dim = tcgen05_dim(plan.head_dim + plan.extra_dim), tcgen05_dim(plan.value_dim)
    if max(head_dim, value_dim) > WIDEST_HEAD:
        return ()
    origin, options, blocks = plan.origin, plan.options, plan.blocks
    narrow = None not in (plan.score, plan.mask, plan.dropout) or any(map(fills_registers, (plan.score, plan.mask)))
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    found: list[Tcgen05ForwardTile] = []
    for groups in (1, 2) if plan.q_len <= TMEM_LANES else (2, 1):
        rows = groups * TMEM_LANES
        if run % rows or not _allowed(rows, options.block_q, blocks and blocks.block_q):
            continue
        for block_kv in (64, 128) if narrow else (128, 64):
            if not _allowed(block_kv, options.block_kv, blocks and blocks.block_kv):
                continue
            stages = (options.num_stages,) if options.num_stages is not None else (3, 2, 1)
            persistent = groups > 1 and blocks is None
            polynomials = POLYNOMIALS if plan.dropout is None else 0
            page_rows = math.gcd(plan.page, block_kv) if plan.page else 0
            one = Tcgen05ForwardTile(
                groups, block_kv, 1, head_dim, value_dim, polynomials=polynomials, persistent=persistent
            )
            found += [dataclasses.replace(one, stages=n, page_rows=page_rows) for n in stages]
    return tuple(tile for tile in found if tile.fits)


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether the option and the size of mask blocks (None: any, no block mask) allow a tile of `size` tokens."""
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)
