"""`paged_attention`: attention over a cache in pages, for requests of different lengths.

It is flex_attention on keys that `flexjax.paged.gather` would return, with lengths and an origin at the end of the keys, and takes the
same way: the checks below write the inputs, `prepare` traces the mods and writes the plan, which says that keys are in pages, and
the primitives of autodiff.py run it.

**Ragged queries.** Tokens of all requests one after the other become tiles of a few queries: every request begins a new tile, and a
tile is a batch entry of the plan, with the pages and the key length of its request and with an origin of its own. Mods get the number
of the request in place of that of the tile. There are as many tiles as tokens and requests can need; those that are left over
have no query and cost nothing. A tile sees its own request alone, so the bits of a request do not depend on where its tokens lie.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import dispatch, masks
from flexjax.attention import with_aux
from flexjax.autodiff import attention
from flexjax.call_arguments import text_of_call
from flexjax.check_arguments import Inputs, check_options, check_sinks
from flexjax.errors import add_note_once, bad_argument
from flexjax.paged.cache import LARGEST, PLAIN, PagedCache, check_cache, rows_of_tokens
from flexjax.paged.table import PageTable, check_int32, check_table, described
from flexjax.parallel.explicit_axes import split_of
from flexjax.plan.kernel_plan import Results, Scales
from flexjax.prepare import InPages, prepare
from flexjax.types import (
    ArrayArgument,
    AuxOutput,
    AuxRequest,
    Implementations,
    KernelOptions,
    MaskMod,
    Origin,
    ScoreMod,
)

Array = jax.Array

RAGGED_TILE, PACKED_ROWS = 16, 64
"""The most queries of a tile of ragged tokens, and the most packed rows (queries times query heads of a key head), which is what a
kernel for few queries takes; kernel_options.block_q says another number of queries."""


class PagedArguments(typing.TypedDict, total=False):
    """The keywords of `paged_attention` except return_aux, which decides the type of the result."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    query_seq_lengths: ArrayArgument | None
    cu_q_lens: ArrayArgument | None
    scale: float | ArrayArgument | None
    sinks: ArrayArgument | None
    implementation: Implementations | None
    kernel_options: KernelOptions | None


@typing.overload
def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    return_aux: None = None,
    **arguments: typing.Unpack[PagedArguments],
) -> Array:
    """The type of a call without return_aux. The function itself is documented below."""
    ...


@typing.overload
def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    return_aux: AuxRequest,
    **arguments: typing.Unpack[PagedArguments],
) -> tuple[Array, AuxOutput]:
    """The type of a call with return_aux. The function itself is documented below."""
    ...


def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = masks.causal,
    query_seq_lengths: ArrayArgument | None = None,
    cu_q_lens: ArrayArgument | None = None,
    scale: float | ArrayArgument | None = None,
    sinks: ArrayArgument | None = None,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention of the newest tokens of R requests over a cache in pages, for decoding, chunked prefill, and both in one call.

    query        [R, T, N, D], or the queries of all requests one after the other, [tokens, N, D], with cu_q_lens. The queries of a
                 request are its last tokens: their keys are in the cache already (`flexjax.paged.append` before attention). Of the
                 dtype of the cache; of any floating dtype if the cache is quantised
    cache, table a PagedCache and a PageTable (flexjax.paged). M key heads of the cache divide N
    score_mod, mask_mod  as for flex_attention: b is the request, h the query head, q_idx and kv_idx the positions in the request,
                 whatever its pages are. mask_mod is causal by default; None: every query sees all keys of its request
    query_seq_lengths  int32 [R], for [R, T, N, D]: how many of the T queries of each request exist; default all
    cu_q_lens    int32 [R + 1]: request r has the queries cu_q_lens[r] .. cu_q_lens[r + 1] - 1; rows after the last are padding
    scale, sinks, return_aux, implementation  as for flex_attention
    kernel_options  as for flex_attention; with cu_q_lens, block_q is the number of queries of a tile, default 16, or fewer
                 where more than four query heads share a key head

    Returns out [R, T, N, E] or [tokens, N, E] in the dtype of query, or (out, AuxOutput) with return_aux, whose results are
    [R, T, N] or [tokens, N]. Rows of queries that do not exist are 0, with lse -inf. By definition it is

        k, v = flexjax.paged.gather(cache, table)
        flex_attention(query, k, v, origin=Origin(query="end"), query_seq_lengths=..., key_value_seq_lengths=table.lengths, ...)

    but it reads only pages with keys that mask_mod shows, in proportion to the lengths, and page numbers past the length of a
    request may be anything. Quantised pages are multiplied by their scales before score_mod.

    The bits of a request depend on its own tokens, the mods, T (not with cu_q_lens) and the static options; not on the other requests, on their number,
    on page numbers, on the sizes of pool and table, on padding, and not on rows past query_seq_lengths.

    New lengths, tables and offsets neither trace nor compile anything. Gradients reach query, scale, sinks and the arrays that
    score_mod captures, on xla; those of the cache raise NotImplementedError. Dropout is for training: there is none here. Raises
    ValueError for arguments that do not fit, and NotImplementedError, with each backend's reason, if no backend accepts the call.
    """
    arguments = {
        "score_mod": score_mod, "mask_mod": mask_mod, "query_seq_lengths": query_seq_lengths, "cu_q_lens": cu_q_lens,
        "scale": scale, "sinks": sinks, "return_aux": return_aux, "kernel_options": kernel_options,
    }  # fmt: skip
    try:
        names = dispatch.candidates(implementation)
        options = check_options(return_aux, kernel_options)
        rows = _check(query, cache, table, query_seq_lengths, cu_q_lens, sinks)
        if cu_q_lens is not None:
            rows = _tiles(rows, check_int32("cu_q_lens", cu_q_lens, (table.lengths.shape[0] + 1,)), options)
            score_mod, mask_mod = (None if mod is None else rows.of_requests(mod) for mod in (score_mod, mask_mod))
        call = prepare(
            rows.inputs.query,
            rows.inputs.key,
            rows.inputs.value,
            return_aux=return_aux,
            in_pages=rows.in_pages,
            score_mod=score_mod,
            mask_mod=mask_mod,
            scale=scale,
            sinks=sinks,
            kernel_options=kernel_options,
            query_seq_lengths=rows.query_lengths,
            key_value_seq_lengths=rows.key_lengths,
            origin=rows.origin,
        )
        dispatch.runs_everywhere(call.plan, names)
        results = rows.unfold(attention(call.problem(names, _text(query, cache, table, arguments)), call.operands))
    except Exception as error:
        add_note_once(error, _text(query, cache, table, arguments))
        raise
    return with_aux(results, return_aux)


def _text(query: object, cache: object, table: object, arguments: dict[str, object]) -> str:
    """The user's call in a line, for the notes of errors and warnings."""
    given = {name: x for name, x in arguments.items() if x is not None}
    shown = {"query": query, "cache": getattr(cache, "key", cache), "table": getattr(table, "pages", table)}
    return text_of_call("paged_attention", shown | given)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The queries of a call as batch entries of a plan: the requests, or tiles of ragged tokens.

    inputs         the checked arrays; a batch entry has inputs.q_len queries
    in_pages       their pages
    query_lengths  int32 [B]: how many queries of each entry exist; None: all
    key_lengths    int32 [B]: how many keys
    origin         where the queries lie
    request        int32 [B]: the request of each entry; None: that of its number
    place          int32 [tokens, 2]: the entry of each ragged token, and its row there; None if the entries are the requests
    exists         bool [tokens]: which ragged tokens are no padding
    """

    inputs: Inputs
    in_pages: InPages
    query_lengths: Array | None
    key_lengths: Array
    origin: Origin
    request: Array | None = None
    place: Array | None = None
    exists: Array | None = None

    def of_requests(self, mod: typing.Any) -> typing.Any:
        """The mod (mask or score) of a plan whose batch entries are tiles, from one whose b is the request."""
        request = self.request
        assert request is not None
        if not callable(mod):
            return mod  # refused, with a message, where it is traced

        @functools.wraps(mod)
        def of_tiles(*at: Array) -> typing.Any:
            """`mod` with the request of the tile in place of b, the fourth argument from the end."""
            *score, b, h, q_idx, kv_idx = at
            return mod(*score, request[b], h, q_idx, kv_idx)

        return of_tiles

    def unfold(self, results: Results) -> Results:
        """The results in the order of the caller's queries."""
        place, exists = self.place, self.exists
        if place is None or exists is None:
            return results

        def tokens(x: Array, other: float) -> Array:
            """A result [B, T, N, ..] as [tokens, N, ..]; `other` at padding."""
            found = x.at[place[:, 0], place[:, 1]].get(mode="clip")
            return jnp.where(exists.reshape(-1, *[1] * (found.ndim - 1)), found, jnp.asarray(other, found.dtype))

        low, top = float("-inf"), results.max_scores
        return Results(tokens(results.out, 0.0), tokens(results.lse, low), None if top is None else tokens(top, low))


def _check(
    query: object,
    cache: PagedCache,
    table: PageTable,
    query_seq_lengths: object,
    cu_q_lens: object,
    sinks: object,
) -> Rows:
    """The rows of a call with a batch entry for each request; ragged queries are one entry of all tokens, for `_tiles`.

    Raises ValueError for arguments that do not fit.
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
            "paged_attention does not split its work over explicit mesh axes. Use jax.shard_map over the requests or the heads."
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
    counts = None if query_seq_lengths is None else check_int32("query_seq_lengths", query_seq_lengths, (requests,))
    return Rows(inputs, in_pages, counts, jnp.asarray(table.lengths), Origin(query="end"))


def _tiles(rows: Rows, ends: Array, options: KernelOptions) -> Rows:
    """The rows of ragged queries, in tiles.

    rows   one batch entry with all tokens;  ends: cu_q_lens, int32 [R + 1]
    """
    inputs, pages = rows.inputs, rows.in_pages
    tokens, requests = inputs.q_len, ends.shape[0] - 1
    group = inputs.q_heads // inputs.kv_heads
    size = options.block_q or min(
        RAGGED_TILE, max(1, PACKED_ROWS // group)
    )  # however few tokens there are: other sizes give other bits
    row, place, counts = rows_of_tokens(ends, requests, tokens)
    most = max(1, tokens // size + min(requests, tokens))
    needs = -(-counts // size)
    after = jnp.cumsum(needs, dtype=jnp.int32)
    number = jnp.arange(most, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(after, number, side="right").astype(jnp.int32), requests - 1)
    first = (number - (after - needs)[request]) * size  # of the tile, among the queries of its request
    queries = jnp.clip(counts[request] - first, 0, size)
    keys = jnp.where(queries > 0, rows.key_lengths[request], 0)
    start = jnp.clip(ends, 0, tokens)[request] + first
    at = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    rows_of_query = inputs.query[0] if tokens else jnp.zeros((1, *inputs.query.shape[2:]), inputs.query.dtype)
    query = rows_of_query.at[at].get(mode="clip")
    inputs = dataclasses.replace(inputs, query=query, batch=most, q_len=size)
    position = jnp.maximum(rows.key_lengths[request] - counts[request], 0) + first
    return Rows(
        inputs,
        pages._replace(inputs=inputs, pages=pages.pages[request]),
        queries,
        keys,
        Origin(query=position, whole=(None, None, inputs.kv_len + size, inputs.kv_len)),
        request,
        jnp.stack([(after - needs)[row] + place // size, place % size], 1),
        place < counts[row],
    )
