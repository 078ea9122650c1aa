"""`install`: flexjax in the attention layer of the Gemma library (gemma.gm.nn), training and decoding."""

import importlib
import typing

import jax

from flexjax.nn.caches import cached_attention
from flexjax.nn.patches import Installed
from flexjax.types import Implementations, KernelOptions

Array = jax.Array
Cache = dict[str, Array]


def install(*, implementation: Implementations | None = None, kernel_options: KernelOptions | None = None) -> Installed:
    """From now on the blocks of gemma.gm.nn attend by flexjax; it also is a context manager, which ends that.

        flexjax.nn.gemma.install()

    Replaced is the class gemma.gm.nn._modules.Attention, by a subclass with the same parameters and cache, for models
    that are built or applied afterwards. Probabilities are not there to be captured (`attention_weights`). A query that
    may see no key gives 0; Gemma gives the mean of all values. Raises ImportError without gemma.
    """
    # by name, because type checkers take `import gemma` for this module
    modules = importlib.import_module("gemma.gm.nn._modules")
    rotate = importlib.import_module("gemma.gm.math._positional_embeddings").apply_rope
    base: typing.Any = modules.Attention

    class Attention(base):
        """gemma.gm.nn's Attention, computed by flexjax.nn.cached_attention."""

        def __call__(
            self, x: Array, segment_pos: Array, cache: Cache | None, attn_mask: Array
        ) -> tuple[Cache | None, Array]:
            """x [B, L, D], segment_pos int [B, L], attn_mask bool [B, L, S] -> (the new cache, [B, L, D])."""
            local = self.attn_type == modules.AttentionType.LOCAL_SLIDING
            if local and self.sliding_window_size is None:
                raise ValueError("`sliding_window_size` is None; expected an int for local sliding attention. Set it.")
            if self.use_qkv_einsum:
                query, key, value = self.qkv_einsum("BTD,SNDH->SBTNH", x)
            else:
                query = self.q_einsum("BTD,NDH->BTNH", x)
                key, value = self.kv_einsum("BSD,CKDH->CBSKH", x)
            if self.use_qk_norm:
                query, key = self._query_norm(query), self._key_norm(key)
            query, key = (
                rotate(part, segment_pos, base_frequency=self.rope_base_frequency, scale_factor=self.rope_scale_factor)
                for part in (query, key)
            )
            slots, new_cache = segment_pos, None
            if cache is not None:
                at = cache["end_index"][0] % cache["v"].shape[1]
                write = jax.lax.dynamic_update_slice
                value = write(cache["v"], value, (0, at, 0, 0))
                key = write(cache["k"], key, (0, at, 0, 0))
                slots = write(cache["positions"], segment_pos, (0, at))
                end = cache["end_index"] + x.shape[1]
                new_cache = {"v": value, "k": key, "end_index": end, "positions": slots}
            encoded = cached_attention(
                query.astype(key.dtype),
                key,
                value,
                mask=attn_mask,
                positions=segment_pos,
                kv_positions=slots,
                window=self.sliding_window_size if local else None,
                softcap=self.attn_logits_soft_cap,
                scale=self.query_pre_attn_scalar,
                implementation=implementation,
                kernel_options=kernel_options,
            )
            return new_cache, self.attn_vec_einsum("BTNH,NHD->BTD", encoded)

    return Installed([(modules, "Attention", Attention)])
