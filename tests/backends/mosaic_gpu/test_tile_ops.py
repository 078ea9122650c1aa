"""Rewritten operations at the edges of float32 against jax's own, as plain functions of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax.backends.mosaic_gpu.programs import tile_ops
from flexjax.trace.trace_mod import trace_score_mod

EDGES = np.array([0.0, 1.0, -1.0, 88.9, -88.9, 1e10, -1e10, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "acosh")


@pytest.mark.parametrize(
    "prim",
    ["exp", "exp2", "log", "tanh", "sqrt", "rsqrt", "logistic", "log1p", "expm1", "floor", "ceil", "erf", "erfc", "cbrt", "sinh", "cosh",
     "asinh", "atan", "is_finite", "erf_inv"],
)  # fmt: skip
def test_edges(prim: str) -> None:
    x = EDGES[~(EDGES < 0)] if prim in POSITIVE else EDGES
    got, want = tile_ops.FLOAT_UNARY[prim](jnp.asarray(x)), getattr(lax, prim)(x)
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_erf_inv_from_one_end_to_the_other() -> None:
    x = np.concatenate([np.linspace(-1, 1, 401), [1e-30, 1e-6, 1 - 6e-8, 6e-8 - 1, 0.999999]]).astype(np.float32)
    np.testing.assert_allclose(tile_ops.FLOAT_UNARY["erf_inv"](jnp.asarray(x)), lax.erf_inv(x), rtol=1e-5)


def test_powers_at_edges() -> None:
    x, y = (
        jnp.asarray(v)
        for v in np.broadcast_arrays(EDGES[:, None], np.array([0, 1, 2, -1, 0.5, np.inf, -np.inf, np.nan], np.float32))
    )
    np.testing.assert_allclose(tile_ops._pow(x, y), jnp.power(x, y), rtol=2e-5)


@pytest.mark.parametrize(("bits", "compared"), [(31, False), (32, True), (-1, True)])
def test_a_shift_by_a_number_past_the_width_is_no_shift_of_the_device(bits: int, compared: bool) -> None:
    """jax gives 0 there; LLVM leaves such a shift undefined, so that a kernel must not have it."""
    mod = lambda s, b, h, q, k: s + lax.shift_left(q, jnp.int32(bits)).astype(jnp.float32)
    (step,) = [x for x in trace_score_mod(mod, (1, 1, 8, 8)).program.steps if getattr(x, "prim", "") == "shift_left"]
    shifted = lambda x: tile_ops.apply(step, [x, jnp.full_like(x, bits)], False)
    assert ("select_n" in str(jax.make_jaxpr(shifted)(jnp.arange(8)))) == compared
    np.testing.assert_array_equal(shifted(jnp.arange(8)), lax.shift_left(jnp.arange(8), bits))


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8"])
def test_arithmetic_shifts_copy_the_top_bit_of_narrow_integers(dtype: str, bits: int) -> None:
    amount = jnp.asarray(bits, dtype)
    mod = lambda s, b, h, q, k: s + lax.shift_right_arithmetic(q.astype(dtype), amount).astype(jnp.float32)
    found = [x for x in trace_score_mod(mod, (1, 1, 8, 8)).program.steps if getattr(x, "prim", "").startswith("shift_")]
    ends = np.iinfo(dtype)
    x = np.array([ends.min, 0, 100, ends.max // 2 + 1, ends.max], dtype)
    got = jnp.asarray(x, jnp.int32)
    for step in found:
        got = tile_ops.apply(step, [got, jnp.full_like(got, bits)], False)
    np.testing.assert_array_equal(got, lax.shift_right_arithmetic(jnp.asarray(x), jnp.full(x.shape, bits, dtype)))
