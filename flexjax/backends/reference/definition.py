"""Dense attention by its definition: what every backend is tested against, and a fallback that is not fast.

It shares no code with the compiler, so that a mistake there cannot be here too.  The user's callables are evaluated
on every entry by `jax.vmap`, the softmax is over whole rows, and all gradients are those of JAX.  Memory grows with
`q_len * kv_len`.

    s[b, h, q, k] = score_mod(scale * <query[b, q, h], key[b, k, h // group]>, b, h, q, k)
    p             = softmax over k of where(mask, s, -inf), with one more column `sinks[h]` if given
    out           = sum over k of p * value[b, k, h // group]

A row whose scores are all -inf (and that has no sink) has `out = 0`, `lse = -inf` and no gradient. With `weights`

    p             = weights(s, b, h, q, k), 0 where mask is off or s is -inf
    total         = sum over k of p, which takes the place of lse

An expectation of f is the sum over k of p * f(s, b, h, q, k), without the entries where mask is off or s is -inf.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

ScoreMod = Callable[..., jax.Array]
MaskMod = Callable[..., jax.Array]


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    score_mod: ScoreMod | None = None,
    weights: ScoreMod | None = None,
    expectations: Sequence[ScoreMod] = (),
    of_products: bool = False,
    mask_mod: MaskMod | None = None,
    mask: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    sinks: jax.Array | None = None,
    layout: str = "BTNH",
    query_extra: jax.Array | None = None,
    key_extra: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_keep: jax.Array | None = None,
    indices: Sequence[jax.Array] | None = None,
    lengths: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> tuple[jax.Array, ...]:
    """Attention by its definition. Shapes are for layout "BTNH"; "BNTH" swaps `T` and `N` everywhere.

    query:        [B, T, N, D]; key [B or 1, S, M, D]; value [B or 1, S, M, E]; `M` divides `N`.
    score_mod:    (score, b, h, q, kv) -> score, on scalars; `h` is the query head.
    weights:      (score, b, h, q, kv) -> weight, on scalars, in place of the softmax; None: softmax.
    expectations: functions as `weights`; with `of_products` of the score before `score_mod`.
    mask_mod:     (b, h, q, kv) -> bool, on scalars; True keeps the entry.
    mask:         bool, broadcastable to [B, N, T, S]; kept entries satisfy it and `mask_mod`.
    scale:        factor on the dot products; `1 / sqrt(D)` if None.
    sinks:        [N] logits of a column without a value behind it.
    query_extra:  [B, T, N, R] and key_extra [B, S, M', R], `M'` divides `N`: a second dot product, added to the first
                  before scaling.
    dropout_keep: bool, broadcastable to [B, N, T, S]: kept probabilities are divided by `1 - dropout_rate`, the others
    are 0.
    indices:      b, h, q and kv that the mods see, int32 of 4 dims that broadcast to [B, N, T, S]; they count from 0 if
                  None.
    lengths:      int32 [B] each: how many queries, and how many keys, of each batch entry exist; None: all. A row of a
                  query that does
                  not exist has `out = 0`, and `lse` and `max_scores` of -inf even with sinks.

    Returns `out` [B, T, N, E] in the dtype of `query`, `lse` [B, T, N] and `max_scores` [B, T, N]. The last two are
    float32, or float64 when jax's x64 mode is on; everything inside is computed in that dtype. `lse` is the natural
    logarithm and counts the sink, or the total of `weights`; `max_scores` leaves it out and has no gradient. With n
    `expectations` they follow, [B, T, N, n] in the dtype of lse.
    """
    wide = jnp.result_type(float)
    head_first = layout == "BNTH"
    rows, columns = lengths
    q, k, v = (_heads_first(x, head_first).astype(wide) for x in (query, key, value))
    q, k, v = _zero_tail(q, rows), _zero_tail(k, columns), _zero_tail(v, columns)
    batch, heads, _, dim = q.shape
    k, v = (_per_query_head(x, batch, heads) for x in (k, v))
    scores = _dot(q, k)
    if query_extra is not None and key_extra is not None:
        ends = zip((query_extra, key_extra), lengths, strict=True)
        extra = (_zero_tail(_heads_first(x, head_first).astype(wide), end) for x, end in ends)
        scores = scores + _dot(*(_per_query_head(x, batch, heads) for x in extra))
    scores = scores * (1.0 / math.sqrt(max(dim, 1)) if scale is None else scale)

    at = _indices(scores.shape) if indices is None else indices
    on = _existing(_mask_everywhere(mask_mod, mask, scores.shape, at), scores.shape, lengths)
    products = scores
    if score_mod is not None and scores.size:
        scores = _modified(score_mod, scores, on, at)
    if on is not None:
        scores = jnp.where(on, scores, -jnp.inf)

    if weights is None:
        probs, lse, max_scores = _softmax(scores, sinks)
    else:
        probs = _weights(weights, scores, at)
        lse, max_scores = probs.sum(-1), jnp.max(jax.lax.stop_gradient(scores), axis=-1, initial=-jnp.inf)
    found = []
    if expectations:
        hidden, given = scores == -jnp.inf, products if of_products else scores
        values = (_values(f, given, hidden, at) for f in expectations)
        found = [jnp.stack([(probs * x).sum(-1) for x in values], -1)]
        if rows is not None:
            found = [jnp.where((jnp.arange(found[0].shape[2]) < rows[:, None, None])[..., None], found[0], 0.0)]
    if dropout_keep is not None:
        probs = jnp.where(dropout_keep, probs / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum("bhqk,bhke->bhqe", probs, v, precision=jax.lax.Precision.HIGHEST).astype(query.dtype)
    if rows is not None:
        out = _zero_tail(out, rows)
        lse, max_scores = (
            jnp.where(jnp.arange(x.shape[2]) < rows[:, None, None], x, none)
            for x, none in ((lse, -jnp.inf if weights is None else 0.0), (max_scores, -jnp.inf))
        )
    if head_first:
        return out, lse, max_scores, *found
    return tuple(jnp.swapaxes(x, 1, 2) for x in (out, lse, max_scores, *found))


def _heads_first(x: jax.Array, already: bool) -> jax.Array:
    return x if already else jnp.swapaxes(x, 1, 2)


def _zero_tail(x: jax.Array, length: jax.Array | None) -> jax.Array:
    """x [B or 1, heads, tokens, D] with 0 from token `length` [B] of each batch entry on."""
    if length is None:
        return x
    return jnp.where(jnp.arange(x.shape[2])[:, None] < length[:, None, None, None], x, jnp.zeros((), x.dtype))


def _existing(
    on: jax.Array | None, shape: tuple[int, ...], lengths: tuple[jax.Array | None, jax.Array | None]
) -> jax.Array | None:
    """Which entries are visible and exist: bool of `shape` [B, N, T, S]; `on` itself, also None, without lengths."""
    rows, columns = lengths
    parts = [] if on is None else [on]
    if rows is not None:
        parts.append(jnp.arange(shape[2])[:, None] < rows[:, None, None, None])
    if columns is not None:
        parts.append(jnp.arange(shape[3]) < columns[:, None, None, None])
    if rows is None and columns is None:
        return on
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, parts), shape)


def _per_query_head(x: jax.Array, batch: int, heads: int) -> jax.Array:
    """x [B or 1, M, S, D] repeated to [batch, heads, S, D]."""
    x = jnp.repeat(x, heads // x.shape[1], axis=1)
    return jnp.broadcast_to(x, (batch, *x.shape[1:]))


def _dot(q: jax.Array, k: jax.Array) -> jax.Array:
    """[B, N, T, D] and [B, N, S, D] give [B, N, T, S]."""
    return jnp.einsum("bhqe,bhke->bhqk", q, k, precision=jax.lax.Precision.HIGHEST)


def _indices(shape: tuple[int, ...]) -> list[jax.Array]:
    """int32 0 .. n - 1 along each dimension of the shape, size 1 along the others."""
    return jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in shape), indexing="ij", sparse=True)


def _mask_everywhere(
    mask_mod: MaskMod | None, mask: jax.Array | None, shape: tuple[int, ...], at: Sequence[jax.Array]
) -> jax.Array | None:
    """Which entries both `mask` and `mask_mod` keep: bool of `shape` [B, N, T, S]; None if neither is given."""
    on = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), shape)
    if mask_mod is None:
        return on
    if math.prod(shape) == 0:
        return jnp.zeros(shape, bool)

    def entry(*at: jax.Array) -> jax.Array:
        return jnp.asarray(mask_mod(*at), bool)

    by_mod = jnp.broadcast_to(over_entries(entry)(*at), shape)
    return by_mod if on is None else on & by_mod


def over_entries(entry: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of arrays of 4 dims that broadcasts them and calls `entry` with the scalars at each element.

    A dim of size 1 is read without a vmap over it.
    """

    def mapped(*arrays: jax.Array) -> jax.Array:
        shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
        run, flat = entry, [x.reshape([n for n in x.shape if n > 1]) for x in arrays]
        for axis in (3, 2, 1, 0):
            if shape[axis] > 1:
                run = jax.vmap(run, in_axes=tuple(0 if x.shape[axis] > 1 else None for x in arrays))
        return run(*flat).reshape(shape)

    return mapped


def _modified(score_mod: ScoreMod, scores: jax.Array, on: jax.Array | None, index: Sequence[jax.Array]) -> jax.Array:
    """The scores [B, N, T, S] after `score_mod`; meaningful at kept entries only."""

    def entry(score: jax.Array, *at: jax.Array) -> jax.Array:
        return jnp.asarray(score_mod(score, *at), scores.dtype)

    if on is None:
        return over_entries(entry)(scores, *index)

    def on_kept_entries(scores: jax.Array) -> jax.Array:
        # At its own position a masked entry may be undefined (a square root of a negative distance, a read of padding):
        # its derivative may be infinite, and times a zero cotangent that is NaN, so masking the result is not enough.
        # It is evaluated with the score and the position of the first kept entry.
        kept = jnp.unravel_index(jnp.argmax(on), on.shape)
        grid = [jnp.broadcast_to(x, on.shape) for x in index]
        places = [jnp.where(on, here, here[kept]) for here in grid]
        values = jnp.where(on, scores, scores[kept])
        return jax.vmap(entry)(values.ravel(), *(x.ravel() for x in places)).reshape(scores.shape)

    return jax.lax.cond(jnp.any(on), on_kept_entries, jnp.zeros_like, scores)


def _weights(weights: ScoreMod, scores: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """The weights [B, N, T, S] of scores that are -inf at hidden entries."""
    return _values(weights, scores, scores == -jnp.inf, at)


def _values(function: ScoreMod, scores: jax.Array, hidden: jax.Array, at: Sequence[jax.Array]) -> jax.Array:
    """A function of scores [B, N, T, S], 0 where `hidden`."""
    if not scores.size:
        return scores
    return jnp.where(hidden, 0.0, _modified(function, jnp.where(hidden, 0.0, scores), ~hidden, at))


@jax.custom_jvp
def _below(scores: jax.Array, top: jax.Array) -> jax.Array:
    """scores - top, but exactly 0 where equal, because a compiler may subtract from a score that it did not round."""
    return jnp.where(scores == top, 0.0, scores - top)


@_below.defjvp
def _below_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _below(*primals), tangents[0] - tangents[1]


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(probabilities [B, N, T, S], lse [B, N, T], largest score [B, N, T]) of scores [B, N, T, S].

    sinks are [N]. In a row whose scores are all -inf, probabilities are 0; lse is the sink, or -inf.
    """
    fixed = jax.lax.stop_gradient(scores)
    max_scores = jnp.max(fixed, axis=-1, initial=-jnp.inf)
    shift = max_scores
    if sinks is not None:
        sinks = jnp.asarray(sinks, scores.dtype)[None, :, None]
        shift = jnp.maximum(shift, jax.lax.stop_gradient(sinks))
    shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
    weights = jnp.exp(_below(scores, shift[..., None]))
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    dead = total == 0.0
    total = jnp.where(dead, 1.0, total)
    lse = jnp.where(dead, -jnp.inf, jnp.log(total) + shift)
    # XLA's maxima lose NaN on a CPU, from 4096 scores on
    return weights / total[..., None], lse, jnp.where(jnp.isnan(lse), jnp.nan, max_scores)
