"""Dropout: how often, how independent, unbiased, the same mask in the backward pass, all kinds of keys."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from flexjax.backends.reference.definition import reference_attention
from flexjax.call.dropout import dense_keep, key_words
from tests.arrays import array
from tests.cases.small import by_definition, quick_jit

SHAPE = (3, 4, 120, 130)
"""B, N, T, S of the statistics."""


KEEP = quick_jit(dense_keep, static_argnums=(1, 2))


@functools.cache
def keep(seed: int, rate: float, shape: tuple[int, int, int, int] = SHAPE) -> np.ndarray:
    return np.asarray(KEEP(key_words(jax.random.key(seed)), rate, shape))


def surprise(kept: np.ndarray, rate: float, axes: tuple[int, ...]) -> float:
    """Largest distance of a count of kept entries from its mean, in standard deviations of the binomial."""
    count = np.prod([kept.shape[a] for a in axes])
    mean, deviation = count * (1 - rate), np.sqrt(count * rate * (1 - rate))
    return float(np.abs((kept.sum(axes) - mean) / deviation).max())


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (2, 3), (3,), (2,), (0, 1), (1, 2, 3)], ids=str)
def test_rate(rate: float, axes: tuple[int, ...]) -> None:
    """Over everything, per head, per row, per column, per position, per batch entry."""
    kept = keep(0, rate)
    groups = kept.size / np.prod([kept.shape[a] for a in axes])
    # Chernoff: the largest of `groups` stays below this but once in a million (binomials lean at extreme rates).
    assert surprise(kept, rate, axes) < 1.3 * np.sqrt(2 * np.log(groups * 1e6))


@pytest.mark.parametrize(("axis", "step"), [(a, s) for a in range(4) for s in (1, 2, 3) if s < SHAPE[a]])
def test_neighbours_are_independent(axis: int, step: int) -> None:
    """Whether two entries that differ in one coordinate agree is a fair coin at rate 1/2."""
    kept = keep(1, 0.5)
    a, b = (np.take(kept, range(i, kept.shape[axis] - step + i), axis) for i in (0, step))
    agree = a == b
    assert surprise(agree, 0.5, (0, 1, 2, 3)) < 5
    assert surprise(agree, 0.5, (2, 3)) < 6


def test_rows_and_columns_are_jointly_independent() -> None:
    """The parity of the four corners of a rectangle: a hash that joins rows and columns linearly would fail here."""
    kept = keep(2, 0.5).astype(np.int64)
    for dq, dk in itertools.product((1, 5), (1, 8)):
        corners = kept[:, :, dq:, dk:] + kept[:, :, :-dq, dk:] + kept[:, :, dq:, :-dk] + kept[:, :, :-dq, :-dk]
        assert surprise(corners % 2 == 0, 0.5, (0, 1, 2, 3)) < 5


def test_keys_are_independent() -> None:
    kept = [keep(seed, 0.5) for seed in range(6)]
    for a, b in itertools.combinations(kept, 2):
        assert surprise(a == b, 0.5, (0, 1, 2, 3)) < 5


# ------------------------------------------------------------------- through attention

B, N, M, T, S, D = 2, 4, 2, 20, 30, 8


def qkv(seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, D), (B, S, M, D), (B, S, M, D))
    return tuple(array(rng.standard_normal(s), jnp.result_type(float)) for s in shapes)


def test_what_is_dropped_is_what_the_hash_says_and_the_backward_agrees() -> None:
    """Values, gradients and tangents of a dense implementation with the same keep array, in float64."""
    with jax.enable_x64(True):
        q, k, v = qkv()
        key = jax.random.key(5)
        kept = KEEP(key_words(key), 0.3, (B, N, T, S))
        tiled = flexjax.create_block_mask(masks.causal, None, None, T, S, block_size=8)

        def ours(*a: jax.Array) -> jax.Array:
            return flexjax.flex_attention(*a, block_mask=tiled, dropout=flexjax.Dropout(0.3, key))

        def dense(*a: jax.Array) -> jax.Array:
            return reference_attention(*a, mask_mod=masks.causal, dropout_rate=0.3, dropout_keep=kept)[0]

        gradient = lambda f, *a: jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))(*a)
        everything = [jax.jit(lambda *a, f=f: (*jax.jvp(f, a, a), *gradient(f, *a)))(q, k, v) for f in (ours, dense)]
        for name, got, want in zip(("out", "tangent", "dq", "dk", "dv"), *everything, strict=True):
            tolerance = {"rtol": 1e-12, "atol": 1e-13} if name == "out" else {"rtol": 1e-10, "atol": 1e-12}
            np.testing.assert_allclose(got, want, **tolerance, err_msg=name)


def test_lse_is_that_without_dropout() -> None:
    asked = flexjax.AuxRequest(lse=True, max_scores=True)
    q, k, v = qkv()
    plain = flexjax.flex_attention(q, k, v, return_aux=asked)[1]
    dropped = flexjax.flex_attention(q, k, v, return_aux=asked, dropout=flexjax.Dropout(0.5, jax.random.key(0)))[1]
    np.testing.assert_array_equal(plain.lse, dropped.lse)
    np.testing.assert_array_equal(plain.max_scores, dropped.max_scores)


def test_unbiased() -> None:
    """The mean over keys approaches the output without dropout."""
    q, k, v = qkv()
    run = jax.jit(lambda key: flexjax.flex_attention(q, k, v, dropout=flexjax.Dropout(0.4, key)))
    draws = np.stack([run(key) for key in jax.random.split(jax.random.key(0), 300)])
    error = (draws.mean(0) - flexjax.flex_attention(q, k, v)) / (draws.std(0) / np.sqrt(len(draws)))
    assert np.abs(error).max() < 5.5
    assert abs(np.square(error).mean() - 1) < 0.15


def test_kinds_of_keys() -> None:
    q, k, v = qkv()
    run = lambda key: np.asarray(flexjax.flex_attention(q, k, v, dropout=flexjax.Dropout(0.5, key)))
    typed, raw = run(jax.random.key(3)), run(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(typed, raw)
    np.testing.assert_array_equal(typed, run(np.asarray(jax.random.PRNGKey(3))))
    traced = jax.jit(lambda key: flexjax.flex_attention(q, k, v, dropout=flexjax.Dropout(0.5, key)))
    np.testing.assert_allclose(typed, traced(jax.random.key(3)), atol=1e-5)
    for other in (jax.random.key(4), jax.random.key(3, impl="rbg"), jax.random.key(3, impl="unsafe_rbg")):
        assert run(other).shape == typed.shape
    assert not np.array_equal(typed, run(jax.random.key(4)))
    # four words of state: none is ignored
    states = [np.asarray(np.eye(4)[i] * 7 + 1, np.uint32) for i in range(4)]
    outs = [run(jax.random.wrap_key_data(jnp.asarray(s), impl="rbg")) for s in states]
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(outs, 2))


def test_rate_zero_needs_no_key_and_changes_nothing() -> None:
    q, k, v = qkv()
    want = flexjax.flex_attention(q, k, v)
    np.testing.assert_array_equal(flexjax.flex_attention(q, k, v, dropout=flexjax.Dropout(0.0, None)), want)
    np.testing.assert_array_equal(flexjax.flex_attention(q, k, v, dropout=flexjax.Dropout(0, jax.random.key(0))), want)


def test_layouts_and_backends_drop_the_same() -> None:
    q, k, v = qkv()
    options = dict(dropout=flexjax.Dropout(0.5, jax.random.key(1)), mask_mod=masks.causal)
    want = flexjax.flex_attention(q, k, v, **options)
    swapped = flexjax.flex_attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), layout="BNTH", **options)
    np.testing.assert_allclose(jnp.swapaxes(swapped, 1, 2), want, atol=1e-6)
    dense = by_definition(q, k, v, **options)
    np.testing.assert_allclose(dense, want, atol=1e-5)
