"""Attention over packed documents, with the arguments that language-model trainers pass to their attention."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.attention import flex_attention
from flexjax.call.arguments import Arguments
from flexjax.call.checks import check_array, check_inputs
from flexjax.context.context_parallel import ContextParallel
from flexjax.errors import bad_argument, public
from flexjax.mod_tools.factory_arguments import integer_array, position_array
from flexjax.mod_tools.settings import own
from flexjax.nn.placed_masks import Placed, Window, negative_is_padding, zero_is_padding
from flexjax.types import (
    AuxOutput,
    AuxRequest,
    Dropout,
    Implementations,
    KernelOptions,
    Layout,
    MaskMod,
    Origin,
    Precision,
    ScoreMod,
)

Array = jax.Array


Padding = typing.Literal["zero", "negative"]
_PADDING = {"zero": zero_is_padding, "negative": negative_is_padding}


class Keywords(typing.TypedDict, total=False):
    """For type checkers: the keywords of segment_attention but return_aux."""

    kv_segment_ids: Array | None
    kv_positions: Array | None
    window: Window | None
    chunk: int | None
    softcap: float | Array | None
    sinks: Array | None
    causal: bool
    padding: Padding
    scale: float | Array | None
    precision: Precision
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    or_mask: MaskMod | None
    layout: Layout
    implementation: Implementations | None
    kernel_options: KernelOptions | None
    dropout: Dropout | None
    query_seq_lengths: int | Array | None
    key_value_seq_lengths: int | Array | None
    origin: Origin | None
    context: ContextParallel | None


@typing.overload
def segment_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    *,
    return_aux: None = None,
    **keywords: typing.Unpack[Keywords],
) -> Array: ...


@typing.overload
def segment_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    *,
    return_aux: AuxRequest,
    **keywords: typing.Unpack[Keywords],
) -> tuple[Array, AuxOutput]: ...


@public
@own
def segment_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    *,
    kv_segment_ids: Array | None = None,
    kv_positions: Array | None = None,
    window: Window | None = None,
    chunk: int | None = None,
    softcap: float | Array | None = None,
    sinks: Array | None = None,
    causal: bool = True,
    padding: Padding = "zero",
    scale: float | Array | None = None,
    precision: Precision = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    or_mask: MaskMod | None = None,
    layout: Layout = "BTNH",
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
    dropout: Dropout | None = None,
    query_seq_lengths: int | Array | None = None,
    key_value_seq_lengths: int | Array | None = None,
    origin: Origin | None = None,
    context: ContextParallel | None = None,
    return_aux: AuxRequest | None = None,
) -> Array | tuple[Array, AuxOutput]:
    """Attention in which a query sees the keys of its own document.

        mask = (segment_ids[b, q] == kv_segment_ids[b, kv]) & (segment_ids[b, q] != 0)
               & (positions[b, q] >= kv_positions[b, kv])                             if causal
               & (abs(positions[b, q] - kv_positions[b, kv]) < window)                if window
               & (positions[b, q] // chunk == kv_positions[b, kv] // chunk)           if chunk
               & mask_mod(b, h, q, kv)                                                if mask_mod
               | or_mask(b, h, q, kv)                                                 if or_mask

    query            [B, T, N, D];  key, value  [B, S, M, D], [B, S, M, E]  (layout "BNTH": heads before tokens)
    segment_ids      int [B, T]: the document of each query, 0 for padding, which sees nothing and is not seen
    positions        int [B, T]: place of each query in its document or row; None: its index in the row
    kv_segment_ids, kv_positions   the same for keys, [B, S]; default those of the queries, which needs S == T
    window           int, int32 [] or [N]: a query sees the last `window` positions, its own included. A pair (left,
                     right): positions[b, q] - left to positions[b, q] + right; None leaves a side open
    chunk            int: positions of a chunk; a query sees its own chunk
    softcap          number, floating [] or [N]: softcap * tanh(score / softcap), before score_mod; 0 is no cap
    padding          which ids are padding: "zero"; or "negative", as in MaxText, where 0 is a document
    score_mod, mask_mod, or_mask   applied besides the above; they get indices in the row, not `positions`
    origin, context  as in flexjax.flex_attention; ids and positions are then those of the whole problem, in its order
    the rest         as in flexjax.flex_attention

    Returns [B, T, N, E] (layout as given), or with return_aux (out, AuxOutput). Raises ValueError for arguments that do
    not fit, and for other lengths of queries and keys without positions or `origin`. One layer of a trainer:

        out = flexjax.nn.segment_attention(q, k, v, batch["segment_ids"], batch["positions"], window=4096, softcap=50.0)
    """
    if any(getattr(x, "ndim", None) != 4 for x in (query, key, value)):
        arrays = (check_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
        check_inputs(Arguments(*arrays, layout=layout))  # raises for what is no array of 4 dims
    if padding not in _PADDING:
        raise bad_argument("padding", repr(padding), " or ".join(map(repr, _PADDING)), "It says which ids are padding.")
    tokens = 1 if layout == "BTNH" else 2
    heads = query.shape[3 - tokens]
    batch, q_len, kv_len = query.shape[0], query.shape[tokens], key.shape[tokens]
    if origin is not None:
        heads, (batch, q_len, kv_len) = None, (None, None, None)
        if origin.whole is not None:
            batch, heads, q_len, kv_len = origin.whole
    if context is not None and context.layout is not None:
        q_len, kv_len = context.layout.q_len, context.layout.kv_len
    q_ids = _integers("segment_ids", segment_ids, batch, q_len)
    kv_ids = _of_keys("segment_ids", segment_ids, kv_segment_ids, batch, q_len, kv_len)
    q_at = _integers("positions", positions, batch, q_len)
    kv_at = _of_keys("positions", positions, kv_positions, batch, q_len, kv_len)
    for name, one, other in (("segment_ids", q_ids, kv_ids), ("positions", q_at, kv_at)):
        if (one is None) != (other is None):
            raise ValueError(
                f"`kv_{name}` is given without `{name}`; expected both or `{name}` alone. Pass `{name}` too."
            )
    if q_len != kv_len and q_at is None and origin is None and (causal or window is not None or chunk is not None):
        raise bad_argument(
            "positions",
            f"None in a call of {q_len} queries and {kv_len} keys",
            "the positions of both, positions=[B, T] and kv_positions=[B, S], or origin=",
            'Nothing says where the queries stand; origin=Origin(query="end") puts them at the end of the keys.',
        )
    placed = Placed(
        function="segment_attention",
        heads=heads,
        ids=q_ids,
        kv_ids=kv_ids,
        is_padding=_PADDING[padding],
        at=q_at,
        kv_at=kv_at,
    )
    return flex_attention(
        query,
        key,
        value,
        score_mod=placed.score_mod(softcap, score_mod),
        mask_mod=placed.mask_mod(mask_mod, causal=causal, window=window, chunk=chunk, or_mask=or_mask),
        scale=scale,
        precision=precision,
        sinks=sinks,
        layout=layout,
        implementation=implementation,
        kernel_options=kernel_options,
        dropout=dropout,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        origin=origin,
        context=context,
        return_aux=return_aux,  # pyright: ignore[reportArgumentType, reportCallIssue] the overloads know one or the other
    )


def _integers(name: str, array: Array | None, batch: int | None, length: int | None) -> Array | None:
    """An argument with an integer for each token, [batch, length], any size where None. Raises ValueError."""
    if array is None:
        return None
    given = array if isinstance(array, jax.Array) else np.asarray(array)
    fits = given.ndim == 2 and all(w in (None, n) for w, n in zip((batch, length), given.shape, strict=True))
    shape = f"[{'B' if batch is None else batch}, {'tokens' if length is None else length}]"
    if not fits or not jnp.issubdtype(given.dtype, jnp.integer):
        raise bad_argument(
            name, f"{given.dtype}{list(given.shape)}", f"integers of shape {shape}", "One for each token."
        )
    # positions become int32, because differences of unsigned and of short integers would wrap around
    convert = position_array if name.endswith("positions") else integer_array
    return convert("segment_attention", name, given, {2: shape}, "One for each token.")


def _of_keys(
    name: str, of_queries: Array | None, of_keys: Array | None, batch: int | None, q_len: int | None, kv_len: int | None
) -> Array | None:
    """The array of the keys: as given, or that of the queries. Raises ValueError if the keys need one of their own."""
    if of_keys is not None:
        return _integers(f"kv_{name}", of_keys, batch, kv_len)
    if of_queries is not None and q_len != kv_len:
        raise bad_argument(
            f"kv_{name}",
            "None",
            f"integers of shape [{batch}, {kv_len}]",
            f"There are {q_len} queries and {kv_len} keys.",
        )
    return _integers(name, of_queries, batch, q_len)
