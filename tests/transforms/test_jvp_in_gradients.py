"""A step of MeanFlow: the gradient of a loss that holds a tangent as a constant. Results come from the kernels, tangents from xla."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flexjax
from flexjax import FallbackWarning
from flexjax.passes import dispatch
from tests.transforms.test_platforms import H200, KERNEL, V6E, needs_gpu_kernels, program


def loss(x: jax.Array, implementation: flexjax.Implementation | None = None) -> jax.Array:
    network = lambda x: flexjax.flex_attention(x, x, x, implementation=implementation)
    out, moved = jax.jvp(network, (x,), (jnp.ones_like(x),))
    return ((out - jax.lax.stop_gradient(moved)).astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize(
    "device", [pytest.param(H200, marks=needs_gpu_kernels), V6E], ids=lambda device: str(device.platform)
)
def test_the_passes_run_on_kernels(device: jax.sharding.AbstractDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the tangent says that it does not."""
    monkeypatch.setattr(dispatch, "_warned", set())
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        text = program(jax.grad(loss), device, x)
        alone = program(jax.grad(lambda x: flexjax.flex_attention(x, x, x).astype(jnp.float32).sum()), device, x)
    said = [str(w.message) for w in seen if issubclass(w.category, FallbackWarning)]
    assert len(said) == 1
    assert re.match(r"The tangent \(forward mode\) of a call runs on xla, not on the kernels of", said[0])
    assert text.count(KERNEL[device]) == alone.count(KERNEL[device]) > 1


def test_the_step_is_that_of_the_reference() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 33, 2, 8)), jnp.float32)
    got, want = (jax.jit(jax.value_and_grad(lambda x, name=name: loss(x, name)))(x) for name in ("xla", "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    loops = str(jax.make_jaxpr(jax.grad(lambda x: loss(x, "xla")))(x)).count("scan[")
    assert loops == 0  # none is inlined
