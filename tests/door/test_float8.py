"""float8 queries, keys and values with scales: what they stand for, on the backends that run anywhere, and what is refused."""

import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import masks
from flexjax.plan.kernel_plan import FLOAT8

B, T, S, N, M, D, E = 2, 24, 36, 4, 2, 16, 8
Arrays = dict[str, typing.Any]


def arrays(layout: str = "BTNH") -> Arrays:
    """query, key and value in `layout`."""
    rng = np.random.default_rng(3)
    shapes = {"query": (B, T, N, D), "key": (B, S, M, D), "value": (B, S, M, E)}
    made = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    made = {name: x if layout == "BTNH" else jnp.swapaxes(x, 1, 2) for name, x in made.items()}
    return {name: x.astype(FLOAT8) for name, x in made.items()}


def scales(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(0.2, 3.0, shape), jnp.float32)


def scaled(given: Arrays, of: Arrays) -> Arrays:
    """The arguments `given`, with those of query, key and value that have scales in `of` as Quantized, and what else `of` has."""
    name_of = {f"{name}_scales": name for name in ("query", "key", "value")}
    more = {name: x for name, x in of.items() if name not in name_of}
    return given | more | {n: flexjax.Quantized(given[n], of[name]) for name, n in name_of.items() if name in of}


SCALES: dict[str, Arrays] = {
    "none": {},
    "by head": {"query_scales": (B, N), "key_scales": (B, M), "value_scales": (B, M)},
    "one batch entry": {"query_scales": (1, N), "key_scales": (1, M), "value_scales": (1, M)},
    "by block": {"query_scales": (B, 3, N), "key_scales": (1, 4, M), "value_scales": (B, 6, M)},
    "of some": {"key_scales": (B, 36, M), "value_scales": (1, M)},
}


def dense(given: Arrays, of: Arrays, score: typing.Callable, layout: str = "BTNH") -> np.ndarray:
    """The attention of dequantised arrays under a causal mask, [B, T, N, E] float64, by numpy from the definition."""
    found = []
    for name in ("query", "key", "value"):
        x = np.asarray(given[name]).astype(np.float64)
        by = np.asarray(of.get(f"{name}_scales", np.ones((1, 1))), np.float64)
        if layout == "BNTH":
            x, by = np.swapaxes(x, 1, 2), np.swapaxes(by, 1, 2) if by.ndim == 3 else by
        by = by if by.ndim == 3 else by[:, None]
        x = x * np.repeat(by, x.shape[1] // by.shape[1], 1)[..., None]
        found.append(x)
    q, k, v = found
    k, v = (np.repeat(x, N // M, 2) for x in (k, v))
    s = score(np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(D))
    s = np.where(np.tril(np.ones((T, S), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("which", SCALES)
def test_stands_for_itself_times_its_scales(which: str, layout: str, implementation: typing.Any) -> None:
    of = {name: scales(shape, n) for n, (name, shape) in enumerate(SCALES[which].items())}
    if layout == "BNTH":
        of = {name: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x for name, x in of.items()}
    given = arrays(layout)
    call = lambda given, of: flexjax.flex_attention(
        **scaled(given, of), mask_mod=masks.causal, layout=layout, implementation=implementation,
        score_mod=lambda s, b, h, q, k: jnp.tanh(s) + 0.1 * (k - q),
    )  # fmt: skip
    out = call(given, of)
    assert out.dtype == jnp.bfloat16
    bias = 0.1 * (np.arange(S)[None] - np.arange(T)[:, None])
    want = dense(given, of, lambda s: np.tanh(s) + bias, layout)
    got = np.asarray(out, np.float64) if layout == "BTNH" else np.swapaxes(np.asarray(out, np.float64), 1, 2)
    assert np.linalg.norm(got - want) < 4e-3 * np.linalg.norm(want)  # bfloat16 rounds out by up to 2^-9
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(given, of), np.float32), np.asarray(out, np.float32))


def test_many_calls_at_once_have_scales_of_their_own() -> None:
    given, of = (
        arrays(),
        [{"query_scales": scales((B, N), n), "value_scales": scales((B, 2, M), n + 5)} for n in range(3)],
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *of)
    call = lambda of: flexjax.flex_attention(**scaled(given, of), mask_mod=masks.causal)
    for n, out in enumerate(jax.vmap(call)(stacked)):
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(call(of[n]), np.float32), rtol=1e-2)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_heads_that_a_mesh_splits_keep_their_scales(kind: str) -> None:
    types = {"explicit": jax.sharding.AxisType.Explicit, "auto": jax.sharding.AxisType.Auto}
    mesh = jax.make_mesh((2,), ("h",), axis_types=(types[kind],))
    given = arrays()
    of = {"query_scales": scales((B, N)), "key_scales": scales((B, M), 2), "value_scales": scales((B, 6, M), 1)}
    call = lambda given, of: flexjax.flex_attention(**scaled(given, of), mask_mod=masks.causal)
    want = call(given, of)
    by = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    given = jax.device_put(given, by(None, None, "h"))
    of = {name: jax.device_put(x, by(None, *[None] * (x.ndim - 2), "h")) for name, x in of.items()}
    with jax.set_mesh(mesh):
        text = jax.jit(call).lower(given, of).compile().as_text()
        got = jax.jit(call)(given, of)
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-3)


def test_new_scales_compile_nothing() -> None:
    given, traces = arrays(), []

    @jax.jit
    def call(of: Arrays) -> jax.Array:
        traces.append(1)
        return flexjax.flex_attention(**scaled(given, of))

    for seed in range(3):
        call({"key_scales": scales((B, M), seed)})
    assert len(traces) == 1


def test_there_are_no_gradients() -> None:
    given = arrays()

    def loss(scale: jax.Array) -> jax.Array:
        out = flexjax.flex_attention(**given, score_mod=lambda s, b, h, q, k: s * scale)
        return out.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError) as caught:
        jax.grad(loss)(jnp.float32(1))
    assert str(caught.value) == (
        "A call with float8_e4m3fn inputs has no gradients. Cast the inputs to bfloat16, or put jax.lax.stop_gradient around what the "
        "call is given and what its mods capture."
    )


def test_scales_of_values_have_no_gradients() -> None:
    given = arrays()
    loss = lambda scales: flexjax.flex_attention(**scaled(given, {"value_scales": scales})).astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match="A call with float8_e4m3fn inputs has no gradients"):
        jax.grad(loss)(jnp.ones((B, M)))


@pytest.mark.parametrize("size", [1e-14, 1e4])
def test_scales_of_values_of_any_size(size: float) -> None:
    given, of = arrays(), scales((B, 6, M))
    out = flexjax.flex_attention(**scaled(given, {"value_scales": of * size}))
    want = np.asarray(flexjax.flex_attention(**scaled(given, {"value_scales": of})), np.float64) * size
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2e-2, atol=1e-3 * size)


def test_dot_product_attention_takes_none() -> None:
    given = arrays()
    with pytest.raises(ValueError, match=r"^`query`") as caught:
        flexjax.dot_product_attention(given["query"], given["key"], given["value"])
    assert str(caught.value) == (
        "`query` is float8_e4m3fn[2, 24, 4, 16]; expected a floating array of 16 bits or more. Cast it, or call flexjax.flex_attention, "
        "which takes float8 and its scales."
    )


def test_the_report_says_so() -> None:
    text = flexjax.explain(**scaled(arrays(), {"value_scales": scales((B, M))}))
    assert "float8_e4m3fn BTNH" in text
    assert "value.scales" in text.splitlines()[0]
    assert "\n  in bfloat16: xla does not multiply float8_e4m3fn.\n" in text
    assert "backward pass: none. float8_e4m3fn inputs have no gradients." in text


def test_only_the_forward_pass_is_timed() -> None:
    """There is no other; and the peak that it is compared with is that of the products, which are of bfloat16 here."""
    given: typing.Any = arrays()
    made = flexjax.profile(**given, seconds=0.0, implementation="xla")
    assert [p.name for p in made.passes] == ["forward"]
    assert made.work.bytes == B * (T * N * (D + 2 * E) + S * M * (D + E))  # out has two bytes a number
    tuning = flexjax.autotune(**given, seconds=60.0, cache=False, implementation="xla")
    assert {timing.which for timing in tuning.timings} == {"forward"}
    assert tuning.finished
    for function in (flexjax.profile, flexjax.autotune):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
            function(**given, backward=True)
        assert (
            str(caught.value) == "`backward` is True; expected False or None for float8 inputs. They have no gradients."
        )


REFUSED: dict[str, tuple[Arrays, str]] = {
    "heads": (
        {"query_scales": jnp.ones((B, 3))},
        "`query.scales` is float32[2, 3]; expected float32[2, 4], a scale for each head, or float32[2, n, 4], one for each of n blocks. "
        "n divides the 24 tokens; the first dim may be 1.",
    ),
    "blocks": (
        {"key_scales": jnp.ones((B, 5, M))},
        "`key.scales` is float32[2, 5, 2]; expected float32[2, 2], a scale for each head, or float32[2, n, 2], one for each of n blocks. "
        "n divides the 36 tokens; the first dim may be 1.",
    ),
    "integers": (
        {"value_scales": jnp.ones((B, M), jnp.int32)},
        "`value.scales` is int32[2, 2]; expected float32[2, 2], a scale for each head, or float32[2, n, 2], one for each of n blocks. "
        "n divides the 36 tokens; the first dim may be 1.",
    ),
    "a number": (
        {"value_scales": 2.0},
        "`value.scales` is a float; expected an array. Pass a jax.Array or a numpy array.",
    ),
    "dropout": (
        {"dropout": flexjax.Dropout(0.1, np.zeros(2, np.uint32))},
        "`dropout` is Dropout(0.1, uint32[2]); expected None for float8_e4m3fn inputs, which have no gradients. Train in bfloat16.",
    ),
    "extra features": (
        {"query_scales": jnp.ones((B, N)), "query_extra": jnp.ones((B, T, N, 2), FLOAT8), "key_extra": jnp.ones((B, S, M, 2), FLOAT8)},
        "`query_extra` is given beside scales; expected None. Append the features to query and key before these become float8.",
    ),
    "an origin": (
        {"query_scales": jnp.ones((B, N)), "origin": flexjax.Origin(query=4)},
        "`query.scales` is given beside an origin; expected None. Cast the arrays to bfloat16 and multiply them by their scales.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_what_does_not_fit_is_refused(which: str) -> None:
    given, message = REFUSED[which]
    with pytest.raises(ValueError, match=r"^`") as caught:
        flexjax.flex_attention(**scaled(arrays(), given))
    assert str(caught.value) == message


def test_what_takes_no_scales_says_so() -> None:
    given = scaled(arrays(), {"query_scales": scales((B, N))})
    query, key, value = (given[name] for name in ("query", "key", "value"))
    for call in (
        lambda: flexjax.dot_product_attention(query, key, value),
        lambda: flexjax.attention_weights(query, key),
        lambda: flexjax.nn.segment_attention(query, key, value, None),
    ):
        with pytest.raises(ValueError, match=r"^`") as caught:
            call()
        assert str(caught.value) == "`query` is a Quantized; expected an array. Pass a jax.Array or a numpy array."


def test_the_old_keywords_of_scales_say_what_to_write() -> None:
    with pytest.raises(TypeError) as caught:
        flexjax.explain(**arrays(), key_scales=scales((B, M)))
    assert str(caught.value) == (
        "explain() got unexpected arguments key_scales; it takes those of flex_attention. In place of `key_scales` write "
        "key=flexjax.Quantized(values, scales)."
    )


def test_shapes_stand_for_scaled_arrays() -> None:
    given = scaled(arrays(), {"query_scales": scales((B, N)), "value_scales": scales((B, M))})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    assert flexjax.explain(**shapes, mask_mod=masks.causal) == flexjax.explain(**given, mask_mod=masks.causal)
    tuning = flexjax.autotune(**shapes, seconds=0.01, cache=False, implementation="xla")
    assert tuning.timings[0].seconds is not None
    assert flexjax.profile(**given, seconds=0.0, implementation="xla").passes[0].name == "forward"


def test_scales_are_for_float8() -> None:
    given = {name: x.astype(jnp.bfloat16) for name, x in arrays().items()}
    with pytest.raises(ValueError, match=r"^`") as caught:
        flexjax.flex_attention(**scaled(given, {"key_scales": jnp.ones((B, M))}))
    assert str(caught.value) == (
        "`key.scales` is given with values of bfloat16; expected values of float8_e4m3fn. Multiply the array itself by its scales."
    )


def test_a_sequence_that_a_mesh_splits_is_refused() -> None:
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = flexjax.context_layout(masks.causal, 256, devices=2)
    x = jnp.zeros((1, 256, 2, 16), FLOAT8)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^`") as caught:
        flexjax.flex_attention(x, x, x, mask_mod=masks.causal, context=flexjax.ContextParallel("sp", layout))
    assert str(caught.value) == (
        "`query` is of dtype float8_e4m3fn beside context=; expected bfloat16. Cast query, key and value."
    )
    scaled_key = flexjax.Quantized(x, jnp.ones((1, 2)))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^`") as caught:
        flexjax.flex_attention(x, scaled_key, x, mask_mod=masks.causal, context=flexjax.ContextParallel("sp", layout))
    assert str(caught.value) == (
        "`key` is a Quantized beside context=; expected an array. Multiply its values by its scales."
    )
