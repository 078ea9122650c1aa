"""Score mods that compute in float64 for queries of 16 bits: which become float32, what they give, and what stays as it is."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax.ir.single_precision import in_single_precision
from flexjax.ir.verify import check
from flexjax.trace.trace_mod import TracedMod, trace_score_mod
from tests.arrays import array

SIZES = (1, 2, 5, 6)
SLOPES = np.linspace(0.25, 0.75, 2)
PAIR = np.cos(np.arange(30.0)).reshape(5, 6)


def rounded(score_mod: typing.Callable) -> tuple[TracedMod, tuple | None]:
    """The traced mod under x64, and its programs in float32."""
    with jax.enable_x64(True):
        traced = trace_score_mod(score_mod, SIZES)
        programs = in_single_precision([p for p in (traced.program, traced.derivative) if p is not None])
    return traced, programs


ROUNDED: dict[str, typing.Callable] = {
    "a table": lambda s, b, h, q, k: s + jnp.asarray(PAIR)[q, k],
    "slopes and distances": lambda s, b, h, q, k: s - jnp.asarray(SLOPES)[h] * jnp.abs(q - k),
    "a numpy number": lambda s, b, h, q, k: np.float64(30.0) * jnp.tanh(s / np.float64(30.0)),
    "where and maximum": lambda s, b, h, q, k: jnp.maximum(jnp.where(q >= k, s, np.float64(-np.inf)), np.float64(-9.0)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_programs_in_float32(name: str) -> None:
    traced, programs = rounded(ROUNDED[name])
    assert programs is not None
    assert "float64" in str(traced.program)
    for program in programs:
        check(program)
        assert "float64" not in str(program)
    assert traced.derivative is not None
    assert len(programs[1].results) == len(traced.derivative.results)
    assert len(programs[1].gradients) == len(traced.derivative.gradients)


KEPT: dict[str, typing.Callable] = {
    "float32 alone": lambda s, b, h, q, k: s * jnp.float32(2.0),
    "a comparison": lambda s, b, h, q, k: jnp.where(jnp.asarray(PAIR)[q, k] > np.float64(0.5), s, -s),
    "a rounding": lambda s, b, h, q, k: s + jnp.floor(jnp.asarray(PAIR)[q, k]),
    "as an index": lambda s, b, h, q, k: s + jnp.asarray(SLOPES, jnp.float32)[jnp.asarray(PAIR)[q, k].astype(jnp.int32) % 2],
    "a number beyond float32": lambda s, b, h, q, k: s + jnp.where(q >= k, 0.0, np.finfo(np.float64).min),
    "bits of an integer": lambda s, b, h, q, k: s
    + jax.lax.bitcast_convert_type(k.astype(jnp.int64) + 0x3FF0000000000000, jnp.float64),
    "a loop": lambda s, b, h, q, k: jax.lax.while_loop(lambda x: x > 9.0, lambda x: x / 2, s.astype(jnp.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_programs_that_stay(name: str) -> None:
    assert rounded(KEPT[name])[1] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_result_and_the_gradient_of_a_float64_table(dtype: str) -> None:
    """Of 16-bit inputs as of the same table in float32; float32 inputs keep float64. The gradient has the dtype of the table."""
    with jax.enable_x64(True):
        x = array(np.random.default_rng(0).standard_normal((1, 6, 2, 8)), dtype)
        tables = jnp.asarray(np.resize(PAIR, (6, 6)) / 3), jnp.asarray(np.resize(PAIR, (6, 6)) / 3, jnp.float32)

        def loss(table: jax.Array) -> jax.Array:
            mod = lambda s, b, h, q, k: s + table[q, k]
            return (flexjax.flex_attention(x, x, x, score_mod=mod).astype(jnp.float32) ** 2).sum()

        (wide, wide_gradient), (narrow, gradient) = (jax.jit(jax.value_and_grad(loss))(t) for t in tables)
        assert wide_gradient.dtype == jnp.float64
        assert (np.asarray(wide_gradient) == np.asarray(gradient)).all() == (dtype == "bfloat16")
        np.testing.assert_allclose(wide, narrow, rtol=1e-6)
        np.testing.assert_allclose(wide_gradient, gradient, atol=1e-5)


def test_known_ids_of_documents_are_int32() -> None:
    """Under x64 too, for arrays of numpy and of jax; beyond int32, and where they are traced, they stay int64."""
    with jax.enable_x64(True):
        dtype = lambda ids: flexjax.create_block_mask(flexjax.masks.document(ids), 1, 1, 4, 4).captures[0].dtype
        ids = np.arange(4)
        assert dtype(ids) == dtype(jnp.asarray(ids)) == jnp.int32
        assert dtype(ids << 40) == jnp.int64
        assert jax.eval_shape(lambda ids: jnp.zeros(3, dtype(ids)), jnp.asarray(ids)).dtype == jnp.int64
