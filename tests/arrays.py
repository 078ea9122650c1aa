"""Arrays of the tests on the device."""

from typing import Any

import jax
import numpy as np


def array(x: Any, dtype: Any = None) -> jax.Array:
    """As `jnp.asarray(x, dtype)` of what numpy holds. numpy converts it: `jnp.asarray` compiles a program for each shape."""
    return jax.device_put(np.asarray(x, dtype))
