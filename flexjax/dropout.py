"""Dropout of attention probabilities: a program that says from a key which positions are kept.

Whether (b, h, q, kv) is kept is a hash of the position and the key, so nothing is stored and the backward pass computes the
same hash again. Two words of the key seed a hash of (b, h); queries and keys are hashed separately and combined, so that only
the last mixing runs for each entry. The mixing function is "lowbias32" (C. Wellons, Hash Prospector, 2018).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flexjax.errors import bad_argument, kind_of
from flexjax.trace.trace_mod import Sizes, TracedMod, trace_multiplier

Array = jax.Array


def mix(x: Array) -> Array:
    """A bijection of uint32 that mixes all bits (lowbias32), applied to each element of x."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def kept(words: Array, rate: float, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """bool: whether dropout keeps the probability of the entry (b, h, q_idx, kv_idx), which it does with chance 1 - rate.

    words                  uint32 [2], from `key_words`; the same words keep the same entries
    rate                   a Python float in [0, 1)
    b, h, q_idx, kv_idx    integer scalars or arrays that broadcast together; the result has their common shape
    """
    u = lambda i: jnp.asarray(i).astype(jnp.uint32)
    head = mix(words[0] ^ mix(u(b) * jnp.uint32(0x9E3779B9) + u(h) + jnp.uint32(1)))
    row = mix(head ^ mix(u(q_idx) + words[1]))
    column = mix(head + mix(u(kv_idx) ^ jnp.uint32(0x85EBCA6B)))
    return mix(row ^ column) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def dropout_program(
    rate: object, key: object, sizes: Sizes, dtype: str = "float32", broadcast: object = False
) -> TracedMod | None:
    """The traced program of the factor of each probability, in `dtype`: 0 with chance `rate`, else 1 / (1 - rate); None for rate
    0.

    rate, key, broadcast   the arguments dropout_rate, dropout_key and broadcast_dropout of a call, not checked yet. With
                           broadcast, all batch entries and heads drop the same positions
    sizes                  (batch, query heads, query length, key length) of the whole problem, above all indices (`sizes_of`)

    The words of the key are the program's captured array, so another key compiles nothing. Raises ValueError for a rate outside
    [0, 1), a missing or malformed key, or a `broadcast` that is no bool.
    """
    if not isinstance(broadcast, bool):
        raise bad_argument("broadcast_dropout", repr(broadcast), "True or False", "Pass a Python bool.")
    if isinstance(rate, core.Tracer):
        raise bad_argument("dropout_rate", "traced", "a Python float in [0, 1)", "Make it a static argument of jit.")
    if not isinstance(rate, int | float | np.number) or not 0 <= rate < 1:
        raise bad_argument("dropout_rate", repr(rate), "a Python float in [0, 1)", "0.0 means no dropout.")
    if rate == 0:
        return None
    rate = float(rate)
    words = key_words(key)
    multiplier = 1.0 / (1.0 - rate)

    def dropout(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        """The factor of the probability of one entry, a scalar in `dtype`: 0 if it is dropped, else 1 / (1 - rate). With `broadcast`, b
        and h are not read.
        """
        if broadcast:
            b = h = jnp.zeros((), jnp.int32)
        on = kept(words, rate, b, h, q_idx, kv_idx)
        return jnp.where(on, jnp.asarray(multiplier, dtype), jnp.zeros((), dtype))

    return trace_multiplier("dropout", dropout, sizes)


def key_words(key: object) -> Array:
    """uint32 [2], the seed of the hash, from the argument dropout_key: one jax PRNG key, typed or raw.

    The first two words of the key; the third and fourth, if it has them, are mixed in. Raises ValueError for None and
    for anything that is not a single key.
    """
    if key is None:
        raise bad_argument(
            "dropout_key", "None", "a jax random key, because dropout_rate is positive", "Pass jax.random.key(seed)."
        )
    if not isinstance(key, jax.Array | np.ndarray):
        raise bad_argument("dropout_key", kind_of(key), "one key", "Pass jax.random.key(seed).")
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray(key)
    if data.dtype != jnp.uint32 or data.ndim != 1 or data.shape[0] < 2:
        raise bad_argument(
            "dropout_key",
            f"{key.dtype}{list(key.shape)}",
            "one key",
            "Pass jax.random.key(seed), not a batch of keys.",
        )
    return jnp.stack([data[0] ^ mix(data[2]), data[1] ^ mix(data[3])]) if data.shape[0] >= 4 else data[:2]


def dense_keep(
    words: Array,
    rate: float,
    shape: tuple[int, int, int, int],
    broadcast: bool = False,
    indices: Sequence[Array] | None = None,
) -> Array:
    """`kept` at every entry, for the dense reference: bool that broadcasts to [B, N, T, S].

    words, rate   uint32 [2] from `key_words`, and the chance to be dropped; shape: B, N, T, S
    broadcast     whether all batch entries and heads keep the same positions
    indices       b, h, q_idx and kv_idx, int32 of 4 dims that broadcast to `shape`; None: they count from 0
    """
    given = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in shape), indexing="ij", sparse=True)
    at = list(given if indices is None else indices)
    if broadcast:
        at[:2] = [jnp.zeros((1, 1, 1, 1), jnp.int32)] * 2
    return kept(words, float(rate), *at)
