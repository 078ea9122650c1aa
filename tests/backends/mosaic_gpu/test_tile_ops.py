"""Rewritten operations at the edges of float32 against jax's own, as plain functions of arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flexjax.backends.mosaic_gpu import tile_ops

EDGES = np.array([0.0, 1.0, -1.0, 88.9, -88.9, 1e10, -1e10, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "acosh")


@pytest.mark.parametrize(
    "prim",
    ["exp", "exp2", "log", "tanh", "sqrt", "rsqrt", "logistic", "log1p", "expm1", "floor", "ceil", "erf", "erfc", "cbrt", "sinh", "cosh",
     "asinh", "atan", "is_finite"],
)  # fmt: skip
def test_edges(prim: str) -> None:
    x = EDGES[~(EDGES < 0)] if prim in POSITIVE else EDGES
    got, want = tile_ops.FLOAT_UNARY[prim](jnp.asarray(x)), getattr(lax, prim)(x)
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_powers_at_edges() -> None:
    x, y = (
        jnp.asarray(v)
        for v in np.broadcast_arrays(EDGES[:, None], np.array([0, 1, 2, -1, 0.5, np.inf, -np.inf, np.nan], np.float32))
    )
    np.testing.assert_allclose(tile_ops._pow(x, y), jnp.power(x, y), rtol=2e-5)
