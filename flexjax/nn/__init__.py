"""Adapters: flexjax attention in the places where flax, equinox and trainers expect an attention function or layer.

attention_fn         the `attention_fn=` of flax.linen and flax.nnx multi-head attention
MultiheadAttention   replaces equinox.nn.MultiheadAttention; equinox is imported when this name is first used
segment_attention    attention over packed documents, with the arguments that trainers such as MaxText have at hand
cached_attention     attention over a ring cache whose slots store positions, as Gemma's do
keras                keras.install() puts flexjax in the place of Keras's attention; keras is imported then
maxtext, gemma       maxtext.install() and gemma.install() do so for MaxText and for gemma.gm.nn
"""

import typing

from flexjax.nn import gemma as gemma
from flexjax.nn import keras as keras
from flexjax.nn import maxtext as maxtext
from flexjax.nn.caches import cached_attention as cached_attention
from flexjax.nn.flax_adapter import attention_fn as attention_fn
from flexjax.nn.packed_segments import segment_attention as segment_attention

if typing.TYPE_CHECKING:
    from flexjax.nn.equinox_adapter import MultiheadAttention as MultiheadAttention

__all__ = ["MultiheadAttention", "attention_fn", "cached_attention", "gemma", "keras", "maxtext", "segment_attention"]


def __getattr__(name: str) -> object:
    if name != "MultiheadAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from flexjax.nn.equinox_adapter import MultiheadAttention
    except ModuleNotFoundError as error:
        raise ImportError(
            "flexjax.nn.MultiheadAttention is an equinox module, and equinox is not installed; install it with "
            "`pip install equinox`."
        ) from error
    return MultiheadAttention


def __dir__() -> list[str]:
    return __all__
