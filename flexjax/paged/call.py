"""`paged_attention`: attention over a cache in pages, for requests of different lengths.

It is flex_attention on the keys that `flexjax.paged.gather` would return, with lengths and an origin at the end of the
keys. Ragged requests of many queries are a pass of their own, in larger tiles (rows.py). A call with shared prefixes is
two partial calls, which merge_states.py merges: each group over the shared tokens, and each request over its own.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import masks
from flexjax.attention import with_aux
from flexjax.call.arguments import Arguments, text_of_call, with_signature
from flexjax.call.checks import check_options, check_weights
from flexjax.call.expectations import functions_by_argument, functions_of
from flexjax.call.prepare import PreparedCall, prepare
from flexjax.errors import add_note_once, bad_argument, kind_of, public
from flexjax.ir.reach import reach_of
from flexjax.merge_states import merge_attention_states
from flexjax.mod_tools.made_for import Reach, check_sizes
from flexjax.mod_tools.settings import own
from flexjax.paged.cache import PagedCache
from flexjax.paged.rows import Rows, check_rows, prefix_rows, prefix_starts, ragged_passes, ragged_rows, tile_size
from flexjax.paged.shared_prefix import SharedPrefix, check_shared
from flexjax.paged.table import PageTable, described
from flexjax.passes import dispatch
from flexjax.passes.autodiff import attention
from flexjax.plan import invariant
from flexjax.plan.kernel_plan import Results
from flexjax.types import (
    ArrayArgument,
    ArrayOrShape,
    AuxOutput,
    AuxRequest,
    Implementations,
    KernelOptions,
    MaskMod,
    Origin,
    ScoreMod,
    Weights,
)

Array = jax.Array

FEW_QUERIES, MANY_QUERIES = "requests of few queries", "requests of many queries"  # the two passes over ragged queries


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PagedArguments:
    """The arguments of `paged_attention`, unchecked. Which implementation runs is no part of a plan."""

    query: ArrayOrShape = dataclasses.field(kw_only=False)
    cache: PagedCache = dataclasses.field(kw_only=False)
    table: PageTable = dataclasses.field(kw_only=False)
    score_mod: ScoreMod | None = None
    weights: ScoreMod | Weights | None = None
    mask_mod: MaskMod | None = masks.causal
    query_seq_lengths: ArrayOrShape | None = None
    cu_q_lens: ArrayOrShape | None = None
    scale: float | ArrayOrShape | None = None
    sinks: ArrayOrShape | None = None
    shared: SharedPrefix | None = None
    origin: Origin | None = None
    kernel_options: KernelOptions | None = None
    tolerance: float | None = None
    score_bound: float | ArrayOrShape | None = None
    return_aux: AuxRequest | None = None


class PagedKeywords(typing.TypedDict, total=False):
    """For type checkers: the keywords of PagedArguments but return_aux, which decides the type of the result."""

    score_mod: ScoreMod | None
    weights: ScoreMod | Weights | None
    mask_mod: MaskMod | None
    query_seq_lengths: ArrayArgument | None
    cu_q_lens: ArrayArgument | None
    scale: float | ArrayArgument | None
    sinks: ArrayArgument | None
    shared: SharedPrefix | None
    origin: Origin | None
    kernel_options: KernelOptions | None
    tolerance: float | None
    score_bound: float | ArrayArgument | None


@typing.overload
def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    return_aux: None = None,
    implementation: Implementations | None = None,
    **keywords: typing.Unpack[PagedKeywords],
) -> Array: ...


@typing.overload
def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    return_aux: AuxRequest,
    implementation: Implementations | None = None,
    **keywords: typing.Unpack[PagedKeywords],
) -> tuple[Array, AuxOutput]: ...


@public
@own
@with_signature(PagedArguments, PagedKeywords)
def paged_attention(
    query: ArrayArgument,
    cache: PagedCache,
    table: PageTable,
    *,
    return_aux: AuxRequest | None = None,
    implementation: Implementations | None = None,
    **keywords: typing.Unpack[PagedKeywords],
) -> Array | tuple[Array, AuxOutput]:
    """Attention of the newest tokens of R requests over a cache in pages, for decoding, chunked prefill, or both.

    query        [R, T, N, D], or [tokens, N, D] with cu_q_lens: the last tokens of each request, whose keys are in the
                 cache. Of the dtype of the cache; of bfloat16, float16, float32 or float64 if the cache is quantised
    cache, table  a PagedCache and a PageTable (flexjax.paged). M key heads of the cache divide N
    score_mod, weights, mask_mod  as for flex_attention, with b the request and positions in it; causal by default
    query_seq_lengths  int32 [R] or an int, for [R, T, N, D]: how many of the T queries of each request exist; default
                       all
    cu_q_lens    int32 [R + 1]: request r has the queries cu_q_lens[r] .. cu_q_lens[r + 1] - 1; later rows are padding
    scale, sinks, return_aux, implementation  as for flex_attention
    shared       SharedPrefix: which requests begin with the same tokens, which are read once for the queries of a tile
    origin       Origin(batch=, head=): the first request and query head of this call, inside jax.shard_map
    kernel_options  as for flex_attention; with cu_q_lens or shared, block_q is the number of queries of a tile
    tolerance    as for flex_attention, not beside `shared`: pages that provably hold next to nothing for all heads that
                 a kernel reads them for are not read
    score_bound  beside tolerance, as for flex_attention, one number; a cache with `norms` does without

    Returns out [R, T, N, E] or [tokens, N, E] in the dtype of query, or (out, AuxOutput) with return_aux, whose results
    are [R, T, N] or [tokens, N]. Rows of queries that do not exist are 0, with lse -inf. It equals

        k, v = flexjax.paged.gather(cache, table)
        flex_attention(query, k, v, origin=Origin(query="end"), key_value_seq_lengths=table.lengths, ...)

    but it reads only pages with keys that mask_mod shows. Results are batch-invariant without `tolerance`: bitwise the
    same whatever the other requests, page numbers, sizes and padding are. New lengths, tables and offsets compile
    nothing. Gradients, on xla, reach query, scale, sinks and the arrays that score_mod and weights capture, not the
    cache. There is no dropout. Raises ValueError for arguments that do not fit, NotImplementedError if no backend
    accepts the call. See docs/serving.md.
    """
    arguments = PagedArguments(query, cache, table, return_aux=return_aux, **keywords)
    try:
        names = dispatch.candidates(implementation)
        parts = prepare_paged(arguments)
        for part in parts:
            dispatch.runs_everywhere(part.call.plan, names)
        text = text_of_paged("paged_attention", arguments)
        results = _merged([(part, part.run(names, text)) for part in parts])
        lost = _merged_lost(parts)
    except Exception as error:
        add_note_once(error, text_of_paged("paged_attention", arguments))
        raise
    return with_aux(results._replace(out=results.out.astype(parts[0].call.plan.dtype)), arguments, lost)


def text_of_paged(function: str, arguments: PagedArguments) -> str:
    """The user's call in a line, for notes of errors: the pool of keys for the cache, pages for the table."""
    given = {f.name: x for f in dataclasses.fields(arguments) if (x := getattr(arguments, f.name)) is not None}
    cache, table = arguments.cache, arguments.table
    shown = {"query": arguments.query, "cache": getattr(cache, "key", cache), "table": getattr(table, "pages", table)}
    return text_of_call(function, given | shown)


@dataclasses.dataclass(frozen=True)
class Part:
    name: str  # "all"; keys: "shared prefixes", "own tokens"; queries: FEW_QUERIES, MANY_QUERIES
    call: PreparedCall
    rows: Rows

    def run(self, names: tuple[str, ...] | None, text: str) -> Results:
        """The results in the order and shape of the caller's queries: those of no keys where it has none."""
        found = attention(self.call.problem(names, text), self.call.operands)
        return self.rows.unfold(found, self.call.plan.lse_without_keys)


def prepare_paged(arguments: PagedArguments) -> list[Part]:
    """Checks the arguments of `paged_attention` and plans its passes, in the order of `Part.name`."""
    options = check_options(arguments.return_aux, arguments.kernel_options)
    if arguments.tolerance is not None and arguments.shared is not None:
        raise bad_argument(
            "tolerance", "given beside shared", "None", "Its proof is of all keys of a row, in one pass over them."
        )
    if options.invariant and arguments.shared is not None:
        raise NotImplementedError(invariant.refuses_parts("shared"))
    cu_q_lens = arguments.cu_q_lens
    score_mod = _placed(arguments.score_mod, arguments.origin)
    mask_mod = _placed(arguments.mask_mod, arguments.origin)
    rows, queries = check_rows(
        arguments.query, arguments.cache, arguments.table, arguments.query_seq_lengths, cu_q_lens, arguments.sinks
    )
    counts = (queries.counts.shape[0], rows.inputs.sizes.q_heads, 1, 1)
    known = reach_of(arguments.origin, None, counts)
    weights = check_weights(arguments.weights, arguments.sinks, arguments.return_aux, rows.inputs.dtype)
    function = None if weights is None else weights.function
    given = {"score_mod": arguments.score_mod, "weights": function, "mask_mod": arguments.mask_mod}
    for name, mod in (given | functions_by_argument(arguments.return_aux)).items():
        # how long requests are is not known
        check_sizes(name, mod, Reach((*known.counts[:2], None, None), known.exact))
    asked = options.block_q
    if cu_q_lens is not None or arguments.shared is not None:
        options = dataclasses.replace(
            options, block_q=None
        )  # `size` has it, and the decode kernel refuses plans that give it

    function = _placed(function, arguments.origin)
    expected = {n: _placed(f, arguments.origin) for n, f in functions_of(arguments.return_aux).items()}

    def part(name: str, rows: Rows, mask_mod: MaskMod | None) -> Part:
        return_aux = arguments.return_aux
        if return_aux is not None and expected:
            mapped = {n: rows.mod_of_entries(f) for n, f in expected.items()}
            return_aux = dataclasses.replace(return_aux, expectations=mapped)
        given = Arguments(
            rows.inputs.query,
            rows.inputs.key,
            rows.inputs.value,
            return_aux=return_aux,
            score_mod=rows.mod_of_entries(score_mod),
            weights=None if weights is None else dataclasses.replace(weights, function=rows.mod_of_entries(function)),
            mask_mod=rows.mod_of_entries(mask_mod),
            scale=arguments.scale,
            kernel_options=options,
            query_seq_lengths=rows.query_lengths,
            key_value_seq_lengths=rows.key_lengths,
            origin=rows.origin,
            tolerance=arguments.tolerance,
            score_bound=arguments.score_bound,
        )
        call = prepare(given, rows.in_pages)
        plan = dataclasses.replace(call.plan, partial=arguments.shared is not None)
        return Part(name, dataclasses.replace(call, plan=plan), rows)

    if arguments.shared is None:
        passes = [rows] if cu_q_lens is None else ragged_passes(rows, queries, asked)
        names = ("all",) if len(passes) == 1 else (FEW_QUERIES, MANY_QUERIES)
        return [part(name, made, mask_mod) for name, made in zip(names, passes, strict=True)]
    size = asked or tile_size(rows.inputs)
    own = rows if cu_q_lens is None else ragged_rows(rows, queries, size)
    shared = check_shared(arguments.shared, queries.counts.shape[0], rows.in_pages.page)
    _, start = prefix_starts(shared, rows.key_lengths)
    prefix = prefix_rows(rows, queries, shared, size)
    return [part("shared prefixes", prefix, mask_mod), part("own tokens", own, _from(mask_mod, start))]


def _placed(mod: typing.Any, origin: object) -> typing.Any:
    """The mod with b + origin.batch and h + origin.head in place of b and h. Raises ValueError."""
    if origin is None:
        return mod
    if not isinstance(origin, Origin):
        raise bad_argument("origin", kind_of(origin), "a flexjax.Origin or None", "None starts at 0.")
    if origin.documents is not None:
        raise bad_argument("origin.documents", "given", "None", "Each request is a document; give requests.")
    for name in ("query", "key"):
        start = getattr(origin, name)
        if not isinstance(start, int) or start != 0:
            raise bad_argument(
                f"origin.{name}", described(start), "0: positions count in the request", "Give batch and head alone."
            )
    batch, head = (_start(name, getattr(origin, name)) for name in ("batch", "head"))
    # what is not callable is refused where it is traced
    if not callable(mod):
        return mod  # None, or refused where it is traced

    @functools.wraps(mod)
    def of_whole(*at: Array) -> typing.Any:
        *score, b, h, q_idx, kv_idx = at
        return mod(*score, b + batch, h + head, q_idx, kv_idx)

    return of_whole


def _start(name: str, given: object) -> int | Array:
    """The field `name` of an origin as an int or int32 scalar. Raises ValueError for any other or a negative int."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, Array | np.ndarray) and given.shape == () and jnp.issubdtype(given.dtype, jnp.integer):
        return jnp.asarray(given, jnp.int32)
    got = repr(given) if isinstance(given, int) else described(given)
    raise bad_argument(f"origin.{name}", got, "an int that is not negative, or an int32 scalar", "Pass one number.")


def _from(mask_mod: MaskMod | None, start: Array) -> MaskMod:
    """The mask of a pass over own tokens: `mask_mod` for keys from start[b] on (start int32 [R]), False before."""
    if mask_mod is not None and not callable(mask_mod):
        return mask_mod  # refused, with a message, where it is traced

    def own_tokens(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        own = kv_idx >= start[b]
        return own if mask_mod is None else own & mask_mod(b, h, q_idx, kv_idx)

    return own_tokens


def _merged_lost(parts: list[Part]) -> Array | None:
    """What `tolerance` takes from the caller's queries at most; None without."""
    found = [part.rows.of_queries(part.call.skipped.lost, 0.0) for part in parts if part.call.skipped is not None]
    return functools.reduce(jnp.maximum, found) if found else None


def _merged(passes: list[tuple[Part, Results]]) -> Results:
    results = [found for _, found in passes]
    if len(results) == 1:
        return results[0]
    if passes[0][0].name == FEW_QUERIES:
        many = passes[1][0].rows.exists
        assert many is not None
        either = lambda few, x: jnp.where(many.reshape(-1, *[1] * (x.ndim - 1)), x, few)
        return jax.tree.map(either, *results)
    if passes[0][0].call.plan.weighted:
        return jax.tree.map(jnp.add, *results)
    lses = jnp.stack([r.lse for r in results])
    out, lse = merge_attention_states(jnp.stack([r.out for r in results]), lses)
    sums = [r.expectations for r in results if r.expectations is not None]
    tops = [r.max_scores for r in results if r.max_scores is not None]
    merged = merge_attention_states(jnp.stack(sums), lses)[0] if sums else None
    return Results(out, lse, jnp.maximum(*tops) if tops else None, None, merged)
