"""Dropout of attention probabilities: a program that says from a key which positions are kept.

Whether (b, h, q, kv) is kept is a hash of the position and the key: nothing is stored, and the backward pass computes
the same hash. Queries and keys are hashed separately, so that only the last mixing runs for each entry. The mixing
function is "lowbias32" (C. Wellons, Hash Prospector, 2018).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flexjax.errors import bad_argument, kind_of
from flexjax.trace.trace_mod import Sizes, TracedMod, trace_multiplier
from flexjax.types import Dropout

Array = jax.Array
Words = tuple[Array, Array]  # two uint32 scalars


def mix(x: Array) -> Array:
    """A bijection of uint32 that mixes all bits (lowbias32)."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def kept(words: Words, rate: float, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
    """bool: whether dropout keeps the entry (b, h, q_idx, kv_idx), with chance 1 - rate; `words` seed the hash."""
    u = lambda i: jnp.asarray(i).astype(jnp.uint32)
    head = mix(words[0] ^ mix(u(b) * jnp.uint32(0x9E3779B9) + u(h) + jnp.uint32(1)))
    row = mix(head ^ mix(u(q_idx) + words[1]))
    column = mix(head + mix(u(kv_idx) ^ jnp.uint32(0x85EBCA6B)))
    return mix(row ^ column) >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def dropout_program(given: Dropout | None, sizes: Sizes, dtype: str = "float32") -> TracedMod | None:
    """The traced program of the factor of each probability: 0 with chance `rate`, else 1 / (1 - rate); None for rate 0.

    sizes   (batch, query heads, query length, key length) of the whole problem, above all indices (`sizes_of`)

    Raises ValueError for what is no Dropout and for a missing or malformed key.
    """
    if given is not None and not isinstance(given, Dropout):
        raise bad_argument("dropout", repr(given), "a flexjax.Dropout or None", "Write flexjax.Dropout(rate, key).")
    if given is None or given.rate == 0:
        return None
    # the words are the program's captured array, so another key compiles nothing
    rate, broadcast, words = given.rate, given.broadcast, key_words(given.key)
    multiplier = 1.0 / (1.0 - rate)

    def dropout(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        if broadcast:
            b = h = jnp.zeros((), jnp.int32)
        on = kept(words, rate, b, h, q_idx, kv_idx)
        return jnp.where(on, jnp.asarray(multiplier, dtype), jnp.zeros((), dtype))

    return trace_multiplier("dropout", dropout, sizes)


def key_words(key: object) -> Words:
    """The seed of the hash, from one jax PRNG key, typed or raw. Raises ValueError for anything else."""
    if key is None:
        raise bad_argument(
            "dropout.key", "None", "a jax random key, because the rate is positive", "Pass jax.random.key(seed)."
        )
    if not isinstance(key, jax.Array | np.ndarray):
        raise bad_argument("dropout.key", kind_of(key), "one key", "Pass jax.random.key(seed).")
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray(key)
    if data.dtype != jnp.uint32 or data.ndim != 1 or data.shape[0] < 2:
        raise bad_argument(
            "dropout.key", f"{key.dtype}{list(key.shape)}", "one key", "Pass jax.random.key(seed), not a batch of keys."
        )
    return _words(data)


@jax.jit  # one dispatch in an eager call
def _words(data: Array) -> Words:
    if data.shape[0] < 4:
        return data[0], data[1]
    return data[0] ^ mix(data[2]), data[1] ^ mix(data[3])


def dense_keep(
    words: Words,
    rate: float,
    shape: tuple[int, int, int, int],
    broadcast: bool = False,
    indices: Sequence[Array] | None = None,
) -> Array:
    """`kept` at every entry, for the dense reference: bool that broadcasts to `shape`, [B, N, T, S].

    indices   b, h, q_idx and kv_idx, int32 of 4 dims that broadcast to `shape`; None: they count from 0
    """
    given = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in shape), indexing="ij", sparse=True)
    at = list(given if indices is None else indices)
    if broadcast:
        at[:2] = [jnp.zeros((1, 1, 1, 1), jnp.int32)] * 2
    return kept(words, float(rate), *at)
