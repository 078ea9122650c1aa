"""The polynomial that stands in for part of the exponentials, as the kernel computes it, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12", allow_module_level=True)

from flexjax.backends.mosaic_gpu.machine.exponential import LOWEST, exp2_polynomial
from tests.arrays import array


def test_relative_error() -> None:
    x = np.linspace(-125.4, 120.0, 400_001).astype(np.float32)
    got = np.asarray(jax.jit(exp2_polynomial)(x), np.float64)
    want = np.exp2(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 3e-6


def test_whole_numbers_are_exact() -> None:
    x = np.arange(-126.0, 128.0, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(exp2_polynomial(x)), np.exp2(x.astype(np.float64)).astype(np.float32))


def test_what_is_switched_off_is_zero() -> None:
    x = array([-jnp.inf, -1e30, -200.0, LOWEST], jnp.float32)
    np.testing.assert_array_equal(np.asarray(exp2_polynomial(x)), np.zeros(4, np.float32))


def test_just_above_the_cut_it_is_tiny_and_never_negative() -> None:
    x = np.linspace(LOWEST, -125.0, 10_001).astype(np.float32)
    got = np.asarray(exp2_polynomial(x), np.float64)
    assert (got >= 0).all()
    assert (got <= 2.0**-124).all()


def test_nan_does_not_become_an_ordinary_number() -> None:
    assert not abs(float(exp2_polynomial(jnp.float32(jnp.nan)))) < 1e30
