"""Chooses the tiles of the xla backend: how many heads, batch entries, queries and keys one step of its loops computes.

Sizes are in tokens, heads and batch entries. On a CPU a tile of scores, and the arrays of its size that are computed
from it, fit the second-level cache.
"""

import dataclasses
from collections.abc import Sequence

from flexjax.backends.target import Target
from flexjax.integers import cdiv
from flexjax.plan.kernel_plan import KernelPlan
from flexjax.rewrites.pages import whole_pages

# Scores of a tile on a CPU, over all its heads and batch entries: without a block mask, and with key blocks from its
# lists.
CPU_TILE = 1 << 18
CPU_TILE_OF_LISTS = 1 << 16
# Scores up to which a CPU takes several key blocks of a list at a time. More blocks at a time must be copied together
# from separate places, and the last step of a row also computes blocks that are not there. Blocks of 128 one by one
# take 0.4 to 0.9 of the time of four at a time.
CPU_CHUNK = 1 << 14
# A call on a CPU with at most SHORT_QUERIES queries, such as a step of decoding, is short. Its visits have one batch
# entry, so that the bits of a row do not depend on the batch, and `short_keys` keys, in the range SHORT_KEYS. Visits
# that lengths or masks may cut have SHORT_TAIL keys at most.
SHORT_QUERIES, SHORT_KEYS = 64, (256, 1024)
SHORT_TAIL = 512
# Float32 numbers of keys and values, and of scores, that a visit of a short call may have beyond the least: 1 MB, which
# stays in the second-level cache.
SHORT_NUMBERS = 1 << 18
# How many times as many keys a visit of a short call has for bfloat16 and float16 without a block mask, if no length
# may cut it.
NARROW_VISITS = 4
ACCELERATOR_TILE = 1 << 27  # scores of a tile on other platforms: 512 MB in float32
# Into how many steps an accelerator cuts the longest list of key blocks, so that shorter lists take fewer steps.
ROW_STEPS = 4
MAX_CHUNK = 8  # key blocks of a list at a time, unless the options ask for more
# Key blocks of a list at a time where keys are in pages. It does not follow the longest list, so a short request
# computes that many too.
PAGED_CHUNK = 4
DENSE_QUERIES, DENSE_KEYS = 256, 512  # of a tile without a block mask on a CPU
ACCELERATOR_DENSE_QUERIES, ACCELERATOR_DENSE_KEYS = 2048, 2048  # on other platforms
# The most scores, over all batch entries and heads, of a call that an accelerator computes in one step: 256 MB in
# float32.
ONE_STEP = 1 << 26


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes of the tiles of one pass, whose scores are [batch, heads, block_q, chunk * block_kv], or fewer key blocks.

    tail                        key blocks of a tile that key lengths or a block mask may cut: chunk, or fewer in the
                                forward pass of few
                                queries on a CPU; without a block mask such tiles have one block
    rows, columns               query blocks and key blocks of the attention matrix; the last may reach past the end
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

    def __str__(self) -> str:
        """As explain prints it: queries x keys of a tile, and what of the batch and the heads is in it."""
        many = ((self.batch, "batch entries"), (self.heads, "heads"))
        of = " and ".join(f"{n} {name}" for n, name in many if n > 1)
        return f"forward {self.block_q} x {self.chunk * self.block_kv}" + (f", of {of}" if of else "")

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
        """The number of tile rows."""
        return self.batch_groups * self.head_groups * self.rows


def choose_tile_sizes(plan: KernelPlan, target: Target, backward: bool = False) -> TileSizes:
    """The tiles of a pass: as many heads, then batch entries, then key blocks as fit the scores of a tile.

    `backward` chooses the pass whose tile options count. Without a block mask these options set the size of a tile, at
    most the sequence lengths and cut to a divisor of the runs of an origin. Under a block mask a tile has the queries
    of one mask block, and the option for keys, in whole mask blocks, sets `chunk`.

    A forward pass of a call that `is_short` has tiles of one batch entry, and, without options, of `short_keys` keys,
    whatever the batch and the lists of others are. With keys in pages the size of a tile does not depend on how many
    entries, pages and keys there are, so that the bits of a request do not depend on the other requests.
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
        # A call with fewer queries or keys than a block, as in decoding, computes those alone.
        block_q, block_kv = min(plan.blocks.block_q, max(plan.q_len, 1)), plan.blocks.block_kv
        if not plan.page:  # with pages tiles do not depend on how many keys there are
            block_kv = min(block_kv, max(plan.kv_len, 1))
        lists_batch, lists_heads = plan.blocks.batch, plan.blocks.heads
        widest = max(plan.blocks.partial, plan.blocks.full, 1)
        if lists_heads == 1 and lists_batch == 1:
            widest = min(widest, cdiv(plan.kv_len, block_kv))
    area = block_q * block_kv
    groups = (plan.group, plan.q_heads // plan.extra_heads) if plan.extra_heads else (plan.group,)
    heads = 1 if lists_heads > 1 else largest_divisor(plan.q_heads, budget // area, groups)
    batch = 1
    # A tile of several batch entries is as long as the longest, and has one set of positions and of lists.
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
    """Whether most of the call's time goes into reading keys and values; pages have tile sizes of their own."""
    return target.platform == "cpu" and plan.q_len <= SHORT_QUERIES and not plan.page


def short_keys(plan: KernelPlan) -> int:
    """Keys of a visit of a short call: the largest power of two in SHORT_KEYS for which SHORT_NUMBERS hold."""
    # A visit takes some microseconds whatever its size, so few large ones are faster at full lengths; one token and
    # 4096 keys of two heads take 0.4 to 0.7 of the time of visits of 256.
    least, most = SHORT_KEYS
    numbers = max(plan.kv_heads * (plan.head_dim + plan.value_dim), plan.q_heads * plan.q_len, 1)
    keys = most
    while keys > least and keys * numbers > SHORT_NUMBERS:
        keys //= 2
    return keys


def scores_of(plan: KernelPlan) -> int:
    """Over all batch entries and query heads, masked or not."""
    return plan.batch * plan.q_heads * plan.q_len * plan.kv_len


def _within_runs(plan: KernelPlan, block_q: int, block_kv: int) -> tuple[int, int]:
    """Each cut to a divisor of the runs of the plan's origin, along axes with several runs."""
    origin = plan.origin
    if origin is not None and origin.query_runs > 1:
        block_q = largest_divisor(origin.query_run, block_q)
    if origin is not None and origin.key_runs > 1:
        block_kv = largest_divisor(origin.key_run, block_kv)
    return block_q, block_kv


def tile_candidates(plan: KernelPlan, target: Target) -> list[dict[str, int]]:
    """Tiles that autotuning tries, with the same tile for both passes. The default of the forward pass comes first.

    plan   as the pass runs it, on larger blocks (larger_blocks.py)
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
    """The size of a block if `length` is cut into as few even blocks as possible of at most `most`."""
    parts = max(1, cdiv(length, most))
    return max(1, cdiv(length, parts))


def largest_divisor(number: int, most: int, groups: Sequence[int] = ()) -> int:
    """The largest divisor of `number` that is at most `most`; 1 if there is none.

    It is a multiple or a divisor of each of `groups` (query heads of one key head), so that a tile has whole groups or
    lies within one.
    """
    fit = [d for d in range(1, number + 1) if number % d == 0 and all(d % g == 0 or g % d == 0 for g in groups)]
    return max([d for d in fit if d <= max(most, 1)], default=1)
