"""No mask at all."""

from jax import Array


def full(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """mask = True

    Every query sees every key.  Useful as the neutral element of a choice of masks.

    Picture of `full`, 4 x 8:

        # # # # # # # #
        # # # # # # # #
        # # # # # # # #
        # # # # # # # #
    """
    return kv_idx >= 0
