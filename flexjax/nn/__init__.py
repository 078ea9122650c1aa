"""Adapters: flexjax attention in the places where flax, equinox and trainers expect an attention function or layer.

attention_fn         the `attention_fn=` of flax.linen and flax.nnx multi-head attention
MultiheadAttention   replaces equinox.nn.MultiheadAttention; equinox is imported when this name is first used
segment_attention    attention over packed documents, with the arguments that trainers such as MaxText have at hand

    flax_adapter.py        attention_fn
    equinox_adapter.py     MultiheadAttention
    packed_segments.py     segment_attention

The adapters translate arguments and call flexjax.flex_attention; they hold no numerics. This room imports attention.py and what
lies below, never a library that is not installed with flexjax.
"""

import typing

from flexjax.nn.flax_adapter import attention_fn as attention_fn
from flexjax.nn.packed_segments import segment_attention as segment_attention

if typing.TYPE_CHECKING:
    from flexjax.nn.equinox_adapter import MultiheadAttention as MultiheadAttention

__all__ = ["MultiheadAttention", "attention_fn", "segment_attention"]


def __getattr__(name: str) -> object:
    """Imports MultiheadAttention when the name is first used, because equinox may not be installed; ImportError then.

    Any other name raises AttributeError.
    """
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
    """The public names of the module."""
    return __all__
