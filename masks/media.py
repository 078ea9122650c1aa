"""Cross-attention of a text to the images, or other media, interleaved with it.

Keys are the tokens of the media, one medium after the other, each of the same number of tokens.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from flexjax.mod_tools.array_reads import batched_value_at
from flexjax.mod_tools.eager_factories import eager
from flexjax.mod_tools.factory_arguments import bool_array, integer, position_array
from flexjax.mod_tools.made_for import Size, of_array
from flexjax.mod_tools.signatures import MaskMod, named


@eager
def interleaved_media(is_media: ArrayLike, tokens_per_media: int, *, only_latest: bool = True) -> MaskMod:
    """mask = kv_idx // tokens_per_media == latest[b, q_idx]

        latest = cumsum(is_media) - 1     number of the last medium at or before each text token, -1 for none

    is_media:          bool `[T]` or `[B, T]`: the text tokens at which a medium stands. May be traced.
    tokens_per_media:  int of at least 1: keys are the media in order, each this many tokens.
    only_latest:       False: `<=` in place of `==`, all media at or before a token.
    A call of other sizes raises ValueError. Source: Alayrac et al., "Flamingo", arXiv:2204.14198, section 2.3.
    Raises ValueError for other arguments.
    Picture of `interleaved_media(np.array([0, 1, 0, 1], bool), 2)`, 4 x 4:

        . . . .
        # # . .
        # # . .
        . . # #
    """
    call = "interleaved_media"
    advice = "Pass True where the text has a medium."
    places = bool_array(call, "is_media", is_media, {1: "[T]", 2: "[B, T]"}, advice)
    tokens = integer(call, "tokens_per_media", tokens_per_media, 1, "It counts the keys of a medium.")
    latest = jnp.cumsum(places, axis=-1, dtype=jnp.int32) - 1

    @named(f"interleaved_media_{tokens}", *of_array("is_media", places, "BT"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        medium, last = kv_idx // tokens, batched_value_at(latest, b, q_idx)
        return medium == last if only_latest else medium <= last

    return mask_mod


@eager
def media_intervals(intervals: ArrayLike, tokens_per_media: int) -> MaskMod:
    """mask = (q_idx >= intervals[m, 0]) & (q_idx < intervals[m, 1]),  m = kv_idx // tokens_per_media

    intervals:         integer `[M, 2]` or `[B, M, 2]`: the first token that sees each medium and one past the last.
    tokens_per_media:  int of at least 1: keys are the media in order, each this many tokens.
    A call of other sizes raises ValueError. Source: Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783,
    section 7. Raises ValueError for other arguments.
    Picture of `media_intervals(np.array([[0, 2], [1, 4]]), 2)`, 4 x 4:

        # # . .
        # # # #
        . . # #
        . . # #
    """
    call = "media_intervals"
    advice = "Pass the first text token and one past the last for each medium."
    spans = position_array(call, "intervals", intervals, {2: "[M, 2]", 3: "[B, M, 2]"}, advice)
    if spans.shape[-1] != 2:
        wanted = "[M, 2] or [B, M, 2]"
        raise ValueError(f"`{call}`: `intervals` has shape {spans.shape}; expected {wanted}. {advice}")
    tokens = integer(call, "tokens_per_media", tokens_per_media, 1, "It counts the keys of a medium.")
    first, end = spans[..., 0], spans[..., 1]

    keys = first.shape[-1] * tokens
    source = f"`intervals` {spans.dtype.name}{list(spans.shape)}"

    @named(f"media_intervals_{tokens}", Size("keys", keys, keys, source), *of_array("intervals", spans, "BM2"))
    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        medium = kv_idx // tokens
        return (q_idx >= batched_value_at(first, b, medium)) & (q_idx < batched_value_at(end, b, medium))

    return mask_mod
