"""Three-valued logic over blocks: each rule against every entry of every block, where it can say a wrong thing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexjax.block_mask.classify import BlockedMask, classify_rows
from flexjax.trace.trace_mod import trace_mask_mod
from tests.arrays import array
from tests.cases.random_masks import classes, dense
from tests.cases.small import quick_jit

SIZES = (2, 3, 96, 130)
BLOCKS = (16, 24)
T, S = SIZES[2:]
rng = np.random.default_rng(11)
BYTES = array(rng.integers(-128, 128, S), jnp.int8)
WORDS = array(rng.integers(0, 2**32, S, dtype=np.uint64).astype(np.uint32))
NARROW = (jnp.arange(S) + 200).astype(jnp.bfloat16)
ENDLESS = jnp.where(jnp.arange(S) % 5 == 0, -jnp.inf, 5.0)
UPWARDS = jnp.where(jnp.arange(S) % 7 == 0, jnp.inf, 5.0)
HOLES = jnp.where(jnp.arange(S) % 9 == 0, jnp.nan, 1.0)
WINDOW = array([0, 50, 130])
F32 = lambda x: x.astype(jnp.float32)
U32 = lambda x: x.astype(jnp.uint32)

SOUND = {
    "bytes that wrap": lambda b, h, q, k: BYTES[q] + BYTES[k] > 0,
    "a product of bytes": lambda b, h, q, k: BYTES[q] * BYTES[k] > 100,
    "a negated byte": lambda b, h, q, k: -BYTES[q] >= -127,
    "an absolute byte": lambda b, h, q, k: jnp.abs(BYTES[q]) >= 0,
    "unsigned difference": lambda b, h, q, k: U32(q) - U32(k) < 5,
    "a negated word": lambda b, h, q, k: -U32(q) > 100,
    "words as bools": lambda b, h, q, k: WORDS[k].astype(bool),
    "a hash as bool": lambda b, h, q, k: (WORDS[k] & U32(q)).astype(bool),
    "a product that overflows": lambda b, h, q, k: (q * 20_000_000) * k > 5,
    "a shifted head as an index": lambda b, h, q, k: k < WINDOW[h >> 1],
    "a masked head as an index": lambda b, h, q, k: k < WINDOW[(h ^ b) & 1],
    "logarithm of negatives": lambda b, h, q, k: jnp.log(F32(q - k)) <= 10,
    "root of negatives": lambda b, h, q, k: jnp.sqrt(F32(q - k)) < 20,
    "infinity less infinity": lambda b, h, q, k: jnp.tanh(ENDLESS[q] + UPWARDS[k]) < 1.5,
    "zero times infinity": lambda b, h, q, k: F32(q - k) * UPWARDS[k] <= jnp.inf,
    "infinity over infinity": lambda b, h, q, k: jnp.minimum(UPWARDS[q] / UPWARDS[k], 3) <= 3,
    "NaN as bool": lambda b, h, q, k: (HOLES[k] * 0).astype(bool),
    "narrow sums round": lambda b, h, q, k: NARROW[q] + jnp.bfloat16(1) <= 256,
    "narrow conversions round": lambda b, h, q, k: (q + 250).astype(jnp.bfloat16) <= 256,
    "past the largest float8": lambda b, h, q, k: F32(F32(k + 440).astype(jnp.float8_e4m3fn)) > 100,
    "rounded to float8": lambda b, h, q, k: F32(F32(k + 300).astype(jnp.float8_e4m3fn)) >= 300,
    "past the largest float16": lambda b, h, q, k: F32((F32(k) * 600).astype(jnp.float16)) < 65536,
    "complex numbers": lambda b, h, q, k: jnp.real(jax.lax.complex(F32(q), F32(k)) * 1j) > -20,
    "equal complex numbers": lambda b, h, q, k: jax.lax.complex(F32(q), F32(k)) == k.astype(jnp.complex64),
    "remainder by nothing": lambda b, h, q, k: (q - k) % WINDOW[h] < 3,
    "division by nothing": lambda b, h, q, k: (q - k) // WINDOW[h] < -1,
    "unsigned division by nothing": lambda b, h, q, k: U32(q) // U32(WINDOW[h]) > U32(k),
    "remainder by less than nothing": lambda b, h, q, k: (q - k) % (k - 40) > 3,
    "float to unsigned": lambda b, h, q, k: F32(q - k).astype(jnp.uint32) < 3,
    "remainder of a negative": lambda b, h, q, k: (q - k) % -7 > -3,
    "division by a negative": lambda b, h, q, k: (q - k) // -7 > 2,
    "the same value twice": lambda b, h, q, k: (q - k) * (q - k) < 100,
    "selected": lambda b, h, q, k: jnp.where(HOLES[k] > 0, q - k, k - q) < 30,
}


def found(mask: object) -> tuple[np.ndarray, np.ndarray]:
    traced = trace_mask_mod(mask, SIZES)
    rows = np.arange(-(-T // BLOCKS[0]), dtype=np.int32)
    classify = functools.partial(classify_rows, BlockedMask(traced.program, SIZES[:2], (T, S, *BLOCKS)))
    kinds, certain = quick_jit(classify)(traced.arrays, rows)
    return np.asarray(kinds), np.asarray(certain)


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_claimed_wrongly(name: str) -> None:
    """Full, empty, and that a block is certainly mixed."""
    kinds, certain = found(SOUND[name])
    want = classes(dense(SOUND[name], SIZES), BLOCKS)
    np.testing.assert_array_equal(kinds[kinds != 1], want[kinds != 1])
    np.testing.assert_array_equal(kinds[certain], want[certain])


CERTAIN = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: jnp.abs(q - k) < 20,
    "chunks": lambda b, h, q, k: q // 40 == k // 40,
    "chunks of a size by head": lambda b, h, q, k: q // (WINDOW[h] + 8) == k // (WINDOW[h] + 8),
    "remainders": lambda b, h, q, k: (q % 7) == (k % 5),
    "remainders by nothing": lambda b, h, q, k: q % (WINDOW[h] // 9) == k % 1,
    "remainders by a negative": lambda b, h, q, k: q % -7 < k % -5,
    "divided by a negative": lambda b, h, q, k: q // -3 + 20 < k // -4,
    "a chunk of chunks": lambda b, h, q, k: (q // 3) % 4 <= (k // 37) // 2,
    "remainders of more than there is": lambda b, h, q, k: q % 200 < k % 131,
    "captured threshold": lambda b, h, q, k: k + 3 < WINDOW[h],
    "dense": lambda b, h, q, k: (BYTES[q] > 0) & (WORDS[k] > jnp.uint32(2**31)),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_no_doubt_is_left(name: str) -> None:
    kinds, certain = found(CERTAIN[name])
    assert certain.all()
    np.testing.assert_array_equal(kinds, classes(dense(CERTAIN[name], SIZES), BLOCKS))


def test_a_term_with_quotients_and_remainders_is_few_operations() -> None:
    """XLA compiles each operation; a term that rounds down by jnp.floor_divide has 180."""

    def operations(terms: int) -> int:
        def mask(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
            seen = q >= k
            for m in range(terms):
                seen = seen | ((q // (37 + m)) % (m + 2) == (k // (37 + m)) % (m + 2))
            return seen

        blocked = BlockedMask(trace_mask_mod(mask, SIZES).program, SIZES[:2], (T, S, *BLOCKS))
        return size(jax.make_jaxpr(functools.partial(classify_rows, blocked))((), jnp.arange(6)).jaxpr)

    def size(jaxpr: Any) -> int:
        inner = [x.jaxpr for e in jaxpr.eqns for x in e.params.values() if hasattr(x, "jaxpr")]
        return len(jaxpr.eqns) + sum(map(size, inner))

    one, five, nine = map(operations, (1, 5, 9))
    assert five - one <= 4 * 75
    assert nine - five <= 1.1 * (five - one)
