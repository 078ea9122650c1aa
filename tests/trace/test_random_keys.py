"""Random numbers in mods: what jax draws from a key, typed or raw, captured or made in the mod, is what the program draws."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flexjax
from flexjax.errors import ModError
from flexjax.ir.evaluate_scalars import call_program
from flexjax.trace.trace_mod import TracedMod, trace_multiplier, trace_score_mod
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

T = 8
RANDOM = jax.random
KEY, RAW, KEYS = RANDOM.key(5), RANDOM.PRNGKey(7), RANDOM.split(RANDOM.key(3), 6)
WORDS = np.asarray(RAW)
WEIGHTS = array(np.asarray([0.1, 0.2, 0.9]), jnp.float32)
Draw = Callable[[jax.Array, jax.Array], jax.Array]


def at(i: jax.Array, j: jax.Array) -> jax.Array:
    return RANDOM.fold_in(KEY, i * T + j)


@jax.custom_jvp
def noisy(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + RANDOM.uniform(key)


noisy.defjvp(lambda primals, tangents: (noisy(*primals), 3 * tangents[1]))


def until_large(key: jax.Array) -> jax.Array:
    """A while loop with a key in its carry."""
    more = lambda c: (RANDOM.fold_in(c[0], 1), c[1] + RANDOM.uniform(c[0]))
    return lax.while_loop(lambda c: c[1] < 2, more, (key, jnp.float32(0)))[1]


DRAWS: dict[str, Draw] = {
    "normal": lambda i, j: RANDOM.normal(at(i, j)),
    "raw": lambda i, j: RANDOM.uniform(RANDOM.fold_in(RANDOM.fold_in(RAW, i), j)),
    "numpy": lambda i, j: RANDOM.uniform(RANDOM.fold_in(WORDS, i)),
    "bytes": lambda i, j: RANDOM.bits(at(i, j), dtype=jnp.uint8),
    "halves": lambda i, j: RANDOM.bits(at(i, j), (3,), dtype=jnp.uint16)[j % 3],
    "bfloat16": lambda i, j: RANDOM.normal(at(i, j), dtype=jnp.bfloat16),
    "bernoulli": lambda i, j: RANDOM.bernoulli(at(i, j), 0.3),
    "randint": lambda i, j: RANDOM.randint(at(i, j), (), -3, 77),
    "split": lambda i, j: RANDOM.uniform(RANDOM.split(at(i, j), 5)[j % 5]),
    "captured keys": lambda i, j: RANDOM.uniform(RANDOM.fold_in(KEYS[i % 6], j)),
    "take": lambda i, j: RANDOM.uniform(jnp.take(KEYS, i - 3)),
    "where": lambda i, j: RANDOM.uniform(jnp.where(i > j, RANDOM.fold_in(KEY, i), KEYS[j % 6])),
    "switch": lambda i, j: RANDOM.uniform(lax.switch(i % 2, [lambda: RANDOM.fold_in(KEY, i), lambda: KEYS[2]])),
    "equal": lambda i, j: RANDOM.fold_in(KEY, i) == RANDOM.fold_in(KEY, j),
    "concatenated": lambda i, j: RANDOM.uniform(jnp.concatenate([KEYS[:2], RANDOM.split(at(i, j))])[j % 4]),
    "made": lambda i, j: RANDOM.uniform(RANDOM.key(i - j)),
    "made of a number": lambda i, j: RANDOM.uniform(RANDOM.fold_in(RANDOM.PRNGKey(3), i)),
    "constant": lambda i, j: RANDOM.uniform(RANDOM.key(3)) * i,
    "vector": lambda i, j: RANDOM.bits(RANDOM.fold_in(KEY, i), (5,))[j % 5],
    "data": lambda i, j: RANDOM.key_data(RANDOM.fold_in(KEY, i))[j % 2],
    "wrapped": lambda i, j: RANDOM.uniform(RANDOM.wrap_key_data(jnp.stack([i, j]).astype(jnp.uint32))),
    "mapped": lambda i, j: jax.vmap(lambda key: RANDOM.uniform(RANDOM.fold_in(key, i)))(KEYS)[j % 6],
    "categorical": lambda i, j: RANDOM.categorical(at(i, j), WEIGHTS),
    "choice": lambda i, j: RANDOM.choice(at(i, j), WEIGHTS, p=WEIGHTS),
    "fixed loop": lambda i, j: lax.fori_loop(0, 3, lambda n, key: RANDOM.split(key)[0], at(i, j)) == KEY,
    "while": lambda i, j: until_large(at(i, j)),
    "gamma": lambda i, j: RANDOM.gamma(at(i, j), 2.5),
    "permutation": lambda i, j: RANDOM.permutation(at(i, j), 5)[j % 5],
    "custom rule": lambda i, j: noisy(at(i, j), 1.0 * j),
}  # fmt: skip
QUICK = {"normal", "raw", "halves", "split", "captured keys", "take", "where", "made", "choice", "while", "custom rule"}
I, J = (x.ravel().astype(np.int32) for x in np.meshgrid(np.arange(T), np.arange(T), indexing="ij"))


def traced_draw(draw: Draw) -> TracedMod:
    return trace_multiplier("draw", lambda b, h, q, k: draw(q, k), (1, 1, T, T))


@pytest.mark.parametrize("partitionable", some_slow([True, False], [True]))
@pytest.mark.parametrize("name", some_slow(DRAWS, QUICK))
def test_a_draw_is_that_of_jax(name: str, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable):
        wanted = quick_jit(jax.vmap(DRAWS[name]))(I, J)
        made = traced_draw(DRAWS[name])
        got = quick_jit(jax.vmap(lambda i, j: call_program(made.program, made.arrays, (0, 0, i, j))))(I, J)
    assert np.ptp(np.asarray(wanted, np.float64)) > 0 or name == "fixed loop"
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=1e-5, atol=1e-6)
    score = trace_score_mod(lambda s, b, h, q, k: s * DRAWS[name](q, k).astype(jnp.float32), (1, 1, T, T))
    assert score.why_not == ""


def test_another_key_is_the_same_program() -> None:
    normal = lambda key: lambda i, j: RANDOM.normal(RANDOM.fold_in(key, i * T + j))
    programs = {traced_draw(normal(key)).program for key in (KEY, RAW, *KEYS)}
    (program,) = programs
    assert [str(capture) for capture in program.captures] == ["uint32[2]"]
    hashes = [step for step in program.steps if getattr(step, "prim", "") == "threefry2x32"]
    assert len(hashes) == 4, "two words of the key that is folded in, and two of the number that is drawn"


@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg"])
def test_keys_of_other_implementations_are_refused(name: str) -> None:
    key = RANDOM.key(0, impl=name)
    with pytest.raises(ModError) as refused:
        trace_score_mod(lambda s, b, h, q, k: s + RANDOM.normal(RANDOM.fold_in(key, q)), (1, 1, T, T))
    assert str(refused.value).partition("\nin ")[0] == (
        "`score_mod` cannot be compiled: it draws random bits at each position from a key of another implementation than threefry2x32 "
        '(`rng_bit_generator`), whose bits XLA makes for whole arrays alone; pass a key as jax.random.key(seed, impl="threefry2x32") '
        "makes it, or draw the numbers outside the mod and index them."
    )


# ------------------------------------------------------------------- whole calls

QUERY = array(np.random.default_rng(0).standard_normal((2, 20, 2, 8)), jnp.float32)


def attend(key: jax.Array, query: jax.Array, implementation: str = "xla") -> jax.Array:
    """Attention with noise on the scores and random entries hidden, both by one key."""
    return flexjax.flex_attention(
        query, QUERY, QUERY, implementation=implementation,
        score_mod=lambda s, b, h, q, k: s + RANDOM.normal(RANDOM.fold_in(key, q * 20 + k)),
        mask_mod=lambda b, h, q, k: RANDOM.bernoulli(RANDOM.fold_in(RANDOM.fold_in(key, h), q * 20 + k), 0.4) | (q == k),
    )  # fmt: skip


def loss(key: jax.Array, query: jax.Array, implementation: str = "xla") -> jax.Array:
    return (attend(key, query, implementation) ** 2).sum()


def test_a_key_of_each_step_compiles_nothing_and_gives_the_references_numbers() -> None:
    step = jax.jit(jax.value_and_grad(loss, 1))
    for key in KEYS[:2]:
        value, slope = step(key, QUERY)
        wanted, slope_wanted = jax.value_and_grad(loss, 1)(key, QUERY, "reference")
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        np.testing.assert_allclose(slope, slope_wanted, atol=2e-5)
    assert step._cache_size() == 1


@pytest.mark.parametrize("keys", [KEYS[:3], RANDOM.key_data(KEYS[:3])], ids=["typed", "raw"])
def test_keys_may_be_mapped_and_scanned(keys: jax.Array) -> None:
    wanted = np.stack([attend(key, QUERY) for key in KEYS[:3]])
    np.testing.assert_allclose(jax.jit(jax.vmap(attend, (0, None)))(keys, QUERY), wanted, atol=2e-6)
    scanned = jax.jit(lambda keys: lax.scan(lambda _, key: (None, attend(key, QUERY)), None, keys)[1])(keys)
    np.testing.assert_allclose(scanned, wanted, atol=2e-6)


def test_blocks_of_a_random_mask_hold_every_entry() -> None:
    """A band of random entries: blocks past the band are empty, no block is full."""

    def band(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        return (RANDOM.uniform(RANDOM.key(q * 64 + k)) < 0.5) & (q - k < 16) & (k <= q)

    made = flexjax.create_block_mask(band, 1, 1, 64, 64, block_size=16)
    q, k = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    right = quick_jit(jax.vmap(jax.vmap(lambda q, k: band(0, 0, q, k))))(q, k)
    np.testing.assert_array_equal(made.to_mask()[0, 0], right)
    assert int(made.to_dense().sum()) == 7, "the diagonal and the one below it"
