"""Attention over packed documents, with the arguments that language-model trainers pass to their attention.

Trainers pack several documents into a row of tokens and number them: 1, 2, ... for documents, 0 for padding. A query may
see the keys of its own document only. Because that is a mask_mod here, blocks that hold no pair of one document are skipped, on
every backend.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flexjax import mods
from flexjax.attention import flex_attention
from flexjax.check_arguments import check_inputs
from flexjax.combine import and_masks, chain_mods
from flexjax.errors import bad_argument
from flexjax.mod_tools.array_reads import value_at
from flexjax.mod_tools.factory_arguments import (
    integer_array,
    integer_or_vector,
    position_array,
    positive_number_or_vector,
)
from flexjax.types import Implementations, KernelOptions, Layout, MaskMod, Precision, ScoreMod

Array = jax.Array


def segment_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    *,
    kv_segment_ids: Array | None = None,
    kv_positions: Array | None = None,
    window: int | Array | None = None,
    softcap: float | Array | None = None,
    sinks: Array | None = None,
    causal: bool = True,
    scale: float | Array | None = None,
    precision: Precision = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    layout: Layout = "BTNH",
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """Attention in which a query sees the keys of its own document.

        mask = (segment_ids[b, q] == kv_segment_ids[b, kv]) & (segment_ids[b, q] != 0)
               & (positions[b, q] >= kv_positions[b, kv])                      if causal
               & (abs(positions[b, q] - kv_positions[b, kv]) < window)         if window

    query            [B, T, N, D];  key, value  [B, S, M, D], [B, S, M, E]  (layout "BNTH": heads before tokens)
    segment_ids      int [B, T]: the document of each query. 0 is padding, whose rows give 0 and whose keys nobody sees.
                     None: one document
    positions        int [B, T], which become int32, as do their differences: position of each query in its document; None: its
                     index in the row. Trainers whose positions restart in each document and trainers whose positions do
                     not get the same result
    kv_segment_ids, kv_positions   the same for keys, [B, S]; default those of the queries, which needs S == T
    window           int, int32 [] or [N]: a query sees the last `window` positions, its own included; without `causal` also those of the
                     next `window - 1`
    softcap          number, floating [] or [N]: softcap * tanh(score / softcap), before score_mod
    score_mod, mask_mod   applied besides the above: score_mod after the soft cap, mask_mod joined by `&`; they get indices in
                     the row, not `positions`
    the rest         as in flexjax.flex_attention

    Returns [B, T, N, E] (layout as given). Raises ValueError for arguments that do not fit.

    Example, one layer of a trainer on a packed batch:

        out = flexjax.nn.segment_attention(q, k, v, batch["segment_ids"], batch["positions"], window=4096, softcap=50.0)
    """
    if any(getattr(x, "ndim", None) != 4 for x in (query, key, value)):
        check_inputs(query, key, value, None, layout, None, None)  # raises for what is no array of 4 dims
    tokens = 1 if layout == "BTNH" else 2
    heads = query.shape[3 - tokens]
    batch, q_len, kv_len = query.shape[0], query.shape[tokens], key.shape[tokens]
    q_ids = _integers("segment_ids", segment_ids, batch, q_len)
    kv_ids = _of_keys("segment_ids", segment_ids, kv_segment_ids, batch, q_len, kv_len)
    q_at = _integers("positions", positions, batch, q_len)
    kv_at = _of_keys("positions", positions, kv_positions, batch, q_len, kv_len)
    for name, one, other in (("segment_ids", q_ids, kv_ids), ("positions", q_at, kv_at)):
        if (one is None) != (other is None):
            raise ValueError(
                f"`kv_{name}` is given without `{name}`; expected both or `{name}` alone. Pass `{name}` too."
            )

    masks: list[MaskMod] = [] if mask_mod is None else [mask_mod]
    if q_ids is not None and kv_ids is not None:
        masks.append(lambda b, h, q, kv: (q_ids[b, q] == kv_ids[b, kv]) & (q_ids[b, q] != 0))

    def behind(b: Array, q: Array, kv: Array) -> Array:
        """By how many positions the key kv is behind the query q of batch entry b, negative if it is ahead; indices in the row count as
        positions without `positions`.
        """
        return q - kv if q_at is None or kv_at is None else q_at[b, q] - kv_at[b, kv]

    if causal:
        masks.append(lambda b, h, q, kv: behind(b, q, kv) >= 0)
    if window is not None:
        width = integer_or_vector(
            "segment_attention", "window", window, "[N]", 1, "1 sees the query's own position only."
        )
        _check_heads("window", width, heads)
        masks.append(lambda b, h, q, kv: behind(b, q, kv) < value_at(width, h))
        if not causal:
            masks.append(lambda b, h, q, kv: behind(b, q, kv) > -value_at(width, h))
    if softcap is not None:
        cap = positive_number_or_vector("segment_attention", "softcap", softcap, "None means no cap.")
        _check_heads("softcap", cap, heads)
        capped = mods.softcap(cap)
        score_mod = capped if score_mod is None else chain_mods(capped, score_mod)
    return flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        mask_mod=and_masks(*masks) if masks else None,
        scale=scale,
        precision=precision,
        sinks=sinks,
        layout=layout,
        implementation=implementation,
        kernel_options=kernel_options,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )


def _check_heads(name: str, value: float | Array, heads: int) -> None:
    """Raises ValueError if the argument `name`, a number or an array `[]` or with an axis of heads, has neither 1 number nor one for each
    of the `heads` query heads.
    """
    if not isinstance(value, int | float) and value.shape not in ((), (1,), (heads,)):
        raise bad_argument(
            name, f"{value.dtype}{list(value.shape)}", f"one number, or {heads}, one for each query head", "Reshape it."
        )


def _integers(name: str, array: Array | None, batch: int, length: int) -> Array | None:
    """Checks an argument with a number for each token: returns it as an integer array [batch, length], or None if it is None. Positions
    become int32, because differences of unsigned and of short integers would wrap around.

    name   of the argument, for errors

    Raises ValueError for another shape or dtype, and for known numbers that jax's integers, or int32 for positions, do not hold.
    """
    if array is None:
        return None
    given = array if isinstance(array, jax.Array) else np.asarray(array)
    if given.shape != (batch, length) or not jnp.issubdtype(given.dtype, jnp.integer):
        raise bad_argument(
            name, f"{given.dtype}{list(given.shape)}", f"integers of shape [{batch}, {length}]", "One for each token."
        )
    convert = position_array if name.endswith("positions") else integer_array
    return convert("segment_attention", name, given, {2: f"[{batch}, {length}]"}, "One for each token.")


def _of_keys(
    name: str, of_queries: Array | None, of_keys: Array | None, batch: int, q_len: int, kv_len: int
) -> Array | None:
    """The array of the keys for an argument that has one for queries and one for keys: as given, or that of the queries.

    name                  of the argument for queries, such as "positions"; that for keys is "kv_" and this name
    of_queries, of_keys   the arguments, [batch, q_len] and [batch, kv_len], or None

    Raises ValueError for a wrong shape or dtype, and if the keys need an array of their own because q_len != kv_len.
    """
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
