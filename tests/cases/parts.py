"""A part of a call that is merged with others (`KernelPlan.partial`): how much its kernels round."""

import jax.numpy as jnp
import numpy as np

from flexjax.backends.base import Backend
from flexjax.backends.target import Target
from flexjax.plan.kernel_plan import KernelPlan, Operands
from flexjax.types import KernelOptions


def assert_a_part_is_not_rounded_to_16_bits(backend: Backend, target: Target | None, dtype: str) -> None:
    """Queries of zeros weigh all keys alike, so out is the mean of the values, and only the rounding of the result is left."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, n, h, 64)), dtype) for n, h in ((128, 2), (256, 1), (256, 1)))
    plan = KernelPlan(
        1, 2, 1, 128, 256, 64, 64, dtype, "BTNH", 1.0, partial=True, options=KernelOptions(interpret=True)
    )  # fmt: skip
    assert backend.refuses(plan, target) is None
    operands = Operands(jnp.zeros_like(q), k, v, None, None, None, (), (), (), None)
    out = np.asarray(backend.forward(plan, operands, target).float32_out)
    want = np.broadcast_to(np.asarray(v, np.float64).mean(1, keepdims=True), out.shape)
    np.testing.assert_allclose(out, want, rtol=0, atol=2.0**-14 * np.abs(want).max())
