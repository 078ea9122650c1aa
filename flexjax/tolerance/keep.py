"""Which blocks stay: the upper bound of each block against the lower bound of each row, and what a tile may lose.

    U   of a block: the new score is no larger, where the score lies in [-c, c] and arrays between their extremes
    L   of a row: the new score of a key that the row surely sees, its witness, is no less; of a tile of queries the
        least of its rows
    share   log(keys of the block) + U - L: the logarithm of what leaving the block out takes of any row, at most

Where the program only adds to the score, both bounds are also taken less scale * query . mean key, which is the same
for all keys of a row; the smaller share of a block counts.

Blocks go in ascending order of their shares while these sum to at most the tolerance, so that each row keeps all but
the tolerance of its probabilities, whatever queries and keys are. Comparisons with NaN are False: such a block stays.
Of weights, U is the logarithm of the largest size of a weight of the block, and L is 0: the tolerance is absolute.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flexjax.analysis.block_grid import BlockGrid, block_grid
from flexjax.analysis.interval_values import Interval
from flexjax.analysis.intervals import bound, decide
from flexjax.integers import cdiv
from flexjax.ir.origin import OriginLayout, Placed, Starts, key_positions, query_positions
from flexjax.ir.program import Program
from flexjax.tolerance.norms import PagedKeys, at_rows, largest, norms, per_query_head, product, rounding_of
from flexjax.tolerance.static import sums_of

Array = jax.Array

AT_ONCE = 1 << 22  # blocks whose bounds are computed at once
SLACK = 1e-3  # added to the logarithm of each share, for what kernels round in exponentials and sums
SLACK_OF_SCORES = 2.0**-20  # a share of both bounds that is added too, for the rounding of large scores
SLACK_OF_SUM = 1e-4  # a share of the sum of shares, for its own rounding


LEAST = 2.0**-126  # the least bound of what a row lost, if it lost anything: a smaller number may underflow


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static: the programs, the sizes, the tolerance."""

    score: Program
    mask: Program | None
    heads: tuple[int, int]  # batch entries and heads of the lists
    sizes: tuple[int, int, int, int]  # q_len, kv_len, block_q, block_kv
    tolerance: float
    scale: float = 1.0  # multiplies query . key before the program
    rounding: float = 0.0  # how far a kernel's score may be from the real one, relative to |scale| |q| |k|
    dtype: str = "float32"
    origin: OriginLayout | None = None
    lists_decide: bool = False  # the blocks that are visible do not follow from the mask
    weighted: bool = False  # the program gives weights, of whose sizes a row may lose a sum of `tolerance`

    @property
    def counts(self) -> tuple[int, int]:
        return cdiv(self.sizes[0], self.sizes[2]), cdiv(self.sizes[1], self.sizes[3])


class Given(typing.NamedTuple):
    """The arrays. Without `query` and `key` the score lies in [-bound, bound], also at witnesses."""

    score_captures: tuple[Array, ...]
    mask_captures: tuple[Array, ...] = ()
    # (partial, full), bool [B or 1, N or 1, rows, columns]; None: every block is full
    flags: tuple[Array, Array] | None = None
    # [B, N, T, D] and [B, M, S, D], and those of the extra features, in the dtype of scores
    query: tuple[Array, ...] = ()
    key: tuple[Array, ...] = ()
    pages: PagedKeys | None = None  # in place of `key`
    bound: Array | None = None  # [B or 1, N or 1, rows or 1, columns or 1]
    sinks: Array | None = None  # [N], which every row sees
    lengths: tuple[Array | None, Array | None] = (None, None)  # int32 [B] each
    starts: Starts | None = None
    # the first batch entry and head of a device's share; positions count in its own entries
    first: tuple[Array, Array] | None = None


class Kept(typing.NamedTuple):
    keep: Array  # bool [B, N, rows, columns]: the visible blocks that stay
    lost: Array  # [B, N, T]: of each row, a bound of the probabilities that left


@functools.lru_cache(maxsize=256)
def compiled(spec: Spec) -> Callable[[Given], Kept]:
    """`kept` as a compiled function."""
    return jax.jit(functools.partial(kept, spec))


class View(typing.NamedTuple):
    """Scores as they are, or less what each row has with the mean of the keys."""

    # [B, N, T], and the least of the rows of each tile, [B, N, rows]
    lower: Array
    least: Array
    # the largest norms of queries and keys of each block, [B, N, rows] and [B, N, columns]; None: `bound` alone
    of_queries: Array | None
    of_keys: Array | None
    # of keys as they are, and the largest product with the mean of each tile, [B, N, rows]; None: scores as they are
    whole: Array | None = None
    moved: Array | None = None


def kept(spec: Spec, given: Given) -> Kept:
    """Chooses the blocks, in chunks of rows of blocks; arrays may be traced."""
    rows, columns = spec.counts
    views = _views(spec, given)
    chunk = functools.partial(_chunk, spec, given, views)
    at_once = max(1, min(rows, AT_ONCE // max(1, math.prod(spec.heads) * columns)))
    if at_once >= rows:
        found = chunk(jnp.arange(rows, dtype=jnp.int32))
    else:
        numbers = jnp.arange(cdiv(rows, at_once) * at_once, dtype=jnp.int32).reshape(-1, at_once)
        parts = lax.map(lambda part: chunk(jnp.minimum(part, rows - 1)), numbers)
        found = tuple(jnp.moveaxis(x, 0, 2).reshape(*spec.heads, -1, x.shape[-1])[:, :, :rows] for x in parts)
    keep, mass, *tiles = found
    tokens = rows * spec.sizes[2]
    spread = lambda x: jnp.repeat(x, spec.sizes[2], 2, total_repeat_length=tokens)[:, :, : spec.sizes[0]]
    # a row whose own lower bound is above that of its tile loses less
    fall = jnp.zeros_like(views[0].lower)
    for view, (tile, best) in zip(views, (jnp.moveaxis(spread(x), -1, 0) for x in tiles), strict=True):
        own = jnp.exp(jnp.minimum(tile - jnp.maximum(view.lower, best), 0))
        fall = jnp.where(tile == -jnp.inf, fall, jnp.maximum(fall, own))
    mass = spread(mass)[..., 0]
    lost = jnp.maximum(mass * fall, LEAST)
    return Kept(keep, jnp.where((mass > 0) & (views[0].lower < jnp.inf), lost, 0).astype(jnp.float32))


# ------------------------------------------------------------------- the two bounds


def _views(spec: Spec, given: Given) -> list[View]:
    lower, of_queries, of_keys = _lower_of_rows(spec, given), *_block_norms(spec, given)
    size = spec.sizes[2]
    views = [View(lower, _of_tiles(lower, size), of_queries, of_keys)]
    if spec.weighted or not given.key or not sums_of(spec.score):
        return views
    # any vector will do
    count = spec.sizes[1] if given.lengths[1] is None else jnp.maximum(given.lengths[1], 1)[:, None, None, None]
    means = tuple(jnp.sum(k, 2, keepdims=True) / count for k in given.key)
    zero = np.zeros((1, spec.sizes[0]), np.int32)
    exact = dataclasses.replace(spec, rounding=rounding_of(spec.dtype, "highest", sum(k.shape[-1] for k in means)))
    moved, error = _scores(exact, given._replace(key=means), zero)
    less = lower - moved - error - SLACK_OF_SCORES * (jnp.abs(lower) + jnp.abs(moved))
    less = jnp.where(lower == jnp.inf, lower, jnp.where(jnp.isfinite(less), less, -jnp.inf))
    of_rest = _block_norms(spec, given._replace(key=tuple(map(jnp.subtract, given.key, means))))[1]
    moved = largest(jnp.abs(moved) + error, size)
    return [*views, View(less, _of_tiles(less, size), of_queries, of_rest, of_keys, moved)]


def _block_norms(spec: Spec, given: Given) -> tuple[Array | None, Array | None]:
    """The largest norms of the queries and keys of each block, [B, N, rows] and [B, N, columns]."""
    if not given.query:
        return None, None
    heads = given.query[0].shape[1]
    if given.pages is not None:
        of_keys = per_query_head(given.pages.largest(spec.sizes[3]), heads, 1)
        return largest(norms(given.query), spec.sizes[2]), of_keys
    # of extra features with heads of their own
    spread = lambda parts: [per_query_head(norms([x]), heads, 1) for x in parts]
    whole = lambda parts: functools.reduce(lambda a, b: jnp.sqrt(a * a + b * b) * (1 + 2.0**-22), spread(parts))
    return largest(norms(given.query), spec.sizes[2]), largest(whole(given.key), spec.sizes[3])


def _limit(spec: Spec, view: View, given: Array | None, q_blocks: Array) -> Array:
    """c: no score of the block is larger in magnitude, [B, N, rows, columns] or what broadcasts to it.

    `given`   score_bound, of scores as they are
    """
    if view.of_queries is None or view.of_keys is None:
        assert given is not None
        return given
    of_queries = abs(spec.scale) * view.of_queries[:, :, q_blocks, None]
    size = of_queries * view.of_keys[..., None, :]
    # a kernel rounds products of keys as they are
    error = size if view.whole is None else size + of_queries * view.whole[..., None, :]
    c = size + spec.rounding * error + 1e-30
    c = jnp.where(jnp.isfinite(c), c, jnp.nan)  # a product of infinite norms may be NaN
    return c if given is None or view.whole is not None else jnp.minimum(c, given)


def _lower_of_rows(spec: Spec, given: Given) -> Array:
    """[B, N, T]: the best witness of each row; -inf without one, 0 for weights, inf for rows that do not exist."""
    q_len, kv_len = spec.sizes[:2]
    batch, heads = spec.heads
    dtype = jnp.dtype(spec.dtype)
    lower = jnp.full((batch, heads, q_len), 0 if spec.weighted else -jnp.inf, dtype)
    if kv_len and not spec.weighted:
        keys = _witnesses(spec, given)
        found = [_lower_at(spec, given, index) for index in keys]
        lower = functools.reduce(jnp.maximum, found, lower)
    if given.sinks is not None:
        sinks = given.sinks.astype(dtype)[None, :, None]
        lower = jnp.maximum(lower, _finite(sinks))
    if given.lengths[0] is not None:
        exists = jnp.arange(q_len, dtype=jnp.int32) < given.lengths[0][:, None, None]
        lower = jnp.where(exists, lower, jnp.inf)
    return lower


def _of_tiles(lower: Array, block_q: int) -> Array:
    """[B, N, rows]: the least lower bound of the rows of each tile of queries."""
    padded = jnp.pad(lower, [(0, 0), (0, 0), (0, -lower.shape[2] % block_q)], constant_values=jnp.inf)
    return padded.reshape(*lower.shape[:2], -1, block_q).min(-1, initial=jnp.inf)


def _placed(spec: Spec, given: Given) -> Placed:
    return spec.origin, given.starts


def _witnesses(spec: Spec, given: Given) -> list[np.ndarray | Array]:
    """Places of keys in the arrays, int32 [1 or B, T] each: the row's own position, the one before, and key 0."""
    q_len, kv_len = spec.sizes[:2]
    rows = np.arange(q_len, dtype=np.int32)[None]
    zero = np.zeros_like(rows)
    if spec.origin is None:
        return [np.minimum(rows, kv_len - 1), np.clip(rows - 1, 0, kv_len - 1), zero]
    b = jnp.arange(spec.heads[0], dtype=jnp.int32)[:, None]
    placed = _placed(spec, given)
    own = query_positions(*placed, b, jnp.asarray(rows)) - key_positions(*placed, b, jnp.zeros_like(b))
    own = jnp.broadcast_to(own, (spec.heads[0], q_len))
    return [jnp.clip(own, 0, kv_len - 1), jnp.clip(own - 1, 0, kv_len - 1), zero]


def _lower_at(spec: Spec, given: Given, index: np.ndarray | Array) -> Array:
    """[B, N, T]: the lower end of the new score of each row at the key `index`, -inf where the row may not see it."""
    q_len = spec.sizes[0]
    batch, heads = spec.heads
    shape = (batch, heads, q_len)
    b, h = (jnp.arange(n, dtype=jnp.int32) for n in spec.heads)
    b, h = b.reshape(-1, 1, 1, 1), h.reshape(1, -1, 1, 1)
    row, key = jnp.arange(q_len, dtype=jnp.int32).reshape(1, 1, -1, 1), jnp.asarray(index)[:, None, :, None]
    q, kv = query_positions(*_placed(spec, given), b, row), key_positions(*_placed(spec, given), b, key)
    whole_b, whole_h = (b, h) if given.first is None else (b + given.first[0], h + given.first[1])
    grid = BlockGrid(whole_b, whole_h, q, q, kv, kv, 1, 1)
    sees = jnp.ones((1, 1, 1), bool)
    if spec.mask is not None:
        sees = ~decide(spec.mask, given.mask_captures, grid, entries=True).can_false
        sees = jnp.broadcast_to(sees, (*shape, 1))[..., 0]
    if spec.lists_decide and given.flags is not None:
        partial, full = (_at_blocks(spec, x, row, key) for x in given.flags)
        sees = full | (partial & sees)
    if given.lengths[1] is not None:
        sees = sees & (jnp.asarray(index)[:, None] < given.lengths[1][:, None, None])
    if given.query:
        score, error = _scores(spec, given, index)
        ends = Interval((score - error)[..., None], (score + error)[..., None])
    else:
        assert given.bound is not None
        c = _at_blocks(spec, given.bound, row, key)[..., None]
        ends = Interval(-c, c)
    low = bound(spec.score, given.score_captures, grid, entries=True, score=ends)
    assert isinstance(low, Interval)
    low = jnp.broadcast_to(low.low, (*shape, 1))[..., 0]
    return jnp.where(sees, _finite(low), -jnp.inf).astype(spec.dtype)


def _finite(low: Array) -> Array:
    """A lower bound that proves something: a row with a score of inf is NaN, and inf says that there is no row."""
    return jnp.where(low < jnp.inf, low, -jnp.inf)


def _at_blocks(spec: Spec, x: Array, row: Array, key: Array) -> Array:
    """[B or 1, N or 1, T]: elements of x, [.., rows or 1, columns or 1], of the blocks of these rows and keys."""
    q, kv = (row // spec.sizes[2])[..., 0], (key // spec.sizes[3])[..., 0]
    q, kv = (jnp.zeros_like(i) if n == 1 else i for i, n in zip((q, kv), x.shape[2:], strict=True))
    b, h = (jnp.arange(n).reshape(-1, *[1] * (2 - axis)) for axis, n in enumerate(x.shape[:2]))
    if x.shape[0] == 1:  # one for all batch entries, whose keys may be at places of their own
        b = jnp.zeros_like(kv)
    return x[b, h, q, kv]


def _scores(spec: Spec, given: Given, index: np.ndarray | Array) -> tuple[Array, Array]:
    """(the score of each row and the key `index`, how far it may be from that of a kernel), [B, N, T] each."""
    if given.pages is not None:
        keys = [given.pages.at_rows(index).astype(spec.dtype)]
    else:
        keys = [at_rows(k, index) for k in given.key]
    score = abs(spec.scale) * functools.reduce(jnp.add, map(product, given.query, keys))
    heads = given.query[0].shape[1]
    sizes = [norms([q]) * per_query_head(norms([k]), heads, 1) for q, k in zip(given.query, keys, strict=True)]
    error = 2 * spec.rounding * abs(spec.scale) * functools.reduce(jnp.add, sizes) + 1e-30
    return score if spec.scale >= 0 else -score, error


# ------------------------------------------------------------------- the choice


def _chunk(spec: Spec, given: Given, views: list[View], q_blocks: Array) -> tuple[Array, ...]:
    """(keep, what a row of the tile may lose, (lower bound, that of full blocks) of the tile by view) of rows of
    blocks; -inf for a view by which nothing goes.
    """
    columns = spec.counts[1]
    kv_blocks = jnp.arange(columns, dtype=jnp.int32)
    shape = (*spec.heads, q_blocks.shape[0], columns)
    grid = block_grid(*spec.heads, q_blocks, kv_blocks, spec.sizes, _placed(spec, given))
    if given.first is not None:
        grid = dataclasses.replace(grid, b=grid.b + given.first[0], h=grid.h + given.first[1])
    visible, full = _visible(spec, given, q_blocks, shape)

    def ends(c: Array, program: Program = spec.score) -> list[Array]:
        found = bound(program, given.score_captures, grid, score=Interval(-c, c))
        assert isinstance(found, Interval)
        return [jnp.broadcast_to(e, shape).astype(spec.dtype) for e in found[:2]]

    shares, tiles = [], []
    for view in views:
        c = _limit(spec, view, _rows_of(given.bound, q_blocks), q_blocks)
        low, high = ends(c)
        if spec.weighted:
            low, high = jnp.full_like(low, -jnp.inf), jnp.log(_size(low, high))
        rounds = jnp.zeros((), spec.dtype)
        if view.moved is not None:  # each sum rounds a number that is larger by the product with the mean
            sums = [dataclasses.replace(spec.score, results=(x,)) for x in sums_of(spec.score)]
            sizes = [jnp.where(jnp.isfinite(e), jnp.abs(e), 0) for program in sums for e in ends(c, program)]
            rounds = SLACK_OF_SCORES * (sum(sizes) + len(sums) * view.moved[:, :, q_blocks, None])
        best = jnp.where(full, _finite(low - rounds), -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
        tile = jnp.maximum(view.least[:, :, q_blocks, None], best)
        slack = SLACK + SLACK_OF_SCORES * (jnp.abs(high) + jnp.abs(tile)) + rounds
        share = high - tile + _log_keys(spec, kv_blocks) + slack
        share = jnp.where(jnp.isnan(share), jnp.inf, share)
        # probabilities of 0, hidden entries, and rows that do not exist
        shares.append(jnp.where((high == -jnp.inf) | ~visible | (tile == jnp.inf), -jnp.inf, share))
        tiles.append(jnp.concatenate([tile, best], -1))
    share = functools.reduce(jnp.minimum, shares)
    gone, mass = _smallest(share, spec.tolerance)
    used = [jnp.any(gone & (x == share) & (x > -jnp.inf), -1, keepdims=True) for x in shares]
    return visible & ~gone, mass, *(jnp.where(u, x, -jnp.inf) for u, x in zip(used, tiles, strict=True))


def _size(low: Array, high: Array) -> Array:
    """The largest magnitude between two numbers."""
    return jnp.maximum(jnp.abs(low), jnp.abs(high))


def _log_keys(spec: Spec, kv_blocks: Array) -> Array:
    """The logarithm of how many keys each block has."""
    return jnp.log(jnp.minimum(spec.sizes[3], spec.sizes[1] - kv_blocks * spec.sizes[3]).astype(spec.dtype))


def _rows_of(x: Array | None, q_blocks: Array) -> Array | None:
    return x if x is None or x.shape[2] == 1 else x[:, :, q_blocks]


def _visible(spec: Spec, given: Given, q_blocks: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(some entry may be visible, every row that exists surely sees a key), bool of `shape`."""
    visible = full = jnp.ones((1, 1, 1, 1), bool)
    if given.flags is not None:
        partial, full = (x[:, :, q_blocks] for x in given.flags)
        visible = partial | full
    if given.lengths[1] is not None:
        starts = jnp.arange(spec.counts[1], dtype=jnp.int32) * spec.sizes[3]
        there = starts < given.lengths[1][:, None, None, None]
        visible, full = visible & there, full & there
    return jnp.broadcast_to(visible, shape), jnp.broadcast_to(full, shape)


def _smallest(share: Array, tolerance: float) -> tuple[Array, Array]:
    """(bool: the largest set of the smallest shares of each row whose sum is at most `tolerance`, that sum [.., 1])."""
    nothing = share == -jnp.inf
    if tolerance == 0 or not share.shape[-1]:
        return nothing, jnp.zeros((*share.shape[:-1], 1), share.dtype)
    columns = share.shape[-1]
    # relative to the tolerance, so that exponentials do not underflow
    relative = jnp.minimum(share - math.log(tolerance), 80.0)
    ordered = jnp.sort(relative, -1)
    total = jnp.cumsum(jnp.exp(ordered), -1) * (1 + SLACK_OF_SUM + columns * 2.0**-22)
    count = jnp.sum(total <= 1, -1, keepdims=True, dtype=jnp.int32)
    # of equal shares, as many as fit
    first = jnp.take_along_axis(ordered, jnp.minimum(count, columns - 1), -1)
    first = jnp.where(count == columns, jnp.inf, first)
    less, equal = relative < first, relative == first
    room = count - jnp.sum(less, -1, keepdims=True, dtype=jnp.int32)
    gone = less | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= room))
    mass = jnp.take_along_axis(total, jnp.maximum(count - 1, 0), -1)
    some = jnp.any(gone & ~nothing, -1, keepdims=True)
    return gone | nothing, jnp.where(some, jnp.maximum(jnp.minimum(mass, 1) * tolerance, LEAST), 0)
