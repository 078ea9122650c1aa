"""`AuxRequest(expectations=)`: sums of functions of the score. Their formula is in the table of cases; here is the contract around it."""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import AuxRequest, Origin, masks
from flexjax.errors import ModError
from tests.arrays import array
from tests.cases.small import quick_jit
from tests.marks import some_slow

B, T, N, M, D = 2, 20, 4, 2, 8
Functions = dict[str, Callable[..., typing.Any]]


def normal(*shape: int, dtype: str = "float64") -> jax.Array:
    return array(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def inputs(dtype: str = "float64") -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(B, T, N, D, dtype=dtype), normal(B, T + 1, M, D, dtype=dtype)[:, :T], normal(B, T, M, D, dtype=dtype)


def softened(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return 3 * jnp.tanh(s / 3)


def functions(key_value: jax.Array) -> Functions:
    return {
        "score": lambda s, b, h, q, k: s,
        "distance": lambda s, b, h, q, k: q - k,
        "first": lambda s, b, h, q, k: k < 5,
        "learned": lambda s, b, h, q, k: key_value[k] * jnp.sin(s) + key_value[h],
    }


def expectations(q: jax.Array, k: jax.Array, v: jax.Array, asked: Functions, **words: typing.Any) -> typing.Any:
    _, aux = flexjax.flex_attention(
        q, k, v, score_mod=softened, mask_mod=masks.causal, return_aux=AuxRequest(expectations=asked), **words
    )
    return aux.expectations


def recipe(q: jax.Array, k: jax.Array, v: jax.Array, asked: Functions) -> dict[str, jax.Array]:
    """By the derivative of lse by an array of zeros for each function."""

    def lse(zeros: list[jax.Array]) -> jax.Array:
        def score_mod(s: jax.Array, b: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
            s = softened(s, b, h, i, j)
            return s + sum(z[b, h, i] * f(s, b, h, i, j) for z, f in zip(zeros, asked.values(), strict=True))

        aux = AuxRequest(lse=True)
        return flexjax.flex_attention(q, k, v, score_mod=score_mod, mask_mod=masks.causal, return_aux=aux)[1].lse

    found, pull = jax.vjp(lse, [jnp.zeros((B, N, T), q.dtype)] * len(asked))
    (sums,) = pull(jnp.ones_like(found))
    return {name: jnp.swapaxes(x, 1, 2) for name, x in zip(asked, sums, strict=True)}


def sines(found: dict[str, jax.Array]) -> typing.Any:
    return sum((n + 1) * jnp.sum(jnp.sin(x)) for n, x in enumerate(found.values()))


def test_they_are_the_derivatives_of_lse() -> None:
    """The recipe of docs/expectations.md, and its own gradient."""
    with jax.enable_x64(True):
        given = (*inputs(), normal(T))
        both = [
            quick_jit(jax.value_and_grad(lambda q, k, v, x, call=call: sines(call(q, k, v, functions(x))), (0, 1, 3)))(
                *given
            )
            for call in (expectations, recipe)
        ]
        for got, want in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_the_entropy_of_each_row() -> None:
    q, k, v = inputs("float32")
    asked = AuxRequest(lse=True, expectations={"score": lambda s, b, h, q, k: s})
    _, aux = flexjax.flex_attention(q, k, v, score_mod=softened, mask_mod=masks.causal, return_aux=asked)
    p = flexjax.attention_weights(q, k, score_mod=softened, mask_mod=masks.causal)
    want = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0).sum(-1)
    np.testing.assert_allclose(jnp.swapaxes(aux.lse - aux.expectations["score"], 1, 2), want, atol=1e-5)


@pytest.mark.parametrize("name", some_slow(["xla", "reference"], ["xla"]))
def test_one_query_and_that_probabilities_add_to_one(name: typing.Any) -> None:
    """Also beside a sink, of which the rest is; a row without keys has 0."""
    q, k, v = inputs("float32")
    asked = {"one": lambda s, b, h, q, k: True, "score": lambda s, b, h, q, k: s}
    aux = AuxRequest(lse=True, expectations=asked)
    lengths, sinks = jnp.asarray([T, 0], jnp.int32), jnp.asarray([0.5, -1.0, 0.0, 2.0])
    call = functools.partial(flexjax.flex_attention, return_aux=aux, implementation=name)
    one = quick_jit(lambda q: call(q, k, v, sinks=sinks, key_value_seq_lengths=lengths, origin=Origin(query="end")))
    _, found = one(q[:, :1])
    assert found.expectations is not None
    keys = jnp.arange(T) < lengths[:, None, None]
    k_of_heads = jnp.repeat(k, N // M, 2)
    scores = jnp.where(keys, jnp.einsum("bnd,bsnd->bns", q[:, 0], k_of_heads) / D**0.5, -jnp.inf)
    rows = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None], (B, N, 1))], -1)
    p = jax.nn.softmax(rows, -1)[..., :-1]
    np.testing.assert_allclose(found.expectations["one"][:, 0], p.sum(-1), atol=2e-6)
    np.testing.assert_allclose(found.expectations["score"][:, 0], (p * jnp.where(keys, scores, 0.0)).sum(-1), atol=2e-6)
    _, whole = call(q, k, v, mask_mod=masks.causal)
    assert whole.expectations is not None
    np.testing.assert_allclose(whole.expectations["one"], 1.0, rtol=2e-6)


def test_the_total_of_weights_is_the_expectation_of_one() -> None:
    q, k, v = inputs("float32")
    asked = AuxRequest(total=True, expectations={"one": lambda s, b, h, q, k: 1})

    def both(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = functools.partial(flexjax.flex_attention, weights=flexjax.weights.silu(T), mask_mod=masks.causal)
        _, aux = call(q, k, v, score_mod=softened, return_aux=asked)
        assert aux.total is not None
        assert aux.expectations is not None
        return aux.total, aux.expectations["one"]

    for one, other in (both(q), jax.jacrev(lambda q: tuple(x.sum() for x in both(q)))(q)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_transformations() -> None:
    """vmap before and after the gradient, forward mode and the second derivative, against the reference."""
    with jax.enable_x64(True):
        (q, *keys), x = inputs(), normal(T)

        def results(name: typing.Any) -> typing.Any:
            found = lambda q, x: expectations(q, *keys, functions(x), implementation=name)
            loss = lambda q, x: sines(found(q, x))
            tangents = jnp.flip(q, 1), jnp.flip(x)
            several = jnp.stack([x, -2 * x])
            mapped = jax.grad(lambda xs: jnp.sum(jax.vmap(functools.partial(loss, q))(xs)))(several)
            slopes = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(q, several)
            return mapped, slopes, jax.jvp(found, (q, x), tangents), jax.jvp(jax.grad(loss), (q, x), tangents)

        made = [jax.tree.leaves(quick_jit(functools.partial(results, name))()) for name in ("xla", "reference")]
        for got, want in zip(*made, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_sinks_of_each_copy() -> None:
    (q, *keys), x = inputs("float32"), normal(T, dtype="float32")

    def loss(q: jax.Array, sinks: jax.Array) -> typing.Any:
        return sines(expectations(q, *keys, functions(x), sinks=sinks))

    given = jnp.stack([normal(N, dtype="float32"), jnp.zeros(N)])
    got = quick_jit(jax.vmap(jax.grad(loss, (0, 1)), (None, 0)))(q, given)
    for i, sinks in enumerate(given):
        for one, other in zip(got, quick_jit(jax.grad(loss, (0, 1)))(q, sinks), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-4, atol=1e-5)


def test_a_slice_of_a_larger_problem() -> None:
    """Rows of an origin have the expectations, and the gradients, that they have in the whole."""
    (q, k, v), x = inputs("float32"), normal(T, dtype="float32")
    origin = Origin(query=8, whole=(None, None, T, T))
    whole = lambda q, x: {n: e[:, 8:] for n, e in expectations(q, k, v, functions(x)).items()}
    part = lambda q, x: expectations(q[:, 8:], k, v, functions(x), origin=origin)
    steps = [quick_jit(jax.value_and_grad(lambda q, x, f=f: sines(f(q, x)), (0, 1)))(q, x) for f in (whole, part)]
    for one, other in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_results_without_a_cotangent() -> None:
    """A loss of out alone has the backward pass of a call without expectations."""
    q, k, v = inputs("float32")
    asked = AuxRequest(expectations={"score": lambda s, b, h, q, k: s})
    slope = lambda words: str(
        jax.make_jaxpr(jax.grad(lambda q: jnp.sum(flexjax.flex_attention(q, k, v, **words)[0])))(q)
    )
    program = slope(dict(return_aux=asked))
    assert program.count("flexjax_backward[") == 1
    assert "mul %0" not in program.split("flexjax_backward[")[1]


def test_what_shows_calls_knows_expectations() -> None:
    q, k, v = inputs("float32")
    text = flexjax.explain(q, k, v, score_mod=softened, return_aux=AuxRequest(expectations=functions(k[0, :, 0, 0])))
    assert "scale=0.353553  expectations of 4\n" in text
    assert "score_mod and expectations: captures" in text


def test_where_nothing_is_computed_for_them() -> None:
    """A gradient without the length of the whole problem says so."""
    q, k, v = inputs("float32")
    asked = {"score": lambda s, b, h, q, k: s}
    with pytest.raises(NotImplementedError, match="The gradient of expectations needs the length of the whole problem"):
        jax.grad(lambda q: sines(expectations(q, k, v, asked, origin=Origin(query=8))))(q[:, :8])


def a_vector(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.stack([s, s])


def one_number(s: jax.Array) -> jax.Array:
    return s


REFUSED: dict[str, tuple[typing.Any, str]] = {
    "a vector": (
        {"x": a_vector},
        "`return_aux.expectations['x']` returned float32[2]; expected one scalar. Index every axis of what it reads, or reduce: it is "
        "called with scalars, one position at a time.",
    ),
    "another signature": (
        {"x": one_number},
        "`return_aux.expectations['x']` has the signature (s); expected 5 positional arguments, "
        "return_aux.expectations['x'](score, b, h, q_idx, kv_idx).",
    ),
    "complex numbers": (
        {"x": lambda s, b, h, q, k: s * 1j},
        "`return_aux.expectations['x']` returned a complex64; expected a float, an integer or a bool.",
    ),
    "a function": (
        a_vector,
        '`return_aux.expectations` is {}; expected a dict from names to functions, or None. Pass {{"name": f}}.',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    asked, text = REFUSED[name]
    with pytest.raises((ValueError, ModError)) as error:
        flexjax.flex_attention(*inputs("float32"), return_aux=AuxRequest(expectations=asked))
    assert str(error.value).startswith(text.format(repr(asked)) if callable(asked) else text)


def test_nothing_is_left_out_of_them() -> None:
    """`tolerance` bounds what out loses, and nothing else."""
    words = dict(score_mod=lambda s, b, h, q, k: s - 5 * (q - k), mask_mod=masks.causal, tolerance=1e-3)
    asked = AuxRequest(expectations={"score": lambda s, b, h, q, k: s})
    text = r"^`tolerance` is given beside expectations; expected None\. Nothing bounds what they lose\."
    with pytest.raises(ValueError, match=text):
        flexjax.flex_attention(*inputs("float32"), return_aux=asked, **words)


def test_float8_and_rules_that_are_not_linear() -> None:
    q, k, v = inputs("float32")
    asked = AuxRequest(expectations={"score": lambda s, b, h, q, k: s})
    narrow = [x.astype(jnp.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(
        ValueError, match=r"^`return_aux.expectations` is given for float8_e4m3fn inputs; expected None\."
    ):
        flexjax.flex_attention(*narrow, return_aux=asked)

    @jax.custom_vjp
    def rounded(s: jax.Array) -> jax.Array:
        return s

    rounded.defvjp(lambda s: (s, None), lambda kept, cotangent: (jnp.clip(cotangent, -1, 1),))
    call = lambda q: flexjax.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: rounded(s), return_aux=asked)
    call(q)
    named = r"^`score_mod` or `return_aux.expectations\['score'\]` has a derivative rule that is not linear in the cotangent, so"
    with pytest.raises(ModError, match=named):
        jax.grad(lambda q: jnp.sum(call(q)[0]))(q)


def test_an_eager_backward_pass_transfers_nothing() -> None:
    q = jnp.ones((1, 4, 1, 8))
    asked = AuxRequest(expectations={"score": lambda s, b, h, i, j: s, "place": lambda s, b, h, i, j: j})
    ones = jax.jit(lambda tree: jax.tree.map(jnp.ones_like, tree))
    with jax.transfer_guard("disallow"):
        found, pull = jax.vjp(lambda q: flexjax.flex_attention(q, q, q, return_aux=asked)[1].expectations, q)
        assert pull(ones(found))[0].shape == q.shape
