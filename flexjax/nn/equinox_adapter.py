"""`MultiheadAttention`: equinox.nn.MultiheadAttention with flexjax attention inside, and with mods.

A model changes one name, and its saved parameters still load.
"""

import warnings
from collections.abc import Callable

import equinox as eqx  # pyright: ignore[reportMissingImports] not installed with flexjax
import jax
import jax.numpy as jnp

from flexjax.attention import flex_attention
from flexjax.combine import and_masks
from flexjax.errors import bad_argument, stacklevel_of_user
from flexjax.mod_tools.settings import own
from flexjax.types import Dropout, Implementations, KernelOptions, MaskMod

Array = jax.Array
Heads = tuple[Array, Array, Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """equinox.nn.MultiheadAttention whose attention is flexjax.flex_attention. It takes equinox's arguments and these:

    score_mod, mask_mod, implementation, kernel_options   as in flexjax.flex_attention; b is 0

        layer = flexjax.nn.MultiheadAttention(8, 512, mask_mod=flexjax.masks.causal, key=key)
        y = jax.vmap(layer)(x, x, x)                     # x [B, T, 512]

    A mod that is an equinox module is trained with the model. A query that may see no key gives 0 before the output
    projection; equinox gives the mean of all values.
    """

    score_mod: Callable[..., Array] | None
    mask_mod: Callable[..., Array] | None
    implementation: Implementations | None = eqx.field(static=True)
    kernel_options: KernelOptions | None = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        *args: object,
        score_mod: Callable[..., Array] | None = None,
        mask_mod: Callable[..., Array] | None = None,
        implementation: Implementations | None = None,
        kernel_options: KernelOptions | None = None,
        key: Array,
        **options: object,
    ) -> None:
        super().__init__(num_heads, query_size, *args, key=key, **options)  # type: ignore[arg-type]
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        # static fields are compared
        self.implementation = (
            implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
        )
        self.kernel_options = kernel_options

    @own
    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Array, Array, Array], Heads] | None = None,
    ) -> Array:
        """Attends over a sequence: query [T, query_size], key_ [S, key_size], value [S, value_size].

        mask            bool [T, S] or [num_heads, T, S], True where attended; joined by `&` with the layer's mask_mod
        inference       True: no dropout; None: as the layer was built; `deterministic` is its deprecated name
        process_heads   from the projected heads, [T or S, num_heads, size] each, to arrays of the same shapes
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "MultiheadAttention(...)(deterministic=...) is equinox's deprecated name; write inference=...",
                DeprecationWarning,
                stacklevel=stacklevel_of_user(),
            )
        if key_.shape[0] != value.shape[0]:
            raise bad_argument(
                "value",
                f"of {value.shape[0]} tokens",
                f"the {key_.shape[0]} tokens of key_",
                "Give each key one value.",
            )
        heads = tuple(
            self._project(project, x)
            for project, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        )
        if process_heads is not None:
            shapes = tuple(x.shape for x in heads)
            heads = process_heads(*heads)
            if tuple(x.shape for x in heads) != shapes:
                raise bad_argument(
                    "process_heads",
                    f"a function that returns shapes {tuple(x.shape for x in heads)}",
                    f"the shapes that it was given, {shapes}",
                    "Keep the shape of each.",
                )
        inference = self.dropout.inference if inference is None else inference
        rate = 0.0 if inference else float(self.dropout.p)
        if rate and key is None:
            raise bad_argument("key", "None", "a key, since dropout is on", "Pass key=..., or inference=True.")
        parts: list[MaskMod] = [] if self.mask_mod is None else [self.mask_mod]
        if mask is not None:
            parts.append(_mask_of_array(jnp.asarray(mask), (self.num_heads, query.shape[0], key_.shape[0])))
        out = flex_attention(
            *(x[None] for x in heads),
            score_mod=self.score_mod,
            mask_mod=and_masks(*parts) if parts else None,
            implementation=self.implementation,
            kernel_options=self.kernel_options,
            dropout=Dropout(rate, key) if rate else None,
        )
        return jax.vmap(self.output_proj)(out[0].reshape(query.shape[0], -1))


def _mask_of_array(mask: Array, full: tuple[int, int, int]) -> MaskMod:
    """The mask_mod that reads the user's `mask`, bool [T, S] or [N, T, S]. Raises ValueError for any other."""
    if mask.dtype != jnp.bool_ or mask.shape not in (full, full[1:]):
        raise bad_argument(
            "mask",
            f"{mask.dtype}{list(mask.shape)}",
            f"bool{list(full[1:])} or bool{list(full)}",
            "True where attended.",
        )
    if mask.ndim == 2:
        return lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]
    return lambda b, h, q_idx, kv_idx: mask[h, q_idx, kv_idx]
