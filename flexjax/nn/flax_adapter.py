"""`attention_fn`: the attention function that flax.linen and flax.nnx multi-head attention call.

flax calls `attention_fn(query, key, value, mask=..., dropout_rng=..., ...)`. linen reads the function's signature and passes only
the arguments that it names; nnx passes all of its own. The function that `attention_fn` returns therefore names every
argument that either library has. An argument that cannot be honoured raises a ValueError; none is ignored.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from flexjax.attention import flex_attention
from flexjax.block_mask.block_mask import BlockMask
from flexjax.combine import and_masks
from flexjax.errors import bad_argument, kind_of
from flexjax.jax_nn import broadcast_lookup
from flexjax.masks import causal
from flexjax.mod_tools.factory_arguments import position_array
from flexjax.types import Implementations, KernelOptions, MaskMod, Precision, ScoreMod

Array = jax.Array


def attention_fn(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    block_mask: BlockMask | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
) -> Callable[..., Array]:
    """A function for the `attention_fn=` argument of flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention.

    All arguments mean what they mean in flexjax.flex_attention. What flax passes at each call is added to them: `mask`,
    `bias`, `is_causal`, dropout, and `input_positions`.

        layer = flax.nnx.MultiHeadAttention(8, 512, decode=False, rngs=rngs,
                                            attention_fn=flexjax.nn.attention_fn(mods.alibi(8), masks.causal))

    Positions. The mods see the positions 0 .. T - 1 of queries and 0 .. S - 1 of keys, with two exceptions. Where flax passes
    `input_positions` [batch..., T], the mods see these for the queries, and for the keys too if S == T. In a decoding step
    (T == 1 < S and no `input_positions`), the position of the query is that of the last key that `mask` shows, because the mask of
    flax's cache shows the keys that are written so far. Without a mask such a step with a mod is refused.

    Differences from flax's own function. A query that may see no key gives 0, where flax gives the mean of all values. The
    dropped probabilities are drawn from another random stream. Scores are always float32 (`force_fp32_for_softmax` holds).

    Raises ValueError, also from within the layer's call, for arguments that do not fit or that fused attention cannot honour:
    `sow_weights=True` (the weights never exist as an array; see flexjax.attention_weights), einsum replacements.
    """

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Precision = None,
        module: object = None,
        promote_dtype: Callable[..., tuple[Array, Array, Array]] | None = None,
        is_causal: bool = False,
        input_positions: Array | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
    ) -> Array:
        """The function that flax calls: attention of [batch..., T, N, D], [batch..., S, M, D], [batch..., S, M, E] -> [batch..., T, N,
        E].

        The arguments are flax's: `bias` and `mask` broadcast to [batch..., N, T, S], `dropout_rng` is a key, `broadcast_dropout` drops the
        same positions in all batch entries and heads, `dtype` is that of the computation, to which `promote_dtype` casts the arrays (None:
        they are cast to `dtype`, or to their common dtype). `deterministic` means no dropout. `is_causal` compares the indices of the call,
        not `input_positions`. `force_fp32_for_softmax` changes nothing. `precision` is that of flex_attention. They act together with the
        arguments of attention_fn: masks are joined by `&`, the bias is added after score_mod.

        Raises ValueError for a `precision` that jax does not have, for a `module` (weights to be sown) or an einsum that is not None, for
        a block mask beside a mask of the call, and for dropout without a key.
        """
        _refuse(
            module=module,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if promote_dtype is not None:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        else:
            common = jnp.result_type(query, key, value) if dtype is None else dtype
            query, key, value = (jnp.asarray(x, common) for x in (query, key, value))
        batch = query.shape[:-3]
        for name, x in (("key", key), ("value", value)):
            if x.shape[:-3] != batch:
                advice = "Broadcast it before the call."
                raise bad_argument(name, f"{x.dtype}{list(x.shape)}", f"the batch axes of query, {list(batch)}", advice)
        sizes = (math.prod(batch), query.shape[-2], query.shape[-3], key.shape[-3])
        q, k, v = (x.reshape((-1, *x.shape[-3:])) if batch else x[None] for x in (query, key, value))

        bool_mask = None if mask is None else _four_axes("mask", jnp.asarray(mask).astype(jnp.bool_), batch)
        placed_score, placed_mask = _at_positions(score_mod, mask_mod, input_positions, bool_mask, batch, sizes)
        parts = [] if placed_mask is None else [placed_mask]
        if is_causal:
            parts.append(causal)
        if bool_mask is not None:
            parts.append(broadcast_lookup("mask", bool_mask, sizes))
        if block_mask is not None and parts:
            raise ValueError(
                "`block_mask` was given to flexjax.nn.attention_fn, and this call adds a mask (`mask`, `is_causal` or `mask_mod`); "
                "expected one of them. Pass the block mask's mask_mod as `mask_mod` instead: masks combine, block masks do not."
            )
        dropped = 0.0 if deterministic else dropout_rate
        if dropped and dropout_rng is None:
            raise bad_argument(
                "dropout_rng",
                "None",
                "a key, since dropout_rate is positive",
                "Pass deterministic=True for no dropout.",
            )
        out = flex_attention(
            q,
            k,
            v,
            score_mod=_with_bias(placed_score, bias, batch, sizes),
            mask_mod=and_masks(*parts) if parts else None,
            block_mask=block_mask,
            scale=scale,
            sinks=sinks,
            implementation=implementation,
            kernel_options=kernel_options,
            dropout_rate=dropped,
            dropout_key=dropout_rng if dropped else None,
            broadcast_dropout=bool(dropped) and broadcast_dropout,
            precision=precision,
        )
        return out.reshape((*batch, *out.shape[1:]))

    return attend


_REASONS = {  # why each argument of flax cannot be honoured
    "module": "fused attention never has the weights as an array, so they cannot be sown; see flexjax.attention_weights",
    "einsum_dot_general": "fused attention has no einsum that could be replaced",
    "qk_attn_weights_einsum": "fused attention has no einsum that could be replaced",
    "attn_weights_value_einsum": "fused attention has no einsum that could be replaced",
}


def _refuse(**given: object) -> None:
    """Raises ValueError if one of flax's arguments, given by name, is not None: fused attention cannot honour it."""
    for name, value in given.items():
        if value is not None:
            raise bad_argument(name, kind_of(value), "None", f"Leave it out: {_REASONS[name]}.")


def _four_axes(name: str, array: Array, batch: tuple[int, ...]) -> Array:
    """Reshapes an array that broadcasts to [batch..., N, T, S] to four axes, [B or 1, N, T, S], each of which may also
    be 1.

    name    the name of flax's argument, for errors
    array   any axis may be of size 1 or missing in front
    batch   the sizes of the batch axes; B is their product

    Raises ValueError for an array that does not broadcast to the batch axes; the last three axes are not checked.
    """
    axes = len(batch) + 3
    if array.ndim > axes:
        raise bad_argument(
            name, f"of shape {array.shape}", f"at most {axes} axes, [batch..., heads, q_len, kv_len]", "Reshape it."
        )
    full = (1,) * (axes - array.ndim) + array.shape
    front = full[:-3]
    if all(n == 1 for n in front):
        return array.reshape((1, *full[-3:]))
    if any(have not in (1, want) for have, want in zip(front, batch, strict=True)):
        raise bad_argument(name, f"of shape {array.shape}", f"batch axes that broadcast to {batch}", "Reshape it.")
    return jnp.broadcast_to(array.reshape(full), (*batch, *full[-3:])).reshape((-1, *full[-3:]))


def _with_bias(
    score_mod: ScoreMod | None, bias: ArrayLike | None, batch: tuple[int, ...], sizes: tuple[int, int, int, int]
) -> ScoreMod | None:
    """The score_mod that adds flax's `bias` after `score_mod` (None: to the score); `score_mod` itself, also None, if there is no bias.

    bias    [batch..., N, T, S] or what broadcasts to it
    batch   the sizes of the batch axes
    sizes   (B, N, T, S) of the call, B the product of `batch`
    """
    if bias is None:
        return score_mod
    look_up = broadcast_lookup("bias", _four_axes("bias", jnp.asarray(bias), batch), sizes)

    def biased(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The score of one entry after score_mod, plus the bias of this entry, cast to the dtype of the score."""
        score = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return score + look_up(b, h, q_idx, kv_idx).astype(score.dtype)

    return biased


def _at_positions(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    input_positions: ArrayLike | None,
    mask: Array | None,
    batch: tuple[int, ...],
    sizes: tuple[int, int, int, int],
) -> tuple[ScoreMod | None, MaskMod | None]:
    """Changes the mods so that they get positions of tokens in the whole sequence in place of the indices of this call.

    score_mod, mask_mod   the user's mods, or None
    input_positions       flax's argument: int [batch..., T], or what broadcasts to it along the batch axes: the position of each
                          query, and of each key if S == T; otherwise keys keep their indices. None: not given
    mask                  flax's mask, [B or 1, N or 1, T or 1, S] bool, or None. It is read only in a decoding step (T == 1 < S)
                          without input_positions: the last key that it shows to any head is then the position of the query
    batch                 the sizes of the batch axes
    sizes                 (B, N, T, S) of the call, B the product of `batch`

    Returns (score_mod, mask_mod), None where None was given. Without input_positions and outside a decoding step, the mods come back
    as they are. If both mods are None, nothing is checked. Otherwise raises ValueError for positions that are not integers or do
    not fit, and for a decoding step that has neither positions nor a mask.
    """
    _, _, q_len, kv_len = sizes
    both = False
    if score_mod is None and mask_mod is None:
        return None, None
    if input_positions is not None:
        positions = jnp.asarray(input_positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.shape[-1:] != (q_len,):
            raise bad_argument(
                "input_positions",
                f"{positions.dtype}{list(positions.shape)}",
                f"integers of shape [batch..., {q_len}]",
                "Give the position of each query token.",
            )
        shapes = {positions.ndim: f"[batch..., {q_len}]"}
        positions = position_array("attention_fn", "input_positions", input_positions, shapes, "They count tokens.")
        positions = jnp.broadcast_to(positions, (*batch, q_len)).reshape(-1, q_len)
        both = q_len == kv_len
    elif q_len == 1 and kv_len > 1:
        if mask is None:
            raise ValueError(
                "`mask` is None in a call of one query token and several keys with a score_mod or mask_mod; expected the mask of "
                "flax's cache or `input_positions`, which say where in the sequence the query stands. Pass input_positions=[...]."
            )
        shown = jnp.any(mask, axis=(1, 2))  # [B or 1, S]
        last = kv_len - 1 - jnp.argmax(shown[:, ::-1], axis=-1)
        positions = jnp.broadcast_to(last[:, None], (sizes[0], 1)).astype(jnp.int32)
    else:
        return score_mod, mask_mod

    def of_key(b: Array, kv_idx: Array) -> Array:
        """The position of the key kv_idx of batch entry b: its entry of `positions` if queries and keys are the same tokens, else its
        index.
        """
        return positions[b, kv_idx] if both else kv_idx

    placed_score, placed_mask = None, None
    if score_mod is not None:
        placed_score = lambda score, b, h, q, kv: score_mod(score, b, h, positions[b, q], of_key(b, kv))
    if mask_mod is not None:
        placed_mask = lambda b, h, q, kv: mask_mod(b, h, positions[b, q], of_key(b, kv))
    return placed_score, placed_mask
