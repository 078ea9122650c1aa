"""`tolerance=` of a call: its checks, whether anything can go, and the block mask without the blocks that provably hold
next to nothing (flexjax/tolerance). All of it is computed of values without gradients.
"""

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from flexjax.block_mask.block_mask import BlockMask
from flexjax.block_mask.kept import arrays_of, in_bits, with_arrays
from flexjax.call.arguments import Arguments
from flexjax.call.checks import CheckedArrays
from flexjax.call.expectations import functions_of, weighted
from flexjax.errors import bad_argument
from flexjax.integers import cdiv
from flexjax.ir.origin import OriginTable, Starts
from flexjax.parallel.explicit_axes import split_of
from flexjax.parallel.split import Split
from flexjax.partition import explicit_names
from flexjax.plan.kernel_plan import FLOAT8, Lengths
from flexjax.rewrites.pages import whole_pages
from flexjax.tolerance.checks import check_bound, check_tolerance
from flexjax.tolerance.claim import Claim, digests_of
from flexjax.tolerance.keep import Given, Spec, compiled, kept
from flexjax.tolerance.norms import PagedKeys, rounding_of
from flexjax.tolerance.static import why_nothing
from flexjax.trace.memo import Memo
from flexjax.trace.trace_mod import TracedMod, trace_score_mod
from flexjax.types import ScoreMod, Weights

Array = jax.Array

DEFAULT_BLOCK = 128  # queries and keys of a block where the call has no block mask
FEW_QUERIES = 16
"""Up to this many queries, norms of all keys would take as long as the call: `score_bound` alone bounds scores."""
MOST_AT_ZERO = 1 << 22  # blocks up to which it is found while tracing whether any goes where all scores are 0


class Skipped(typing.NamedTuple):
    """What `tolerance=` makes of a call."""

    mask: BlockMask | None  # without the blocks that go; None where nothing is computed
    lost: Array  # [B, N, T], a bound of the probabilities that left each row; 0 where nothing is computed
    why: str = ""  # why nothing is computed, in a sentence
    # score_bound, [B or 1, N or 1, rows or 1, columns or 1], the block mask with all of its blocks, and its block size
    bound: Array | None = None
    whole: BlockMask | None = None
    block_size: tuple[int, int] = (1, 1)
    # what is static and the arrays without queries and keys, for explain
    spec: Spec | None = None
    given: Given | None = None

    def excess(self, score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """By how much a score is above score_bound, as a score_mod of the indices of the call's arrays."""
        assert self.bound is not None
        at = (b, h, q_idx // self.block_size[0], kv_idx // self.block_size[1])
        limit = self.bound[tuple(i if n > 1 else 0 for i, n in zip(at, self.bound.shape, strict=True))]
        return jnp.abs(score) - limit * (1 + 2.0**-18)


def check_call(
    arguments: Arguments, sizes: tuple[int, int, int, int], dtype: str, pages: PagedKeys | None = None
) -> float | None:
    """The tolerance of a call, None without. Raises ValueError for what does not go beside it, or goes without it."""
    aux = arguments.return_aux
    if arguments.tolerance is None:
        if arguments.score_bound is not None:
            raise bad_argument("score_bound", "given without tolerance", "None", "Pass tolerance= too.")
        if aux is not None and aux.lost:
            raise bad_argument("return_aux.lost", "True without tolerance", "False", "Without it nothing is lost.")
        return None
    tolerance = check_tolerance(arguments.tolerance)
    if functions_of(aux):
        raise bad_argument("tolerance", "given beside expectations", "None", "Nothing bounds what they lose.")
    if arguments.kernel_options is not None and arguments.kernel_options.invariant:
        raise bad_argument(
            "tolerance", "given beside kernel_options.invariant", "None",
            "What a tile of queries skips depends on its other tokens.",
        )  # fmt: skip
    if dtype == FLOAT8:
        raise bad_argument("tolerance", f"given for {FLOAT8} inputs", "None", "Cast query, key and value to bfloat16.")
    if arguments.block_mask is not None and arguments.block_mask.claim is not None:
        raise bad_argument(
            "tolerance", "given beside a block mask that was made with tolerance", "None",
            "The block mask has left out what may go.",
        )  # fmt: skip
    if pages is not None:
        if arguments.score_bound is None and pages.norms is None:
            raise bad_argument(
                "score_bound", "None for keys in pages without norms", "a number beside tolerance",
                "Or make the cache with paged.empty(..., norms=True): `append` then keeps the norms of each page.",
            )  # fmt: skip
        if arguments.score_bound is not None and getattr(arguments.score_bound, "shape", ()) != ():
            raise bad_argument(
                "score_bound", f"of shape {arguments.score_bound.shape}", "one number for keys in pages",  # type: ignore[union-attr]
                "Blocks of pages follow from the table.",
            )  # fmt: skip
    elif arguments.score_bound is None and sizes[2] <= FEW_QUERIES < sizes[3]:
        raise bad_argument(
            "score_bound", f"None for {sizes[2]} queries and {sizes[3]} keys", "a number beside tolerance",
            "Norms of all keys would take as long as the call. |scale * query . key| is at most score_bound.",
        )  # fmt: skip
    return tolerance


def weighted_score_mod(arguments: Arguments) -> ScoreMod | None:
    """score_mod, or what gives the weights of its scores."""
    weights = arguments.weights
    function = weights.function if isinstance(weights, Weights) else weights
    return arguments.score_mod if function is None else weighted(arguments.score_mod, function)


def check_claim(claim: Claim, arguments: Arguments, head_dim: int, dtype: str, split: bool = False) -> None:
    """Raises ValueError unless its block mask was made with `tolerance` for this call, perhaps `split` by context=."""
    made = "made with tolerance for another"
    remake = "Make it with create_block_mask for this call, or pass tolerance= to flex_attention."
    instead = "Pass tolerance= to flex_attention, which takes it."
    if split:
        remake, instead = "Make it with create_block_mask for this call.", "Make the block mask without tolerance."
    score_mod = weighted_score_mod(arguments)
    if score_mod is None or claim.weighted != (arguments.weights is not None):
        raise bad_argument("block_mask", f"{made} score_mod", "one for this call's", remake)
    if arguments.kernel_options is not None and arguments.kernel_options.invariant:
        raise bad_argument(
            "block_mask", "made with tolerance, beside kernel_options.invariant", "one without",
            "What a tile of queries skips depends on its other tokens.",
        )  # fmt: skip
    if functions_of(arguments.return_aux):
        raise bad_argument(
            "return_aux.expectations", "given beside a block mask that was made with tolerance", "None",
            "Nothing bounds what they lose.",
        )  # fmt: skip
    traced = trace_score_mod(score_mod, claim.sizes)
    if traced.program != claim.score:
        raise bad_argument("block_mask", f"{made} score_mod", "one for this call's", remake)
    if any(isinstance(x, Tracer) for x in traced.arrays):
        raise bad_argument(
            "block_mask", "made with tolerance, and the captured arrays of score_mod are traced",
            "arrays that are known, to compare their numbers", instead,
        )  # fmt: skip
    if digests_of(traced.arrays) != claim.digests:
        raise bad_argument("block_mask", f"{made} score_mod's captured numbers", "one for this call's", remake)
    own, default = arguments.scale, 1.0 / math.sqrt(max(head_dim, 1))
    given = None if isinstance(own, Array) else default if own is None else float(typing.cast(float, own))
    if given is None or given != (default if claim.scale is None else claim.scale):
        raise bad_argument("block_mask", f"{made} scale", "one for this call's", remake)
    more = {
        "query_extra": arguments.query_extra, "query_seq_lengths": arguments.query_seq_lengths,
        "key_value_seq_lengths": arguments.key_value_seq_lengths,
    }  # fmt: skip
    for name, value in more.items():
        if value is not None:
            raise bad_argument(
                name, "given beside a block mask that was made with tolerance", "None", instead,
            )  # fmt: skip
    if dtype == FLOAT8:
        raise bad_argument(
            "block_mask", f"made with tolerance beside {FLOAT8} inputs", "one without", "Cast them to bfloat16."
        )


def skipped(
    arguments: Arguments,
    inputs: CheckedArrays,
    tolerance: float,
    score: TracedMod | None,
    block_mask: BlockMask | None,
    origin: OriginTable | None,
    lengths: Lengths | None,
    products: tuple[float, str],
    pages: PagedKeys | None = None,
) -> Skipped:
    """The block mask of the call without what provably holds at most `tolerance` of each row.

    `score` is the traced score_mod at the origin of the call, `products` the scale and the name of the precision.
    """
    sizes, score_dtype = inputs.sizes, "float64" if inputs.dtype == "float64" else "float32"
    block_kv = DEFAULT_BLOCK if pages is None else whole_pages(pages.pool.shape[1], DEFAULT_BLOCK)
    block_size = (DEFAULT_BLOCK, block_kv) if block_mask is None else block_mask.block_size
    counts = cdiv(sizes.q_len, block_size[0]), cdiv(sizes.kv_len, block_size[1])
    bound = check_bound(arguments.score_bound, (sizes.batch, sizes.q_heads, *counts))
    kinds = {"bound": bound, "whole": block_mask, "block_size": block_size}
    zeros = jnp.zeros((sizes.batch, sizes.q_heads, sizes.q_len), jnp.float32)
    nothing = functools.partial(Skipped, None, _in_layout(zeros, arguments), **kinds)
    why = why_nothing(None if score is None else score.program, arguments.weights is not None)
    if why is not None or score is None or 0 in (sizes.batch, *counts):
        return nothing(why or "The call is empty.")
    scale, precision = products
    dim = sizes.head_dim + sizes.extra_dim
    spec = Spec(
        score=score.program,
        mask=None if block_mask is None else block_mask.program,
        heads=(sizes.batch, sizes.q_heads),
        sizes=(sizes.q_len, sizes.kv_len, block_size[0], block_size[1]),
        tolerance=tolerance,
        scale=scale,
        # quantised keys are rounded to the dtype of queries before the product
        rounding=rounding_of(inputs.dtype, precision, dim) + (2.0**-7 if pages and pages.scales is not None else 0.0),
        dtype=score_dtype,
        origin=None if origin is None else origin.layout,
        lists_decide=block_mask is not None and block_mask.lists_decide,
        weighted=arguments.weights is not None,
    )
    # what is known stays known inside jit
    fixed = lambda x: jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x
    tops = arguments.return_aux is not None and arguments.return_aux.max_scores
    given = Given(
        score_captures=tuple(map(fixed, score.arrays)),
        mask_captures=() if block_mask is None else tuple(map(fixed, block_mask.captures)),
        flags=_flags(block_mask),
        bound=_of_products(bound, arguments.scale),
        # with a sink a row may lose all its keys, and so its largest score
        sinks=None if inputs.sinks is None or tops else fixed(inputs.sinks),
        lengths=(None, None) if lengths is None else (lengths.query, lengths.key),
        starts=None if origin is None else origin.starts,
    )
    # of pages, lengths and tables are new in each call
    if pages is None and _keeps_all_at_zero(spec, given):
        return nothing("Where all scores are 0 no block goes, so that none is left out.")
    asked = given
    if pages is not None:
        if pages.norms is not None:
            query = _heads_first(inputs.query, inputs, arguments.layout, given.lengths[0])
            given = given._replace(query=(query,), pages=jax.tree.map(jax.lax.stop_gradient, pages))
    elif sizes.q_len > FEW_QUERIES or sizes.kv_len <= FEW_QUERIES:
        parts = lambda *xs: tuple(x for x in xs if x is not None)
        first = functools.partial(_heads_first, inputs=inputs, layout=arguments.layout)
        given = given._replace(
            query=tuple(first(x, length=given.lengths[0]) for x in parts(inputs.query, inputs.query_extra)),
            key=tuple(first(x, length=given.lengths[1]) for x in parts(inputs.key, inputs.key_extra)),
        )
    split = split_of(inputs.query, arguments.layout)
    found = (_compiled(spec) if split is None else _over_explicit_axes(spec, split, given))(given)
    made = with_arrays(block_mask, list(found[:-1]), (sizes.q_len, sizes.kv_len), block_size)
    if made.origin is None and origin is not None:
        made = dataclasses.replace(made, origin=origin)
    return Skipped(BlockMask.of(made), _in_layout(found[-1], arguments), spec=spec, given=asked, **kinds)


def _of_products(bound: Array | None, scale: object) -> Array | None:
    """The bound of the program's first argument, which a scale in an array multiplies in the program itself."""
    if bound is None or not isinstance(scale, Array):
        return bound
    return bound / jnp.abs(jax.lax.stop_gradient(scale)).astype(bound.dtype) * (1 + 2.0**-22)


def _in_layout(x: Array, arguments: Arguments) -> Array:
    """Numbers of rows, [B, N, T], in the layout of the call."""
    return x if arguments.layout == "BNTH" else jnp.swapaxes(x, 1, 2)


def check_score_bound(value: Array, excess: Array) -> Array:
    """`value`; NaN in its place where a traced score is above score_bound. Raises ValueError where that is known."""
    worst = jnp.max(jnp.nan_to_num(excess, nan=-jnp.inf, posinf=jnp.inf), initial=-jnp.inf)
    if isinstance(worst, Tracer):
        return jnp.where(worst > 0, jnp.asarray(jnp.nan, value.dtype), value)
    if float(worst) > 0:
        raise bad_argument(
            "score_bound", f"exceeded by {float(worst):.3g}", "at least |scale * query . key| at each visible entry",
            "A larger bound skips less; None takes norms of query and key.",
        )  # fmt: skip
    return value


def _flags(mask: BlockMask | None) -> tuple[Array, Array] | None:
    if mask is None:
        return None
    known = not any(isinstance(x, Tracer) for x in (mask.bits or mask.lists))
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        return mask.flags()


def _heads_first(x: Array, inputs: CheckedArrays, layout: str, length: Array | None) -> Array:
    """[B, heads, tokens, dim] in the dtype of scores, 0 past a length, where slots may hold NaN."""
    x = jax.lax.stop_gradient(x).astype("float64" if inputs.dtype == "float64" else "float32")
    x = jnp.swapaxes(x, 1, 2) if layout == "BTNH" else x
    if length is None:
        return x
    return jnp.where(jnp.arange(x.shape[2], dtype=jnp.int32)[:, None] < length[:, None, None, None], x, 0)


def _arrays(spec: Spec, given: Given) -> list[Array]:
    """The arrays of the lists, then what each row lost."""
    found = kept(spec, given)
    return [*arrays_of(found.keep, given.flags), found.lost]


@functools.lru_cache(maxsize=256)
def _compiled(spec: Spec) -> Callable[[Given], list[Array]]:
    return jax.jit(functools.partial(_arrays, spec))


_AT_ZERO: Memo[tuple[bool]] = Memo(128)
"""Whether all blocks stay where all scores are 0, by spec and known arrays."""


def _keeps_all_at_zero(spec: Spec, given: Given) -> bool:
    """Whether it is known now that no visible block goes where all scores are 0: then nothing is worth computing."""
    arrays = jax.tree.leaves(given)
    if any(isinstance(x, Tracer) for x in arrays) or math.prod((*spec.heads, *spec.counts)) > MOST_AT_ZERO:
        return False
    if any(explicit_names(jax.typeof(x).sharding.mesh) for x in arrays):
        return False
    captured = (*given.score_captures, *given.mask_captures)
    key = spec, tuple(map(id, captured)), given.flags is None
    memo = given.sinks is None and given.lengths == (None, None) and given.starts is None and not spec.lists_decide
    if memo and (found := _AT_ZERO.get(key, captured)) is not None:
        return found[0]
    with jax.ensure_compile_time_eval():
        zero = jnp.zeros((1, 1, 1, 1), jnp.float32)
        keep = np.asarray(compiled(spec)(given._replace(bound=zero)).keep)
        visible = np.ones((1, 1, 1, 1), bool) if given.flags is None else np.asarray(given.flags[0] | given.flags[1])
    found = (bool((keep | ~visible).all()),)
    if memo:
        _AT_ZERO.put(key, found, captured)
    return found[0]


# ------------------------------------------------------------------- explicit axes


def _over_explicit_axes(spec: Spec, split: Split, given: Given) -> Callable[[Given], list[Array]]:
    """`_arrays` over the explicit mesh axes that split the batch and the heads: a device makes those of its share."""
    shares = split.count(split.batch), split.count(split.heads)
    own = dataclasses.replace(spec, heads=tuple(n // k for n, k in zip(spec.heads, shares, strict=True)))
    batch, heads = split.batch or None, split.heads or None

    def by_size(x: Array) -> PartitionSpec:
        """Split like the lists along dims that are not 1."""
        return PartitionSpec(batch if x.shape[0] > 1 else None, heads if x.shape[1] > 1 else None)

    def of_keys(x: Array) -> PartitionSpec:
        return PartitionSpec(batch, heads)  # key heads that do not divide among the devices are repeated first

    whole = lambda x: PartitionSpec()
    by_entry = lambda x: PartitionSpec(batch if x.shape[0] > 1 else None)
    fields = Given(
        score_captures=tuple(map(whole, given.score_captures)),  # type: ignore[arg-type]
        mask_captures=tuple(map(whole, given.mask_captures)),  # type: ignore[arg-type]
        flags=None if given.flags is None else tuple(map(by_size, given.flags)),  # type: ignore[arg-type]
        query=tuple(map(of_keys, given.query)),  # type: ignore[arg-type]
        key=tuple(map(of_keys, given.key)),  # type: ignore[arg-type]
        bound=None if given.bound is None else by_size(given.bound),  # type: ignore[arg-type]
        sinks=None if given.sinks is None else PartitionSpec(heads),  # type: ignore[arg-type]
        lengths=tuple(None if x is None else PartitionSpec(batch) for x in given.lengths),  # type: ignore[arg-type]
        starts=None if given.starts is None else Starts(*map(by_entry, given.starts)),  # type: ignore[arg-type]
    )
    lists = PartitionSpec(batch, heads)
    count = 3 if in_bits((*own.heads, *own.counts)) else 5

    def share(given: Given) -> list[Array]:
        place = lambda names: jnp.int32(0) if not names else jax.lax.axis_index(names).astype(jnp.int32)
        first = tuple(place(names) * n for names, n in zip((split.batch, split.heads), own.heads, strict=True))
        return _arrays(own, given._replace(first=first))  # type: ignore[arg-type]

    def call(given: Given) -> list[Array]:
        around = jax.sharding.get_abstract_mesh()
        spread = lambda x: x if x.shape[1] % shares[1] == 0 else jnp.repeat(x, spec.heads[1] // x.shape[1], 1)
        given = given._replace(key=tuple(map(spread, given.key)))
        put = lambda x, s: jax.sharding.reshard(x, NamedSharding(split.mesh, s))
        given = jax.tree.map(put, given, fields)
        mapped = jax.shard_map(
            share,
            mesh=split.mesh if around.empty else None,
            in_specs=(fields,),
            out_specs=[lists] * count,
            axis_names=set(explicit_names(split.mesh)),
        )
        return mapped(given)

    return jax.jit(call)
