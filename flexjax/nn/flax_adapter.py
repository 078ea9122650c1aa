"""`attention_fn`: the attention function that flax.linen and flax.nnx multi-head attention call.

linen passes only the arguments that the function's signature names; nnx passes all of its own. So the function names
every argument that either has, and raises ValueError for one that it cannot honour.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from flexjax.attention import flex_attention
from flexjax.block_mask.block_mask import BlockMask
from flexjax.combine import and_masks
from flexjax.errors import bad_argument, kind_of, public
from flexjax.jax_nn import broadcast_lookup
from flexjax.masks import causal
from flexjax.mod_tools.factory_arguments import position_array
from flexjax.mod_tools.settings import own
from flexjax.types import Dropout, Implementations, KernelOptions, MaskMod, Precision, ScoreMod

Array = jax.Array


@public
@own
def attention_fn(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    block_mask: BlockMask | None = None,
    scale: float | Array | None = None,
    sinks: Array | None = None,
    rope: Callable[..., Array] | None = None,
    implementation: Implementations | None = None,
    kernel_options: KernelOptions | None = None,
) -> Callable[..., Array]:
    """The `attention_fn=` argument of flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention.

    All arguments but `rope` are those of flexjax.flex_attention. What flax passes at each call is added to them.

    rope    rope(x [tokens, D], positions [tokens]) -> rotated x, as flax.nnx.RoPE, for queries and keys; the function
            that is returned takes it too, as flax.nnx.dot_product_attention_with_rope does

        layer = flax.nnx.MultiHeadAttention(8, 512, decode=False, rngs=rngs,
                                            attention_fn=flexjax.nn.attention_fn(mods.alibi(8), masks.causal))

    Mods see `input_positions` [batch..., T] where flax passes them, for keys too if S == T, else 0 .. T - 1 and 0 .. S
    - 1. In a decoding step without them (T == 1 < S) the query's position is that of the last key that `mask` shows. A
    query that may see no key gives 0; flax gives the mean of all values. Raises ValueError, also within the layer's
    call, for arguments that do not fit or that fused attention cannot honour: `sow_weights=True`, einsum replacements.
    """

    @own
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
        rope: Callable[..., Array] | None = rope,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
    ) -> Array:
        """What flax calls: [batch..., T, N, D], [batch..., S, M, D], [batch..., S, M, E] -> [batch..., T, N, E].

        `bias` and `mask` broadcast to [batch..., N, T, S].
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
        positions = None
        if score_mod is not None or mask_mod is not None or rope is not None:
            positions = _positions(input_positions, bool_mask, batch, sizes)
        if rope is not None:
            q, k = _rotated(rope, q, k, positions)
        placed_score, placed_mask = _at_positions(score_mod, mask_mod, positions, sizes)
        parts = [] if placed_mask is None else [placed_mask]
        if is_causal:
            parts.append(causal)
        if bool_mask is not None:
            parts.append(broadcast_lookup("mask", bool_mask, sizes))
        if block_mask is not None and parts:
            raise ValueError(
                "`block_mask` was given to flexjax.nn.attention_fn, and this call adds a mask (`mask`, `is_causal` or "
                "`mask_mod`); expected one of them. Pass the block mask's mask_mod as `mask_mod` instead: masks "
                "combine, block masks do not."
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
            dropout=Dropout(dropped, dropout_rng, broadcast_dropout) if dropped else None,
            precision=precision,
        )
        return out.reshape((*batch, *out.shape[1:]))

    return attend


_REASONS = {  # why each argument of flax cannot be honoured
    "module": "fused attention never has the weights as an array, so they cannot be sown; "
    "see flexjax.attention_weights",
    "einsum_dot_general": "fused attention has no einsum that could be replaced",
    "qk_attn_weights_einsum": "fused attention has no einsum that could be replaced",
    "attn_weights_value_einsum": "fused attention has no einsum that could be replaced",
}


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise bad_argument(name, kind_of(value), "None", f"Leave it out: {_REASONS[name]}.")


def _four_axes(name: str, array: Array, batch: tuple[int, ...]) -> Array:
    """`array`, which broadcasts to [batch..., N, T, S], as [B or 1, ...]. Raises ValueError."""
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
    """The score_mod that adds flax's `bias`, which broadcasts to [batch..., N, T, S], after `score_mod`."""
    if bias is None:
        return score_mod
    look_up = broadcast_lookup("bias", _four_axes("bias", jnp.asarray(bias), batch), sizes)

    def biased(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        score = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        return score + look_up(b, h, q_idx, kv_idx).astype(score.dtype)

    return biased


def _positions(
    input_positions: ArrayLike | None, mask: Array | None, batch: tuple[int, ...], sizes: tuple[int, int, int, int]
) -> Array | None:
    """The position of each query in the whole sequence, int32 [B, T]; None where it is the index in this call.

    `input_positions` broadcasts to [batch..., T]; `mask` is bool [B or 1, N or 1, T or 1, S].
    """
    _, _, q_len, kv_len = sizes
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
        return jnp.broadcast_to(positions, (*batch, q_len)).reshape(-1, q_len)
    if q_len != 1 or kv_len == 1:
        return None
    if mask is None:
        raise ValueError(
            "`mask` is None in a call of one query token and several keys with a score_mod, mask_mod or rope; "
            "expected the mask of flax's cache or `input_positions`, which say where in the sequence the query stands. "
            "Pass input_positions=[...]."
        )
    # the last key that the mask shows to any head is the position of the query
    shown = jnp.any(mask, axis=(1, 2))  # [B or 1, S]
    last = kv_len - 1 - jnp.argmax(shown[:, ::-1], axis=-1)
    return jnp.broadcast_to(last[:, None], (sizes[0], 1)).astype(jnp.int32)


def _rotated(rope: Callable[..., Array], q: Array, k: Array, positions: Array | None) -> tuple[Array, Array]:
    """q [B, T, N, D] and k [B, S, M, D], rotated; keys of another length stand at their index, as in flax's cache."""
    if positions is None:
        apply = jax.vmap(jax.vmap(rope, in_axes=-2, out_axes=-2))
        return apply(q), apply(k)
    apply = jax.vmap(jax.vmap(rope, in_axes=(-2, None), out_axes=-2))
    of_keys = positions if q.shape[1] == k.shape[1] else jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    return apply(q, positions), apply(k, of_keys)


def _at_positions(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, positions: Array | None, sizes: tuple[int, int, int, int]
) -> tuple[ScoreMod | None, MaskMod | None]:
    """The mods, of positions [B, T] in the whole sequence in place of indices of this call."""
    if positions is None:
        return score_mod, mask_mod
    both = sizes[2] == sizes[3]

    def of_key(b: Array, kv_idx: Array) -> Array:
        return positions[b, kv_idx] if both else kv_idx

    placed_score, placed_mask = None, None
    if score_mod is not None:
        placed_score = lambda score, b, h, q, kv: score_mod(score, b, h, positions[b, q], of_key(b, kv))
    if mask_mod is not None:
        placed_mask = lambda b, h, q, kv: mask_mod(b, h, positions[b, q], of_key(b, kv))
    return placed_score, placed_mask
