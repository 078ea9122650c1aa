"""`install`: flexjax in the place of the attention of Keras 3 on its JAX backend.

Keras reaches it from keras.ops.dot_product_attention, MultiHeadAttention and GroupQueryAttention.
"""

import functools
import importlib
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from flexjax.attention import flex_attention
from flexjax.combine import and_masks, chain_mods
from flexjax.errors import bad_argument
from flexjax.jax_nn import broadcast_lookup
from flexjax.masks import causal
from flexjax.mod_tools.settings import own
from flexjax.nn.patches import Installed
from flexjax.nn.placed_masks import Placed
from flexjax.types import Dropout, Implementations, KernelOptions, MaskMod, ScoreMod

Array = jax.Array


def install(*, implementation: Implementations | None = None, kernel_options: KernelOptions | None = None) -> Installed:
    """From now on Keras attends by flexjax.flex_attention; it also is a context manager, which ends that.

        flexjax.nn.keras.install()

    Replaced are keras.ops.dot_product_attention and the attention of MultiHeadAttention and GroupQueryAttention, with
    dropout. A soft cap is honoured where keras.ops, which refuses it off TPUs, lets it pass. Layers that return their
    scores, and queries of other than four axes, run Keras's own code, because fused attention has no scores. Raises
    ImportError without Keras, ValueError on another backend than JAX. A query that may see no key gives 0; Keras gives
    the mean of all values.
    """
    # by name, because type checkers take `import keras` for this module
    keras = importlib.import_module("keras")
    backend = importlib.import_module("keras.src.backend")

    if keras.backend.backend() != "jax":
        raise bad_argument(
            "KERAS_BACKEND",
            repr(keras.backend.backend()),
            "'jax'",
            "Set it in the environment before keras is imported.",
        )
    attend = functools.partial(_attention, implementation=implementation, kernel_options=kernel_options)

    # the names and defaults of Keras, which other code calls by keyword
    @own
    def dot_product_attention(
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        flash_attention: bool | None = None,
        attn_logits_soft_cap: float | None = None,
    ) -> Array:
        """query [B, T, N, D], key [B, S, M, D], value [B, S, M, E] -> [B, T, N, E]; bias and mask as [B, N, T, S].

        flash_attention  False: no kernels, the backend "xla"; None or True: as `install` was told
        """
        tensors = [backend.convert_to_tensor(x) for x in (query, key, value)]
        dtype = backend.result_type(*(x.dtype for x in tensors))
        q, k, v = (backend.cast(x, dtype) for x in tensors)
        added = None if bias is None else backend.convert_to_tensor(bias, dtype=dtype)
        shown = None if mask is None else backend.convert_to_tensor(mask)
        return attend(q, k, v, added, shown, scale, is_causal, attn_logits_soft_cap, None, flash_attention)

    def of_layer(own_method: Callable[..., object], scale: str, returns_scores: str | None) -> Callable[..., object]:
        """The `_compute_attention` of a layer class whose attribute `scale` is the scale.

        returns_scores   its attribute that asks for scores; None where the call says it
        """

        signature = inspect.signature(own_method)

        @functools.wraps(own_method)
        def compute(self: object, *args: object, **options: object) -> object:
            given = signature.bind(self, *args, **options).arguments
            query, key, value = (given[name] for name in ("query", "key", "value"))
            scores = getattr(self, returns_scores) if returns_scores else given.get("return_attention_scores", False)
            symbolic = any(isinstance(x, keras.KerasTensor) for x in (query, key, value))
            if scores or symbolic or len(query.shape) != 4:
                return own_method(self, *args, **options)
            dropout_layer = getattr(self, "_dropout_layer")  # noqa: B009 of a class that is not known here
            rate, dropout = float(dropout_layer.rate), None
            if given.get("training") and rate:
                if rate == 1:
                    raise bad_argument("dropout", "1", "a rate below 1", "1 drops every probability.")
                dropout = Dropout(rate, dropout_layer.seed_generator.next())
            q, k, v = (backend.convert_to_tensor(x) for x in (query, key, value))
            mask = given.get("attention_mask")
            mask = None if mask is None else backend.convert_to_tensor(mask)
            while mask is not None and mask.ndim < 4:  # [B, T, S] or [T, S]; T may be heads or batch
                mask = jnp.expand_dims(mask, -3)
            is_causal = given.get("use_causal_mask", False)
            flash = getattr(self, "_flash_attention")  # noqa: B009
            return attend(q, k, v, None, mask, getattr(self, scale), is_causal, None, dropout, flash), None

        return compute

    mha, gqa = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
    return Installed(
        [
            (backend.nn, "dot_product_attention", dot_product_attention),
            (mha, "_compute_attention", of_layer(mha._compute_attention, "_inverse_sqrt_key_dim", None)),
            (
                gqa,
                "_compute_attention",
                of_layer(gqa._compute_attention, "_inverse_sqrt_head_dim", "_return_attention_scores"),
            ),
        ]
    )


@own
def _attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    scale: float | None,
    is_causal: bool,
    soft_cap: float | None,
    dropout: Dropout | None,
    flash: bool | None,
    *,
    implementation: Implementations | None,
    kernel_options: KernelOptions | None,
) -> Array:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise bad_argument(name, f"of shape {x.shape}", "4 dims, [B, tokens, heads, dim]", "Reshape it.")
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    parts: list[MaskMod] = [causal] if is_causal else []
    if mask is not None:
        parts.append(broadcast_lookup("mask", _four_axes(mask, sizes).astype(jnp.bool_), sizes))
    added: ScoreMod | None = None
    if bias is not None:
        look_up = broadcast_lookup("bias", _four_axes(bias, sizes), sizes)
        added = lambda score, *at: score + look_up(*at).astype(score.dtype)
    # as in splash attention, the cap comes before the bias
    capped = Placed(function="keras.ops.dot_product_attention", heads=sizes[1]).score_mod(soft_cap, None)
    mods = [mod for mod in (capped, added) if mod is not None]
    return flex_attention(
        query,
        key,
        value,
        score_mod=chain_mods(*mods) if mods else None,
        mask_mod=and_masks(*parts) if parts else None,
        scale=scale,
        implementation="xla" if flash is False else implementation,
        kernel_options=kernel_options,
        dropout=dropout,
    )


def _four_axes(array: Array, sizes: tuple[int, int, int, int]) -> Array:
    """Keras's bias or mask as [B, N, T, S]: axes are missing in front, as jax.nn reads it, or, where that does not fit
    `sizes`, it is [B, S] or [B, N, S], as Keras's own fallback does.
    """
    if array.ndim not in (2, 3):
        return array
    front = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if all(n in (1, size) for n, size in zip(front.shape, sizes, strict=True)):
        return front
    if array.ndim == 2:
        return array[:, None, None]
    return array[:, :, None] if array.shape[1] == sizes[1] else array[:, None]
