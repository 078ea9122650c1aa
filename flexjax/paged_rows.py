"""The queries of a call of `paged_attention` as batch entries of a plan: requests, tiles of ragged queries, or tiles of a prefix.

A *tile* is a batch entry with a few queries, whose number is static. Queries come in segments, one after the other, and every segment
begins a new tile. There are as many tiles as queries and segments can need; those that are left over have no query and no key, so
that their keys are not read.

    ragged queries   a segment is a request. A tile sees the pages and the key length of its request. Requests of more than MANY queries
                     have larger tiles, in a pass of their own, because they compute so much that reading keys does not bound them
    shared prefix    a segment is a group of requests, and its queries are those of all its requests. A tile sees the pages of the
                     prefix, and each of its queries has a request and a position of its own

Mods get the number of the request in place of that of the tile.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.check_arguments import Inputs, check_sinks
from flexjax.errors import bad_argument
from flexjax.paged.cache import LARGEST, PLAIN, PagedCache, check_cache, rows_of_tokens
from flexjax.paged.shared_prefix import SharedPrefix
from flexjax.paged.table import PageTable, check_int32, check_table, described
from flexjax.parallel.explicit_axes import split_of
from flexjax.plan.kernel_plan import Results, Scales
from flexjax.prepare import InPages
from flexjax.types import Origin

Array = jax.Array

TILE, PACKED_ROWS = 16, 64
"""The most queries of a tile, and the most packed rows (queries times query heads of a key head), which is what a kernel for few
queries takes; kernel_options.block_q says another number of queries."""
MANY, MANY_TILE = 256, 128
"""A request of ragged queries with more than MANY of them has tiles of MANY_TILE. On an H200, 32 query and 8 key heads of 128: a tile of 16
queries over 32768 keys takes 19 us of the GPU, one of 128 takes 94 us, or 390 us where nothing else fills the GPU."""


LARGEST_IN_PLACE = 256
"""The largest head dim for which ragged requests of many queries have tiles of their own. The GPU kernel for these reads pages of 16-bit
numbers and of such head dims in place; others it would gather for each tile."""


def tile_size(inputs: Inputs) -> int:
    """How many queries a tile has: at most TILE, and at most PACKED_ROWS rows with their query heads (of one key head); at least 1.

    It depends on the numbers of heads alone and not on how many queries there are, because another size gives other bits.
    """
    return min(TILE, max(1, PACKED_ROWS * inputs.kv_heads // inputs.q_heads))


@dataclasses.dataclass(frozen=True)
class Queries:
    """The queries of all requests, one after the other, or those of some requests among them.

    query     [queries, N, D]
    request   int32 [queries]: the request of each
    place     int32 [queries]: its number among the queries of its request; it does not exist if this is counts[request] or more
    counts    int32 [R]: how many queries of each request exist
    starts    int32 [R]: the number of the first query of each request
    shape     of the leading dims of the caller's query: (R, T), or (queries,) for ragged ones
    most      an upper bound of `counts`
    """

    query: Array
    request: Array
    place: Array
    counts: Array
    starts: Array
    shape: tuple[int, ...]
    most: int

    def of(self, which: Array, most: int) -> "Queries":
        """The same queries, of which only those of the requests `which` (bool [R]) exist; the others have counts of 0.

        most   an upper bound of the counts of these requests, which the caller guarantees; counts are not clipped to it
        """
        return dataclasses.replace(self, counts=jnp.where(which, self.counts, 0), most=min(most, self.most))

    @property
    def exists(self) -> Array:
        """bool [queries]: which of them exist; False also for padding and for requests that `of` has left out."""
        return self.place < self.counts[self.request]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The queries of a call as batch entries of a plan.

    inputs         the checked arrays; a batch entry has inputs.q_len queries
    in_pages       their pages
    query_lengths  int32 [B]: how many queries of each entry exist; None: all
    key_lengths    int32 [B]: how many keys of each entry exist
    origin         where the queries lie; None: mods get `position`
    request        int32 [B], or [B, q_len]: the request of each entry, or of each of its queries; None: batch entry b is request b
    position       int32 [B, q_len]: the position of each query in its request; None: `origin` says it
    place          int32 [queries, 2]: the batch entry of each of the caller's queries, and its row there; None if the batch entries
                   are the requests, so that results need no reordering
    exists         bool [queries]: whether `place` has a place for the query; False gives out 0 and lse -inf
    shape          the leading dims of the results, where `place` is given
    """

    inputs: Inputs
    in_pages: InPages
    query_lengths: Array | None
    key_lengths: Array
    origin: Origin | None
    request: Array | None = None
    position: Array | None = None
    place: Array | None = None
    exists: Array | None = None
    shape: tuple[int, ...] = ()

    def mod_of_entries(self, mod: typing.Any) -> typing.Any:
        """Translates a user's mod to a mod of the plan with these batch entries.

        mod   mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx), where b is the request and q_idx the
              position in the request

        In the result b is the batch entry. Where `position` is given, q_idx is the row in the entry; otherwise it is the position
        in the request, which `origin` gives. `mod` itself is returned if batch entries are requests, or if it is None or not callable.
        """
        request, position = self.request, self.position
        if request is None or not callable(mod):
            return mod  # what is not callable is refused, with a message, where it is traced

        @functools.wraps(mod)
        def of_entry(*at: Array) -> typing.Any:
            """`mod` of the request and position that the batch entry b, the fourth argument from the end, and the row q_idx have."""
            *score, b, h, q_idx, kv_idx = at
            if position is None:
                return mod(*score, request[b], h, q_idx, kv_idx)
            return mod(*score, request[b, q_idx], h, position[b, q_idx], kv_idx)

        return of_entry

    def unfold(self, results: Results) -> Results:
        """The results in the order and the shape of the caller's queries, without rounding: out 0, lse and max_scores -inf at queries
        without a place. The results as they are if batch entries are the requests.

        results   of the plan with these batch entries
        """
        place, exists = self.place, self.exists
        if place is None or exists is None:
            return results

        def of_queries(x: Array, other: float) -> Array:
            """A result x, [B, T, N, ..] of the batch entries, as [*shape, N, ..] of the caller's queries; `other` at queries without a
            place.
            """
            found = x.at[place[:, 0], place[:, 1]].get(mode="clip")
            found = jnp.where(exists.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.asarray(other, found.dtype))
            return found.reshape(*self.shape, *found.shape[1:])

        low, top = float("-inf"), results.max_scores
        return Results(
            of_queries(results.out, 0.0), of_queries(results.lse, low), None if top is None else of_queries(top, low)
        )


def check_rows(
    query: object,
    cache: PagedCache,
    table: PageTable,
    query_seq_lengths: object,
    cu_q_lens: object,
    sinks: object,
) -> tuple[Rows, Queries]:
    """Checks the arrays of a call; returns (rows with a batch entry for each request, the queries of all requests).

    query, cache, table, query_seq_lengths, cu_q_lens, sinks   the arguments of paged_attention

    Ragged queries, those with cu_q_lens, are one batch entry instead; `ragged_rows` cuts them into tiles. Raises ValueError for arguments
    that do not fit, and NotImplementedError for a query that explicit mesh axes split.
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
    kv_heads, key_dim = cache.key.shape[2:]
    quantised = cache.key.dtype.name in LARGEST
    plain = q.dtype.name in PLAIN
    if not plain or (not quantised and q.dtype != cache.key.dtype):
        want = f"one of {', '.join(PLAIN)}" if quantised else f"{cache.key.dtype.name}, the dtype of the cache"
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
            "paged_attention does not split its work over explicit mesh axes. Use jax.shard_map over the requests or the heads, with "
            "origin=Origin(batch=..., head=...) for mods that read them."
        )
    inputs = Inputs(
        query=q[None] if ragged else q, key=jnp.asarray(cache.key), value=jnp.asarray(cache.value),
        sinks=check_sinks(sinks, q_heads, lead[-1], "BTNH"), query_extra=None, key_extra=None,
        batch=1 if ragged else requests, q_heads=q_heads, kv_heads=kv_heads, q_len=lead[-1], kv_len=columns * page,
        head_dim=head_dim, value_dim=cache.value.shape[3], extra_dim=0, extra_heads=0, dtype=q.dtype.name,
    )  # fmt: skip
    scales = None
    if cache.key_scales is not None and cache.value_scales is not None:
        scales = Scales(jnp.asarray(cache.key_scales), jnp.asarray(cache.value_scales))
    in_pages = InPages(inputs, jnp.asarray(table.pages), page, cache.key.dtype.name if quantised else None, scales)
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


class Tiles(typing.NamedTuple):
    """Tiles of queries that are sorted by segments.

    segment   int32 [tiles]: the segment of each tile; arbitrary for tiles that are left over
    first     int32 [tiles]: its first query, among those of its segment
    count     int32 [tiles]: how many queries it has
    members   int32 [tiles, size]: numbers of its queries, in sorted order; arbitrary from `count` on
    last      int32 [segments]: the number of the last tile of each segment, which has its first queries
    """

    segment: Array
    first: Array
    count: Array
    members: Array
    last: Array


def _cut(counts: Array, starts: Array, most: int, size: int) -> Tiles:
    """Cuts segments into tiles of `size` queries, of which the one with the last queries of a segment may have fewer. The tiles of a
    segment come from its last to its first: under a causal mask those that see most keys then start first. Segments without queries have
    no tile.

    counts   int32 [segments]: how many queries each segment has
    starts   int32 [segments]: the number of its first query, where queries are numbered in the order of segments
    most     how many tiles are made, at least 1 and at least as many as the segments need; those that are left over have a count of 0
    """
    segments = counts.shape[0]
    needs = -(-counts // size)
    after = jnp.cumsum(needs, dtype=jnp.int32)
    number = jnp.arange(most, dtype=jnp.int32)
    # compare_all is one kernel; a binary search is a loop of several on a GPU
    segment = jnp.searchsorted(after, number, side="right", method="compare_all").astype(jnp.int32)
    segment = jnp.minimum(segment, segments - 1)
    left = (
        after[segment] - 1 - number
    )  # tiles of the segment that come after this one; negative for tiles that are left over
    first = jnp.maximum(left, 0) * size
    count = jnp.where(left < 0, 0, jnp.clip(counts[segment] - first, 0, size))
    members = (starts[segment] + first)[:, None] + jnp.arange(size, dtype=jnp.int32)
    return Tiles(segment, first, count, members, after - 1)


def _taken(x: Array, at: Array) -> Array:
    """x[at] along the first axis, with indices clipped to the array; zeros if that axis of x is empty."""
    return (x if x.shape[0] else jnp.zeros((1, *x.shape[1:]), x.dtype)).at[at].get(mode="clip")


def ragged_passes(rows: Rows, queries: Queries, size: int | None) -> list[Rows]:
    """The rows of ragged queries in tiles, in a list: of one pass over all requests, or of two: requests of at most MANY queries in small
    tiles (`tile_size`), then the others in tiles of MANY_TILE.

    rows      one batch entry with all queries
    queries   of all requests
    size      queries of a tile in one pass over all requests; None: two passes, but one in small tiles where no request can have more
              than MANY queries, and for pools of other than 16 bits or head dims above LARGEST_IN_PLACE

    The tiles of a request follow from the number of its own queries.
    """
    inputs, small = rows.inputs, tile_size(rows.inputs)
    narrow = rows.in_pages.cache_dtype is None and inputs.query.dtype.itemsize == 2
    in_place = narrow and max(inputs.head_dim, inputs.value_dim) <= LARGEST_IN_PLACE
    if size is not None or queries.most <= MANY or small > MANY_TILE or not in_place:
        return [ragged_rows(rows, queries, size or small)]
    many = queries.counts > MANY
    passes = (queries.of(~many, MANY), small, 1), (queries.of(many, queries.most), MANY_TILE, MANY + 1)
    return [ragged_rows(rows, part, tile, least) for part, tile, least in passes]


def ragged_rows(rows: Rows, queries: Queries, size: int, least: int = 1) -> Rows:
    """The rows of ragged queries, in tiles of `size` queries of one request: their keys are those of the request.

    rows    one batch entry with all queries
    least   the smallest number of queries, other than 0, that a request has; a larger one makes fewer tiles

    A query that does not exist (`Queries.exists`) has no place: its out is 0 and its lse -inf. `origin` holds the positions.
    """
    inputs, pages, counts = rows.inputs, rows.in_pages, queries.counts
    total, requests = queries.query.shape[0], counts.shape[0]
    some = min(requests, total // least)  # how many requests can have queries
    most = max(1, min(total // size + some, some * -(-queries.most // size)))
    tiles = _cut(counts, queries.starts, most, size)
    request = tiles.segment
    inputs = dataclasses.replace(inputs, query=_taken(queries.query, tiles.members), batch=request.shape[0], q_len=size)
    position = jnp.maximum(rows.key_lengths[request] - counts[request], 0) + tiles.first
    place = queries.place
    return Rows(
        inputs,
        pages._replace(inputs=inputs, pages=pages.pages[request]),
        tiles.count,
        jnp.where(tiles.count > 0, rows.key_lengths[request], 0),
        Origin(query=position, whole=(None, None, inputs.kv_len + size, inputs.kv_len)),
        request,
        place=jnp.stack([tiles.last[queries.request] - place // size, place % size], 1),
        exists=queries.exists,
        shape=queries.shape,
    )


def prefix_starts(shared: SharedPrefix, lengths: Array) -> tuple[Array, Array]:
    """(group, start), int32 [R] each: the group of each request, -1 for none, and how many of its tokens the group shares, 0 for none.

    lengths   int32 [R]: keys of each request; one that has fewer keys than the prefix of its group counts as a request without a
              group
    """
    groups = shared.prefix_lengths.shape[0]
    start = shared.prefix_lengths[jnp.clip(shared.group, 0, groups - 1)]
    member = (shared.group >= 0) & (shared.group < groups) & (start <= lengths)
    return jnp.where(member, shared.group, -1), jnp.where(member, start, 0)


def prefix_rows(rows: Rows, queries: Queries, shared: SharedPrefix, size: int) -> Rows:
    """The rows of the pass over shared prefixes, in tiles of `size` queries of one group: their keys are the prefix of the group.

    rows   of the same call, with the pages and the key lengths of the requests

    A query whose request is in no group (`prefix_starts`) has no place here: its out is 0 and its lse -inf, which changes nothing
    when the pass over own tokens is merged. The rows have no sinks, because that other pass counts them. `position` holds the
    positions of the queries, since the queries of a tile do not follow one another.
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
    inputs = dataclasses.replace(
        inputs,
        query=_taken(queries.query, members),
        sinks=None,
        batch=tiles.segment.shape[0],
        q_len=size,
        kv_len=columns * rows.in_pages.page,
    )
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
