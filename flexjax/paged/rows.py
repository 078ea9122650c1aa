"""The queries of `paged_attention` as batch entries of a plan: requests, tiles of ragged queries, tiles of a prefix.

A *tile* is a batch entry with a few queries, whose number is static. Queries come in segments, and every segment begins
a new tile; tiles left over have no query and no key. Mods get the number of the request in place of that of the tile.

    ragged queries   a segment is a request; requests of more than MANY queries have a pass with larger tiles
    shared prefix    a segment is the queries of a group of requests, each with a request and a position of its own
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.call.checks import CallSizes, CheckedArrays, check_sinks
from flexjax.call.prepare import InPages
from flexjax.errors import bad_argument
from flexjax.paged.cache import PLAIN, PagedCache, check_cache, rows_of_tokens, stored
from flexjax.paged.shared_prefix import SharedPrefix
from flexjax.paged.table import PageTable, check_int32, check_table, described
from flexjax.parallel.explicit_axes import split_of
from flexjax.plan.kernel_plan import Results, Scales
from flexjax.types import Origin

Array = jax.Array

# The most queries of a tile, and the most packed rows (queries times query heads of a key head), which is what a kernel
# for few queries takes.
TILE, PACKED_ROWS = 16, 64
# a ragged request with more than MANY queries has tiles of MANY_TILE
MANY, MANY_TILE = 256, 128


# The largest head dim of 16-bit pages that the GPU kernel for many ragged queries reads in place; it would gather
# others for each tile.
LARGEST_IN_PLACE = 256


def tile_size(inputs: CheckedArrays) -> int:
    # from the numbers of heads alone and not from how many queries there are, because another size gives other bits
    return min(TILE, max(1, PACKED_ROWS * inputs.sizes.kv_heads // inputs.sizes.q_heads))


@dataclasses.dataclass(frozen=True)
class Queries:
    """The queries of all requests, one after the other, or those of some requests among them."""

    query: Array  # [queries, N, D]
    request: Array  # int32 [queries]: the request of each
    place: Array  # int32 [queries]: its number in its request; it does not exist if this is counts[request] or more
    counts: Array  # int32 [R]: how many queries of each request exist
    starts: Array  # int32 [R]: the number of the first query of each request
    shape: tuple[int, ...]  # of the leading dims of the caller's query: (R, T), or (queries,) for ragged ones
    most: int  # an upper bound of `counts`

    def of(self, which: Array, most: int) -> "Queries":
        return dataclasses.replace(self, counts=jnp.where(which, self.counts, 0), most=min(most, self.most))

    @property
    def exists(self) -> Array:
        return self.place < self.counts[self.request]


@dataclasses.dataclass(frozen=True)
class Rows:
    inputs: CheckedArrays  # checked arrays; a batch entry has inputs.sizes.q_len queries
    in_pages: InPages
    query_lengths: Array | None  # int32 [B]: how many queries of each entry exist; None: all
    key_lengths: Array  # int32 [B]: how many keys of each entry exist
    origin: Origin | None  # where the queries lie; None: mods get `position`
    request: Array | None = None  # int32 [B] or [B, q_len]; None: batch entry b is request b
    position: Array | None = None  # int32 [B, q_len], in the request; None: `origin` says it
    place: Array | None = None  # int32 [queries, 2]: (batch entry, row) of each caller's query; None: as given
    exists: Array | None = None  # bool [queries]: whether `place` has it; False gives out 0 and lse -inf
    shape: tuple[int, ...] = ()  # leading dims of the results, where `place` is given

    def mod_of_entries(self, mod: typing.Any) -> typing.Any:
        """Translates a user's mod, of requests and positions in them, to these batch entries."""
        request, position = self.request, self.position
        if request is None or not callable(mod):
            return mod  # what is not callable is refused, with a message, where it is traced

        @functools.wraps(mod)
        def of_entry(*at: Array) -> typing.Any:
            *score, b, h, q_idx, kv_idx = at
            if position is None:
                return mod(*score, request[b], h, q_idx, kv_idx)
            return mod(*score, request[b, q_idx], h, position[b, q_idx], kv_idx)

        return of_entry

    def unfold(self, results: Results, lse_without_keys: float) -> Results:
        fills = (0.0, lse_without_keys, float("-inf"), 0.0, 0.0)
        pairs = zip(results, fills, strict=True)
        return Results._make(None if x is None else self.of_queries(x, fill) for x, fill in pairs)

    def of_queries(self, x: Array, other: float) -> Array:
        """x, [B, q_len, ...], in the order and shape of the caller's queries; `other` for those that are not there."""
        place, exists = self.place, self.exists
        if place is None or exists is None:
            return x
        found = x.at[place[:, 0], place[:, 1]].get(mode="clip")
        found = jnp.where(exists.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.asarray(other, found.dtype))
        return found.reshape(*self.shape, *found.shape[1:])


def check_rows(
    query: object, cache: PagedCache, table: PageTable, query_seq_lengths: object, cu_q_lens: object, sinks: object
) -> tuple[Rows, Queries]:
    """Checks the arrays of a call: (rows with a batch entry for each request, the queries of all requests).

    Ragged queries are one batch entry. Raises ValueError, and NotImplementedError for a query that mesh axes split.
    """
    _, page = check_cache(cache)
    check_table(table, page)
    requests, columns = table.pages.shape
    ragged = cu_q_lens is not None
    letters = "[tokens, N, D]" if ragged else "[R, T, N, D]"
    if not isinstance(query, Array | np.ndarray) or query.ndim != (3 if ragged else 4):
        todo = "Leave cu_q_lens out for [R, T, N, D]." if ragged else "Pass cu_q_lens for queries one after the other."
        raise bad_argument("query", described(query), letters, todo)
    q = jnp.asarray(query)
    *lead, q_heads, head_dim = q.shape
    key, value = stored(cache.key), stored(cache.value)
    kv_heads, key_dim = key.pool.shape[2:]
    stored_as, quantised = key.pool.dtype, key.scales is not None
    plain = q.dtype.name in PLAIN
    if not plain or (not quantised and q.dtype != stored_as):
        want = f"one of {', '.join(PLAIN)}" if quantised else f"{stored_as.name}, the dtype of the cache"
        raise bad_argument("query", described(q), want, "Cast it.")
    if not ragged and lead[0] != requests:
        raise bad_argument(
            "query",
            described(q),
            f"{requests} requests, as table has",
            "A request without a query has query_seq_lengths 0.",
        )
    if head_dim != key_dim:
        raise bad_argument(
            "query", described(q), f"a last dim of {key_dim}, that of cache.key", "Project both to one head dim."
        )
    if q_heads == 0 or q_heads % kv_heads:
        raise bad_argument(
            "query", described(q), f"a multiple of the {kv_heads} heads of cache.key", "Query heads share key heads."
        )
    if ragged and query_seq_lengths is not None:
        raise bad_argument("query_seq_lengths", "given beside cu_q_lens", "one of them", "cu_q_lens has the lengths.")
    if split_of(q[None] if ragged else q, "BTNH") is not None:
        raise NotImplementedError(
            "paged_attention does not split its work over explicit mesh axes. Use jax.shard_map over the requests or "
            "the heads, with origin=Origin(batch=..., head=...) for mods that read them."
        )
    inputs = CheckedArrays(
        query=q[None] if ragged else q, key=jnp.asarray(key.pool), value=jnp.asarray(value.pool),
        sinks=check_sinks(sinks, q_heads, lead[-1], "BTNH"), query_extra=None, key_extra=None,
        sizes=CallSizes(
            1 if ragged else requests, q_heads, kv_heads, lead[-1], columns * page, head_dim, value.pool.shape[3]
        ),
        dtype=q.dtype.name,
    )  # fmt: skip
    scales = None
    if key.scales is not None and value.scales is not None:
        scales = Scales(jnp.asarray(key.scales), jnp.asarray(value.scales))
    norms = None if cache.norms is None else jnp.asarray(cache.norms)
    in_pages = InPages(inputs, jnp.asarray(table.pages), page, stored_as.name if quantised else None, scales, norms)
    if isinstance(query_seq_lengths, int) and not isinstance(query_seq_lengths, bool):
        query_seq_lengths = np.full(requests, min(max(query_seq_lengths, 0), lead[-1]), np.int32)
    counts = None if query_seq_lengths is None else check_int32("query_seq_lengths", query_seq_lengths, (requests,))
    rows = Rows(inputs, in_pages, counts, jnp.asarray(table.lengths), Origin(query="end"))
    if ragged:
        tokens = rows_of_tokens(cu_q_lens, requests, lead[0])
        return rows, Queries(q, tokens.row, tokens.place, tokens.counts, tokens.starts, (lead[0],), lead[0])
    most = lead[1]
    each = jnp.full(requests, most, jnp.int32) if counts is None else jnp.clip(counts, 0, most)
    number = jnp.arange(requests * most, dtype=jnp.int32)
    row, place = number // max(most, 1), number % max(most, 1)
    starts = most * jnp.arange(requests, dtype=jnp.int32)
    return rows, Queries(q.reshape(-1, *q.shape[2:]), row, place, each, starts, (requests, most), most)


# ------------------------------------------------------------------- tiles


class QueryTiles(typing.NamedTuple):
    segment: Array  # int32 [tiles]
    first: Array  # int32 [tiles]: its first query, among those of its segment
    count: Array  # int32 [tiles]: how many queries it has
    members: Array  # int32 [tiles, size]: numbers of its queries, in sorted order; arbitrary from `count` on
    last: Array  # int32 [segments]: the last tile of each segment, which has its first queries


def _cut(counts: Array, starts: Array, most: int, size: int) -> QueryTiles:
    """Cuts segments with `counts` queries, from number `starts` on, into `most` tiles of up to `size` queries."""
    segments = counts.shape[0]
    needs = -(-counts // size)
    after = jnp.cumsum(needs, dtype=jnp.int32)
    number = jnp.arange(most, dtype=jnp.int32)
    # compare_all is one kernel; a binary search is a loop of several on a GPU
    segment = jnp.searchsorted(after, number, side="right", method="compare_all").astype(jnp.int32)
    segment = jnp.minimum(segment, segments - 1)
    # Tiles of the segment after this one; negative for tiles that are left over. The tiles of a segment come from its
    # last to its first: under a causal mask those that see most keys then start first.
    left = after[segment] - 1 - number
    first = jnp.maximum(left, 0) * size
    count = jnp.where(left < 0, 0, jnp.clip(counts[segment] - first, 0, size))
    members = (starts[segment] + first)[:, None] + jnp.arange(size, dtype=jnp.int32)
    return QueryTiles(segment, first, count, members, after - 1)


def _taken(x: Array, at: Array) -> Array:
    return (x if x.shape[0] else jnp.zeros((1, *x.shape[1:]), x.dtype)).at[at].get(mode="clip")


def ragged_passes(rows: Rows, queries: Queries, size: int | None) -> list[Rows]:
    """The rows of ragged queries, one batch entry, in tiles of `size`; None: a pass for few and one for many."""
    inputs, small = rows.inputs, tile_size(rows.inputs)
    narrow = rows.in_pages.cache_dtype is None and inputs.query.dtype.itemsize == 2
    in_place = narrow and max(inputs.sizes.head_dim, inputs.sizes.value_dim) <= LARGEST_IN_PLACE
    # one pass where no request can have more than MANY queries, or the kernel cannot read the pages in place
    if size is not None or queries.most <= MANY or small > MANY_TILE or not in_place:
        return [ragged_rows(rows, queries, size or small)]
    many = queries.counts > MANY
    passes = (queries.of(~many, MANY), small, 1), (queries.of(many, queries.most), MANY_TILE, MANY + 1)
    return [ragged_rows(rows, part, tile, least) for part, tile, least in passes]


def ragged_rows(rows: Rows, queries: Queries, size: int, least: int = 1) -> Rows:
    """The rows of ragged queries in tiles of `size` queries of one request that has 0 or at least `least` of them."""
    inputs, pages, counts = rows.inputs, rows.in_pages, queries.counts
    total, requests = queries.query.shape[0], counts.shape[0]
    some = min(requests, total // least)  # how many requests can have queries
    most = max(1, min(total // size + some, some * -(-queries.most // size)))
    tiles = _cut(counts, queries.starts, most, size)
    request = tiles.segment
    sizes = dataclasses.replace(inputs.sizes, batch=request.shape[0], q_len=size)
    inputs = dataclasses.replace(inputs, query=_taken(queries.query, tiles.members), sizes=sizes)
    position = jnp.maximum(rows.key_lengths[request] - counts[request], 0) + tiles.first
    place = queries.place
    return Rows(
        inputs,
        pages._replace(inputs=inputs, pages=pages.pages[request]),
        tiles.count,
        jnp.where(tiles.count > 0, rows.key_lengths[request], 0),
        Origin(query=position, whole=(None, None, inputs.sizes.kv_len + size, inputs.sizes.kv_len)),
        request,
        place=jnp.stack([tiles.last[queries.request] - place // size, place % size], 1),
        exists=queries.exists,
        shape=queries.shape,
    )


def prefix_starts(shared: SharedPrefix, lengths: Array) -> tuple[Array, Array]:
    """(group, start), int32 [R] each: the group of each request, -1 for none, and how many of its tokens it shares."""
    groups = shared.prefix_lengths.shape[0]
    start = shared.prefix_lengths[jnp.clip(shared.group, 0, groups - 1)]
    # a request with fewer keys (`lengths`) than the prefix of its group counts as one without a group
    member = (shared.group >= 0) & (shared.group < groups) & (start <= lengths)
    return jnp.where(member, shared.group, -1), jnp.where(member, start, 0)


def prefix_rows(rows: Rows, queries: Queries, shared: SharedPrefix, size: int) -> Rows:
    """The rows of the pass over shared prefixes, in tiles of `size` queries of one group: their keys are the prefix.

    A query without a group has out 0 and lse -inf here. The pass over own tokens counts the sinks.
    """
    inputs, total = rows.inputs, queries.query.shape[0]
    groups, columns = shared.prefix_pages.shape
    of_request, _ = prefix_starts(shared, rows.key_lengths)
    group = of_request[queries.request]
    member = queries.exists & (group >= 0)
    order = jnp.argsort(jnp.where(member, group, groups), stable=True).astype(jnp.int32)
    number = jnp.arange(groups, dtype=jnp.int32)
    counts = jnp.sum(member & (group == number[:, None]), 1, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    tiles = _cut(counts, starts, max(1, total // size + min(groups, total)), size)
    members = _taken(order, tiles.members)
    sizes = dataclasses.replace(
        inputs.sizes, batch=tiles.segment.shape[0], q_len=size, kv_len=columns * rows.in_pages.page
    )
    inputs = dataclasses.replace(inputs, query=_taken(queries.query, members), sinks=None, sizes=sizes)
    # given, since the queries of a tile do not follow one another
    at = jnp.maximum(rows.key_lengths - queries.counts, 0)[queries.request] + queries.place
    rank = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
    rank = rank - starts[jnp.maximum(group, 0)]  # among the queries of the group
    return Rows(
        inputs,
        rows.in_pages._replace(inputs=inputs, pages=shared.prefix_pages[tiles.segment]),
        tiles.count,
        jnp.where(tiles.count > 0, shared.prefix_lengths[tiles.segment], 0),
        None,
        _taken(queries.request, members),
        _taken(at, members),
        jnp.stack([tiles.last[jnp.maximum(group, 0)] - rank // size, rank % size], 1),
        member,
        queries.shape,
    )
