"""The implementations (peers) of the cpu suite: each turns a workload into a function of q, k, v.

A peer makes its mask beforehand, so that making it is not timed. None reads the score mod of a workload; those of the cpu suite have
none.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.suites import Workload

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""q [B, T, N, D], k and v [B, T, M, D] -> out [B, T, N, D]."""


def dense(problem: Workload) -> Attention:
    """Attention as one writes it by hand: all scores, a boolean mask made beforehand, softmax, all probabilities.

    Scores are float32; probabilities are cast to the dtype of q.
    """
    mask = _dense_mask(problem)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Attention of q [B, T, N, D] over k and v [B, T, M, D], with all scores in memory."""
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores / math.sqrt(q.shape[-1]), -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, v)

    return attend


def jax_nn(problem: Workload) -> Attention:
    """`jax.nn.dot_product_attention`, with its own arguments for causal masks and windows, no mask for full attention, and a dense mask
    for others.
    """
    if problem.mask == "causal":
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    if problem.mask == "window":
        width = (problem.parameter - 1, 0)
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, local_window_size=width)
    mask = None if problem.mask == "full" else _dense_mask(problem)[None, None]
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask)


def flexjax(problem: Workload) -> Attention:
    """`flexjax.flex_attention` with a block mask made beforehand, or without one for full attention."""
    import flexjax as package

    block_mask = None
    if problem.mask != "full":
        allowed, length = problem.allowed(), problem.length
        block_mask = package.create_block_mask(
            lambda b, h, q, kv: jnp.asarray(allowed(q, kv)), None, None, length, length
        )
    return lambda q, k, v: package.flex_attention(q, k, v, block_mask=block_mask)


def _dense_mask(problem: Workload) -> jax.Array:
    """The workload's mask as an array: bool [length, length], True where the query sees the key."""
    index = np.arange(problem.length)
    return jnp.asarray(problem.allowed()(index[:, None], index[None, :]))


# in the order of the table; ratios are against flexjax, the last
PEERS: dict[str, Callable[[Workload], Attention]] = {"dense": dense, "jax.nn": jax_nn, "flexjax": flexjax}
