"""Mods that nobody would ship, as a table: each is a program that some reader of jaxprs could get wrong.

A row is a name, a factory of a mask_mod or score_mod, and what its loads should be seen as (see classify_load), in the order
in which the program makes them; None where it loads nothing.  The matrix is SIZES.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.arrays import array

SIZES = (2, 3, 23, 37)
B, N, T, S = SIZES
LONG = T + S

rng = np.random.default_rng(7)
NORMAL = lambda *shape: array(rng.standard_normal(shape), jnp.float32)
INTS = lambda high, *shape: array(rng.integers(0, high, shape), jnp.int32)

ROW, COLUMN, TILE, DIAGONAL, HEAD = NORMAL(T), NORMAL(S), NORMAL(T, S), NORMAL(LONG), NORMAL(N)
FULL = NORMAL(B, N, T, S)
WHERE, OFFSET, LENGTH = INTS(T, T), INTS(9, B), INTS(S, B)
SMALL = array(rng.integers(-128, 128, LONG), jnp.int8)
BYTES = array(rng.integers(0, 256, LONG), jnp.uint8)
WORDS = array(rng.integers(0, 2**32, S, dtype=np.uint64).astype(np.uint32))
FLAGS = array(rng.random(S) < 0.5)
WIDE = INTS(1000, 300)
AS_NUMPY = np.asarray(COLUMN)

Row = tuple[Callable[..., Any], tuple[str, ...]]
SCORES: dict[str, Row] = {}
MASKS: dict[str, Row] = {}


def score(*loads: str) -> Callable:
    """Makes a decorator that adds a score mod to SCORES, with the load classes that its program must have."""

    def keep(mod: Callable) -> Callable:
        SCORES[mod.__name__] = (mod, loads)
        return mod

    return keep


def mask(*loads: str) -> Callable:
    """Makes a decorator that adds a mask mod to MASKS, with the load classes that its program must have."""

    def keep(mod: Callable) -> Callable:
        MASKS[mod.__name__] = (mod, loads)
        return mod

    return keep


# ------------------------------------------------------------------ where a load goes


@score("row slice")
def reads_row(s, b, h, q, k):
    return s + ROW[q]


@score("column slice")
def reads_column(s, b, h, q, k):
    return s + COLUMN[k]


@score("column slice")
def reads_numpy(s, b, h, q, k):
    return s + AS_NUMPY[k]


@score("scalar")
def reads_head(s, b, h, q, k):
    return s * HEAD[h]


@score("scalar")
def reads_half_the_head(s, b, h, q, k):
    return s * HEAD[h >> 1]


@score("tile slice")
def reads_tile(s, b, h, q, k):
    return s + TILE[q, k]


@score("tile slice")
def reads_flipped(s, b, h, q, k):
    return s + TILE.T[k, q]


@score("tile slice")
def reads_everything(s, b, h, q, k):
    return s + FULL[b, h, q, k]


@score("diagonal slice")
def reads_difference(s, b, h, q, k):
    return s + DIAGONAL[q - k + S]


@score("diagonal slice")
def reads_opposite_difference(s, b, h, q, k):
    return s + DIAGONAL[k - q + T]


@score("diagonal gather")
def reads_wrapped_difference(s, b, h, q, k):
    return s + DIAGONAL[q - k]


@score("diagonal gather")
def reads_distance(s, b, h, q, k):
    return s + DIAGONAL[jnp.abs(q - k)]


@score("diagonal gather")
def reads_twice_the_difference(s, b, h, q, k):
    return s + DIAGONAL[jnp.clip(2 * (q - k), 0, 30)]


@score("scalar", "diagonal gather")
def reads_captured_shift(s, b, h, q, k):
    return s + DIAGONAL[q - k + OFFSET[b]]


@score("tile gather")
def reads_sum(s, b, h, q, k):
    return s + DIAGONAL[q + k]


@score("tile gather")
def reads_modulo(s, b, h, q, k):
    return s + TILE[q % 7, k % 5]


@score("row gather")
def reads_every_other_row(s, b, h, q, k):
    return s + DIAGONAL[2 * q]


@score("column gather")
def reads_backwards(s, b, h, q, k):
    return s + COLUMN[S - 1 - k]


@score("row slice", "row gather")
def reads_nested(s, b, h, q, k):
    return s + ROW[WHERE[q]]


@score("row slice", "column slice")
def reads_one_table_twice(s, b, h, q, k):
    return s + DIAGONAL[q] * DIAGONAL[k]


@score("row slice")
def reads_the_diagonal_of_a_tile(s, b, h, q, k):
    return s + DIAGONAL[(q - k) + k]


@score("column slice")
def reads_with_a_head_that_cancels(s, b, h, q, k):
    return s + DIAGONAL[(k + h) - h]


@score("row slice")
def reads_past_the_end(s, b, h, q, k):
    return s + DIAGONAL[q + LONG - T]


@score("column gather")
def reads_with_negative_index(s, b, h, q, k):
    return s + COLUMN[-1 - k]


@score("row slice", "row gather")
def reads_by_bytes(s, b, h, q, k):
    return s + WIDE[BYTES[q]]


@score("row slice", "row gather")
def reads_by_small_integers(s, b, h, q, k):
    return s + WIDE[SMALL[q]]


@score("row gather")
def takes_with_fill(s, b, h, q, k):
    return jnp.nan_to_num(jnp.take(ROW, q * 2, mode="fill", fill_value=3.0)) + s


@score("column gather")
def takes_with_clip(s, b, h, q, k):
    return s + jnp.take(COLUMN, k - 5, mode="clip")


@score("row slice")
def slices_dynamically(s, b, h, q, k):
    return s + jnp.sum(lax.dynamic_slice(jnp.concatenate([ROW, ROW]), (q,), (1,)))


@score("row slice", "row slice", "row slice")
def slices_three(s, b, h, q, k):
    return s + jnp.max(lax.dynamic_slice(jnp.concatenate([ROW, ROW]), (q,), (3,)))


@score("scalar")
def reads_a_derived_array(s, b, h, q, k):
    return s * jnp.exp(HEAD)[h]


# ------------------------------------------------------------------ arithmetic of scores


@score()
def stops_a_gradient(s, b, h, q, k):
    return s * lax.stop_gradient(s)


@score()
def crosses_a_barrier(s, b, h, q, k):
    first, second = lax.optimization_barrier((s, s * 2))
    return first + second


@score()
def unrolls_a_loop(s, b, h, q, k):
    return lax.fori_loop(0, 5, lambda i, x: x * 0.5 + i, s)


@score("scalar", "scalar", "scalar", "scalar")
def scans(s, b, h, q, k):
    return lax.scan(lambda x, y: (jnp.tanh(x + y), x), s, jnp.arange(4.0))[0]


@score()
def branches(s, b, h, q, k):
    return lax.cond(q > k, lambda x: x * 2, lambda x: x - 1, s)


@score()
def switches(s, b, h, q, k):
    return lax.switch(h, [lambda x: x, lambda x: -x, lambda x: x * x], s)


@score()
def polynomial_of_a_small_vector(s, b, h, q, k):
    return jnp.dot(jnp.stack([s, s * s, q * 0.5]), jnp.stack([1.0 + k, 0.25 + h, 2.0 - s]))


@score()
def sorts_by_argmax(s, b, h, q, k):
    return s + jnp.argmax(jnp.stack([q, k, 10 * h])) + jnp.argmin(jnp.stack([s, 0.1 * q]))


@score()
def first_nan_is_the_largest(s, b, h, q, k):
    few = jnp.stack([s, jnp.where(q == 1, jnp.nan, k), jnp.where(k > 2, jnp.nan, 0.5 * q)])
    return s + jnp.argmax(few) + 3 * jnp.argmin(few)


@score()
def accumulates(s, b, h, q, k):
    return jnp.cumsum(jnp.stack([s, 1.0 * q, 1.0 * k]))[h]


@score()
def clamps(s, b, h, q, k):
    return lax.clamp(-0.5, s, 0.5) * jnp.clip(q, 3, 9)


# ------------------------------------------------------------------ masks


@mask()
def never(b, h, q, k):
    return q + k < 0


@mask()
def cancels(b, h, q, k):
    return (q - k) + k >= 5


@mask()
def remainder_of_negatives(b, h, q, k):
    return (q - k) % 5 == (k - q) % -3


@mask()
def truncated_remainder(b, h, q, k):
    return lax.rem(q - k, jnp.int32(4)) == lax.div(q - k, jnp.int32(4))


@mask()
def floor_divides_by_a_negative(b, h, q, k):
    return (q // -2) + 20 > k // 3


@mask("row slice")
def divides_bytes_by_more(b, h, q, k):
    return SMALL[q] % (k + 130) > 100


@mask()
def overflows(b, h, q, k):
    return (q * 90_000_000) * (k + 1) > 0


@mask()
def hashes(b, h, q, k):
    x = (q.astype(jnp.uint32) * jnp.uint32(2654435761)) ^ (k.astype(jnp.uint32) << 7)
    return (x ^ (x >> 15)) % 3 == 0


@mask()
def subtracts_unsigned(b, h, q, k):
    return q.astype(jnp.uint32) - k.astype(jnp.uint32) < 5


@mask("row slice", "column slice")
def adds_bytes(b, h, q, k):
    return SMALL[q] + SMALL[k] > 0


@mask("column slice")
def word_as_bool(b, h, q, k):
    return WORDS[k].astype(bool)


@mask("column slice")
def flag(b, h, q, k):
    return FLAGS[k] ^ (q > 10)


@mask()
def logarithm_of_the_difference(b, h, q, k):
    return jnp.log((q - k).astype(jnp.float32)) <= 10


@mask("scalar")
def length(b, h, q, k):
    return k < LENGTH[b]


@mask()
def remainder_by_another_name(b, h, q, k):
    @jax.jit
    def remainder(x, y):
        return jnp.where(x > 20, 0, x % y)

    return remainder(q, jnp.int32(3)) == 0


@mask()
def selects_among_three(b, h, q, k):
    return lax.select_n(h, q, k, q + k) > 20


@mask()
def any_of_a_vector(b, h, q, k):
    return jnp.any(q == jnp.array([1, 5, 9])) | jnp.all(jnp.stack([k, q]) > 15)


@mask()
def counts_with_a_while_loop(b, h, q, k):
    return lax.while_loop(lambda x: x > 6, lambda x: x - 7, q) == k % 7
