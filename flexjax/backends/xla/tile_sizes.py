"""Chooses the tiles of the xla backend: how many heads, batch entries, queries and keys one step of its loops computes.

Sizes are in tokens, heads and batch entries. On a CPU a tile of scores, and the arrays of its size that are computed from it, fit
the second-level cache.
"""

import dataclasses
from collections.abc import Sequence

from flexjax.backends.target import Target
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.plan.pages import whole_pages

CPU_TILE = 1 << 18
"""Scores of a tile on a CPU, over all its heads and batch entries, without a block mask."""
CPU_TILE_OF_LISTS = 1 << 16
"""Scores of a tile on a CPU, over all its heads and batch entries, where its key blocks come from the lists of a block mask."""
CPU_CHUNK = 1 << 14
"""Scores up to which a CPU takes several key blocks of a list at a time. More blocks at a time must be copied together from
separate places, and the last step of a row also computes blocks that are not there. Blocks of 128 one by one take 0.4 to 0.9 of
the time of four at a time."""
SHORT_QUERIES, SHORT_KEYS = 64, (256, 1024)
"""A call on a CPU with at most SHORT_QUERIES queries, such as a step of decoding, is short. Its visits have one batch entry, so that the
bits of a row do not depend on the batch, and so many keys, the least and the most of `short_keys`. Visits that lengths or masks may cut
have SHORT_TAIL at most."""
SHORT_TAIL = 512
"""Keys of a visit that lengths or a mask may cut, in a call on a CPU with at most SHORT_QUERIES queries."""
SHORT_NUMBERS = 1 << 18
"""Float32 numbers of keys and values, and of scores, that a visit of a short call may have beyond the least: 1 MB, which stays in the
second-level cache."""
NARROW_VISITS = 4
"""How many times as many keys as others a visit of a short call without a block mask has for bfloat16 and float16, if no length may
cut it."""
ACCELERATOR_TILE = 1 << 27
"""Scores of a tile on other platforms: 512 MB in float32."""
ROW_STEPS = 4
"""Into how many steps an accelerator cuts the longest list of key blocks, so that shorter lists take fewer steps."""
MAX_CHUNK = 8
"""The most key blocks of a list that are taken at a time, unless the options ask for more."""
PAGED_CHUNK = 4
"""The most key blocks of a list that are taken at a time where keys are in pages, except for `short_keys`. It does not follow the longest
list, so a short request computes that many too."""
DENSE_QUERIES, DENSE_KEYS = 256, 512
"""Queries and keys of a tile without a block mask on a CPU."""
ACCELERATOR_DENSE_QUERIES, ACCELERATOR_DENSE_KEYS = 2048, 2048
"""The same on other platforms, where a call of at most ONE_STEP scores has one tile."""
ONE_STEP = 1 << 26
"""The most scores, over all batch entries and heads, of a call that an accelerator computes in one step: 256 MB in float32."""


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes of the tiles of one pass. The scores of a tile are [batch, heads, block_q, chunk * block_kv], or fewer key blocks
    where `tail` says so, or where some are left over.

    batch, heads                batch entries and query heads of a tile
    block_q, block_kv           queries of a tile, keys of a key block
    chunk                       how many key blocks a tile has
    tail                        how many key blocks a tile has under a block mask where key lengths or the mask may cut it: chunk,
                                or fewer in the forward pass of few queries on a CPU. Without a block mask, tiles that key lengths
                                may cut have one block, whatever `tail` is
    rows, columns               how many query blocks and key blocks the attention matrix has; the last of each may reach past the
                                end
    batch_groups, head_groups   how many groups of `batch` entries and of `heads` heads there are
    """

    batch: int
    heads: int
    block_q: int
    block_kv: int
    chunk: int
    tail: int
    rows: int
    columns: int
    batch_groups: int
    head_groups: int

    @property
    def padded_q(self) -> int:
        """The query length, rounded up to whole query blocks."""
        return self.rows * self.block_q

    @property
    def padded_kv(self) -> int:
        """The key length, rounded up to whole key blocks."""
        return self.columns * self.block_kv

    @property
    def steps(self) -> int:
        """The number of tile rows: one for each query block of each group of heads of each group of batch entries."""
        return self.batch_groups * self.head_groups * self.rows


def choose_tile_sizes(plan: KernelPlan, target: Target, backward: bool = False) -> TileSizes:
    """The tiles of a pass: as many heads, then batch entries, then key blocks as fit the number of scores that a tile may have.

    That number depends on the platform of the target and on whether there is a block mask (the constants above). Heads are 1
    where the mask's lists have heads; batch entries are 1 where they have heads or batch entries, where a tile lacks some heads,
    where an origin gives each batch entry positions of its own, with keys in pages, or on a CPU with lengths, because a tile of
    several entries is as long as the longest.

    `backward` chooses the pass whose tile options count: block_q_bwd and block_kv_bwd in place of block_q and block_kv. Without a
    block mask these options, if given, set the size of a tile, at most the sequence lengths and cut to a divisor of the runs of
    an origin, and `chunk` is 1 unless the call is short. Under a block mask a tile has the queries of one mask block (or all
    queries, if these are fewer); the option for keys, rounded down to whole mask blocks (at least one, at most all, or MAX_CHUNK
    in pages), sets `chunk`; without that option `chunk` is at most MAX_CHUNK and the longest list, and on other platforms than a
    CPU a fourth of that list.

    A forward pass of a call that `is_short` has tiles of one batch entry, and, without options, of `short_keys` keys (whole mask
    blocks under a block mask), whatever the batch and the lists of others are. Tiles that key lengths, or a block mask, may cut have
    at most SHORT_TAIL keys, or one block if a block is larger: `tail` mask blocks, or, without a block mask, one of the `chunk`
    blocks of a larger tile. For bfloat16 and float16 and without a block mask, `chunk` is then NARROW_VISITS times as large, at most
    all whole blocks.

    With keys in pages a tile has one batch entry, and key blocks are whole pages or whole parts of one. The size of a tile then
    does not depend on how many entries, pages and keys there are, so that the bits of a request do not depend on the other
    requests. On a CPU few queries have the `short_keys` there too, under a block mask.
    """
    options = plan.options
    asked_q = options.block_q_bwd if backward else options.block_q
    asked_kv = options.block_kv_bwd if backward else options.block_kv
    on_cpu = target.platform == "cpu"
    has_lists = plan.blocks is not None
    few_queries = on_cpu and plan.q_len <= SHORT_QUERIES and not backward
    short = few_queries and is_short(plan, target)
    chunk = 1
    budget = (CPU_TILE_OF_LISTS if has_lists else CPU_TILE) if on_cpu else ACCELERATOR_TILE
    if plan.blocks is None:
        most_q, most_kv = DENSE_QUERIES, DENSE_KEYS
        if not on_cpu and scores_of(plan) <= ONE_STEP and not plan.page:
            most_q, most_kv, budget = plan.q_len, plan.kv_len, ONE_STEP
        elif not on_cpu:
            most_q, most_kv = ACCELERATOR_DENSE_QUERIES, ACCELERATOR_DENSE_KEYS
        block_q = min(asked_q or even_block(plan.q_len, max(most_q, 1)), max(plan.q_len, 1))
        block_kv = short_keys(plan) if short else even_block(plan.kv_len, max(most_kv, 1))
        block_kv = min(asked_kv or block_kv, max(plan.kv_len, 1))
        if plan.page:  # the same for all numbers of pages, so that bits are
            block_kv = whole_pages(plan.page, asked_kv or DENSE_KEYS)
        if short and block_kv > SHORT_TAIL and block_kv % SHORT_TAIL == 0:
            block_kv, chunk = SHORT_TAIL, block_kv // SHORT_TAIL
        if short and asked_kv is None and plan.dtype in ("bfloat16", "float16"):
            chunk = min(NARROW_VISITS * chunk, max(1, plan.kv_len // block_kv))
        block_q, block_kv = _within_runs(plan, block_q, block_kv)
        lists_batch = lists_heads = widest = 1
    else:
        # A call with fewer queries than a block, as in decoding, computes those queries alone.
        block_q, block_kv = min(plan.blocks.block_q, max(plan.q_len, 1)), plan.blocks.block_kv
        lists_batch, lists_heads = plan.blocks.batch, plan.blocks.heads
        widest = max(plan.blocks.partial, plan.blocks.full, 1)
        if lists_heads == 1 and lists_batch == 1:
            widest = min(widest, cdiv(plan.kv_len, block_kv))
    area = block_q * block_kv
    groups = (plan.group, plan.q_heads // plan.extra_heads) if plan.extra_heads else (plan.group,)
    heads = 1 if lists_heads > 1 else largest_divisor(plan.q_heads, budget // area, groups)
    batch = 1
    same_positions = plan.origin is None or plan.origin.rows == 1
    if (
        lists_batch == 1
        and lists_heads == 1
        and heads == plan.q_heads
        and same_positions
        and not plan.page
        and not (on_cpu and any(plan.lengths))
        and not short
    ):
        batch = largest_divisor(plan.batch, budget // (area * heads))
    most = CPU_CHUNK if on_cpu else budget
    together = widest if on_cpu else cdiv(widest, ROW_STEPS)
    if has_lists:
        chunk = max(1, min(most // (area * heads * batch), together, MAX_CHUNK))
    if has_lists and short:
        chunk = max(1, min(short_keys(plan) // block_kv, cdiv(plan.kv_len, block_kv)))
    if has_lists and plan.page:
        chunk = max(1, min(most // (area * heads), PAGED_CHUNK))
        chunk = max(chunk, short_keys(plan) // block_kv) if few_queries else chunk
    if has_lists and asked_kv:
        chunk = max(1, min(asked_kv // block_kv, MAX_CHUNK if plan.page else cdiv(plan.kv_len, block_kv)))
    tail = min(chunk, max(1, SHORT_TAIL // block_kv)) if few_queries else chunk
    return TileSizes(
        batch,
        heads,
        block_q,
        block_kv,
        chunk,
        tail,
        cdiv(plan.q_len, block_q),
        cdiv(plan.kv_len, block_kv),
        plan.batch // batch,
        plan.q_heads // heads,
    )


def is_short(plan: KernelPlan, target: Target) -> bool:
    """Whether the target is a CPU and the call has at most SHORT_QUERIES queries, so that most of its time goes into reading keys
    and values. False for keys in pages, which have tile sizes of their own.
    """
    return target.platform == "cpu" and plan.q_len <= SHORT_QUERIES and not plan.page


def short_keys(plan: KernelPlan) -> int:
    """Keys of a visit of a short call: a power of two in the range SHORT_KEYS, the largest for which SHORT_NUMBERS hold, else the least.

    It follows from heads, head dims and queries alone. A visit takes some microseconds whatever its size, so few large ones are faster
    at full lengths; one token and 4096 keys of two heads take 0.4 to 0.7 of the time of visits of 256.
    """
    least, most = SHORT_KEYS
    numbers = max(plan.kv_heads * (plan.head_dim + plan.value_dim), plan.q_heads * plan.q_len, 1)
    keys = most
    while keys > least and keys * numbers > SHORT_NUMBERS:
        keys //= 2
    return keys


def scores_of(plan: KernelPlan) -> int:
    """The number of scores of a call, over all batch entries and query heads, masked or not."""
    return plan.batch * plan.q_heads * plan.q_len * plan.kv_len


def _within_runs(plan: KernelPlan, block_q: int, block_kv: int) -> tuple[int, int]:
    """(block_q, block_kv), each cut to the largest divisor of the runs of the plan's origin that is not above it; unchanged
    without an origin, or along an axis with one run.
    """
    origin = plan.origin
    if origin is not None and origin.query_runs > 1:
        block_q = largest_divisor(origin.query_run, block_q)
    if origin is not None and origin.key_runs > 1:
        block_kv = largest_divisor(origin.key_run, block_kv)
    return block_q, block_kv


def tile_candidates(plan: KernelPlan, target: Target) -> list[dict[str, int]]:
    """Tiles that autotuning tries, each a dict of block_q, block_kv, block_q_bwd and block_kv_bwd in tokens, with the same tile
    for both passes. The default of the forward pass comes first.

    plan   as the pass runs it, on larger blocks (larger_blocks.py)

    With a block mask, candidates differ in how many key blocks a tile has, 1 to 16 in powers of two, at most all. Without one,
    they have about as many keys as queries or twice as many, with 64 to 1024 queries in powers of two, up to about the longer
    length, made even by `even_block`.
    """
    default = choose_tile_sizes(plan, target)
    width = default.chunk * default.block_kv
    if plan.blocks is not None:
        chunks = [d for d in (1, 2, 4, 8, 16) if d <= default.columns]
        shapes = [(default.block_q, d * default.block_kv) for d in chunks]
    else:
        sides = [side for side in (64, 128, 256, 512, 1024) if side < 2 * max(plan.q_len, plan.kv_len, 32)]
        shapes = [(even_block(plan.q_len, q), even_block(plan.kv_len, kv)) for q in sides for kv in (q, 2 * q)]
    return [
        {"block_q": q, "block_kv": kv, "block_q_bwd": q, "block_kv_bwd": kv}
        for q, kv in dict.fromkeys([(default.block_q, width), *shapes])
    ]


def even_block(length: int, most: int) -> int:
    """The size of a block if `length` is cut into as few blocks as possible of at most `most`, all of one size but the last,
    which may be smaller by less than the number of blocks.
    """
    parts = max(1, cdiv(length, most))
    return max(1, cdiv(length, parts))


def largest_divisor(number: int, most: int, groups: Sequence[int] = ()) -> int:
    """The largest divisor of `number` that is at most `most`; 1 if there is none. For numbers of heads or batch entries of a tile, and
    for tokens of a run.

    groups   sizes of groups of heads (query heads of one key head, query heads of one head of key_extra): the divisor is a multiple or a
             divisor of each, so that a tile has whole groups or lies within one
    """
    fit = [d for d in range(1, number + 1) if number % d == 0 and all(d % g == 0 or g % d == 0 for g in groups)]
    return max([d for d in fit if d <= max(most, 1)], default=1)
