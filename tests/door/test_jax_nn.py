"""dot_product_attention against jax.nn.dot_product_attention, over all its options."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from tests.arrays import array
from tests.marks import some_slow

B, T, S, N, M, D = 2, 9, 13, 4, 2, 8


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, K, V = draw(B, T, N, D), draw(B, S, M, D, seed=1), draw(B, S, M, D, seed=2)
LENGTHS = array([5, 9], jnp.int32)
KV_LENGTHS = array([13, 4], jnp.int32)


def allowed(*shape: int) -> jax.Array:
    """A mask that leaves each row its first key."""
    mask = np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    mask[..., 0] = True
    return array(mask)


# fmt: off
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": dict(scale=0.9),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=6),
    "window_pair": dict(local_window_size=(3, 6)),
    "window_and_causal": dict(local_window_size=(2, 5), is_causal=True),
    "window_zero": dict(local_window_size=0),
    "window_negative": dict(local_window_size=(-1, 3)),
    "window_of_floats": dict(local_window_size=(2.5, float("inf"))),
    "window_of_numpy": dict(local_window_size=np.asarray([3, 2])),
    "window_of_jax": dict(local_window_size=(jnp.asarray(2.5), jnp.asarray(300, jnp.uint32))),
    "scale_of_jax": dict(scale=jnp.asarray(0.9), bias=draw(T, S), mask=allowed(N, T, S)),
    "kv_lengths": dict(key_value_seq_lengths=KV_LENGTHS),
    "q_lengths": dict(query_seq_lengths=LENGTHS),
    "lengths": dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=KV_LENGTHS, is_causal=True),
    "everything": dict(bias=draw(1, N, T, S), mask=allowed(B, 1, T, S), is_causal=True, local_window_size=8, scale=0.5,
                       key_value_seq_lengths=KV_LENGTHS),
    **{f"mask_{'x'.join(map(str, s))}": dict(mask=allowed(*s))
       for s in [(B, N, T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, 1, S), (T, S), (N, T, S), (1, 1, 1, S)]},
    **{f"bias_{'x'.join(map(str, s))}": dict(bias=draw(*s, seed=4))
       for s in [(B, N, T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, 1, 1), (T, S), (N, 1, S), (1, 1, T, 1)]},
}
# fmt: on


# ways to broadcast, of which bias and mask have the same; and pairs of options, of which "everything" has more
SLOW = {"mask_1x1x9x13", "mask_1x4x1x13", "mask_4x9x13", "mask_1x1x1x13", "bias_1x1x9x13", "bias_2x1x1x13", "bias_9x13"}
SLOW |= {"window_pair", "window_and_causal", "scale"}
SLOW |= {"window_of_numpy", "window_of_floats"}  # test_a_traced_window has more of either
SLOW |= {"kv_lengths", "q_lengths", "mask_2x1x1x13", "mask_9x13", "bias_1x4x1x1"}
SLOW |= {"mask_2x4x9x13", "window_of_jax", "window_zero", "window_negative", "bias_1x1x9x1", "bias_2x4x9x13"}


@pytest.mark.parametrize("name", some_slow(OPTIONS, OPTIONS.keys() - SLOW))
def test_values_and_gradients(name: str) -> None:
    """Gradients to query, key, value, the bias and a scale that is a jax scalar."""
    options = dict(OPTIONS[name])
    traced = {n: options.pop(n) for n in ("bias", "scale") if isinstance(options.get(n), jax.Array)}
    weights = draw(B, T, N, D, seed=9)

    def loss(function: Any, moved: Any) -> tuple[jax.Array, jax.Array]:
        main, traced = moved
        out = function(*main, **traced, **options)
        return (out * weights).sum(), out

    compiled = jax.jit(jax.grad(loss, 1, has_aux=True), static_argnums=0)
    got, out = compiled(flexjax.dot_product_attention, ((Q, K, V), traced))
    want, expected = compiled(jax.nn.dot_product_attention, ((Q, K, V), traced))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=2e-5)


def of_jax(*arrays: Any, **options: Any) -> Any:
    """jax's own, as one program."""
    return jax.jit(functools.partial(jax.nn.dot_product_attention, **options))(*map(np.asarray, arrays))


@pytest.mark.parametrize("name", ["causal", "bias_4x1x13"])
def test_without_a_batch(name: str) -> None:
    q, k, v = Q[0], K[0], V[0]
    got = flexjax.dot_product_attention(q, k, v, **OPTIONS[name])
    assert got.shape == q.shape
    np.testing.assert_allclose(got, of_jax(q, k, v, **OPTIONS[name]), atol=2e-6)


# fmt: off
RANKS = {
    "4_3_3": (Q[:1], K[0], V[0]), "3_4_4": (Q[0], K[:1], V[:1]), "4_4_3": (Q[:1], K[:1], V[0]),
    "2_3_3": (Q[0, 0], K[0], V[0]), "4_2_2": (Q[:1], K[0, 0], V[0, 0]),
    "1_3_3_lists": tuple(np.asarray(x).tolist() for x in (Q[0, 0, 0], K[0, :, :1], V[0, :, :1])),
}
# fmt: on


@pytest.mark.parametrize("name", some_slow(RANKS, ("4_4_3", "2_3_3", "1_3_3_lists")))
def test_arrays_of_other_ranks(name: str) -> None:
    """Axes that are not there have size 1, and the result has those of query."""
    got = flexjax.dot_product_attention(*RANKS[name], return_residual=True)
    want = of_jax(*RANKS[name], return_residual=True)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.slow
def test_a_traced_window() -> None:
    """Of every integer and floating dtype; one without a key gives 0."""
    run = jax.jit(lambda left, right: flexjax.dot_product_attention(Q, K, V, local_window_size=(left, right)))
    for left, right in ((3, 2), (-1, 3), (np.int8(-2), np.uint32(2**32 - 1)), (2.5, np.inf), (np.float16(1.0), 2)):
        want = of_jax(Q, K, V, local_window_size=(int(np.floor(left)), int(min(right, 99))))
        np.testing.assert_allclose(run(left, right), want, atol=2e-6)
    both = jax.jit(lambda pair: flexjax.dot_product_attention(Q, K, V, local_window_size=pair))
    np.testing.assert_array_equal(both(array([3, 2])), run(3, 2))
    for left, right in ((np.nan, 2.0), (-np.inf, 2), (-(2**31), 2)):
        assert not bool(run(left, right).any())


def test_residual() -> None:
    for args in ((Q, K, V), (Q[0], K[0], V[0])):
        got, lse = flexjax.dot_product_attention(*args, is_causal=True, return_residual=True)
        want, residual = of_jax(*args, is_causal=True, return_residual=True)
        np.testing.assert_allclose(got, want, atol=2e-6)
        np.testing.assert_allclose(lse, residual, atol=2e-6)
    loss = lambda q: flexjax.dot_product_attention(q, K, V, return_residual=True)[1].sum()
    assert not bool(jax.grad(loss)(Q).any())


def test_a_row_that_sees_nothing_gives_zero() -> None:
    """Where jax.nn gives the mean of the values that the mask hides, and NaN where a bias of -inf hides all."""
    mask = np.arange(T)[:, None] >= np.ones(S)
    bias = jnp.where(mask, 0.0, -jnp.inf)
    half = np.arange(S) < 5
    mean = lambda kept: np.asarray(V)[:, kept].mean(1).repeat(N // M, 1)
    cases = (
        (dict(mask=mask), mean(np.ones(S, bool))),
        (dict(bias=bias), np.nan),
        (dict(mask=mask | half, bias=bias), mean(~half)),
    )
    for options, first_of_jax in cases:
        out, lse = map(np.asarray, flexjax.dot_product_attention(Q, K, V, **options, return_residual=True))
        want = np.asarray(of_jax(Q, K, V, **options))
        assert not out[:, 0].any()
        assert np.isneginf(lse[:, 0]).all()
        np.testing.assert_allclose(out[:, 1:], want[:, 1:], atol=2e-6)
        np.testing.assert_allclose(want[:, 0], np.broadcast_to(first_of_jax, want[:, 0].shape), atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    out = flexjax.dot_product_attention(q, k, v, draw(1, N, T, S).astype(dtype), is_causal=True)
    want = jax.nn.dot_product_attention(q, k, v, draw(1, N, T, S).astype(dtype), is_causal=True)
    assert out.dtype == want.dtype
    np.testing.assert_allclose(out.astype(np.float32), want.astype(np.float32), atol=0.03)


def test_numpy_arrays_and_traced_lengths() -> None:
    run = jax.jit(lambda n: flexjax.dot_product_attention(Q, K, V, key_value_seq_lengths=n))
    want = of_jax(Q, K, V, key_value_seq_lengths=KV_LENGTHS)
    np.testing.assert_allclose(run(KV_LENGTHS), want, atol=2e-6)
    numpy = (np.asarray(x) for x in (Q, K, V))
    np.testing.assert_allclose(
        flexjax.dot_product_attention(*numpy, key_value_seq_lengths=np.asarray(KV_LENGTHS)), want, atol=2e-6
    )


def test_the_signature_is_that_of_jax() -> None:
    ours, theirs = (
        inspect.signature(f).parameters for f in (flexjax.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def test_a_bias_that_is_broadcast_stays_small() -> None:
    """No array of queries times keys, neither forward nor backward."""
    long = 2048
    q, bias = draw(1, long, 1, 8), draw(1, 1, 1, long)
    text = (
        jax.jit(jax.grad(lambda b: flexjax.dot_product_attention(q, q, q, b, is_causal=True).sum()))
        .lower(bias)
        .as_text()
    )
    assert f"{long}x{long}" not in text
