"""The mask that hides nothing."""

from jax import Array

from flexjax.mod_tools.refusals import no_factory


@no_factory
def full(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """mask = True

    Picture of `full`, 2 x 4:

        # # # #
        # # # #
    """
    return kv_idx >= 0


@no_factory
def noop_mask(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """mask = True

    `full` under torch FlexAttention's name. Source: PyTorch, torch.nn.attention.flex_attention.noop_mask.

    Picture of `noop_mask`, 2 x 4:

        # # # #
        # # # #
    """
    return full(b, h, q_idx, kv_idx)
