"""Which calls the decode kernel runs, and its configuration: work items, tiles, shared memory.

All but the size of the grid follows from the packed rows, the head dims, the dtypes, the page size, the mods and the
wanted results, never from the batch, from the length of the keys or from the GPU. A *chunk* of keys is what one work
item sums, so its size fixes the order of sums, and the bits of a request must not depend on what else is in the call.
"""

import dataclasses
import math
import typing

from flexjax.analysis.large_scores import may_be_large_product
from flexjax.backends.mosaic_gpu.forward.hopper_tiles import wgmma_dim
from flexjax.backends.mosaic_gpu.machine.columns import WIDEST_CTA, ctas_of
from flexjax.backends.mosaic_gpu.machine.reference_gpu import REFERENCE_SMS
from flexjax.backends.mosaic_gpu.machine.shared_memory import (
    SHARED_MEMORY,
    Barriers,
    Part,
    PlainArray,
    SwizzledTiles,
    scratch_bytes,
)
from flexjax.integers import cdiv, round_up
from flexjax.plan.kernel_plan import KernelPlan

ROWS = 64  # rows of a tile: what one WGMMA computes
FEW_ROWS = 16
"""The most packed rows for which a chunk has CHUNK_BYTES of keys and values; with more rows it has twice as many."""
CHUNK_BYTES = 1 << 19
"""Bytes of K and V of a chunk: 1024 tokens at head dim 128. The partial results of 4 rows are 0.8% of it."""
TILE_BYTES = 1 << 15
"""Bytes of the keys and values of one tile: 64 keys at head dim 128, 128 keys at 64 or of 8 bits. A step then has at
least 1650 clocks of an SM's share of the memory's bandwidth.
"""
MOST_STAGES = 6
BARRIER_BYTES = 512  # bytes kept free for the barriers of a CTA, 8 bytes each, more than they take
BYTE_PIECE = 128  # bytes of a row of a swizzled piece
MOST_SUMS = 2048
"""The most numbers, `columns` times value dim, that each warp sums where `transposed`: 64 registers a thread."""
MOST_QUERIES = 1024  # the most numbers of packed queries that each warp keeps in registers there: 16 registers a thread
COPY_ROWS = 8  # a copy starts at a multiple of this many rows of keys or values


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """One configuration of the decode kernel.

    A CTA has two consumer warpgroups, which compute alternate key tiles of a work item, and a producer. Each consumer
    has one running softmax for the packed rows; where the tile is `transposed` each of its warps has one.
    """

    used_rows: int  # packed rows: queries times query heads of a key head, at most ROWS
    block_kv: int  # keys of a tile
    chunk: int  # keys of a work item, a multiple of block_kv
    stages: int  # slots of the rings of key and value tiles: even, so that one warpgroup always reads a slot
    query_slots: int  # slots of the ring of packed queries
    head_dim: int  # rounded up to what WGMMA takes, as value_dim
    value_dim: int
    # keys that one copy brings: block_kv, or for a cache in pages the greatest common divisor of a page and a tile
    page_rows: int
    stored: str | None = None  # "int8" or "float8_e4m3fn" for a quantised cache
    lazy_rescale: bool = True  # rescale only when a row maximum has grown by a factor of 2^8
    straight: bool = False  # whether a quantised cache may be `transposed`: not for products that may be large
    statistics: int = 2  # numbers of a row beside out: reference, sum of exponentials, sums of expectations
    # the most CTAs of the grid, those that the GPU holds; of the reference GPU until support.py replaces it
    programs: int = REFERENCE_SMS

    groups = 2  # consumer warpgroups
    consumer_registers = 232
    producer_registers = 40

    @property
    def copy_rows(self) -> int:
        return COPY_ROWS

    @property
    def transposed(self) -> bool:
        """Whether bytes are multiplied straight from registers, keys as rows (fragments.py), for few packed rows."""
        whole = self.head_dim % BYTE_PIECE == 0 and self.value_dim % BYTE_PIECE == 0
        # the sums must fit the registers of each warp, which has none of expectations
        straight = self.stored is not None and self.straight and self.statistics == 2
        return straight and whole and self.columns * self.value_dim <= MOST_SUMS

    @property
    def columns(self) -> int:
        """The packed rows rounded up to a multiple of 8: the columns of S^T where the tile is `transposed`."""
        return round_up(self.used_rows, 8)

    @property
    def holds_queries(self) -> bool:
        """Whether a `transposed` tile's warps keep the packed queries in registers over an item."""
        return self.columns * self.head_dim <= MOST_QUERIES

    @property
    def query_rows(self) -> int:
        """Packed rows of a query slot."""
        return self.columns if self.transposed else ROWS

    @property
    def stored_rows(self) -> int:
        """Packed rows of each key head in global memory."""
        return self.used_rows if self.used_rows <= 8 else self.columns

    @property
    def tiles_of_chunk(self) -> int:
        return self.chunk // self.block_kv

    @property
    def copies(self) -> int:
        """Copies that fill one slot of keys or of values."""
        return self.block_kv // self.page_rows


class DecodeScratch(typing.NamedTuple, typing.Generic[Part]):
    """Shared memory of a CTA of the decode kernel."""

    query: Part  # [query_slots, query_rows, D] packed queries
    key: Part  # [stages, block_kv, D]; bytes of a quantised cache, row-major unless `transposed`
    value: Part  # [stages, block_kv, E]
    wide_key: Part | None  # [groups, block_kv, D] the tile that each warpgroup has widened, unless `transposed`
    wide_value: Part | None
    # [used_rows, E] float32, the second warpgroup's sums; `transposed`: [8, used_rows, E], those of each warp of both
    other: Part
    other_stats: Part  # [statistics, ROWS] float32, as DecodeOutputs has them; [8, 2, columns]
    query_full: Part
    key_full: Part
    value_full: Part
    query_free: Part
    key_free: Part
    value_free: Part
    other_full: Part  # `other` and `other_stats` are written, are read
    other_free: Part


def decode_scratch(tile: DecodeTile, dtype: str = "bfloat16") -> DecodeScratch:
    """The shared memory of a CTA with the configuration `tile`; `dtype` is that of the products."""
    narrow, warps = tile.stored is not None, 4 * tile.groups

    def tiles(count: int, dim: int) -> SwizzledTiles:
        return SwizzledTiles((count, tile.block_kv, dim), dtype)

    def ring(dim: int) -> SwizzledTiles | PlainArray:
        if tile.transposed:
            return SwizzledTiles((tile.stages, tile.block_kv, dim), "int8")
        return PlainArray((tile.stages, tile.block_kv, dim), "int8") if narrow else tiles(tile.stages, dim)

    queries = (tile.query_slots, tile.query_rows, tile.head_dim)
    widens = narrow and not tile.transposed
    return DecodeScratch(
        query=PlainArray(queries, dtype) if tile.transposed else SwizzledTiles(queries, dtype),
        key=ring(tile.head_dim),
        value=ring(tile.value_dim),
        wide_key=tiles(tile.groups, tile.head_dim) if widens else None,
        wide_value=tiles(tile.groups, tile.value_dim) if widens else None,
        other=PlainArray(((warps,) if tile.transposed else ()) + (tile.used_rows, tile.value_dim), "float32"),
        other_stats=PlainArray((warps, 2, tile.columns) if tile.transposed else (tile.statistics, ROWS), "float32"),
        query_full=Barriers(tile.query_slots),
        key_full=Barriers(tile.stages, arrivals=tile.copies),
        value_full=Barriers(tile.stages, arrivals=tile.copies),
        query_free=Barriers(tile.query_slots, arrivals=tile.groups),
        key_free=Barriers(tile.stages),
        value_free=Barriers(tile.stages),
        other_full=Barriers(),
        other_free=Barriers(),
    )


def decode_fits(tile: DecodeTile) -> bool:
    """Whether a CTA has room in shared memory for the configuration `tile`."""
    return scratch_bytes(decode_scratch(tile)) + BARRIER_BYTES <= SHARED_MEMORY


def chunk_of(rows: int, head_dim: int, value_dim: int, block_kv: int) -> int:
    """Keys of a chunk: CHUNK_BYTES of keys and values in 16 bits, or twice as many for many packed rows."""
    # the bytes of a quantised cache count as 16 bits too, so that its chunks are the same
    size = CHUNK_BYTES * (1 if rows <= FEW_ROWS else 2)
    return round_up(max(1, size // ((head_dim + value_dim) * 2)), block_kv)


def decode_tile(plan: KernelPlan) -> DecodeTile:
    """The configuration of a plan that is not refused, before the option `split` and the GPU's CTAs."""
    tile = _fitting_tile(plan)
    assert tile is not None
    return tile


def _fitting_tile(plan: KernelPlan) -> DecodeTile | None:
    """The configuration with tiles of 128 keys, or with 64; None if not even two slots fit."""
    made = (_tile_of(plan, block_kv) for block_kv in (128, 64))
    return next((tile for tile in made if tile.stages >= tile.groups), None)


def _tile_of(plan: KernelPlan, block_kv: int) -> DecodeTile:
    """The configuration with tiles of `block_kv` keys and as many slots as fit; `stages` is 0 where two do not."""
    head_dim, value_dim = wgmma_dim(plan.head_dim), wgmma_dim(plan.value_dim)
    rows, page = plan.q_len * plan.group, plan.page
    item_bytes = 2 if plan.cache_dtype is None else 1
    tile = DecodeTile(
        used_rows=rows,
        block_kv=block_kv,
        chunk=chunk_of(rows, head_dim, value_dim, block_kv),
        stages=2,
        query_slots=2,
        head_dim=head_dim,
        value_dim=value_dim,
        page_rows=math.gcd(page, block_kv) if page else block_kv,
        stored=plan.cache_dtype,
        lazy_rescale=not plan.max_scores,
        straight=not may_be_large_product(plan.score),
        statistics=2 + plan.expectations,
    )
    if not decode_fits(tile):
        tile = dataclasses.replace(tile, query_slots=1)
    left = SHARED_MEMORY - BARRIER_BYTES - scratch_bytes(decode_scratch(dataclasses.replace(tile, stages=0)))
    slot_bytes = block_kv * (head_dim + value_dim) * item_bytes
    stages = min(MOST_STAGES, max(0, left) // slot_bytes) if block_kv == 64 or slot_bytes <= TILE_BYTES else 0
    return dataclasses.replace(tile, stages=stages - stages % tile.groups)


def decode_refuses(plan: KernelPlan) -> str | None:
    """Why the decode kernel for Hopper cannot run a plan, in a sentence; None where it can."""
    reason = refuses_call(plan)
    if reason is None and _fitting_tile(plan) is None:
        dims = f"head dims {plan.head_dim} and {plan.value_dim}"
        rows = plan.q_len * plan.group
        return (
            f"Its tiles of {plan.cache_dtype or plan.dtype} with {dims} do not fit shared memory beside "
            f"{rows} packed rows."
        )
    return reason


def refuses_call(plan: KernelPlan) -> str | None:
    """Why no decode kernel can run a plan, whatever its tile; None where one can if a tile fits."""
    rows = plan.q_len * plan.group
    if rows > ROWS:
        return f"{rows} packed rows (queries times query heads of a key head) are more than {ROWS}."
    if plan.dtype == "float32":
        return "It takes inputs of 16 bits, not float32."
    if ctas_of(plan) > 1:
        return f"It takes head dims up to {WIDEST_CTA}, not {plan.head_dim} and {plan.value_dim}."
    if plan.dropout is not None:
        return "It has no dropout."
    if plan.weighted and plan.cache_dtype is not None:
        return "It takes no weights beside a quantised cache."
    if plan.exact_captures:
        return "It does not return the rounding error of out, which gradients of captured arrays need."
    if plan.extra_dim:
        return "It takes no extra features."
    if plan.options.block_q or plan.options.block_kv or plan.options.num_stages:
        return "block_q, block_kv and num_stages are options of the forward kernel."
    if plan.origin is not None and not plan.origin.single:
        return "It takes an origin of one run of queries and one of keys."
    if plan.page % COPY_ROWS:
        return f"Pages of {plan.page} keys are no multiple of {COPY_ROWS}."
    if plan.cache_dtype is not None and (plan.head_dim % 64 or plan.value_dim % 64):
        return (
            "It takes quantised caches of head dims that are multiples of 64, "
            f"not {plan.head_dim} and {plan.value_dim}."
        )
    blocks = plan.blocks
    if blocks is not None and (blocks.from_user_lists or plan.mask is None):
        return "It takes no block mask from user lists or without a mask_mod."
    return None


def chunks(plan: KernelPlan, tile: DecodeTile) -> int:
    """How many chunks the keys of one batch entry of full length have; the last may be shorter."""
    return cdiv(plan.kv_len, tile.chunk)
