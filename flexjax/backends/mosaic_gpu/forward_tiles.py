"""Which tile the forward kernel takes: its configuration, its shared memory, what fits, and the choice.

    forward_tile(plan)          the configuration that runs
    forward_candidates(plan)    all that fit what the plan, its block mask and the options allow, the expected best first
    forward_scratch(tile)       shared memory of a CTA, for the launch and for what fits

Numbers that were chosen by measurement are explained in LOG.md. Nothing here imports Mosaic. The file is longer than others because what
fits and what is chosen are read together.
"""

import dataclasses
import typing

from flexjax.analysis.patterns import divides_tiles
from flexjax.backends.mosaic_gpu import dq_order, staging
from flexjax.backends.mosaic_gpu.columns import Exchange, columns_of, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.float8_tiles import FLOAT8_COLUMNS, FLOAT8_RINGS, SUM_COLUMNS
from flexjax.backends.mosaic_gpu.float_parts import parts_of
from flexjax.backends.mosaic_gpu.reference_gpu import REFERENCE_SMS
from flexjax.backends.mosaic_gpu.shared_memory import Barriers, Part, PlainArray, SwizzledTiles, fits
from flexjax.backends.mosaic_gpu.static_reference import static_reference
from flexjax.backends.mosaic_gpu.three_groups import three_groups_are_faster, under_mask
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan

NAMED_BARRIERS = 16
"""Hardware barriers of a CTA that have a number."""
MAILBOX_WORDS = 16
"""int32 words of a query slot's mailbox, through which the producer passes a work item to the consumers (tile_scheduler.py)."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """One configuration of the forward kernel: the tile of a CTA, the rings in shared memory, and how steps overlap.

    A *step* is the work of a consumer warpgroup on one key tile. A *ring* is a buffer in shared memory with several
    slots of one tile each; tile n of a CTA is in slot n modulo the number of slots.

    groups                 consumer warpgroups of a CTA
    rows                   queries of one consumer warpgroup
    block_kv               keys of a tile
    stages, value_stages   slots of the ring of key tiles and of the ring of value tiles
    head_dim, value_dim    columns of a CTA: head dims, divided by `ctas`, rounded up to what WGMMA takes (`_columns`)
    query_slots            slots of the ring of query tiles, 1 or 2; with 2 the queries of the next work item are copied
                           while the consumers compute this one
    out_slots              slots of a warpgroup for parts of its output on their way to global memory
    ping_pong              two consumer warpgroups alternate: one issues WGMMAs while the other computes its softmax
    overlap                the softmax of a step runs while P V of the step before is in flight
    lazy_rescale           the output is rescaled only when a row maximum has grown by a factor of 2^8
    persistent             a CTA takes a fixed share of all query tiles, the longest first
    dynamic_scheduler      a CTA takes query tiles one by one from an atomic counter (tile_scheduler.py)
    staged_slots           slots for tiles of a captured array that TMA brings into shared memory (staging.py); 0: none
    staged_dtype           dtype of that array
    polynomials            how many of eight exponentials are polynomials instead of `ex2` instructions (exponential.py)
    reverse_kv             key tiles that need no mask are visited from the last to the first
    prefetch_key_barrier   the barrier of the next key tile is waited for while WGMMAs of this step are in flight
    parts                  of queries, keys, values and P (float_parts.py): 2 for float32, 1 for 16 bits
    ctas                   CTAs of a cluster, which share the columns of each tile (columns.py)
    float8                 queries, keys, values and P are float8; values are key-major (float8_products.py)
    sum_columns            columns of ones beside those of the values, in which P V sums the softmax weights (float8_products.py), or 0
    page_rows              keys that one copy brings where keys are in pages: what a page and a tile both divide into; 0: no pages
    programs               CTAs of the grid where `persistent` or `dynamic_scheduler`: as many as the GPU has SMs
    """

    groups: int
    rows: int
    block_kv: int
    stages: int
    value_stages: int
    head_dim: int
    value_dim: int
    query_slots: int = 1
    out_slots: int = 2
    ping_pong: bool = True
    overlap: bool = True
    lazy_rescale: bool = True
    persistent: bool = True
    dynamic_scheduler: bool = False
    staged_slots: int = 0
    staged_dtype: str = "bfloat16"
    polynomials: int = 0
    reverse_kv: bool = False
    prefetch_key_barrier: bool = False
    parts: int = 1
    ctas: int = 1
    page_rows: int = 0
    float8: bool = False
    sum_columns: int = 0
    programs: int = REFERENCE_SMS

    @property
    def copies(self) -> int:
        """Copies that fill one slot of keys or of values: one for each part, or for keys in pages one for each `page_rows` keys."""
        return self.block_kv // self.page_rows if self.page_rows else self.parts

    @property
    def block_q(self) -> int:
        """Queries of a CTA's tile."""
        return self.groups * self.rows

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Columns of the tiles, side by side, that P V is added to: those of the values and, in the last, `sum_columns`. One tile, except
        that float8 has one for each 128 columns of the values: its products have registers of their own (float8_products.py).
        """
        last = self.value_dim
        parts = []
        while self.float8 and last > FLOAT8_COLUMNS:
            parts.append(FLOAT8_COLUMNS)
            last -= FLOAT8_COLUMNS
        return (*parts, last + self.sum_columns)

    @property
    def out_over_queries(self) -> bool:
        """Whether the output leaves through the memory of the queries: where columns are split and both have as many
        columns. No other queries follow there, because a CTA has one work item.
        """
        return self.ctas > 1 and self.head_dim == self.value_dim

    @property
    def out_columns(self) -> int:
        """Columns of the part of an output tile that goes to global memory in one copy: 64, or 32 for float32 operands (`parts` is 2), if
        they divide the field `value_dim`, else `value_dim`; always `value_dim` with `out_over_queries`.
        """
        if self.out_over_queries:
            return self.value_dim
        columns = 64 if self.parts == 1 else 32
        return columns if self.value_dim % columns == 0 else self.value_dim

    @property
    def consumer_registers(self) -> int:
        """Registers for each thread of a consumer warpgroup: 240 of 2 consumers, 160 of 3. Raises KeyError for a single consumer, whose
        limit no kernel changes.
        """
        return {2: 240, 3: 160}[self.groups]

    @property
    def producer_registers(self) -> int:
        """Registers for each thread of the producer warpgroup: 24 beside 2 consumers, 32 beside 3, at most what these leave of the SM's
        65536. Raises KeyError for a single consumer.
        """
        return {2: 24, 3: 32}[self.groups]

    @property
    def named_barriers(self) -> dict[str, range]:
        """Numbers of the hardware barriers by use: three for "ping_pong", and one for each slot of the rings "key",
        "value", "query" and "staged".

        Lower numbers belong to the compiler: one for the CTA, one for each warpgroup.
        """
        counts = {
            "ping_pong": 3,
            "key": self.stages,
            "value": self.value_stages,
            "query": self.query_slots,
            "staged": self.staged_slots,
        }
        numbers, first = {}, self.groups + 2
        for name, count in counts.items():
            numbers[name] = range(first, first + count)
            first += count
        return numbers

    @property
    def fits(self) -> bool:
        """Whether a CTA has the shared memory and the NAMED_BARRIERS for this tile, and the key ring enough slots: two
        with `prefetch_key_barrier`, else one.
        """
        named = max(numbers.stop for numbers in self.named_barriers.values())
        steps_of_keys = 1 + self.prefetch_key_barrier  # whose keys are in shared memory at the same time
        return (
            fits(forward_scratch(self, FLOAT8 if self.float8 else "bfloat16"))
            and named <= NAMED_BARRIERS
            and self.stages >= steps_of_keys
        )


class ForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the forward kernel. A tile with groups * rows = block_q queries, head dims D and E:

    query        [query_slots * parts, block_q, D], ring of query tiles
    key, value   [stages * parts, block_kv, D] and [value_stages * parts, block_kv, E], rings of key and value tiles; tiles of float8
                 values are [E, block_kv]
    out          [groups, out_slots, rows, out_columns], parts of the output on their way to global memory; None with `out_over_queries`
    *_full       a barrier for each slot of a ring: TMA has filled the slot, one arrival for each copy
    *_free       a barrier for each slot: every consumer has released the slot; only in the simulator (`forward_barriers.SlotBarriers`)
    staged       [staged_slots, block_q, block_kv], ring of tiles of a captured array; None without one
    mailbox      int32 words through which the dynamic scheduler passes work items, MAILBOX_WORDS for each query slot; None without it
    exchange     of the partial sums of S among the CTAs of a cluster; None where a CTA has all columns
    """

    query: Part
    key: Part
    value: Part
    out: Part | None
    query_full: Part
    key_full: Part
    value_full: Part
    query_free: Part | None
    key_free: Part | None
    value_free: Part | None
    staged: Part | None
    staged_full: Part | None
    staged_free: Part | None
    mailbox: Part | None
    exchange: Exchange[Part] | None = None


def forward_scratch(tile: ForwardTile, dtype: str = "bfloat16", interpret: bool = False) -> ForwardScratch:
    """The shared memory of a CTA with this configuration, in the descriptions that `kernel_parts.launch` takes.

    dtype       name of the dtype, of two bytes, or FLOAT8 for a tile of `float8`, of the parts of queries, keys and values; the output tile
                has it too, but is float32 if there are several parts, and bfloat16 beside FLOAT8
    interpret   whether the kernel runs in the simulator, which needs the `*_free` barriers
    """

    def free(slots: int) -> Barriers | None:
        """One barrier for each of `slots` slots of a ring, at which every consumer arrives when it releases the slot;
        None on the device, which uses named barriers.
        """
        return Barriers(slots, arrivals=tile.groups) if interpret else None

    staged, parts = tile.staged_slots > 0, tile.parts
    out_dtype = "float32" if parts > 1 else "bfloat16" if tile.float8 else dtype
    value_tile = (sum(tile.out_widths), tile.block_kv) if tile.float8 else (tile.block_kv, tile.value_dim)
    out = SwizzledTiles((tile.groups, tile.out_slots, tile.rows, tile.out_columns), out_dtype)
    return ForwardScratch(
        query=SwizzledTiles((tile.query_slots * parts, tile.block_q, tile.head_dim), dtype),
        key=SwizzledTiles((tile.stages * parts, tile.block_kv, tile.head_dim), dtype),
        value=SwizzledTiles((tile.value_stages * parts, *value_tile), dtype),
        out=None if tile.out_over_queries else out,
        query_full=Barriers(tile.query_slots, parts),
        key_full=Barriers(tile.stages, tile.copies),
        value_full=Barriers(tile.value_stages, tile.copies),
        query_free=free(tile.query_slots),
        key_free=free(tile.stages),
        value_free=free(tile.value_stages),
        staged=SwizzledTiles((tile.staged_slots, tile.block_q, tile.block_kv), tile.staged_dtype) if staged else None,
        staged_full=Barriers(tile.staged_slots) if staged else None,
        staged_free=free(tile.staged_slots) if staged else None,
        mailbox=PlainArray((tile.query_slots * MAILBOX_WORDS,), "int32") if tile.dynamic_scheduler else None,
        exchange=exchange_scratch(tile.ctas, tile.groups, (tile.rows, tile.block_kv), interpret),
    )


def wgmma_dim(dim: int) -> int:
    """Head dim as WGMMA takes it: rounded up to a multiple of 16, at least 16."""
    return round_up(max(dim, 1), 16)


def _columns(plan: KernelPlan, ctas: int) -> tuple[int, int]:
    """(columns of queries and keys, columns of values) of a CTA, if `ctas` CTAs share the columns: with one, each head
    dim as WGMMA takes it, for float8 that of queries and keys a multiple of 32. Where columns are split, both are multiples of 32, a swizzle of 64 bytes; those of values of
    64, the columns of an output part, unless the output leaves over the queries.
    """
    dims = plan.head_dim + plan.extra_dim, plan.value_dim
    if ctas == 1:
        return round_up(wgmma_dim(dims[0]), 32) if plan.float8 else wgmma_dim(dims[0]), wgmma_dim(dims[1])
    head_dim, value_dim = (round_up(columns_of(dim, ctas), 32) for dim in dims)
    return head_dim, value_dim if value_dim == head_dim else round_up(value_dim, 64)


# ------------------------------------------------------------------- the choice


SPLIT = 320
"""The most columns of a CTA where two CTAs share the columns of wider head dims."""
# (key slots, value slots, query slots), the best first, by the columns of a CTA.
RINGS = {
    64: ((2, 2, 2), (4, 4, 1), (3, 3, 2), (2, 2, 1)),
    128: ((2, 2, 2), (3, 2, 1), (3, 3, 1), (4, 4, 1), (2, 2, 1)),
    256: ((2, 2, 1), (3, 2, 1)),
    SPLIT: ((2, 2, 1), (2, 1, 1), (1, 1, 1)),
}
LONG_ROWS, LONG_RING = 16, (3, 2, 1)
"""Where the query tiles of a full or causal-like mask visit at least LONG_ROWS key tiles on average, LONG_RING comes first at size 128:
its third key slot covers the time that a copy takes. The second query slot, whose place it takes, saves time once per work item."""
ONE_SLOT = (1, 1, 1)
"""The ring of float32 operands whose head dims leave no room for more, tried last."""
GROUPS = (2, 1, 3)
"""Numbers of consumer warpgroups, the best first; three come first where `three_groups_are_faster`."""


def forward_tile(plan: KernelPlan) -> ForwardTile:
    """The configuration that runs a plan: the first of `forward_candidates`. There is one, because `support.refuses` has checked it."""
    return forward_candidates(plan)[0]


def forward_candidates(plan: KernelPlan) -> tuple[ForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit a CTA, the expected best first.

    Empty where the block mask, the options (block_q, block_kv, num_stages) or an origin with several runs of queries, which query tiles
    must divide, allow none. Two groups of 64 queries come first, or three where `three_groups_are_faster`, but one for up to 64 queries
    unless block_q is set; then staging before none; then 128 keys before 64, or 64 first with head dims above 128 (above 64 for float32)
    or mods that divide tiles of integers, and 64 alone above 256; then the order of RINGS, or LONG_RING before them (`_rings`).
    """
    ctas = ctas_of(plan)
    head_dim, value_dim = _columns(plan, ctas)
    size = SPLIT if ctas > 1 else _ring_size(head_dim, value_dim)
    divides = divides_tiles(plan.score) or divides_tiles(plan.mask)  # the quotients take the registers of 64 keys
    staged_dtype, parts = _staged_dtype(plan), parts_of(plan)
    order = (3, 2, 1) if three_groups_are_faster(plan, size, staged_dtype) else GROUPS
    found: list[ForwardTile] = []
    origin = plan.origin
    run = origin.query_run if origin is not None and origin.query_runs > 1 else 0
    for groups in order:
        if ctas > 1 and groups == 3:  # 160 registers a thread are too few for the output
            continue
        if run % (64 * groups) or not _allowed(64 * groups, plan.options.block_q, plan.blocks and plan.blocks.block_q):
            continue
        for keys in (
            (64,)
            if ctas > 1
            else (64, 128)
            if (size == 256 and not plan.float8) or divides or (parts > 1 and size == 128)
            else (128, 64)
        ):
            if not _allowed(keys, plan.options.block_kv, plan.blocks and plan.blocks.block_kv):
                continue
            for stages, value_stages, slots in (*_rings(plan, size), *((ONE_SLOT,) if parts > 1 else ())):
                if plan.options.num_stages not in (None, stages):
                    continue
                ring = (stages, value_stages, head_dim, value_dim, slots)
                tile = ForwardTile(groups, 64, keys, *ring)
                tile = dataclasses.replace(
                    tile, parts=parts, ctas=ctas, float8=plan.float8, **_pipeline_defaults(plan, size, groups)
                )
                if plan.float8:
                    tile = dataclasses.replace(tile, sum_columns=SUM_COLUMNS)
                if ctas > 1:
                    tile = dataclasses.replace(tile, out_slots=1)
                if stages == 1:
                    tile = dataclasses.replace(tile, prefetch_key_barrier=False)
                if parts > 1 and size == 256:  # two tiles of P in parts beside the output are too many registers
                    tile = dataclasses.replace(tile, overlap=False)
                found += _with_staged_slots(tile, staged_dtype)
    # Of tiles with as many queries, those that stage an array come before those that do not.
    found.sort(key=lambda t: (order.index(t.groups), staged_dtype is not None and t.staged_slots == 0))
    if plan.q_len <= 64 and plan.options.block_q is None:
        found.sort(key=lambda t: t.groups != 1)
    return tuple(dict.fromkeys(found))


def _rings(plan: KernelPlan, size: int) -> tuple[tuple[int, int, int], ...]:
    """RINGS of a size, with LONG_RING first where rows are long, at size 128, for 16 bits and without a score_mod (LOG.md).

    Rows are long where they have LONG_ROWS key tiles of 128. Under a causal-like mask, with at least as many queries as keys, half of the
    keys count.
    """
    if plan.float8:
        return tuple(dict.fromkeys((*FLOAT8_RINGS, *RINGS[size])))
    if size != 128 or plan.score is not None or parts_of(plan) > 1:
        return RINGS[size]
    causal = dq_order.is_triangle(plan) and plan.q_len >= plan.kv_len
    tiles = plan.kv_len / 128 * (1 if dq_order.is_full(plan) else 0.5 if causal else 0)
    return tuple(dict.fromkeys((LONG_RING, *RINGS[size]))) if tiles >= LONG_ROWS else RINGS[size]


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether a tile of `size` tokens on one axis is allowed.

    option       the size that KernelOptions ask for; None: any
    mask_block   size of the mask's blocks on this axis, which the tile must divide; None: there is no block mask
    """
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)


def _ring_size(head_dim: int, value_dim: int) -> int:
    """The smallest key of RINGS that is not below `head_dim` and `value_dim`, the columns of a CTA."""
    return next(n for n in RINGS if max(head_dim, value_dim) <= n)


def _pipeline_defaults(plan: KernelPlan, size: int, groups: int) -> dict[str, bool]:
    """The fields of ForwardTile that say how CTAs get work items and how steps overlap, by name: `persistent`, `dynamic_scheduler`,
    `ping_pong`, `prefetch_key_barrier` and `reverse_kv`; at size 64 also `overlap` and `lazy_rescale`, which keep their default True above.

    size     a key of RINGS: 64, 128 or 256, the larger head dim rounded up, or SPLIT
    groups   consumer warpgroups

    The dynamic scheduler always runs, except where columns are split. At size 64, softmax and P V overlap, with lazy rescaling and
    prefetched key barriers, only with three groups, without dropout, and without a mask_mod unless `three_groups.under_mask`; two
    groups alternate, with a score_mod with lazy rescaling and keys in reverse. Above, two groups alternate under a block mask at size 128,
    key barriers are prefetched, and keys are visited in reverse with a score_mod. A static softmax reference (a soft cap) turns off
    alternating and prefetching above size 64, and the reverse everywhere.
    """
    scheduler = {"persistent": False, "dynamic_scheduler": True}
    if plan.float8:  # the softmax beside P V would take the registers that the product is added from
        return {
            **scheduler,
            "overlap": False,
            "ping_pong": groups == 2,
            "prefetch_key_barrier": True,
            "reverse_kv": plan.score is not None,
        }
    static = static_reference(plan) is not None
    scored = plan.score is not None and not static
    if size == 64:
        overlap = groups == 3 and plan.dropout is None and (plan.mask is None or under_mask(plan))
        return {
            **scheduler,
            "overlap": overlap,
            "lazy_rescale": overlap or (groups == 2 and scored),
            "ping_pong": groups == 2,
            "prefetch_key_barrier": overlap,
            "reverse_kv": groups == 2 and scored,
        }
    # A static reference means a soft cap, whose tanh doubles the exponentials of a step.
    if size == SPLIT:  # the CTAs of a cluster have to take the same items, so the hardware deals them out
        scheduler = {"persistent": False, "dynamic_scheduler": False}
    return {
        **scheduler,
        "ping_pong": groups == 2 and size < 256 and plan.blocks is not None and not static,
        "prefetch_key_barrier": not static,
        "reverse_kv": scored,
    }


def _staged_dtype(plan: KernelPlan) -> str | None:
    """dtype of the captured array of score_mod that goes through shared memory (staging.py); None where there is none."""
    load = staging.staged_load(plan, plan.score)
    return None if load is None or plan.score is None else plan.score.captures[load.capture].dtype


def _with_staged_slots(tile: ForwardTile, staged_dtype: str | None) -> list[ForwardTile]:
    """At most two configurations: `tile` with as many staged slots as fit, 2 or 1, then `tile` with none; without those that do not fit a
    CTA. If there is no array to stage (`staged_dtype` None), `tile` itself where it fits.
    """
    if staged_dtype is None:
        return [tile] if tile.fits else []
    made = [dataclasses.replace(tile, staged_slots=n, staged_dtype=staged_dtype) for n in (2, 1, 0)]
    fitting = [t for t in made if t.fits]
    return [t for t in fitting if t is fitting[0] or t.staged_slots == 0]
