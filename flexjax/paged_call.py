"""`paged_attention`: attention over a cache in pages, for requests of different lengths.

It is flex_attention on keys that `flexjax.paged.gather` would return, with lengths and an origin at the end of the keys, and takes the
same way: paged_rows.py writes the inputs, `prepare` traces the mods and writes the plan, which says that keys are in pages, and
the primitives of autodiff.py run it.

**Ragged queries.** Requests of many queries are a pass of their own, in larger tiles (paged_rows.py). Each query is in one of the passes.

**Shared prefixes.** Such a call is two calls. One attends the queries of each group of requests over the tokens that the group shares,
the other each request over its own tokens. Both are partial: their results are merged as merge_states.py says, and sinks
belong to the second.
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
from flexjax.check_arguments import check_options
from flexjax.errors import add_note_once, bad_argument, kind_of
from flexjax.merge_states import merge_attention_states
from flexjax.paged.cache import PagedCache
from flexjax.paged.shared_prefix import SharedPrefix, check_shared
from flexjax.paged.table import PageTable, described
from flexjax.paged_rows import (
    Rows,
    check_rows,
    prefix_rows,
    prefix_starts,
    ragged_passes,
    ragged_rows,
    tile_size,
)
from flexjax.plan.kernel_plan import Results
from flexjax.prepare import Call, prepare
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

FEW_QUERIES, MANY_QUERIES = "requests of few queries", "requests of many queries"
"""Names of the two passes over ragged queries."""


class PagedArguments(typing.TypedDict, total=False):
    """The keywords of `paged_attention` except return_aux, which decides the type of the result."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    query_seq_lengths: ArrayArgument | None
    cu_q_lens: ArrayArgument | None
    scale: float | ArrayArgument | None
    sinks: ArrayArgument | None
    shared: SharedPrefix | None
    origin: Origin | None
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
    shared: SharedPrefix | None = None,
    origin: Origin | None = None,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention of the newest tokens of R requests over a cache in pages, for decoding, chunked prefill, and both in one call.

    query        [R, T, N, D], or the queries of all requests one after the other, [tokens, N, D], with cu_q_lens. The queries of a
                 request are its last tokens: their keys are in the cache already (`flexjax.paged.append` before attention). Of the
                 dtype of the cache; of bfloat16, float16, float32 or float64 if the cache is quantised
    cache, table a PagedCache and a PageTable (flexjax.paged). M key heads of the cache divide N
    score_mod, mask_mod  as for flex_attention: b is the request, h the query head, q_idx and kv_idx the positions in the request,
                 whatever its pages are. mask_mod is causal by default; None: every query sees all keys of its request
    query_seq_lengths  int32 [R] or an int for all, for [R, T, N, D]: how many of the T queries of each request exist; default all
    cu_q_lens    int32 [R + 1]: request r has the queries cu_q_lens[r] .. cu_q_lens[r + 1] - 1; rows after the last are padding
    scale, sinks, return_aux, implementation  as for flex_attention
    shared       SharedPrefix: which requests begin with the same tokens. These are read once for the queries of a tile, and not
                 once for each request
    origin       Origin(batch=, head=): which request and which query head of the whole problem the first of this call is, inside
                 jax.shard_map over requests or heads. Mods see those of the whole problem; positions count in the request, so
                 origin.query and origin.key must be 0, and origin.whole is not read
    kernel_options  as for flex_attention; with cu_q_lens or shared, block_q is the number of queries of a tile, default 16,
                 or fewer where more than four query heads share a key head; with cu_q_lens alone it is 128 for requests of more
                 than 256 queries, if the cache has 16 bits and head dims up to 256

    Returns out [R, T, N, E] or [tokens, N, E] in the dtype of query, or (out, AuxOutput) with return_aux, whose results are
    [R, T, N] or [tokens, N]. Rows of queries that do not exist are 0, with lse -inf. It equals

        k, v = flexjax.paged.gather(cache, table)
        flex_attention(query, k, v, origin=Origin(query="end"), query_seq_lengths=..., key_value_seq_lengths=table.lengths, ...)

    but it reads only pages with keys that mask_mod shows, in proportion to the lengths (the GPU kernels for many queries gather all pages
    of the table first where they cannot read them in place, see `flexjax.explain`), and page numbers past the length of a
    request may be anything. Quantised pages are multiplied by their scales before score_mod.

    Results are batch-invariant: those of a request are bitwise the same whatever the other requests, their number, page numbers,
    the sizes of pool and table, padding, and rows past query_seq_lengths are. They may change with the mods, T (not with
    cu_q_lens) and the static options and, with `shared`, with how many tokens the group of the request shares, because there the
    sum is cut in two.

    New lengths, tables and offsets neither trace nor compile anything. Gradients reach query, scale, sinks and the arrays that
    score_mod captures, on xla; those of the cache raise NotImplementedError. Dropout is for training: there is none here. Raises
    ValueError for arguments that do not fit, and NotImplementedError, with each backend's reason, if no backend accepts the call.
    """
    arguments: PagedArguments = {
        "score_mod": score_mod, "mask_mod": mask_mod, "query_seq_lengths": query_seq_lengths, "cu_q_lens": cu_q_lens,
        "scale": scale, "sinks": sinks, "shared": shared, "origin": origin, "kernel_options": kernel_options,
    }  # fmt: skip
    try:
        names = dispatch.candidates(implementation)
        parts = prepare_paged(query, cache, table, return_aux, arguments)
        for part in parts:
            dispatch.runs_everywhere(part.call.plan, names)
        text = text_of_paged("paged_attention", query, cache, table, return_aux, arguments)
        results = _merged([(part, part.run(names, text)) for part in parts])
    except Exception as error:
        add_note_once(error, text_of_paged("paged_attention", query, cache, table, return_aux, arguments))
        raise
    return with_aux(results._replace(out=results.out.astype(parts[0].call.plan.dtype)), return_aux)


def text_of_paged(
    function: str,
    query: object,
    cache: object,
    table: object,
    return_aux: AuxRequest | None,
    arguments: PagedArguments,
) -> str:
    """The user's call in a line, for the notes of errors and warnings. A cache is shown by its pool of keys, a table by its pages.

    function                          the name of the function that the user called
    query, cache, table, return_aux   the arguments of paged_attention, which may be wrong
    arguments                         its other keywords; those that are None are left out
    """
    given = {name: x for name, x in (arguments | {"return_aux": return_aux}).items() if x is not None}
    shown = {"query": query, "cache": getattr(cache, "key", cache), "table": getattr(table, "pages", table)}
    return text_of_call(function, shown | given)


@dataclasses.dataclass(frozen=True)
class Part:
    """One pass over pages: all of a call, or a part of it.

    name   "all"; or which keys it sees: "shared prefixes", "own tokens"; or which queries it has: FEW_QUERIES, MANY_QUERIES
    call   its plan and operands
    rows   its queries
    """

    name: str
    call: Call
    rows: Rows

    def run(self, names: tuple[str, ...] | None, text: str) -> Results:
        """The results of the pass, in the order and shape of the caller's queries: out 0 and lse -inf at queries that it does not have.

        names   backends to ask, in order; None: the default order
        text    the user's call in a line
        """
        return self.rows.unfold(attention(self.call.problem(names, text), self.call.operands))


def prepare_paged(
    query: object, cache: PagedCache, table: PageTable, return_aux: AuxRequest | None, arguments: PagedArguments
) -> list[Part]:
    """Checks the arguments of `paged_attention`, and plans its passes, which the caller runs and merges: one, named "all"; two,
    FEW_QUERIES and MANY_QUERIES, for ragged queries of which a request may have many; or two, "shared prefixes" and "own tokens", with
    `shared`, whose plans are partial. The order of the list is this one.

    return_aux   the argument of that name
    arguments    the other keywords, by name; of these, `implementation` is not read

    Raises ValueError for arguments that do not fit.
    """
    get = arguments.get
    options = check_options(return_aux, get("kernel_options"))
    cu_q_lens = get("cu_q_lens")
    score_mod = _placed(get("score_mod"), get("origin"))
    mask_mod = _placed(get("mask_mod", masks.causal), get("origin"))
    rows, queries = check_rows(query, cache, table, get("query_seq_lengths"), cu_q_lens, get("sinks"))
    asked = options.block_q
    if cu_q_lens is not None or get("shared") is not None:
        options = dataclasses.replace(
            options, block_q=None
        )  # `size` has it, and the decode kernel refuses plans that give it

    def part(name: str, rows: Rows, mask_mod: MaskMod | None, sinks: ArrayArgument | None) -> Part:
        """Plans the pass over the keys of `rows`, and returns it. Its plan is partial if the call has `shared`.

        name              of the pass
        mask_mod, sinks   of the pass, where b is the request; the other arguments are those of the call
        """
        call = prepare(
            rows.inputs.query,
            rows.inputs.key,
            rows.inputs.value,
            return_aux=return_aux,
            in_pages=rows.in_pages,
            score_mod=rows.mod_of_entries(score_mod),
            mask_mod=rows.mod_of_entries(mask_mod),
            scale=get("scale"),
            sinks=sinks,
            kernel_options=options,
            query_seq_lengths=rows.query_lengths,
            key_value_seq_lengths=rows.key_lengths,
            origin=rows.origin,
        )
        plan = dataclasses.replace(call.plan, partial=get("shared") is not None)
        return Part(name, dataclasses.replace(call, plan=plan), rows)

    if get("shared") is None:
        passes = [rows] if cu_q_lens is None else ragged_passes(rows, queries, asked)
        names = ("all",) if len(passes) == 1 else (FEW_QUERIES, MANY_QUERIES)
        return [part(name, made, mask_mod, get("sinks")) for name, made in zip(names, passes, strict=True)]
    size = asked or tile_size(rows.inputs)
    own = rows if cu_q_lens is None else ragged_rows(rows, queries, size)
    shared = check_shared(get("shared"), queries.counts.shape[0], rows.in_pages.page)
    _, start = prefix_starts(shared, rows.key_lengths)
    prefix = prefix_rows(rows, queries, shared, size)
    return [
        part("shared prefixes", prefix, mask_mod, None),
        part("own tokens", own, _from(mask_mod, start), get("sinks")),
    ]


def _placed(mod: typing.Any, origin: object) -> typing.Any:
    """The mod (mask or score) with b + origin.batch and h + origin.head in place of b and h; `mod` itself for an origin of None, and None
    for None.

    A mod that is not callable is returned as it is, because it is refused where it is traced. Raises ValueError for an `origin` that is
    no Origin, for one of queries or keys, because their positions count in the request, and for a batch or head that is no number.
    """
    if origin is None:
        return mod
    if not isinstance(origin, Origin):
        raise bad_argument("origin", kind_of(origin), "a flexjax.Origin or None", "None starts at 0.")
    for name in ("query", "key"):
        start = getattr(origin, name)
        if not isinstance(start, int) or start != 0:
            raise bad_argument(
                f"origin.{name}", described(start), "0: positions count in the request", "Give batch and head alone."
            )
    batch, head = (_start(name, getattr(origin, name)) for name in ("batch", "head"))
    if not callable(mod):
        return mod  # None, or refused where it is traced

    @functools.wraps(mod)
    def of_whole(*at: Array) -> typing.Any:
        """`mod` with the indices of the whole problem in place of b and h, the fourth and third arguments from the end."""
        *score, b, h, q_idx, kv_idx = at
        return mod(*score, b + batch, h + head, q_idx, kv_idx)

    return of_whole


def _start(name: str, given: object) -> int | Array:
    """The field `name` ("batch" or "head") of an origin, whose value is `given`, as an int or an int32 scalar.

    Raises ValueError unless it is an int that is not negative or an integer scalar.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, Array | np.ndarray) and given.shape == () and jnp.issubdtype(given.dtype, jnp.integer):
        return jnp.asarray(given, jnp.int32)
    got = repr(given) if isinstance(given, int) else described(given)
    raise bad_argument(f"origin.{name}", got, "an int that is not negative, or an int32 scalar", "Pass one number.")


def _from(mask_mod: MaskMod | None, start: Array) -> MaskMod:
    """The mask of a pass over own tokens: `mask_mod` for keys from start[b] on, False for the keys before.

    mask_mod   None: all keys from start[b] on are visible; what is not callable is returned as it is, and refused later
    start      int32 [R]: how many tokens of each request its group shares
    """
    if mask_mod is not None and not callable(mask_mod):
        return mask_mod  # refused, with a message, where it is traced

    def own_tokens(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """Whether the query sees the key by `mask_mod`, and the key is not in the prefix that the request shares.

        b               the number of the request in this call, also in a pass whose batch entries are tiles (`Rows.mod_of_entries`)
        h               the query head
        q_idx, kv_idx   positions in the request
        """
        own = kv_idx >= start[b]
        return own if mask_mod is None else own & mask_mod(b, h, q_idx, kv_idx)

    return own_tokens


def _merged(passes: list[tuple[Part, Results]]) -> Results:
    """The results of a call from those of its passes, in the order of the caller's queries: of one pass as they are; of FEW_QUERIES and
    MANY_QUERIES each row from the pass that has the query; of passes over different keys (partial plans) merged by lse (merge_states.py),
    with out in the dtype of these passes and the larger of the max_scores. max_scores is None if it was not asked for.

    passes   each part with what its `run` returned
    """
    results = [found for _, found in passes]
    if len(results) == 1:
        return results[0]
    if passes[0][0].name == FEW_QUERIES:
        many = passes[1][0].rows.exists
        assert many is not None
        either = lambda few, x: jnp.where(many.reshape(-1, *[1] * (x.ndim - 1)), x, few)
        return jax.tree.map(either, *results)
    out, lse = merge_attention_states(jnp.stack([r.out for r in results]), jnp.stack([r.lse for r in results]))
    tops = [r.max_scores for r in results if r.max_scores is not None]
    return Results(out, lse, jnp.maximum(*tops) if tops else None)
