"""Which tile the forward kernel takes: its configuration, its shared memory, what fits, and the choice.

    forward_tile(plan)          the configuration that runs
    forward_candidates(plan)    all that fit the plan, its block mask and the options, the expected best first
    forward_scratch(tile)       shared memory of a CTA, for the launch and for what fits

Numbers that were chosen by measurement are explained in lab/logs/hopper.md. Nothing here imports Mosaic.
"""

import dataclasses
import math
import typing

from flexjax.analysis.patterns import fills_registers
from flexjax.backends.mosaic_gpu.forward.hopper_float8_tiles import FLOAT8_COLUMNS, FLOAT8_RINGS, SUM_COLUMNS
from flexjax.backends.mosaic_gpu.forward.hopper_three_groups import three_groups_are_faster, under_mask
from flexjax.backends.mosaic_gpu.forward.static_reference import static_reference
from flexjax.backends.mosaic_gpu.machine import dq_order
from flexjax.backends.mosaic_gpu.machine.columns import Exchange, columns_of, ctas_of, exchange_scratch
from flexjax.backends.mosaic_gpu.machine.float_parts import parts_of
from flexjax.backends.mosaic_gpu.machine.reference_gpu import REFERENCE_SMS
from flexjax.backends.mosaic_gpu.machine.shared_memory import Barriers, Part, PlainArray, SwizzledTiles, fits
from flexjax.backends.mosaic_gpu.programs import staging
from flexjax.integers import round_up
from flexjax.plan.kernel_plan import FLOAT8, KernelPlan

NAMED_BARRIERS = 16  # hardware barriers of a CTA that have a number
MAILBOX_WORDS = 16
"""int32 words of a query slot's mailbox, which passes a work item to the consumers (tile_scheduler.py)."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """One configuration of the forward kernel: the tile of a CTA, the rings in shared memory, and how steps overlap.

    A step is a consumer's work on one key tile. A ring has several slots of one tile each; tile n is in slot n % slots.
    """

    groups: int  # consumer warpgroups of a CTA
    rows: int  # queries of one consumer warpgroup
    block_kv: int  # keys of a tile
    stages: int  # slots of the ring of key tiles
    value_stages: int  # slots of the ring of value tiles
    head_dim: int  # columns of a CTA: head dim, divided by `ctas`, rounded up to what WGMMA takes (`_columns`)
    value_dim: int  # likewise
    query_slots: int = 1  # 1 or 2; with 2 the next queries are copied while the consumers compute this work item
    out_slots: int = 2  # slots of a warpgroup for parts of its output on their way to global memory
    ping_pong: bool = True  # two consumer warpgroups alternate: one issues WGMMAs, the other computes its softmax
    overlap: bool = True  # the softmax of a step runs while P V of the step before is in flight
    lazy_rescale: bool = True  # the output is rescaled only when a row maximum has grown by a factor of 2^8
    persistent: bool = True  # a CTA takes a fixed share of all query tiles, the longest first
    dynamic_scheduler: bool = False  # a CTA takes query tiles one by one from an atomic counter (tile_scheduler.py)
    staged_slots: int = 0  # slots for tiles of a captured array that TMA copies (programs/staging.py)
    staged_dtype: str = "bfloat16"
    polynomials: int = 0  # of eight exponentials, how many are polynomials instead of `ex2` (machine/exponential.py)
    reverse_kv: bool = False  # key tiles that need no mask are visited from the last to the first
    prefetch_key_barrier: bool = False  # waits for the next key tile while WGMMAs of this step are in flight
    parts: int = 1  # of queries, keys, values and P (machine/float_parts.py): 2 for float32, 1 for 16 bits
    ctas: int = 1  # CTAs of a cluster, which share the columns of each tile (machine/columns.py)
    page_rows: int = 0  # keys in pages: keys that one copy brings, a divisor of a page and a tile; 0: no pages
    float8: bool = False  # queries, keys, values and P are float8; values are key-major (hopper_float8.py)
    sum_columns: int = 0  # columns of ones beside the values, in which P V sums the softmax weights (hopper_float8.py)
    programs: int = REFERENCE_SMS  # CTAs of a grid of `persistent` or `dynamic_scheduler`: the SMs of the GPU

    @property
    def query_parts(self) -> int:
        """Tiles in a query slot: the parts of the queries, and in forward mode (tangent/) those of their tangents."""
        return self.parts

    @property
    def key_parts(self) -> int:
        return self.parts

    @property
    def value_parts(self) -> int:
        return self.parts

    def copies_of(self, parts: int) -> int:
        """Copies that fill a slot of keys or of values of so many parts."""
        return self.block_kv // self.page_rows if self.page_rows else parts

    @property
    def block_q(self) -> int:
        return self.groups * self.rows

    @property
    def out_widths(self) -> tuple[int, ...]:
        """Columns of the tiles, side by side, that P V is added to."""
        last = self.value_dim
        parts = []
        # Each product of float8 has registers of its own (hopper_float8.py).
        while self.float8 and last > FLOAT8_COLUMNS:
            parts.append(FLOAT8_COLUMNS)
            last -= FLOAT8_COLUMNS
        return (*parts, last + self.sum_columns)

    @property
    def out_over_queries(self) -> bool:
        """Whether the output leaves through the memory of the queries, as a CTA of a cluster has one work item."""
        return self.ctas > 1 and self.head_dim == self.value_dim

    @property
    def out_columns(self) -> int:
        """Columns of the part of an output tile that goes to global memory in one copy."""
        if self.out_over_queries:
            return self.value_dim
        columns = 64 if self.parts == 1 else 32
        return columns if self.value_dim % columns == 0 else self.value_dim

    @property
    def consumer_registers(self) -> int:
        """Registers for each thread of a consumer warpgroup; a single one keeps the limit (KeyError)."""
        return {2: 240, 3: 160}[self.groups]

    @property
    def producer_registers(self) -> int:
        """Registers for each thread of the producer warpgroup, from what the consumers leave of the SM's 65536."""
        return {2: 24, 3: 32}[self.groups]

    @property
    def named_barriers(self) -> dict[str, range]:
        """Numbers of the hardware barriers by use; lower ones are the compiler's."""
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
        """Whether a CTA has the shared memory and the NAMED_BARRIERS for this tile, and the key ring enough slots."""
        named = max(numbers.stop for numbers in self.named_barriers.values())
        steps_of_keys = 1 + self.prefetch_key_barrier  # whose keys are in shared memory at the same time
        return (
            fits(forward_scratch(self, FLOAT8 if self.float8 else "bfloat16"))
            and named <= NAMED_BARRIERS
            and self.stages >= steps_of_keys
        )


class ForwardScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the forward kernel, for head dims D and E.

    *_full   a barrier for each slot of a ring: TMA has filled the slot, one arrival for each copy
    *_free   a barrier for each slot: every consumer has released it; only in the simulator
    """

    query: Part  # [query_slots * parts, block_q, D], ring
    key: Part  # [stages * parts, block_kv, D], ring
    value: Part  # [value_stages * parts, block_kv, E], ring; float8: [value_stages, E, block_kv]
    out: Part | None  # [groups, out_slots, rows, out_columns], on the way to global memory; None: `out_over_queries`
    query_full: Part
    key_full: Part
    value_full: Part
    query_free: Part | None
    key_free: Part | None
    value_free: Part | None
    staged: Part | None  # [staged_slots, block_q, block_kv], ring of tiles of a captured array
    staged_full: Part | None
    staged_free: Part | None
    mailbox: Part | None  # MAILBOX_WORDS int32 for each query slot; None without the dynamic scheduler
    exchange: Exchange[Part] | None = None  # of the partial sums of S among the CTAs of a cluster


def forward_scratch(tile: ForwardTile, dtype: str = "bfloat16") -> ForwardScratch:
    """The shared memory of a CTA, for `kernel_parts.launch`; `dtype` is that of the parts of the operands."""
    # every consumer arrives when it releases a slot; the device has named barriers
    free = lambda slots: Barriers(slots, arrivals=tile.groups, in_simulator=True)
    staged, parts = tile.staged_slots > 0, tile.parts
    out_dtype = "float32" if parts > 1 else "bfloat16" if tile.float8 else dtype
    value_tile = (sum(tile.out_widths), tile.block_kv) if tile.float8 else (tile.block_kv, tile.value_dim)
    out = SwizzledTiles((tile.groups, tile.out_slots, tile.rows, tile.out_columns), out_dtype)
    return ForwardScratch(
        query=SwizzledTiles((tile.query_slots * tile.query_parts, tile.block_q, tile.head_dim), dtype),
        key=SwizzledTiles((tile.stages * tile.key_parts, tile.block_kv, tile.head_dim), dtype),
        value=SwizzledTiles((tile.value_stages * tile.value_parts, *value_tile), dtype),
        out=None if tile.out_over_queries else out,
        query_full=Barriers(tile.query_slots, tile.query_parts),
        key_full=Barriers(tile.stages, tile.copies_of(tile.key_parts)),
        value_full=Barriers(tile.value_stages, tile.copies_of(tile.value_parts)),
        query_free=free(tile.query_slots),
        key_free=free(tile.stages),
        value_free=free(tile.value_stages),
        staged=SwizzledTiles((tile.staged_slots, tile.block_q, tile.block_kv), tile.staged_dtype) if staged else None,
        staged_full=Barriers(tile.staged_slots) if staged else None,
        staged_free=free(tile.staged_slots) if staged else None,
        mailbox=PlainArray((tile.query_slots * MAILBOX_WORDS,), "int32") if tile.dynamic_scheduler else None,
        exchange=exchange_scratch(tile.ctas, tile.groups, (tile.rows, tile.block_kv)),
    )


def wgmma_dim(dim: int) -> int:
    """Head dim as WGMMA takes it."""
    return round_up(max(dim, 1), 16)


def _columns(plan: KernelPlan, ctas: int) -> tuple[int, int]:
    """(columns of queries and keys, columns of values) of a CTA, if `ctas` CTAs share the columns."""
    dims = plan.head_dim + plan.extra_dim, plan.value_dim
    if ctas == 1:
        return round_up(wgmma_dim(dims[0]), 32) if plan.float8 else wgmma_dim(dims[0]), wgmma_dim(dims[1])
    head_dim, value_dim = (round_up(columns_of(dim, ctas), 32) for dim in dims)
    return head_dim, value_dim if value_dim == head_dim else round_up(value_dim, 64)


# ------------------------------------------------------------------- the choice


SPLIT = 320  # the most columns of a CTA where two CTAs share the columns of wider head dims
# (key slots, value slots, query slots), the best first, by the columns of a CTA.
RINGS = {
    64: ((2, 2, 2), (4, 4, 1), (3, 3, 2), (2, 2, 1)),
    128: ((2, 2, 2), (3, 2, 1), (3, 3, 1), (4, 4, 1), (2, 2, 1)),
    256: ((2, 2, 1), (3, 2, 1)),
    SPLIT: ((2, 2, 1), (2, 1, 1), (1, 1, 1)),
}
# The third key slot covers the time that a copy takes; the second query slot saves time only once a work item.
LONG_ROWS, LONG_RING = 16, (3, 2, 1)
"""Where query tiles visit at least LONG_ROWS key tiles on average, LONG_RING comes first at size 128."""
ONE_SLOT = (1, 1, 1)  # the ring of float32 operands whose head dims leave no room for more, tried last
GROUPS = (2, 1, 3)  # numbers of consumer warpgroups, the best first; three come first where `three_groups_are_faster`


def forward_tile(plan: KernelPlan) -> ForwardTile:
    return forward_candidates(plan)[0]


def forward_candidates(plan: KernelPlan) -> tuple[ForwardTile, ...]:
    """Configurations of the forward kernel for a plan that fit a CTA, the expected best first.

    Empty where the block mask, the options or an origin, whose runs query tiles must divide, allow none. The order is
    by groups, then staging before none, then block_kv, then rings.
    """
    ctas = ctas_of(plan)
    head_dim, value_dim = _columns(plan, ctas)
    size = SPLIT if ctas > 1 else _ring_size(head_dim, value_dim)
    # quotients, or what functions of the score are at each entry, take the registers of 64 keys
    crowded = fills_registers(plan.score) or fills_registers(plan.mask) or plan.expectations > 1
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
            (invariant_keys(plan),)
            if plan.options.invariant
            else (64,)
            if ctas > 1
            else (64, 128)
            if (size == 256 and not plan.float8) or crowded or (parts > 1 and size == 128)
            else (128, 64)
        ):
            if not _allowed(keys, plan.options.block_kv, plan.blocks and plan.blocks.block_kv):
                continue
            page_rows = math.gcd(plan.page, keys) if plan.page else 0
            for stages, value_stages, slots in (*_rings(plan, size), *((ONE_SLOT,) if parts > 1 else ())):
                if plan.options.num_stages not in (None, stages):
                    continue
                ring = (stages, value_stages, head_dim, value_dim, slots)
                tile = ForwardTile(groups, 64, keys, *ring, page_rows=page_rows)
                tile = dataclasses.replace(
                    tile, parts=parts, ctas=ctas, float8=plan.float8, **_pipeline_defaults(plan, size, groups)
                )
                if plan.options.invariant:  # what changes bits follows from the score program alone
                    scored = plan.score is not None and static_reference(plan) is None
                    tile = dataclasses.replace(tile, lazy_rescale=True, reverse_kv=scored)
                if plan.float8:
                    tile = dataclasses.replace(tile, sum_columns=SUM_COLUMNS)
                if ctas > 1:
                    tile = dataclasses.replace(tile, out_slots=1)
                if stages == 1:
                    tile = dataclasses.replace(tile, prefetch_key_barrier=False)
                if (parts > 1 or plan.crowded) and size == 256:  # two tiles of P do not fit registers beside the output
                    tile = dataclasses.replace(tile, overlap=False)
                found += _with_staged_slots(tile, staged_dtype)
    # Of tiles with as many queries, those that stage an array come before those that do not.
    found.sort(key=lambda t: (order.index(t.groups), staged_dtype is not None and t.staged_slots == 0))
    if plan.q_len <= 64 and plan.options.block_q is None:
        found.sort(key=lambda t: t.groups != 1)
    return tuple(dict.fromkeys(found))


def invariant_keys(plan: KernelPlan) -> int:
    """Keys of a tile of an invariant call, which are a part of its bits: whatever fits beside them, by head dims."""
    return 64 if max(plan.head_dim, plan.value_dim) > 128 else 128


def _rings(plan: KernelPlan, size: int) -> tuple[tuple[int, int, int], ...]:
    """RINGS of a size, with LONG_RING first where rows are long (lab/logs/hopper.md)."""
    if plan.float8:
        return tuple(dict.fromkeys((*FLOAT8_RINGS, *RINGS[size])))
    if size != 128 or (plan.score is not None and not plan.weighted) or parts_of(plan) > 1:
        return RINGS[size]
    # Under a causal-like mask half of the keys count.
    causal = dq_order.is_triangle(plan) and plan.q_len >= plan.kv_len
    tiles = plan.kv_len / 128 * (1 if dq_order.is_full(plan) else 0.5 if causal else 0)
    return tuple(dict.fromkeys((LONG_RING, *RINGS[size]))) if tiles >= LONG_ROWS else RINGS[size]


def _allowed(size: int, option: int | None, mask_block: int | None) -> bool:
    """Whether the option and the size of mask blocks (None: any, no block mask) allow a tile of `size` tokens."""
    return (option is None or option == size) and (mask_block is None or mask_block % size == 0)


def _ring_size(head_dim: int, value_dim: int) -> int:
    """The smallest key of RINGS that is not below `head_dim` and `value_dim`, the columns of a CTA."""
    return next(n for n in RINGS if max(head_dim, value_dim) <= n)


def _pipeline_defaults(plan: KernelPlan, size: int, groups: int) -> dict[str, bool]:
    """How CTAs get work items and how steps overlap: fields of ForwardTile by name, for a size of RINGS or SPLIT."""
    scheduler = {"persistent": False, "dynamic_scheduler": True}
    if plan.float8:  # the softmax beside P V would take the registers that the product is added from
        return {
            **scheduler,
            "overlap": False,
            "ping_pong": groups == 2,
            "prefetch_key_barrier": True,
            "reverse_kv": plan.score is not None,
        }
    # A static reference means a soft cap, whose tanh doubles the exponentials of a step.
    bounded = static_reference(plan) is not None
    static = bounded and not plan.weighted
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
    if size == SPLIT:  # the CTAs of a cluster have to take the same items, so the hardware deals them out
        scheduler = {"persistent": False, "dynamic_scheduler": False}
    return {
        **scheduler,
        "ping_pong": groups == 2 and size < 256 and (plan.blocks is not None or plan.weighted > bounded) and not static,
        "prefetch_key_barrier": not static,
        "reverse_kv": scored,
    }


def _staged_dtype(plan: KernelPlan) -> str | None:
    """dtype of the captured array of score_mod that goes through shared memory (programs/staging.py)."""
    load = staging.staged_load(plan, plan.score)
    return None if load is None or plan.score is None else plan.score.captures[load.capture].dtype


def _with_staged_slots(tile: ForwardTile, staged_dtype: str | None) -> list[ForwardTile]:
    """`tile` with as many staged slots as fit, then with none; without those that do not fit a CTA."""
    if staged_dtype is None:
        return [tile] if tile.fits else []
    made = [dataclasses.replace(tile, staged_slots=n, staged_dtype=staged_dtype) for n in (2, 1, 0)]
    fitting = [t for t in made if t.fits]
    return [t for t in fitting if t is fitting[0] or t.staged_slots == 0]
