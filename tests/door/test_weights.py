"""`weights=`: weights of values in place of a softmax. Its formula is in the table of cases; here is the contract around it."""

import functools
import re
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flexjax
from flexjax import AuxRequest, Weights, masks
from flexjax.errors import ModError
from tests.arrays import array
from tests.cases.small import quick_jit

B, T, S, N, M, D, E = 2, 20, 28, 4, 2, 8, 6
TOTAL = AuxRequest(total=True)


def normal(*shape: int) -> jax.Array:
    return array(np.random.default_rng(sum(shape)).standard_normal(shape), "float32")


@functools.cache
def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(B, T, N, D), normal(B, S, M, D), normal(B, S, M, E)


def exponential(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.exp(s)


def silu(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jax.nn.silu(s)


def attend(**words: typing.Any) -> Callable[..., typing.Any]:
    return functools.partial(flexjax.flex_attention, **words)


def close(got: typing.Any, want: typing.Any, within: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=within, atol=within * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_exponentials_over_their_total_are_a_softmax(implementation: typing.Any) -> None:
    bias = normal(N)
    words = dict(mask_mod=masks.sliding_window(9), implementation=implementation)
    divided = attend(weights=Weights(exponential, lambda total: total), return_aux=TOTAL, **words)
    softmax = attend(return_aux=AuxRequest(lse=True), **words)

    def both(call: Callable[..., typing.Any], q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> typing.Any:
        out, aux = call(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h])
        return out, aux.lse if aux.total is None else jnp.log(jnp.where(aux.total == 0, 1.0, aux.total))

    def loss(call: Callable[..., typing.Any], *given: jax.Array) -> typing.Any:
        out, lse = both(call, *given)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), out

    got, want = (
        quick_jit(jax.grad(functools.partial(loss, call), argnums=(0, 1, 2, 3), has_aux=True))(*arrays(), bias)
        for call in (divided, softmax)
    )
    close(got, want)


def test_rows_without_keys_are_zero_and_have_no_gradient() -> None:
    hidden = lambda b, h, q, k: q > 3
    call = attend(mask_mod=hidden, weights=Weights(silu, lambda total: total), return_aux=TOTAL)
    (out, aux), pull = jax.vjp(lambda *given: call(*given), *arrays())
    assert not np.asarray(out[:, :4]).any()
    assert not np.asarray(aux.total[:, :4]).any()
    dq, dk, dv = pull((jnp.ones_like(out), flexjax.AuxOutput(total=jnp.ones_like(aux.total))))
    assert not np.asarray(dq[:, :4]).any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_a_score_of_minus_infinity_hides_as_a_mask_does() -> None:
    seen = lambda q, k: (q + k) % 3 != 0
    by_score = attend(score_mod=lambda s, b, h, q, k: jnp.where(seen(q, k), s, -jnp.inf), weights=silu)
    by_mask = attend(mask_mod=lambda b, h, q, k: seen(q, k), weights=silu)
    sums = lambda call: quick_jit(jax.value_and_grad(lambda *given: jnp.sum(call(*given) ** 2), argnums=(0, 1, 2)))
    close(sums(by_score)(*arrays()), sums(by_mask)(*arrays()))


def test_transformations() -> None:
    """vmap over what weights capture, forward mode, and the second derivative, against the reference."""
    (query, *keys), scale = arrays(), normal(N)

    def call(name: typing.Any, q: jax.Array, scale: jax.Array) -> jax.Array:
        weights = Weights(lambda s, b, h, i, j: jnp.tanh(s * scale[h]), lambda total: 1 + total**2)
        return flexjax.flex_attention(q, *keys, weights=weights, mask_mod=masks.causal, implementation=name)

    def results(name: typing.Any) -> typing.Any:
        loss = lambda q, scale: jnp.sum(call(name, q, scale) ** 2)
        given = query, scale
        tangents = tuple(jnp.flip(x, 1) if x.ndim > 1 else x[::-1] for x in given)
        mapped = jax.vmap(functools.partial(call, name), (None, 0))(given[0], jnp.stack([scale, -2 * scale]))
        return mapped, jax.jvp(loss, given, tangents), jax.jvp(jax.grad(loss, (0, 1)), given, tangents)

    close(quick_jit(lambda: results("xla"))(), quick_jit(lambda: results("reference"))(), 1e-4)


def test_a_backward_pass_reads_no_results() -> None:
    """So jax.checkpoint computes no forward pass again, and nothing is kept for it."""

    def layers(x: jax.Array) -> jax.Array:
        for _ in range(3):
            layer = lambda x: flexjax.flex_attention(x, x, x, weights=silu, mask_mod=masks.causal)
            x = jax.checkpoint(lambda x, layer=layer: x + layer(x))(x)
        return jnp.sum(x)

    program = str(jax.make_jaxpr(jax.grad(layers))(jnp.ones((B, T, N, D))))
    assert program.count("flexjax_forward[") == 3
    assert program.count("flexjax_backward[") == 3


def test_what_shows_calls_knows_weights() -> None:
    q, k, v = arrays()
    text = flexjax.explain(q, k, v, weights=silu, score_mod=lambda s, b, h, i, j: s + 1)
    assert "weights of score_mod: captures nothing" in text
    assert "scale=0.353553  weights\n" in text
    want = flexjax.flex_attention(q, k, v, weights=silu, mask_mod=masks.causal)
    matrix = flexjax.attention_weights(q, k, weights=silu, mask_mod=masks.causal)
    close(jnp.einsum("bhqk,bkhe->bqhe", matrix, jnp.repeat(v, N // M, 2)), want)


REFUSED: dict[str, tuple[dict, str]] = {
    "sinks": (
        dict(weights=silu, sinks=jnp.zeros(N)),
        "`sinks` is given beside weights; expected None. Only a softmax has a denominator to which a sink adds.",
    ),
    "lse": (
        dict(weights=silu, return_aux=AuxRequest(lse=True)),
        "`return_aux.lse` is True beside weights; expected False. It belongs to softmax; total sums the weights.",
    ),
    "max_scores": (
        dict(weights=silu, return_aux=AuxRequest(max_scores=True)),
        "`return_aux.max_scores` is True beside weights; expected False. It belongs to softmax; total sums the weights.",
    ),
    "total": (
        dict(return_aux=TOTAL),
        "`return_aux.total` is True without weights; expected False. The denominator of a softmax is exp(lse).",
    ),
    "no function": (
        dict(weights=2.0),
        "`weights` is a float; expected a function weights(score, b, h, q_idx, kv_idx). Write one.",
    ),
    "signature": (
        dict(weights=lambda s: s),
        "`weights` has the signature (s); expected 5 positional arguments, weights(score, b, h, q_idx, kv_idx).",
    ),
    "result": (
        dict(weights=lambda s, b, h, q, k: h),
        "`weights` returned an int32; expected a floating scalar.\nin <lambda>, test_weights.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    words, sentence = REFUSED[name]
    with pytest.raises((ValueError, ModError)) as error:
        flexjax.flex_attention(*arrays(), **words)
    assert str(error.value).startswith(sentence)


def test_float8_is_refused() -> None:
    given = (x.astype("float8_e4m3fn") for x in (arrays()[0], *[arrays()[1]] * 2))
    with pytest.raises(ValueError, match="`weights` is given for float8_e4m3fn inputs; expected None"):
        flexjax.flex_attention(*given, weights=silu)


def test_what_is_no_weights() -> None:
    with pytest.raises(ValueError, match=r"`weights.function` is 3; expected a function. See flexjax.Weights."):
        Weights(typing.cast(typing.Any, 3))
    with pytest.raises(ValueError, match=r"`weights.divisor` is 3; expected a function or None. See flexjax.Weights."):
        Weights(silu, typing.cast(typing.Any, 3))


def test_the_gradient_where_the_slope_of_the_divisor_is_infinite() -> None:
    """The root of a total of squares is 0, with an infinite slope, in rows whose scores are all negative."""
    weights = Weights(lambda s, b, h, q, k: jax.nn.relu(s) ** 2, jnp.sqrt)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        w = jnp.maximum(jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, N // M, 2)) * D**-0.5, 0) ** 2
        w = w * jnp.tril(jnp.ones((T, S)))
        total = w.sum(-1, keepdims=True)
        w = jnp.where(total > 0, w / jnp.sqrt(jnp.where(total > 0, total, 1)), 0)
        return jnp.einsum("bnts,bsne->btne", w, jnp.repeat(v, N // M, 2))

    ours = attend(weights=weights, mask_mod=masks.causal)
    assert (dense(*arrays()) == 0).all(-1).any(), "no row of zeros"
    for run in (ours, attend(weights=weights, mask_mod=masks.causal, implementation="reference")):
        wanted = jax.grad(lambda *a: jnp.sin(dense(*a)).sum(), (0, 1, 2))(*arrays())
        found = jax.grad(lambda *a, run=run: jnp.sin(run(*a)).sum(), (0, 1, 2))(*arrays())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)
    _, tangent = jax.jvp(lambda q: ours(q, *arrays()[1:]), arrays()[:1], arrays()[:1])
    assert jnp.isfinite(tangent).all()


@pytest.mark.parametrize(
    ("divisor", "got"),
    [
        (lambda t: t.mean(-1), f"shape {(B, T)}"),
        (lambda t: jnp.ones((3, 1, T, 1)), f"shape {(3, 1, T, 1)}"),
        (lambda t: None, "None"),
        (lambda t: [t], "a list"),
        (lambda t: t > 0, f"bool{[B, T, N]}"),
        (lambda t: t * 1j, f"complex64{[B, T, N]}"),
    ],
)
def test_a_divisor_of_another_shape_is_refused(divisor: typing.Any, got: str) -> None:
    todo = "Keep the axes of a reduction (keepdims=True)." if "shape" in got else "Return floats, one for each total."
    sentence = (
        f"`weights.divisor` is a function that returns {got}; expected a number for each total of shape {(B, T, N)}. "
        + todo
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        attend(weights=Weights(silu, divisor))(*arrays())


@pytest.mark.parametrize(
    ("divisor", "says"),
    [
        (
            lambda t: np.maximum(t, 1),
            "calls np.maximum() on a value that is known only at run time; write `jnp.maximum",
        ),
        (lambda t: t if t.sum() > 0 else -t, "decides by `if` and `else` on a value that is known only at run time;"),
        (lambda t, u: t, "has the signature (t, u); expected 1 positional argument, weights.divisor(total)."),
    ],
)
def test_a_divisor_that_cannot_be_traced_says_what_to_write(divisor: typing.Any, says: str) -> None:
    with pytest.raises(ModError, match=f"^`weights.divisor` {re.escape(says)}"):
        jax.eval_shape(attend(weights=Weights(silu, divisor)), *arrays())


@pytest.mark.parametrize("divisor", [lambda t: 6.0, lambda t: np.float32(6), lambda t: jnp.full((T, 1), 6.0)])
def test_a_divisor_that_broadcasts(divisor: typing.Any) -> None:
    found = attend(weights=Weights(silu, divisor))(*arrays())
    np.testing.assert_allclose(found, attend(weights=silu)(*arrays()) / 6, atol=1e-6)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize(
    "divisor", [lambda t: t.mean(1, keepdims=True), lambda t: 6.0, lambda t: jnp.full((1, T, 1), 6.0)]
)
def test_a_divisor_that_broadcasts_over_explicit_axes(divisor: typing.Any) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    run = jax.jit(attend(weights=Weights(silu, divisor)))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays()]
        found = run(*split)
    assert found.sharding.spec[0] == "x"
    np.testing.assert_allclose(found, run(*arrays()), atol=1e-6)
