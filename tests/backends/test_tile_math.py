"""tile_math.py: what several backends compute in the same way."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p

from flexjax.backends import tile_math


def test_a_fused_product_does_not_make_a_weight_infinite() -> None:
    """A GPU subtracts the rounded number from the exact product, which is up to 512 away beside 1e10 and 2^76 beside 1e30."""
    exact = np.asarray([1.4426950e10 + 512, -1.4426950e10 - 300, 3.25, -7.75, 8.0, 1.4e30 + 2.0**76])
    whole = np.asarray([1.4426950e10, -1.4426950e10, 4.0, -7.0, 8.0, 1.4e30])
    got = tile_math.power_below(jnp.asarray(exact - whole, jnp.float32), jnp.zeros(6, jnp.float32))
    np.testing.assert_array_equal(got, np.asarray([0, -1, -0.75, -0.75, 0, 0], np.float32))


def test_infinite_powers_have_no_fraction() -> None:
    power = jnp.asarray([jnp.inf, -jnp.inf], jnp.float32)
    np.testing.assert_array_equal(tile_math.power_below(power, jnp.ceil(power)), 0.0)


def test_weights_are_rounded_below_a_power_of_two() -> None:
    """1/3 of a row whose lse is 1.5 in base 2: 2^-0.5 / 3 rounds to 0.2353515625 in bfloat16."""
    got = tile_math.rounded_weights(jnp.float32(1 / 3), jnp.float32(1.5), "bfloat16")
    np.testing.assert_allclose(got, 0.2353515625 * 2**0.5, rtol=1e-6)


SPECIAL = np.asarray([-np.nan, -np.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("name", tile_math.TOTAL_ORDER)
def test_total_order_is_that_of_xla(name: str) -> None:
    SPECIAL[[0, -1]] = np.asarray([0xFFC00000, 0x7FC00000], np.uint32).view(np.float32)  # the sign of a NaN counts
    x, y = (jnp.asarray(np.broadcast_to(a, (10, 10))) for a in (SPECIAL[:, None], SPECIAL))
    wanted = getattr(lax, f"{name}_p").bind(x, y)
    np.testing.assert_array_equal(tile_math.TOTAL_ORDER[name](x, y), wanted)


@pytest.mark.parametrize("words", [(0, 0, 0, 0), (1, 2, 3, 4), (2**32 - 1,) * 4])
def test_threefry2x32_is_that_of_jax(words: tuple[int, ...]) -> None:
    given = [jnp.asarray([word], jnp.uint32) for word in words]
    np.testing.assert_array_equal(tile_math.threefry2x32(*given), threefry2x32_p.bind(*given))
