"""Attention over parts of the keys, merged, is attention over all of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from tests.arrays import array
from tests.cases.small import quick_jit

T, S, N, D = 5, 12, 2, 4


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(array(rng.standard_normal((1, n, N, D)), jnp.float32) for n in (T, S, S))


def parts(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the keys 0 .. 2, 3 .. 3 and 4 .. 11; causal, so that the last two hide all keys from some rows; sinks in the first."""
    found = []
    for low, high in ((0, 3), (3, 4), (4, S)):
        call = dict(mask_mod=masks.causal, origin=flexjax.Origin(key=low), sinks=sinks if low == 0 else None)
        asked = flexjax.AuxRequest(lse=True)
        found.append(flexjax.flex_attention(q, k[:, low:high], v[:, low:high], return_aux=asked, **call))
    return jnp.stack([out for out, _ in found], 1), jnp.stack([aux.lse for _, aux in found], 1)


def test_it_is_the_whole_with_its_gradients() -> None:
    """Sinks counted once; rows that a part hides as a whole; scores of one part far above the others."""
    q, k, v = arrays()
    k = k.at[:, 5].multiply(200)
    sinks = array([0.5, -1.0])

    def of_parts(*given: jax.Array):
        return flexjax.merge_attention_states(*parts(*given), axis=1)

    def whole(*given: jax.Array):
        asked = flexjax.AuxRequest(lse=True)
        out, aux = flexjax.flex_attention(*given[:3], mask_mod=masks.causal, sinks=given[3], return_aux=asked)
        return out, aux.lse

    def loss(function):
        def scalar(*given: jax.Array):
            out, lse = function(*given)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + jnp.sum(jnp.sin(lse))

        return quick_jit(lambda *given: (function(*given), jax.grad(scalar, (0, 1, 2, 3))(*given)))

    found, want = loss(of_parts)(q, k, v, sinks), loss(whole)(q, k, v, sinks)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), found, want)


def test_parts_may_be_merged_in_any_grouping() -> None:
    """One after the other, in pairs, and all at once, with parts without keys and scores far apart."""
    rng = np.random.default_rng(1)
    outs, lses = (array(rng.standard_normal(s), jnp.float32) for s in ((4, 9, D), (4, 9)))
    lses = lses.at[:, 0].set(-jnp.inf).at[1, 1:4].set(-jnp.inf).at[2, 5].set(1e4).at[3, 6].set(-1e10)

    @quick_jit
    def grouped(outs: jax.Array, lses: jax.Array):
        def merged(*states: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return flexjax.merge_attention_states(*(jnp.stack(x) for x in zip(*states, strict=True)))

        a, b, c, d = zip(outs, lses, strict=True)
        return (
            merged(a, b, c, d),
            merged(merged(merged(a, b), c), d),
            merged(merged(a, b), merged(c, d)),
            merged(d, c, b, a),
        )

    want, *others = grouped(outs, lses)
    for other in others:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), other, want)


def test_states_without_keys_weigh_nothing() -> None:
    """Whatever their out is, also NaN; and all of them together give 0 and -inf, with gradients 0."""
    low = -jnp.inf
    outs = array([[[jnp.nan], [2.0]], [[3.0], [jnp.nan]], [[jnp.nan], [4.0]]])
    lses = array([[low, 1.0], [0.5, low], [low, 1.0]])
    out, lse = quick_jit(flexjax.merge_attention_states)(outs, lses)
    np.testing.assert_allclose(np.asarray(out)[:, 0], [3.0, 3.0])
    np.testing.assert_allclose(lse, [0.5, 1 + np.log(2)], rtol=1e-6)
    nothing = jnp.full((2, 1), low)
    merge = lambda o, x: sum(jnp.sum(jnp.where(jnp.isneginf(y), 0, y)) for y in flexjax.merge_attention_states(o, x))
    for found in (
        *quick_jit(jax.grad(merge, (0, 1)))(jnp.ones((2, 1, 3)), nothing),
        *quick_jit(flexjax.merge_attention_states)(jnp.ones((2, 1, 3)), nothing)[:1],
    ):
        np.testing.assert_array_equal(found, jnp.zeros_like(found))


# fmt: off
ERRORS = [
    ([1.0], np.ones(1), 0, "`outs` is a list; expected an array of floats. Stack the results of the calls with jnp.stack."),
    (np.ones((2, 3)), np.ones(2, int), 0, "`lses` is int64[2]; expected an array of floats. Stack the results of the calls with jnp.stack."),
    (np.ones((2, 3)), np.ones(3), 0, "`lses` is of shape (3,); expected the shape of outs without its last dim, (2,). Make them agree."),
    (np.ones((2, 3)), np.ones(2), 1, "`axis` is 1; expected an axis of lses, which has 1. Pass the one of the K calls."),
    (np.ones((0, 3)), np.ones(0), 0, "`lses` is of shape (0,); expected at least one state along axis. Leave out the merge."),
]
# fmt: on


@pytest.mark.parametrize(("outs", "lses", "axis", "message"), ERRORS, ids=range(len(ERRORS)))
def test_messages(outs, lses, axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        flexjax.merge_attention_states(outs, lses, axis)
