"""Lists that may grow in the kernels of GPUs and TPUs, simulated: tiles of 128 over blocks of 32, both passes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import KernelOptions, masks
from tests.arrays import array
from tests.backends.races import races  # noqa: F401 (an autouse fixture)
from tests.marks import some_slow

T, TOLERANCE = 256, 2.0**-24
SLOPES = array([0.5, 2.0], jnp.float32)
KERNELS = {
    "mosaic_tpu": ("mosaic_tpu", KernelOptions(interpret=True)),
    "hopper": ("mosaic_gpu", KernelOptions(interpret=True)),
    "mma": ("mosaic_gpu", KernelOptions(interpret=True, instruction="mma")),
}
old_jax = jax.__version_info__ < (0, 11)


@pytest.mark.parametrize("name", some_slow(KERNELS, ()))
def test_both_passes_run_on_the_kernels(name: str) -> None:
    implementation, options = KERNELS[name]
    if implementation == "mosaic_gpu" and old_jax:
        pytest.skip("the GPU kernels need jax 0.11, which needs Python 3.12")
    rng = np.random.default_rng(0)
    q, k, v, g = (array(rng.standard_normal((1, T, n, 16)), jnp.bfloat16) for n in (2, 1, 1, 2))
    mask = flexjax.create_block_mask(masks.causal, None, None, T, T, block_size=32)
    score_mod = lambda s, b, h, i, j: s - SLOPES[h] * jnp.abs(i - j)

    def loss(arrays: Any, implementation: str, options: KernelOptions | None, tolerance: float | None) -> Any:
        out = flexjax.flex_attention(
            *arrays, score_mod=score_mod, block_mask=mask, tolerance=tolerance, implementation=implementation,
            kernel_options=options,
        )  # fmt: skip
        return jnp.sum((out * g).astype(jnp.float32)), out

    step = functools.partial(jax.value_and_grad(loss, has_aux=True), (q, k, v))
    (_, out), found = step(implementation, options, TOLERANCE)
    (_, want), wanted = step("reference", None, None)
    np.testing.assert_allclose(out.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=6e-2)
